"""Attribution on several replicas: the numbers of one process, also after a replica was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

import scoremode as sm
from scoremode.remote.ray.replica_pool import ReplicaPool
from scoremode.studies.attribution.engines.replicated_swapper import ReplicatedSwapper
from tests.makers import make_tiny_model

TEXT = "the cat sat on the mat and the dog sat on the log. " * 8


def test_replicas_measure_what_one_process_does(
    workers: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two replicas is killed after the first unit; the other one measures what is missing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base = str(make_tiny_model(tmp_path / "base", adds_bos=True, num_hidden_layers=3))
    asked: dict[str, Any] = {"text": TEXT, "context_length": 24, "dtype": "float32", "device": "cpu"}
    asked |= {"by": "matrix", "bits_budget": 16.0}
    alone = sm.attribute(base, "rtn:3:16", "rtn:6:16", out=tmp_path / "alone", **asked).as_json()
    killed = list[int]()
    original = ReplicatedSwapper.columns

    def columns(swapper: ReplicatedSwapper, *given: Any) -> Any:
        pool = swapper.pool
        assert isinstance(pool, ReplicaPool)
        assert killed or pool.wait_for_all(120) == 2
        for found in original(swapper, *given):
            busy = next((one for one in pool.ready if one.sent), None)
            if not killed and busy is not None and busy.opened is not None:
                killed.append(busy.opened.pid)
                os.kill(busy.opened.pid, signal.SIGKILL)
            yield found

    monkeypatch.setattr(ReplicatedSwapper, "columns", columns)
    found = sm.attribute(
        base, "rtn:3:16", "rtn:6:16", replicas=2, cpus_per_replica=1, out=tmp_path / "many", **asked
    ).as_json()
    assert killed
    assert any("replica" in note for note in found["notes"])
    of_one, of_many = ({name: value for name, value in one.items() if name != "notes"} for one in (alone, found))
    assert of_many == of_one
