"""lm-eval's own definitions over the rows of tests/data, and a model that answers them differently."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from tests.conftest import DATA

ROOT = Path(__file__).resolve().parents[3]


def rounded_copy(model: Path, folder: Path, bits: int = 3) -> Path:
    """The model with its weights rounded, by the example that does that."""
    spec = importlib.util.spec_from_file_location("emulate", ROOT / "examples" / "emulate_quantization.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made: Path = example.emulate(str(model), folder, bits)
    return made


def write_rows(folder: Path, counts: dict[str, int]) -> Path:
    """The first rows of files of tests/data."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in counts.items():
        lines = (DATA / "tasks" / f"{name}_validation.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    return folder


def own_definitions(folder: Path, data: Path, tasks: dict[str, str], group: dict[str, Any] | None = None) -> Path:
    """YAML files that name lm-eval's own definitions and read local files the way lm-eval does: task -> original."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    files = {
        "arc_easy": ("arc/arc_easy.yaml", "test", "arc_easy"),
        "winogrande": ("winogrande/default.yaml", "validation", "winogrande_xl"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, original in tasks.items():
        path, split, stem = files[original]
        wanted: dict[str, Any] = {
            "include": str(root / path),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: str(data / f"{stem}.jsonl")},
                "cache_dir": str(folder / "datasets"),
            },
            "training_split": None,
            "validation_split": "validation" if split == "validation" else None,
            "tag": [],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(wanted))  # JSON is YAML
    if group is not None:
        (folder / "group.yaml").write_text(json.dumps(group))
    return folder
