"""A candidate's name ─▶ its weights, de-quantized, under the names of a baseline's parameters.

The candidate is another version of the baseline: quantized, fine-tuned, an adapter, or ``rtn:BITS:GROUP``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoremode.errors import ModelError, OptionError
from scoremode.models.facts import ModelFacts, inspect, weight_files
from scoremode.models.gguf import SUFFIX, gguf_models, read_gguf
from scoremode.models.safetensors import read_header
from scoremode.models.weight_formats.checkpoint import PlainTensors
from scoremode.models.weight_formats.gguf_tensors import GgufTensors
from scoremode.models.weight_formats.matching import OTHER, MatchedWeights
from scoremode.models.weight_formats.round_to_nearest import PREFIX, RoundedWeights
from scoremode.models.weight_formats.stored import CandidateWeights, Shape, StoredWeight

if TYPE_CHECKING:
    import torch

__all__ = ["CandidateWeights", "StoredWeight", "open_weights"]


def open_weights(
    candidate: str,
    baseline: Mapping[str, Shape],
    *,
    read_baseline: Callable[[str], torch.Tensor] | None = None,
    baseline_stored: Mapping[str, StoredWeight] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> CandidateWeights:
    """Opens a candidate's weights; ModelError if it is not a version of the baseline.

    ``baseline`` has the shapes of the baseline's parameters, as ``named_parameters`` gives them. ``config`` is its
    config. ``read_baseline`` reads one of its parameters, and ``baseline_stored`` says how they are stored: candidates
    that are made from the baseline need both, rounding to nearest and adapters. No weight is read here.
    """
    model_type = str(_text_config(config or {}).get("model_type", ""))
    if candidate.startswith(PREFIX):
        if read_baseline is None or baseline_stored is None:
            raise OptionError(f"{candidate} is made from a baseline, and there is none", fix="name a checkpoint first")
        return RoundedWeights(candidate, baseline, read_baseline, own_bits=baseline_stored, model_type=model_type)
    if _is_gguf(candidate):
        tensors = GgufTensors(candidate, read_gguf(candidate), baseline, model_type)
        return MatchedWeights(candidate, tensors, baseline)
    facts = inspect(candidate, revision=revision, token=token)
    _require_same_type(candidate, facts.config, model_type)
    return _checkpoint(candidate, facts, baseline)


def _checkpoint(candidate: str, facts: ModelFacts, baseline: Mapping[str, Shape]) -> CandidateWeights:
    files, _ = weight_files(facts.path)
    tensors = {name: tensor for file in files for name, tensor in read_header(file).items()}
    return MatchedWeights(candidate, PlainTensors(tensors), baseline, facts.notes)


def _is_gguf(candidate: str) -> bool:
    path = Path(candidate).expanduser()
    if not path.is_dir():
        return candidate.endswith(SUFFIX)
    return not any(path.glob("*.safetensors")) and bool(gguf_models(path))


def _require_same_type(candidate: str, config: Mapping[str, Any], model_type: str) -> None:
    own = str(_text_config(config).get("model_type", ""))
    if own and model_type and own != model_type:
        raise ModelError(f"{candidate} is a {own} model, and the baseline is a {model_type} model", fix=OTHER)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
