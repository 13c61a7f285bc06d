"""A real server that speaks S3, on the loopback, and a proxy in front of it that cuts, stalls and refuses."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.makers import OBEY_INTERRUPTS

KEY, SECRET = "AKIDSCOREMODETEST", "a-secret-that-must-not-be-stored"
SETTINGS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Server:
    """A server of S3, and what it was asked."""

    host: str
    port: int
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path, in the order of arrival
    refuse: Callable[[str, str], bool] = lambda method, path: False  # asked of each: answer with 503?
    denies: str | None = None  # the code of the error that everybody gets

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.address,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )


def _application(server: Server, inner: Any) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        server.requests.append((method, path))
        if server.refuse(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        if server.denies is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = f"<Error><Code>{server.denies}</Code><Message>no</Message></Error>".encode()
            start_response("403 Forbidden", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
            return [body if method != "HEAD" else b""]
        found: Iterable[bytes] = inner(environ, start_response)
        return found

    return answer


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """Moto's server, as a thread of this process."""
    try:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server
    except ImportError:
        pytest.skip("needs moto")
    pytest.importorskip("s3fs", reason="needs s3fs")

    class Quiet(WSGIRequestHandler):  # type: ignore[misc]
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    server = Server("127.0.0.1", 0)
    inner = DomainDispatcherApplication(create_backend_app)
    serving = make_server("127.0.0.1", 0, _application(server, inner), threaded=True, request_handler=Quiet)
    server.port = serving.server_port
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield server
    serving.shutdown()
    thread.join()


@dataclass
class Bucket:
    """A bucket of a test, and everything in it."""

    name: str
    server: Server

    def uri(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def objects(self) -> dict[str, bytes]:
        """Every object, with its content; marks of folders left out."""
        client = self.server.client()
        return {key: client.get_object(Bucket=self.name, Key=key)["Body"].read() for key in self.names()}

    def names(self, prefix: str = "") -> list[str]:
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        keys = [one["Key"] for page in pages for one in page.get("Contents", ())]
        return sorted(key for key in keys if not key.endswith("/"))

    def put(self, key: str, data: bytes) -> None:
        self.server.client().put_object(Bucket=self.name, Key=key, Body=data)

    def remove(self, key: str) -> None:
        self.server.client().delete_object(Bucket=self.name, Key=key)


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A new bucket, and the environment that leads to it."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": s3_server.address}.items():
        monkeypatch.setenv(name, value)
    made = Bucket(f"test-{uuid.uuid4().hex[:12]}", s3_server)
    s3_server.client().create_bucket(Bucket=made.name)
    s3_server.requests.clear()
    yield made
    s3_server.refuse, s3_server.denies = lambda method, path: False, None


# ── a network that fails ─────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Proxy:
    """Passes connections on to a server, as long as it is let."""

    port: int
    cuts_after: Callable[[], int | None] = lambda: None  # bytes to the client or the server, for each new connection
    down: threading.Event = field(default_factory=threading.Event)  # while set, connections are closed at once
    cuts: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def proxy_to(server: Server) -> Iterator[Proxy]:
    listening = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(listening.getsockname()[1])
    ended = threading.Event()

    def accept() -> None:
        while not ended.is_set():
            try:
                client, _ = listening.accept()
            except OSError:
                return
            if proxy.down.is_set():
                client.close()
                continue
            threading.Thread(target=_carry, args=(proxy, client, server, ended), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        ended.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def _carry(proxy: Proxy, client: socket.socket, server: Server, ended: threading.Event) -> None:
    left = proxy.cuts_after()
    count = [0]
    try:
        upstream = socket.create_connection((server.host, server.port))
    except OSError:
        client.close()
        return

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                count[0] += len(data)
                if proxy.down.is_set() or (left is not None and count[0] > left):
                    proxy.cuts += 1
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    there = threading.Thread(target=pump, args=(client, upstream), daemon=True)
    there.start()
    pump(upstream, client)
    there.join()
    client.close()
    upstream.close()


def at_random(seed: int, low: int, high: int, share: float = 0.5) -> Callable[[], int | None]:
    """Of connections, which are cut and after how many bytes."""
    chance = random.Random(seed)
    return lambda: chance.randrange(low, high) if chance.random() < share else None


# ── other machines ───────────────────────────────────────────────────────────────────────────────────────────────────
SLOWED = (
    OBEY_INTERRUPTS
    + """
import os, time
from scoremode.core.disk.records import RecordFile
append = RecordFile.append
def slow(*given):
    time.sleep(float(os.environ.get("SLOWED", "0.02")))
    return append(*given)
RecordFile.append = slow
from scoremode.cli.main import entry
entry()
"""
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Each call gives this process an empty cache: another machine."""
    count = iter(range(1000))

    def move() -> Path:
        folder = tmp_path / f"machine-{next(count)}"
        monkeypatch.setenv("SCOREMODE_CACHE", str(folder))
        return folder

    move()
    return move


def start(arguments: list[str], cache: Path, **more: str) -> subprocess.Popen[str]:
    return forked.Popen(
        [sys.executable, "-c", SLOWED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SCOREMODE_CACHE": str(cache), **more},
    )


def size_of(cache: Path, pattern: str) -> int:
    """Bytes of the files that match."""
    return sum(path.stat().st_size for path in cache.glob(pattern))


def kill_when_grown(arguments: list[str], cache: Path, pattern: str, **more: str) -> int:
    """Start a process and kill it when the files that match in its cache have grown; return their size then."""
    before, process = size_of(cache, pattern), start(arguments, cache, **more)
    wait_until(lambda: size_of(cache, pattern) > before or process.poll() is not None)
    process.kill()
    _, complaints = process.communicate()
    assert process.returncode == -signal.SIGKILL, complaints
    return size_of(cache, pattern)


def wait_until(true: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
