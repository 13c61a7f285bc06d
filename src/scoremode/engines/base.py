"""What an engine is: windows in, answers out, in any order, each exactly once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from scoremode.errors import EngineError, OptionError
from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.values import Bools, Floats, Ints, Raw


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may ask of an engine. None means: the engine's own choice."""

    dtype: str | None = None
    device: str | None = None
    batch_tokens: int | None = None
    head: str | None = None  # "exact" or "as-served"
    head_kernel: str | None = None  # the code that turns hidden states into scores: one of head.budget.KERNELS
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    engine_args: tuple[tuple[str, Any], ...] | None = None  # any other argument of vllm.LLM
    allow_untested_vllm: bool | None = None
    trust_remote_code: bool | None = None
    shares_prompts: bool | None = None  # many windows begin alike: worth a prefix cache

    def given(self) -> dict[str, Any]:
        """Options that were chosen, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


UNIFORM = "all logits are equal: the model gives every token the same probability, as untrained or empty weights do"

OF_VLLM = {
    "quantization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "engine_args",
    "allow_untested_vllm",
}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is written beside every number: who computed it, and how."""

    engine: str
    dtype: str
    device: str
    head: str  # "exact-fp32", "as-served" or "closed-form"
    vocabulary: int
    context_length: int | None
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what may change the last digits: batch size, attention…
    notes: tuple[str, ...] = ()  # what a reader of the numbers must know of the model as it was loaded


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
    """How far a model lies from itself when it is computed otherwise."""

    kl: Floats | None  # (m,) nats, a line per target that was computed otherwise; None: not measured
    words: str  # what was done otherwise; else why nothing was measured


class Baseline(Protocol):
    """What a candidate is compared with: final hidden states, and the head that makes distributions of them."""

    @property
    def head(self) -> StoredHead: ...

    @property
    def dtype(self) -> str: ...  # of the states

    @property
    def place(self) -> tuple[str, Ints] | None: ...  # folder of a reference, and where each window begins in it

    def states(self, index: int, window: Window) -> Raw:
        """The final hidden states (m, d) of the rows that window ``index`` asks for."""


@dataclass(frozen=True, slots=True)
class Want:
    """What is wanted of each window beside its scores."""

    states: bool = False  # the final hidden states of the rows asked for
    against: Baseline | None = None  # KL(baseline‖this model) for each row, over the whole vocabulary


SCORES = Want()
"""Nothing but scores."""


class Engine(ABC):
    """Turns windows into answers."""

    facts: EngineFacts

    @abstractmethod
    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        """Answers of every window that is not ``done``, with its index, in any order.

        Which windows share a batch must follow from ``source`` alone, never from ``done``, so that an interrupted run
        ends in the same numbers as one that was not. What ``want`` asks for and the engine cannot give is an
        EngineError; its capabilities say so before it is opened.
        """

    def stored_head(self) -> StoredHead:
        """The head, for a reference."""
        raise EngineError(f"the {self.facts.engine} engine cannot give its head", fix="use --engine transformers")

    def computes(self, source: WindowSource, done: Bools) -> Bools:
        """Windows that are computed when these are done: more than are missing where batches are computed whole."""
        return ~done

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
        """Score what is not ``done`` against its own states, in another way than usual.

        Another way is another order of additions, as another batch makes it: never fewer bits. An engine says what it
        did, leaves out what it cannot be sure to have computed otherwise, and is afterwards as it was before.
        """
        return NoiseFloor(None, f"the {self.facts.engine} engine knows one way to compute")

    def close(self) -> None:  # noqa: B027 - most engines have nothing to give back
        """Give back what the engine holds."""


def gather_options(options: EngineOptions | None, arguments: dict[str, Any]) -> EngineOptions:
    """Options given whole or by name: those named in ``arguments`` are taken out of it."""
    named = {f.name: arguments.pop(f.name) for f in fields(EngineOptions) if f.name in arguments}
    return replace(options or EngineOptions(), **named)


def refuse_options(engine: str, options: EngineOptions, accepted: set[str], elsewhere: dict[str, str]) -> None:
    """An error for the first option that this engine does not have, naming the engine or option that does."""
    for name, value in options.given().items():
        if name in accepted or value is False:
            continue
        flag = "--engine-arg" if name == "engine_args" else "--" + name.replace("_", "-")
        fix = elsewhere.get(name, f"leave {flag} out" + (", or use --engine vllm" if name in OF_VLLM else ""))
        raise OptionError(f"{flag} does not apply to the {engine} engine", fix=fix)
