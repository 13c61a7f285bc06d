"""Every name gets the expected answer, and what was fetched is removed, unless it was there before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scoremode.cli.main import main
from scoremode.core import hub as reachable
from scoremode.errors import ModelError
from scoremode.remote.models import hub as hub_names
from tests.cli.test_hub import complaint
from tests.hub import LARGE, Hub, Repo, add_commit, silent_server
from tests.remote.models.names import NAMES, answer, furnish, is_expected

SIZE = 3 << 20


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.chdir(tmp_path)
    hub_names.listing.cache_clear()
    hub.repos["models/org/large"] = Repo(files={"a-Q8_0.gguf": b"GGUF" * (SIZE // 4)})
    return tmp_path


def test_sixty_names_get_the_expected_answers(hub: Hub, here: Path) -> None:
    furnish(hub, here)
    answers = {name: answer(name) for name in NAMES}
    assert {name: said for name, said in answers.items() if not is_expected(name, said)} == {}
    assert len(NAMES) == 60
    assert hub_names.listing("org/tiny-GGUF").models[-1].size == 2 * LARGE, "both parts of a split model"


def test_a_repository_without_a_checkpoint_says_what_it_has(hub: Hub, here: Path) -> None:
    line = complaint(here, "org/large", "--text", "one two", HF_ENDPOINT=hub.address)
    assert "has no config.json; give a checkpoint or a GGUF model: org/large:Q8_0 (3.1 MB)" in line


def test_a_cache_that_cannot_be_written_names_its_setting(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/dev/null/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/dev/null/hub")
    with pytest.raises(ModelError, match=r"NotADirectoryError: .*; set HF_HUB_CACHE to a folder that can be written"):
        hub_names.HUB_NAMES.find("org/large:Q8_0")


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
    with pytest.raises(ModelError, match=r"could not be fetched from the Hugging Face hub: the hub .*; "):
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
