"""Whatever happens to replicas, the numbers are those of one process, and the result says what happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.remote.ray.engine import ReplicatedEngine
from tests.remote.ray import paced
from tests.remote.ray.conftest import Nodes
from tests.s3 import wait_until

SIZES: dict[str, Any] = {"method": "gptq", "context_length": 64, "max_windows": 0}


def alone(text: Path, model: str = "paced:") -> sm.Run:
    """The same table in this process, with nothing that goes wrong."""
    return sm.ppl(model, corpus=str(text), **SIZES, fresh=True)


def same(run: sm.Run, text: Path) -> None:
    np.testing.assert_array_equal(run.scores.logprob, alone(text).scores.logprob)


def engine_of(model: sm.Model, replicas: int) -> ReplicatedEngine:
    engine = model._model.opened(Work(64))
    assert isinstance(engine, ReplicatedEngine)
    assert engine.pool.wait_for_all(60) == replicas
    return engine


def pids(engine: ReplicatedEngine) -> list[int]:
    return [replica.opened.pid for replica in engine.pool.ready if replica.opened is not None]


def test_killed_workers(nodes: Nodes, text: Path, tmp_path: Path) -> None:
    """kill -9, twice, at moments of chance."""
    with sm.open("paced:wait=0.08", replicas=2, ray="auto") as model:
        engine = engine_of(model, 2)
        rng = random.Random(1)

        def kill() -> None:
            for _ in range(2):
                time.sleep(0.4 + rng.random() * 0.3)
                wait_until(lambda: bool(pids(engine)))
                os.kill(rng.choice(pids(engine)), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        run = model.ppl(corpus=str(text), out=tmp_path / "run", **SIZES)
        killer.join()
    same(run, text)
    account = run.manifest["replicas"]
    assert account["deaths"] >= 1
    assert account["windows_again"] > 0
    assert any("died" in note for note in run.manifest["notes"])


@pytest.mark.parametrize("pause", [0.0, 4.0])  # Ray has noticed nothing yet, or started another process
def test_a_replica_that_dies_between_questions(nodes: Nodes, text: Path, tmp_path: Path, pause: float) -> None:
    with sm.open("paced:wait=0.001", replicas=1, ray="auto") as model:
        (pid,) = pids(engine_of(model, 1))
        os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        run = model.ppl(corpus=str(text), out=tmp_path / "run", **SIZES)
    same(run, text)
    assert run.manifest["replicas"]["deaths"] == 1


def test_a_lost_node(nodes: Nodes, text: Path, tmp_path: Path) -> None:
    lost = nodes.add()
    with sm.open("paced:wait=0.2", replicas=3, ray="auto", gpus_per_replica=1) as model:
        engine_of(model, 3)
        timer = threading.Timer(0.5, lambda: nodes.remove(lost))
        timer.start()
        run = model.ppl(corpus=str(text), out=tmp_path / "run", **SIZES)
        timer.join()
    same(run, text)
    assert run.manifest["replicas"]["deaths"] == 1


def test_a_window_that_kills_three_replicas_is_named(nodes: Nodes, text: Path, capfd: Any) -> None:
    with pytest.raises(sm.ScoremodeError, match=r"three replicas died over window") as caught:
        sm.ppl("paced:wait=0.001,die=60", corpus=str(text), **SIZES, replicas=2, ray="auto")
    assert "run the same command again to resume" in str(caught.value)


def test_an_engine_that_fails_once_gives_its_windows_to_others(
    nodes: Nodes, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where replicas work, too
    run = sm.ppl("paced:once=60,wait=0.001", corpus=str(text), **SIZES, replicas=2, ray="auto")
    same(run, text)
    assert (tmp_path / "burnt").exists()
    assert run.manifest["replicas"]["deaths"] == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fail=60", r"^the table is on fire; call somebody$"),
        ("refuse=1", r"^this table never opens; choose another$"),
        ("crash=1", r"^no replica could open the model \(its process or"),
    ],
)
def test_what_every_replica_meets_is_said_once(nodes: Nodes, text: Path, capfd: Any, fault: str, words: str) -> None:
    with pytest.raises(sm.ScoremodeError, match=words):
        sm.ppl(f"paced:{fault}", corpus=str(text), **SIZES, replicas=2, ray="auto")


def test_a_node_with_other_weights_is_left_out(nodes: Nodes, text: Path, tmp_path: Path) -> None:
    other = nodes.add(cpus=1, environment={paced.WEIGHTS: "others"})
    with sm.open("paced:wait=0.01", replicas=3, ray="auto", gpus_per_replica=1) as model:
        engine_of(model, 2)
        run = model.ppl(corpus=str(text), out=tmp_path / "run", **SIZES)
    nodes.remove(other)
    same(run, text)
    account = run.manifest["replicas"]
    assert account["started"] == 2
    (line,) = account["left_out"]
    assert "is left out" in line
    assert "other weights" in line
    assert line in run.manifest["notes"]


def test_devices_that_differ_are_named(nodes: Nodes, text: Path, tmp_path: Path) -> None:
    other = nodes.add(cpus=1, environment={paced.DEVICE: "old GPU"})
    with sm.open("paced:wait=0.01", replicas=3, ray="auto", gpus_per_replica=1) as model:
        engine_of(model, 3)
        run = model.ppl(corpus=str(text), out=tmp_path / "run", **SIZES)
    nodes.remove(other)
    assert run.manifest["replicas"]["devices"] == {"cpu": 2, "old GPU": 1}
    assert "scored by 3 replicas on 1 node; their devices differ: cpu, old GPU" in run.manifest["notes"]


def test_more_replicas_than_there_is_room_for(nodes: Nodes, text: Path, tmp_path: Path) -> None:
    nodes.wait_until_gone(3)
    run = sm.ppl(
        "paced:wait=0.01", corpus=str(text), **SIZES, out=tmp_path / "run", replicas=7, ray="auto", gpus_per_replica=1
    )
    same(run, text)
    assert run.manifest["replicas"]["started"] <= 2


def test_no_room_at_all_is_said_at_once(nodes: Nodes, text: Path) -> None:
    began = time.monotonic()
    with pytest.raises(sm.ScoremodeError, match="a replica needs 4 GPUs and 1 CPU on one node; the cluster has"):
        sm.ppl("paced:", corpus=str(text), **SIZES, fresh=True, replicas=1, ray="auto", gpus_per_replica=4)
    assert time.monotonic() - began < 5


def test_two_models_share_a_cluster(nodes: Nodes, text: Path, tmp_path: Path) -> None:
    """The second waits for nobody: there is room; each keeps its own numbers."""
    with (
        sm.open("paced:wait=0.01", replicas=2, ray="auto") as first,
        sm.open("paced:wait=0.011", replicas=2, ray="auto") as second,
    ):
        same(first.ppl(corpus=str(text), out=tmp_path / "a", **SIZES), text)
        same(second.ppl(corpus=str(text), out=tmp_path / "b", **SIZES), text)


def test_a_question_that_is_abandoned_leaves_the_next_one_whole(nodes: Nodes, text: Path, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total / 3:
            raise EnoughError

    with sm.open("paced:wait=0.02", replicas=2, ray="auto") as model:
        with pytest.raises(EnoughError):
            model.ppl(corpus=str(text), out=tmp_path / "run", progress=stop, **SIZES)
        run = model.ppl(corpus=str(text), out=tmp_path / "run", **SIZES)
    same(run, text)
