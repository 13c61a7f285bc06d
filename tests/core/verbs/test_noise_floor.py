"""The noise floor: computed otherwise for certain, said in words, and never a zero that nobody measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.engine.baseline import held_states, noise_floor
from scoremode.core.models.facts import inspect
from scoremode.core.plan.plan import Plan
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.reference import reference
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from tests.command_line import Command
from tests.house import needs_wing
from tests.makers import ask

TEXT = " ".join(f"{i} dogs and {i * i % 97} lazy foxes jump over {i * 31 % 101} others;" for i in range(80))
SHAPES = [(128, 1), (128, None), (32, 1), (32, None), (100, 300)]  # context, --batch-tokens


def opened(folder: Path, **options: Any) -> TransformersEngine:
    return TransformersEngine.load(inspect(str(folder)), TransformersOptions(device="cpu", **options))


def planned(folder: Path, context: int) -> Plan:
    return ask(str(folder), text=TEXT, context_length=context, stride=context).plan


@contextmanager
def body_of(engine: TransformersEngine, changed: Any) -> Iterator[None]:
    """Every pass of the model's body through ``changed(ids, hidden)``."""
    usual = engine.body.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        output = usual(*arguments, **options)
        output.last_hidden_state = changed(options["input_ids"], output.last_hidden_state)
        return output

    engine.body.forward = forward
    try:
        yield
    finally:
        del engine.body.forward


@pytest.mark.parametrize(("context", "batch_tokens"), SHAPES)
def test_every_window_is_fed_in_a_batch_of_another_shape(tiny: Path, context: int, batch_tokens: int | None) -> None:
    engine, plan = opened(tiny, batch_tokens=batch_tokens), planned(tiny, context)
    done = np.ones(len(plan), np.bool_)
    done[:-1:3] = False
    shapes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {"usual": {}, "otherwise": {}}

    def recorded(into: str) -> Any:
        def note(ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            for row in ids.tolist():
                shapes[into][tuple(row[: context // 2])] = tuple(ids.shape)
            return hidden

        return note

    with body_of(engine, recorded("usual")):
        baseline = held_states(engine, plan, done)
    with body_of(engine, recorded("otherwise")):
        floor = engine.noise_floor(baseline, plan, done)
    assert floor.kl is not None
    assert len(floor.kl) == plan.target_counts[~done].sum()
    fed = [tuple(plan.window(i).ids[: context // 2].tolist()) for i in np.flatnonzero(~done)]
    assert all(shapes["usual"][ids] != shapes["otherwise"][ids] for ids in fed)
    assert ("two windows per batch instead of one" in floor.words) == (1 in [b for b, _ in shapes["usual"].values()])
    assert ("3 tokens of padding" in floor.words) == (context < 128)


@pytest.mark.parametrize("context", [32, 128])
def test_a_body_that_depends_on_its_batch_has_a_floor(tiny: Path, context: int) -> None:
    """Windows that go alone anyway: halving the batches would have changed nothing, and measured 0."""
    engine, plan = opened(tiny, batch_tokens=1), planned(tiny, context)
    with body_of(engine, lambda ids, hidden: hidden * (1 + 1e-3 * len(ids))):
        floor = noise_floor(engine, plan)
    assert floor.kl is not None
    assert floor.kl.mean() > 1e-8


def test_threads_are_part_of_it_and_an_engine_is_afterwards_as_it_was(tiny: Path) -> None:
    engine, plan = opened(tiny), planned(tiny, 32)
    none, threads = np.zeros(len(plan), np.bool_), torch.get_num_threads()
    before = dict(engine.score(plan, none))
    words = noise_floor(engine, plan).words
    assert "thread" in words
    assert words.endswith(f"instead of {threads}")
    after = dict(engine.score(plan, none))
    assert all(np.array_equal(before[i].logprob, after[i].logprob) for i in range(len(plan)))
    assert torch.get_num_threads() == threads


def test_a_single_window_has_a_floor_too(tiny: Path) -> None:
    engine, plan = opened(tiny), ask(str(tiny), text="The quick brown fox", context_length=64).plan
    assert len(plan) == 1
    floor = noise_floor(engine, plan)
    assert floor.kl is not None
    assert floor.words.startswith("two windows per batch instead of one")


def test_a_pass_that_does_not_fit_in_memory_leaves_it_unmeasured(tiny: Path) -> None:
    engine, plan = opened(tiny, batch_tokens=1), planned(tiny, 64)

    def full(ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if len(ids) > 1:
            raise torch.OutOfMemoryError
        return hidden

    with body_of(engine, full):
        floor = noise_floor(engine, plan)
    assert floor.kl is None
    assert "does not fit in this device's memory" in floor.words


# ── what is kept and printed ─────────────────────────────────────────────────────────────────────────────────────────
@needs_wing("reports/html")
def test_what_was_not_measured_is_printed_as_such(tmp_path: Path, command: Command) -> None:
    asked = ("compare", "table:uniform", "table:successor", "--text", "any text", "--out", tmp_path)
    said = "not measured (the table engine computes in closed form)"
    assert f"noise floor: {said}" in " ".join(command(*asked).out.split())
    (candidate,) = command(*asked, "--json").json["candidates"]
    assert (candidate["noise_floor_kl_mean"], candidate["noise_floor_perturbed"]) == (None, None)
    assert f"Noise floor: {said}." in command(*asked, "--markdown").out
    command(*asked, "--report", tmp_path / "page.html")
    assert "Noise floor: not measured (the table engine" in (tmp_path / "page.html").read_text()


def test_what_was_measured_is_printed_with_its_conditions(tiny: Path, tmp_path: Path, command: Command) -> None:
    sizes = ("--context-length", 128, "--batch-tokens", 1, "--dtype", "float32")
    asked = ("compare", tiny, tiny, "--out", tmp_path, "--text", TEXT, *sizes)
    printed = " ".join(command(*asked).out.split())
    assert re.search(r"noise floor: KL mean \S+ under: two windows per batch instead of one, ", printed)
    (candidate,) = command(*asked, "--json").json["candidates"]
    assert 0 <= candidate["noise_floor_kl_mean"] < 1e-9
    assert candidate["noise_floor_perturbed"].startswith("two windows per batch instead of one, ")


def test_a_reference_hands_its_floor_on(tiny: Path, tmp_path: Path) -> None:
    kept = reference(str(tiny), tmp_path / "ref", text=TEXT, context_length=32)
    (found,) = compare(str(tmp_path / "ref"), str(tiny), out=tmp_path / "out")
    assert found.noise_kl is not None
    assert found.noise_kl.tolist() == kept.manifest["noise_kl"]
    assert found.noise_perturbed == kept.manifest["noise_perturbed"]
