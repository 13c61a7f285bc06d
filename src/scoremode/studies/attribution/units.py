"""Names of parameters ─▶ units: what is swapped, and what a recipe chooses a precision for.

layer     one decoder layer
kind      one kind of matrix in all layers; all norms together
matrix    one matrix of one layer, with its bias; all experts of a layer are one matrix

Embedding and head are units of their own: one unit if the head is the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scoremode.core.models.sizes import EMBEDDING, HEAD

BY = ("layer", "kind", "matrix")
EMBEDDING_UNIT, HEAD_UNIT, TIED_UNIT, NORMS = "embedding", "head", "embedding and head", "norms"


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are swapped together."""

    name: str  # layer 3; q_proj; layer 3 q_proj; embedding
    layer: int | None
    kind: str | None  # None: a whole layer
    tensors: tuple[str, ...]
    weights: int


def units_of(shapes: Mapping[str, tuple[int, ...]], by: str, layers: str = "model.layers") -> list[Unit]:
    """Divides the parameters of a model, given by their shapes. ``layers`` is the name of its list of layers.

    >>> shapes = {"model.embed_tokens.weight": (9, 4), "model.layers.0.mlp.up_proj.weight": (8, 4)}
    >>> [unit.name for unit in units_of(shapes, "matrix")]
    ['embedding and head', 'layer 0 up_proj']
    """
    is_tied = not any(HEAD.search(name) for name in shapes)
    kinds = _kinds(shapes, layers)
    names_by_key: dict[tuple[int | None, str | None], list[str]] = {}
    for name in shapes:
        inside, kind = name.removeprefix(f"{layers}."), kinds[name]
        layer = int(inside.split(".")[0]) if inside != name else None
        if layer is None:
            kind = _outside(name, kind, by, is_tied=is_tied)
        key = (layer if by != "kind" else None, None if by == "layer" and layer is not None else kind)
        names_by_key.setdefault(key, []).append(name)
    units = []
    for (layer, unit_kind), names in names_by_key.items():
        unit_name = " ".join(part for part in ("" if layer is None else f"layer {layer}", unit_kind) if part)
        units.append(Unit(unit_name, layer, unit_kind, tuple(names), sum(math.prod(shapes[name]) for name in names)))
    return units


def _outside(name: str, kind: str, by: str, *, is_tied: bool) -> str:
    """The unit of a parameter outside of the layers."""
    if HEAD.search(name):
        return HEAD_UNIT
    if EMBEDDING.search(name):
        return TIED_UNIT if is_tied else EMBEDDING_UNIT
    return kind if by == "kind" or kind != NORMS else "last norm"


def _kinds(shapes: Mapping[str, tuple[int, ...]], layers: str) -> dict[str, str]:
    """The kind of every parameter: the name of its module, or "norms" if the module has vectors only."""
    paths = {name: _path(name, layers) for name in shapes}
    matrices = {paths[name] for name, shape in shapes.items() if len(shape) > 1}
    modules: dict[str, set[tuple[str, ...]]] = {}  # of each last name
    for path in matrices:
        modules.setdefault(path[-1], set()).add(path)
    kinds = {}
    for name, path in paths.items():
        is_shared = path in matrices and len(modules[path[-1]]) > 1
        kind = ".".join(path[-2:]) if is_shared or "experts" in path[-2:-1] else path[-1]
        kinds[name] = kind if path in matrices else NORMS
    return kinds


def _path(name: str, layers: str) -> tuple[str, ...]:
    """The module of a parameter inside of its layer, without numbers."""
    parts = [part for part in name.removeprefix(f"{layers}.").split(".") if not part.isdigit()]
    if parts[-1] in ("weight", "bias") and len(parts) > 1:
        return tuple(parts[:-1])
    return (*parts[:-1], parts[-1].removesuffix("_bias"))
