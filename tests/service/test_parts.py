"""Parts of the service without a server: whose turn it is, heads within a quota, and a server that changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.engines.base import StoredHead
from scoremode.engines.messages import FOLDER, LENGTH, HeadFile, answer_message, head_parts
from scoremode.engines.server.checks import SameServer
from scoremode.engines.server.engine import ServiceEngine, same_service
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import ServerFacts, find_service, is_service
from scoremode.engines.server.server_options import ServerOptions
from scoremode.engines.server.subject import ComparedTokenizer, ServedSubject
from scoremode.errors import EngineError, InputError
from scoremode.scores.answers import Answers, Window, WindowList
from scoremode.scores.packing import MAGIC, START, VERSION
from scoremode.service.heads import Heads
from scoremode.service.requests import AbsentError, Bodies, BusyError, TooLargeError
from scoremode.text.tokenizer import ByteTokenizer

pytest.importorskip("vllm", reason="needs vLLM")


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_turns_are_taken_in_order_and_given_back() -> None:
    from scoremode.service.scorer import TokensInFlight

    async def play() -> tuple[list[int], int]:
        flow, order, open_gate = TokensInFlight(10), list[int](), asyncio.Event()

        async def one(number: int, tokens: int) -> None:
            async with flow.of(tokens):
                order.append(number)
                await open_gate.wait()

        tasks = [asyncio.create_task(one(n, t)) for n, t in enumerate((6, 4, 25, 1, 3))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [0, 1], "the third does not fit, and nobody overtakes it"
        tasks[2].cancel()  # its client is gone
        tasks[0].cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        assert order == [0, 1, 3, 4]
        open_gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order, flow.used

    order, used = asyncio.run(play())
    assert order == [0, 1, 3, 4]
    assert used == 0, "all room is given back"


def test_one_is_let_in_however_large_it_is() -> None:
    from scoremode.service.scorer import TokensInFlight

    async def play() -> None:
        flow = TokensInFlight(10)
        async with flow.of(1000):
            assert flow.used == 1000

    asyncio.run(asyncio.wait_for(play(), 5))


# ── heads ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def made(seed: int, rows: int = 6) -> bytes:
    weight = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return b"".join(head_parts(StoredHead(weight, weight[:, 0].copy(), "float32", "float32", rows, 0.5, 30.0)))


async def body_of(data: bytes) -> AsyncIterator[bytes]:
    for first in range(0, len(data), 7):
        yield data[first : first + 7]


def put(heads: Heads, data: bytes, digest: str | None = None, declared: int | None = None) -> str:
    name = digest or hashlib.sha256(data).hexdigest()
    asyncio.run(heads.put(name, body_of(data), len(data) if declared is None else declared, 6))
    return name


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heads:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return Heads(2 * len(made(0)))


def test_a_head_comes_back_bit_for_bit(heads: Heads) -> None:
    digest = put(heads, made(1))
    with heads.using(digest) as found:
        weight = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
        np.testing.assert_array_equal(found.rows(2, 3).weight, weight[2:5])
        np.testing.assert_array_equal(found.rows(2, 3).bias, weight[2:5, 0])
        assert (found.header.scale, found.header.softcap, found.header.vocabulary) == (0.5, 30.0, 6)
        with pytest.raises(ValueError, match="ids 5 to 7"):
            found.rows(5, 2)


def test_bad_heads_leave_nothing_behind(heads: Heads) -> None:
    data = made(1)
    wrong: list[tuple[bytes, str | None, int | None, str]] = [
        (data, "0" * 64, None, "another digest"),
        (made(1, rows=5), None, None, "5 ids"),
        (data, None, 10, "more bytes came"),
        (b"SCOREMOD", None, None, "not a message"),
        (data[:-8], None, None, "arrived"),
        (data, "../" + "0" * 61, None, "not a digest"),
        (data, "0" * 63 + "\n", None, "not a digest"),
    ]
    for sent, digest, declared, words in wrong:
        with pytest.raises(InputError, match=words):
            put(heads, sent, digest, declared)
    with pytest.raises(TooLargeError):
        put(heads, data, declared=1 << 40)
    with pytest.raises(AbsentError), heads.using("0" * 64):
        pass
    assert list(heads.folder.iterdir()) == []


def test_the_quota_drops_what_was_unused_for_longest(heads: Heads) -> None:
    first, second = put(heads, made(1)), put(heads, made(2))
    with pytest.raises(BusyError, match="no room"):
        put(heads, made(3))  # both were used within the last minute
    for name in (first, second):
        os.utime(heads.path(name), (time.time() - 100, time.time() - 100))
    with heads.using(first):
        os.utime(heads.path(first), (time.time() - 200, time.time() - 200))
        third = put(heads, made(3))
        assert [heads.has(name) for name in (first, second, third)] == [True, False, True], "one in use stays"


def test_a_file_that_is_no_head(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(made(1).replace(b'"scale":0.5', b'"scale":NaN'))
    with pytest.raises(InputError, match="described wrongly"):
        HeadFile.open(tmp_path / "x")


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
    "divergence": True,
    "versions": {"x": "1"},
    "settings": {"a": 1},
    "notes": [],
    "probe": [-1.0, -2.0],
    "limits": {"body_bytes": 100, "windows": 5},
}


class Says(BaseHTTPRequestHandler):
    """Says of itself whatever a test wants: no real server changes at will."""

    said: Any = ABOUT
    answers: Any = None  # to the only window of a request

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(type(self).said).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer_message("one", [type(self).answers]))

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


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": VERSION + 1},
        {"messages": "\x1b[2J"},
        {"vocabulary": -1},
        {"vocabulary": True},
        {"max_model_len": 1e3},
        {"probe": "abc"},
        {"settings": {"a": {"deep": []}}},
        {"versions": []},
        {"limits": {}},
        {"instance": 5},
    ],
)
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
    Says.answers = Answers(np.array([[wrong]]))
    engine = ServiceEngine(subject, found, 1)
    window = Window(np.array([1, 2], np.int32), np.array([0], np.int32), np.array([[2]], np.int32))
    with pytest.raises(EngineError, match="gives NaN or infinity as a score; start the server in float32") as caught:
        list(engine.score(WindowList((window,)), np.zeros(1, np.bool_)))
    assert "--dtype" not in str(caught.value)
    engine.close()


# ── bad clients ──────────────────────────────────────────────────────────────────────────────────────────────────────
class Sending:
    """A request whose body comes in chunks; with ``stalls``, nothing follows them."""

    def __init__(self, *chunks: bytes, declared: int | None = None, stalls: bool = False) -> None:
        self.headers = {} if declared is None else {"content-length": str(declared)}
        self.chunks, self.stalls = chunks, stalls

    async def stream(self) -> Any:
        for chunk in self.chunks:
            yield chunk
        if self.stalls:
            await asyncio.sleep(60)


def test_a_client_that_stalls_takes_no_room() -> None:
    held = Bodies(100, 100)

    async def stalls() -> None:
        async with held.of(Sending(b"x", declared=100, stalls=True)):
            pass

    async def both() -> None:
        stalling = asyncio.create_task(stalls())
        await asyncio.sleep(0.05)
        assert held.held == 1
        async with held.of(Sending(b"y" * 99, declared=99)) as body:
            assert len(body) == 99
        stalling.cancel()  # as when its client is let go
        await asyncio.gather(stalling, return_exceptions=True)

    asyncio.run(both())
    assert held.held == 0


def test_too_many_windows_are_refused_before_they_are_made() -> None:
    from scoremode.engines.messages import Asked, TooManyError

    none = np.zeros(0, np.int32)
    data = Asked((Window(none, none, np.zeros((0, 0), np.int32)),) * 5).to_bytes()
    assert len(Asked.from_bytes(data, 5).windows) == 5
    with pytest.raises(TooManyError, match="5 windows"):
        Asked.from_bytes(data, 4)


def test_fields_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:

    good = {"type": "head", "vocabulary": 3, "width": 2, "dtype": "float32", "bias_dtype": None, "scale": 1.0}
    wrong: list[dict[str, Any]] = [
        *({"dtype": ["float32"]}, {"dtype": "float8"}, {"bias_dtype": {}}, {"bias_dtype": "float32"}, {"type": "x"}),
        *({"scale": 10**400}, {"softcap": 10**400}, {"vocabulary": 0}, {"vocabulary": 4}, {"width": -2}),
    ]
    for bad in ({}, *wrong):
        text = json.dumps({**good, **bad}).encode()
        head = START.pack(MAGIC, VERSION) + LENGTH.pack(len(text)) + text + bytes(24)
        (tmp_path / "head").write_bytes(head)
        if not bad:
            assert HeadFile.open(tmp_path / "head").header.width == 2
            continue
        with pytest.raises(InputError):
            HeadFile.open(tmp_path / "head")
