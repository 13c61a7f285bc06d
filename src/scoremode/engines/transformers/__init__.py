"""The embedded engine: any causal language model that Transformers loads, in this process."""

from __future__ import annotations

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
from scoremode.core.plan.path import PATHS, DecodePath
from scoremode.engines.transformers.choices import (
    TransformersOptions,
    choose_device,
    chosen_device_and_dtype,
    require_cache_library,
    require_quantization_library,
)
from scoremode.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from scoremode.core.engine.registry import ChosenEngine
    from scoremode.core.models.subject import Subject
    from scoremode.engines.transformers.engine import TransformersEngine


def wrap(
    plugin: TransformersPlugin, model: Any, tokenizer: Any, options: Mapping[str, Any], **how: Any
) -> ChosenEngine:
    """The ability "wraps": see core/verbs/model.py."""
    from scoremode.engines.transformers.wrapped import wrapped

    return wrapped(model, tokenizer, options, **how)


class TransformersPlugin(EnginePlugin):
    """Any causal LM that Transformers loads. This is the default engine."""

    contract = 1
    name = "transformers"
    summary = "any causal LM that Transformers loads, in this process (the default)"
    capabilities: ClassVar[Capabilities] = Capabilities.all(paths=PATHS)
    abilities: ClassVar[dict[str, Any]] = {"wraps": wrap}
    options = TransformersOptions
    is_default = True
    opens_checkpoints = True
    packages = ("torch", "transformers", "tokenizers")
    known_to_all_runs = True

    def problem(self) -> str | None:
        try:
            require_docstrings("Transformers")
        except EngineError as error:
            return str(error)
        return None

    def subject(self, model: str, options: TransformersOptions, tokenizer: str | None) -> Subject:
        require_docstrings("Transformers")
        if options.device is not None:
            choose_device(options.device)  # refuses one that is not known, before a tokenizer is loaded
        subject = subject_of_checkpoint(model, options, tokenizer)
        if options.adapter is None:
            return subject
        from scoremode.engines.transformers.loading import with_adapter

        return with_adapter(subject, options.adapter)

    def settings(self, subject: Subject, options: TransformersOptions) -> dict[str, Any]:
        assert subject.checkpoint is not None
        require_quantization_library(subject.checkpoint)
        require_cache_library(options)
        device, dtype = chosen_device_and_dtype(options, subject.checkpoint)
        return {**options.identity(), "device": device, "dtype": dtype}

    def open(self, subject: Subject, options: TransformersOptions, work: Work) -> TransformersEngine:
        from scoremode.engines.transformers.engine import TransformersEngine

        assert subject.checkpoint is not None
        return TransformersEngine.load(subject.checkpoint, options, work.path)

    def feeds_also(self, opened: DecodePath, other: DecodePath) -> bool:
        return True

    def memory_need(self, subject: Subject, options: TransformersOptions, work: Work) -> MemoryNeed:
        need, stored = super().memory_need(subject, options, work), subject.weight_bytes or 0
        if subject.checkpoint is None:
            return need
        _, dtype = chosen_device_and_dtype(options, subject.checkpoint)
        if options.kv_cache_dtype in (None, "auto"):  # how much HQQ keeps beside the quantized numbers is not known
            need = replace(need, cache=cache_bytes(subject.checkpoint.config, dtype, work.cached_tokens))
        if not subject.bits_per_weight:
            return need
        bits = {"float32": 32, "float64": 64}.get(dtype, 16)
        unpacked = int(stored * bits / subject.bits_per_weight)
        states = (work.longest or 0) * (subject.hidden_size or 0) * 4 * 12  # a layer's and its MLP's, about
        return replace(need, size=need.size - stored + max(stored, unpacked) + states)

    def placement(self, options: TransformersOptions) -> Placement:
        several = options.device is None and choose_device(None) == "auto"
        one_gpu = replace(options, device="cuda") if several else None  # each replica, not the model over all of them
        return Placement(on_gpus=choose_device(options.device) != "cpu", replica_options=one_gpu)

    def self_test(self, checkpoint: Path) -> SelfTest:
        return SelfTest(str(checkpoint), {"dtype": "float32"})


PLUGIN = TransformersPlugin
