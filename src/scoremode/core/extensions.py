"""The wings of the house and what each hands over: the core asks for a kind of thing, never for a wing by its name.

A wing is a folder with a ``wing.py`` that declares ``WING``. The folders themselves are the list: a folder that is
deleted takes its verbs, flags and public names along, and nothing else changes. Engines have a list of their own:
see engine/registry.py. Addresses are ``module:name`` below scoremode; they are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).parents[1]
PACKAGE = __name__.split(".", maxsplit=1)[0]
KINDS = frozenset(
    {
        *("baseline", "candidate-variants", "comparison-layout", "comparison-output", "corpus", "model-method"),
        *("model-names", "notebook", "page", "part", "reference-output", "replicas"),
        *("report-input", "store"),
    }
)
"""The kinds of things that the house asks for; docs/design.md says who asks."""


@dataclass(frozen=True, slots=True)
class Wing:
    """Everything that a wing hands over."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Public names of scoremode, each with its module."""

    verbs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Commands in groups of the help, each with the address of its ``Verb``."""

    abilities: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """What an engine can do for this wing besides scoring: (ability, engine) and the address of what opens it."""

    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses of other values by kind. Who asks for a kind says there what its values are."""

    needs: tuple[str, ...] = ()
    """Folders of wings that it is made of. Where one is missing, this wing is not there either."""

    def __post_init__(self) -> None:
        if unknown := self.offers.keys() - KINDS:
            raise ValueError(f"nobody asks for {', '.join(sorted(unknown))}; KINDS are {', '.join(sorted(KINDS))}")


@cache
def wings() -> tuple[Wing, ...]:
    """All wings whose needs are there, in the order of their folders' names."""
    folders = sorted(path.parent.relative_to(HOUSE) for path in HOUSE.glob("*/*/wing.py"))
    declared = (import_module(".".join((PACKAGE, *folder.parts, "wing"))).WING for folder in folders)
    return tuple(wing for wing in declared if all((HOUSE / folder / "__init__.py").is_file() for folder in wing.needs))


def load(address: str) -> Any:
    """The value at an address."""
    module, _, name = address.partition(":")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)


def offered(kind: str) -> list[Any]:
    """Everything of one kind that the wings offer."""
    if kind not in KINDS:
        raise ValueError(f"{kind} is not one of KINDS")
    return [load(address) for wing in wings() for address in wing.offers.get(kind, ())]


def ability(name: str, engine: str) -> Any | None:
    """What opens an engine for an ability; None if no wing says that the engine has it."""
    addresses = (wing.abilities[name, engine] for wing in wings() if (name, engine) in wing.abilities)
    address = next(addresses, None)
    return None if address is None else load(address)


def public_names() -> dict[str, str]:
    """Public names of wings, each with its module."""
    return {name: module for wing in wings() for name, module in wing.names.items()}


def verbs() -> dict[str, dict[str, str]]:
    """Commands of wings in groups, each with the address of its ``Verb``."""
    groups: dict[str, dict[str, str]] = {}
    for wing in wings():
        for group, commands in wing.verbs.items():
            groups.setdefault(group, {}).update(commands)
    return groups
