"""What a running vLLM says of itself: stored with every number that it computes."""

from __future__ import annotations

from typing import Any

from scoremode.engines.base import EngineFacts
from scoremode.engines.vllm import support
from scoremode.engines.vllm.self_test import Verdict

CUTS_OFF = (
    "vLLM's kernel on this CPU cuts int8 activations off instead of rounding them: this checkpoint loses more here "
    "than elsewhere (docs/served-and-emulated.md)"
)


def dtype_of(config: Any) -> str:
    """The dtype of a ``VllmConfig``, by its plain name."""
    return str(config.model_config.dtype).removeprefix("torch.")


UNQUANTIZED = ("auto", "float16", "bfloat16", "half", "float32")


def unread_cache_note(config: Any) -> list[str]:
    """A line if prefill does not read the K/V cache that it fills: then scores hardly show what its rounding does.

    In vLLM up to 0.32, TurboQuant, UltraQuant and dense MLA attend to the first chunk's keys and values as they were
    computed. Only later chunks and generated tokens read the cache.
    """
    dtype, model = str(config.cache_config.cache_dtype), config.model_config
    is_dense_mla = bool(getattr(model, "use_mla", False)) and not hasattr(model.hf_text_config, "index_topk")
    if not (dtype.startswith(("turboquant", "ultraquant")) or (is_dense_mla and dtype not in UNQUANTIZED)):
        return []
    chunk = int(config.scheduler_config.max_num_batched_tokens)
    kind = f"{dtype} K/V cache" + (" of MLA" if is_dense_mla else "")
    return [
        f"the {kind} is hardly measured: the first chunk of a window, up to {chunk} tokens, attends to keys and values "
        "that were not rounded; only later chunks and generated tokens read the cache"
    ]


def engine_facts(config: Any, version: str, head: Verdict, *, gathered: bool) -> EngineFacts:
    """The facts of an engine that was started with this ``VllmConfig`` and passed its self-test."""
    import torch
    import transformers
    from vllm.platforms import current_platform

    dtype, parallel = dtype_of(config), config.parallel_config
    return EngineFacts(
        engine="vllm",
        dtype=dtype,
        device=str(current_platform.get_device_name()),
        head="exact-fp32" if head.exact else "as-served",
        vocabulary=head.vocabulary,
        context_length=int(config.model_config.max_model_len),
        versions={"vllm": version, "torch": torch.__version__, "transformers": transformers.__version__},
        settings={
            "quantization": config.model_config.quantization,
            "tensor_parallel_size": int(parallel.tensor_parallel_size),
            "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "enforce_eager": bool(config.model_config.enforce_eager),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "gathered_logits": gathered,
            **head.kernel,
        },
        notes=(
            *head.notes(dtype),
            *activation_notes(config.model_config.hf_config, current_platform.is_cpu()),
            *unread_cache_note(config),
        ),
    )


def activation_notes(config: Any, on_cpu: bool) -> list[str]:
    """What the kernel for int8 activations does to them, if it is not what the checkpoint asks for."""
    asked = on_cpu and support.is_w8a8(getattr(config, "quantization_config", None))
    return [CUTS_OFF] if asked and not support.rounds_int8_activations() else []
