"""Servers that do not answer, and credentials that are missing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import scoremode as sm
from scoremode.errors import CorpusError, StorageError
from scoremode.remote.storage import objects
from tests.s3 import Bucket, start

Move = Callable[[], Path]
QUESTION: dict[str, Any] = {"text": "the cat sat on the mat. " * 20, "context_length": 48}


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_accepts_and_never_answers(
    bucket: Bucket, elsewhere: Move, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "READ_SECONDS", 0.3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", silent)
    objects._opened.cache_clear()
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot be read: .*[Tt]imeout.*check the URI") as raised:
        sm.load(bucket.uri("one"))
    objects._opened.cache_clear()
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began < 20


def test_base_logits_at_a_uri(bucket: Bucket, elsewhere: Move, tmp_path: Path) -> None:
    kld = tmp_path / "base.kld"
    sm.reference("table:successor", kld=kld, text=QUESTION["text"], context_length=64)
    bucket.put("base.kld", kld.read_bytes())
    (here,) = sm.compare(str(kld), "table:uniform", out=tmp_path / "here")
    (there,) = sm.compare(bucket.uri("base.kld"), "table:uniform", out=bucket.uri("out"))
    assert here.kl is not None
    assert there.kl is not None
    assert there.kl.tolist() == here.kl.tolist()
    bucket.put("cut.kld", kld.read_bytes()[:-7])
    bucket.put("text.kld", b"no logits at all")
    for key in ("cut.kld", "text.kld", "none.kld"):
        with pytest.raises((sm.errors.InputError, StorageError), match=bucket.uri(key)) as raised:
            sm.compare(bucket.uri(key), "table:uniform")
        assert str(tmp_path) not in str(raised.value)


def test_messages_about_a_text_name_its_uri(bucket: Bucket, elsewhere: Move, tmp_path: Path) -> None:
    bucket.put("bad.txt", b"good \xff bad")
    bucket.put("rows.jsonl", b'{"text": "good"}\n{"txt": 1}\n')
    bucket.put("pairs.jsonl", b'{"prompt": "a"}\n')
    for key in ("bad.txt", "rows.jsonl"):
        with pytest.raises(CorpusError, match=bucket.uri(key)) as raised:
            sm.ppl("table:uniform", corpus=bucket.uri(key))
        assert str(tmp_path) not in str(raised.value)
    process = start(["prob", "table:uniform", "--file", bucket.uri("pairs.jsonl")], tmp_path / "cache")
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 2
    assert bucket.uri("pairs.jsonl") in complaints
    assert str(tmp_path) not in complaints
