"""The same bits: a real model on one process and on replicas, for everything that scores."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.references.reader import Reference
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE
from scoremode.remote.ray.engine import ReplicatedEngine
from tests.remote.ray.conftest import Nodes

COLUMNS = BUILT_IN.names
ROWS = 40


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rng = random.Random(7)
    words = [
        *("the", "a", "little", "dog", "Tom", "Lily", "park", "house", "ball", "went", "saw", "played", "was"),
        "happy",
    ]
    lines = [" ".join(rng.choices(words, k=rng.randrange(20, 120))).capitalize() + "." for _ in range(ROWS)]
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return {"corpus": str(path), "method": "mean-of-texts", "context_length": 96, "fresh": True}


@pytest.fixture(scope="module")
def three(nodes: Nodes, stories: Path) -> Iterator[sm.Model]:
    """Three replicas that share two declared GPUs, all of them open."""
    with sm.open(str(stories), replicas=3, ray=nodes.address, gpus_per_replica=0.5) as model:
        engine = model._model.opened(Work(512))
        assert isinstance(engine, ReplicatedEngine)
        assert engine.pool.wait_for_all(300) == 3
        yield model


def same(one: sm.Run, other: sm.Run) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(one.scores, name), getattr(other.scores, name), err_msg=name)
    assert one.manifest["metrics"] == other.manifest["metrics"]
    assert one.manifest["identity"] == other.manifest["identity"], "a run is the same run, however it was made"


def test_perplexity(three: sm.Model, stories: Path, question: dict[str, Any], tmp_path: Path) -> None:
    one = sm.ppl(str(stories), **question, out=tmp_path / "one")
    spread = three.ppl(**question, out=tmp_path / "three")
    same(one, spread)
    account = spread.manifest["replicas"]
    assert account["started"] == 3
    assert sum(account["devices"].values()) == 3
    assert any(note.startswith("scored by 3 replicas on ") for note in spread.manifest["notes"])
    assert not any("replica" in note for note in one.manifest["notes"])


def test_probabilities(three: sm.Model, stories: Path) -> None:
    prompts = [f"One day, {name} went to the" for name in ("Tom", "Lily", "the cat", "a big dog")]
    pairs = [(p, t) for p in prompts for t in (" park", " old house and played", "y")]
    asked: dict[str, Any] = {"prompt": [p for p, _ in pairs], "targets": [t for _, t in pairs]}
    with sm.open(str(stories)) as alone:
        assert three.prob(**asked) == alone.prob(**asked)


def test_references_and_comparisons(
    three: sm.Model, stories: Path, tiny: Path, question: dict[str, Any], tmp_path: Path
) -> None:
    one = sm.reference(str(stories), tmp_path / "one", **question)
    spread = three.reference(tmp_path / "three", **question)
    same(one, spread)
    first, second = Reference.open(tmp_path / "one"), Reference.open(tmp_path / "three")
    np.testing.assert_array_equal(first.rows(0, first.targets), second.rows(0, second.targets))
    np.testing.assert_array_equal(first.head_weight(), second.head_weight())
    assert one.manifest["noise_kl"] == spread.manifest["noise_kl"]
    with (
        sm.open(str(stories), batch_tokens=256) as alone,
        sm.open(str(stories), batch_tokens=256, replicas=2, ray="auto") as several,
    ):
        left = alone.compare(tmp_path / "one", out=tmp_path / "left")
        right = several.compare(tmp_path / "three", out=tmp_path / "right")
    assert left.kl is not None
    assert float(left.kl.max()) > 0, "other batches, other bits"
    np.testing.assert_array_equal(left.kl, right.kl)
    same(left.candidate, right.candidate)


def test_comparing_two_tables(nodes: Nodes, tmp_path: Path) -> None:
    """With replicas the baseline's states are kept first, and the candidate's replicas read them. All columns of a
    divergence arrive, infinite ones too."""
    asked: dict[str, Any] = {"text": "any text, and some more of it. " * 40, "context_length": 64, "stride": 32}
    (alone,) = sm.compare("table:uniform", "table:successor", **asked, out=tmp_path / "one")
    (spread,) = sm.compare("table:uniform", "table:successor", **asked, out=tmp_path / "two", replicas=2, ray="auto")
    assert spread.divergences.measured == tuple(column.name for column in DIVERGENCE)
    for name in spread.divergences.measured:
        np.testing.assert_array_equal(getattr(spread.divergences, name), getattr(alone.divergences, name))
    assert np.isinf(alone.kl).any()  # type: ignore[arg-type]
    assert Reference.open(tmp_path / "two" / "baseline").targets == len(alone.kl if alone.kl is not None else ())


def test_noise_between_passes_is_none(three: sm.Model, question: dict[str, Any]) -> None:
    asked = {name: value for name, value in question.items() if name != "fresh"}
    (setting,) = sm.noise(three, **asked).settings
    assert setting.repeats is not None
    assert setting.repeats.max == 0.0


def test_a_model_that_is_open_cannot_be_the_baseline_of_replicas(three: sm.Model, stories: Path) -> None:
    with sm.open(str(stories)) as other, pytest.raises(sm.ScoremodeError, match="make a reference of the baseline"):
        three.compare(other, text="any text")
