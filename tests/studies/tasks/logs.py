"""Logs as lm-eval 0.4.13 writes them with ``--output_path DIR --log_samples``, made here: no model and no lm-eval."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHOICES = ("yes", "no, never", "it may be so")
TIME = "2026-01-02T03-04-05.000006"

Answers = Mapping[str, Sequence[Sequence[float]]]
"""By task: the log-likelihoods of the first choices of each document."""


def drawn(seed: int, documents: int = 24, tasks: Sequence[str] = ("arc_easy", "winogrande")) -> Answers:
    """Answers of a model. Those of seeds near each other are alike, so that models flip some documents."""
    far = np.random.default_rng(7).exponential(3.0, (len(tasks), documents, 3))
    near = np.random.default_rng(seed).exponential(0.7, (len(tasks), documents, 3))
    return {task: (-(far + near))[i, :, : 2 if task == "winogrande" else 3].tolist() for i, task in enumerate(tasks)}


def write_log(
    folder: Path,
    answers: Answers,
    *,
    model: str = "org/model",
    time: str = TIME,
    with_results: bool = True,
    **more: Any,
) -> Path:
    """A log of tasks. Document i has the right choice i modulo the number of choices; Winogrande has no acc_norm."""
    inside = folder / model.replace("/", "__")
    inside.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "results": {},
        "group_subtasks": {},
        "configs": {task: {"task": task, "target_delimiter": " "} for task in answers},
        "versions": dict.fromkeys(answers, 1.0),
        "n-shot": dict.fromkeys(answers, 0),
        "higher_is_better": {task: {"acc": True, "acc_norm": True} for task in answers},
        "n-samples": {task: {"original": 99, "effective": len(its)} for task, its in answers.items()},
        "config": {"model": "hf", "limit": None, "random_seed": 0, "numpy_seed": 1234, "fewshot_seed": 1234},
        "lm_eval_version": "0.4.13",
        "model_name": model,
        "chat_template": None,
    }
    for task, its in answers.items():
        rows = [sample(i, log_probs, with_norm=task != "winogrande") for i, log_probs in enumerate(its)]
        (inside / f"samples_{task}_{time}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics = rows[0]["metrics"]
        means = {f"{name},none": float(np.mean([row[name] for row in rows])) for name in metrics}
        results["results"][task] = {"alias": task, "sample_len": len(rows), **means}
    if with_results:
        (inside / f"results_{time}.json").write_text(json.dumps({**results, **more}))
    return folder


def sample(number: int, log_probs: Sequence[float], *, with_norm: bool = True) -> dict[str, Any]:
    choices = CHOICES[: len(log_probs)]
    gold, lengths = number % len(choices), [len(choice) for choice in choices]
    metrics = {"acc": float(np.argmax(log_probs) == gold)}
    if with_norm:
        metrics["acc_norm"] = float(np.argmax(np.divide(log_probs, lengths)) == gold)
    asked = {f"gen_args_{i}": {"arg_0": f"Is it {number}?", "arg_1": f" {one}"} for i, one in enumerate(choices)}
    doc = {"question": f"Is it {number}?"}
    return {
        "doc_id": number,
        "doc": doc,
        "target": str(gold),
        "arguments": asked,
        "resps": [[[str(one), "False"]] for one in log_probs],
        "filtered_resps": [[str(one), "False"] for one in log_probs],
        "filter": "none",
        "metrics": list(metrics),
        "doc_hash": _hash(json.dumps(doc)),
        "prompt_hash": _hash(f"Is it {number}?"),
        "target_hash": _hash(str(gold)),
        **metrics,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
