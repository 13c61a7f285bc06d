"""The interface of engines: windows in, answers out, in any order, each exactly once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.errors import EngineError, ModelError
from scoremode.values import Bools, Floats, Ints, Raw

if TYPE_CHECKING:
    from torch import Tensor

    from scoremode.core.references.reader import Reference

may_hang_at_exit = False  # set by an engine whose library waits at exit for processes that died

UNIFORM = "all logits are equal: the model gives every token the same probability, as untrained or empty weights do"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that are stored with every number: which engine computed it, and how."""

    engine: str
    dtype: str
    device: str
    head: str  # "exact-fp32", "as-served" or "closed-form"
    vocabulary: int | None  # ids are 0 .. vocabulary-1; None: it does not say
    context_length: int | None
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what may change the last digits: batch size, attention…
    notes: tuple[str, ...] = ()  # what a reader of the numbers must know of the model as it was loaded

    @property
    def known_vocabulary(self) -> int:
        """The size of the vocabulary, for callers that need whole distributions; EngineError if it is not known."""
        if self.vocabulary is None:
            raise EngineError(f"the {self.engine} engine does not know how many ids the model has", fix="use another")
        return self.vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class StoredHead:
    """The last matrix of a model as it is kept in a reference: whole, in its own dtype, nothing rounded."""

    weight: Raw  # (padded vocabulary, d)
    bias: Raw | None  # (padded vocabulary,)
    dtype: str
    bias_dtype: str
    vocabulary: int
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NoiseFloor:
    """How far a model is from itself when it is computed in a different way."""

    kl: Floats | None  # (m,) nats, one per target that was computed in a different way; None: not measured
    words: str  # what was different; or why nothing was measured


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """A baseline with hidden states: its final states, and the head that turns them into distributions.

    ``states(index, window)`` are the raw states (m, d) of the rows that window ``index`` asks for.
    """

    head: StoredHead
    dtype: str  # of the states
    states: Callable[[int, Window], Raw]
    stored: Reference | None = None  # the reference that has the states; None: they are in memory
    offsets: Ints | None = None  # where each window begins in it

    @property
    def place(self) -> tuple[str, Ints] | None:
        """The folder of the reference, for a process that reads rows itself, and where each window begins in it."""
        if self.stored is None or self.offsets is None:
            return None
        return str(self.stored.folder.resolve()), self.offsets


class StoredDistributions(ABC):
    """A baseline whose distributions were kept, in 16 bits.

    Its divergence has a rule of its own: ``head.sixteen_bits.kl_from_records``.
    """

    vocabulary: int
    least_kl: float = 0.0  # the smallest possible divergence from it: below 0 because it is not exact
    file: Any = None  # that they lie in, with its ``path`` and ``place``; None: no other process can read them

    @classmethod
    def at(cls, where: str) -> Self:
        """The baseline in a file or behind a URI: a replica opens it on its own machine."""
        raise NotImplementedError

    def part(self, windows: Ints) -> Self:
        """The same baseline for some of its windows, in this order."""
        raise NotImplementedError

    @abstractmethod
    def records(self, index: int, window: Window) -> Raw:
        """The records (m, words) of uint16 of the rows that window ``index`` asks for: see head/budget.py."""


class LogitsBaseline(ABC):
    """A baseline that runs at the same time as the candidate, and gives its logits. Nothing is rounded or kept."""

    vocabulary: int
    engine: Engine

    @abstractmethod
    def logits(self, index: int, window: Window) -> Callable[[slice], Tensor]:
        """Returns a function that gives the float32 logits (n, vocabulary) of some of the window's rows.

        It is called once for each part of the rows, in their order, and may be called for fewer rows than there are.
        The caller must not change the logits, and may use them only until the next call.
        """


WholeDistributions = StoredDistributions | LogitsBaseline
"""A baseline that gives the whole distribution of each row, instead of hidden states and a head."""


