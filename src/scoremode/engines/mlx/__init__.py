"""MLX checkpoints, and plain ones, as mlx-lm serves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.engine.options import DTYPE_ALIASES, DTYPES, CheckpointOptions, option
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, MemoryNeed, SelfTest, Work, subject_of_checkpoint
from scoremode.core.installation import pip_install
from scoremode.core.models.sizes import cache_bytes
from scoremode.core.plan.path import CHUNKED, DECODE, PATHS
from scoremode.errors import EngineError, OptionError

if TYPE_CHECKING:
    from scoremode.core.models.subject import Subject
    from scoremode.engines.mlx.engine import MlxEngine

CACHE_BITS = {"int8": 8, "int4": 4, "int2": 2}  # bits per element of a quantized K/V cache
GROUP = 64  # values of a cache that share a scale; mlx-lm's default
NAMES = ("mlx-community/",)  # repositories on the hub that have nothing else


@dataclass(frozen=True, slots=True)
class MlxOptions(CheckpointOptions):
    """The options of the MLX engine."""

    dtype: str | None = option(
        "float32, bfloat16, float16 or auto (default: auto, as the checkpoint stores it)",
        choices=("auto", *DTYPES),
        aliases=DTYPE_ALIASES,
    )
    device: str | None = option("cpu or gpu (default: MLX's own choice)")
    prefill_step_size: int | None = option(
        "most tokens in one pass of a prefill (default: a window is one pass)", metavar="N", above=0
    )
    kv_cache_dtype: str | None = option(
        "type of the K/V cache, with --path decode (default: auto, the model's dtype)",
        choices=("auto", *CACHE_BITS),
        metavar="DTYPE",
        path=DECODE,
        cache_part="kv",
    )
    kv_group_size: int | None = option(
        "values of a quantized K/V cache that share a scale: 32, 64 or 128 (default: 64)", metavar="N", path=DECODE
    )
    quantized_kv_start: int | None = option(
        "tokens after which the K/V cache is quantized (default: 0; mlx-lm's command line has 5000)",
        metavar="N",
        above=-1,
        path=DECODE,
    )


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization that a config declares as MLX writes it; None if it declares none, or one of another kind.

    >>> quantization_of({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}})["bits"]
    4
    >>> quantization_of({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}) is None
    True
    """
    found = config.get("quantization", config.get("quantization_config"))
    if not isinstance(found, Mapping) or "quant_method" in found:
        return None
    return found if type(found.get("bits")) is int and type(found.get("group_size")) is int else None


def format_words(quantization: Mapping[str, Any]) -> str:
    """How the weights of an MLX checkpoint are declared, in a few words.

    >>> format_words({"group_size": 64, "bits": 4, "mode": "affine"})
    'MLX 4 bit, groups of 64'
    >>> format_words({"group_size": 32, "bits": 4, "mode": "mxfp4"})
    'MLX mxfp4'
    """
    mode = quantization.get("mode", "affine")
    if mode != "affine":
        return f"MLX {str(mode)[:20]}"
    own = [one for one in quantization.values() if isinstance(one, Mapping)]
    is_mixed = any(one.get("bits", quantization["bits"]) != quantization["bits"] for one in own)
    return (
        f"MLX {'mixed, mostly ' if is_mixed else ''}{quantization['bits']} bit, groups of {quantization['group_size']}"
    )


class MlxPlugin(EnginePlugin):
    """The engine for checkpoints that MLX quantized, and with ``--engine mlx`` for unquantized ones."""

    contract = 1
    name = "mlx"
    summary = "MLX checkpoints as mlx-lm serves them"
    capabilities: ClassVar[Capabilities] = Capabilities.all(paths=(*PATHS, CHUNKED))
    options = MlxOptions
    instead: ClassVar[dict[str, str]] = {
        "cache_type_k": "use --kv-cache-dtype",
        "cache_type_v": "use --kv-cache-dtype",
        "batch_tokens": "leave it out: one window is computed at a time",
        "max_num_batched_tokens": "use --prefill-step-size",
    }
    opens_checkpoints = True
    packages = ("mlx", "mlx-lm")

    def problem(self) -> str | None:
        from importlib.metadata import distributions

        is_here = all(any(distributions(name=package)) for package in self.packages)
        return None if is_here else f"mlx-lm is not installed; {pip_install('mlx')}"

    def claims(self, model: str) -> bool:
        from scoremode.core.strict_json import read_object

        config = Path(model).expanduser() / "config.json"
        if not config.is_file():
            return model.lower().startswith(NAMES)
        try:
            return quantization_of(read_object(config, constants=True)) is not None
        except ValueError:
            return False

    def subject(self, model: str, options: MlxOptions, tokenizer: str | None) -> Subject:
        subject = subject_of_checkpoint(model, options, tokenizer)
        assert subject.checkpoint is not None
        quantization = quantization_of(subject.checkpoint.config)
        return subject if quantization is None else replace(subject, format=format_words(quantization))

    def settings(self, subject: Subject, options: MlxOptions) -> dict[str, Any]:
        self._require_possible(options)
        from scoremode.engines.mlx.arrays import device_of

        return {**options.identity(), "device": device_of(options.device)[1]}

    def open(self, subject: Subject, options: MlxOptions, work: Work) -> MlxEngine:
        self._require_possible(options)
        from scoremode.engines.mlx.engine import MlxEngine

        assert subject.checkpoint is not None
        return MlxEngine(subject.checkpoint, options, work.path)

    def _require_possible(self, options: MlxOptions) -> None:
        """Refuses to start without mlx-lm, and values that MLX cannot compute with."""
        if problem := self.problem():
            what, _, fix = problem.partition("; ")
            raise EngineError(what, fix=fix)
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
        found = super().memory_need(subject, options, work)
        head = (subject.vocabulary or 0) * (subject.hidden_size or 0) * 4  # a copy in float32
        stored = subject.dtype if options.dtype in (None, "auto") else options.dtype
        config = {} if subject.checkpoint is None else subject.checkpoint.config
        is_plain = options.kv_cache_dtype in (None, "auto")
        cache = cache_bytes(config, stored or "", work.cached_tokens) if is_plain else None
        return replace(found, size=found.size + (0 if options.head == "as-served" else head), cache=cache)

    def self_test(self, checkpoint: Path) -> SelfTest:
        return SelfTest(str(checkpoint), {"dtype": "float32"})


PLUGIN = MlxPlugin
