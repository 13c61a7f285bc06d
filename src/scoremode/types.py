"""The values that travel through scoremode: NumPy only, frozen, shapes beside the fields.

text ──▶ Tokens ──▶ Plan ──▶ Window… ──engine──▶ Answers… ──▶ Scores ──▶ Run
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from scoremode.errors import RunError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

Average = Literal["token", "window", "document"]
"""How scores become one perplexity: over all targets; weighted window means; arithmetic mean over documents."""

BLOCK = 1 << 14
"""Targets that are worked on at a time, so that what is held at once does not grow with the text."""


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, no longer writable: values here are shared between threads, engines and caches."""
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its uncertainty.

    ``stderr`` is one standard error, None where it cannot be known: too few groups. ``n`` counts targets, ``groups``
    the independent pieces of text that the error was computed from. ``low`` and ``high`` are the 95 % bounds, by
    Student's t with ``freedom`` degrees of freedom.

    >>> Estimate(12.5, 0.25, 1000, 40)
    12.5 ± 0.25
    """

    value: float
    stderr: float | None
    n: int
    groups: int
    freedom: float | None = None
    low: float | None = None
    high: float | None = None

    def __repr__(self) -> str:
        error = "?" if self.stderr is None else f"{self.stderr:.3g}"
        return f"{self.value:.6g} ± {error}"

    def __float__(self) -> float:
        return self.value

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Estimate:
        """An estimate as a manifest keeps it: no value means that it was infinite."""
        value = math.inf if stored["value"] is None else stored["value"]
        names = ("stderr", "n", "groups", "freedom", "low", "high")
        return Estimate(value, *(stored[name] for name in names))


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What must be equal for two runs to be comparable token by token."""

    fingerprint: str  # sha256 over the vocabulary and how a probe text is cut
    size: int  # ids are 0 .. size-1
    bos: int | None
    eos: int | None
    adds_bos: bool  # does plain encoding put a BOS in front?


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Documents as one stream of ids; document d is ``ids[doc_starts[d]:doc_starts[d + 1]]``."""

    ids: Ids  # (n,)
    doc_starts: Ints  # (documents + 1,)
    char_end: Ints  # (n,) in the document's text: a token owns all from the end of the one before to its own
    byte_len: Ids  # (n,) UTF-8 bytes of the document that this token completes; sums to the document's bytes
    word_starts: Ids  # (n,) words (runs of non-space) that begin inside this token
    doc_bytes: Ints  # (documents,) of the source text, before any rewriting by a recipe
    doc_words: Ints  # (documents,) likewise, as lm-evaluation-harness counts them
    tokenizer: TokenizerFacts
    target_mask: Bools | None = None  # (n,) tokens that may be targets; None: all
    joined_at: Ints | None = None  # tokens where another text begins inside a document that was joined; None: nowhere

    @property
    def documents(self) -> int:
        return len(self.doc_starts) - 1

    @property
    def char_start(self) -> Ints:
        """Where each token's characters begin in the document's text, (n,); special tokens are empty spans."""
        return self.char_start_of(np.arange(len(self)))

    def char_start_of(self, index: Ints) -> Ints:
        """The same for some tokens: where the token before ended, 0 for the first of a document."""
        document = np.searchsorted(self.doc_starts, index, side="right") - 1
        return np.where(self.doc_starts[document] == index, 0, self.char_end[index - 1])

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Tokens fed in one forward pass, and what is asked of them.

    Row r sees ``ids[:r + 1]`` and predicts what follows; position 0 is never a target because no row precedes it.
    """

    ids: Ids  # (t,) fed
    rows: Ids  # (m,) ascending, each < t
    targets: Ids  # (m, k) token ids whose score is wanted at that row


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """An engine's answer to one window: a line per row asked, a column per target asked at that row."""

    logprob: Floats  # (m, k) nats
    rank: Ints  # (m, k) 1 = first choice; ties go to the lower id
    entropy: Floats  # (m,) nats, of the whole next-token distribution
    top: Ids  # (m,) first choice
    top_logprob: Floats  # (m,) nats


