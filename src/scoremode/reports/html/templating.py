"""Pages are Jinja templates. Every value in them is escaped.

Texts, names and paths come from untrusted files. Characters in them that hide or reorder text are made visible first.
Data for the script are written so that they cannot become markup. The content security policy allows one script, by its
hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from scoremode.core.disk.manifests import digest_of, sealed_text
from scoremode.reports.html.drawing import SERIES, line_style, mark_path
from scoremode.reports.jinja import environment
from scoremode.reports.table import Cell, Column, Facts, Note, Table, capital, number
from scoremode.reports.text import counted, middle_cut
from scoremode.values import rounded, usable
from scoremode.version import __version__

if TYPE_CHECKING:
    import jinja2

NO_TEXT: Mapping[str, Any] = {"views": [], "sensitivity": {}}  # data for the script if there is no text to show

# characters that reorder or hide the text around them; joiners are kept, scripts and emoji need them
BIDIRECTIONAL = {"\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
JOINERS = {"\u200c", "\u200d"}
UNSEEN = {"Cc", "Cs", "Cn", "Zl", "Zp"}


def visible(text: object) -> str:
    """Text with every character replaced that is invisible, reorders its surroundings or cannot be encoded as UTF-8.

    >>> visible("a" + chr(0) + chr(0x202E) + "b")
    'a␀⟨U+202E⟩b'
    """
    string = str(text)
    if string.isascii() and string.isprintable():
        return string
    return "".join(map(_visible_character, string))


def _visible_character(c: str) -> str:
    if c in "\n\t" or c in JOINERS:
        return c
    if ord(c) < 0x20:
        return chr(0x2400 + ord(c))
    hidden = c in BIDIRECTIONAL or unicodedata.category(c) in UNSEEN or c in "\ufeff\u200b\u2060"
    return f"⟨U+{ord(c):04X}⟩" if hidden else c


def escaped(text: object) -> Markup:
    """Escapes untrusted text for HTML, SVG or a quoted attribute; ``Markup`` stays as it is."""
    return text if isinstance(text, Markup) else escape(visible(text))


def cell_html(column: Column, cell: Cell) -> Markup:
    """The number and its error, with the minus sign of typography."""
    text, error = (part.replace("-", "−") if column.number else part for part in (cell.text, cell.error))
    return escaped(text) + (Markup(' <span class="error">{}</span>').format(escaped(error)) if error else "")


def number_html(value: Any, stderr: Any = None, *, percent: bool = False) -> Markup:
    cell = number(value, stderr, percent=percent)
    return cell_html(Column("", [cell]), cell)


@cache
def _environment() -> jinja2.Environment:
    made = environment(escaped)
    made.filters["px"] = lambda value: f"{value:.1f}".removesuffix(".0")
    made.filters["capital"] = capital
    made.filters["sentence"] = lambda text: capital(text) + ("" if text.endswith((".", "…")) else ".")
    made.tests["table"] = lambda block: isinstance(block, Table)
    made.tests["facts"] = lambda block: isinstance(block, Facts)
    made.tests["note"] = lambda block: isinstance(block, Note)
    made.globals.update(number=number_html, cell_html=cell_html)
    made.globals.update(rounded=rounded, usable=usable, counted=counted, middle_cut=middle_cut)
    made.globals.update(SERIES=SERIES, line_style=line_style, mark_path=mark_path, version=__version__)
    return made


def fill(template: str, **values: Any) -> Markup:
    """Fills a template with values, each of them escaped."""
    return Markup(_environment().get_template(template).render(values))


def fill_page(template: str, *, about: Iterable[object], data: Mapping[str, Any] = NO_TEXT, **values: Any) -> str:
    """Fills the template of a whole page, with its style, its script and the script's data, and seals it.

    ``about`` says of each result what was asked, of which models: JSON that is equal if it is measured again.
    """
    style, script = asset("report.css"), asset("report.js")
    assert not any(end in script for end in ("</", "<!--")), "the script would end itself"
    markup = {"style": Markup(style), "script": Markup(script), "data": Markup(script_json(data))}
    html = str(fill(template, policy=policy(script), **markup, **values))
    return sealed_text(html.rstrip("\n") + "\n", map(digest_of, about), ("<!-- ", " -->"))


def asset(name: str) -> str:
    """The style sheet or the script, with the line endings that a browser hashes."""
    return files(__package__).joinpath("templates", name).read_text("utf-8").replace("\r\n", "\n")


def policy(script: str) -> str:
    """The content security policy: inline style, this one script, embedded images, and nothing from the network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def script_json(value: Any) -> str:
    """JSON that cannot end its script element or become markup: ASCII, without <, > and &."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
