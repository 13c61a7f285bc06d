"""Replicas from the command line: drivers that are killed, interrupted or given what cannot work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scoremode.core.installation import pip_install
from scoremode.core.store.runs import JOURNAL
from tests import forked
from tests.remote.ray.conftest import ROOT, Nodes
from tests.s3 import wait_until

# "auto" looks at all processes of the machine: clusters of others must not be found
ALONE = (
    "import ray._private.services as services; services.find_gcs_addresses = set; "
    "services.find_bootstrap_address = lambda _: None; from scoremode.cli.main import entry; entry()"
)
SIZES = ("--method", "gptq", "--context-length", "64", "--max-windows", "0")


@pytest.fixture
def cache(tmp_path: Path, plugged: None) -> dict[str, str]:
    return {**os.environ, "SCOREMODE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "scoremode", *arguments]


def scoremode(environment: dict[str, str], *arguments: str, run: Any = forked.run) -> subprocess.CompletedProcess[str]:
    return run(  # type: ignore[no-any-return]
        command(*arguments), env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


def family_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return found


def workers_left(family: list[psutil.Process]) -> list[str]:
    """Two agents of Ray look for their parent only once a minute."""
    return [name for name in left_of(family) if not name.endswith("Agent")]


def left_of(family: list[psutil.Process]) -> list[str]:
    left = []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two questions
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.name())
    return left


@pytest.fixture
def started(cache: dict[str, str], text: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that has scored some of its windows on two replicas, with Ray of its own."""
    asked = ["ppl", "paced:wait=0.2", "--corpus", str(text), *SIZES, "--out", str(tmp_path / "run"), "--replicas", "2"]
    made = forked.Popen(command(*asked), env=cache, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "run" / JOURNAL
    try:
        wait_until(lambda: journal.exists() and journal.stat().st_size > 3000, 120)
        yield made
    finally:
        if made.poll() is None:
            made.kill()
        made.communicate()


def resumed(cache: dict[str, str], text: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    done = scoremode(
        cache, "ppl", "paced:wait=0.2", "--corpus", str(text), *SIZES, "--out", str(tmp_path / "run"), *more, "--json"
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_driver_that_is_killed_leaves_no_replica_running_and_resumes(
    started: subprocess.Popen[str], cache: dict[str, str], text: Path, tmp_path: Path
) -> None:
    family = family_of(started)
    assert any("raylet" in process.name() for process in family)
    started.kill()
    wait_until(lambda: not workers_left(family), 30)
    found = resumed(cache, text, tmp_path)  # without replicas: a run is the same run
    alone = scoremode(cache, "ppl", "paced:", "--corpus", str(text), *SIZES, "--json")
    assert found["perplexity"] == json.loads(alone.stdout)["perplexity"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_driver_says_so_in_one_line_and_leaves_nothing_running(
    started: subprocess.Popen[str], number: signal.Signals
) -> None:
    family = family_of(started)
    started.send_signal(number)
    _, err = started.communicate(timeout=120)
    assert started.returncode == 128 + number
    word = "interrupted" if number == signal.SIGINT else "terminated"
    said = [line for line in err.strip().splitlines() if not line.startswith("scoremode: waiting for ")]
    assert said == [f"scoremode: {word}; what was scored is kept: run the same command again to resume"]
    wait_until(lambda: not left_of(family), 30)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--replicas", "2", "--ray", "nowhere.invalid:6379"], "there is no Ray cluster at nowhere.invalid:6379"),
        (["--replicas", "2", "--ray", "127.0.0.1:1"], "there is no Ray cluster at 127.0.0.1:1"),
        (["--replicas", "2", "--ray", "auto"], "of this version of Ray at auto"),
    ],
)
def test_an_address_without_a_cluster_is_answered_at_once(
    cache: dict[str, str], text: Path, flags: list[str], words: str
) -> None:
    began = time.monotonic()
    asked = ["ppl", "table:uniform", "--corpus", str(text), *flags]
    done = forked.run(
        [sys.executable, "-c", ALONE, *asked], env=cache, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert words in done.stderr
    assert time.monotonic() - began < 20


def test_without_ray_one_line_says_what_to_install(cache: dict[str, str], text: Path, tmp_path: Path) -> None:
    """Everything else works without it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'ray' else found(name, *a)\n"
        "sys.modules['ray'] = None\n"
    )
    cache["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), cache["PYTHONPATH"]])
    asked = ("ppl", "table:uniform", "--corpus", str(text), "--json")
    refused = scoremode(cache, *asked, "--replicas", "2", run=subprocess.run)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert pip_install("ray") in refused.stderr
    assert scoremode(cache, *asked, run=subprocess.run).returncode == 0


def test_a_ray_of_ours_leaves_no_token_behind(cache: dict[str, str], text: Path, tmp_path: Path) -> None:
    """Ray would write one into the home folder, and then use it for clusters that have none."""
    asked = ("ppl", "paced:", "--corpus", str(text), *SIZES, "--replicas", "2", "--json")
    done = scoremode({**cache, "HOME": str(tmp_path)}, *asked, run=subprocess.run)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / ".ray").exists()


def test_a_token_that_the_cluster_does_not_use_is_named(cache: dict[str, str], text: Path, nodes: Nodes) -> None:
    asked = ("ppl", "paced:", "--corpus", str(text), *SIZES, "--replicas", "2", "--ray", nodes.address)
    done = scoremode({**cache, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, *asked)
    assert done.returncode == 2
    assert "set RAY_AUTH_MODE=disabled" in done.stderr.splitlines()[-1]
