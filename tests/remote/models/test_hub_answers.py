"""Whatever a hub answers, nothing outside its cache is touched, and the outcome is a model or one line.

Made-up answers differ from a good one in one to three places. The hub is a transport in this process; the reading, the
hub's own client and the making of paths are the real ones.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scoremode.core import hub as core_hub
from scoremode.core.models.facts import hub_config
from scoremode.errors import ScoremodeError
from scoremode.remote.models import hub as hub_names
from tests.hub import _blob

ANSWERS, OF_CHECKPOINTS, FRESH = 4_000, 200, 20
OURS = ("models--org--x", ".locks", "scoremode")  # folders that a fetch may change
COMMIT = "c" * 40
GGUF, CONFIG = b"GGUF" * 300, b'{"model_type": "llama"}'
SHA256 = hashlib.sha256(GGUF).hexdigest()
SPECIAL: tuple[Any, ...] = (
    *(None, True, 0, -1, 5, 1.5, 10**30, 2**63, float("nan"), [], {}, [[]], {"a": 1}, "", " ", ".", "..", "/", "null"),
    *("../" * 9 + "own.txt", "..\\own.txt", "C:\\own.txt", "c:own.gguf", "a\0b", "\ud800", "a\nb.gguf", "\x1b[2J.gguf"),
    *("a//b.gguf", "./a.gguf", "a/../../b.gguf", "~/own.txt", "x" * 5000, "x" * 300 + ".gguf", "a/" * 600 + "b"),
    *("\u2028.gguf", "\u202e.gguf", "．．/a.gguf", "%2e%2e%2fown.txt", "a.gguf/b.gguf", "ｃ" * 40, "٣" * 64, "c" * 41),
    *("C" * 40, "f" * 64, "0" * 64, "f" * 40, f"{SHA256}\n", f" {SHA256}", f"sha256:{SHA256}", "refs/main", "-1"),
)


def good() -> dict[str, Any]:
    """All answers of an honest hub about one repository."""
    stated = {"rfilename": "a-Q8_0.gguf", "size": len(GGUF), "blobId": "b" * 40}
    config = {"path": "config.json", "size": len(CONFIG), "oid": _blob(CONFIG), "type": "file"}
    return {
        "about": {
            "id": "org/x",
            "sha": COMMIT,
            "tags": ["gguf"],
            "siblings": [
                {**stated, "lfs": {"sha256": SHA256, "size": len(GGUF), "pointerSize": 134}},
                {"rfilename": "README.md", "size": 5, "blobId": "a" * 40},
            ],
        },
        "tree": [config, {"path": "more", "type": "directory", "oid": "d" * 40, "size": 0}],
        "headers": {
            "gguf": {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{SHA256}"', "X-Linked-Size": str(len(GGUF))},
            "json": {"X-Repo-Commit": COMMIT, "ETag": f'"{_blob(CONFIG)}"', "Content-Length": str(len(CONFIG))},
        },
        "status": 200,
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something in an answer can be replaced."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


PLACES = sorted(places(good()), key=repr)
OF_GGUF = [place for place in PLACES if "json" not in place and place[0] != "tree"]


def mutated(number: int, where: list[tuple[Any, ...]], targets: list[str]) -> dict[str, Any]:
    chance = random.Random(number)
    answer = good()
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        *path, last = chance.choice(where)
        inside = answer
        try:
            for key in path:
                inside = inside[key]
            before = inside[last]
            value: Any = chance.choice((*SPECIAL, *targets * 4))
            kind = chance.randrange(8)
            if kind == 0 and isinstance(inside, dict):
                del inside[last]
            elif kind == 1:
                inside[last] = [before] * chance.choice((2, 30))
            elif kind == 2 and isinstance(before, str) and isinstance(value, str):
                inside[last] = chance.choice((before + value, value + before, f"{value}/{before}", before[:-1] + value))
            else:
                inside[last] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):  # an earlier change took this place away
            continue
    return answer


def handler(answer: dict[str, Any], library: Any) -> Callable[[Any], Any]:
    """What a hub with these answers does with a request."""

    def lines(about: Any) -> list[tuple[bytes, bytes]]:
        items = about.items() if isinstance(about, dict) else ()
        return [(name.encode("utf-8", "replace"), str(value).encode("utf-8", "replace")) for name, value in items]

    def handle(request: Any) -> Any:
        path = request.url.path
        if path.startswith("/api/"):
            value = answer.get("tree") if "/tree/" in path else answer.get("about")
            return library.Response(200, content=json.dumps(value).encode())
        kind = "gguf" if path.lower().endswith("gguf") else "json"
        headers, status = answer.get("headers"), answer.get("status")
        content = GGUF if kind == "gguf" else CONFIG
        if not isinstance(status, int) or not 200 <= status < 600:
            status = 404
        stated = lines(headers.get(kind) if isinstance(headers, dict) else None)
        if request.method == "HEAD":
            return library.Response(status, headers=stated)
        if answer.get("is_endless"):
            return library.Response(200, content=itertools.repeat(b"x" * 999))
        first = int(request.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        return library.Response(206 if first else 200, content=iter([content[first:]]))

    return handle


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the cache of the hub's client, and files that are nobody's business, in it and around it."""
    from huggingface_hub import constants

    for name in ("own.txt", "home/own.txt", "home/work/own.txt", "hub/own.txt", "hub/models--me--mine/blobs/own.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path / "home/work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "scoremode"))
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(core_hub, "hub_is_reachable", lambda: True)
    return tmp_path


