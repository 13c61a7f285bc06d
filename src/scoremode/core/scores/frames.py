"""Results as tables of other libraries: pandas, polars, pyarrow, and whatever reads Arrow streams (DuckDB, …)."""

from __future__ import annotations

from abc import abstractmethod
from importlib import import_module
from typing import Any

from scoremode.core.extensions import PageOffer, offered
from scoremode.errors import OptionError, one_line

WIDEST = 110  # characters of a line of a repr


class ArrowTable:
    """A value that other libraries can read as a table. A subclass gives ``to_arrow``."""

    __slots__ = ()

    @abstractmethod
    def to_arrow(self) -> Any:
        """Returns a ``pyarrow.Table``."""

    def to_pandas(self) -> Any:
        """Returns a ``pandas.DataFrame``. ``df.text == df.top_text`` works: both have the same categories."""
        _library("pandas")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """Returns a ``polars.DataFrame``."""
        return _library("polars").from_arrow(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Returns an Arrow stream by the PyCapsule interface, as ``polars.DataFrame(run)`` asks for it."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str | None:
        """The table that a notebook shows, as HTML. None if no page is known for this class: it shows the ``repr``."""
        page = next((offer for offer in offered(PageOffer) if offer.fits(self)), None)
        return None if page is None else page.load().table(self)


def _library(name: str) -> Any:
    """Imports a library that scoremode does not depend on; OptionError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise OptionError(f"{name} is not installed", fix=f"pip install {name}, or use to_arrow()") from None


def few_lines(*lines: str) -> str:
    """Joins lines for a ``repr``: empty ones are left out, long ones are cut, and control characters are harmless.

    >>> print(few_lines("a run", "", "perplexity 12\\x1b"))
    a run
    perplexity 12�
    """
    shown = (one_line(line) for line in lines if line)
    return "\n".join(line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…" for line in shown)
