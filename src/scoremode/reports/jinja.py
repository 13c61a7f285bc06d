"""Templates for pages and cards: those in the folder beside this file, and those in the folder of each wing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from markupsafe import Markup

from scoremode.core.extensions import HOUSE

if TYPE_CHECKING:
    import jinja2


def environment(escape: Callable[[object], Markup]) -> jinja2.Environment:
    """Finds a template by its name, whichever folder has it; ``escape`` is applied to every value that it writes."""
    import jinja2

    folders = sorted(path for depth in ("*", "*/*") for path in HOUSE.glob(f"{depth}/templates"))
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,  # nothing that ``escape`` has made
        finalize=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
