"""Quantized checkpoints whose library is missing are refused before weights are read."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from scoremode.core.engine.registry import choose
from scoremode.core.installation import pip_install
from scoremode.engines.transformers import choices
from scoremode.errors import ModelError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("method", "package"), [("compressed-tensors", "compressed-tensors"), ("gptq", "gptqmodel"), ("awq", "gptqmodel")]
)
def test_the_extra_is_named(
    method: str, package: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    monkeypatch.setattr(choices, "distributions", lambda name: [])
    with pytest.raises(ModelError, match=package) as refused:
        choose(str(folder)).settings()
    assert pip_install("quantized") in refused.value.fix
    monkeypatch.setattr(choices, "distributions", lambda name: [name])
    choose(str(folder)).settings()


def test_the_extra_brings_what_is_asked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {name for names in choices.LIBRARIES.values() for name in names}
    assert {name for name in asked if not any(one.startswith(name) for one in extras["quantized"])} == set()
