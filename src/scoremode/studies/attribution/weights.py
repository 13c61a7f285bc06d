"""A candidate's name ─▶ its weights, de-quantized, under the names of a baseline's parameters.

The candidate is another version of the baseline: a checkpoint that Transformers loads, a GGUF file, or
``rtn:BITS:GROUP``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scoremode.core.arguments import user_path
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.engine.options import CheckpointOptions
from scoremode.core.models.facts import inspect, layers_of_text, resolve, unused_note
from scoremode.core.models.gguf import SUFFIX, gguf_models, read_gguf
from scoremode.core.models.sizes import EMBEDDING, HEAD
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.gguf_tensors import GgufTensors
from scoremode.studies.attribution.weight_formats.round_to_nearest import PREFIX, RoundedWeights
from scoremode.studies.attribution.weight_formats.stored import OTHER, Shape, Stored, TensorReader, require_layers

if TYPE_CHECKING:
    import torch

    Read = Callable[[str], torch.Tensor]


class OwnHeadError(ModelError):
    """A candidate has a head of its own, and the head of the baseline is its embedding."""


class CandidateWeights:
    """The weights of a candidate, de-quantized one at a time, under the names of a baseline's parameters."""

    def __init__(self, label: str, reader: TensorReader, baseline: Mapping[str, Shape], notes: Sequence[str] = ()):
        require_layers(label, layers_of_text(reader.stored), baseline)
        self.label, self._reader = label, reader
        self._sources = {name: self._source(name, shape) for name, shape in baseline.items()}
        self.stored: Stored = {name: replace(reader.stored[self._sources[name]], name=name) for name in baseline}
        unused = reader.stored.keys() - set(self._sources.values())
        self.notes = (*notes, *reader.notes, *unused_note(self._without_equal_head(sorted(unused))))

    def tensor(self, name: str) -> torch.Tensor:
        """One parameter in float32."""
        return self._reader.read(self._sources[name])

    def _source(self, name: str, shape: Shape) -> str:
        """The name of a parameter in the candidate: its own, or the embedding's for a head that is the embedding."""
        stored = self._reader.stored
        embedding = next((key for key in stored if EMBEDDING.search(key)), None)
        source = name if name in stored or not HEAD.search(name) or embedding is None else embedding
        if source not in stored:
            raise ModelError(f"{self.label} has no tensor for the baseline's {name}", fix=OTHER)
        if stored[source].shape != shape:
            shapes = [" × ".join(map(str, sizes)) for sizes in (stored[source].shape, shape)]
            message = f"{source} of {self.label} has the shape {shapes[0]}, and the baseline's {name} has {shapes[1]}"
            raise ModelError(message, fix=OTHER)
        return source

    def _without_equal_head(self, unused: Sequence[str]) -> list[str]:
        """The unused tensors without a stored head. The baseline's head is its embedding, so both must be equal."""
        import torch

        heads = [name for name in unused if HEAD.search(name) and name.endswith(".weight")]
        embedding = next((name for name in self._sources if EMBEDDING.search(name)), None)
        for head in heads:
            if embedding is None or not torch.equal(self._reader.read(head), self.tensor(embedding)):
                message = f"{self.label} has a head of its own ({head}), and the head of the baseline is its embedding"
                raise OwnHeadError(message, fix=OTHER)
        return [name for name in unused if name not in heads]


def open_weights(
    candidate: str,
    baseline: Mapping[str, Shape],
    *,
    read_baseline: Read,
    baseline_stored: Stored,
    model_type: str,
    options: CheckpointOptions,
) -> CandidateWeights:
    """Opens a candidate's weights; ModelError if it is not a version of the baseline.

    OwnHeadError if the candidate has a head of its own, and the baseline uses its embedding as the head.

    ``baseline`` has the shapes of the baseline's parameters, as ``named_parameters`` gives them, and ``model_type`` is
    that of its text model. ``read_baseline`` reads one of its parameters, and ``baseline_stored`` says how they are
    stored. ``options`` are those that a checkpoint is loaded with.
    """
    if candidate.startswith(PREFIX):
        return CandidateWeights(
            candidate, RoundedWeights(candidate, baseline_stored, read_baseline, model_type), baseline
        )
    if _is_gguf(candidate):
        return CandidateWeights(candidate, GgufTensors(candidate, read_gguf(candidate), baseline, model_type), baseline)
    folder = resolve(candidate, revision=None, token=options.token)
    if (folder / "adapter_config.json").is_file():
        message = f"{candidate} is an adapter, which has no weights of its own to swap"
        raise ModelError(message, fix="merge it with PEFT's merge_and_unload, and give the merged model")
    facts = inspect(candidate, revision=None, token=options.token)
    own_type = text_type(facts.config)
    if own_type and model_type and own_type != model_type:
        raise ModelError(f"{candidate} is a {own_type} model, and the baseline is a {model_type} model", fix=OTHER)
    from scoremode.studies.attribution.engines.transformers_weights import CheckpointWeights

    return CandidateWeights(candidate, CheckpointWeights(candidate, facts, options), baseline, facts.notes)


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


def text_type(config: Mapping[str, Any]) -> str:
    """The type of a model in Transformers, or of its text model."""
    inner = config.get("text_config")
    return str((inner if isinstance(inner, Mapping) else config).get("model_type", ""))


def _is_gguf(candidate: str) -> bool:
    path = user_path(candidate)
    if not path.is_dir():
        return candidate.endswith(SUFFIX)
    return not any(path.glob("*.safetensors")) and bool(gguf_models(path))
