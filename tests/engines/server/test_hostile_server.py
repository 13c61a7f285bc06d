"""Servers that mean harm, or are broken: one line and exit code 2, in bounded time and memory."""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest

from scoremode.cli.main import main
from scoremode.core.scores.messages import VERSION
from scoremode.engines.server import link, subject
from scoremode.engines.server import served as served_module
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import SERVICE as ROOT
from scoremode.engines.server.served import is_service
from scoremode.errors import EngineError
from tests.engines.server.small_server import SmallServer

HUGE = "1" + "0" * 400
HALF = r"\ud800"
GOOD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SERVICE = {
    "messages": VERSION, "instance": "a", "dtype": "float32", "device": "cpu", "head": "exact-fp32", "vocabulary": 256,
    "max_model_len": 600, "batch_tokens": 4096, "versions": {"vllm": "1"}, "settings": {"a": 1},
    "notes": [], "probe": [-1.0, -2.0], "limits": {"body_bytes": 1048576, "windows": 64},
}  # fmt: skip


@pytest.fixture
def served() -> Iterator[SmallServer]:
    with SmallServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(link, "LONGEST_DELAY", 0.1)


def replaced(where: str, old: str, new: str) -> Callable[[str, bytes], bytes]:
    """An edit of the answers of one path; that it changes something is asserted."""

    def edit(path: str, body: bytes) -> bytes:
        if path != where:
            return body
        assert old.encode() in body
        return body.replace(old.encode(), new.encode())

    return edit


def refused(capsys: pytest.CaptureFixture[str], verb: str, served: SmallServer, *more: str) -> str:
    """The one line with which a command gives up."""
    models = ["table:uniform", "small"] if verb == "compare" else ["small"]
    words = [verb, *models, "--engine", served.address, "--text", "a b c d e f g h", "--patience", "0.5", *more]
    assert main(words) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "; trying again for up to " not in line]
    assert len(said) == 1, said
    return said[0]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
