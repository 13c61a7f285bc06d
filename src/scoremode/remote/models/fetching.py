"""Fetches a large file of the hub into the cache of the hub's client, and goes on where a killed process ended.

The client itself begins again. Here the bytes go to ``blobs/HASH.incomplete``; once all are there, the file gets the
name that the client looks for, and the client does the rest.
"""

from __future__ import annotations

import time
from pathlib import Path

from scoremode.core.cache.units import size_words
from scoremode.core.disk.files import file_sha256
from scoremode.core.disk.locks import hold_lock
from scoremode.core.verbs.progress import duration, tell_display
from scoremode.errors import ModelError

CHUNK = 1 << 20  # bytes between two looks at the clock
ATTEMPTS = 5  # in a row that bring nothing
DENIED = ""  # the client asks again, and says why
SILENCE = 30.0  # seconds after which a connection is given up


def fetch_blob(url: str, blob: Path, size: int, what: str) -> bool:
    """Fetches ``url`` into ``blob``, a file of ``size`` bytes that is named by its sha256.

    False if it is there already, unchecked, or is denied. ModelError if the network fails again and again, or if the
    file has another hash.
    """
    part = blob.with_name(f"{blob.name}.incomplete")
    with hold_lock(blob.with_name(f"{blob.name}.lock"), waiting=f"another process is fetching {what}: waiting for it"):
        if blob.exists():
            return False
        if part.is_symlink():  # what it names is somebody else's
            part.unlink()
        failures, have = 0, _length(part)
        while have < size:
            reason = _append(url, part, size, what)
            if reason == DENIED:
                return False
            before, have = have, _length(part)
            failures = failures + 1 if have <= before else 0
            if reason is not None and failures >= ATTEMPTS:
                kept = f"{size_words(have)} of {size_words(size)} are kept"
                raise ModelError(f"{what} could not be fetched: {reason}; {kept}", fix="run it again to go on")
            if reason is not None:
                time.sleep(min(failures, 2))
        tell_display(f"checking the hash of {what}")
        if file_sha256(part) != blob.name:
            part.unlink()
            raise ModelError(f"{what} does not have the hash that the hub states", fix="run it again to fetch it")
        part.rename(blob)
        return True


def _append(url: str, part: Path, size: int, what: str) -> str | None:
    """Appends what is missing to a part of a file; the reason if it ended too early."""
    import httpx
    from huggingface_hub.utils import build_hf_headers

    have = _length(part)
    wanted = {**build_hf_headers(), "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    try:
        # a token is not sent on to another host that a redirect names
        with httpx.stream("GET", url, headers=wanted, follow_redirects=True, timeout=SILENCE) as answer:
            if answer.status_code in (401, 403, 404):
                return DENIED
            if answer.status_code not in (200, 206):
                return f"the hub answered with HTTP status {answer.status_code}"
            if answer.status_code == 200:  # the whole file, in spite of the range
                have = 0
            with part.open("r+b" if have else "wb") as file:
                file.seek(have)
                meter = Meter(what, have, size)
                for chunk in answer.iter_raw(CHUNK):
                    if meter.done + len(chunk) > size:
                        return f"it is larger than the {size_words(size)} that the hub states"
                    file.write(chunk)
                    meter.add(len(chunk))
    except httpx.HTTPError as error:
        return f"{type(error).__name__} {error}".strip()
    return None if _length(part) >= size else "the connection ended early"


class Meter:
    """Tells the progress line how much of a file is here, how fast it comes, and how long the rest takes."""

    def __init__(self, what: str, first: int, size: int) -> None:
        self.first, self.done, self.size, self.began = first, first, size, time.monotonic()
        tell_display(f"fetching {what}")

    def add(self, count: int) -> None:
        self.done += count
        tell_display(self.words(time.monotonic() - self.began), "detail")

    def words(self, seconds: float) -> str:
        """The state after some seconds.

        >>> meter = Meter("a.gguf", 0, 4_000_000_000)
        >>> meter.add(1_000_000_000)
        >>> meter.words(10)
        '1 GB of 4 GB, 100 MB/s, about 30 s left'
        """
        said = f"{size_words(self.done)} of {size_words(self.size)}"
        rate = (self.done - self.first) / max(seconds, 1e-9)
        left = duration((self.size - self.done) / rate) if rate else "?"
        return f"{said}, {size_words(rate)}/s, about {left} left"


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
