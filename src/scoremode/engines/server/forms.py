"""The ways in which servers give log-probabilities of a prompt: what is sent, and how the answer is read.

prompt_logprobs   {"prompt": ids, "prompt_logprobs": k}    a list: null, then {id: {"logprob": …}} for each token
echo              {"prompt": ids, "echo": true, …}         lists of the tokens and their log-probabilities, null first

Position 0 has no context and no score. Everything is checked: as many positions as tokens, the ids that were sent,
numbers that can be log-probabilities. A server writes -9999 for minus infinity, because JSON has no infinity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.errors import harmless
from scoremode.values import Floats

FLOOR = -9999.0  # and below: probability zero
ROUNDING = 1e-4  # nats; a log-probability may be this far above 0
MOST = 20  # largest tokens that servers give by default


class WrongAnswerError(Exception):
    """An answer that does not fit the question."""


class LogitsError(Exception):
    """Numbers that cannot be log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """A prompt's scores."""

    logprob: Floats  # (n - 1,) of tokens 1, 2, …, n-1
    model: str | None
    fingerprint: str | None
    largest: list[list[float]] | None = None  # for each token, the log-probabilities of the most likely ones


class Form(ABC):
    """One way of asking."""

    name: str
    names_ids: bool = True  # does every answer repeat the ids that it is about?

    @abstractmethod
    def body(self, model: str, ids: Sequence[int], most: int = 0) -> dict[str, Any]:
        """The request; ``most``: also the log-probabilities of that many most likely tokens."""

    @abstractmethod
    def _positions(self, choice: dict[str, Any], ids: Sequence[int], most: int) -> tuple[list[Any], Any]:
        """The numbers of tokens 1, 2, …, and those of the most likely tokens if they were asked for."""

    def read(self, value: Any, ids: Sequence[int], most: int = 0) -> PromptScores:
        """The scores in an answer, whose numbers are finite; WrongAnswerError if it is anything else."""
        choices = value.get("choices") if isinstance(value, dict) else None
        if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
            raise WrongAnswerError("it has no single choice")
        numbers, largest = self._positions(choices[0], ids, most)
        if not all(type(x) in (float, int) for x in numbers):
            raise WrongAnswerError("a log-probability is not a number")
        logprob = np.array(numbers, np.float64)
        if (logprob > ROUNDING).any():
            raise LogitsError(f"it gives {float(logprob.max()):.3g} as a log-probability")
        for likely in largest or ():
            if not all(type(x) in (float, int) for x in likely):
                raise WrongAnswerError("a log-probability is not a number")
            if any(x > ROUNDING for x in likely):
                raise LogitsError("it gives numbers above 0 as log-probabilities")
        logprob = np.where(logprob <= FLOOR, -np.inf, np.minimum(logprob, 0.0))
        return PromptScores(logprob, _text(value.get("model")), _text(value.get("system_fingerprint")), largest)


class PromptLogprobsForm(Form):
    """``prompt_logprobs``: a dictionary for each token, with its own id in it."""

    name = "prompt_logprobs"

    def body(self, model: str, ids: Sequence[int], most: int = 0) -> dict[str, Any]:
        return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": most}

    def _positions(self, choice: dict[str, Any], ids: Sequence[int], most: int) -> tuple[list[Any], Any]:
        listed = choice.get("prompt_logprobs")
        if not isinstance(listed, list):
            raise WrongAnswerError("it has no prompt_logprobs")
        _require_length(len(listed), len(ids))
        if listed[0] is not None:
            raise WrongAnswerError("the first token has a score, and nothing precedes it")
        try:
            numbers = [listed[i][str(ids[i])]["logprob"] for i in range(1, len(ids))]
            largest = [[entry["logprob"] for entry in found.values()] for found in listed[1:]] if most else None
        except (KeyError, TypeError, AttributeError):
            raise WrongAnswerError("a score is not about the token that was sent") from None
        return numbers, largest


class EchoForm(Form):
    """``echo`` with ``logprobs``: the prompt comes back, and its tokens with it."""

    def __init__(self, generated: int, *, names_ids: bool) -> None:
        self.generated, self.names_ids = generated, names_ids
        self.name = "echo" + ("" if names_ids else ", tokens as text")

    def body(self, model: str, ids: Sequence[int], most: int = 0) -> dict[str, Any]:
        more = {"return_tokens_as_token_ids": True} if self.names_ids else {}
        asked = {"model": model, "prompt": list(ids), "max_tokens": self.generated, "temperature": 0}
        return {**asked, "echo": True, "logprobs": max(1, most), **more}

    def _positions(self, choice: dict[str, Any], ids: Sequence[int], most: int) -> tuple[list[Any], Any]:
        found = choice.get("logprobs")
        if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
            raise WrongAnswerError("it has no logprobs of the prompt")
        listed, names = found["token_logprobs"], found.get("tokens")
        # where a token is generated, the answer may have it, too
        surplus = self.generated if len(listed) == len(ids) + self.generated else 0
        _require_length(len(listed) - surplus, len(ids))
        if listed[0] is not None:
            raise WrongAnswerError("the first token has a score, and nothing precedes it")
        if self.names_ids and (not isinstance(names, list) or names[: len(ids)] != [f"token_id:{i}" for i in ids]):
            raise WrongAnswerError("it is not about the tokens that were sent")
        return listed[1 : len(ids)], _echoed_largest(found.get("top_logprobs"), len(ids)) if most else None


FORMS: tuple[Form, ...] = (
    PromptLogprobsForm(),
    EchoForm(0, names_ids=True),
    EchoForm(0, names_ids=False),
    EchoForm(1, names_ids=False),
)
"""The best first."""


def _echoed_largest(listed: Any, count: int) -> list[list[float]]:
    if not isinstance(listed, list) or len(listed) < count or not all(isinstance(f, dict) for f in listed[1:count]):
        raise WrongAnswerError("it has no top_logprobs of the prompt")
    return [list(found.values()) for found in listed[1:count]]


def _require_length(found: int, wanted: int) -> None:
    if found != wanted:
        raise WrongAnswerError(f"it has {found} positions for {wanted} tokens")


def _text(value: Any) -> str | None:
    return harmless(value)[:4096] if isinstance(value, str) else None
