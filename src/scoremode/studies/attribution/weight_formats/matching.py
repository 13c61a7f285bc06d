"""The parameters of a baseline, found in a candidate's files: by name, or joined and split by rows where files differ.

Files and Transformers fuse some matrices differently: q, k and v in one matrix, gate and up in one matrix, the experts
of a layer in one tensor. Such matrices are joined or split by rows. What cannot be found is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scoremode.core.models.facts import layers_of_text, unused_note
from scoremode.core.models.sizes import EMBEDDING, HEAD
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import Shape, StoredWeight, TensorReader

if TYPE_CHECKING:
    import torch

FUSED = {  # a matrix that some files store in one piece, and its pieces from the first row to the last
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERTS = {  # one tensor for all experts of a layer, and what files store for one expert
    "experts.gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "experts.down_proj": (("down_proj",), ("w2",)),
}
OTHER_FOLDER = (".mlp.", ".block_sparse_moe.")  # names of one module in Transformers and in files
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(masked_)?bias$")  # computed, never loaded
OTHER = "give a version of the baseline: the same architecture, other weights"
Stored = Mapping[str, StoredWeight]


class OwnHeadError(ModelError):
    """A candidate has a head of its own, and the head of the baseline is its embedding."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a stored tensor; all of them if there is no end."""

    name: str
    begin: int = 0
    end: int | None = None

    def shape(self, stored: Stored) -> Shape:
        whole = stored[self.name].shape
        return whole if self.end is None else (self.end - self.begin, *whole[1:])


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter is found: rows that are joined; for experts, one entry for each of them."""

    entries: tuple[tuple[Rows, ...], ...]
    is_stacked: bool = False  # entries become the first axis

    @property
    def rows(self) -> list[Rows]:
        return [rows for entry in self.entries for rows in entry]

    def shape(self, stored: Stored) -> Shape | None:
        """The shape of what it gives; None if its pieces do not fit together."""
        entry_shapes = set[Shape]()
        for entry in self.entries:
            shapes = [rows.shape(stored) for rows in entry]
            if len(entry) > 1 and ((() in shapes) or len({shape[1:] for shape in shapes}) > 1):
                return None
            entry_shapes.add(shapes[0] if len(entry) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:]))
        if len(entry_shapes) != 1:
            return None
        (shape,) = entry_shapes
        return (len(self.entries), *shape) if self.is_stacked else shape

    def described(self, name: str, stored: Stored, shape: Shape) -> StoredWeight:
        pieces = [stored[rows.name] for rows in self.rows]
        counts = [math.prod(rows.shape(stored)) for rows in self.rows]
        bits = sum(w.bits * count for w, count in zip(pieces, counts, strict=True)) / max(sum(counts), 1)
        bits = pieces[0].bits if len({w.bits for w in pieces}) == 1 else bits  # exact where there is nothing to mix
        return StoredWeight(name, shape, bits, " + ".join(dict.fromkeys(w.format for w in pieces)))


class CandidateWeights:
    """The weights of a candidate, de-quantized one at a time, under the names of a baseline's parameters."""

    def __init__(
        self,
        label: str,
        reader: TensorReader,
        baseline: Mapping[str, Shape],
        notes: Sequence[str] = (),
        *,
        needs_head: bool = False,
    ) -> None:
        """``needs_head``: a head that is not stored is missing; otherwise it is the embedding."""
        require_layers(label, layers_of_text(reader.stored), baseline)
        self.label, self._reader = label, reader
        self._sources = {name: _find(label, name, baseline, reader.stored, needs_head) for name in baseline}
        self.stored = {n: self._sources[n].described(n, reader.stored, shape) for n, shape in baseline.items()}
        used = {rows.name for source in self._sources.values() for rows in source.rows}
        unused = [name for name in reader.stored if name not in used and not BUFFERS.search(name)]
        self.notes = (*notes, *reader.notes, *unused_note(self._without_equal_head(unused)))

    def tensor(self, name: str) -> torch.Tensor:
        """One parameter in float32. Nothing is kept, so memory does not grow with the model."""
        import torch

        source = self._sources[name]
        if not source.is_stacked:
            return self._joined(source.entries[0])
        whole = torch.empty(self.stored[name].shape)
        for at, entry in enumerate(source.entries):
            whole[at] = self._joined(entry)
        return whole

    def _joined(self, entry: Sequence[Rows]) -> torch.Tensor:
        import torch

        read = ((self._reader.read(rows.name), rows) for rows in entry)
        pieces = [whole if rows.end is None else whole[rows.begin : rows.end] for whole, rows in read]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

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


