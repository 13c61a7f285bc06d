"""Why the hub did not give a model: a gated, unknown or unreachable one is told apart from the others.

The hub here is a small HTTP server that answers as the real one does; the client is the real one, in its own process.
"""

from __future__ import annotations

import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_main import PROGRAM

ANSWERS = {"gated": (403, "GatedRepo"), "unknown": (404, "RepoNotFound"), "forbidden": (403, "")}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = next((name for name in ANSWERS if f"/{name}" in self.path), "unknown")
        status, code = ANSWERS[name]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the server's own spelling

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: standard error is for pytest."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def complaint(home: Path, *arguments: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [*PROGRAM, "plan", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**clean, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **environment},
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gated", ["access to it is restricted (a gated repository)", "hf auth login"]),
        ("unknown", ["there is no repository of that name, or it is private", "check the name"]),
        ("forbidden", ["HTTP status 403"]),
    ],
)
def test_what_the_hub_answers_is_told(hub: str, tmp_path: Path, name: str, words: list[str]) -> None:
    line = complaint(tmp_path, f"some/{name}", "--text", "one two", HF_ENDPOINT=hub)
    assert f"model some/{name} could not be fetched from the Hugging Face hub" in line
    assert [w for w in words if w not in line] == [], line


def test_a_name_that_the_hub_does_not_have_is_told(tmp_path: Path) -> None:
    line = complaint(tmp_path, "some/mo del", "--text", "one two", HF_ENDPOINT="http://127.0.0.1:9")
    assert "give ORGANIZATION/NAME" in line


@pytest.mark.parametrize(
    ("setting", "value"),
    [("HF_TOKEN", "hf_\u00e9"), ("HF_HOME", "/dev/null/hub"), ("HTTP_PROXY", "gopher://proxy")],
)
def test_a_setting_that_cannot_work_is_named(hub: str, tmp_path: Path, setting: str, value: str) -> None:
    line = complaint(tmp_path, "some/gated", "--text", "one two", **{"HF_ENDPOINT": hub, setting: value})
    assert "check the name and HF_TOKEN, HF_HOME, HTTPS_PROXY and HF_ENDPOINT" in line


def test_wikitext2_says_why_it_could_not_be_fetched(hub: str, tmp_path: Path) -> None:
    line = complaint(tmp_path, "table:uniform", "--corpus", "wikitext2", HF_HUB_OFFLINE="1")
    assert "offline mode is on" in line
    assert "--corpus wikitext2:FILE" in line