def require_one_vocabulary(baseline: int, candidate: int | None) -> None:
    """Refuse vocabularies of different sizes. Cutting the larger one would leave out some of its probability."""
    if baseline != candidate:
        raise ModelError(
            f"the baseline has {baseline} ids and the candidate {candidate}", fix="compare models with one vocabulary"
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Results that are wanted of each window in addition to its scores."""

    states: bool = False  # the final hidden states of the rows asked for
    against: Baseline | WholeDistributions | None = None  # KL(baseline‖this model) for each row
    records: bool = False  # the whole distribution of each row in 16 bits: head.sixteen_bits.encode_records


SCORES = Wanted()
"""Nothing but scores."""


class Engine(ABC):
    """Turns windows into answers."""

    facts: EngineFacts
    path: DecodePath | None = None  # how it feeds windows, as it was opened; None: by prefill
    longest: int | None = None  # tokens of the longest window that it takes as it was opened; None: the model's context
    show: Callable[[str], None] | None = None  # shows words at once, such as "2/4 replicas"
    watch: Callable[[int], None] | None = None  # is told how many tokens were fed of windows that have no answer yet
    measured: MutableMapping[int, Floats] | None = None  # KL of windows of a noise floor, in the order they came in

    @abstractmethod
    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        """Answers of every window that is not ``done``, with its index, in any order.

        Which windows share a batch must follow from ``source`` alone, never from ``done``, so that an interrupted run
        ends in the same numbers as one that was not. If ``want`` asks for something that the engine cannot give, it
        raises EngineError; its capabilities tell this before it is opened.
        """

    def feed_by(self, path: DecodePath) -> None:
        """Feeds windows by another decode path from now on, if ``EnginePlugin.feeds_also`` allows it."""
        self.path = path

    def stored_head(self) -> StoredHead:
        """The head of the model, to be stored in a reference."""
        raise EngineError(f"the {self.facts.engine} engine cannot give its head", fix="use --engine transformers")

    def logits(self, window: Window) -> Iterator[tuple[slice, Tensor]]:
        """Yields logits (n, vocabulary) of the rows that a window asks for, in order, with their places among the rows.

        They are those from which ``score`` computes its answers, bit for bit. A block is valid until the next one is
        asked for. Only engines with the capability ``logits`` have this: they can be baselines without hidden states.
        """
        raise EngineError(f"the {self.facts.engine} engine cannot give its logits", fix="use another")

    def steps(self, windows: Sequence[Window]) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
        """Decodes windows side by side, and yields the logits (n, vocabulary) of each step that has requested rows.

        Each line is described by the place of its window among ``windows`` and by the number of its row among the rows
        that the window asks for. Places grow within a step. A block is valid until the next one is asked for. Only
        engines with the capability ``logits`` and a decode path have this.
        """
        raise EngineError(f"the {self.facts.engine} engine cannot give the logits of its steps", fix="use another")

    def batches(self, source: WindowSource) -> list[Ints] | None:
        """Batches of windows that must be computed together to get the same bits.

        None: a window may be computed alone, or with windows that share its prompt. The result depends on ``source``
        alone. Replicas are given whole batches, and their sources say which windows share one:
        ``scores.answers.prescribed_batches``.
        """
        return None

    def account(self) -> dict[str, Any]:
        """Facts for the manifest about how the last question was scored; those under ``notes`` are printed as well."""
        return {}

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
        """Compute the windows that are not ``done`` in an unusual way, and measure their KL from the usual states.

        An unusual way adds numbers in another order, as another batch does; it never uses fewer bits. The engine says
        what it changed, leaves out rows that it may have computed in the usual way, and is unchanged afterwards. It
        may add what it measures to ``measured``; windows that are there need not be computed again.
        """
        return only_one_way(self)

    def close(self) -> None:  # noqa: B027 - most engines have nothing to give back
        """Release the memory and processes that the engine holds."""


def only_one_way(engine: Engine) -> NoiseFloor:
    """The noise floor of an engine whose model cannot be computed in another way."""
    return NoiseFloor(None, f"the {engine.facts.engine} engine knows one way to compute")
