"""The description of an engine before anything is opened: the contract between scoremode and its engines.

A package that brings an engine subclasses EnginePlugin and names the class in its pyproject.toml:

    [project.entry-points."scoremode.engines"]
    dice = "scoremode_dice:DicePlugin"

examples/engine_plugin/ is a whole package of this kind. Nothing here imports anything heavy; an engine's own libraries
are imported in ``open``.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.engine.options import Options
from scoremode.core.plan.path import PREFILL, DecodePath
from scoremode.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from scoremode.core.engine.base import Engine
    from scoremode.core.models.subject import Subject

CONTRACT = 1
"""The version of this contract. It is raised when engines must change to keep working."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine. A question that needs more of them is refused before any weights are loaded."""

    rank: bool = False
    entropy: bool = False
    top: bool = False  # the model's first choice and its log-probability
    any_target: bool = False  # tokens other than the one that follows, and several per row
    hidden_states: bool = False  # with the head: references, and baselines of comparisons
    divergence: bool = False  # KL against a reference
    distributions: bool = False  # the whole distribution of a row in 16 bits, for llama.cpp's files of base logits
    replicas: bool = False  # several engines of this kind may run at a time
    logits: bool = False  # has ``Engine.logits``: baselines without hidden states
    paths: tuple[str, ...] = (PREFILL,)  # how it can feed a window, chunked included
    scores_only: bool = False  # it has none of the abilities that wings know for engines of its name
    same_bits: str = ""  # the setting that promises equal bits for a window, whatever its batch and its path

    @staticmethod
    def all(**other: Any) -> Capabilities:
        """Everything that scoring may need, but for what ``other`` says."""
        usual = ("rank", "entropy", "top", "any_target", "hidden_states", "divergence", "distributions")
        return Capabilities(**{**dict.fromkeys((*usual, "replicas"), True), **other})


@dataclass(frozen=True, slots=True)
class Work:
    """The work that an engine is opened for, as far as it is known."""

    longest: int | None = None  # tokens of the longest window
    shares_prompts: bool = False  # do many windows begin alike?
    path: DecodePath | None = None  # how windows are fed; None: by prefill

    @property
    def cached_tokens(self) -> int:
        """The tokens whose keys and values are in memory on the decode path."""
        return 0 if self.path is None else (self.longest or 0) * self.path.sequences


