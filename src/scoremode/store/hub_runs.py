"""Runs and references in a repository of the Hugging Face hub: made in a work folder here, published by one commit.

The work folder lies in the cache and is named after the URI. The same command on the same machine resumes there;
nothing is on the hub before the run is complete. Then all files are added, and those of a run that is replaced are
removed, in a single commit that must follow the commit seen before. Other files of the repository are never touched.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scoremode.disk.folders import LOCK, MANIFEST, REFERENCE, SCORES, is_reference_file
from scoremode.errors import RunError, StorageError, print_line
from scoremode.remote.hub import ConflictError, Repository, is_repository
from scoremode.remote.uri import Place
from scoremode.store import runs
from scoremode.store.remote_runs import STAYS, PlaceClaim, RemoteClaim
from scoremode.store.run import Run

ATTEMPTS = 5  # to commit, while others commit to the same repository


def claim_at(place: Place, identity: dict[str, Any], *, fresh: bool = False, kind: str = "runs") -> PlaceClaim:
    """The claim of a folder behind a URI."""
    chosen = HubClaim if is_repository(place) else RemoteClaim
    return chosen(place, identity, fresh=fresh, kind=kind)


class HubClaim(PlaceClaim):
    """A folder of a repository for one run. Two processes may score the same; only one of them publishes."""

    shard_bytes = 1 << 25  # small files, because a reader fetches those that contain the rows it needs

    def __init__(self, place: Place, identity: dict[str, Any], *, fresh: bool = False, kind: str = "runs") -> None:
        super().__init__(place, identity, fresh=fresh, kind=kind)
        self._repository = Repository.of(place)
        self._follows: str | None = None  # the newest commit when the folder was looked at

    def _counts(self, name: str) -> bool:
        return name in (MANIFEST, SCORES) or is_reference_file(name)

    def _existing_run(self) -> Run | None:
        self._follows = self._repository.last_commit()
        if self._follows is None:  # there is no repository yet
            return None
        found = super()._existing_run()
        self._old_files = {one.name for one in self._objects.listed() if self._counts(one.name)}
        return found

    def _take_place(self) -> None:
        if self._follows is None:
            self._repository.create()
            print_line(
                f"scoremode: created {self.place} on the hub; it is private until you change that in its settings"
            )
        else:
            self._repository.require_writable()

    def _prepare(self) -> Run | None:
        if (self.folder / MANIFEST).exists() and not self._fresh:
            with suppress(RunError):
                found = runs.finished_in(self.folder, self.identity)
                if all((self.folder / name).exists() for name, _ in self._files()):
                    return self.publish(found)
            for path in list(self.folder.iterdir()):  # another run, which was never published
                if path.name != LOCK:
                    path.unlink()
        return None

    def publish(self, run: Run) -> Run:
        """Adds the files of the finished run in one commit, which also removes those of the run that it replaces."""
        names = [*(name for name, _ in self._files()), *self._manifests()]
        files: dict[str, Path] = {name: self.folder / name for name in names}
        what = "reference" if REFERENCE in files else "run"
        try:
            for _ in range(ATTEMPTS):
                with suppress(ConflictError):
                    self._repository.commit(
                        files,
                        sorted(self._old_files - files.keys()),
                        follows=self._follows,
                        message=f"Add a {what} made by scoremode",
                    )
                    self._is_complete = True
                    return replace(run, path=str(self.place))
                found = self._existing_run()  # an error if another run was published meanwhile
                if found is not None:
                    return found
        except StorageError as error:
            raise StorageError(f"the run is complete, but {error.message}", fix=f"{error.fix}; {STAYS}") from None
        raise StorageError(f"{self.place} is changed by others all the time", fix=STAYS)

    def release(self) -> None:
        if self._is_complete:
            self._become_copy()
            self._is_complete = False
        super().release()
