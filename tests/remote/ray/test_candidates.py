"""Several candidates over the slots of one Ray: the bits of one after the other, whatever happens to some of them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import scoremode as sm
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.verbs.progress import Progress
from scoremode.remote.ray.side_by_side import score_together
from tests.makers import SENTENCES, make_tiny_model

SIZES: dict[str, Any] = {"method": "sliding-once", "context_length": 32, "stride": 16}
BATCH = 32  # tokens: many small batches, so that a kill comes between two of them
COLUMNS = BUILT_IN.names
# a driver whose Ray gets its workers from the template of this process; those of tests/remote/ray/test_command_line.py,
# where nothing may be left running, are Ray's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("candidates")


@pytest.fixture(scope="module")
def candidates(folder: Path) -> list[str]:
    """One model with its weights spread more and more widely."""
    made = [make_tiny_model(folder / f"c{i}", adds_bos=True, initializer_range=0.3 + 0.05 * i) for i in range(2)]
    return [str(path) for path in made]


@pytest.fixture(scope="module")
def reference(folder: Path) -> str:
    baseline = make_tiny_model(folder / "baseline", adds_bos=True)
    text = folder / "text.txt"
    text.write_text("\n\n".join(SENTENCES * 40))
    sm.reference(str(baseline), folder / "ref", corpus=str(text), **SIZES)
    return str(folder / "ref")


@pytest.fixture(scope="module")
def one_by_one(reference: str, candidates: list[str], folder: Path) -> Sequence[sm.Comparison]:
    return sm.compare(reference, *candidates, out=folder / "alone", batch_tokens=BATCH)


def broken_copy(model: str, folder: Path) -> str:
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return str(folder)


def require_same_bits(found: list[sm.Run], alone: Sequence[sm.Comparison]) -> None:
    for one, other in zip(found, alone, strict=True):
        for name in COLUMNS:
            ours, theirs = getattr(one.scores, name), getattr(other.candidate.scores, name)
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        np.testing.assert_array_equal(np.asarray(one.kl), np.asarray(other.kl))


def test_a_broken_candidate_is_named_and_the_others_have_the_bits_of_one_after_the_other(
    workers: psutil.Process, reference: str, candidates: list[str], one_by_one: Sequence[sm.Comparison], tmp_path: Path
) -> None:
    broken = broken_copy(candidates[0], tmp_path / "models" / "broken")
    order = [candidates[0], broken, candidates[1]]  # one waits for a slot
    with pytest.raises(sm.ScoremodeError, match=r"model\.safetensors is truncated") as caught:
        sm.compare(reference, *order, out=tmp_path, replicas=2, batch_tokens=BATCH)
    assert f"1 of 3 candidates could not be scored: {broken}: " in str(caught.value)
    assert "the scores of the others are kept" in str(caught.value)
    found = [sm.load(tmp_path / Path(name).name) for name in candidates]
    require_same_bits(found, one_by_one)
    assert [run.manifest["replicas"]["wanted"] for run in found] == [1, 1]


# ── without Ray ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_error_that_is_not_ours_names_its_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    def score(name: str, _: Progress) -> str:
        raise sm.ScoremodeError("bad") if name == "a" else ZeroDivisionError("none of ours")

    with pytest.raises(ZeroDivisionError, match="none of ours"):
        score_together(["a", "b"], score, 2)
    told = capsys.readouterr().err.splitlines()
    assert told == ["scoremode: a: bad", "scoremode: b could not be scored; 0 of 2 candidates were scored and are kept"]


class Interrupted(BaseException):
    """As KeyboardInterrupt, which a suite in the background would never get."""


@pytest.fixture
def interruptible() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_an_interruption_waits_until_the_candidates_have_ended(interruptible: None) -> None:
    """Else they would ask Ray, which is gone then, and start it again."""
    begun, ended = threading.Barrier(3), []

    def score(name: str, progress: Any) -> str:
        begun.wait()
        try:
            while True:
                progress.detail("0/1 replicas")
                time.sleep(0.01)
        finally:
            time.sleep(0.4 if name == "a" else 0.2)  # the first is waited for when the interruption comes
            ended.append(name)

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=interrupt).start()
    with pytest.raises(Interrupted):
        score_together(["a", "b", "c"], score, 2)
    assert sorted(ended) == ["a", "b"]
