"""Reads a server's description of itself, and asks it for scores of prompts.

A scoring service gives more facts than other servers: all facts that decide its numbers, except the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec

from scoremode.core.scores.messages import VERSION
from scoremode.engines.server.forms import FORMS, LONGEST_NAME, Form, PromptScores, WrongAnswerError
from scoremode.engines.server.link import ANYTHING, NOT_JSON, SMALL, Link
from scoremode.engines.server.server_options import root_of
from scoremode.errors import EngineError, ModelError, ScoremodeError, harmless

MODELS, SERVICE, SGLANG = "/v1/models", "/v1/scoremode", ("/server_info", "/get_server_info")
FIRST_WORD_SECONDS = 10.0  # how long to wait for a server that may not be a service
BUSY = 503
BYTES_PER_TOKEN = 2048  # limit for an answer; a token and its score take about a hundred bytes
FIRST_IDS = (1, 2, 3)  # ids that every vocabulary has
DECIDING = (  # settings of SGLang that may move its numbers
    *("dtype", "quantization", "kv_cache_dtype", "enable_fp32_lm_head", "attention_backend", "moe_runner_backend"),
    *("tp_size", "pp_size", "dp_size", "ep_size", "chunked_prefill_size", "enable_deterministic_inference"),
    *("revision", "weight_version", "load_format", "json_model_override_args", "torchao_config"),
)
SERVERS = (
    "give the address of a server that has prompt_logprobs, echo with logprobs, or SGLang's /generate; "
    "llama-server and Ollama have none of these: score their GGUF file itself, without --engine"
)
SHOWN = 8  # how many served names an error lists
MOST = 20  # how many of the likeliest tokens servers give by default


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's description of itself. Two servers with equal facts count as the same one."""

    model: str  # the name to use in requests
    root: str | None  # what the server loaded under that name: a folder, or a name on the hub
    max_model_len: int | None
    version: str | None
    system_fingerprint: str | None  # covers version, configuration and parallelism
    settings: Mapping[str, Any] = field(default_factory=dict)  # what SGLang says instead of a fingerprint

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is known of the logits behind the scores."""
        if "dtype" not in self.settings:
            return ()
        if self.settings["dtype"] is None:
            return ("the server does not say its dtype",)
        head = "float32" if self.settings.get("enable_fp32_lm_head") is True else "the served type"
        more = "" if head == "float32" else " (--enable-fp32-lm-head of the server would not round them)"
        return (f"SGLang computes logits in {head}{more} and log-probabilities in float32",)


class ListedModel(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] | None = None
    owned_by: str | None = None


class ModelList(msgspec.Struct):
    data: Annotated[list[ListedModel], msgspec.Meta(min_length=1)]


def look(link: Link, model: str, *, first_contact: bool = False) -> ServerFacts:
    """Requests a server's facts about a model. The fingerprint is missing: it comes with the first scores."""
    reply = link.get(MODELS, first_contact=first_contact)
    try:
        listed = msgspec.convert(_printable(reply.fields), ModelList).data
    except msgspec.ValidationError as error:
        reason = str(error) if reply.good else f"{reply.status}{': ' + reply.words if reply.words else ''}"
        raise EngineError(f"{link.root}{MODELS} names no model ({reason})", fix=SERVERS) from None
    entry = next((entry for name in ("id", "root") for entry in listed if getattr(entry, name) == model), None)
    if entry is None:
        more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
        fix = f"it serves {', '.join(entry.id[:200] for entry in listed[:SHOWN])}{more}"
        raise ModelError(f"{link.root} does not serve '{model}'", fix=fix)
    facts = _printable(link.get("/version", final=ANYTHING).fields)
    settings: Mapping[str, Any] = {}
    if entry.owned_by == "sglang":
        facts = _printable(next(filter(None, (link.get(path, final=ANYTHING).fields for path in SGLANG)), {}))
        settings = {"dtype": None} | {name: facts[name] for name in DECIDING if name in facts}
    version = facts["version"] if isinstance(facts.get("version"), str) else None
    return ServerFacts(entry.id, entry.root, entry.max_model_len, version, None, settings)


# ── scoring services ─────────────────────────────────────────────────────────────────────────────────────────────────
Count = Annotated[int, msgspec.Meta(gt=0, lt=1 << 48)]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    body_bytes: Count
    windows: Count


@dataclass(frozen=True, slots=True)
class ServiceFacts:
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
    fields = _about(link)
    version = fields.get("messages")
    if version is None:
        return None
    if version != VERSION:
        raise EngineError(
            f"the service at {link.root} speaks version {str(version)[:20]}, and this is version {VERSION}",
            fix="use one version of scoremode on both sides",
        )
    try:
        return msgspec.convert(_printable(fields), ServiceFacts)
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
    return harmless(value)[:LONGEST_NAME] if isinstance(value, str) else value


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class RefusedError(Exception):
    """The server refuses a request. The message has the HTTP status and the server's words."""


def ask(link: Link, form: Form, model: str, ids: Sequence[int], most: int = 0, **how: Any) -> PromptScores:
    """Requests the scores of one prompt. Raises RefusedError or WrongAnswerError if the answer has none."""
    reply = link.post(form.path, form.body(model, ids, most), answer=form.answer, **how)
    if not reply.good:
        raise RefusedError(f"{reply.status}: {reply.words}")
    return form.read(link, reply.value, ids, most)


def score(link: Link, form: Form, model: str, ids: Sequence[int], most: int = 0) -> PromptScores:
    """Requests the scores of one prompt. Raises EngineError if the server refuses, or its answer does not fit."""
    try:
        return ask(link, form, model, ids, most, largest=SMALL + BYTES_PER_TOKEN * len(ids) * (1 + most))
    except RefusedError as refused:
        reason = str(refused)
        raise EngineError(f"the server refuses a prompt of {len(ids)} tokens ({reason})", fix=_fix(reason)) from None
    except WrongAnswerError as wrong:
        raise EngineError(
            f"{link.root} gave an answer that does not fit the question: {wrong}",
            fix="this is a fault of the server; what is scored is kept",
        ) from None


def _fix(reason: str) -> str:
    if "vocabulary" in reason or "token id" in reason.lower():
        return "the tokenizer does not belong to this model: give the right one with --tokenizer"
    if "not exist" in reason:
        return "it serves another model now: start it as it was and run the same command again to resume"
    if "context" in reason or "length" in reason:
        return "give a smaller --context-length"
    return "see the server's log"


def find_form(link: Link, model: str) -> tuple[Form, PromptScores]:
    """Returns the first form that this server understands, and the scores that the server gave in this form."""
    reasons = []
    for form in FORMS:
        try:
            return form, ask(link, form, model, FIRST_IDS, final=frozenset({500, 501}))
        except (RefusedError, WrongAnswerError) as wrong:
            reasons.append(f"{form.name}: {wrong}")
    raise EngineError(f"{link.root} does not score prompts ({'; '.join(reasons)})", fix=SERVERS)
