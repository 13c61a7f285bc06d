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
from typing import Any

import numpy as np

from scoremode.engines.server.link import Link
from scoremode.errors import EngineError, harmless
from scoremode.values import Floats

COMPLETIONS, GENERATE = "/v1/completions", "/generate"
LONGEST_NAME = 4096  # characters; a name may be a path
FLOOR = -9999.0  # this value and lower ones mean probability zero
ROUNDING = 1e-4  # nats; a log-probability may be this far above 0
AGREEMENT = 1e-3  # nats; a token's own score may be this far from its score among the likeliest tokens

Numbers = tuple[list[Any], list[dict[str, Any]] | None]
"""The log-probabilities of tokens 1, 2, …, and for each those of the likeliest tokens there by their ids, if given."""


LOGITS = "they look like logits: start the server with --logprobs-mode raw_logprobs"
SGLANG_FIX = "no SGLang as it is released does this: see to the server, or use an engine that loads the model itself"
SGLANG_STATES = (
    "SGLang sends hidden states as JSON text, of a prompt in chunks only the last chunk's, and no head for them"
)


class WrongAnswerError(Exception):
    """An answer does not fit the request."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    logprob: Floats  # (n - 1,) of tokens 1, 2, …, n-1
    model: str | None
    fingerprint: str | None
    likely: list[dict[str, float]] | None = None  # for each position, the log-probabilities of the most likely tokens


@dataclass(frozen=True, slots=True)
class Form:
    """One way to request a prompt's scores."""

    name: str
    path: str
    body: Callable[[str, Sequence[int], int], dict[str, Any]]
    """Makes a request from the model's name, the ids, and how many of the likeliest tokens are wanted as well."""

    numbers: Callable[[Any, Sequence[int], int, int], Numbers]
    """Reads an answer to that request, also given ``last``. Raises WrongAnswerError if it does not fit."""

    note: str = ""  # what a run should say of it
    fix: str = LOGITS  # if its numbers are no log-probabilities
    no_states: str = "a server gives no hidden states"
    last: int = 0  # the vocabulary's last id is at least this one

    def read(self, link: Link, value: Any, ids: Sequence[int], most: int = 0) -> PromptScores:
        """Reads the scores in an answer with finite numbers. Raises WrongAnswerError if it does not fit the request."""
        if not isinstance(value, dict):
            raise WrongAnswerError("it is no object")
        numbers, likely = self.numbers(value, ids, most, self.last)
        largest = [one.values() for one in likely or ()]
        for one in (numbers, *largest):
            if not all(type(x) in (float, int) for x in one):
                raise WrongAnswerError("a log-probability is not a number")
        logprob = np.array(numbers, np.float64)
        if (logprob > ROUNDING).any():
            raise not_logprobs(link, self, f"it gives {float(logprob.max()):.3g} as a log-probability")
        if any(x > ROUNDING for one in largest for x in one):
            raise not_logprobs(link, self, "it gives numbers above 0 as log-probabilities")
        for own, token, listed in zip(numbers, ids[1:], likely or [], strict=likely is not None):
            if own > max(listed.values()) + AGREEMENT or abs(listed.get(str(token), own) - own) > AGREEMENT:
                raise not_logprobs(link, self, "a token's score is not the one that it has among the likeliest tokens")
        logprob = np.where(logprob <= FLOOR, -np.inf, np.minimum(logprob, 0.0))
        return PromptScores(logprob, *names_in(value), likely)


