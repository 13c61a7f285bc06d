"""Every argument of a verb by name, for people, editors and type checkers: of questions and of engines.

``make format`` writes EngineArguments from the options of the built-in engines; a test compares the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

from scoremode.cluster.spread import SpreadArguments
from scoremode.engines.options import Pairs
from scoremode.verbs.question import QuestionArguments

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
F = TypeVar("F", bound=Callable[..., Any])


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


class ModelArguments(EngineArguments, SpreadArguments, total=False):
    """Options of an engine, and over how many replicas it is spread."""


class AllArguments(QuestionArguments, ModelArguments, total=False):
    """Arguments of a question, and of a model."""


def spelled_out(*groups: type) -> Callable[[F], F]:
    """Show every argument of these groups in a function's signature, for ``help()`` and completion in a notebook.

    Type checkers read them from the function's own ``**arguments: Unpack[…]``.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD, "options of other packages come in here"
        shown = [
            inspect.Parameter(name, KEYWORD_ONLY, default=None, annotation=getattr(kind, "__forward_arg__", str(kind)))
            for group in groups
            for name, kind in group.__annotations__.items()
            if name not in own.parameters
        ]
        function.__signature__ = own.replace(parameters=[*parameters[:-1], *shown, parameters[-1]])  # type: ignore[attr-defined]
        return function

    return decorate
