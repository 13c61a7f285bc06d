"""The forms in which servers give the scores of a prompt: what is sent, and how the answer is read.

prompt_logprobs   {"prompt": ids, "prompt_logprobs": k}     a list: null, then {id: {"logprob": …}} for each token
generate          {"input_ids": ids, "return_logprob": …}   SGLang's own: [null, id, …], then [logprob, id, …]
echo              {"prompt": ids, "echo": true, …}          lists of the tokens and their log-probabilities, null first

Position 0 has no context and no score. Every answer is checked: it has as many positions as tokens, the ids that were
sent, and possible log-probabilities. A server writes -9999 for minus infinity, because JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Numbers = tuple[list[Any], list[list[Any]] | None]
"""The log-probabilities of tokens 1, 2, …, and those of the most likely tokens if they were asked for."""


class WrongAnswerError(Exception):
    """An answer does not fit the request."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    logprob: Floats  # (n - 1,) of tokens 1, 2, …, n-1
    model: str | None
    fingerprint: str | None
    largest: list[list[float]] | None = None  # for each position, the log-probabilities of the most likely tokens


@dataclass(frozen=True, slots=True)
class Form:
    """One way to request a prompt's scores."""

    name: str
    path: str
    body: Callable[[str, Sequence[int], int], dict[str, Any]]
    """Makes a request from the model's name, the ids, and how many of the likeliest tokens are wanted as well."""

    numbers: Callable[[Any, Sequence[int], int], Numbers]
    """Reads an answer to that request. Raises WrongAnswerError if it does not fit."""

    note: str = ""  # what a run should say of it

    def read(self, link: Link, value: Any, ids: Sequence[int], most: int = 0) -> PromptScores:
        """Reads the scores in an answer with finite numbers. Raises WrongAnswerError if it does not fit the request."""
        if not isinstance(value, dict):
            raise WrongAnswerError("it is no object")
        numbers, largest = self.numbers(value, ids, most)
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


def not_logprobs(link: Link, why: str) -> EngineError:
    return EngineError(
        f"{link.root} does not answer with log-probabilities ({why})",
        fix="they look like logits: start the server with --logprobs-mode raw_logprobs",
    )


# ── prompt_logprobs ──────────────────────────────────────────────────────────────────────────────────────────────────
def _ask_prompt_logprobs(model: str, ids: Sequence[int], most: int) -> dict[str, Any]:
    return {"model": model, "prompt": list(ids), "temperature": 0, "max_tokens": 1, "prompt_logprobs": most}


def _prompt_logprobs(value: dict[str, Any], ids: Sequence[int], most: int) -> Numbers:
    """Reads an answer with one dictionary per token, in which the token's own id must be a key."""
    listed = _only_choice(value).get("prompt_logprobs")
    if not isinstance(listed, list):
        raise WrongAnswerError("it has no prompt_logprobs")
    _require_positions(listed, len(ids))
    try:
        numbers = [listed[i][str(ids[i])]["logprob"] for i in range(1, len(ids))]
        return numbers, [[entry["logprob"] for entry in found.values()] for found in listed[1:]] if most else None
    except (KeyError, TypeError, AttributeError):
        raise WrongAnswerError("a score is not about the token that was sent") from None


# ── echo ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ask_echo(model: str, ids: Sequence[int], most: int) -> dict[str, Any]:
    asked = {"model": model, "prompt": list(ids), "temperature": 0, "max_tokens": 0}
    return {**asked, "echo": True, "logprobs": max(1, most), "return_tokens_as_token_ids": True}


def _echoed(value: dict[str, Any], ids: Sequence[int], most: int) -> Numbers:
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
    if not isinstance(likely, list) or len(likely) != len(ids) or not all(isinstance(one, dict) for one in likely[1:]):
        raise WrongAnswerError("it has no top_logprobs of the prompt")
    return listed[1:], [list(one.values()) for one in likely[1:]]


# ── SGLang ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ask_generate(model: str, ids: Sequence[int], most: int) -> dict[str, Any]:
    """No token is generated. From a start of 0 on, nothing is read from the radix cache: every token is computed."""
    how = {"max_new_tokens": 0, "temperature": 0}
    asked = {"input_ids": list(ids), "sampling_params": how, "return_logprob": True, "logprob_start_len": 0}
    return {**asked, "top_logprobs_num": most} if most else asked


def _generated(value: dict[str, Any], ids: Sequence[int], most: int) -> Numbers:
    """Reads an answer with [logprob, id, text] per token. SGLang calls the last id of a vocabulary 0."""
    found = value.get("meta_info")
    found = found if isinstance(found, dict) else {}
    listed = found.get("input_token_logprobs")
    if not isinstance(listed, list) or not all(isinstance(one, list) and len(one) >= 2 for one in listed):
        raise WrongAnswerError("it has no input_token_logprobs")
    _require_positions([one[0] for one in listed], len(ids))
    last = max(ids)
    if any(one[1] != i and not (one[1] == 0 and i == last) for one, i in zip(listed, ids, strict=True)):
        raise WrongAnswerError("it is not about the tokens that were sent")
    numbers = [one[0] for one in listed[1:]]
    if not most:
        return numbers, None
    likely = found.get("input_top_logprobs")
    try:
        return numbers, [[entry[0] for entry in one] for one in list(likely or ())[1:]]
    except (TypeError, IndexError, KeyError):
        raise WrongAnswerError("it has no input_top_logprobs") from None


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
    Form("generate", GENERATE, _ask_generate, _generated),
    Form("echo", COMPLETIONS, _ask_echo, _echoed, note="the server has no prompt_logprobs: scored by echo"),
)
"""All forms, in the order in which they are tried. Answers in each of them name the tokens that they are about."""
