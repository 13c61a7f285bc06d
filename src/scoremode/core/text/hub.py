"""Texts from the Hugging Face hub; why a file could not be fetched from it, and what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scoremode.core.installation import pip_install
from scoremode.core.text.files import Row, RowKind, RowsOf, checked_row, kind_of_rows, parquet_rows, text_field
from scoremode.core.text.reachable import offline_if_unreachable
from scoremode.errors import CorpusError, one_line

LOGIN = "accept its terms on its page, then log in with: hf auth login (or set HF_TOKEN)"
NAME = "check the name, give a local folder, or log in with: hf auth login"
PAGE = "check its page on the hub"
FOLDER = "give a local folder"


def wikitext2_from_hub() -> RowsOf:
    """The rows of the test part of WikiText-2."""
    from huggingface_hub import hf_hub_download

    file = ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet")
    try:
        with quiet(), offline_if_unreachable() as reachable:
            path = hf_hub_download(*file, repo_type="dataset")
    except Exception as error:  # the hub client raises many types; all of them mean "no file"
        reason, _ = explain_hub_error(error) if reachable else ("the hub cannot be reached", "")
        raise CorpusError(
            f"wikitext2 could not be fetched from the Hugging Face hub: {reason}",
            fix="give a local copy: --corpus wikitext2:FILE, where FILE is wiki.test.raw or the hub's parquet",
        ) from None
    return lambda: parquet_rows(Path(path), "text")


def require_datasets() -> None:
    """Refuses if the package that reads datasets of the hub is not installed; it is not imported."""
    known = sys.modules["datasets"] if "datasets" in sys.modules else importlib.util.find_spec("datasets")
    if known is None:
        raise CorpusError("--dataset needs the package 'datasets'", fix=pip_install("datasets"))


def hub_dataset(name: str, config: str | None, split: str | None, field: str | None) -> tuple[str, RowKind, RowsOf]:
    """The label, kind and rows of a dataset."""
    require_datasets()
    try:
        with offline_if_unreachable() as reachable:
            from datasets import load_dataset

            rows: Any = load_dataset(name, config, split=split or "test")
    except Exception as error:
        if not reachable:
            raise CorpusError(
                f"dataset {name} is not on this machine, and the Hugging Face hub cannot be reached",
                fix="check the network and HF_ENDPOINT, or save its rows as .jsonl and give --corpus FILE",
            ) from None
        reason = str(error).split("\n")[0][:200]
        raise CorpusError(
            f"dataset {name} could not be loaded ({type(error).__name__}: {reason})",
            fix="check --dataset, --dataset-config and --split, or save its rows as .jsonl and give --corpus FILE",
        ) from None
    if not len(rows):
        raise CorpusError(f"dataset {name} has no rows", fix="choose another --split")
    column = field or text_field(dict(rows[0]), f"dataset {name}")

    def read() -> Iterator[Row]:
        for number, row in enumerate(rows, 1):
            yield checked_row(row, column, f"{name} row {number}")

    label = ":".join(part for part in (name, config, split or "test") if part)
    return label, *kind_of_rows(read, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lets the hub's client print only errors inside the block; restores its verbosity afterwards."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def explain_hub_error(error: Exception) -> tuple[str, str]:
    """What went wrong and what to do about it, for any error that the hub's client raises."""
    from huggingface_hub import constants, errors

    def is_among(kind: type[Exception]) -> bool:
        return any(isinstance(one, kind) for one in causes_of(error))

    # the first match counts: a GatedRepoError is also a RepositoryNotFoundError
    known: tuple[tuple[type[Exception], str, str], ...] = (
        (errors.GatedRepoError, "access to it is restricted (a gated repository)", LOGIN),
        (errors.RepositoryNotFoundError, "there is no repository of that name, or it is private", NAME),
        (errors.RevisionNotFoundError, "the repository has no such revision", PAGE),
        (errors.RemoteEntryNotFoundError, "the repository does not have this file", PAGE),
        (errors.HFValidationError, "this is not a valid name on the hub", "give ORGANIZATION/NAME, or a local folder"),
    )
    for kind, reason, fix in known:
        if is_among(kind):
            return reason, fix
    missing = is_among(errors.LocalEntryNotFoundError)
    if is_among(errors.OfflineModeIsEnabled) or (missing and constants.HF_HUB_OFFLINE):
        return "it is not in the local cache, and offline mode is on", f"unset HF_HUB_OFFLINE, or {FOLDER}"
    status = status_of(error)
    if status is not None:
        return f"the hub answered with HTTP status {status}", f"try again later, or {FOLDER}"
    # recognised by the names of classes, because the client's HTTP library has changed over time
    names = {kind.__name__ for one in causes_of(error) for kind in type(one).__mro__}
    if names & {"ConnectionError", "TimeoutError", "TransportError", "LocalEntryNotFoundError"}:
        return "the hub cannot be reached", f"check the network and HF_ENDPOINT, or {FOLDER}"
    return f"{type(error).__name__}: {one_line(str(error))[:200]}", f"{_setting_to_check(error)}, or {FOLDER}"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then its causes, the innermost last."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status in an error or in its causes."""
    found = (getattr(getattr(one, "response", None), "status_code", None) for one in causes_of(error))
    return next((status for status in found if isinstance(status, int)), None)


def _setting_to_check(error: Exception) -> str:
    """The setting that is probably wrong when the hub's client fails before it asks for a name."""
    if isinstance(error, UnicodeEncodeError):
        return "correct HF_TOKEN: a token has ASCII letters only"
    if isinstance(error, OSError):
        return "set HF_HOME to a folder that can be written"
    if "proxy" in str(error).lower() or type(error).__name__ == "InvalidURL":
        return "correct HTTPS_PROXY, HTTP_PROXY and HF_ENDPOINT"
    return "check the name"
