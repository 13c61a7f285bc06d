"""Who may write into a folder elsewhere, where there are no file locks.

FOLDER/wants-000002-4f2a9c….json    a flag of somebody who wants to write: generation and id
FOLDER/writer-000002-4f2a9c….json   the flag of the writer, written again every few seconds

Who wants to write raises a flag first and looks for others afterwards. Listings of object stores show every object that
was written before, so of two that begin at once at least one sees the other. Nobody begins while another live flag is
there: the one with the lowest id waits for the others, which take theirs down. A flag is live until it was not renewed
for as long as it promises, by the server's own clock. Flags that are no longer live are removed by the next writer,
whose generation is higher. A writer whose flag is gone, or who finds a writer of a higher generation, has lost the
folder.

Between a writer's last look and the end of its own upload, another one may take over, if the first one was silent for
so long. What is uploaded in such a moment has the first one's id in its name, except for a finished run's files; their
manifest has their hashes, so that a mixture is refused when it is read.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from scoremode.cache.units import moment
from scoremode.errors import OptionError, RunError, harmless, print_line
from scoremode.places.objects import Found, Objects
from scoremode.strict_json import parse

FLAG = re.compile(r"(writer|wants)-(\d{6})-([0-9a-f]{16})\.json")
SECONDS = 120.0  # for which a flag counts after it was last renewed
SHORTEST, LONGEST = 2.0, 86_400.0
LARGEST_FLAG = 1 << 16
ATTEMPTS = 4
LOOKS, BETWEEN_LOOKS = 20, 0.15  # seconds


class LeaseLostError(RunError):
    """Another writer has taken the folder over."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of a writer, as it was listed."""

    name: str
    writes: bool  # else it wants to
    generation: int
    holder: str
    renewed: float | None  # by the server's clock


Other = tuple[Flag, dict[str, Any], float | None]  # a flag, what it says, and for how many seconds it was quiet


def lease_seconds() -> float:
    """Seconds for which a writer that is not heard of keeps its folder: ``$SCOREMODE_LEASE``."""
    given = os.environ.get("SCOREMODE_LEASE", "").strip()
    try:
        seconds = float(given) if given else SECONDS
    except ValueError:
        seconds = -1.0
    if not SHORTEST <= seconds <= LONGEST:
        raise OptionError("SCOREMODE_LEASE is not a number of seconds", fix=f"give {SHORTEST:g} or more, as in 120")
    return seconds


def new_holder() -> str:
    return secrets.token_hex(8)


