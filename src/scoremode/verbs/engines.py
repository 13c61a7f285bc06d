"""``scoremode engines``: what can turn a plan into scores here, and what cannot be used and why."""

from __future__ import annotations

from typing import Any

import msgspec

from scoremode.engines.registry import known_engines, registry


def engines() -> list[dict[str, Any]]:
    """Every engine with its capabilities and options; plug-ins that cannot be used, with what is wrong.

    >>> [engine["name"] for engine in engines() if engine["default"]]
    ['transformers']
    """
    found = [
        {
            "name": name,
            "summary": plugin.summary,
            "default": plugin.is_default,
            "problem": plugin.problem(),
            "package": type(plugin).__module__.split(".")[0],
            "capabilities": msgspec.to_builtins(plugin.capabilities),
            "options": [option.flag for option in plugin.options.known().values()],
        }
        for name, plugin in known_engines().items()
    ]
    refused = [
        {"name": r.name, "summary": None, "default": False, "problem": r.problem, "package": r.package}
        for r in registry().refused
    ]
    return found + refused