class WindowSource(Protocol):
    """Anything that engines can score: a Plan, or a list of hand-made windows."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Ints: ...  # (windows,) tokens fed by each

    @property
    def prefix_group(self) -> Ints | None: ...  # (windows,) equal numbers promise a common beginning worth sharing

    @property
    def vocabulary(self) -> int | None: ...  # ids from here on get no probability; None: all that the head has

    def window(self, index: int) -> Window: ...


@dataclass(frozen=True, slots=True)
class WindowList:
    """Hand-made windows, for questions that no method asks."""

    items: tuple[Window, ...]
    prefix_group: Ints | None = None
    vocabulary: int | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> Ints:
        return np.array([len(w.ids) for w in self.items], dtype=np.int64)

    def window(self, index: int) -> Window:
        return self.items[index]


@dataclass(frozen=True, slots=True, eq=False)
class TargetBlock:
    """Some consecutive targets of a plan, those of whole windows: where each of them stands."""

    begin: int  # among all targets
    end: int
    window: Ints  # (end - begin,)
    token: Ints  # (end - begin,) index in the stream
    document: Ints  # (end - begin,)

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class Plan:
    """Which windows are fed, which tokens are scored, how the scores are averaged: the same for every engine.

    Window w feeds ``[lead[w]] + ids[start[w]:stop[w]]`` (no lead where it is -1) and scores ``ids[first[w]:last[w]]``,
    only where ``mask`` allows. Each of those tokens is predicted from the row before it, so a target is never the
    first token fed, and the last target may be the one token after the last one fed.
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
    weight: Floats | None = None  # (windows,) of each window's mean, where average is "window"
    average: Average = "token"
    vocabulary: int | None = None  # ids from here on get no probability; None: all that the head has
    prefix_group: Ints | None = None  # (windows,)
    joined_at: Ints | None = None  # tokens where another text begins inside a document that was joined
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
        given = ", ".join(f"{k}={v}" for k, v in self.settings)
        return (
            f"Plan({self.method}: {given}; {len(self)} windows, {self.targets} targets, "
            f"{self.forward_tokens} forward tokens, {self.digest[:12]})"
        )

    @cached_property
    def digest(self) -> str:
        """sha256 of all that decides the scores and their average: equal if and only if the plans are.

        A limit on windows is not part of it: what it left are the windows, and those are.
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
        if self.joined_at is not None:
            hasher.update(b"|joined_at:" + np.ascontiguousarray(self.joined_at).data)
        return hasher.hexdigest()

    @cached_property
    def piece_starts(self) -> Ints:
        """Tokens where a text begins that has nothing to do with the one before: documents, and what was joined."""
        joined = np.zeros(0, np.int64) if self.joined_at is None else self.joined_at
        return np.union1d(self.doc_starts[:-1], joined)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens fed by each window, (windows,)."""
        return self.stop - self.start + (self.lead >= 0)

    @cached_property
    def target_counts(self) -> Ints:
        """Targets of each window, (windows,)."""
        return self._allowed(self.first, self.last)

    def _allowed(self, begin: Ints, end: Ints) -> Ints:
        """How many tokens may be targets in each stretch of the stream."""
        if self.mask is None:
            return end - begin
        before = np.zeros(len(self.mask) + 1, np.int64)
        np.cumsum(self.mask, out=before[1:])
        counts: Ints = before[end] - before[begin]
        return counts

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
        """The window of each target, (targets,)."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.target_counts)

    @cached_property
    def target_token(self) -> Ints:
        """The stream index of each target, (targets,)."""
        return self._tokens_of(slice(None))

    def _tokens_of(self, windows: slice) -> Ints:
        first, last = self.first[windows], self.last[windows]
        counts = last - first
        begin = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        index = begin + np.arange(len(begin), dtype=np.int64)
        return index if self.mask is None else index[self.mask[index]]

    @cached_property
    def target_document(self) -> Ints:
        """The document of each target, (targets,)."""
        return self._documents_of(self.target_token)

    def _documents_of(self, token: Ints) -> Ints:
        return np.searchsorted(self.doc_starts, token, side="right").astype(np.int64) - 1

    def blocks(self) -> Iterator[TargetBlock]:
        """All targets in order, about BLOCK at a time: what ``target_…`` say, without holding it for a whole text."""
        offsets, at = self.target_offsets, 0
        while at < len(self):
            reached = int(np.searchsorted(offsets, offsets[at] + BLOCK, side="right")) - 1
            stop = max(at + 1, reached)  # a window is never cut, however long it is
            token = self._tokens_of(slice(at, stop))
            window = np.repeat(np.arange(at, stop, dtype=np.int64), self.target_counts[at:stop])
            yield TargetBlock(int(offsets[at]), int(offsets[stop]), window, token, self._documents_of(token))
            at = stop

    @cached_property
    def covered(self) -> int:
        """How many tokens of the stream are scored, each counted once."""
        order = np.argsort(self.first, kind="stable")
        first, last = self.first[order], self.last[order]
        reached = np.concatenate([[0], np.maximum.accumulate(last)[:-1]])
        begin = np.minimum(np.maximum(first, reached), last)
        return int(self._allowed(begin, last).sum())

    @property
    def coverage(self) -> float:
        """Share of the stream's tokens that are scored at least once (a first token without context never is)."""
        return self.covered / max(1, len(self.ids))

    @property
    def scores_once(self) -> bool:
        """Is no token scored twice?"""
        return self.covered == self.targets

    def window(self, index: int) -> Window:
        start, lead = int(self.start[index]), int(self.lead[index])
        body = self.ids[start : int(self.stop[index])]
        ids = body if lead < 0 else np.concatenate([np.array([lead], dtype=np.int32), body])
        positions = np.arange(self.first[index], self.last[index])
        if self.mask is not None:
            positions = positions[self.mask[positions]]
        rows = positions - start + (lead >= 0) - 1
        return Window(ids=ids, rows=rows.astype(np.int32), targets=self.ids[positions][:, None])