@pytest.fixture
def hub(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the hub's client and the fetch of large files are answered."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    answer: dict[str, Any] = {}
    client: Any = type(default_client_factory())
    library = sys.modules[client.__module__.partition(".")[0]]
    fetching = httpx.Client(transport=httpx.MockTransport(handler(answer, httpx)))
    monkeypatch.setattr(httpx, "stream", fetching.stream)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    set_client_factory(lambda: client(transport=library.MockTransport(handler(answer, library)), follow_redirects=True))
    yield answer
    set_client_factory(default_client_factory)


def others(disk: Path) -> dict[str, tuple[int, ...]]:
    """Everything on the disk that does not belong to the repository org/x, with what a change would change."""
    found: dict[str, tuple[int, ...]] = {}
    for folder, folders, files in os.walk(disk):
        folders[:] = [name for name in folders if name not in OURS]
        for name in (*folders, *(name for name in files if name != "CACHEDIR.TAG")):
            about = os.lstat(f"{folder}/{name}")
            changing = (about.st_size, about.st_mtime_ns) if name in files else ()
            found[f"{folder}/{name}"] = (about.st_mode, about.st_ino, *changing)
    return found


def outcome(ask: Callable[[], Path]) -> str:
    """The name of the model's file, or the line that refuses the answer."""
    hub_names.listing.cache_clear()
    core_hub._sizes.clear()
    try:
        return ask().name
    except ScoremodeError as error:
        return f"!{error}"


def find() -> Path:
    return hub_names.HUB_NAMES.find("org/x:Q8_0")


def checkpoint() -> Path:
    return hub_config("org/x", None, None, ["*.json"])


@pytest.mark.parametrize(
    ("count", "where", "ask"),
    [
        (ANSWERS, OF_GGUF, find),
        (OF_CHECKPOINTS, PLACES, checkpoint),
    ],
)
def test_no_answer_of_a_hub_names_a_file_outside_its_cache(
    count: int, where: list[tuple[Any, ...]], ask: Callable[[], Path], disk: Path, hub: dict[str, Any]
) -> None:
    targets = [str(disk / "own.txt"), str(disk / "hub/models--me--mine/blobs/own.txt")]
    targets += [f"{'../' * up}own.txt" for up in range(1, 6)]
    before, usable = others(disk), 0
    for number in range(count):
        if number % FRESH == 0:
            shutil.rmtree(disk / "hub/models--org--x", ignore_errors=True)
        hub.clear()
        hub.update(mutated(number, where, targets) if number else good())
        told = outcome(ask)
        assert others(disk) == before, (number, told)
        assert number or told[0] != "!"
        assert told[0] != "!" or ("\n" not in told and len(told) < 1000 and "HF_TOKEN" not in told), (number, told)
        usable += told[0] != "!"
    assert count // 50 < usable < count


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ask", [find, checkpoint])
def test_a_file_that_never_ends_is_given_up_at_its_size(ask: Callable[[], Path], hub: dict[str, Any]) -> None:
    hub.update(good(), is_endless=True)
    assert re.search("does not have the hash that the hub states|it sends more than it stated", outcome(ask))


@pytest.mark.timeout(60)
def test_a_part_that_is_a_link_or_a_fifo_is_replaced(disk: Path, hub: dict[str, Any]) -> None:
    hub.update(good())
    part, mine = disk / f"hub/models--org--x/blobs/{SHA256}.incomplete", disk / "own.txt"
    for make in (os.mkfifo, lambda path: path.symlink_to(mine), lambda path: path.hardlink_to(mine)):
        shutil.rmtree(disk / "hub/models--org--x", ignore_errors=True)
        part.parent.mkdir(parents=True)
        make(part)
        assert outcome(find) == "a-Q8_0.gguf"
        assert mine.read_text() == "own.txt"


def test_a_long_list_is_cut(hub: dict[str, Any]) -> None:
    hub.update(good())
    hub["about"]["siblings"] = [{"rfilename": f"{i}.gguf", "size": 1} for i in range(20_000)]
    told = outcome(lambda: hub_names.HUB_NAMES.find("org/x:Q8_0"))
    assert "choose one of 0.gguf (1 B), 1.gguf (1 B), " in told
    assert told.endswith(", … and 19,992 more")