def require_layers(label: str, layers: int | None, baseline: Mapping[str, Shape]) -> None:
    expected = layers_of_text(baseline)
    if layers is not None and expected is not None and layers != expected:
        raise ModelError(f"{label} has {layers} layers, and the baseline has {expected}", fix=OTHER)


# ── finding ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _find(label: str, name: str, baseline: Mapping[str, Shape], stored: Stored, needs_head: bool) -> Source:
    source = next(_possible(name, baseline, stored, needs_head), None)
    if source is None:
        raise ModelError(f"{label} has no tensor for the baseline's {name}", fix=OTHER)
    shape = source.shape(stored)
    if shape != baseline[name]:
        names = " + ".join(dict.fromkeys(rows.name for rows in source.rows))
        message = (
            f"{names} of {label} has the shape {_shown(shape)}, and the baseline's {name} has {_shown(baseline[name])}"
        )
        raise ModelError(message, fix=OTHER)
    return source


def _possible(name: str, baseline: Mapping[str, Shape], stored: Stored, needs_head: bool) -> Iterator[Source]:
    """Where a parameter may be found, the most direct place first."""
    for spelling in _spellings(name):
        if spelling in stored:
            yield Source(((Rows(spelling),),))
    if HEAD.search(name) and not needs_head:
        embeddings = (key for key in stored if EMBEDDING.search(key) and stored[key].shape == baseline[name])
        yield from (Source(((Rows(key),),)) for key in embeddings)
    for spelling in _spellings(name):
        for fused, pieces in FUSED.items():
            yield from _piece_of_fused(name, spelling, fused, baseline, stored)
            names = [spelling.replace(f".{fused}.", f".{piece}.") for piece in pieces]
            if f".{fused}." in spelling and all(piece in stored for piece in names):
                yield Source((tuple(Rows(piece) for piece in names),))
        shape = baseline[name]
        for experts in _names_of_experts(spelling, (shape[0] + 1, *shape[1:]) if shape else shape):
            *expert_pieces, (more, *_) = experts  # one tensor for all experts, of which files store each by itself
            if more not in stored and all(piece in stored for pieces in expert_pieces for piece in pieces):
                yield Source(tuple(tuple(map(Rows, pieces)) for pieces in expert_pieces), is_stacked=True)


def _spellings(name: str) -> Iterator[str]:
    """Names that files give to one parameter: with or without the outermost module, and under older names."""
    for inner in dict.fromkeys((name, name.replace(*OTHER_FOLDER))):
        yield inner
        yield inner.removeprefix("model.")
        yield inner.removeprefix("transformer.")
        yield f"model.{inner}"
        yield f"transformer.{inner}"
        yield inner.replace("model.", "model.language_model.", 1)
        yield inner.replace("model.language_model.", "model.", 1)
        yield inner.replace("model.language_model.", "language_model.model.", 1)


def _piece_of_fused(
    name: str, spelling: str, fused: str, baseline: Mapping[str, Shape], stored: Stored
) -> Iterator[Source]:
    """Rows of a fused matrix, if the baseline's pieces have exactly as many rows as it has."""
    pieces = FUSED[fused]
    piece = next((piece for piece in pieces if f".{piece}." in spelling), None)
    whole = spelling.replace(f".{piece}.", f".{fused}.")
    if piece is None or whole not in stored:
        return
    shapes = [baseline.get(name.replace(f".{piece}.", f".{other}.")) for other in pieces]
    rows = [shape[0] for shape in shapes if shape]
    if len(rows) == len(pieces) and sum(rows) == stored[whole].shape[0]:
        at = pieces.index(piece)
        yield Source(((Rows(whole, sum(rows[:at]), sum(rows[: at + 1])),),))


def _names_of_experts(spelling: str, shape: Shape) -> Iterator[list[list[str]]]:
    """The names that files may give to the pieces of each expert, if this is one tensor for all of them."""
    for fused, choices in EXPERTS.items():
        if spelling.endswith(f".{fused}") and len(shape) == 3:
            prefix = spelling.removesuffix(fused) + "experts"
            for pieces in choices:
                yield [[f"{prefix}.{expert}.{piece}.weight" for piece in pieces] for expert in range(shape[0])]


def _shown(shape: Shape | None) -> str:
    return "pieces that do not fit together" if shape is None else " × ".join(map(str, shape)) or "a single number"
