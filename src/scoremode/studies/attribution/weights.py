"""A candidate's name ─▶ its weights, de-quantized, under the names of a baseline's parameters.

The candidate is another version of the baseline: quantized, fine-tuned, or ``rtn:BITS:GROUP``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scoremode.core.arguments import user_path
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.models.facts import ModelFacts, inspect, resolve, weight_files
from scoremode.core.models.gguf import SUFFIX, gguf_models, read_gguf
from scoremode.core.models.safetensors import read_header
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.compressed import CompressedTensors
from scoremode.studies.attribution.weight_formats.gguf_tensors import GgufTensors
from scoremode.studies.attribution.weight_formats.matching import OTHER, CandidateWeights, Stored
from scoremode.studies.attribution.weight_formats.packed_integers import PackedIntegers
from scoremode.studies.attribution.weight_formats.round_to_nearest import PREFIX, RoundedWeights
from scoremode.studies.attribution.weight_formats.stored import OTHER_FORMAT, PlainTensors, Shape, TensorReader

if TYPE_CHECKING:
    import torch

    Read = Callable[[str], torch.Tensor]

READERS: dict[Any, Callable[..., TensorReader]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": PackedIntegers,
    "awq": PackedIntegers,
}
EMULATED = "{} emulates a quantization of {:.3g} bits per weight; the bits of its parts are those of its files"


def open_weights(
    candidate: str,
    baseline: Mapping[str, Shape],
    *,
    read_baseline: Read | None = None,
    baseline_stored: Stored | None = None,
    config: Mapping[str, Any] | None = None,
    token: str | None = None,
) -> CandidateWeights:
    """Opens a candidate's weights; ModelError if it is not a version of the baseline.

    OwnHeadError if the candidate has a head of its own, and the baseline uses its embedding as the head.

    ``baseline`` has the shapes of the baseline's parameters, as ``named_parameters`` gives them. ``config`` is its
    config. ``read_baseline`` reads one of its parameters, and ``baseline_stored`` says how they are stored: rounding to
    nearest needs both. No weight is read here.
    """
    model_type = str(_text_config(config or {}).get("model_type", ""))
    if candidate.startswith(PREFIX):
        assert read_baseline is not None
        assert baseline_stored is not None
        stored = {name: baseline_stored[name] for name in baseline}
        return CandidateWeights(candidate, RoundedWeights(candidate, stored, read_baseline, model_type), baseline)
    if _is_gguf(candidate):
        return CandidateWeights(candidate, GgufTensors(candidate, read_gguf(candidate), baseline, model_type), baseline)
    folder = resolve(candidate, revision=None, token=token)
    if (folder / "adapter_config.json").is_file():
        message = f"{candidate} is an adapter, which has no weights of its own to swap"
        raise ModelError(message, fix="merge it with PEFT's merge_and_unload, and give the merged model")
    facts = inspect(candidate, revision=None, token=token)
    text = _text_config(facts.config)
    own_type = str(text.get("model_type", ""))
    if own_type and model_type and own_type != model_type:
        raise ModelError(f"{candidate} is a {own_type} model, and the baseline is a {model_type} model", fix=OTHER)
    is_untied = text.get("tie_word_embeddings", facts.config.get("tie_word_embeddings")) is False
    reader = _reader(candidate, facts)
    return CandidateWeights(candidate, reader, baseline, facts.notes, needs_head=is_untied)


def candidate_fingerprint(candidate: str, token: str | None = None) -> str:
    """What tells a candidate's weights from others: the hashes of its files; of one that is made, its name."""
    if candidate.startswith(PREFIX):
        return candidate
    path = user_path(candidate)
    if not path.exists():
        path = resolve(candidate, revision=None, token=token)
    if path.is_file():
        return remembered_sha256(path)
    files = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".gguf", ".json") and p.is_file())
    return hashlib.sha256("\n".join(f"{p.name} {remembered_sha256(p)}" for p in files).encode()).hexdigest()


def _reader(candidate: str, facts: ModelFacts) -> TensorReader:
    files, _ = weight_files(facts.path)
    plain = PlainTensors({name: tensor for file in files for name, tensor in read_header(file).items()})
    quantization = facts.config.get("quantization_config")
    if not quantization:
        if facts.emulated_bytes is not None:
            plain.notes = (EMULATED.format(candidate, facts.bits_per_weight),)
        return plain
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method in READERS:
        return READERS[method](candidate, plain, quantization)
    raise ModelError(
        f"{candidate} is quantized by the method {method!r}, whose weights scoremode cannot read", fix=OTHER_FORMAT
    )


def _is_gguf(candidate: str) -> bool:
    path = user_path(candidate)
    if not path.is_dir():
        return candidate.endswith(SUFFIX)
    return not any(path.glob("*.safetensors")) and bool(gguf_models(path))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
