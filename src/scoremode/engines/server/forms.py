"""The forms in which servers give the scores of a prompt: what is sent, and how the answer is read.

prompt_logprobs   {"prompt": ids, "prompt_logprobs": k}     a list: null, then {id: {"logprob": …}} for each token
generate          {"input_ids": ids, "return_logprob": …}   SGLang's own: [null, id, …], then [logprob, id, …]
echo              {"prompt": ids, "echo": true, …}          lists of the tokens and their log-probabilities, null first

Position 0 has no context and no score. Every answer is checked: it has as many positions as tokens, the ids that were
sent, and possible log-probabilities. A server writes -9999 for minus infinity, because JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from scoremode.engines.server.link import Link
from scoremode.errors import EngineError, harmless
from scoremode.values import Floats

COMPLETIONS, GENERATE = "/v1/completions", "/generate"
LONGEST_NAME = 4096  # characters; a name may be a path
FLOOR = -9999.0  # this value and lower ones mean probability zero
ROUNDING = 1e-4  # nats; a log-probability may be this far above 0
AGREEMENT = 1e-3  # nats; a token's own score and its entry among the likeliest tokens may differ by this

Likely = list[dict[str, float]]
"""For each of tokens 1, 2, …, the log-probabilities of the likeliest tokens there, by their ids."""


ECHOES = "the server has no prompt_logprobs: scored by echo"
NOT_LISTED = "it has no likeliest tokens at a position"
LOGITS = "they look like logits: start the server with --logprobs-mode raw_logprobs"
SGLANG_FIX = "no SGLang as it is released does this: see to the server, or use an engine that loads the model itself"
SGLANG_STATES = (
    "SGLang sends hidden states as JSON text, of a prompt in chunks only the last chunk's, and no head for them"
)


class WrongAnswerError(Exception):
    """An answer does not fit the request."""


class Answer(msgspec.Struct, kw_only=True):
    """What answers in every form may name: see ``names_in``."""

    model: Any = None
    system_fingerprint: Any = None
    usage: Any = None
    metadata: Any = None
    meta_info: Any = None


class Numbers(NamedTuple):
    """The log-probabilities of tokens 1, 2, …, and if the likeliest tokens are given, two more for each position."""

    own: Sequence[float | None]
    largest: Sequence[float] | None = None  # the largest of the likeliest tokens'
    again: Sequence[float | None] | None = None  # the token's, if it is among them; else its own score
    likely: Likely | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    logprob: Floats  # (n - 1,) of tokens 1, 2, …, n-1
    model: str | None
    fingerprint: str | None
    likely: Likely | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """One way to request a prompt's scores."""

    name: str
    path: str
    body: Callable[[str, Sequence[int], int], Mapping[str, object]]
    """Makes a request from the model's name, the ids, and how many of the likeliest tokens are wanted as well."""

    answer: type[Answer]  # the form of the answer to that request
    numbers: Callable[[Any, Sequence[int], int, int], Numbers]
    """Reads that answer, also given ``last``. Raises an error if it does not fit."""

    note: str = ""  # what a run should say of it
    fix: str = LOGITS  # if its numbers are no log-probabilities
    no_states: str = "a server gives no hidden states"
    last: int = 0  # the vocabulary's last id is at least this one
    every: int = 0  # how many of the likeliest tokens to ask for to get all of them; 0: that cannot be asked for

    def read(self, link: Link, value: Any, ids: Sequence[int], most: int = 0) -> PromptScores:
        """Reads the scores in an answer with finite numbers. Raises WrongAnswerError if it does not fit the request."""
        try:
            answer = value if isinstance(value, self.answer) else msgspec.convert(value, self.answer)
        except msgspec.ValidationError as error:
            raise WrongAnswerError(f"it has another form: {error}") from None
        counted = _field(answer.usage, "prompt_tokens") or _field(answer.meta_info, "prompt_tokens")
        if isinstance(counted, int) and counted != len(ids):
            raise WrongAnswerError(
                f"it counts {counted} tokens of the {len(ids)} that were sent: it adds or drops some"
            )
        scores, largest, again, likely = self.numbers(answer, ids, most, self.last)
        if None in scores:
            raise WrongAnswerError("a log-probability is not a number")
        logprob, listed = np.array(scores, np.float64), np.array(again, np.float64)
        if (logprob > ROUNDING).any():
            raise not_logprobs(link, self, f"it gives {float(logprob.max()):.3g} as a log-probability")
        if largest is not None:
            most_likely = np.array(largest, np.float64)
            if (most_likely > ROUNDING).any():
                raise not_logprobs(link, self, "it gives numbers above 0 as log-probabilities")
            if ((logprob > most_likely + AGREEMENT) | (np.abs(listed - logprob) > AGREEMENT)).any():
                raise not_logprobs(link, self, "a token's score is not the one that it has among the likeliest tokens")
        logprob = np.where(logprob <= FLOOR, -np.inf, np.minimum(logprob, 0.0))
        return PromptScores(logprob, *names_in(answer), likely)


