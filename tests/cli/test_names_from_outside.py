"""Over the command line: answers of a hub that name a user's own file, and home folders that nobody has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scoremode.cli.main import main
from scoremode.remote.models import hub as hub_names
from tests.cli.test_hub import complaint
from tests.hub import LARGE, Hub, Repo

FILE, OWN = "a-Q8_0.gguf", "../../../own.txt"
LFS: dict[str, Any] = {"sha256": "f" * 64, "size": LARGE, "pointerSize": 1}
HONEST: dict[str, Any] = {"rfilename": FILE, "size": LARGE, "lfs": LFS}


def listed(**fields: Any) -> dict[str, Any]:
    return {"siblings": [{**HONEST, **fields}]}


def hashed(sha256: Any) -> dict[str, Any]:
    return listed(lfs={**LFS, "sha256": sha256})


LIES: list[dict[str, Any]] = [  # one of each field; tests/remote/models/test_hub_answers.py has thousands
    *({"sha": value} for value in ("{own}", None, "c" * 39 + "\n")),
    *(hashed(value) for value in (OWN, 5)),
    *(listed(size=value) for value in ("big", -1)),
    *(listed(rfilename=f"{name}.gguf") for name in ("{own}", "a\0", "\ud800")),
    *({"siblings": value} for value in ("abc", [None])),
]
HEADERS = [{"X_Repo_Commit": OWN}, {"X_Linked_Etag": "{own}"}]


@pytest.fixture
def own(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that no answer may touch; the hub has a repository with a GGUF model and one with a checkpoint."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "a/b/hub"))
    hub_names.listing.cache_clear()
    hub.repos["models/org/x"] = Repo(files={FILE: b"GGUF" * LARGE})
    hub.repos["models/org/checkpoint"] = Repo(files={"config.json": b"{}"})
    path = tmp_path / "own.txt"
    path.write_text("my own")
    return path


def filled(value: Any, own: Path) -> Any:
    """A lie in which ``{own}`` is the path of the user's file."""
    if isinstance(value, dict):
        return {name: filled(item, own) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item, own) for item in value]
    return value.replace("{own}", str(own)) if isinstance(value, str) else value


@pytest.mark.parametrize(("lies", "headers"), [*((lie, {}) for lie in LIES), *(({}, header) for header in HEADERS)])
def test_a_lie_of_a_hub_is_one_line(
    lies: dict[str, Any], headers: dict[str, str], hub: Hub, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.lies, hub.headers = filled(lies, own), filled(headers, own)
    assert main(["ppl", "org/x:Q8_0", "--text", "one two"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert hub.address.removeprefix("http://") in line or "states no commit" in line
    assert "HF_TOKEN" not in line
    assert own.read_text() == "my own"
    assert {path.name for path in own.parent.iterdir()} <= {"own.txt", "a", "cache"}


def test_a_checkpoint_is_not_written_where_an_etag_says(hub: Hub, own: Path) -> None:
    hub.headers = {"ETag": str(own.with_name("new.txt")), "X_Linked_Etag": str(own.with_name("new.txt"))}
    line = complaint(own.parent / "home", "org/checkpoint", "--text", "one two", HF_ENDPOINT=hub.address)
    assert "gave an unusable answer: Expected a digest - at `$.ETag`; check HF_ENDPOINT" in line
    assert not own.with_name("new.txt").exists()


NOBODY = "~nobody-of-that-name/x"


@pytest.mark.parametrize("words", [f"ppl {NOBODY}", "ppl ollama:x:1b", "ppl ~\ud800/x"])
def test_a_home_folder_that_nobody_has_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLLAMA_MODELS", NOBODY)
    assert main([*words.split(), "--text", "ab"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is no home folder of this machine; write the path out")