def names_in(value: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The model and the fingerprint that an answer names. SGLang gives a version of the weights, in one of two places.

    >>> names_in({"model": "small", "meta_info": {"weight_version": "default"}})
    ('small', 'weight_version default')
    """
    model, fingerprint = value.get("model"), value.get("system_fingerprint")
    for about in (value.get("meta_info"), value.get("metadata")):
        if isinstance(about, dict) and about.get("weight_version") is not None:
            fingerprint = f"weight_version {about['weight_version']}"
    model, fingerprint = (harmless(s)[:LONGEST_NAME] if isinstance(s, str) else None for s in (model, fingerprint))
    return model, fingerprint


def not_logprobs(link: Link, form: Form, why: str) -> EngineError:
    return EngineError(f"{link.root} does not answer with log-probabilities ({why})", fix=form.fix)


# ── prompt_logprobs ──────────────────────────────────────────────────────────────────────────────────────────────────
def _ask_prompt_logprobs(model: str, ids: Sequence[int], most: int) -> dict[str, Any]:
    return {"model": model, "prompt": list(ids), "temperature": 0, "max_tokens": 1, "prompt_logprobs": most}


def _prompt_logprobs(value: dict[str, Any], ids: Sequence[int], most: int, _last: int) -> Numbers:
    """Reads an answer with one dictionary per token, in which the token's own id must be a key."""
    listed = _only_choice(value).get("prompt_logprobs")
    if not isinstance(listed, list):
        raise WrongAnswerError("it has no prompt_logprobs")
    _require_positions(listed, len(ids))
    try:
        numbers = [listed[i][str(ids[i])]["logprob"] for i in range(1, len(ids))]
        return numbers, [{i: entry["logprob"] for i, entry in found.items()} for found in listed[1:]] if most else None
    except (KeyError, TypeError, AttributeError):
        raise WrongAnswerError("a score is not about the token that was sent") from None


# ── echo ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ask_echo(model: str, ids: Sequence[int], most: int) -> dict[str, Any]:
    asked = {"model": model, "prompt": list(ids), "temperature": 0, "max_tokens": 0}
    return {**asked, "echo": True, "logprobs": max(1, most), "return_tokens_as_token_ids": True}


def _echoed(value: dict[str, Any], ids: Sequence[int], most: int, _last: int) -> Numbers:
    found = _only_choice(value).get("logprobs")
    if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
        raise WrongAnswerError("it has no logprobs of the prompt")
    listed = found["token_logprobs"]
    _require_positions(listed, len(ids))
    if found.get("tokens") != [f"token_id:{i}" for i in ids]:
        raise WrongAnswerError("it is not about the tokens that were sent")
    if not most:
        return listed[1:], None
    likely = found.get("top_logprobs")
    if not isinstance(likely, list) or len(likely) != len(ids):
        raise WrongAnswerError("it has no top_logprobs of the prompt")
    if not all(isinstance(one, dict) and one for one in likely[1:]):
        raise WrongAnswerError("it has no top_logprobs of a token")
    return listed[1:], [{name.removeprefix("token_id:"): x for name, x in one.items()} for one in likely[1:]]


# ── SGLang ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ask_generate(model: str, ids: Sequence[int], most: int) -> dict[str, Any]:
    """No token is generated. From a start of 0 on, nothing is read from the radix cache: every token is computed."""
    how = {"max_new_tokens": 0, "temperature": 0}
    asked = {"input_ids": list(ids), "sampling_params": how, "return_logprob": True, "logprob_start_len": 0}
    return {**asked, "top_logprobs_num": max(1, most)}  # always one: it proves that a score has not moved


def _generated(value: dict[str, Any], ids: Sequence[int], most: int, last: int) -> Numbers:
    """Reads an answer with [logprob, id, text] per token. SGLang calls the last id of a vocabulary 0."""
    found = value.get("meta_info")
    found = found if isinstance(found, dict) else {}
    listed, likely = found.get("input_token_logprobs"), found.get("input_top_logprobs")
    if not isinstance(listed, list) or not all(map(_is_entry, listed)):
        raise WrongAnswerError("it has no input_token_logprobs")
    _require_positions([one[0] for one in listed], len(ids))
    renamed = {(one[1], i) for one, i in zip(listed, ids, strict=True) if one[1] != i}
    if renamed and not (renamed == {(0, max(ids))} and max(ids) >= last):
        raise WrongAnswerError("it is not about the tokens that were sent")
    if not isinstance(likely, list) or len(likely) != len(ids) or likely[0] is not None:
        raise WrongAnswerError("it has no input_top_logprobs")
    if not all(isinstance(one, list) and one and all(map(_is_entry, one)) for one in likely[1:]):
        raise WrongAnswerError("it has no input_top_logprobs of a token")
    return [one[0] for one in listed[1:]], [{str(one[1]): one[0] for one in entries} for entries in likely[1:]]


def _is_entry(one: Any) -> bool:
    return isinstance(one, list) and len(one) >= 2 and type(one[1]) is int


def _only_choice(value: dict[str, Any]) -> dict[str, Any]:
    choices = value.get("choices")
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise WrongAnswerError("it has no single choice")
    return choices[0]


def _require_positions(listed: list[Any], wanted: int) -> None:
    if len(listed) != wanted:
        raise WrongAnswerError(f"it has {len(listed)} positions for {wanted} tokens")
    if listed[0] is not None:
        raise WrongAnswerError("the first token has a score, and nothing precedes it")


FORMS = (
    Form("prompt_logprobs", COMPLETIONS, _ask_prompt_logprobs, _prompt_logprobs),
    Form("generate", GENERATE, _ask_generate, _generated, fix=SGLANG_FIX, no_states=SGLANG_STATES),
    Form("echo", COMPLETIONS, _ask_echo, _echoed, note="the server has no prompt_logprobs: scored by echo"),
)
"""All forms, in the order in which they are tried. Answers in each of them name the tokens that they are about."""
