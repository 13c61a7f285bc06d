"""Reads a server's description of itself, and its scores of prompts in each form that servers use.

prompt_logprobs   {"prompt": ids, "prompt_logprobs": k}    a list: null, then {id: {"logprob": …}} for each token
echo              {"prompt": ids, "echo": true, …}         lists of the tokens and their log-probabilities, null first

Position 0 has no context and no score. Every answer is checked: it has as many positions as tokens, the ids that were
sent, and possible log-probabilities. A server writes -9999 for minus infinity, because JSON has no infinity.

A scoring service gives more facts than other servers: all facts that decide its numbers, except the weights.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from scoremode.core.scores.packing import VERSION
from scoremode.engines.server.link import ANYTHING, NOT_JSON, SMALL, Link
from scoremode.engines.server.server_options import root_of
from scoremode.errors import EngineError, ModelError, ScoremodeError, harmless
from scoremode.values import Floats

COMPLETIONS, MODELS, SERVICE = "/v1/completions", "/v1/models", "/v1/scoremode"
FIRST_WORD_SECONDS = 10.0  # how long to wait for a server that may not be a service
BUSY = 503
BYTES_PER_TOKEN = 2048  # limit for an answer; a token and its score take about a hundred bytes
FIRST_IDS = (1, 2, 3)  # ids that every vocabulary has
SHOWN = 8  # how many served names an error lists
LONGEST_NAME = 4096  # characters; a name may be a path
LONGEST_TEXT = 500  # characters of any other text from a server
FLOOR = -9999.0  # this value and lower ones mean probability zero
ROUNDING = 1e-4  # nats; a log-probability may be this far above 0
MOST = 20  # how many of the likeliest tokens servers give by default


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's description of itself. Two servers with equal facts count as the same one."""

    model: str  # the name to use in requests
    root: str | None  # what the server loaded under that name: a folder, or a name on the hub
    max_model_len: int | None
    version: str | None
    system_fingerprint: str | None  # covers version, configuration and parallelism

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def look(link: Link, model: str, *, first_contact: bool = False) -> ServerFacts:
    """Requests a server's facts about a model. The fingerprint is missing: it comes with the first scores."""
    reply = link.get(MODELS, first_contact=first_contact)
    listed = reply.fields.get("data")
    entries = [e for e in listed if _has_name(e)] if isinstance(listed, list) else []
    if not entries:
        said = f"{reply.status}{': ' + reply.words if reply.words else ''}" if not reply.good else "it lists no model"
        raise _unfit(link, model, f"{link.root}{MODELS} names no model ({said})")
    found = next((e for name in ("id", "root") for e in entries if e.get(name) == model), None)
    if found is None:
        names = [harmless(e["id"])[:200] for e in entries]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ModelError(f"{link.root} does not serve '{model}'", fix=f"it serves {', '.join(names[:SHOWN])}{more}")
    length = found.get("max_model_len")
    if length is not None and not (type(length) is int and 0 < length < 1 << 31):
        raise EngineError(
            f"{link.root}{MODELS} names a max_model_len that no model has ({harmless(str(length))[:40]})",
            fix="see to the server",
        )
    version = _text(link.get("/version", final=ANYTHING).fields, "version")
    return ServerFacts(found["id"], _text(found, "root"), length, version, None)


def _has_name(entry: Any) -> bool:
    """Does this entry have a model name that is safe to send in a request and to show on a terminal?"""
    name = entry.get("id") if isinstance(entry, dict) else None
    return isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and harmless(name) == name


def _text(found: dict[str, Any], name: str) -> str | None:
    value = found.get(name)
    return harmless(value)[:LONGEST_TEXT] if isinstance(value, str) and value else None


# ── scoring services ─────────────────────────────────────────────────────────────────────────────────────────────────
Count = Annotated[int, msgspec.Meta(gt=0, lt=1 << 48)]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request to a service."""

    body_bytes: Count
    windows: Count


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """A scoring service's description of itself."""

    instance: str
    dtype: str
    device: str
    head: str
    vocabulary: Count
    max_model_len: Count
    batch_tokens: Count
    versions: dict[str, str]
    settings: dict[str, str | int | float | bool | None]
    notes: tuple[str, ...]
    probe: tuple[float, ...]  # scores of a fixed prompt
    limits: RequestLimits

    def identity(self) -> dict[str, Any]:
        """Returns the facts that decide the numbers of this service, apart from the weights."""
        names = ("dtype", "device", "head", "vocabulary", "max_model_len", "versions", "settings")
        return {name: getattr(self, name) for name in names}


