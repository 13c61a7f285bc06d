"""What can be asked of the vLLM engine, and how that becomes arguments of ``vllm.LLM``. Imports nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from scoremode.engines.options import CheckpointOptions, Pairs, option
from scoremode.engines.plugin import Work
from scoremode.engines.vllm import support
from scoremode.errors import OptionError
from scoremode.head.budget import check_kernel_name

HeadChoice = Literal["exact", "as-served"]
SAME = {
    "head",
    "head_kernel",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "quantization",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "enforce_eager",
    "trust_remote_code",
    "allow_untested",
}
SHORTEST = 16  # tokens of the start-up self-test, and a little room


@dataclass(frozen=True, slots=True)
class VllmOptions(CheckpointOptions):
    """What a user may ask of this engine, under vLLM's own names."""

    quantization: str | None = option("the method, if the checkpoint does not declare one", metavar="NAME")
    tensor_parallel_size: int | None = option("GPUs that share every layer", metavar="N")
    pipeline_parallel_size: int | None = option("GPUs that the layers are divided among", metavar="N")
    gpu_memory_utilization: float | None = option(
        "share of a GPU's memory that vLLM may take", metavar="SHARE", above=0, at_most=1
    )
    kv_cache_dtype: str | None = option("as in fp8", metavar="DTYPE")
    max_num_batched_tokens: int | None = option("tokens in one forward pass", metavar="N")
    max_model_len: int | None = option("default: the longest window of the plan", metavar="N")
    enforce_eager: bool | None = option("no CUDA graphs, no compilation")
    engine_args: Pairs | None = option(  # noqa: RUF009 - option() makes a dataclass field
        "any other argument of vllm.LLM", metavar="NAME=VALUE", flag="--engine-arg", may_vary=False
    )
    allow_untested: bool | None = option(
        "use a version of vLLM that scoremode was not tested with",
        older_flags=("--allow-untested-vllm",),
        identity_name="allow_untested_vllm",
        may_vary=False,
    )


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """What the engine is started with. None means: vLLM's own choice, but for ``dtype`` (see ``choose_dtype``)."""

    head: HeadChoice = "exact"
    head_kernel: str | None = None  # one of head.budget.KERNELS; None: the fastest that passes its self-test
    dtype: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    quantization: str | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    trust_remote_code: bool = False
    prefix_caching: bool = False  # worth its hashing only where windows share a beginning
    head_bytes: int = 0  # bytes of float32 logits alive at once; 0: by device
    allow_untested: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # any other argument of vllm.LLM

    def arguments(self) -> dict[str, Any]:
        """As arguments of ``vllm.LLM``, without those that score mode sets."""
        named = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "quantization": self.quantization,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "enforce_eager": self.enforce_eager,
            "trust_remote_code": self.trust_remote_code or None,
            "dtype": self.dtype,
        }
        given = {name: value for name, value in named.items() if value is not None}
        arguments = given | self.extra
        support.check_arguments(arguments)
        return arguments

    @staticmethod
    def of(given: VllmOptions, work: Work) -> EngineArguments:
        """What a user asked for, with what is known of the work."""
        check_kernel_name(given.head_kernel)
        if given.head_kernel and given.head == "as-served":
            raise OptionError("--head-kernel does not apply to --head as-served", fix="leave one of them out")
        taken = {name: value for name, value in given.given().items() if name in SAME}
        longest, chosen = work.longest, given.max_model_len
        room = max(longest, SHORTEST) if longest is not None and chosen is None else chosen
        extra = dict(given.engine_args or ())
        return EngineArguments(
            **{**taken, "dtype": None if given.dtype == "auto" else given.dtype, "max_model_len": room},
            prefix_caching=work.shares_prompts,
            extra=extra,
        )
