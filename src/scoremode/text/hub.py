"""Explain why a file could not be fetched from the Hugging Face hub, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from scoremode.errors import one_line

LOGIN = "accept its terms on its page, then log in with: hf auth login (or set HF_TOKEN)"
NAME = "check the name, give a local folder, or log in with: hf auth login"
PAGE = "check its page on the hub"
FOLDER = "give a local folder"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show only errors of the hub's client inside the block; restore its verbosity afterwards."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def explain_hub_error(error: Exception) -> tuple[str, str]:
    """What went wrong and what to do about it, for any error that the hub's client raises."""
    from huggingface_hub import errors

    chain = _chain(error)
    # the first match counts: a GatedRepoError is also a RepositoryNotFoundError
    known: tuple[tuple[type[Exception], str, str], ...] = (
        (errors.GatedRepoError, "access to it is restricted (a gated repository)", LOGIN),
        (errors.RepositoryNotFoundError, "there is no repository of that name, or it is private", NAME),
        (errors.RevisionNotFoundError, "the repository has no such revision", PAGE),
        (errors.RemoteEntryNotFoundError, "the repository does not have this file", PAGE),
        (errors.HFValidationError, "this is not a valid name on the hub", "give ORGANIZATION/NAME, or a local folder"),
    )
    for kind, reason, fix in known:
        if any(isinstance(e, kind) for e in chain):
            return reason, fix
    if _is_offline(chain):
        return "it is not in the local cache, and offline mode is on", f"unset HF_HUB_OFFLINE, or {FOLDER}"
    status = next((s for e in chain if (s := getattr(getattr(e, "response", None), "status_code", None))), None)
    if status is not None:
        return f"the hub answered with HTTP status {status}", f"try again later, or {FOLDER}"
    if any(_is_network(e) for e in chain):
        return "the hub cannot be reached", f"check the network and HF_ENDPOINT, or {FOLDER}"
    return f"{type(error).__name__}: {one_line(str(error))[:200]}", f"check the name, or {FOLDER}"


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and its causes, the innermost last."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _is_offline(chain: list[BaseException]) -> bool:
    from huggingface_hub import constants, errors

    missing = any(isinstance(e, errors.LocalEntryNotFoundError) for e in chain)
    return any(isinstance(e, errors.OfflineModeIsEnabled) for e in chain) or (missing and constants.HF_HUB_OFFLINE)


def _is_network(error: BaseException) -> bool:
    """Recognised by the class name, because the client's HTTP library has changed over time."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"ConnectionError", "TimeoutError", "TransportError", "LocalEntryNotFoundError"})
