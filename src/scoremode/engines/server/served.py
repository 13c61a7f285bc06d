"""Who is there: the model that a server serves, its version, and the form in which it scores prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scoremode.engines.server.forms import FORMS, Form, LogitsError, Scored, WrongAnswerError
from scoremode.engines.server.link import ANYTHING, SMALL, Link
from scoremode.errors import EngineError, ModelError, harmless

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
BYTES_PER_TOKEN = 2048  # of an answer; a token and its score take about a hundred
FIRST_IDS = (1, 2, 3)  # every vocabulary has these
SHOWN = 8  # served names in an error
LONGEST_NAME = 4096  # characters; a name may be a path


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself: what makes it the same server, wherever it runs."""

    model: str  # the name to ask for
    root: str | None  # what was loaded under that name: a folder, or a name on the hub
    max_model_len: int | None
    version: str | None
    system_fingerprint: str | None  # of version, configuration and parallelism

    def facts(self) -> dict[str, Any]:
        """Everything that it said."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def look(link: Link, model: str, *, first_contact: bool = False) -> Served:
    """The served model of that name. Its fingerprint comes with the first scores."""
    reply = link.get(MODELS, first_contact=first_contact)
    listed = reply.value.get("data") if reply.good and isinstance(reply.value, dict) else None
    entries = [e for e in listed if _has_name(e)] if isinstance(listed, list) else []
    if not entries:
        said = f"{reply.status}{': ' + reply.words if reply.words else ''}" if not reply.good else "it lists no model"
        raise _unfit(link, f"{link.root}{MODELS} names no model ({said})")
    found = next((e for name in ("id", "root") for e in entries if e.get(name) == model), None)
    if found is None:
        names = [harmless(e["id"])[:200] for e in entries]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ModelError(f"{link.root} does not serve '{model}'", fix=f"it serves {', '.join(names[:SHOWN])}{more}")
    return Served(found["id"], _text(found, "root"), _length(link, found), _version(link), None)


def _has_name(entry: Any) -> bool:
    """Is this a model that can be named, in a request and on a terminal?"""
    name = entry.get("id") if isinstance(entry, dict) else None
    return isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and harmless(name) == name


def _version(link: Link) -> str | None:
    reply = link.get("/version", final=ANYTHING)
    return _text(reply.value, "version") if reply.good and isinstance(reply.value, dict) else None


def _text(found: dict[str, Any], name: str) -> str | None:
    value = found.get(name)
    return harmless(value)[:500] if isinstance(value, str) and value else None


def _length(link: Link, found: dict[str, Any]) -> int | None:
    value = found.get("max_model_len")
    if value is None or (type(value) is int and 0 < value < 1 << 31):
        return value
    raise EngineError(
        f"{link.root}{MODELS} names a max_model_len that no model has ({harmless(str(value))[:40]})",
        fix="see to the server",
    )


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def score(link: Link, form: Form, model: str, ids: Sequence[int], most: int = 0) -> Scored:
    """The scores of one prompt; an error of one line where the server refuses it or answers something else."""
    room = SMALL + BYTES_PER_TOKEN * (most + 1) * len(ids)
    reply = link.post(COMPLETIONS, form.body(model, ids, most), largest=room)
    if not reply.good:
        raise EngineError(
            f"the server refuses a prompt of {len(ids)} tokens ({reply.status}: {reply.words})", fix=_fix(reply.words)
        )
    try:
        return form.read(reply.value, ids, most)
    except LogitsError as wrong:
        raise not_logprobs(link, str(wrong)) from None
    except WrongAnswerError as wrong:
        raise EngineError(
            f"{link.root} gave an answer that does not fit the question: {wrong}",
            fix="this is a fault of the server; what is scored is kept",
        ) from None


def _fix(words: str) -> str:
    if "vocabulary" in words or "token id" in words.lower():
        return "the tokenizer does not belong to this model: give the right one with --tokenizer"
    if "not exist" in words:
        return "it serves another model now: start it as it was and run the same command again to resume"
    if "context" in words or "length" in words:
        return "give a smaller --context-length"
    return "see the server's log"


def not_logprobs(link: Link, why: str) -> EngineError:
    return EngineError(
        f"{link.root} does not answer with log-probabilities ({why})",
        fix="they look like logits: start the server with --logprobs-mode raw_logprobs",
    )


def find_form(link: Link, model: str) -> tuple[Form, Scored]:
    """The first form that this server understands, and its first scores."""
    reasons = []
    for form in FORMS:
        reply = link.post(COMPLETIONS, form.body(model, FIRST_IDS), final=frozenset({500, 501}))
        try:
            if reply.good:
                return form, form.read(reply.value, FIRST_IDS)
            reasons.append(f"{form.name}: {reply.status} {reply.words}")
        except LogitsError as wrong:
            raise not_logprobs(link, str(wrong)) from None
        except WrongAnswerError as wrong:
            reasons.append(f"{form.name}: {wrong}")
    raise _unfit(link, f"{link.root} does not score prompts ({reasons[0]}; {reasons[-1]})")


def _unfit(link: Link, why: str) -> EngineError:
    """A server that cannot score a prompt: named where it is known, with what to do instead."""
    said = {path: link.get(path, final=ANYTHING) for path in ("/props", "/api/version")}
    props, version = (reply.value if reply.good and isinstance(reply.value, dict) else {} for reply in said.values())
    is_known = "default_generation_settings" in props or isinstance(version.get("version"), str)
    if not is_known:
        return EngineError(why, fix="give the address of a server that has prompt_logprobs, or echo with logprobs")
    name = "a llama-server" if "default_generation_settings" in props else "Ollama"
    return EngineError(
        f"{link.root} is {name}, which scores the tokens that it generates, not those of a text",
        fix="score the .gguf file itself: scoremode ppl MODEL.gguf",
    )
