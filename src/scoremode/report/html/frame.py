"""The frame of every page: its head, its policy, the links to its sections, the script.

The content security policy allows one script, by its hash, and nothing else. Data for the script are written so that
they cannot become markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from scoremode import __version__
from scoremode.report.html.charts import escaped

NO_TEXT: Mapping[str, Any] = {"views": [], "sensitivity": {}}  # what the script is given if there is no text to show


def frame(
    title: str,
    lead: str,
    sections: Mapping[str, str],
    body: str,
    *,
    data: Mapping[str, Any] = NO_TEXT,
    skip: tuple[str, str],
) -> str:
    """A whole page around its sections. ``lead`` and ``body`` are HTML; ``sections`` are titles by their ids."""
    style, script = asset("report.css"), asset("report.js")
    assert not any(end in script for end in ("</", "<!--")), "the script would end itself"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="scoremode {escaped(__version__)}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy(script))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<title>{escaped(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        f"{_header(title, lead, sections, skip)}<main>{body}</main>\n{_footer()}"
        f'<script type="application/json" id="scoremode-data">{script_json(data)}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """A file from the assets folder, with the line endings that a browser hashes."""
    return files("scoremode.report.html").joinpath("assets", name).read_text("utf-8").replace("\r\n", "\n")


def policy(script: str) -> str:
    """The content security policy: inline style, this one script, embedded images. Nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def script_json(value: Any) -> str:
    """JSON that cannot end its script element or become markup: ASCII, without <, > and &."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _header(title: str, lead: str, sections: Mapping[str, str], skip: tuple[str, str]) -> str:
    links = "".join(f'<a href="#{name}">{label}</a>' for name, label in sections.items())
    themes = "".join(
        f'<button type="button" data-theme-choice="{name}" aria-pressed="{pressed}">{label}</button>'
        for name, label, pressed in (("auto", "Auto", "true"), ("light", "Light", "false"), ("dark", "Dark", "false"))
    )
    return (
        f'<a class="skip" href="#{skip[0]}">Skip to {skip[1]}</a>\n<header><div class="bar">'
        f'<nav aria-label="Sections"><span class="mark-name">scoremode</span>{links}</nav>'
        f'<div class="choice themes" role="group" aria-label="Colours">{themes}</div></div>'
        f'<h1>{escaped(title)}</h1><p class="lead">{lead}</p></header>\n'
    )


def _footer() -> str:
    said = f"Written by scoremode {__version__}. This page loads nothing from the network."
    return f"<footer><p>{escaped(said)}</p></footer>\n"
