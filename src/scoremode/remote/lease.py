"""Which process may write into a folder elsewhere, where there are no file locks.

FOLDER/wants-000002-4f2a9c….json    the flag of a process that wants to write: generation and id
FOLDER/writer-000002-4f2a9c….json   the flag of the writer, written again every few seconds

A process raises its flag first and looks for others afterwards. Listings of object stores show every object that was
written before, so of two that begin at once at least one sees the other. No process begins while another live flag is
there: of those that want to write, the one with the lowest id waits until the others have taken theirs down. A flag is
live until it was not renewed for as long as it promises, by the server's own clock. The next writer removes flags that
are no longer live, and its generation is higher. A writer has lost the folder if its flag is gone, or if there is a
writer of a higher generation.

Between a writer's last look and the end of its own upload, another one may take over, if the first one was silent for
so long. What is uploaded in such a moment has the first one's id in its name, except for a finished run's files; their
manifest has their hashes, so that a mixture is refused when it is read.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from datetime import UTC, datetime

import msgspec

from scoremode.arguments import seconds_in
from scoremode.errors import RunError, StorageError, harmless, print_line
from scoremode.remote.objects import Found, Objects

FLAG = re.compile(r"(writer|wants)-(\d{6})-([0-9a-f]{16})\.json")
SHORTEST, USUAL, LONGEST = 2.0, 120.0, 86_400.0  # seconds for which a flag counts after it was last renewed
RENEWALS = 6  # within the time that a flag counts
LARGEST_FLAG = 1 << 16
LOOKS, BETWEEN_LOOKS = 60, 0.15  # seconds


class LeaseLostError(RunError):
    """Another writer has taken the folder over."""


class FlagContent(msgspec.Struct, frozen=True):
    """The content of a flag. Anybody may have written it: if it cannot be read, the defaults count."""

    host: str = "an unknown machine"
    process: int = 0
    seconds: float = USUAL
    renewed: float | None = None  # by the clock of its machine


class Flag:
    """The flag of a process, as it was listed."""

    def __init__(self, found: Found, match: re.Match[str], data: bytes) -> None:
        self.name, self.modified = found.name, found.modified  # the time is by the server's clock
        self.writes, self.generation, self.holder = match[1] == "writer", int(match[2]), match[3]
        try:
            said = msgspec.json.decode(data, type=FlagContent)
        except (msgspec.MsgspecError, RecursionError):
            said = FlagContent()
        self.process = f"process {said.process} on {harmless(said.host)[:80]}"
        self.seconds = min(max(said.seconds, SHORTEST), LONGEST)  # for which it counts
        self.renewed = said.renewed or time.time()

    def silence(self, now: float | None) -> float:
        """Seconds since the flag was renewed; 0 if they cannot be known.

        ``now`` is the time by the server's clock. If the server has no clock, those of the two machines are compared.
        """
        if self.modified is not None and now is not None:
            return max(0.0, now - self.modified)
        return max(0.0, time.time() - self.renewed)


class Lease:
    """The right to write into a folder, from ``acquire`` to ``release``; a thread renews it."""

    def __init__(self, objects: Objects, holder: str) -> None:
        self._objects, self.holder, self.generation = objects, holder, 0
        self.seconds = seconds_in("SCOREMODE_LEASE", USUAL, SHORTEST, f"{SHORTEST:g} or more, as in 120")
        self._lost: LeaseLostError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="scoremode-lease", daemon=True)

    def acquire(self) -> None:
        """Take the folder; RunError if another live writer has it."""
        self.generation = 1 + max((flag.generation for flag in self._flags()), default=0)
        self._write("wants")
        for _ in range(LOOKS):
            flags = self._flags()
            now = next((flag.modified for flag in flags if flag.name == self._name("wants")), None)
            others = [flag for flag in flags if flag.holder != self.holder]
            live = [flag for flag in others if flag.silence(now) < flag.seconds]
            if not live or any(flag.writes or flag.holder < self.holder for flag in live):
                break
            time.sleep(BETWEEN_LOOKS)  # they see this flag, and take theirs down
        if live:
            self._objects.remove(self._name("wants"))
            raise self._refusal(max(live, key=lambda flag: flag.writes))
        self._write("writer")
        for flag in (flag for flag in others if flag.writes):
            print_line(
                f"scoremode: taking over {self._objects.place} from {flag.process}, "
                f"which was not heard of for {flag.silence(now):.0f} s"
            )
        for flag in flags:  # those of dead writers, and older ones of this one
            self._objects.remove(flag.name)
        self._thread.start()

    def _refusal(self, flag: Flag) -> RunError:
        renewed = datetime.fromtimestamp(max(0.0, min(flag.modified or flag.renewed, time.time())), UTC)
        return RunError(
            f"{flag.process} is writing into {self._objects.place} (heard of at {renewed:%Y-%m-%d %H:%M:%S} UTC)",
            fix=f"wait for it; if it was killed, it counts for {flag.seconds:.0f} s more at most, then run the same "
            "command again; or give another --out",
        )

    def _renew(self) -> None:
        """Renew the flag until ``release``. A renewal that fails is tried again soon."""
        pause = self.seconds / RENEWALS
        while not self._ended.wait(pause):
            try:
                self.verify()
                self._write("writer")
                pause = self.seconds / RENEWALS
            except LeaseLostError as error:
                self._lost = error
                return
            except (StorageError, OSError):
                pause = min(1.0, pause)

    def raise_if_lost(self) -> None:
        """Raise LeaseLostError if it is known that another writer has the folder. The server is not asked."""
        if self._lost is not None:
            raise self._lost

    def verify(self) -> None:
        """Ask the server whether another writer has the folder now; LeaseLostError if so."""
        writers = [flag for flag in self._flags() if flag.writes]
        newer = [flag for flag in writers if flag.generation > self.generation]
        if newer or self._name("writer") not in [flag.name for flag in writers]:
            raise LeaseLostError(
                f"{self._objects.place} was taken over by {newer[-1].process if newer else 'another process'}, "
                "because this one was not heard of for too long",
                fix="nothing of it was overwritten; run the same command again when it is done",
            )

    def release(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._objects.remove(self._name("writer"))

    def _name(self, kind: str) -> str:
        return f"{kind}-{self.generation:06d}-{self.holder}.json"

    def _write(self, kind: str) -> None:
        said = FlagContent(socket.gethostname(), os.getpid(), self.seconds, time.time())
        self._objects.write(self._name(kind), msgspec.json.encode({"for": "scoremode", **msgspec.to_builtins(said)}))

    def _flags(self) -> list[Flag]:
        """All flags, those of others with their content."""
        flags = []
        for found in self._objects.listed():
            match = FLAG.fullmatch(found.name)
            if match is None:
                continue
            data = b"" if match[3] == self.holder else self._objects.read(found.name, most=LARGEST_FLAG)
            if data is not None:  # else it was taken down meanwhile
                flags.append(Flag(found, match, data))
        return flags