def find_service(link: Link) -> ServiceFacts | None:
    """Returns the facts of the scoring service behind a link, or None if it is another kind of server."""
    said = _about(link)
    version = said.get("messages")
    if version is None:
        return None
    if version != VERSION:
        raise EngineError(
            f"the service at {link.root} speaks version {str(version)[:20]}, and this is version {VERSION}",
            fix="use one version of scoremode on both sides",
        )
    try:
        return msgspec.convert(_printable(said), ServiceFacts)
    except msgspec.ValidationError as error:
        raise _not_a_service(link, str(error)) from None


def is_service(address: str) -> bool | None:
    """Is the server at an address a scoring service? None if it does not answer, or requires a key to answer."""
    try:
        link = Link(root_of(address), None, timeout=FIRST_WORD_SECONDS, patience=0.0)
        with contextlib.closing(link):
            return "messages" in _about(link)
    except ScoremodeError:
        return None


def _about(link: Link) -> dict[str, Any]:
    """Returns the answer at the path that only scoring services have; empty if the server is not a scoring service."""
    reply = link.get(SERVICE, final=ANYTHING - {BUSY})
    if reply.good and reply.wrong not in ("", NOT_JSON):  # it is JSON, but unusable
        raise _not_a_service(link, reply.wrong)
    return reply.fields


def _not_a_service(link: Link, why: str) -> EngineError:
    return EngineError(
        f"{link.root}{SERVICE} lacks facts that a scoring service must give ({why[:120]})",
        fix="use one version of scoremode on both sides",
    )


