"""The options of the vLLM engine, and how they become arguments of ``vllm.LLM``. Does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from scoremode.engines.options import CheckpointOptions, Pairs, option
from scoremode.engines.plugin import Work
from scoremode.engines.vllm import support
from scoremode.errors import OptionError
from scoremode.head.budget import check_kernel_name

HeadChoice = Literal["exact", "as-served"]
PASSED_ON = (
    *("dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"),
    *("kv_cache_dtype", "max_num_batched_tokens", "max_model_len", "enforce_eager", "trust_remote_code"),
)
"""Arguments of ``vllm.LLM`` that have the same names here."""
SHORTEST = 16  # enough tokens for the self-test at the start


@dataclass(frozen=True, slots=True)
class VllmOptions(CheckpointOptions):
    """The options of this engine, under vLLM's own names."""

    quantization: str | None = option("quantization method, if the checkpoint does not declare one", metavar="NAME")
    tensor_parallel_size: int | None = option("GPUs that share every layer", metavar="N")
    pipeline_parallel_size: int | None = option("GPUs that the layers are divided among", metavar="N")
    gpu_memory_utilization: float | None = option(
        "share of a GPU's memory that vLLM may take", metavar="SHARE", above=0, at_most=1
    )
    kv_cache_dtype: str | None = option("dtype of the KV cache, such as fp8", metavar="DTYPE")
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
class LaunchArguments:
    """How the engine is started. None means vLLM's own default, except for ``dtype`` (see ``choose_dtype``)."""

    head: HeadChoice = "exact"
    head_kernel: str | None = None  # one of head.budget.KERNELS; None: the fastest kernel that passes its self-test
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
    prefix_caching: bool = False  # worth its hashing only if windows share a prefix
    head_bytes: int = 0  # bytes of float32 logits in memory at once; 0: depends on the device
    allow_untested: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # any other argument of vllm.LLM

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``vllm.LLM``, without those that score mode sets."""
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if not self.trust_remote_code:
            del given["trust_remote_code"]
        arguments = given | self.extra
        support.check_arguments(arguments)
        return arguments

    @staticmethod
    def of(given: VllmOptions, work: Work) -> LaunchArguments:
        """The user's options, combined with what is known about the work."""
        check_kernel_name(given.head_kernel)
        if given.head_kernel and given.head == "as-served":
            raise OptionError("--head-kernel does not apply to --head as-served", fix="leave one of them out")
        known = {f.name for f in fields(LaunchArguments)}
        taken = {name: value for name, value in given.given().items() if name in known}
        longest, chosen = work.longest, given.max_model_len
        taken["dtype"] = None if given.dtype == "auto" else given.dtype
        taken["max_model_len"] = max(longest, SHORTEST) if longest is not None and chosen is None else chosen
        return LaunchArguments(**taken, prefix_caching=work.shares_prompts, extra=dict(given.engine_args or ()))
