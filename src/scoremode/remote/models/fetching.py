"""Fetches a large file of the hub into the cache of its client, and goes on where a killed process ended.

The client itself begins again. Here the bytes go to ``blobs/HASH.incomplete``; once all are there, the file gets the
name that the client looks for, and the client does the rest.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from stat import S_ISREG

from scoremode.core.cache.units import size_words
from scoremode.core.disk.locks import hold_lock
from scoremode.core.verbs.progress import duration, tell_display
from scoremode.errors import ModelError

CHUNK = 1 << 20  # bytes between two looks at the clock
PART_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
DENIED = (401, 403, 404)  # the client asks again, and says why
SILENCE = 30.0  # seconds after which a connection is given up


def fetch_blob(url: str, blob: Path, size: int, label: str) -> None:
    """Fetches ``url`` into ``blob``, a file of ``size`` bytes; its hash is not checked. Nothing if access is denied.

    Connections that end early are made again as long as they bring something; then it is a ModelError.
    """
    part = blob.with_name(f"{blob.name}.incomplete")
    with hold_lock(blob.with_name(f"{blob.name}.lock"), waiting=f"another process is fetching {label}: waiting for it"):
        if os.path.lexists(part) and (not S_ISREG(part.lstat().st_mode) or part.lstat().st_nlink > 1):
            part.unlink()  # what a link names is somebody else's, and a FIFO would be waited for
        while not blob.exists():
            have = _length(part)
            reason = _append(url, part, size, label) if have < size else ""
            if reason is None:
                return
            if _length(part) >= size:
                part.rename(blob)
            elif _length(part) <= have:
                progress = f"{size_words(have)} of {size_words(size)} are kept"
                raise ModelError(f"{label} could not be fetched: {reason}; {progress}", fix="run it again to go on")


def _append(url: str, part: Path, size: int, label: str) -> str | None:
    """Appends what is missing to a part of a file; returns why no more came, None if access is denied."""
    import httpx
    from huggingface_hub.utils import build_hf_headers

    have, began = _length(part), time.monotonic()
    wanted = {**build_hf_headers(), "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    tell_display(f"fetching {label}")
    try:
        # a token is not sent on to another host that a redirect names
        with httpx.stream("GET", url, headers=wanted, follow_redirects=True, timeout=SILENCE) as answer:
            if answer.status_code not in (200, 206):
                return (
                    None if answer.status_code in DENIED else f"the hub answered with HTTP status {answer.status_code}"
                )
            first = done = have if answer.status_code == 206 else 0  # 200: the whole file, in spite of the range
            with os.fdopen(os.open(part, PART_FLAGS, 0o666), "r+b") as file:
                file.seek(first)
                file.truncate()
                for chunk in answer.iter_raw(CHUNK):
                    done += file.write(chunk[: size - done])
                    rate = (done - first) / max(time.monotonic() - began, 1e-9)
                    left = duration((size - done) / max(rate, 1e-9))
                    detail = f"{size_words(done)} of {size_words(size)}, {size_words(round(rate))}/s, about {left} left"
                    tell_display(detail, "detail")
                    if done >= size:  # a hub may send more, without an end
                        break
    except httpx.HTTPError as error:
        return f"{type(error).__name__} {error}".strip()
    return "the connection ended early"


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
