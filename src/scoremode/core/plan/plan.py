"""A plan: windows, targets and averaging as one value, the same for every engine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from scoremode.core.plan.path import DecodePath, path_of
from scoremode.core.scores.answers import Window
from scoremode.values import Bools, Floats, Ids, Ints

Average = Literal["token", "window", "document"]
"""How scores become one perplexity: mean over all targets, weighted window means, or arithmetic mean over documents."""


def counts_between(mask: Bools, begin: Ints, end: Ints) -> Ints:
    """How many elements of the mask are true from each ``begin`` to its ``end``."""
    before = np.zeros(len(mask) + 1, np.int64)
    np.cumsum(mask, out=before[1:])
    counts: Ints = before[end] - before[begin]
    return counts


@dataclass(frozen=True, eq=False)
class Plan:
    """Which windows are fed, which tokens are scored, how the scores are averaged: the same for every engine.

    Window w feeds ``[lead[w]] + ids[start[w]:stop[w]]`` (without the lead if it is -1) and scores the tokens of
    ``ids[first[w]:last[w]]`` that ``mask`` allows. Each of them is predicted from the row before it. So a target is
    never the first token fed, and the last target may be the token after the last one fed.
    """

    method: str
    settings: tuple[tuple[str, Any], ...]  # what the method was given, sorted by name
    ids: Ids  # (n,) the stream
    doc_starts: Ints  # (documents + 1,)
    start: Ints  # (windows,)
    stop: Ints  # (windows,)
    first: Ints  # (windows,)
    last: Ints  # (windows,)
    lead: Ids  # (windows,) id fed before the window's own tokens, or -1
    mask: Bools | None = None  # (n,)
    weight: Floats | None = None  # (windows,) weight of each window's mean, if average is "window"
    average: Average = "token"
    vocabulary: int | None = None  # ids from here on get no probability; None: all ids of the head
    prefix_group: Ints | None = None  # (windows,) windows with equal numbers share a prompt
    joined_at: Ints | None = None  # tokens where another text begins inside a joined document
    doc_group: Ints | None = None  # (documents,) documents with equal numbers are not independent; None: all are
    whole_documents: bool = False  # are bytes and words those of whole source documents? The method says so
    notes: tuple[str, ...] = ()  # what was adjusted or left out, in words; not part of the plan's identity

    def __post_init__(self) -> None:
        assert np.all(self.first >= self.start + (self.lead < 0)), "a target without context"
        assert np.all(self.last <= self.stop + 1), "a target beyond what its window predicts"
        assert np.all((self.start >= 0) & (self.last <= len(self.ids))), "a window outside the stream"

    def __len__(self) -> int:
        return len(self.start)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.settings)
        return (
            f"Plan({self.method}: {settings}; {len(self)} windows, {self.targets} targets, "
            f"{self.forward_tokens} forward tokens, {self.digest[:12]})"
        )

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that determines the scores and their average: equal if and only if the plans are.

        ``max_windows`` is not part of it, because the windows themselves are.
        """
        hasher = hashlib.sha256()
        head = {
            "method": self.method,
            "settings": [[name, value] for name, value in self.settings if name != "max_windows"],
            "average": self.average,
            "vocabulary": self.vocabulary,
        }
        hasher.update(json.dumps(head, sort_keys=True).encode())
        for name in ("ids", "doc_starts", "start", "stop", "first", "last", "lead", "mask", "weight"):
            array = getattr(self, name)
            hasher.update(f"|{name}:".encode())
            if array is not None:
                hasher.update(f"{array.dtype.str}{array.shape}".encode())
                hasher.update(np.ascontiguousarray(array).data)
        for name, added in (("joined_at", self.joined_at), ("doc_group", self.doc_group)):  # absent from older plans
            if added is not None:
                hasher.update(f"|{name}:".encode() + np.ascontiguousarray(added).data)
        return hasher.hexdigest()

    @property
    def path(self) -> DecodePath | None:
        """How the tokens of a window are fed: token by token, or by prefill if it is None."""
        return path_of(dict(self.settings))

    @cached_property
    def piece_starts(self) -> Ints:
        """Stream indices at which an unrelated text begins: the starts of documents, and of texts that were joined."""
        joined = np.zeros(0, np.int64) if self.joined_at is None else self.joined_at
        return np.union1d(self.doc_starts[:-1], joined)

    @cached_property
    def lengths(self) -> Ints:
        """How many tokens each window feeds, (windows,)."""
        return self.stop - self.start + (self.lead >= 0)

    @cached_property
    def target_counts(self) -> Ints:
        """How many targets each window has, (windows,)."""
        return self.allowed(self.first, self.last)

    def allowed(self, begin: Ints, end: Ints) -> Ints:
        """How many tokens may be targets between each ``begin`` and ``end`` of the stream."""
        return end - begin if self.mask is None else counts_between(self.mask, begin, end)

    @cached_property
    def target_offsets(self) -> Ints:
        """Where each window's targets begin among all targets, (windows + 1,)."""
        return np.concatenate([[0], np.cumsum(self.target_counts, dtype=np.int64)])

    @property
    def targets(self) -> int:
        return int(self.target_offsets[-1])

    @property
    def forward_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def target_window(self) -> Ints:
        return np.repeat(np.arange(len(self), dtype=np.int64), self.target_counts)

    @cached_property
    def target_token(self) -> Ints:
        """The stream index of each target, (targets,)."""
        counts = self.last - self.first
        begin = np.repeat(self.first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        index = begin + np.arange(len(begin), dtype=np.int64)
        return index if self.mask is None else index[self.mask[index]]

    @cached_property
    def target_document(self) -> Ints:
        return np.searchsorted(self.doc_starts, self.target_token, side="right").astype(np.int64) - 1

    @cached_property
    def covered(self) -> int:
        """How many tokens of the stream are scored, each counted once."""
        order = np.argsort(self.first, kind="stable")
        first, last = self.first[order], self.last[order]
        reached = np.concatenate([[0], np.maximum.accumulate(last)[:-1]])
        begin = np.minimum(np.maximum(first, reached), last)
        return int(self.allowed(begin, last).sum())

    @property
    def coverage(self) -> float:
        """Share of the stream's tokens that are scored at least once; a first token without context is never scored."""
        return self.covered / max(1, len(self.ids))

    @cached_property
    def largest_id(self) -> int:
        """The largest id that is fed; -1 if there is none."""
        return max(int(self.lead.max(initial=-1)), int(self.ids.max(initial=-1)))

    def window(self, index: int) -> Window:
        start, lead = int(self.start[index]), int(self.lead[index])
        body = self.ids[start : int(self.stop[index])]
        ids = body if lead < 0 else np.concatenate([np.array([lead], dtype=np.int32), body])
        first, last = int(self.first[index]), int(self.last[index])
        rows = np.arange(first, last, dtype=np.int32) - np.int32(start - (lead >= 0) + 1)
        targets = self.ids[first:last, None]
        if self.mask is not None:
            rows, targets = rows[self.mask[first:last]], targets[self.mask[first:last]]
        return Window(ids=ids, rows=rows, targets=targets)
