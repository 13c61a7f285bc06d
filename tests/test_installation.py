"""Install hints name the command that fits the way in which scoremode was installed; a browser is never a failure."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from scoremode.core.installation import pip_install

REPOSITORY = {"url": "https://me:secret@host.example/a/b.git", "vcs_info": {"vcs": "git", "requested_revision": "v1"}}


class Installed:
    """A distribution of scoremode as an installer left it."""

    def __init__(self, direct_url: str | None, installer: str = "pip\n") -> None:
        self.files = {"direct_url.json": direct_url, "INSTALLER": installer}

    def read_text(self, name: str) -> str | None:
        return self.files[name]


def hint(monkeypatch: pytest.MonkeyPatch, installed: Installed) -> str:
    monkeypatch.setattr(metadata, "distribution", lambda _: installed)
    return pip_install("vllm")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///no/such%20folder", "dir_info": {}}, "pip install '/no/such folder[vllm]'"),
        ({"url": "file:///no/such", "dir_info": {"editable": True}}, "pip install -e '/no/such[vllm]'"),
        ({"url": "file:///no/a.whl", "archive_info": {}}, "pip install '/no/a.whl[vllm]'"),
        (REPOSITORY, "pip install 'scoremode[vllm] @ git+https://host.example/a/b.git@v1'"),
        ({}, "pip install 'scoremode[vllm]'"),
        ([], "pip install 'scoremode[vllm]'"),
    ],
)
def test_the_command_fits_the_origin(origin: object, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint(monkeypatch, Installed(json.dumps(origin))) == command


def test_without_an_origin_the_index_is_named_and_the_current_folder_is_a_dot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for damaged in (None, "", "{"):
        assert hint(monkeypatch, Installed(damaged)) == "pip install 'scoremode[vllm]'"
    assert hint(monkeypatch, Installed(None, "uv")) == "uv pip install 'scoremode[vllm]'"
    monkeypatch.chdir(tmp_path)
    origin = {"url": tmp_path.as_uri(), "dir_info": {"editable": False}}
    assert hint(monkeypatch, Installed(json.dumps(origin))) == "pip install '.[vllm]'"


SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "chromium"


@pytest.mark.parametrize(
    ("programs", "says", "asked_for"),
    [
        ({"chromium": "exit 1", "id": "echo 0", "apt-get": "echo $* >> asked"}, "", ""),
        ({"id": "echo 0"}, "will be skipped", ""),
        ({"id": "echo 0", "apt-get": "exit 100"}, "apt-get could not install chromium", ""),
        ({"id": "echo 0", "apt-get": "echo $* >> asked"}, "installing chromium", "chromium"),
    ],
)
def test_chromium_is_installed_where_it_can_be(
    programs: dict[str, str], says: str, asked_for: str, tmp_path: Path
) -> None:
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(SCRIPT)], env={"PATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert bool(done.stdout) == bool(says)
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked_for in asked
    assert bool(asked) == bool(asked_for)