class StoredColumns(Protocol):
    """Columns on disk, of one length."""

    rows: int

    def read(self, name: str) -> npt.NDArray[Any]:
        """A whole column."""
        ...

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Some columns side by side, BLOCK rows at a time."""
        ...


class Columns:
    """Arrays of one length. Those of a stored run are read when they are first asked for; from then on they stay."""

    __slots__ = ("_stored",)
    _stored: StoredColumns  # left empty where all columns are in memory

    @classmethod
    def on_disk(cls, stored: StoredColumns) -> Self:
        made = object.__new__(cls)
        object.__setattr__(made, "_stored", stored)
        return made

    if not TYPE_CHECKING:  # type checkers know the columns as fields

        def __getattr__(self, name: str) -> Any:
            """Python asks here only for a slot that is still empty."""
            if name not in type(self).__slots__:
                raise AttributeError(f"'{type(self).__name__}' has no column '{name}'")
            column = self._stored.read(name)
            object.__setattr__(self, name, column)
            return column

    def blocks(self, *names: str) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Some columns side by side, BLOCK rows at a time; what lies on disk is not kept in memory."""
        stored = getattr(self, "_stored", None)
        if stored is not None:
            yield from stored.blocks(names)
            return
        columns = [getattr(self, name) for name in names]
        for begin in range(0, len(columns[0]), BLOCK):
            yield tuple(column[begin : begin + BLOCK] for column in columns)


