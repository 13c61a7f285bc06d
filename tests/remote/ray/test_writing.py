"""Rollouts on several replicas: the same texts as by one engine, also after a replica or the driver was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

import scoremode as sm
from scoremode.errors import InputError
from scoremode.remote.ray.replica_pool import ReplicaPool
from scoremode.studies.rollouts.writing import ReplicatedWriter

PROMPTS = [f"the cat sat on mat {n}" for n in range(9)]
HOW: dict[str, Any] = {"temperature": 1, "samples": 2, "max_tokens": 6, "sequences": 4, "seed": 3}


def same(one: sm.Rollouts, other: sm.Rollouts) -> bool:
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(one.written, other.written, strict=True)]
    numbers = [(a.tolist(), b.tolist()) for a, b in zip(one.raw_logprob, other.raw_logprob, strict=True)]
    return all(a == b for a, b in (*pairs, *numbers))


def test_replicas_write_the_texts_of_one_engine(
    workers: psutil.Process, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two replicas is killed after the first text; the other one writes what is missing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine: dict[str, Any] = {"engine": "transformers", "dtype": "float32", "device": "cpu", **HOW}
    alone = sm.rollouts(str(tiny), PROMPTS, **engine)
    killed = list[int]()
    original = ReplicatedWriter.write

    def write(writer: ReplicatedWriter, *given: Any) -> Any:
        for found in original(writer, *given):
            if not killed:
                assert isinstance(writer.pool, ReplicaPool)
                busy = next(one for one in writer.pool.ready if one.sent)
                assert busy.opened is not None
                killed.append(busy.opened.pid)
                os.kill(busy.opened.pid, signal.SIGKILL)
            yield found

    monkeypatch.setattr(ReplicatedWriter, "write", write)
    found = sm.rollouts(str(tiny), PROMPTS, replicas=2, cpus_per_replica=1, out=tmp_path / "w", **engine)
    assert killed
    assert same(found, alone)
    assert any("replica" in note for note in found.manifest["notes"])


def test_what_replicas_cannot_do_is_refused() -> None:
    with pytest.raises(InputError):
        sm.rollouts("table:uniform", PROMPTS, replicas=0)
