"""MLX checkpoints, and plain ones, as mlx-lm serves them."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.arguments import user_path
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, MemoryNeed, SelfTest, Work, subject_of_checkpoint
from scoremode.core.installation import pip_install
from scoremode.core.models.sizes import cache_bytes
from scoremode.core.plan.path import CHUNKED, PATHS
from scoremode.engines.mlx.mlx_options import MlxOptions, format_words, quantization_of
from scoremode.errors import EngineError, OptionError

if TYPE_CHECKING:
    from scoremode.core.models.subject import Subject
    from scoremode.engines.mlx.engine import MlxEngine

ISSUES = "https://github.com/scoremode/scoremode/issues"


class MlxPlugin(EnginePlugin):
    """The engine for checkpoints that MLX quantized, and with ``--engine mlx`` for unquantized ones."""

    contract = 1
    name = "mlx"
    summary = "MLX checkpoints as mlx-lm serves them"
    capabilities: ClassVar[Capabilities] = Capabilities.all(paths=(*PATHS, CHUNKED))
    options = MlxOptions
    opens_checkpoints = True
    packages = ("mlx", "mlx-lm")

    def problem(self) -> str | None:
        is_here = all(any(distributions(name=package)) for package in self.packages)
        return None if is_here else f"mlx-lm is not installed; {pip_install('mlx')}"

    def claims(self, model: str) -> bool:
        from scoremode.core.strict_json import read_object

        try:
            return quantization_of(read_object(user_path(model) / "config.json", constants=True)) is not None
        except (OSError, ValueError):  # no folder of this machine, or a damaged config
            return model.lower().startswith("mlx-community/")

    def subject(self, model: str, options: MlxOptions, tokenizer: str | None) -> Subject:
        subject = subject_of_checkpoint(model, options, tokenizer)
        assert subject.checkpoint is not None
        quantization = quantization_of(subject.checkpoint.config)
        label = "MLX" if quantization is None or subject.bits_per_weight is None else format_words(quantization)
        return subject if quantization is None else replace(subject, format=label)

    def settings(self, subject: Subject, options: MlxOptions) -> dict[str, Any]:
        self._require_possible(options)
        from scoremode.engines.mlx.model import device_of

        return {**options.identity(), "device": device_of(options.device)[1]}

    def open(self, subject: Subject, options: MlxOptions, work: Work) -> MlxEngine:
        self._require_possible(options)
        if work.path is not None and options.prefill_step_size is not None:
            raise OptionError("--prefill-step-size does not belong to --path decode", fix="leave one of the two out")
        from scoremode.engines.mlx.engine import MlxEngine

        assert subject.checkpoint is not None
        return MlxEngine(subject.checkpoint, options, work.path)

    def _require_possible(self, options: MlxOptions) -> None:
        """Refuses to start without mlx-lm, and values that MLX cannot compute with."""
        if problem := self.problem():
            message, _, fix = problem.partition("; ")
            raise EngineError(message, fix=fix)
        if options.dtype == "float64":
            raise OptionError("MLX does not compute models in float64", fix="give --dtype float32")
        if options.kv_group_size not in (None, 32, 64, 128):
            raise OptionError(f"--kv-group-size {options.kv_group_size} is not known to MLX", fix="give 32, 64 or 128")
        if options.kv_cache_dtype is None:  # with "auto", one side of a comparison has an unquantized cache
            for name in {"kv_group_size", "quantized_kv_start"} & options.given().keys():
                flag = options.known()[name].flag
                raise OptionError(f"{flag} belongs to a quantized K/V cache", fix="add --kv-cache-dtype int8")

    def chunked(self, options: MlxOptions, tokens: int) -> MlxOptions:
        return replace(options, prefill_step_size=tokens)

    def memory_need(self, subject: Subject, options: MlxOptions, work: Work) -> MemoryNeed:
        need = super().memory_need(subject, options, work)
        head = (subject.vocabulary or 0) * (subject.hidden_size or 0) * 4  # a copy in float32
        stored = subject.dtype if options.dtype in (None, "auto") else options.dtype
        config = {} if subject.checkpoint is None else subject.checkpoint.config
        is_plain = options.kv_cache_dtype in (None, "auto")
        cache = cache_bytes(config, stored or "", work.cached_tokens) if is_plain else None
        return replace(need, size=need.size + (0 if options.head == "as-served" else head), cache=cache)

    def self_test(self, checkpoint: Path) -> SelfTest:
        """A model in 4 bits, but for its head, against its weights de-quantized."""
        if self.problem():
            return SelfTest(str(checkpoint))
        from scoremode.engines.mlx.model import keeping_limits

        with keeping_limits():
            from mlx_lm import utils

            model, config = utils.load_model(checkpoint)
            model, changed = utils.quantize_model(model, config, 64, 4, quant_predicate=lambda p, _: p != "lm_head")
            folder, judge = checkpoint.with_name("mlx-4bit"), checkpoint.with_name("mlx-plain")
            utils.save_model(folder, model)
            utils.save_config(changed, folder / "config.json")
            utils.save_model(judge, utils.dequantize_model(model))
            utils.save_config(config, judge / "config.json")
        note = f"{', '.join(f'{name} {version(name)}' for name in self.packages)}; please send it: {ISSUES}"
        return SelfTest(str(folder), {"dtype": "float32"}, judge=str(judge), note=note)


PLUGIN = MlxPlugin