@dataclass(frozen=True, slots=True, eq=False)
class Scores(Columns):
    """One row per target, in plan order."""

    logprob: Floats  # (n,) nats, <= 0
    rank: Ints  # (n,) 1 = the model's first choice
    entropy: Floats  # (n,) nats, of the whole next-token distribution
    top: Ids  # (n,) the model's first choice
    top_logprob: Floats  # (n,) nats

    def __len__(self) -> int:
        stored = getattr(self, "_stored", None)
        return len(self.logprob) if stored is None else stored.rows

    def rows(self, begin: int, end: int) -> Scores:
        """The scores of some consecutive targets."""
        return Scores(*(column[begin:end] for _, column in self.columns()))

    @staticmethod
    def empty(n: int) -> Scores:
        """Room for n scores, NaN until filled, so that a hole cannot pass for a number."""
        return Scores(
            logprob=np.full(n, np.nan),
            rank=np.zeros(n, np.int64),
            entropy=np.full(n, np.nan),
            top=np.full(n, -1, np.int32),
            top_logprob=np.full(n, np.nan),
        )

    def columns(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name in ("logprob", "rank", "entropy", "top", "top_logprob"):
            yield name, getattr(self, name)


@dataclass(frozen=True, slots=True, eq=False)
class TargetFacts(Columns):
    """Where each target stands in the text: what a person needs to read the scores. One row per target."""

    window: Ints  # (n,)
    document: Ints  # (n,)
    token: Ints  # (n,) index in the stream
    id: Ids  # (n,)
    byte_len: Ids  # (n,)
    word_starts: Ids  # (n,)
    group: Ints  # (n,) targets of one group are not independent of each other
    weight: Floats  # (n,) how much the target counts in the method's mean: 1 unless windows are averaged
    text: npt.NDArray[np.object_]  # (n,) the characters of the source that the token stands for
    top_text: npt.NDArray[np.object_]  # (n,) the model's first choice, decoded


@dataclass(frozen=True, eq=False)
class Run:
    """Scores plus where they came from.

    >>> run = sm.ppl("smollm2-135m", text="The quick brown fox")   # doctest: +SKIP
    >>> run.perplexity                                             # doctest: +SKIP
    """

    plan_digest: str
    scores: Scores
    facts: TargetFacts
    manifest: Mapping[str, Any]  # model, tokenizer, corpus, method, engine, hardware, timings, metrics
    path: str | None = None  # the folder it is kept in
    cached: bool = False  # read from that folder instead of computed
    kl: Floats | None = None  # (n,) nats, KL(baseline‖this model), where it was scored against a baseline

    def _estimate(self, name: str) -> Estimate:
        if name not in self.manifest["metrics"]:
            raise RunError(f"this run has no {name}", fix="it scored no whole word or byte: give a longer text")
        return Estimate.from_json(self.manifest["metrics"][name])

    @property
    def perplexity(self) -> Estimate:
        return self._estimate("perplexity")

    @property
    def mean_nll(self) -> Estimate:
        """Nats a target, averaged as the method says: perplexity is its exponential (but for mean-of-texts)."""
        return self._estimate("mean_nll")

    @property
    def bits_per_byte(self) -> Estimate:
        return self._estimate("bits_per_byte")

    @property
    def word_perplexity(self) -> Estimate:
        return self._estimate("word_perplexity")

    @property
    def mean_rank(self) -> Estimate:
        return self._estimate("mean_rank")

    @property
    def top1_accuracy(self) -> Estimate:
        return self._estimate("top1_accuracy")

    def to_arrow(self) -> Any:
        """Every column, one row a target, as a ``pyarrow.Table``."""
        from scoremode.columns import to_arrow

        return to_arrow(self.scores, self.facts, self.kl)

    def _repr_html_(self) -> str:
        from scoremode.display.notebook import run_table

        return run_table(self)

    def summary(self) -> dict[str, Any]:
        """The facts that ``--json`` prints."""
        from scoremode.runs import summary

        return summary(self)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A candidate against a baseline, target by target, on one plan.

    Arrays have a line per target, in plan order, as the scores of both runs have.
    """

    name: str  # of the candidate, unique among those that are compared together
    baseline: Run
    candidate: Run
    groups: Ints  # (n,) targets of one group are not independent of each other
    weight: Floats  # (n,) how much a target counts in the method's mean: 1 unless windows are averaged
    kl: Floats | None  # (n,) nats, KL(baseline‖candidate) over the whole vocabulary; None where two finished runs met
    noise_kl: Floats | None  # (m,) KL of the baseline against itself, computed otherwise; None where not measured
    manifest: Mapping[str, Any]  # how it was made: commands, engines, sizes (bytes, bits_per_weight), statistics
    path: str | None = None  # the folder it is kept in
    noise_perturbed: str | None = None  # what was computed otherwise for ``noise_kl``; why not, where that is None

    def statistics(self) -> dict[str, Any]:
        """Perplexities, divergence and shares, with paired errors: see docs/compare-statistics.md."""
        from scoremode.statistics import describe

        return describe(self)

    def _repr_html_(self) -> str:
        from scoremode.display.notebook import comparison_table

        return comparison_table(self, self.statistics())
