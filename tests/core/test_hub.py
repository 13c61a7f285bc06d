"""One attempt tells whether a server can be reached; clients that would try for a minute are not asked then."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from scoremode.core import hub as reachable
from scoremode.core.text.corpus import load
from scoremode.core.text.tokenizer_loading import load_transformers
from scoremode.errors import CorpusError, ModelError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its address; no proxy is set."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening, f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_listening_server_or_a_proxy_is_asked(
    server: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listening, address = server
    assert reachable.is_reachable(address)
    assert not reachable.is_reachable("https://name.invalid")
    monkeypatch.setenv("http_proxy", address)
    assert reachable.is_reachable("http://name.invalid")
    monkeypatch.setenv("no_proxy", "name.invalid,127.0.0.1")
    assert not reachable.is_reachable("http://name.invalid")
    listening.close()
    assert not reachable.is_reachable(address)


def test_a_name_whose_lookup_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "SECONDS", 0.1)
    answered = threading.Event()

    def hang(*_: Any, **__: Any) -> socket.socket:
        answered.wait(30)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "create_connection", hang)
    began = time.monotonic()
    assert not reachable.accepts_connections("anywhere", 443)
    assert time.monotonic() - began < 20
    answered.set()


@pytest.mark.parametrize("before", [None, "0"])
def test_clients_are_offline_inside_the_block_and_as_before_afterwards(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", before)
    client: Any = SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "datasets.config", client)
    monkeypatch.setattr(reachable, "hub_is_reachable", lambda: False)
    with reachable.offline_if_unreachable() as answers:
        assert (answers, client.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (False, True, "1")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: client.HF_HUB_OFFLINE)
    assert load_transformers("org/name") is True
    assert client.HF_HUB_OFFLINE is False
    assert os.environ.get("HF_HUB_OFFLINE") == before


def test_a_dataset_without_a_hub_is_refused_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr(reachable, "hub_is_reachable", lambda: False)
    with pytest.raises(CorpusError, match="is not on this machine, and the Hugging Face hub cannot be reached"):
        load(dataset="org/none")
    assert "Retry" not in capfd.readouterr().err


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def checked(method: str, address: str, status: int = 200, content: bytes = b"", **headers: str) -> httpx.Response:
    """An answer, as the hub's client gets it; its content has no stated length."""
    request = httpx.Request(method, address)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = httpx.Response(status, headers=named, content=iter([content]), request=request)
    reachable._check(answer)
    return answer


def test_a_page_that_says_why_there_is_no_file_may_be_longer_than_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_sizes", {})
    file = "https://hub.test/org/x/resolve/main/a.json"
    checked("HEAD", file, X_Repo_Commit="c" * 40, ETag=f'"{"a" * 40}"', Content_Length="124")
    assert len(checked("GET", file, 503, b"x" * 600).read()) == 600
    assert len(checked("GET", file, 200, b"x" * 124).read()) == 124
    with pytest.raises(ModelError, match="it sends more than it stated"):
        checked("GET", file, 200, b"x" * 125).read()


def test_the_size_of_a_file_holds_where_a_redirect_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_sizes", {})
    monkeypatch.setattr(reachable, "LARGEST_ANSWER", 1000)
    file, elsewhere = "https://hub.test/org/x/resolve/main/a.gguf", "https://cdn.test/a"
    tag, commit = "f" * 64, "c" * 40
    checked("HEAD", file, 302, Location=elsewhere, X_Repo_Commit=commit, X_Linked_Etag=tag, X_Linked_Size="3000")
    assert sum(map(len, checked("GET", elsewhere, content=b"x" * 3000).iter_bytes())) == 3000
    with pytest.raises(ModelError, match="it sends more than it stated"):
        list(checked("GET", elsewhere, content=b"x" * 3001).iter_bytes())