@dataclass(frozen=True, slots=True)
class Placement:
    """The processes of an engine with some options, and what each of them needs."""

    ranks: int = 1  # processes: tensor times pipeline parallel size
    on_gpus: bool = False  # does each rank need a GPU of its own?
    over_nodes: bool = False  # does the engine itself place its ranks on the nodes of a Ray cluster?
    replica_options: Any = None  # options of a replica, which sees only its own GPUs; None: the same


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How ``scoremode info --test`` tests an engine."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"  # decides how far the engine's numbers may be from the exact ones
    logprob: float | None = None  # of every token; None: ``model`` is the checkpoint, which is computed in float64
    judge: str | None = None  # a plain checkpoint with the weights of ``model``, if that is another one
    note: str = ""  # is printed beside the result


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a model takes while it is scored, about."""

    size: int  # bytes
    on_gpu: bool | None = False  # None: the engine itself chooses, by what is free
    cache: int | None = None  # bytes of keys and values on the decode path; None if they are not known

    @property
    def where(self) -> str:
        """Words for memory that is not that of the machine, with a space before them."""
        return {None: " (GPU or CPU)", True: " (GPU)", False: ""}[self.on_gpu]


def require_docstrings(library: str) -> None:
    """Refuse to start a library that reads its own docstrings if Python has removed them."""
    if sys.flags.optimize > 1:
        words = f"{library} does not start without docstrings, which python -OO removes"
        raise EngineError(words, fix="unset PYTHONOPTIMIZE, or set it to 1")


def subject_of_checkpoint(model: str, options: Any, tokenizer: str | None) -> Subject:
    """The subject of a Hugging Face checkpoint, for engines that load checkpoints. No weights are loaded."""
    from scoremode.core.models.subject import checkpoint_subject

    return checkpoint_subject(model, options, tokenizer)


class EnginePlugin(ABC):
    """An engine before it is opened."""

    contract: ClassVar[int]  # CONTRACT of the scoremode that it was written for; every plug-in states it itself
    name: ClassVar[str]
    summary: ClassVar[str]  # one line, for ``scoremode info engines``
    models: ClassVar[str] = ""  # what names of its models are, for the help: "a GGUF file"
    capabilities: ClassVar[Capabilities] = Capabilities()
    options: ClassVar[type[Options]] = Options
    keeps_runs: ClassVar[bool] = True  # else runs are not reused: only the caller knows the model
    opens_for_each_question: ClassVar[bool] = False  # its model may change between two questions
    is_default: ClassVar[bool] = False  # the engine for checkpoints if none is named
    opens_checkpoints: ClassVar[bool] = False  # does it load folders in the Hugging Face layout?
    starts_slowly: ClassVar[bool] = False  # is a user told how often it will start?
    packages: ClassVar[tuple[str, ...]] = ()  # what its numbers come from; their versions are kept with every run of it
    known_to_all_runs: ClassVar[bool] = False  # do runs of other engines keep the versions of these packages too?
    addresses: ClassVar[tuple[str, ...]] = ()  # how an address begins that is given instead of the name: ("http://",)
    address: str | None = None  # the address that the user gave

    abilities: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """What it can do besides scoring, if no wing knows: an ability, and a function that takes (plugin, subject,
    options, work, …) and opens the model for it. Who asks for an ability says what is returned."""

    def able(self) -> Capabilities:
        """The abilities of this engine. An engine at an address may ask the server there first."""
        return self.capabilities

    def problem(self) -> str | None:
        """Why this engine cannot run here, and what to do; None if it can."""
        return None

    def claims(self, model: str) -> bool:
        """Does a model's name, such as ``dice:6``, belong to this engine alone? Nothing is loaded to decide it."""
        return False

    @abstractmethod
    def subject(self, model: str, options: Any, tokenizer: str | None) -> Subject:
        """The model as far as it is known before the engine is opened; ModelError if it does not exist."""

    def settings(self, subject: Subject, options: Any) -> dict[str, Any]:
        """The settings that the engine would use, decided before it is opened: stored runs are found without weights.

        Options that cannot work are refused here. The result must have every setting that may change a score.
        """
        identity: dict[str, Any] = options.identity()
        return identity

    @abstractmethod
    def open(self, subject: Subject, options: Any, work: Work) -> Engine:
        """Load the weights and start the engine."""

    def feeds_also(self, opened: DecodePath, other: DecodePath) -> bool:
        """Can an engine that was opened for one decode path feed by the other too, after ``Engine.feed_by``?"""
        return False

    def chunked(self, options: Any, tokens: int) -> Any:
        """The options with which at most ``tokens`` tokens are computed at once. Only if ``able().paths`` has it."""
        raise NotImplementedError(f"the {self.name} engine has no chunked prefill")

    def placement(self, options: Any) -> Placement:
        """The processes in which the engine runs its model."""
        return Placement()

    def memory_need(self, subject: Subject, options: Any, work: Work) -> MemoryNeed:
        """The memory for a model and its work, about. Nothing is loaded to tell it."""
        from scoremode.head.budget import most_bytes

        rows = (work.longest or 0) * (subject.vocabulary or 0) * 4  # float32 logits, of both models of a comparison
        size = (subject.weight_bytes or 0) + min(2 * rows, most_bytes("cpu", 2))
        return MemoryNeed(size, self.placement(options).on_gpus)

    def self_test(self, checkpoint: Path) -> SelfTest | None:
        """How ``scoremode info --test`` tests this engine, given a small checkpoint; None: it has no test."""
        return SelfTest(str(checkpoint)) if self.opens_checkpoints else None
