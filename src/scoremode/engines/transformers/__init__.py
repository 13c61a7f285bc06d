"""The embedded engine: any causal language model that Transformers loads, in this process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.engine.plugin import (
    EVERYTHING,
    Capabilities,
    EnginePlugin,
    MemoryNeed,
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
    from collections.abc import Sequence

    from scoremode.core.models.subject import Subject
    from scoremode.engines.transformers.engine import TransformersEngine
    from scoremode.studies.attribution.engines.transformers_layers import TransformersLayers
    from scoremode.studies.attribution.engines.transformers_swapper import TransformersSwapper
    from scoremode.studies.rollouts.generation import Generator
    from scoremode.studies.rollouts.writing import DrawingRules, Writer


class TransformersPlugin(EnginePlugin):
    """Any causal LM that Transformers loads. This is the default engine."""

    contract = 1
    name = "transformers"
    summary = "any causal LM that Transformers loads, in this process (the default)"
    capabilities: ClassVar[Capabilities] = replace(
        EVERYTHING, generates=True, writes=True, layer_states=True, swaps=True, paths=PATHS
    )
    options = TransformersOptions
    instead: ClassVar[dict[str, str]] = {
        "tensor_parallel_size": "use --device auto for several GPUs",
        "gpu_memory_utilization": "use --batch-tokens N to bound memory",
        "cache_type_k": "use --kv-cache-dtype",
        "cache_type_v": "use --kv-cache-dtype",
        "quantization": "leave it out: the checkpoint declares its quantization",
        "max_num_batched_tokens": "use --batch-tokens",
    }
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

    def open_generator(self, subject: Subject, options: TransformersOptions, work: Work) -> Generator:
        from scoremode.core.text.tokenizer import HuggingFaceTokenizer
        from scoremode.engines.transformers.loading import load_model
        from scoremode.studies.rollouts.engines.transformers_generator import TransformersGenerator

        assert subject.checkpoint is not None
        assert isinstance(subject.tokenizer, HuggingFaceTokenizer)
        model, _ = load_model(subject.checkpoint, options)
        return TransformersGenerator(model, subject.tokenizer.hf, options.batch_tokens)

    def open_writer(self, subject: Subject, options: TransformersOptions, work: Work, rules: DrawingRules) -> Writer:
        from scoremode.studies.rollouts.engines.transformers_writer import TransformersWriter
        from scoremode.studies.rollouts.writing import end_tokens

        assert subject.checkpoint is not None
        facts = subject.checkpoint
        ends = end_tokens(facts.path, facts.config, subject.tokenizer.facts.eos)
        return TransformersWriter(
            self.open(subject, options, replace(work, path=work.path or DecodePath())), ends, rules
        )

    def open_layers(self, subject: Subject, options: TransformersOptions, work: Work) -> TransformersLayers:
        from scoremode.studies.attribution.engines.transformers_layers import TransformersLayers

        return TransformersLayers(self.open(subject, options, work))

    def open_swapper(
        self, subject: Subject, options: TransformersOptions, work: Work, candidates: Sequence[str]
    ) -> TransformersSwapper:
        from scoremode.studies.attribution.engines.transformers_swapper import TransformersSwapper

        assert subject.checkpoint is not None
        where = subject.checkpoint.path
        engine = self.open(subject, options, work)
        return TransformersSwapper(engine, where, candidates, name=subject.name, token=options.token)

    def memory(self, subject: Subject, options: TransformersOptions, longest: int) -> MemoryNeed:
        found, stored = super().memory(subject, options, longest), subject.weight_bytes or 0
        if subject.checkpoint is None or not subject.bits_per_weight:
            return found
        _, dtype = chosen_device_and_dtype(options, subject.checkpoint)
        bits = {"float32": 32, "float64": 64}.get(dtype, 16)
        unpacked = int(stored * bits / subject.bits_per_weight)
        states = longest * (subject.hidden_size or 0) * 4 * 12  # a layer's and its MLP's, about
        return replace(found, size=found.size - stored + max(stored, unpacked) + states)

    def cache_bytes(self, subject: Subject, options: TransformersOptions, tokens: int) -> int | None:
        if subject.checkpoint is None or options.kv_cache_dtype not in (None, "auto"):
            return None  # how much HQQ keeps beside the quantized numbers is not known
        _, dtype = chosen_device_and_dtype(options, subject.checkpoint)
        return cache_bytes(subject.checkpoint.config, dtype, tokens)

    def on_gpus(self, options: TransformersOptions) -> bool:
        return choose_device(options.device) != "cpu"

    def as_replica(self, options: TransformersOptions) -> TransformersOptions:
        several = options.device is None and choose_device(None) == "auto"
        return replace(options, device="cuda") if several else options  # one GPU each, not the model over all of them

    def self_test_options(self) -> dict[str, Any]:
        return {"dtype": "float32"}


PLUGIN = TransformersPlugin
