"""A stand-in for the Hugging Face hub on the loopback: the requests of its API that scoremode makes, and their count.

It keeps repositories with commits, accepts files by LFS ("basic" transfers) and inside commits, answers ranges, and
refuses a commit that does not follow the newest one. It knows nothing of Xet, of redirects or of rate limits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_aTokenThatMustNotBeStored"
OWNER = "me"
LARGE = 10_000  # bytes from which a file is sent by LFS


@dataclass
class Repo:
    """A repository: its files, and the ids of its commits."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """The stand-in, what it holds, and what it was asked."""

    address: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)  # by "datasets/me/name"
    objects: dict[str, bytes] = field(default_factory=dict)  # by sha256
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file that clients read
    halfway: Callable[[], None] | None = None  # called when half of a large answer was sent
    lies: dict[str, Any] = field(default_factory=dict)  # fields of its answers about repositories, instead of the true
    headers: dict[str, str] = field(default_factory=dict)  # of files, instead of the true ones
    failing: Callable[[str, str], int | None] = lambda method, path: None  # the status of a request that fails


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2])
                if len(body) >= LARGE and hub.halfway is not None:
                    hub.halfway()
                self.wfile.write(body[len(body) // 2 :])

        def json(self, value: Any, status: int = 200) -> None:
            self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

        def handle_any(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self.read_chunks()
            status = hub.failing(self.command, path)
            matches = ((re.fullmatch(pattern, path), method) for pattern, method in routes)
            found, method = next(((match, method) for match, method in matches if match), (None, None))
            if status is not None or found is None or method is None:
                self.answer(status or 404, b'{"error":"no"}')
            else:
                method(self, body, **found.groupdict())

        do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815  # names that http.server looks for

        def read_chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        @property
        def has_token(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def repo(self, name: str) -> Repo | None:
            found = hub.repos.get(name)
            if found is None or (found.private and not self.has_token):
                self.answer(404 if self.has_token else 401, b"{}", X_Error_Code="RepoNotFound")
                return None
            return found

        def may_write(self, name: str) -> bool:
            if self.has_token and name.split("/")[1] == OWNER:
                return True
            self.json({"error": "You don't have the rights"}, 403 if self.has_token else 401)
            return False

        def about(self, _: bytes, kind: str, id: str, revision: str | None = None) -> None:
            repo = self.repo(f"{kind}/{id}")
            if repo and revision not in (None, "main", *repo.commits):
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            elif repo:
                about = {"id": id, "sha": repo.commits[-1], "private": repo.private, "gated": False, "disabled": False}
                siblings = [_sibling(path, data) for path, data in repo.files.items()]
                self.json({**about, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings, **hub.lies})

        def tree(self, _: bytes, kind: str, id: str, revision: str, folder: str | None = None) -> None:
            repo = self.repo(f"{kind}/{id}")
            if repo is None:
                return
            before = f"{folder}/" if folder else ""
            deep = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            found: dict[str, Any] = {}
            for path, data in sorted(repo.files.items()):
                if not path.startswith(before):
                    continue
                parts = path[len(before) :].split("/")
                for depth in range(1, len(parts)) if deep else range(1, min(2, len(parts))):
                    name = before + "/".join(parts[:depth])
                    found[name] = {"type": "directory", "path": name, "oid": "f" * 40, "size": 0}
                if deep or len(parts) == 1:
                    found[path] = {"type": "file", "path": path, "oid": _blob(data), "size": len(data)}
            if folder and not found:
                self.answer(404, b"{}", X_Error_Code="EntryNotFound")
            else:
                self.json(list(found.values()))

        def check(self, _: bytes, kind: str, id: str) -> None:
            if self.repo(f"{kind}/{id}") and self.may_write(f"{kind}/{id}"):
                self.json({})

        def preupload(self, body: bytes, kind: str, id: str, revision: str) -> None:
            repo = self.repo(f"{kind}/{id}")
            if repo and self.may_write(f"{kind}/{id}"):
                files = [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["size"] >= LARGE else "regular",
                        "shouldIgnore": False,
                        "oid": _blob(repo.files[one["path"]]) if one["path"] in repo.files else None,
                    }
                    for one in json.loads(body)["files"]
                ]
                self.json({"files": files})

        def batch(self, body: bytes, kind: str, id: str) -> None:
            objects = []
            for one in json.loads(body)["objects"]:
                upload = {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}
                objects.append(one if one["oid"] in hub.objects else {**one, "actions": upload})
            self.json({"transfer": "basic", "objects": objects})

        def upload(self, body: bytes, oid: str) -> None:
            assert hashlib.sha256(body).hexdigest() == oid
            hub.objects[oid] = body
            self.answer(200)

        def commit(self, body: bytes, kind: str, id: str, revision: str) -> None:
            repo = self.repo(f"{kind}/{id}")
            if repo is None or not self.may_write(f"{kind}/{id}"):
                return
            lines = [json.loads(line) for line in body.splitlines() if line]
            header = lines[0]["value"]
            if header.get("parentCommit") not in (None, repo.commits[-1]):
                self.json({"error": "A commit has happened since. Please refresh and try again."}, 412)
                return
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    repo.files[value["path"]] = hub.objects[value["oid"]]
                elif line["key"] == "deletedFile":
                    del repo.files[value["path"]]
            add_commit(repo, header["summary"])
            oid = repo.commits[-1]
            self.json({"success": True, "commitOid": oid, "commitUrl": f"{hub.address}/{kind}/{id}/commit/{oid}"})

        def resolve(self, _: bytes, id: str, revision: str, path: str, kind: str = "models") -> None:
            repo = self.repo(f"{kind}/{id}")
            if repo is None:
                return
            if path not in repo.files:
                self.answer(404, b"", X_Error_Code="EntryNotFound")
                return
            data, asked = repo.files[path], self.headers.get("Range")
            if asked:
                first, last = asked.removeprefix("bytes=").split("-")
                data = data[int(first) : int(last or len(data)) + 1]
            if self.command == "GET":
                hub.sent[path] = hub.sent.get(path, 0) + len(data)
            tag = f'"{_tag(repo.files[path])}"'
            stated = {"ETag": tag, "X_Linked_Etag": tag, "X_Repo_Commit": repo.commits[-1], **hub.headers}
            self.answer(206 if asked else 200, data, **stated)

    repo = r"(?P<kind>datasets|models|spaces)/(?P<id>[^/]+/[^/]+)"
    routes: list[tuple[str, Callable[..., None]]] = [
        (rf"/api/{repo}(/revision/(?P<revision>.+))?", Handler.about),
        (rf"/api/{repo}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", Handler.tree),
        (rf"/api/{repo}/auth-check/write", Handler.check),
        (rf"/api/{repo}/preupload/(?P<revision>[^/]+)", Handler.preupload),
        (rf"/api/{repo}/commit/(?P<revision>[^/]+)", Handler.commit),
        (rf"/{repo}\.git/info/lfs/objects/batch", Handler.batch),
        (r"/lfs/(?P<oid>[0-9a-f]{64})", Handler.upload),
        (rf"/{repo}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
        (r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),  # of models
    ]
    return Handler


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that answers nothing, not even a connection: its queue is full."""
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def add_commit(repo: Repo, message: str) -> None:
    repo.messages.append(message)
    repo.commits.append(hashlib.sha1(f"{len(repo.commits)} {message}".encode()).hexdigest())


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    """A file as the hub lists it; a large one with its hash."""
    large = {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}
    return {"rfilename": path, "size": len(data), "blobId": _blob(data), **(large if len(data) >= LARGE else {})}


def _tag(data: bytes) -> str:
    """The hash by which the client names a file in its cache."""
    return hashlib.sha256(data).hexdigest() if len(data) >= LARGE else _blob(data)


def _blob(data: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with no repository, a user who is logged in, and an empty cache of scoremode."""
    with serving(monkeypatch, tmp_path) as made:
        yield made


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(made))
    made.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", made.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield made
    server.shutdown()
    server.server_close()
    thread.join()