def names_in(value: Answer | Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The model and the fingerprint that an answer names. SGLang gives a version of the weights, in one of two places.

    >>> names_in({"model": "small", "meta_info": {"weight_version": "default"}})
    ('small', 'weight_version default')
    """
    model, fingerprint = _field(value, "model"), _field(value, "system_fingerprint")
    for about in (_field(value, "meta_info"), _field(value, "metadata")):
        if (version := _field(about, "weight_version")) is not None:
            fingerprint = f"weight_version {version}"
    model, fingerprint = (harmless(s)[:LONGEST_NAME] if isinstance(s, str) else None for s in (model, fingerprint))
    return model, fingerprint


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def not_logprobs(link: Link, form: Form, why: str) -> EngineError:
    return EngineError(f"{link.root} does not answer with log-probabilities ({why})", fix=form.fix)


# ── prompt_logprobs ──────────────────────────────────────────────────────────────────────────────────────────────────
class Score(msgspec.Struct, gc=False):
    logprob: float


class Echo(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, Score] | None] | None = None
    logprobs: Echo | None = None


class Completions(Answer, kw_only=True):
    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=1)]


def _ask_prompt_logprobs(model: str, ids: Sequence[int], most: int) -> Mapping[str, object]:
    return {"model": model, "prompt": list(ids), "temperature": 0, "max_tokens": 1, "prompt_logprobs": most}


def _prompt_logprobs(answer: Completions, ids: Sequence[int], most: int, _last: int) -> Numbers:
    """Reads an answer with one dictionary per token, in which the token's own id must be a key."""
    listed = answer.choices[0].prompt_logprobs
    if listed is None:
        raise WrongAnswerError("it has no prompt_logprobs")
    _require_positions(listed, len(ids))
    each = [{token: score.logprob for token, score in (entry or {}).items()} for entry in listed[1:]]
    try:
        scores = [entry[str(token)] for entry, token in zip(each, ids[1:], strict=True)]
    except KeyError:
        raise WrongAnswerError("a score is not about the token that was sent") from None
    return _with_likely(scores, each, ids) if most else Numbers(scores)


# ── echo ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ask_echo(model: str, ids: Sequence[int], most: int) -> Mapping[str, object]:
    body = {"model": model, "prompt": list(ids), "temperature": 0, "max_tokens": 0}
    return {**body, "echo": True, "logprobs": max(1, most), "return_tokens_as_token_ids": True}


def _echoed(answer: Completions, ids: Sequence[int], most: int, _last: int) -> Numbers:
    echo = answer.choices[0].logprobs
    if echo is None:
        raise WrongAnswerError("it has no logprobs of the prompt")
    _require_positions(echo.token_logprobs, len(ids))
    if echo.tokens != [f"token_id:{i}" for i in ids]:
        raise WrongAnswerError("it is not about the tokens that were sent")
    if not most:
        return Numbers(echo.token_logprobs[1:])
    likely = echo.top_logprobs or []
    if len(likely) != len(ids):
        raise WrongAnswerError("it has no top_logprobs of the prompt")
    each = [{name.removeprefix("token_id:"): x for name, x in (entry or {}).items()} for entry in likely[1:]]
    return _with_likely(echo.token_logprobs[1:], each, ids)


# ── SGLang ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class ServedToken(msgspec.Struct, array_like=True, gc=False):
    """[logprob, id, text]"""

    logprob: float | None
    id: int


class GeneratedScores(msgspec.Struct):
    input_token_logprobs: list[ServedToken]
    input_top_logprobs: list[list[ServedToken] | None]
    weight_version: Any = None
    prompt_tokens: Any = None


class Generated(Answer, kw_only=True):
    meta_info: GeneratedScores


def _ask_generate(model: str, ids: Sequence[int], most: int) -> Mapping[str, object]:
    """No token is generated. From a start of 0 on, nothing is read from the radix cache: every token is computed."""
    how = {"max_new_tokens": 0, "temperature": 0}
    body = {"input_ids": list(ids), "sampling_params": how, "return_logprob": True, "logprob_start_len": 0}
    return {**body, "top_logprobs_num": max(1, most)}  # always one: it proves that a score has not moved


def _generated(answer: Generated, ids: Sequence[int], most: int, last: int) -> Numbers:
    """Reads an answer with [logprob, id, text] per token. SGLang calls the last id of a vocabulary 0."""
    listed, likely = answer.meta_info.input_token_logprobs, answer.meta_info.input_top_logprobs
    _require_positions(likely, len(ids))
    _require_positions([listed[0].logprob, *listed[1:]] if listed else listed, len(ids))
    renamed = {(score.id, i) for score, i in zip(listed, ids, strict=True) if score.id != i}
    if renamed and not (renamed == {(0, max(ids))} and max(ids) >= last):
        raise WrongAnswerError("it is not about the tokens that were sent")
    scores = [score.logprob for score in listed[1:]]
    if most or any(entry and len(entry) > 1 for entry in likely):
        each = [{str(top.id): top.logprob for top in entry or () if top.logprob is not None} for entry in likely[1:]]
        return _with_likely(scores, each, ids)
    first = [(entry[0].id, entry[0].logprob) if entry else (0, None) for entry in likely[1:]]
    largest = [score for _, score in first if score is not None]
    if len(largest) < len(first):
        raise WrongAnswerError(NOT_LISTED)
    places = zip(first, ids[1:], scores, strict=True)
    return Numbers(scores, largest, [top if best == token else score for (best, top), token, score in places])


def _with_likely(scores: Sequence[float | None], likely: Likely, ids: Sequence[int]) -> Numbers:
    if not all(likely):
        raise WrongAnswerError(NOT_LISTED)
    again = [entry.get(str(token), score) for entry, token, score in zip(likely, ids[1:], scores, strict=True)]
    return Numbers(scores, [max(entry.values()) for entry in likely], again, likely)


def _require_positions(listed: Sequence[object], wanted: int) -> None:
    if len(listed) != wanted:
        raise WrongAnswerError(f"it has {len(listed)} positions for {wanted} tokens")
    if listed[0] is not None:
        raise WrongAnswerError("the first token has a score, and nothing precedes it")


FORMS = (
    Form("prompt_logprobs", COMPLETIONS, _ask_prompt_logprobs, Completions, _prompt_logprobs, every=-1),
    Form("generate", GENERATE, _ask_generate, Generated, _generated, fix=SGLANG_FIX, no_states=SGLANG_STATES),
    Form("echo", COMPLETIONS, _ask_echo, Completions, _echoed, note=ECHOES),
)
"""All forms, in the order in which they are tried. Answers in each of them name the tokens that they are about."""
