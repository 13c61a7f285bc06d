"""Repositories of the Hugging Face hub: hf://datasets/OWNER/NAME[@REVISION][/FOLDER], and models without ``datasets/``.

Files are read through ``huggingface_hub``'s file system. Runs and references are written as one commit: a reader sees
all of their files or none. A commit names the commit that it follows, and the hub refuses it if there is a newer one.
Credentials are the hub's own: a login with ``hf auth login``, or HF_TOKEN. Nothing here takes or keeps one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from scoremode.core.disk.uri import RemotePath
from scoremode.core.hub import explain_hub_error, status_of
from scoremode.errors import InputError, StorageError

KINDS = {"datasets": "dataset", "spaces": "space"}  # by the first part of a path; others are models
LOGIN = "check the name; log in with hf auth login, or set HF_TOKEN to a token that may"


def endpoint() -> str | None:
    """The address of the hub, if HF_ENDPOINT names another one; it is read each time, not only at the first import."""
    return os.environ.get("HF_ENDPOINT") or None


def is_repository(place: RemotePath) -> bool:
    """Is this a place in a repository, where a write is a commit? The hub's buckets are not."""
    return place.scheme == "hf" and place.root != "buckets"


def is_hidden(error: BaseException | None) -> TypeGuard[Exception]:
    """Is not only a file missing, but its repository or revision, or the right to see it?"""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError)


def hub_error(place: RemotePath, doing: str, error: Exception) -> StorageError:
    """The refusal for an error of the hub's client. ``doing`` completes "cannot …", as in "be read"."""
    status = status_of(error)
    if status in (409, 412):  # a commit that does not follow the newest one
        words, fix = "somebody else made a commit meanwhile", "run the same command again"
    elif status in (401, 403):
        words, fix = f"access is denied (HTTP status {status})", LOGIN
    else:
        words, fix = explain_hub_error(error)
    return StorageError(f"{place} cannot {doing}: {words}", fix=fix)


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
            raise InputError(f"{place} does not name a repository", fix="as in hf://datasets/OWNER/NAME")
        name, _, revision = rest[0].partition("@")
        return Repository(place, kind, f"{owner}/{name}", revision or None, "".join(f"{part}/" for part in rest[1:]))

    @contextmanager
    def _asking(self, doing: str) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The hub's client, and the arguments that name the repository; its errors become ours."""
        from huggingface_hub import HfApi

        try:
            yield HfApi(endpoint=endpoint()), {"repo_id": self.name, "repo_type": self.kind}
        except Exception as error:  # the hub's client raises errors of several libraries
            raise hub_error(self.place, doing, error) from None

    def last_commit(self) -> str | None:
        """The id of the newest commit; None if there is no such repository, or if it is hidden from this user."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._asking("be read") as (api, this):
            try:
                return str(api.repo_info(**this, revision=self.revision).sha)
            except RepositoryNotFoundError:
                return None

    def create(self) -> None:
        """Creates the repository, which only its owner sees; StorageError if this user may not."""
        with self._asking("be created") as (api, this):
            api.create_repo(**this, private=True, exist_ok=True)

    def require_writable(self) -> None:
        """Raises StorageError if this user may not write into the repository."""
        with self._asking("be written") as (api, this):
            api.auth_check(**this, write=True)

    def commit(self, files: Mapping[str, Path], removed: Iterable[str], *, follows: str | None, message: str) -> None:
        """Adds and removes files of the folder in one commit; StorageError if the newest commit is not ``follows``.

        Large files that an interrupted attempt has uploaded are not uploaded again.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        changes: list[Any] = [CommitOperationAdd(self.folder + name, str(path)) for name, path in files.items()]
        changes += [CommitOperationDelete(self.folder + name) for name in removed]
        with self._asking("be written") as (api, this):
            api.create_commit(
                **this, operations=changes, commit_message=message, revision=self.revision, parent_commit=follows
            )
