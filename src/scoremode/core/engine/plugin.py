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
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from scoremode.core.engine.options import Options
from scoremode.core.plan.path import PREFILL, DecodePath
from scoremode.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from scoremode.core.engine.base import Engine
    from scoremode.core.models.subject import Subject
    from scoremode.studies.attribution.layer_states import LayerStates
    from scoremode.studies.attribution.swapping import Swapper
    from scoremode.studies.rollouts.generation import Generator
    from scoremode.studies.rollouts.writing import DrawingRules, Writer

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
    side_by_side: bool = False  # can run beside another engine in one process, window by window, without a reference
    replicas: bool = False  # several of it may run at a time
    logits: bool = False  # has ``Engine.logits``: baselines without hidden states
    generates: bool = False  # has ``open_generator``
    writes: bool = False  # has ``open_writer``
    layer_states: bool = False  # has ``open_layers``: hidden states between layers
    swaps: bool = False  # has ``open_swapper``
    paths: tuple[str, ...] = (PREFILL,)  # how it can feed a window, chunked and cache-hit included


EVERYTHING = Capabilities(
    rank=True,
    entropy=True,
    top=True,
    any_target=True,
    hidden_states=True,
    divergence=True,
    distributions=True,
    side_by_side=True,
    replicas=True,
)
"""Every ability that scoring needs. What an engine can do besides is added by name: logits, writing, layers, swaps."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that an engine is opened for, as far as it is known."""

    longest: int | None = None  # tokens of the longest window
    shares_prompts: bool = False  # do many windows begin alike?
    path: DecodePath | None = None  # how windows are fed; None: by prefill


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a model takes while it is scored, about."""

    size: int  # bytes
    on_gpu: bool | None = False  # None: the engine itself chooses, by what is free

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

    return checkpoint_subject(
        model,
        tokenizer=tokenizer,
        trust_remote_code=bool(options.trust_remote_code),
        revision=options.revision,
        token=options.token,
    )


class EnginePlugin(ABC):
    """An engine before it is opened."""

    contract: ClassVar[int]  # CONTRACT of the scoremode that it was written for; every plug-in states it itself
    name: ClassVar[str]
    summary: ClassVar[str]  # one line, for ``scoremode engines``
    capabilities: ClassVar[Capabilities] = Capabilities()
    options: ClassVar[type[Options]] = Options
    instead: ClassVar[Mapping[str, str]] = {}  # an option that it lacks -> what to do instead
    keeps_runs: ClassVar[bool] = True  # else only the caller knows what it is: nothing is found again
    opens_for_each_question: ClassVar[bool] = False  # its model may change between two questions
    is_default: ClassVar[bool] = False  # the engine for checkpoints if none is named
    opens_checkpoints: ClassVar[bool] = False  # does it load folders in the Hugging Face layout?
    packages: ClassVar[tuple[str, ...]] = ()  # what its numbers come from; their versions are kept with every run of it
    known_to_all_runs: ClassVar[bool] = False  # do runs of other engines keep the versions of these packages too?
    addresses: ClassVar[tuple[str, ...]] = ()  # how an address begins that is given instead of the name: ("http://",)
    address: str | None = None  # the one that was given

    def at(self, address: str) -> Self:
        """A copy of this engine for a server's address, for ``--engine ADDRESS``. The server is not contacted yet."""
        found = copy(self)
        found.address = address
        return found

    @property
    def called(self) -> str:
        """The value of ``--engine`` that chooses this engine."""
        return self.address or self.name

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

    def open_generator(self, subject: Subject, options: Any, work: Work) -> Generator:
        """Open the model to write text, for tasks that need it. Only if ``capabilities.generates`` is true."""
        raise NotImplementedError(f"the {self.name} engine does not generate")

    def open_writer(self, subject: Subject, options: Any, work: Work, rules: DrawingRules) -> Writer:
        """Open the model to write texts by these rules, for rollouts. Only if ``able().writes`` is true.

        ``work.longest`` is the longest prompt with its text. ``work.path`` says how many texts are written side by
        side; None: the engine's own choice.
        """
        raise NotImplementedError(f"the {self.name} engine does not write")

    def open_layers(self, subject: Subject, options: Any, work: Work) -> LayerStates:
        """Open the model to give hidden states between its layers. Only if ``able().layer_states`` is true."""
        raise NotImplementedError(f"the {self.name} engine does not give the states of layers")

    def open_swapper(self, subject: Subject, options: Any, work: Work, candidates: Sequence[str]) -> Swapper:
        """Open the model to swap its weights for those of candidates, for attributions. Only if ``able().swaps``."""
        raise NotImplementedError(f"the {self.name} engine does not swap weights")

    def chunked(self, options: Any, tokens: int) -> Any:
        """The options with which at most ``tokens`` tokens are computed at once. Only if ``able().paths`` has it."""
        raise NotImplementedError(f"the {self.name} engine has no chunked prefill")

    def promises_same_bits(self, options: Any) -> str:
        """Names the setting that promises equal bits for a window, whatever its batch and its path; '' if none does."""
        return ""

    def ranks(self, options: Any) -> int:
        """The number of processes in which the engine runs its model: tensor times pipeline parallel size."""
        return 1

    def on_gpus(self, options: Any) -> bool:
        """Does each of the engine's ranks need a GPU of its own?"""
        return False

    def memory(self, subject: Subject, options: Any, longest: int) -> MemoryNeed:
        """The memory for a model and windows of at most ``longest`` tokens, about. Nothing is loaded to tell it."""
        from scoremode.head.budget import most_bytes

        rows = longest * (subject.vocabulary or 0) * 4  # of float32 logits, of both models of a comparison
        return MemoryNeed((subject.weight_bytes or 0) + min(2 * rows, most_bytes("cpu", 2)), self.on_gpus(options))

    def cache_bytes(self, subject: Subject, options: Any, tokens: int) -> int | None:
        """The bytes of the keys and values of so many tokens on the decode path, about; None if they are not known."""
        return None

    def over_nodes(self, options: Any) -> bool:
        """Does the engine itself place its ranks on the nodes of a Ray cluster?"""
        return False

    def as_replica(self, options: Any) -> Any:
        """The options for one of several replicas; a replica sees only the GPUs that it was given."""
        return options

    def limit(self, options: Any) -> tuple[str, int] | None:
        """The flag with which a user limited the length of windows, and the limit in tokens; None if none is set."""
        return None

    def about(self) -> list[tuple[str, str, bool]]:
        """Facts for ``scoremode doctor``, each as a label, a value, and whether it is good."""
        return []

    def self_test_model(self, checkpoint: Path) -> str | None:
        """The model with which ``scoremode doctor`` tests this engine, given its small checkpoint; None: no test."""
        return str(checkpoint) if self.opens_checkpoints else None

    def self_test_options(self) -> dict[str, Any]:
        """Options that ``scoremode doctor`` opens this engine with."""
        return {}

    def self_test_dtype(self) -> str:
        """The precision of this engine's self-test, which decides how far its numbers may be from the exact ones."""
        return str(self.self_test_options().get("dtype", "float32"))