def _printable(value: Any) -> Any:
    """Returns the same value with every text shortened and made safe to print on a terminal."""
    if isinstance(value, dict):
        return {_printable(name): _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return harmless(value)[:LONGEST_TEXT] if isinstance(value, str) else value


# ── forms ────────────────────────────────────────────────────────────────────────────────────────────────────────────
Numbers = tuple[list[Any], list[list[Any]] | None]
"""The log-probabilities of tokens 1, 2, …, and those of the most likely tokens if they were asked for."""


class WrongAnswerError(Exception):
    """An answer does not fit the request."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """A prompt's scores."""

    logprob: Floats  # (n - 1,) of tokens 1, 2, …, n-1
    model: str | None
    fingerprint: str | None
    largest: list[list[float]] | None = None  # for each position, the log-probabilities of the most likely tokens


@dataclass(frozen=True, slots=True)
class Form:
    """One way to request a prompt's scores: ``prompt_logprobs``, or ``echo`` with ``logprobs``."""

    name: str
    echo: bool

    def body(self, model: str, ids: Sequence[int], most: int = 0) -> dict[str, Any]:
        """Returns the body of a request; ``most`` also requests the log-probabilities of that many likeliest tokens."""
        asked = {"model": model, "prompt": list(ids), "temperature": 0}
        if not self.echo:
            return {**asked, "max_tokens": 1, "prompt_logprobs": most}
        return {**asked, "max_tokens": 0, "echo": True, "logprobs": max(1, most), "return_tokens_as_token_ids": True}

    def read(self, link: Link, value: Any, ids: Sequence[int], most: int = 0) -> PromptScores:
        """Reads the scores in an answer with finite numbers. Raises WrongAnswerError if it does not fit the request."""
        choices = value.get("choices") if isinstance(value, dict) else None
        if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
            raise WrongAnswerError("it has no single choice")
        numbers, largest = (_echoed if self.echo else _prompt_logprobs)(choices[0], ids, most)
        for one in (numbers, *(largest or ())):
            if not all(type(x) in (float, int) for x in one):
                raise WrongAnswerError("a log-probability is not a number")
        logprob = np.array(numbers, np.float64)
        if (logprob > ROUNDING).any():
            raise not_logprobs(link, f"it gives {float(logprob.max()):.3g} as a log-probability")
        if any(x > ROUNDING for likely in largest or () for x in likely):
            raise not_logprobs(link, "it gives numbers above 0 as log-probabilities")
        logprob = np.where(logprob <= FLOOR, -np.inf, np.minimum(logprob, 0.0))
        said = [value.get(name) for name in ("model", "system_fingerprint")]
        model, fingerprint = (harmless(text)[:LONGEST_NAME] if isinstance(text, str) else None for text in said)
        return PromptScores(logprob, model, fingerprint, largest)


FORMS = (Form("prompt_logprobs", echo=False), Form("echo", echo=True))
"""All forms, the best one first. Answers in each of them name the tokens that they are about."""


def _echoed(choice: dict[str, Any], ids: Sequence[int], most: int) -> Numbers:
    found = choice.get("logprobs")
    if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
        raise WrongAnswerError("it has no logprobs of the prompt")
    listed = found["token_logprobs"]
    _require_positions(listed, len(ids))
    if found.get("tokens") != [f"token_id:{i}" for i in ids]:
        raise WrongAnswerError("it is not about the tokens that were sent")
    if not most:
        return listed[1:], None
    likely = found.get("top_logprobs")
    if not isinstance(likely, list) or len(likely) != len(ids) or not all(isinstance(one, dict) for one in likely[1:]):
        raise WrongAnswerError("it has no top_logprobs of the prompt")
    return listed[1:], [list(one.values()) for one in likely[1:]]


def _prompt_logprobs(choice: dict[str, Any], ids: Sequence[int], most: int) -> Numbers:
    """Reads an answer with one dictionary per token, in which the token's own id must be a key."""
    listed = choice.get("prompt_logprobs")
    if not isinstance(listed, list):
        raise WrongAnswerError("it has no prompt_logprobs")
    _require_positions(listed, len(ids))
    try:
        numbers = [listed[i][str(ids[i])]["logprob"] for i in range(1, len(ids))]
        return numbers, [[entry["logprob"] for entry in found.values()] for found in listed[1:]] if most else None
    except (KeyError, TypeError, AttributeError):
        raise WrongAnswerError("a score is not about the token that was sent") from None


def _require_positions(listed: list[Any], wanted: int) -> None:
    if len(listed) != wanted:
        raise WrongAnswerError(f"it has {len(listed)} positions for {wanted} tokens")
    if listed[0] is not None:
        raise WrongAnswerError("the first token has a score, and nothing precedes it")


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class RefusedError(Exception):
    """The server refuses a request. The message has the HTTP status and the server's words."""


def ask(link: Link, form: Form, model: str, ids: Sequence[int], most: int = 0, **how: Any) -> PromptScores:
    """Requests the scores of one prompt. Raises RefusedError or WrongAnswerError if the answer has none."""
    reply = link.post(COMPLETIONS, form.body(model, ids, most), **how)
    if not reply.good:
        raise RefusedError(f"{reply.status}: {reply.words}")
    return form.read(link, reply.value, ids, most)


def score(link: Link, form: Form, model: str, ids: Sequence[int]) -> PromptScores:
    """Requests the scores of one prompt. Raises EngineError if the server refuses, or its answer does not fit."""
    try:
        return ask(link, form, model, ids, largest=SMALL + BYTES_PER_TOKEN * len(ids))
    except RefusedError as refused:
        said = str(refused)
        raise EngineError(f"the server refuses a prompt of {len(ids)} tokens ({said})", fix=_fix(said)) from None
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


def find_form(link: Link, model: str) -> tuple[Form, PromptScores]:
    """Returns the first form that this server understands, and the scores that the server gave in this form."""
    reasons = []
    for form in FORMS:
        try:
            return form, ask(link, form, model, FIRST_IDS, final=frozenset({500, 501}))
        except (RefusedError, WrongAnswerError) as wrong:
            reasons.append(f"{form.name}: {wrong}")
    raise _unfit(link, model, f"{link.root} does not score prompts ({reasons[0]}; {reasons[-1]})")


def _unfit(link: Link, model: str, why: str) -> EngineError:
    """The error for a server that cannot score prompts. Of llama-server and Ollama, it names the file that can be."""
    props = link.get("/props", final=ANYTHING).fields
    if "default_generation_settings" in props:
        name, file = "a llama-server", props.get("model_path")
        scored = shlex.quote(harmless(file)) if isinstance(file, str) and file else "MODEL.gguf"
    elif isinstance(link.get("/api/version", final=ANYTHING).fields.get("version"), str):
        name, scored = "Ollama", shlex.quote(f"ollama:{model}")
    else:
        return EngineError(why, fix="give the address of a server that has prompt_logprobs, or echo with logprobs")
    return EngineError(
        f"{link.root} is {name}, which scores the tokens that it generates, not those of a text",
        fix=f"score its file by llama.cpp, as it is served, on the server's machine: scoremode ppl {scored}",
    )