UNUSABLE = "a number or a character in it cannot be used"
EDITS: dict[str, tuple[str, str, str, str]] = {
    "a log-probability of 10^400": ("/v1/completions", '"logprob": -', f'"logprob": {HUGE}, "x": -', UNUSABLE),
    "one of -1e400": ("/v1/completions", '"logprob": -', '"logprob": -1e400, "x": -', UNUSABLE),
    "a number of 5,000 digits": ("/v1/completions", '"logprob": -', f'"logprob": {"9" * 5000}, "x": -', "not JSON"),
    "half a character in the fingerprint": ("/v1/completions", "small-1.0", f"small-{HALF}", UNUSABLE),
    "a length below 0": ("/v1/models", "600", "-1", "names no model (Expected `int"),
    "a length that is a text": ("/v1/models", "600", '"600"', "names no model (Expected `int"),
    "an escape in the model": ("/v1/models", '"small"', r'"\u001b[2J"', "does not serve 'small'; it serves �[2J"),
    "half a character in a token": ("/tokenize", '"token_strs": ["a"', f'"token_strs": ["{HALF}"', UNUSABLE),
    "a token of 10^400": ("/tokenize", '"tokens": [97', f'"tokens": [{HUGE}', UNUSABLE),
    "depth": ("/v1/models", '"data": ', '"x": ' + "[" * 200 + "]" * 200 + ', "data": ', "nested too deeply"),
    "a model list that is a number": ("/v1/models", '"data": [', '"data": 5, "x": [', "names no model"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_answer_that_cannot_be_used_is_refused(
    name: str, served: SmallServer, capsys: pytest.CaptureFixture[str]
) -> None:
    path, old, new, says = EDITS[name]
    if path == "/tokenize":  # it is asked for names later than for tokens
        served.edit = lambda at, body: body.replace(old.encode(), new.encode()) if at == path else body
    else:
        served.edit = replaced(path, old, new)
    assert says in refused(capsys, "ppl", served)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"probe": [-1.0', f'"probe": [-{HUGE}'),
        ('"probe": [-1.0', '"probe": ["nan"'),
        ('"max_model_len": 600', f'"max_model_len": {HUGE}'),
        ('"vocabulary": 256', '"vocabulary": 1e3'),
        ('"settings": {', f'"settings": {{"x": "{HALF}", '),
        ('"notes": [', '"notes": [' + "[" * 5000 + "]" * 5000),
    ],
)
def test_a_service_that_says_the_impossible_is_refused(
    old: str, new: str, served: SmallServer, capsys: pytest.CaptureFixture[str]
) -> None:
    served.more[ROOT] = SERVICE
    assert is_service(served.address)
    served.edit = replaced(ROOT, old, new)
    assert "lacks facts that a scoring service must give" in refused(capsys, "ppl", served)
    assert is_service(served.address) is not False  # it is asked again, with the key and the user's own patience
    assert "cannot be compared with a baseline" in refused(capsys, "compare", served)


@pytest.mark.parametrize(
    ("more", "body"),
    [
        (b"Content-Encoding: gzip\r\n", b"\x1f\x8b\x08\x00broken"),
        (b"Content-Encoding: br, gzip\r\n", b"x"),
        (b"Set-Cookie: a=b; expires=Fri, 31 Dec 99999999999 00:00:00 GMT\r\n", b"\xff\xfe"),
        (b"Content-Type: \xff\xfe; charset=\xff\r\n", b"[" * 100_000),
        (b"Content-Length: -5\r\n", b"{}"),
        (b"Transfer-Encoding: chunked\r\n", b"zzzz\r\n"),
        (b"X: " + b"y" * 200_000 + b"\r\n", b"{}"),
    ],
)
def test_broken_http_is_one_line(
    more: bytes, body: bytes, served: SmallServer, capsys: pytest.CaptureFixture[str]
) -> None:
    served.wire = lambda path: [GOOD + more + b"\r\n" + body]
    line = refused(capsys, "ppl", served)
    assert "gave no answer" in line or "does not answer as an inference server" in line


# ── time and memory ──────────────────────────────────────────────────────────────────────────────────────────────────
def slowly(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        time.sleep(0.03)
        yield piece


def bytes_of(text: bytes) -> Iterator[bytes]:
    return (text[i : i + 1] for i in range(len(text)))


def forever(first: bytes, piece: bytes) -> Iterator[bytes]:
    return itertools.chain([first], itertools.repeat(piece))


ENDLESS: dict[str, Callable[[], Iterable[bytes]]] = {
    "a body byte by byte": lambda: slowly(forever(GOOD + b"Content-Length: 100000\r\n\r\n", b" ")),
    "chunks byte by byte": lambda: slowly(forever(GOOD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n")),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_request_has_a_total_time(name: str, served: SmallServer) -> None:
    served.wire = lambda path: ENDLESS[name]()
    asking, began = Link(served.address, None, timeout=0.4, patience=0.2), time.monotonic()
    with pytest.raises(EngineError, match="no answer in time; --timeout"):
        asking.get("/v1/models")
    assert time.monotonic() - began < 3
    asking.close()


def test_a_slow_answer_that_comes_in_time_is_taken(served: SmallServer) -> None:
    body = json.dumps({"a": 1}).encode()
    whole = GOOD + b"Content-Length: %d\r\n\r\n" % len(body)
    served.wire = lambda path: slowly(itertools.chain([whole], bytes_of(body)))
    assert Link(served.address, None, timeout=20, patience=0).get("/x").value == {"a": 1}


def test_a_server_that_does_not_read_is_let_go() -> None:
    """A body larger than all buffers goes nowhere."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        asking, began = Link(address, None, timeout=0.4, patience=0.2), time.monotonic()
        with pytest.raises(EngineError, match="no answer in time"):
            asking.post("/x", bytes(16 << 20))
        asking.close()
    assert time.monotonic() - began < 30  # 16 MiB have 16 seconds more, unless a single write stalls first


def test_a_body_without_end_is_not_read_to_its_end(
    served: SmallServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_module, "FIRST_WORD_SECONDS", 1.0)
    served.wire = lambda path: forever(GOOD + b"\r\n", b" " * 65536)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "answers with more than 1,048,576 bytes" in refused(capsys, "ppl", served)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.parametrize("wait", ["0", "Fri, 31 Dec 99999999999 00:00:00 GMT"])
def test_a_server_that_asks_for_no_pause_gets_one(
    wait: str, served: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "FIRST_DELAY", 0.5)
    monkeypatch.setattr(link, "LONGEST_DELAY", 15.0)
    served.trouble = lambda path, number: f"status:503,{wait}"
    with pytest.raises(EngineError, match="gave no answer"):
        Link(served.address, None, timeout=5, patience=2).get("/v1/models")
    assert len(served.requests) <= 4


def test_a_hub_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OSError("no way")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuses)
    assert subject._on_hub("nobody/nothing-of-that-name") is None


# ── the environment ──────────────────────────────────────────────────────────────────────────────────────────────────
ENVIRONMENT = {
    "HTTP_PROXY": "gopher://x",
    "ALL_PROXY": "socks5://127.0.0.1:1",
    "NO_PROXY": "http://[::1",
    "SSL_CERT_FILE": "/nonexistent.pem",
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_setting_of_the_environment_is_named(
    served: SmallServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # with it, the proxy of ALL_PROXY could be used
    link._trusted.cache_clear()
    monkeypatch.setenv(name, ENVIRONMENT[name])
    assert name in refused(capsys, "ppl", served)


def test_cookies_are_not_kept(served: SmallServer) -> None:
    connections = Link(served.address, None, timeout=5, patience=5)
    response = httpx.Response(200, headers=[("Set-Cookie", "a=b")], request=httpx.Request("GET", served.address))
    connections._client.cookies.extract_cookies(response)
    assert not connections._client.cookies
