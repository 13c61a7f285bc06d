"""Checks our scores against those of the model's own ``compute_logits`` at the start, and describes the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.engine.base import UNIFORM, EngineFacts
from scoremode.core.plan.path import DecodePath
from scoremode.core.references.format import RAW_DTYPES as RAW
from scoremode.core.scores.answers import measured
from scoremode.core.scores.schema import BUILT_IN
from scoremode.engines.vllm import support
from scoremode.engines.vllm.wire import KERNEL_WORDS, Request, Words, line_words, read_lines, unpack_words
from scoremode.errors import EngineError
from scoremode.values import Ids

TEST_TOKENS, TEST_TARGETS = 12, 3
CUTS_OFF = (
    "vLLM's kernel on this CPU cuts int8 activations off instead of rounding them: this checkpoint loses more here "
    "than elsewhere (docs/compare.md#surprising-results-explained)"
)
SATURATES = (
    "vLLM's kernel on this CPU, which has no VNNI, cuts sums of int8 products off at 16 bits: this checkpoint loses "
    "more here than elsewhere (docs/compare.md#surprising-results-explained)"
)
NOT_INVARIANT = "VLLM_BATCH_INVARIANT=1 has no effect in vLLM's build for CPUs: it promises nothing here"
UNQUANTIZED = ("auto", "float16", "bfloat16", "half", "float32")  # dtypes of a K/V cache


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Facts about the head's matrix, as reported by the workers."""

    dtype: str
    rows: int
    width: int
    scale: float
    softcap: float | None
    has_bias: bool

    @staticmethod
    def read(text: str) -> HeadFacts:
        dtype, rows, width, scale, cap, bias = text.split()
        softcap = None if cap == "None" else float(cap)
        return HeadFacts(dtype.removeprefix("torch."), int(rows), int(width), float(scale), softcap, bias == "True")

    @property
    def itemsize(self) -> int:
        return RAW[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class SelfTestVerdict:
    error: float  # largest difference in nats between our scores and those from the model's own logits
    allowed: float  # the largest difference that rounding explains
    exact: bool  # do logits stay in float32?
    vocabulary: int
    kernel: dict[str, str]  # facts about the kernel, for the run's settings
    head: HeadFacts | None = None  # None: the head is not a plain matrix of floats
    uniform: bool = False  # does every token get the same probability?

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    def notes(self, dtype: str) -> list[str]:
        products = self.kernel.get("float32_products", "ieee")
        rounded = dtype == "float32" and products != "ieee"
        notes = [f"vLLM multiplies float32 matrices in {products}"] if rounded else []
        return [*notes, UNIFORM] if self.uniform else notes


def request_for_test(vocabulary: int, longest: int, *, gather: bool) -> tuple[Ids, Request]:
    """Returns a short prompt, and the request to score it with our head and with ``compute_logits``."""
    ids = np.linspace(1, vocabulary - 1, min(TEST_TOKENS, longest)).astype(np.int32)
    rows = np.arange(len(ids), dtype=np.int32)  # the last row is scored too
    targets = np.stack([np.roll(ids, -1), ids, np.roll(ids, 3)], axis=1)
    return ids, Request(rows, targets, gather=gather, self_test=True)


def require_agreement(tried: list[SelfTestVerdict], version: str) -> SelfTestVerdict:
    """Returns the last verdict if scores agree with ``compute_logits``; else raises an error with all differences."""
    if tried[-1].agrees:
        return tried[-1]
    gaps = ", ".join(f"{verdict.error:.3g} nats (allowed: {verdict.allowed:.3g})" for verdict in tried)
    raise EngineError(
        f"self-test failed: our scores differ from compute_logits of vLLM {version} by {gaps}",
        fix="use --head as-served or --engine transformers, and please report the model and the version",
    )


def judge_answers(lines: Words, dtype: str) -> SelfTestVerdict:
    """Judges the answer to a self-test request. Each line has our scores and those from the model's own logits."""
    line = line_words(TEST_TARGETS)
    if lines.dtype != np.int32 or lines.ndim != 2 or lines.shape[1] != 2 * line + 3 + KERNEL_WORDS:
        raise EngineError(
            f"self-test failed: vLLM answered with {lines.dtype} {lines.shape} instead of scores",
            fix="this architecture has its own pooler; use --engine transformers",
        )
    ours, theirs = read_lines(lines, TEST_TARGETS), read_lines(lines[:, line:], TEST_TARGETS)
    size = float(np.ascontiguousarray(lines[:, 2 * line : 2 * line + 1]).view(np.float32).max())
    floats = [column.name for column in BUILT_IN.scores if column.dtype == "float64"]
    gaps = [np.abs(getattr(ours, n) - getattr(theirs, n)).max() for n in floats]
    kernel = unpack_words(lines[0, 2 * line + 3 :])
    stored = kernel.pop("stored_head", "")
    served = kernel.get("float32_products") if dtype == "float32" else dtype
    step = {"bfloat16": 2**-8, "bf16": 2**-8, "float16": 2**-11, "tf32": 2**-11}.get(served or "", 2**-24)
    error = float(np.max(gaps))
    allowed = 2e-3 + 4 * step * size
    # a NaN gap must fail, but NaN compares false, so it becomes infinity below
    exact, vocabulary = lines[0, 2 * line + 1 : 2 * line + 3].tolist()
    uniform = bool((theirs.logprob == measured(theirs.top_logprob)[:, None]).all()) and vocabulary > 1
    return SelfTestVerdict(
        error=error if np.isfinite(error) else float("inf"),
        allowed=allowed,
        exact=bool(exact),
        vocabulary=vocabulary,
        kernel=kernel,
        head=HeadFacts.read(stored) if stored else None,
        uniform=uniform,
    )


# ── facts that are stored with every number ──────────────────────────────────────────────────────────────────────────
def dtype_of(config: Any) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def unread_cache_note(config: Any) -> list[str]:
    """Returns a note if prefill does not read the K/V cache that it fills: scores hardly show the cache's rounding.

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
        "that were not rounded; only later chunks and generated tokens read the cache: measure it with --path decode"
    ]


def engine_facts(
    config: Any, version: str, head: SelfTestVerdict, *, gathered: bool, path: DecodePath | None = None
) -> EngineFacts:
    """Returns the facts of an engine that was started with this ``VllmConfig`` and passed its self-test."""
    import torch
    import transformers
    from vllm.platforms import current_platform

    dtype, parallel = dtype_of(config), config.parallel_config
    decode = {  # settings that may change scores on that path only
        "sequences": path and path.sequences,
        "model_runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }
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
            **(decode if path is not None else {}),
        },
        notes=(
            *head.notes(dtype),
            *activation_notes(config.model_config.hf_config, current_platform.is_cpu()),
            *(unread_cache_note(config) if path is None else ()),
            *([NOT_INVARIANT] if support.is_batch_invariant() and current_platform.is_cpu() else ()),
        ),
    )


def activation_notes(config: Any, on_cpu: bool) -> list[str]:
    """Returns notes if the kernel for int8 activations does not compute what the checkpoint requires."""
    if not on_cpu or not support.is_w8a8(getattr(config, "quantization_config", None)):
        return []
    notes = [] if support.rounds_int8_activations() else [CUTS_OFF]
    return notes if support.adds_int8_products_exactly() else [*notes, SATURATES]
