"""EXL3 checkpoints as ExLlamaV3 serves them, on a GPU."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.arguments import user_path
from scoremode.core.engine.options import Options, hub_token, option
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Placement, SelfTest, Work, subject_of_checkpoint
from scoremode.core.installation import pip_install
from scoremode.core.plan.path import DECODE, PATHS
from scoremode.errors import EngineError, ModelError, OptionError

if TYPE_CHECKING:
    from scoremode.core.engine.base import Engine
    from scoremode.core.models.subject import Subject

METHOD = "exl3"  # in a config's quantization_config
OF_A_CACHE: dict[str, Any] = {"above": 1, "at_most": 8, "path": DECODE}
USUAL_LENGTH = 2048  # tokens that a cache has for each sequence if the length of windows is not known
BLOCK = 128  # ExLlamaV3 pads hidden sizes to multiples of this, and cannot run unquantized layers that need it


@dataclass(frozen=True, slots=True)
class ExllamaOptions(Options):
    device: str | None = option("GPU, as in cuda:0 (default: all that are visible, filled one after the other)")
    tensor_p: bool | None = option("ExLlamaV3's own tensor parallelism over all visible GPUs")
    cache_bits_k: int | None = option(
        "bits of cached keys, 2 to 8, with --path decode (default: float16)", metavar="N", cache_part="k", **OF_A_CACHE
    )
    cache_bits_v: int | None = option(
        "bits of cached values, 2 to 8, with --path decode (default: float16)",
        metavar="N",
        cache_part="v",
        **OF_A_CACHE,
    )
    trust_remote_code: bool | None = option(
        "execute Python code shipped with the tokenizer; off unless given", may_vary=False
    )
    revision: str | None = option(
        "branch, tag or commit of a model on the hub (default: main)", in_identity=False, may_vary=False
    )
    token: str | None = hub_token()


def kernel_switches() -> dict[str, str]:
    """Environment variables by which ExLlamaV3 chooses its kernels: a part of every run's identity."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("EXL3_", "EXLLAMA"))}


def cache_bits(keys: int | None, values: int | None) -> tuple[int, int] | None:
    """Returns the bits of a quantized cache from the two options; None is a cache in float16.

    >>> cache_bits(8, 4), cache_bits(None, None)
    ((8, 4), None)
    """
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        missing, bits = ("--cache-bits-k", values) if keys is None else ("--cache-bits-v", keys)
        raise OptionError("ExLlamaV3 quantizes keys and values, or neither", fix=f"add {missing} {bits}")
    return keys, values


class ExllamaPlugin(EnginePlugin):
    """The engine for folders whose config says exl3, and with ``--engine exllamav3`` for unquantized checkpoints."""

    contract = 1
    name = "exllamav3"
    summary = "EXL3 checkpoints as ExLlamaV3 serves them, on a GPU"
    models = "an EXL3 folder"
    capabilities: ClassVar[Capabilities] = Capabilities.all(hidden_states=False, logits=True, paths=PATHS)
    options = ExllamaOptions
    opens_checkpoints = True
    packages = ("exllamav3",)

    def problem(self) -> str | None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            version("exllamav3")
        except PackageNotFoundError:
            return f"ExLlamaV3 is not installed; install a CUDA build of torch, then {pip_install('exl3')}"
        import torch

        return None if torch.cuda.is_available() else "ExLlamaV3 needs an NVIDIA GPU, and torch finds none"

    def claims(self, model: str) -> bool:
        from scoremode.core.strict_json import read_object

        with suppress(OSError, ValueError):  # no such file, or a damaged one
            config = read_object(user_path(model) / "config.json", constants=True)
            quantization = config.get("quantization_config")
            return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD
        return False

    def subject(self, model: str, options: ExllamaOptions, tokenizer: str | None) -> Subject:
        return subject_of_checkpoint(model, options, tokenizer)

    def settings(self, subject: Subject, options: ExllamaOptions) -> dict[str, Any]:
        assert subject.checkpoint is not None
        quantization, width = subject.checkpoint.config.get("quantization_config"), subject.hidden_size
        if not isinstance(quantization, dict) and width is not None and width % BLOCK:
            raise ModelError(
                f"ExLlamaV3 cannot run {subject.name} unquantized: its hidden size of {width} is not a multiple of "
                f"{BLOCK}",
                fix="score it with --engine transformers",
            )
        cache_bits(options.cache_bits_k, options.cache_bits_v)  # refuses one without the other
        return {**options.identity(), **kernel_switches()}

    def open(self, subject: Subject, options: ExllamaOptions, work: Work) -> Engine:
        problem = self.problem()
        if problem is not None:
            message, _, fix = problem.partition("; ")
            raise EngineError(message, fix=fix or "score it on a machine with a GPU")
        from scoremode.engines.exllamav3.engine import ExllamaEngine

        assert subject.checkpoint is not None
        return ExllamaEngine(
            subject.checkpoint,
            options.device,
            bool(options.tensor_p),
            kernel_switches(),
            path=work.path,
            longest=work.longest or USUAL_LENGTH,
            bits=cache_bits(options.cache_bits_k, options.cache_bits_v),
        )

    def placement(self, options: ExllamaOptions) -> Placement:
        return Placement(on_gpus=True)

    def self_test(self, checkpoint: Path) -> SelfTest:
        return SelfTest(str(checkpoint), dtype="float16")  # whatever the checkpoint stores


PLUGIN = ExllamaPlugin
