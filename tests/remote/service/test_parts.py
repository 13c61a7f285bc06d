"""Parts of the service without a server: bodies of requests, and a server that changes."""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from scoremode.core.scores.answers import Answers
from scoremode.core.scores.messages import VERSION, Asked, TooLargeError, answer_message
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.engines.server.checks import SameServer
from scoremode.engines.server.engine import ServiceEngine, same_service
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import ServerFacts, find_service, is_service
from scoremode.engines.server.server_options import ServerOptions
from scoremode.engines.server.subject import ComparedTokenizer, ServedSubject
from scoremode.errors import EngineError, InputError
from scoremode.remote.service.requests import asked_in_json, body_of

pytest.importorskip("vllm", reason="needs vLLM")


# ── a server that changes ────────────────────────────────────────────────────────────────────────────────────────────
ABOUT: dict[str, Any] = {
    "messages": VERSION,
    "instance": "one",
    "dtype": "float32",
    "device": "cpu",
    "head": "exact-fp32",
    "vocabulary": 10,
    "max_model_len": 20,
    "batch_tokens": 100,
    "versions": {"x": "1"},
    "settings": {"a": 1},
    "notes": [],
    "probe": [-1.0, -2.0],
    "limits": {"body_bytes": 100, "windows": 5},
}


class Says(BaseHTTPRequestHandler):
    """Says of itself whatever a test wants: no real server changes at will."""

    said: Any = ABOUT
    answer: Any = None  # to a window

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(type(self).said).encode())

    def do_POST(self) -> None:
        asked = Asked.from_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer_message("one", [type(self).answer(window) for window in asked.windows]))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Says.said = ABOUT
    server = ThreadingHTTPServer(("127.0.0.1", 0), Says)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def same(address: str) -> SameServer:
    link = Link(address, None, timeout=5, patience=1)
    first = find_service(link)
    assert first is not None
    return same_service(link, first)


def test_a_server_that_was_started_again_as_it_was_is_accepted(address: str) -> None:
    guard = same(address)
    guard.confirm("one")
    Says.said = {**ABOUT, "instance": "two", "probe": [-1.0001, -2.0], "notes": ["a new note"]}
    guard.confirm("two")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "its dtype was float32"),
        ({"settings": {"a": 2}}, "its settings was"),
        ({"probe": [-1.0, -3.0]}, "other scores"),
        ({"probe": [-1.0]}, "other scores"),
        ({"messages": None}, "no scoring service any more"),
        ({"instance": "three"}, "not found again"),
    ],
)
def test_another_server_ends_the_run(address: str, changes: dict[str, Any], words: str) -> None:
    guard = same(address)
    Says.said = {**ABOUT, "instance": "two", **changes}
    with pytest.raises(EngineError, match=words):
        guard.confirm("two")


@pytest.mark.parametrize("changes", [{"messages": VERSION + 1}, {"messages": "\x1b[2J"}, {"vocabulary": True}])
def test_what_a_server_says_is_not_trusted(address: str, changes: dict[str, Any]) -> None:
    Says.said = {**ABOUT, **changes}
    with pytest.raises(EngineError) as caught:
        find_service(Link(address, None, timeout=5, patience=1))
    assert "\x1b" not in str(caught.value)


def test_other_servers_are_no_services(address: str) -> None:
    assert is_service(address) is True
    others: list[Any] = [{}, [], "x", {"object": "list"}]
    for said in others:
        Says.said = said
        assert find_service(Link(address, None, timeout=5, patience=1)) is None
        assert is_service(address) is False
    assert is_service("http://127.0.0.1:9") is None


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_service_that_gives_no_numbers_is_told_apart_from_a_model_here(address: str, wrong: float) -> None:
    """``--dtype`` is an option of engines that load the model themselves."""
    found = find_service(Link(address, None, timeout=5, patience=1))
    assert found is not None
    tokenizer: Any = ComparedTokenizer(ByteTokenizer(), Namespace(exists=False))  # type: ignore[arg-type]
    subject = ServedSubject(
        name="m", tokenizer=tokenizer, fingerprint="f", root=address, options=ServerOptions(), form=None,
        served=ServerFacts("m", None, 20, None, None), service=found,
    )  # fmt: skip
    Says.answer = staticmethod(lambda window: Answers(np.full(window.targets.shape, wrong)))
    with pytest.raises(EngineError, match="gives NaN or infinity as a score; start the server in float32") as caught:
        ServiceEngine(subject, found, 1)
    assert "--dtype" not in str(caught.value)


# ── bad clients ──────────────────────────────────────────────────────────────────────────────────────────────────────
class Sending:
    """A request whose body comes in chunks."""

    def __init__(self, *chunks: bytes, declared: str | None = None) -> None:
        self.headers = {} if declared is None else {"content-length": declared}
        self.chunks, self.read = chunks, 0

    async def stream(self) -> Any:
        for chunk in self.chunks:
            self.read += 1
            yield chunk


@pytest.mark.parametrize(("declared", "read"), [(None, 3), ("5", 3), ("101", 0), ("9" * 40, 0), ("-1", 0), ("x", 0)])
def test_a_body_that_is_too_large_is_not_read_to_its_end(declared: str | None, read: int) -> None:
    assert asyncio.run(body_of(Sending(b"x" * 99, b"y"), 100)) == b"x" * 99 + b"y"
    sending = Sending(*[b"x" * 40] * 9, declared=declared)
    with pytest.raises(TooLargeError, match="more than 100 bytes"):
        asyncio.run(body_of(sending, 100))
    assert sending.read == read


@pytest.mark.parametrize("vocabulary", ["0", "-1", "true", "false", "3.0", "1e3", "null", '"3"', "[3]", "1" + "0" * 30])
def test_a_vocabulary_is_a_number_from_1_on(vocabulary: str) -> None:
    with pytest.raises(InputError):
        asked_in_json(f'{{"windows": [{{"ids": [1, 2]}}], "vocabulary": {vocabulary}}}'.encode())
    assert asked_in_json(b'{"windows": [{"ids": [1, 2]}], "vocabulary": 3}').vocabulary == 3
    assert asked_in_json(b'{"windows": [{"ids": [1, 2]}]}').vocabulary == 0, "all ids count"
