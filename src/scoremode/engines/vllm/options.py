"""What can be asked of the vLLM engine, and how that becomes arguments of ``vllm.LLM``. Imports nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from scoremode.engines.base import EngineOptions, refuse_options
from scoremode.engines.vllm import support
from scoremode.errors import OptionError
from scoremode.head.budget import check_kernel_name

HeadChoice = Literal["exact", "as-served"]
SHORTEST = 16  # tokens of the start-up self-test, and a little room
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
    "allow_untested_vllm",
}
ACCEPTED = SAME | {"dtype", "max_model_len", "engine_args", "shares_prompts"}
ELSEWHERE = {
    "device": "vLLM chooses its devices itself: use CUDA_VISIBLE_DEVICES",
    "batch_tokens": "use --max-num-batched-tokens",
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What can be asked of the engine. None means: vLLM's own choice, but for ``dtype`` (see ``choose_dtype``)."""

    head: HeadChoice = "exact"
    head_kernel: str | None = None  # one of head.budget.KERNELS; None: the fastest that is right
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
    allow_untested_vllm: bool = False
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
    def from_engine_options(given: EngineOptions, longest: int | None = None) -> VllmOptions:
        """What a user asked of engines in general, as options of this one."""
        refuse_options("vllm", given, ACCEPTED, ELSEWHERE)
        if given.head not in (None, "exact", "as-served"):
            raise OptionError(f"--head {given.head} is not known", fix="give exact or as-served")
        check_kernel_name(given.head_kernel)
        if given.head_kernel and given.head == "as-served":
            raise OptionError("--head-kernel does not apply to --head as-served", fix="leave one of them out")
        taken = {name: value for name, value in given.given().items() if name in SAME}
        dtype = None if given.dtype == "auto" else given.dtype
        room = max(longest, SHORTEST) if longest is not None and given.max_model_len is None else given.max_model_len
        return VllmOptions(
            **{**taken, "dtype": dtype, "max_model_len": room},
            prefix_caching=bool(given.shares_prompts),
            extra=dict(given.engine_args or ()),
        )
