"""Options of the built-in engines by name, written by signature.py from their dataclasses: do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from scoremode.engines.options import Pairs


class EngineArguments(TypedDict, total=False):
    """Options of an engine, by name. None means: the engine's own choice."""

    adapter: str | None
    allow_untested: bool | None
    api_key_env: str | None
    attn_implementation: str | None
    batch_tokens: int | None
    cache_type_k: str | None
    cache_type_v: str | None
    concurrency: int | None
    device: str | None
    dtype: str | None
    enforce_eager: bool | None
    engine_args: Mapping[str, Any] | Pairs | None
    flash_attn: str | None
    gpu_memory_utilization: float | None
    head: str | None
    head_kernel: str | None
    kv_cache_dtype: str | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    n_batch: int | None
    n_gpu_layers: int | None
    n_ubatch: int | None
    patience: float | None
    pipeline_parallel_size: int | None
    quantization: str | None
    revision: str | None
    tensor_p: bool | None
    tensor_parallel_size: int | None
    threads: int | None
    timeout: float | None
    token: str | None
    trust_remote_code: bool | None
