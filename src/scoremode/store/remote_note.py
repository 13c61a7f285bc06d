"""What the work folder of a run behind a URI knows about itself."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scoremode.disk.files import write_atomically
from scoremode.disk.folders import PLACE
from scoremode.places.uri import Place
from scoremode.store.leases import FLAG, new_holder
from scoremode.strict_json import read_object


@dataclass
class Note:
    """What a work folder knows about itself: where its run goes, under whose id, and which files were sent."""

    folder: Path
    place: Place
    holder: str
    is_new: bool = True
    sent: dict[str, str] = field(default_factory=dict)  # sha256 by name
    _changing: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def read(folder: Path, place: Place) -> Note:
        """The note in a folder. Without a usable one, what lies in the folder does not count."""
        with suppress(OSError, ValueError):
            known = read_object(folder / PLACE)
            holder, sent = known.get("holder"), known.get("sent")
            usable = isinstance(holder, str) and FLAG.fullmatch(f"writer-000000-{holder}.json")
            if known.get("place") == str(place) and usable and isinstance(sent, dict):
                return Note(folder, place, str(holder), False, {str(k): str(v) for k, v in sent.items()})
        return Note(folder, place, new_holder())

    def add(self, name: str, sha256: str) -> None:
        """This file lies elsewhere now."""
        with self._changing:
            self.sent[name] = sha256
            self.write()

    def remove(self, name: str) -> str | None:
        """This file no longer counts as sent; its hash if it did."""
        with self._changing:
            sha256 = self.sent.pop(name, None)
            if sha256 is not None:
                self.write()
            return sha256

    def keep_only(self, names: set[str]) -> None:
        """Forget files that are no longer there."""
        self.sent = {name: sha256 for name, sha256 in self.sent.items() if name in names}
        self.write()

    def forget(self) -> None:
        """Nothing that was sent belongs to this run."""
        self.keep_only(set())

    def write(self) -> None:
        known = {"place": str(self.place), "holder": self.holder, "sent": self.sent}
        write_atomically(self.folder / PLACE, json.dumps(known).encode())
        self.is_new = False
