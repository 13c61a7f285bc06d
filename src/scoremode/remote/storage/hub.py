"""Repositories of the Hugging Face hub: hf://datasets/OWNER/NAME[@REVISION][/FOLDER], and models without ``datasets/``.

Files are read through ``huggingface_hub``'s file system. Runs and references are written as one commit: a reader sees
all of their files or none. A commit names the commit that it follows, and the hub refuses it if there is a newer one.
Credentials are the hub's own: a login with ``hf auth login``, or HF_TOKEN. Nothing here takes or keeps one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from scoremode.core.disk.uri import RemotePath
from scoremode.core.hub import causes_of, status_of
from scoremode.errors import InputError, StorageError

T = TypeVar("T")

KINDS = {"datasets": "dataset", "spaces": "space"}  # by the first part of a path; others are models
BUCKETS = "buckets"
EXAMPLE = "as in hf://datasets/OWNER/NAME"
LOGIN = "check the name; log in with hf auth login, or set HF_TOKEN to a token that may"
SECONDS = 10.0  # for the first answer
HIDDEN = "there is no such repository, or you may not see it"
MISSING = {"RepositoryNotFoundError", "GatedRepoError", "BucketNotFoundError"}
UNREACHABLE = {"ConnectionError", "TimeoutError", "TransportError"}
CONFLICT = (409, 412)  # statuses of a commit that does not follow the newest one


def endpoint() -> str | None:
    """The address of the hub, if HF_ENDPOINT names another one; it is read each time, not only at the first import."""
    return os.environ.get("HF_ENDPOINT") or None


def is_repository(place: RemotePath) -> bool:
    """Is this a place in a repository, where a write is a commit? The hub's buckets are not."""
    return place.scheme == "hf" and place.root != BUCKETS


@dataclass(frozen=True, slots=True)
class Repository:
    place: RemotePath
    kind: str
    name: str  # OWNER/NAME
    revision: str | None
    folder: str  # inside the repository, with a slash at its end unless it is empty

    @staticmethod
    def of(place: RemotePath) -> Repository:
        """The repository that a place names; InputError if its name is incomplete."""
        parts = place.path.split("/")
        kind = KINDS.get(parts[0], "model")
        owner, *rest = parts[1:] if parts[0] in KINDS else parts
        if not rest:
            raise InputError(f"{place} does not name a repository", fix=EXAMPLE)
        name, _, revision = rest[0].partition("@")
        return Repository(place, kind, f"{owner}/{name}", revision or None, "".join(f"{part}/" for part in rest[1:]))

    @property
    def _about(self) -> dict[str, Any]:
        return {"repo_id": self.name, "repo_type": self.kind}

    def last_commit(self) -> str | None:
        """The id of the newest commit; None if there is no such repository, or if it is hidden from this user."""
        try:
            found = self._ask(
                "be read", lambda api: api.repo_info(**self._about, revision=self.revision, timeout=SECONDS)
            )
        except MissingRepositoryError:
            return None
        return str(found.sha)

    def create(self) -> None:
        """Creates the repository, which only its owner sees; StorageError if this user may not."""
        self._ask("be created", lambda api: api.create_repo(**self._about, private=True, exist_ok=True))

    def require_writable(self) -> None:
        """Raises StorageError if this user may not write into the repository."""
        self._ask("be written", lambda api: api.auth_check(**self._about, write=True))

    def commit(self, files: Mapping[str, Path], removed: Iterable[str], *, follows: str | None, message: str) -> None:
        """Adds and removes files of the folder in one commit; StorageError if the newest commit is not ``follows``.

        Large files that an interrupted attempt has uploaded are not uploaded again.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        changes: list[Any] = [CommitOperationAdd(self.folder + name, str(path)) for name, path in files.items()]
        changes += [CommitOperationDelete(self.folder + name) for name in removed]
        self._ask(
            "be written",
            lambda api: api.create_commit(
                **self._about, operations=changes, commit_message=message, revision=self.revision, parent_commit=follows
            ),
        )

    def _ask(self, doing: str, work: Callable[[Any], T]) -> T:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would mix with ours
        try:
            return work(HfApi(endpoint=endpoint()))
        except Exception as error:  # the hub's client raises errors of several libraries
            raise hub_error(self.place, doing, error) from None


class MissingRepositoryError(StorageError):
    """There is no such repository, or this user may not see it."""


def hub_error(place: RemotePath, doing: str, error: BaseException) -> StorageError:
    """The refusal for an error of the hub's client. ``doing`` completes "cannot …", as in "be read"."""
    names = {kind.__name__ for one in causes_of(error) for kind in type(one).__mro__}
    status, may = status_of(error), f"{LOGIN} {'read' if doing == 'be read' else 'write'} it"
    is_hidden = bool(names & MISSING) and doing != "be created"
    known = (  # the first that is true counts
        ("OfflineModeIsEnabled" in names, "offline mode is on", "unset HF_HUB_OFFLINE"),
        ("HFValidationError" in names, "this is not a valid name on the hub", EXAMPLE),
        ("RevisionNotFoundError" in names, "the repository has no such revision", "check the name after the @"),
        (is_hidden, HIDDEN, may),
        (status in CONFLICT, "somebody else made a commit meanwhile", "run the same command again"),
        (status in (401, 403), f"access is denied (HTTP status {status})", may),
        (status is not None, f"the hub answered with HTTP status {status}", "try again later"),
        (bool(names & UNREACHABLE), "the hub cannot be reached", "check the network and HF_ENDPOINT"),
        (True, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", "try again later"),
    )
    words, fix = next((words, fix) for is_it, words, fix in known if is_it)
    kind = MissingRepositoryError if words == HIDDEN else StorageError
    return kind(f"{place} cannot {doing}: {words}", fix=fix)


def is_missing_file(error: BaseException) -> bool:
    """Is only the file missing, and not its repository or the right to see it?"""
    more = {"RevisionNotFoundError", "HFValidationError"}
    return isinstance(error, FileNotFoundError) and not (MISSING | more) & {
        type(one).__name__ for one in causes_of(error)
    }
