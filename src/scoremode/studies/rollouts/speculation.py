"""Speculative decoding: what a draft model would save, from one pass of both models over the target's own texts.

A draft of γ tokens is sampled from the draft model q. Each is accepted with probability min(1, p/q), p the target; the
first that is rejected is replaced by a sample of max(0, p - q), normalized; after γ acceptances p gives one more token.
Every token is then distributed exactly as p says, whatever the draft.

    overlap     α_t = Σ min(p, q) at token t = 1 - total variation: the chance that a draft of this token is accepted
    acceptance  a_t = min(1, q(x_t) / p(x_t)): the same chance, given that the token becomes the text's own, x_t

P(accepted and x) = min(p, q)(x) and P(x) = p(x), so a_t is their quotient, and α_t is the mean of a_t over p. The text
is distributed as p whatever happens to the drafts. So, given a text that the target sampled, the acceptances of its
tokens are independent with the chances a_t, and the steps that write the text are a Markov chain over its tokens:

    a step that begins at t writes more than k tokens with the chance a_t · a_{t+1} · … · a_{t+k-1}, k ≤ γ
    tokens_per_step = Σ tokens / Σ expected steps, over whole texts

That is exact; a text that ends inside a draft ends the step.

For a target that decodes greedily, a draft is accepted if it is the target's first choice: a_t = α_t is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from scoremode.core.statistics.depth import depth_edges, means_by_stretch
from scoremode.core.statistics.estimate import ratio, with_error_fields
from scoremode.errors import RunError
from scoremode.values import Estimate, Floats, Ints

DRAFTS = range(1, 9)  # lengths of drafts
CELLS = 1 << 21  # tokens of texts that are worked on together
SLACK = 1e-6  # by which a probability may lie outside 0 … 1, by rounding


@dataclass(frozen=True, eq=False)
class Speculation:
    """A draft model for a target, on texts."""

    acceptance: Estimate  # the mean overlap: the chance that a draft of a token is accepted
    by_position: Sequence[tuple[int, int, Estimate]]  # first and last position, and the mean overlap there
    tokens_per_step: Mapping[int, Estimate]  # by the length γ of drafts

    def statistics(self) -> dict[str, Any]:
        each = self.tokens_per_step.items()
        return {
            "targets": self.acceptance.n,
            "groups": self.acceptance.groups,
            **with_error_fields("acceptance", self.acceptance),
            "by_position": [
                {"first": first, "last": last, "targets": e.n, **with_error_fields("acceptance", e)}
                for first, last, e in self.by_position
            ],
            "drafts": [{"draft": draft, **with_error_fields("tokens_per_step", found)} for draft, found in each],
        }


def speculation(
    text: Ints, group: Ints, overlap: Floats, accept: Floats | None = None, drafts: Sequence[int] = DRAFTS
) -> Speculation:
    """Computes what a draft model would save. Arrays have one entry per target, and texts come one after the other.

    ``overlap`` is α_t. ``accept`` is a_t (see ``acceptances``) for texts that the target sampled from its own
    distribution; without it, α_t stands for it, which is exact for greedy texts and an approximation for others.

    >>> texts = np.repeat(np.arange(5), 100)
    >>> speculation(texts, texts, np.zeros(500), drafts=[2]).tokens_per_step[2]
    1.000 ± 0
    """
    accept = overlap if accept is None else accept
    assert len(text) == len(group) == len(overlap) == len(accept), "one entry per target"
    for name, values in (("overlap", overlap), ("acceptance", accept)):
        if not ((values >= -SLACK) & (values <= 1 + SLACK)).all():
            raise RunError(f"an {name} is not a probability", fix="score again with --fresh")
    overlap, accept = np.clip(overlap, 0, 1), np.clip(accept, 0, 1)
    starts = np.flatnonzero(np.diff(text, prepend=text[:1] - 1))
    length = np.diff(np.append(starts, len(text))).astype(np.int64)
    groups = np.unique(group, return_inverse=True)[1].astype(np.int64)
    tokens = length.astype(np.float64)
    steps = {draft: expected_steps(accept, starts, length, draft) for draft in drafts}
    per_step = {draft: ratio(tokens, each, groups[starts]) for draft, each in steps.items()}
    place = (np.arange(len(text)) - np.repeat(starts, length)).astype(np.int64)
    edges = depth_edges(int(place.max(initial=0)))
    means = means_by_stretch(overlap, place, groups, edges, "share")
    parts = [(first, end - 1, e) for (first, end), e in zip(pairwise(edges.tolist()), means, strict=True)]
    return Speculation(ratio(overlap, np.ones(len(text)), groups, "share"), parts, per_step)


def acceptances(target: Floats, draft: Floats) -> Floats:
    """Returns a_t from the log-probabilities of the text's tokens under both models."""
    if np.isneginf(target).any():
        raise RunError("the target gives a token of its own text the probability zero", fix="sample the texts again")
    found: Floats = np.exp(np.minimum(0.0, draft - target))
    return found


def expected_steps(accept: Floats, starts: Ints, length: Ints, draft: int) -> Floats:
    """The expected steps that write each text, from the chance that a step begins at a token, from the first token on.

    Texts of similar length are worked on side by side.
    """
    steps, order, begin = np.zeros(len(starts)), np.argsort(-length, kind="stable"), 0
    while begin < len(order):
        some = order[begin : begin + max(1, CELLS // int(length[order[begin]]))]
        steps[some] = _chains(accept, starts[some], length[some], draft)
        begin += len(some)
    return steps


def _chains(accept: Floats, starts: Ints, length: Ints, draft: int) -> Floats:
    """Follows the chain of steps through several texts side by side."""
    longest = int(length.max())
    places = np.arange(longest)
    inside = places < length[:, None]
    chances = np.where(inside, accept[np.where(inside, starts[:, None] + places, 0)], 0.0)
    begins = np.zeros((len(starts), longest + draft + 1))  # the chance that a step begins at a token
    begins[:, 0] = 1
    for t in range(longest):
        reaches = np.where(t < length, begins[:, t], 0.0)  # the chance that a step begins here, …
        for k in range(draft):
            goes_on = reaches * (chances[:, t + k] if t + k < longest else 0.0)  # … and its first k + 1 are accepted
            begins[:, t + k + 1] += reaches - goes_on  # the next token is rejected and replaced
            reaches = goes_on
        begins[:, t + draft + 1] += reaches
    steps: Floats = np.where(np.arange(begins.shape[1]) < length[:, None], begins, 0.0).sum(axis=1)
    return steps
