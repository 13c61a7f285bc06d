"""What the core asks of stores behind URIs, answered by this wing."""

from __future__ import annotations

from scoremode.core.disk.folders import MANIFEST, SCORES
from scoremode.core.disk.uri import RemotePath
from scoremode.remote.storage.copies import LOCK_OBJECT, copies_of_texts, copy_of_file, copy_of_run
from scoremode.remote.storage.objects import Objects
from scoremode.remote.storage.runs import RemoteClaim


class UriStore:
    """Objects behind URIs, and copies of them."""

    copy_of_file = staticmethod(copy_of_file)
    copies_of_texts = staticmethod(copies_of_texts)
    copy_of_run = staticmethod(copy_of_run)
    claim = RemoteClaim

    def has_file(self, place: RemotePath) -> bool:
        return Objects(place.parent).is_folder(place.name) is False

    def read(self, place: RemotePath, most: int) -> bytes | None:
        return Objects(place.parent).read(place.name, most=most)

    def write(self, place: RemotePath, data: bytes) -> None:
        Objects(place.parent).write(place.name, data)

    def problem_with_output(self, place: RemotePath) -> str | None:
        """The server must answer now; whether this user may write shows only later."""
        beside = Objects(place.parent).listed()
        if beside.get(place.name):
            return "is a folder"
        if {MANIFEST, SCORES} <= beside.keys() or LOCK_OBJECT in beside:
            return "is inside a run or reference folder, where nothing else may be written"
        return None


STORE = UriStore()
