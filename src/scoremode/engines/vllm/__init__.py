"""Score mode on stock vLLM: its pooling runner, with a pooler that scores.

engine.py ──PoolingParams──▶ vLLM's scheduler, kernels, tensor parallelism ──hidden states──▶ pooler.py ──▶ engine.py
            (wire.Request)                                                    tap.py + head/columns.py    (wire.Job)

On the decode path, decode.py and replay.py take the places of engine.py and of vLLM's call of the pooler.

Only pooler.py, replay.py and tap.py import vLLM or torch at module level. Only vLLM's own processes load them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.engine.plugin import (
    Capabilities,
    EnginePlugin,
    MemoryNeed,
    Placement,
    SelfTest,
    Work,
    require_docstrings,
    subject_of_checkpoint,
)
from scoremode.core.models.sizes import cache_bytes
from scoremode.core.plan.path import CHUNKED, PATHS, DecodePath
from scoremode.engines.vllm import support
from scoremode.engines.vllm.support import LaunchArguments, VllmOptions
from scoremode.errors import ScoremodeError

if TYPE_CHECKING:
    from pathlib import Path

    from scoremode.core.engine.base import Engine
    from scoremode.core.models.subject import Subject


RANKS = ("tensor_parallel_size", "pipeline_parallel_size")  # their product is the number of processes


class VllmPlugin(EnginePlugin):
    contract = 1
    name = "vllm"
    summary = "quantized weights as served, any parallel size"
    capabilities: ClassVar[Capabilities] = Capabilities.all(paths=(*PATHS, CHUNKED))
    abilities: ClassVar[dict[str, Any]] = {"about": lambda _: [("vLLM plugin", *support.plugin_state())]}
    options = VllmOptions
    opens_checkpoints = starts_slowly = True
    packages = support.DISTRIBUTIONS
    known_to_all_runs = True  # runs kept by earlier versions have these options

    def able(self) -> Capabilities:
        promised = support.is_batch_invariant() and support.is_for_gpus()
        return replace(self.capabilities, same_bits=support.BATCH_INVARIANT if promised else "")

    def problem(self) -> str | None:
        try:
            require_docstrings("vLLM")
            support.installed_version()
        except ScoremodeError as error:
            return f"{error}, or use --engine transformers"
        return None

    def subject(self, model: str, options: VllmOptions, tokenizer: str | None) -> Subject:
        require_docstrings("vLLM")
        support.installed_version()  # refuses at once if there is none
        return subject_of_checkpoint(model, options, tokenizer)

    def settings(self, subject: Subject, options: VllmOptions) -> dict[str, Any]:
        LaunchArguments.for_work(options, Work()).arguments()  # refuses arguments that score mode cannot use
        return {**options.identity(), **support.kernel_switches(), "vllm": support.installed_version()}

    def open(self, subject: Subject, options: VllmOptions, work: Work) -> Engine:
        from scoremode.engines.vllm.decode import VllmDecodeEngine
        from scoremode.engines.vllm.engine import VllmEngine

        assert subject.checkpoint is not None
        facts = subject.checkpoint
        taken = LaunchArguments.for_work(options, work, facts.context_length)
        kind = VllmEngine if work.path is None else VllmDecodeEngine
        return kind(str(facts.path), taken, context=facts.context_length, notes=facts.notes)

    def feeds_also(self, opened: DecodePath, other: DecodePath) -> bool:
        return other.sequences <= opened.sequences

    def chunked(self, options: VllmOptions, tokens: int) -> VllmOptions:
        return options.in_batches_of(tokens)

    def placement(self, options: VllmOptions) -> Placement:
        sizes = [options.extra.get(name) or getattr(options, name) for name in RANKS]
        ranks = math.prod(size if isinstance(size, int) and size > 0 else 1 for size in sizes)
        over_nodes = options.extra.get("distributed_executor_backend") == "ray"
        return Placement(ranks, support.is_for_gpus(), over_nodes)

    def memory_need(self, subject: Subject, options: VllmOptions, work: Work) -> MemoryNeed:
        need = super().memory_need(subject, options, work)
        if subject.checkpoint is None:
            return need
        chosen = (options.kv_cache_dtype, options.dtype, subject.dtype)
        kind = next((dtype for dtype in chosen if dtype not in (None, "auto")), "bfloat16")
        return replace(need, cache=cache_bytes(subject.checkpoint.config, str(kind), work.cached_tokens))

    def self_test(self, checkpoint: Path) -> SelfTest:
        import torch

        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        return SelfTest(str(checkpoint), {"dtype": dtype}, dtype)


PLUGIN = VllmPlugin
