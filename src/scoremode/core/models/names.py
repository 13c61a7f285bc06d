"""Names of models that are not paths of this machine. The user's name stays everywhere."""

from __future__ import annotations

from scoremode.core.arguments import user_path
from scoremode.core.extensions import ModelNames, NamesOffer, offered

EMBEDDED = "smollm2-135m"  # the model that needs no network, see embedded.py


def reader_of(name: str) -> ModelNames | None:
    """What reads a name; None if it is a path, or the name of a checkpoint."""
    if user_path(name).exists():
        return None
    return next((offer.load() for offer in offered(NamesOffer) if offer.claims(name)), None)
