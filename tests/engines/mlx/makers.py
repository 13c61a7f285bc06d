"""Makes MLX checkpoints of small models, and plain checkpoints with the weights that MLX computes with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, WindowList
from scoremode.engines.mlx.engine import MlxEngine
from scoremode.engines.mlx.model import keeping_limits
from tests.engines.judging import all_scored

with keeping_limits():
    from mlx_lm import convert
    from mlx_lm.utils import dequantize_model, load_model


def converted(folder: Path, to: Path, **how: Any) -> Path:
    """The checkpoint that ``mlx_lm.convert`` makes, in float32 unless told otherwise."""
    convert(str(folder), str(to), quantize="q_bits" in how or "q_mode" in how, **{"dtype": "float32", **how})
    return to


def loaded(folder: Path) -> Any:
    """The model as mlx-lm itself loads it."""
    return load_model(folder)[0]


def plain_of(folder: Path, original: Path, to: Path) -> Path:
    """A checkpoint for Transformers with the weights of an MLX checkpoint, de-quantized in float32."""
    from safetensors.torch import load_file, save_file

    model = loaded(folder)
    model.set_dtype(mx.float32)
    weights = dict(tree_flatten(dequantize_model(model).parameters()))
    shutil.copytree(original, to)
    stored = load_file(to / "model.safetensors")
    found = {name: torch.from_numpy(np.array(weights[name].astype(mx.float32))) for name in stored}
    save_file(found, to / "model.safetensors", metadata={"format": "pt"})
    return to


def changed_config(folder: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


def opened(folder: Path, path: DecodePath | None = None, **options: Any) -> MlxEngine:
    engine = open_engine(choose(str(folder), "mlx", options), Work(path=path))
    assert isinstance(engine, MlxEngine)
    return engine


def judged(folder: Path, source: WindowList) -> list[Answers]:
    """The scores of Transformers in float32."""
    return all_scored(open_engine(choose(str(folder), "transformers", {"dtype": "float32"}), Work()), source)


def far(ours: list[Answers], theirs: list[Answers]) -> float:
    """The largest difference of any column but ranks and ids."""
    gaps = [
        np.abs(own - dict(other.arrays())[name]).max()
        for mine, other in zip(ours, theirs, strict=True)
        for name, own in mine.arrays()
        if own.dtype.kind == "f"
    ]
    return float(max(gaps))