class Lease:
    """The right to write into a folder, until ``release``."""

    def __init__(self, objects: Objects, holder: str) -> None:
        self._objects, self.holder, self.generation = objects, holder, 0
        self.seconds = lease_seconds() * (30 if objects.writes_are_costly else 1)

    def acquire(self) -> None:
        """Take the folder; RunError if another live writer has it."""
        for attempt in range(ATTEMPTS):
            self._raise_flag()
            others = self._others()
            live = _live(others)
            for _ in range(LOOKS if self._goes_first(live) else 0):
                time.sleep(BETWEEN_LOOKS)  # they see this flag, and take theirs down
                others = self._others()
                live = _live(others)
                if not self._goes_first(live):
                    break
            if not live:
                self._take_over(others)
                return
            self._objects.remove(self._name("wants"))
            writing = [one for one in live if one[0].writes]
            if writing or attempt == ATTEMPTS - 1:
                raise self._refusal(*(writing or live)[0][:2])
            time.sleep(random.uniform(0.5, 1.5))

    def _goes_first(self, live: list[Other]) -> bool:
        """Of several that began at once and want to write, the one with the lowest id need not take its flag down."""
        return bool(live) and all(not flag.writes and self.holder < flag.holder for flag, _, _ in live)

    def _raise_flag(self) -> None:
        self.generation = 1 + max((flag.generation for flag in self._flags()), default=0)
        self._write("wants")

    def _others(self) -> list[Other]:
        """The flags of others, what they say, and for how many seconds they were quiet."""
        flags = self._flags()
        now = next((flag.renewed for flag in flags if flag.name == self._name("wants")), None)
        found = []
        for flag in flags:
            if flag.holder != self.holder:
                about = self._about(flag)
                if about is not None:  # else it was taken down meanwhile
                    found.append((flag, about, _quiet(flag, about, now)))
        return found

    def _take_over(self, others: list[Other]) -> None:
        """Become the writer; remove the flags of those that are no longer live, and older ones of this writer."""
        self._write("writer")
        for flag, about, quiet in others:
            if flag.writes:
                since = "" if quiet is None else f", which was not heard of for {quiet:.0f} s"
                line = f"scoremode: taking over {self._objects.place} from {_who(about)}{since}"
                print_line(line)
            self._objects.remove(flag.name)
        for flag in self._flags():
            if flag.holder == self.holder and flag.name != self._name("writer"):
                self._objects.remove(flag.name)

    def _name(self, kind: str) -> str:
        return f"{kind}-{self.generation:06d}-{self.holder}.json"

    def _write(self, kind: str) -> None:
        said = {
            "for": "scoremode",
            "host": socket.gethostname(),
            "process": os.getpid(),
            "seconds": self.seconds,
            "renewed": time.time(),
        }
        self._objects.write(self._name(kind), json.dumps(said).encode())

    def _flags(self) -> list[Flag]:
        return [flag for found in self._objects.listed() if (flag := _flag(found)) is not None]

    def _about(self, flag: Flag) -> dict[str, Any] | None:
        data = self._objects.read(flag.name, most=LARGEST_FLAG)
        try:
            said = parse(data) if data is not None else None
        except ValueError:
            said = {}
        return (said if isinstance(said, dict) else {}) if data is not None else None

    def _refusal(self, flag: Flag, about: dict[str, Any]) -> RunError:
        when = moment(flag.renewed or _number(about.get("renewed")) or time.time())
        return RunError(
            f"{_who(about)} is writing into {self._objects.place} (heard of at {when:%Y-%m-%d %H:%M:%S} UTC)",
            fix=f"wait for it; if it was killed, it counts for {_promise(about):.0f} s more at most, then run the same "
            "command again; or give another --out",
        )

    def renew(self) -> None:
        """Renew the flag; LeaseLostError if another writer has the folder now."""
        self.check()
        self._write("writer")

    def check(self) -> None:
        """LeaseLostError if another writer has the folder now."""
        flags = [flag for flag in self._flags() if flag.writes]
        newer = [flag for flag in flags if flag.generation > self.generation]
        if newer or all(flag.name != self._name("writer") for flag in flags):
            about = self._about(newer[-1]) if newer else None
            who = _who(about) if about else "another process"
            raise LeaseLostError(
                f"{self._objects.place} was taken over by {who}, because this one was not heard of for too long",
                fix="nothing of it was overwritten; run the same command again when it is done",
            )

    def release(self) -> None:
        """Take the flag down."""
        self._objects.remove(self._name("writer"))


def _flag(found: Found) -> Flag | None:
    match = FLAG.fullmatch(found.name)
    return Flag(found.name, match[1] == "writer", int(match[2]), match[3], found.modified) if match else None


def _live(others: list[Other]) -> list[Other]:
    return [one for one in others if one[2] is None or one[2] < _promise(one[1])]


def _quiet(flag: Flag, about: dict[str, Any], now: float | None) -> float | None:
    """Seconds since the flag was renewed: by the server's clock, or by the machines' own where it has none.

    None if nobody can say.
    """
    if flag.renewed is not None and now is not None:
        return max(0.0, now - flag.renewed)
    renewed = _number(about.get("renewed"))
    return None if renewed is None else max(0.0, time.time() - renewed)


def _promise(about: dict[str, Any]) -> float:
    """How long a flag counts after it was renewed."""
    given = _number(about.get("seconds"))
    return SECONDS if given is None else min(max(given, SHORTEST), LONGEST)


def _who(about: dict[str, Any]) -> str:
    host = harmless(str(about.get("host", "an unknown machine")))[:80]
    return f"process {_number(about.get('process')) or 0:.0f} on {host}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
