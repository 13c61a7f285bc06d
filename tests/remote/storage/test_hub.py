"""Runs and references on the hub, sent and read file by file, against a stand-in of the hub's API."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.references.writer import StatesWriter
from scoremode.errors import InputError, StorageError
from tests.hub import TOKEN, Hub, Repo

TEXT = "the cat sat on the mat and the dog sat on the log. " * 80
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
URI, NAME = "hf://datasets/me/model-reference", "datasets/me/model-reference"


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(StatesWriter.__init__.__kwdefaults__ or {}, "shard_bytes", 1 << 18)


def empty_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Another machine: nothing is in its cache."""
    monkeypatch.setenv("SCOREMODE_CACHE", str(folder))
    return folder


def states_sent(hub: Hub) -> int:
    return sum(count for name, count in hub.sent.items() if "states-" in name)


@pytest.fixture
def repo(hub: Hub) -> Repo:
    """A repository of the user, with a card."""
    hub.repos[NAME] = Repo(files={"README.md": b"# a card"})
    return hub.repos[NAME]


def test_a_reference_is_published_and_compared_elsewhere(
    hub: Hub, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None
) -> None:
    made = sm.reference("table:successor", URI, **QUESTION)
    assert made.path == URI
    assert sum("states-" in name for name in repo.files) > 4
    assert {"README.md", "manifest.json", "scores.parquet", "reference.json", "head.safetensors"} <= repo.files.keys()
    assert "lock.json" not in repo.files
    assert not [name for name, data in repo.files.items() if TOKEN.encode() in data]
    commits = len(repo.messages)
    sm.reference("table:successor", tmp_path / "here", **QUESTION)
    (expected,) = sm.compare(str(tmp_path / "here"), "table:uniform")
    empty_cache(monkeypatch, tmp_path / "other")
    (found,) = sm.compare(URI, "table:uniform")
    assert np.array_equal(np.asarray(found.kl), np.asarray(expected.kl))
    before = dict(hub.sent)
    sm.compare(URI, "table:uniform", "table:successor")
    assert states_sent(hub) == sum(count for name, count in before.items() if "states-" in name)
    assert sm.reference("table:successor", URI, **QUESTION).cached
    assert sm.load(f"{URI}@{repo.commits[-1]}").perplexity == made.perplexity
    assert len(repo.messages) == commits


def test_states_are_fetched_when_a_model_is_compared_and_a_part_is_refused(
    hub: Hub, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm.reference("table:successor", URI, **QUESTION)
    whole = sum(len(data) for name, data in repo.files.items() if "states-" in name)
    empty_cache(monkeypatch, tmp_path / "reader")
    hub.sent.clear()
    sm.load(URI)
    assert hub.sent.keys() == {"manifest.json", "reference.json", "scores.parquet"}
    with pytest.raises(InputError, match="max windows 0 vs 3; leave text, method and sizes out"):
        sm.compare(URI, "table:uniform", max_windows=3)
    assert states_sent(hub) == 0
    sm.compare(URI, "table:uniform")
    assert states_sent(hub) == whole


def test_a_reference_is_replaced_with_all_of_its_files(repo: Repo, small_shards: None) -> None:
    sm.reference("table:successor", URI, **QUESTION)
    many = len(repo.files)
    sm.reference("table:successor", URI, **{**QUESTION, "text": TEXT[:500]}, fresh=True)
    assert len(repo.files) < many
    assert repo.files["README.md"] == b"# a card"
    assert sm.compare(URI, "table:uniform")[0].kl is not None


def test_what_could_not_be_sent_is_sent_by_the_same_command(
    hub: Hub, repo: Repo, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.failing = lambda method, path: 403 if "/preupload/" in path and "lock.json" in repo.files else None
    with pytest.raises(StorageError, match=r"the run is complete, but .*access is denied.*run the same command again"):
        sm.reference("table:successor", URI, **QUESTION)
    assert "manifest.json" not in repo.files
    hub.failing = lambda method, path: None
    assert sm.reference("table:successor", URI, **QUESTION).cached
    assert {"README.md", "manifest.json"} <= repo.files.keys() - {"lock.json"}
    assert f"nobody keeps two writers of {URI} apart that begin at once" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("uri", "token", "words"),
    [
        ("hf://datasets/me/new", TOKEN, "there is no repository of that name.*hf repo create"),
        ("hf://datasets/you/public", "hf_wrong", "cannot be written: access is denied .*401.*hf auth login"),
        ("hf://datasets/you/public", TOKEN, "cannot be written: access is denied .*403"),
    ],
)
def test_whoever_may_not_write_is_told_before_anything_is_scored(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, uri: str, token: str, words: str
) -> None:
    hub.repos["datasets/you/public"] = Repo()
    monkeypatch.setenv("HF_TOKEN", token)
    began = time.monotonic()
    with pytest.raises(StorageError, match=words) as error:
        sm.reference("table:successor", uri, **QUESTION)
    assert time.monotonic() - began < 5
    assert token not in str(error.value)


def test_names_that_cannot_be_read_are_one_line_in_seconds(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["datasets/me/empty"] = Repo()
    hub.repos["datasets/me/secret"] = Repo(private=True)
    with pytest.raises(InputError, match="is no finished run or reference"):
        sm.compare("hf://datasets/me/empty", "table:uniform")
    for name, token in (("datasets/me/none", TOKEN), ("datasets/me/secret", "hf_wrong")):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(StorageError, match=f"hf://{name}.* (there is no repository|access is denied)"):
            sm.compare(f"hf://{name}", "table:uniform")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(StorageError, match="the repository has no such revision"):
        sm.load("hf://datasets/me/empty@v9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(StorageError, match="the hub cannot be reached; check the network and HF_ENDPOINT"):
        sm.compare(URI, "table:uniform")
    assert time.monotonic() - began < 15
