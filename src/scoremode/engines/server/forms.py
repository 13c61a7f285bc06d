"""The ways in which servers give log-probabilities of a prompt: what is sent, and how the answer is read.

prompt_logprobs   {"prompt": ids, "prompt_logprobs": k}    a list: null, then {id: {"logprob": …}} for each token
echo              {"prompt": ids, "echo": true, …}         lists of the tokens and their log-probabilities, null first

Position 0 has no context and no score. Everything is checked: as many positions as tokens, the ids that were sent,
numbers that can be log-probabilities. A server writes -9999 for minus infinity, because JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.errors import harmless
from scoremode.values import Floats

FLOOR = -9999.0  # and below: probability zero
ROUNDING = 1e-4  # nats; a log-probability may be this far above 0
MOST = 20  # largest tokens that servers give by default

Numbers = tuple[list[Any], list[list[Any]] | None]
"""The log-probabilities of tokens 1, 2, …, and those of the most likely tokens if they were asked for."""


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


@dataclass(frozen=True, slots=True)
class Form:
    """One way of asking: ``prompt_logprobs``, or ``echo`` with ``logprobs``, where the prompt comes back."""

    name: str
    echo: bool
    generated: int  # tokens that the server must generate
    names_ids: bool = True  # does every answer repeat the ids that it is about?

    def body(self, model: str, ids: Sequence[int], most: int = 0) -> dict[str, Any]:
        """The request; ``most``: also the log-probabilities of that many most likely tokens."""
        asked = {"model": model, "prompt": list(ids), "max_tokens": self.generated, "temperature": 0}
        if not self.echo:
            return {**asked, "prompt_logprobs": most}
        more = {"return_tokens_as_token_ids": True} if self.names_ids else {}
        return {**asked, "echo": True, "logprobs": max(1, most), **more}

    def read(self, value: Any, ids: Sequence[int], most: int = 0) -> PromptScores:
        """The scores in an answer, whose numbers are finite; WrongAnswerError if it is anything else."""
        choices = value.get("choices") if isinstance(value, dict) else None
        if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
            raise WrongAnswerError("it has no single choice")
        numbers, largest = (self._echoed if self.echo else _prompt_logprobs)(choices[0], ids, most)
        for one in (numbers, *(largest or ())):
            if not all(type(x) in (float, int) for x in one):
                raise WrongAnswerError("a log-probability is not a number")
        logprob = np.array(numbers, np.float64)
        if (logprob > ROUNDING).any():
            raise LogitsError(f"it gives {float(logprob.max()):.3g} as a log-probability")
        if any(x > ROUNDING for likely in largest or () for x in likely):
            raise LogitsError("it gives numbers above 0 as log-probabilities")
        logprob = np.where(logprob <= FLOOR, -np.inf, np.minimum(logprob, 0.0))
        return PromptScores(logprob, _text(value.get("model")), _text(value.get("system_fingerprint")), largest)

    def _echoed(self, choice: dict[str, Any], ids: Sequence[int], most: int) -> Numbers:
        found = choice.get("logprobs")
        if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
            raise WrongAnswerError("it has no logprobs of the prompt")
        listed, names = found["token_logprobs"], found.get("tokens")
        # where a token is generated, the answer may have it, too
        surplus = self.generated if len(listed) == len(ids) + self.generated else 0
        _require_positions(listed, len(listed) - surplus, len(ids))
        if self.names_ids and (not isinstance(names, list) or names[: len(ids)] != [f"token_id:{i}" for i in ids]):
            raise WrongAnswerError("it is not about the tokens that were sent")
        if not most:
            return listed[1 : len(ids)], None
        likely = found.get("top_logprobs")
        if not isinstance(likely, list) or len(likely) < len(ids):
            raise WrongAnswerError("it has no top_logprobs of the prompt")
        if not all(isinstance(one, dict) for one in likely[1 : len(ids)]):
            raise WrongAnswerError("it has no top_logprobs of the prompt")
        return listed[1 : len(ids)], [list(one.values()) for one in likely[1 : len(ids)]]


FORMS = (
    Form("prompt_logprobs", echo=False, generated=1),
    Form("echo", echo=True, generated=0),
    Form("echo, tokens as text", echo=True, generated=0, names_ids=False),
    Form("echo, tokens as text", echo=True, generated=1, names_ids=False),
)
"""The best first."""


def _prompt_logprobs(choice: dict[str, Any], ids: Sequence[int], most: int) -> Numbers:
    """A dictionary for each token, with its own id in it."""
    listed = choice.get("prompt_logprobs")
    if not isinstance(listed, list):
        raise WrongAnswerError("it has no prompt_logprobs")
    _require_positions(listed, len(listed), len(ids))
    try:
        numbers = [listed[i][str(ids[i])]["logprob"] for i in range(1, len(ids))]
        return numbers, [[entry["logprob"] for entry in found.values()] for found in listed[1:]] if most else None
    except (KeyError, TypeError, AttributeError):
        raise WrongAnswerError("a score is not about the token that was sent") from None


def _require_positions(listed: list[Any], found: int, wanted: int) -> None:
    if found != wanted:
        raise WrongAnswerError(f"it has {found} positions for {wanted} tokens")
    if listed[0] is not None:
        raise WrongAnswerError("the first token has a score, and nothing precedes it")


def _text(value: Any) -> str | None:
    return harmless(value)[:4096] if isinstance(value, str) else None
