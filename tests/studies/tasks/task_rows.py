"""Rows of small tasks in the layout of the real ones, and models that answer them differently."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("model", "of", "tokens", "nothing", "more", "cats", "said", "people", "mind"),
)


def sentence(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def arc_row(rng: random.Random) -> dict[str, Any]:
    count = rng.choice((3, 4, 4, 5))
    choices = {"text": [sentence(rng, 1, 4) for _ in range(count)], "label": list("ABCDE"[:count])}
    return {"question": sentence(rng, 3, 6) + "?", "choices": choices, "answerKey": rng.choice(choices["label"])}


def hellaswag_row(rng: random.Random) -> dict[str, Any]:
    return {
        "activity_label": sentence(rng, 1, 2),
        "ctx_a": sentence(rng, 2, 4) + ".",
        "ctx_b": rng.choice(WORDS),
        "endings": [sentence(rng, 1, 4) + "." for _ in range(4)],
        "label": str(rng.randrange(4)),
    }


def winogrande_row(rng: random.Random) -> dict[str, Any]:
    return {
        "sentence": f"{sentence(rng, 2, 4)} _ {sentence(rng, 2, 4)}.",
        "option1": rng.choice(WORDS),
        "option2": rng.choice(WORDS),
        "answer": rng.choice("12"),
    }


def lambada_row(rng: random.Random) -> dict[str, Any]:
    return {"text": sentence(rng, 4, 9)}


MAKERS = {
    "arc_easy_test": arc_row,
    "arc_easy_train": arc_row,
    "hellaswag_validation_few": hellaswag_row,
    "winogrande_xl_validation": winogrande_row,
    "lambada_openai_test": lambada_row,
}


def write_rows(folder: Path, count: int = 24, seed: int = 5) -> Path:
    """The data of four tasks, named as in docs/tasks.md."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, make) in enumerate(MAKERS.items()):
        rng = random.Random(seed * 100 + number)
        lines = [json.dumps(make(rng)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def rounded_copy(model: Path, folder: Path, bits: int = 3) -> Path:
    """The model with its weights rounded, by the example that does that."""
    spec = importlib.util.spec_from_file_location("emulate", ROOT / "examples" / "emulate_quantization.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made: Path = example.emulate(str(model), folder, bits)
    return made


def own_definitions(folder: Path, data: Path, tasks: dict[str, str], group: dict[str, Any] | None = None) -> Path:
    """YAML files that name lm-eval's own definitions and read local files the way lm-eval does: task -> original."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    files = {
        "arc_easy": ("arc/arc_easy.yaml", {"test": "arc_easy_test", "train": "arc_easy_train"}),
        "hellaswag": ("hellaswag/hellaswag.yaml", {"validation": "hellaswag_validation_few"}),
        "winogrande": ("winogrande/default.yaml", {"validation": "winogrande_xl_validation"}),
        "lambada_openai": ("lambada/lambada_openai.yaml", {"test": "lambada_openai_test"}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, original in tasks.items():
        path, splits = files[original]
        wanted: dict[str, Any] = {
            "include": str(root / path),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: str(data / f"{stem}.jsonl") for split, stem in splits.items()},
                "cache_dir": str(folder / "datasets"),
            },
            "training_split": "train" if "train" in splits else None,
            "validation_split": "validation" if "validation" in splits else None,
            "tag": [],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(wanted))  # JSON is YAML
    if group is not None:
        (folder / "group.yaml").write_text(json.dumps(group))
    return folder
