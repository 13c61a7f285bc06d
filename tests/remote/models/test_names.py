"""Every name gets the expected answer; a fetch shows its progress and goes on after a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scoremode.cli.main import main
from scoremode.core import hub as reachable
from scoremode.core.verbs.progress import ProgressState
from scoremode.errors import ModelError
from scoremode.remote.models import fetching
from scoremode.remote.models import hub as hub_names
from tests.cli.test_hub import complaint
from tests.hub import LARGE, Hub, Repo, add_commit, silent_server
from tests.remote.models.names import NAMES, answer, furnish, is_expected

SIZE = 3 * fetching.CHUNK


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.chdir(tmp_path)
    hub_names.listing.cache_clear()
    hub.repos["models/org/large"] = Repo(files={"a-Q8_0.gguf": b"GGUF" * (SIZE // 4)})
    return tmp_path


def test_names_get_the_expected_answers(hub: Hub, here: Path) -> None:
    furnish(hub, here)
    answers = {name: answer(name) for name in NAMES}
    assert {name: said for name, said in answers.items() if not is_expected(name, said)} == {}
    assert hub_names.listing("org/tiny-GGUF").models[-1].size == 2 * LARGE, "both parts of a split model"


def test_a_repository_without_a_checkpoint_says_what_it_has(hub: Hub, here: Path) -> None:
    line = complaint(here, "org/large", "--text", "one two", HF_ENDPOINT=hub.address)
    assert "has no config.json; give a checkpoint or a GGUF model: org/large:Q8_0 (3.1 MB)" in line


def test_a_cache_that_cannot_be_written_names_its_setting(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/dev/null/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/dev/null/hub")
    with pytest.raises(ModelError, match=r"NotADirectoryError: .*HF_HOME"):
        hub_names.HUB_NAMES.find("org/large:Q8_0")


class Screen(ProgressState):
    """A display that remembers its lines."""

    def changed(self) -> None:
        self.lines = [*getattr(self, "lines", []), self.line()]


def test_a_fetch_shows_how_much_how_fast_and_how_long(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(ProgressState, "shown", [screen])
    hub_names.HUB_NAMES.find("org/large:Q8_0")
    told = " | ".join(screen.lines)
    assert re.search(r"fetching a-Q8_0.gguf of org/large, for \d s, 1 MB of 3.1 MB, ", told)
    assert "3.1 MB of 3.1 MB, " in told
    assert "/s, about 0 s left" in told


FIND = """
from huggingface_hub import constants
from scoremode.remote.models.hub import HUB_NAMES
constants.HF_HUB_CACHE = "hub"
HUB_NAMES.find("org/large:Q8_0")
"""


def test_a_killed_fetch_goes_on_where_it_ended(hub: Hub, here: Path) -> None:
    (digest,) = hub_names.listing("org/large").models[0].hashes
    part = here / "hub/models--org--large/blobs" / f"{digest}.incomplete"

    def kill() -> None:
        ends = time.monotonic() + 20
        while not part.exists() or part.stat().st_size < fetching.CHUNK:
            assert time.monotonic() < ends
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)

    hub.halfway = kill
    process = subprocess.Popen([sys.executable, "-c", FIND])
    assert process.wait(60) == -signal.SIGKILL
    hub.halfway = None
    kept = part.stat().st_size
    assert kept >= fetching.CHUNK
    before = hub.sent["a-Q8_0.gguf"]
    assert hub_names.HUB_NAMES.find("org/large:Q8_0").stat().st_size == SIZE
    assert hub.sent["a-Q8_0.gguf"] - before == SIZE - kept
    assert not part.exists()


def test_files_elsewhere_are_not_touched(here: Path) -> None:
    (digest,) = hub_names.listing("org/large").models[0].hashes
    mine, link = here / "other/blobs/mine", hub_names.HUB_NAMES.find("org/large:Q8_0")
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"my own")
    blob = link.resolve()
    link.unlink()
    link.symlink_to(mine)
    with pytest.raises(ModelError, match="does not have the hash that the hub states; run it again"):
        hub_names.HUB_NAMES.find("org/large:Q8_0")
    blob.unlink(missing_ok=True)
    blob.with_name(f"{digest}.incomplete").symlink_to(mine)
    assert hub_names.HUB_NAMES.find("org/large:Q8_0").stat().st_size == SIZE
    assert mine.read_bytes() == b"my own"


def test_what_was_in_the_cache_before_stays(hub: Hub, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo, before, now = hub.repos["models/org/large"], hub_names.HubNames(), hub_names.HubNames()
    kept = before.find("org/large:Q8_0")
    add_commit(repo, "another README")
    hub_names.listing.cache_clear()
    capsys.readouterr()
    assert now.find("org/large:Q8_0").samefile(kept)
    assert "fetching" not in capsys.readouterr().err
    now.release("org/large:Q8_0")
    assert kept.stat().st_size == SIZE
    before.release("org/large:Q8_0")
    assert not kept.exists()


def test_a_hub_that_fails_is_one_line(hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.failing = lambda method, path: 500 if "resolve" in path else None
    with pytest.raises(ModelError, match=r"HTTP status 500; 0 B of 3.1 MB are kept; run it again to go on"):
        hub_names.HUB_NAMES.find("org/large:Q8_0")


@pytest.mark.parametrize("name", ["org/large", "org/large:Q8_0", "org/large/a-Q8_0.gguf"])
def test_without_a_network_the_answer_comes_within_three_seconds(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reachable.SECONDS <= 1.5, "the rest is for the imports of a command"
    monkeypatch.setattr(reachable, "SECONDS", 0.3)
    with silent_server() as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        began = time.monotonic()
        assert main(["ppl", name, "--text", "one two"]) == 2
    assert time.monotonic() - began < 10, "the client tries again for minutes"
    assert "the hub cannot be reached" in capsys.readouterr().err
