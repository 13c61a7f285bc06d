"""LoRA adapters in PEFT's format, merged into the baseline's weights: W + alpha / r · B A."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoremode.core.models.safetensors import read_header
from scoremode.core.strict_json import read_object
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import PlainTensors, Shape, StoredWeight

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LINEAR, EMBEDDING = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
PAIRS = (LINEAR, EMBEDDING)
MERGED = "give the merged model instead"


@dataclass(frozen=True, slots=True)
class Pair:
    """The two factors of a change, by their names in the adapter's file."""

    first: str  # A
    second: str  # B
    is_transposed: bool  # B A is the transpose of the change: in embeddings and in Conv1D layers


class AdaptedWeights:
    """The baseline's weights with a LoRA adapter merged into them."""

    def __init__(
        self,
        label: str,
        folder: Path,
        baseline: Mapping[str, Shape],
        read: Callable[[str], torch.Tensor],
        *,
        own_bits: Mapping[str, StoredWeight],
    ) -> None:
        self.label, self._read = label, read
        self._config = _read_config(label, folder)
        file = folder / WEIGHTS
        if not file.is_file():
            raise ModelError(f"the adapter folder {label} has no {WEIGHTS}", fix="give a folder that PEFT saved")
        self._adapter = PlainTensors(read_header(file))
        self._pairs, self._whole = self._sorted()
        self._require_fit(baseline)
        self._factors = {name: self._factor(name.removesuffix(".weight")) for name in self._pairs}
        self.stored = {
            name: replace(own_bits[name], format=f"{own_bits[name].format} + LoRA")
            if name in self._pairs
            else own_bits[name]
            for name in baseline
        }
        changed = len(self._pairs.keys() | self._whole.keys())
        self.notes = (
            f"{label} is merged into the baseline: {changed} of {len(baseline)} tensors change, none takes more bits",
        )

    def tensor(self, name: str) -> torch.Tensor:
        whole = self._whole.get(name)
        weight = self._read(name).float().cpu() if whole is None else self._adapter.read(whole)
        pair = self._pairs.get(name)
        if pair is None:
            return weight
        product = self._adapter.read(pair.second) @ self._adapter.read(pair.first)
        return weight + (product.T if pair.is_transposed else product) * self._factors[name]

    def _sorted(self) -> tuple[dict[str, Pair], dict[str, str]]:
        """Parameters that are changed by a pair of factors, and parameters that are stored whole.

        PEFT stores an embedding both ways: whole, and the change of it.
        """
        pairs: dict[str, Pair] = {}
        whole: dict[str, str] = {}
        for stored in self._adapter.stored:
            ends = next((ends for ends in PAIRS if stored.endswith(ends)), None)
            if ends is None:
                own = stored.removeprefix(PREFIX)
                whole[own.replace(".modules_to_save.", ".").replace(".base_layer.", ".")] = stored
                continue
            module = stored.removesuffix(ends[0]).removesuffix(ends[1])
            is_transposed = ends is EMBEDDING or bool(self._config.get("fan_in_fan_out"))
            pairs[f"{module.removeprefix(PREFIX)}.weight"] = Pair(module + ends[0], module + ends[1], is_transposed)
        return pairs, whole

    def _require_fit(self, baseline: Mapping[str, Shape]) -> None:
        label, stored = self.label, self._adapter.stored
        for name in (*self._pairs, *self._whole):
            if name not in baseline:
                raise ModelError(f"the adapter {label} changes {name}, which the baseline does not have", fix=MERGED)
        shapes = {name: stored[own].shape for name, own in self._whole.items()}
        for name, pair in self._pairs.items():
            if missing := {pair.first, pair.second} - stored.keys():
                raise ModelError(f"the adapter {label} lacks {min(missing)}", fix="download it again")
            a, b = stored[pair.first].shape, stored[pair.second].shape
            product = (b[0], a[1]) if len(a) == len(b) == 2 and a[0] == b[1] else ()
            shapes[name] = product[::-1] if pair.is_transposed else product
        for name, shape in shapes.items():
            if shape != baseline[name]:
                raise ModelError(f"the adapter {label} has another shape for {name}", fix="give its own base model")

    def _factor(self, module: str) -> float:
        """alpha / r of a module, which may have its own."""
        try:
            rank = _of_module(self._config.get("rank_pattern"), module, self._config.get("r"))
            alpha = _of_module(self._config.get("alpha_pattern"), module, self._config.get("lora_alpha"))
        except re.error as error:
            raise ModelError(f"the {CONFIG} of {self.label} has a pattern that is none ({error})", fix=MERGED) from None
        if not all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in (rank, alpha)):
            raise ModelError(f"the {CONFIG} of {self.label} has no rank or no alpha for {module}", fix=MERGED)
        return float(alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank))


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def _of_module(patterns: object, module: str, default: Any) -> Any:
    """A number for a module: by the first pattern that its name ends with, else the adapter's own."""
    for pattern, number in patterns.items() if isinstance(patterns, dict) else ():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return number
    return default


def _read_config(label: str, folder: Path) -> dict[str, Any]:
    try:
        config = read_object(folder / CONFIG)
    except ValueError as error:
        raise ModelError(f"the {CONFIG} of {label} is not JSON ({error})", fix="download it again") from None
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{label} is an adapter of the type {kind}, and only LORA can be merged here", fix=MERGED)
    for flag in ("use_dora", "use_qalora", "alora_invocation_tokens", "target_parameters"):
        if config.get(flag):
            raise ModelError(f"the adapter {label} has {flag}, which scoremode cannot merge", fix=MERGED)
    return config
