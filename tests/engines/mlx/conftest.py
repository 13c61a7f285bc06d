"""Checkpoints that mlx-lm made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def mlx_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``mlx_of(folder, q_bits=4, …)``: the checkpoint as ``mlx_lm.convert`` writes it, made once for each way."""
    from tests.engines.mlx.makers import converted

    made: dict[Any, Path] = {}

    def make(folder: Path, **how: Any) -> Path:
        key = folder, *sorted(how.items())
        if key not in made:
            made[key] = converted(folder, tmp_path_factory.mktemp("mlx") / "made", **how)
        return made[key]

    return make
