"""Stores heads of baselines that clients send, in the service's own folder, named by their digest, within a quota."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scoremode.engines.messages import DIGEST, FOLDER, HeadFile
from scoremode.errors import InputError
from scoremode.service.requests import AbsentError, BusyError, TooLargeError

PREFIX = "scoremode-service-"
RECENT = 60.0  # seconds: a head that was used this recently is not removed
PARTIAL = ".partial"


def make_folder() -> Path:
    """Makes a private folder for one service, and removes the folders of services that have ended."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = old.name.removeprefix(PREFIX).split("-")[0]
        with suppress(OSError):
            if pid.isdigit() and old.stat().st_uid == os.getuid():
                try:
                    os.kill(int(pid), 0)
                except ProcessLookupError:
                    shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


class Heads:
    """The heads of baselines that this service has stored."""

    def __init__(self, most: int) -> None:
        found = os.environ.get(FOLDER)
        self.folder = Path(found) if found else make_folder()
        os.environ[FOLDER] = str(self.folder)
        if self.folder.name.startswith(f"{PREFIX}{os.getpid()}-"):
            atexit.register(self.remove)
        self.most = most
        self._used: Counter[str] = Counter()
        self._coming = 0  # bytes of heads that are being received

    def path(self, digest: str) -> Path:
        """Returns the path of a head's file. The name must be a digest, so it cannot lead to another folder."""
        if not DIGEST.fullmatch(digest):
            raise InputError("this is not a digest", fix="name a head by 64 characters from 0-9 and a-f")
        return self.folder / digest

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    @contextmanager
    def using(self, digest: str) -> Iterator[HeadFile]:
        """Opens a head, and protects it from removal until the block ends."""
        path = self.path(digest)
        if not path.is_file():
            raise AbsentError("the head of the baseline is not here", fix=f"send it to /v1/scoremode/heads/{digest}")
        self._used[digest] += 1
        try:
            os.utime(path)
            yield HeadFile.open(path)
        finally:
            self._used[digest] -= 1
            with suppress(OSError):
                os.utime(path)

    async def put(self, digest: str, body: AsyncIterator[bytes], declared: int, vocabulary: int) -> None:
        """Receives and stores a head, whose bytes must have this digest."""
        path = self.path(digest)
        if declared > self.most:
            raise TooLargeError(f"a head of {declared} bytes is more than the {self.most} kept here", fix="send none")
        self._make_room(declared + self._coming)
        handle, name = tempfile.mkstemp(suffix=PARTIAL, dir=self.folder)
        partial = Path(name)
        self._coming += declared  # so that other heads received at the same time do not get the same room
        try:
            found, size = hashlib.sha256(), 0
            with os.fdopen(handle, "wb") as file:
                async for chunk in body:
                    size += len(chunk)
                    if size > declared:
                        raise InputError("more bytes came than were declared", fix="send the right Content-Length")
                    found.update(chunk)
                    file.write(chunk)
            if found.hexdigest() != digest:
                raise InputError("the bytes of this head have another digest", fix="send it again")
            if (vocabulary_sent := HeadFile.open(partial).header.vocabulary) != vocabulary:
                raise InputError(
                    f"the baseline has {vocabulary_sent} ids and the model {vocabulary}",
                    fix="compare models with one vocabulary",
                )
            partial.replace(path)
        finally:
            self._coming -= declared
            partial.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Removes the least recently used heads until this many bytes fit. Raises BusyError if they do not fit."""
        kept = sorted((p for p in self.folder.iterdir()), key=lambda p: p.stat().st_mtime)
        total = sum(p.stat().st_size for p in kept if p.suffix != PARTIAL)
        for path in kept:
            if total + size <= self.most:
                return
            recent = time.time() - path.stat().st_mtime < RECENT
            if path.suffix == PARTIAL or self._used[path.name] or recent:
                continue
            total -= path.stat().st_size
            path.unlink(missing_ok=True)
        if total + size > self.most:
            raise BusyError("there is no room for another head", fix="try again in a minute")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
