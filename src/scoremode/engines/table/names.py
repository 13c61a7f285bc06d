"""The tables that can be named."""

from __future__ import annotations

from scoremode.errors import ModelError, did_you_mean

TABLES = ("uniform", "successor")


def require_table(name: str) -> None:
    """Refuse a table that is not known."""
    if name not in TABLES:
        raise ModelError(f"there is no table '{name}'", fix=did_you_mean(name, TABLES))
