"""Finds independent groups of targets, and the weight of each target, from the plan alone. A run stores both.

The error of a mean is computed over unrelated pieces of text. In order of preference:

pieces known to be related     documents that say so: all texts that a model wrote after one prompt
pieces known to be separate    documents; if a recipe joins them into one stream, the texts that were joined
                               (WikiText's articles), if at least FEWEST of them have targets
stretches of text              equal parts of each piece, of at least STRETCH tokens, if there are FEWEST or more
blocks of the text             FEWEST equal parts, of at least SHORTEST tokens: a last resort. Neighbouring blocks are
                               alike, so the error says how much the parts of this text differ, and nothing of others
too few                        the known pieces; estimates over them have no error

Windows are not independent: neighbouring windows of 2,048 tokens of WikiText-2 have a correlation of 0.5, because an
article continues from one window to the next. docs/statistics.md has the measurements for FEWEST, STRETCH and SHORTEST.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.values import Floats, Ids, Ints

FEWEST = 5  # groups; with fewer, an error estimate would be useless
ENOUGH = 10.0  # effective groups; of fewer, claims about other texts are false too often: docs/statistics.md
FALSE_OF_FEW = {  # % of skewed samples, of 1, 2, … 9 effective groups; benchmarks/long_tails.py measures them
    "no worse": (11, 12, 13, 14, 11, 10, 9, 10, 9),
    "direction": (4, 7, 9, 10, 8, 8, 7, 7, 7),
    "ranking": (5, 5, 6, 5, 5, 5, 5, 5, 5),
}
STRETCH = 1 << 15  # tokens; shorter neighbouring stretches of one text are correlated
SHORTEST = 256  # tokens of a block; shorter ones were not measured
BLOCKS = "blocks of"  # how the kind of such groups begins


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Says which targets of a plan belong to the same group."""

    kind: str  # the kind of the groups, in words
    count: int
    of_target: Ints  # (targets,) the group of each target: 0, 1, …
    splits_characters: bool = False  # may a group begin inside a character?


def grouping(plan: Plan) -> Grouping:
    """Returns the groups of a plan's targets."""
    if plan.doc_group is not None:
        groups = _numbered("prompts", plan.doc_group[plan.target_document])
        return replace(groups, kind="prompt") if groups.count == 1 else groups
    kind = "documents" if np.array_equal(plan.piece_starts, plan.doc_starts[:-1]) else "joined texts"
    pieces = _divided(plan, plan.piece_starts, kind)
    if pieces.count >= FEWEST:
        return pieces
    stretches = _part_starts(plan, lambda length, _: length // STRETCH)
    groups = _divided(plan, stretches, f"stretches of at least {STRETCH:,} tokens", splits=True)
    if groups.count < FEWEST:
        groups = _blocks(plan) or pieces
    if groups.count >= FEWEST:
        return groups
    return replace(pieces, kind=kind.removesuffix("s")) if pieces.count == 1 else pieces


def _numbered(kind: str, numbers: Ints, *, splits: bool = False) -> Grouping:
    """Groups the targets with equal numbers. Numbers without a target are not counted."""
    used, of_target = np.unique(numbers, return_inverse=True)
    return Grouping(kind, len(used), of_target.astype(np.int64), splits)


def _divided(plan: Plan, starts: Ints, kind: str, *, splits: bool = False) -> Grouping:
    """Divides the stream into groups at the tokens ``starts``."""
    return _numbered(kind, np.searchsorted(starts, plan.target_token, side="right"), splits=splits)


def _blocks(plan: Plan) -> Grouping | None:
    """Divides a text into FEWEST blocks; of several texts, each into blocks that are no longer than a FEWEST of all.

    Bounds over a few long blocks hold more often than over many that are alike. None if they would be too short.
    """
    begin, end = _scored(plan)
    length = (end - begin) // FEWEST
    if length < SHORTEST:
        return None
    texts = len(plan.piece_starts)
    of = f"{length:,} tokens of this one text" if texts == 1 else f"at most {length:,} tokens of these {texts} texts"
    starts = _part_starts(plan, lambda piece_length, total: -(-piece_length * FEWEST // total))
    return _divided(plan, starts, f"{BLOCKS} {of}", splits=True)


def are_blocks(kind: str) -> bool:
    """Are these groups only parts of a text or of a few? Then an error over them does not speak of other texts."""
    return kind.startswith(BLOCKS)


def why_unsure(groups: int, effective: float, kind: str, *, few_documents: bool) -> str:
    """Says why an error over these groups decides nothing about other texts, and what to do; '' if it does.

    >>> why_unsure(6, 4.21, "documents", few_documents=False)
    '4.2 effective documents are too few; give at least 10 of about equal length, or --few-documents'
    >>> why_unsure(5, 5.0, "blocks of 1,240 tokens of this one text", few_documents=False)
    'the error is over 5 blocks of 1,240 tokens of this one text, and 5 unrelated texts are needed'
    """
    if are_blocks(kind):
        return f"the error is over {groups} {kind}, and {FEWEST} unrelated texts are needed"
    fix = f"give at least {ENOUGH:.0f} of about equal length, or --few-documents"
    return "" if few_documents or effective >= ENOUGH else f"{effective:.1f} effective {kind} are too few; {fix}"


def false_of_few(claim: str, effective: float, kind: str) -> str:
    """Says how often a claim of that kind is false with so few groups; '' if there are enough.

    >>> false_of_few("no worse", 5.2, "documents"), false_of_few("no worse", 10.0, "documents")
    ('; with 5.2 effective documents such a claim is false in up to 11 % of skewed samples', '')
    """
    if effective >= ENOUGH:
        return ""
    share = FALSE_OF_FEW[claim][max(1, int(effective)) - 1]
    return f"; with {effective:.1f} effective {kind} such a claim is false in up to {share} % of skewed samples"


def _scored(plan: Plan) -> tuple[int, int]:
    """The tokens from the one before the first target to the last: unscored ends belong to no group."""
    return (max(0, int(plan.first.min()) - 1), int(plan.last.max())) if len(plan) else (0, 0)


def _part_starts(plan: Plan, parts: Callable[[int, int], int]) -> Ints:
    """Divides each piece, without unscored ends, into equal parts; ``parts`` says how many, from its length and all."""
    begin, end = _scored(plan)
    edges = np.unique(np.clip(np.append(plan.piece_starts, len(plan.ids)), begin, end))
    starts = [
        first + np.arange(count) * (stop - first) // count
        for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        for count in (max(1, parts(stop - first, end - begin)),)
    ]
    part_starts: Ints = np.concatenate([np.zeros(1, np.int64), *starts]).astype(np.int64)
    return part_starts


def character_groups(plan: Plan, groups: Grouping, byte_len: Ids) -> Ints:
    """The group of each target in a mean over bytes: all tokens of one character get the group of its first token.

    ``byte_len`` has the bytes of each target, (targets,).
    """
    if not groups.splits_characters:
        return groups.of_target
    follows = np.diff(plan.target_token, prepend=-2) == 1
    follows &= (np.diff(plan.target_document, prepend=-1) == 0) & (byte_len == 0)
    first = np.maximum.accumulate(np.where(follows, 0, np.arange(len(follows))))
    group_of_target: Ints = groups.of_target[first]
    return group_of_target


def weights_of(plan: Plan) -> Floats:
    """Returns the weight of each target in the method's mean, (targets,): 1 unless windows are averaged."""
    if plan.average != "window":
        return np.ones(plan.targets)
    assert plan.weight is not None
    weights: Floats = (plan.weight / plan.target_counts)[plan.target_window]
    return weights
