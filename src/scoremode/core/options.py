"""Fields that are options: one declaration each, from which flags, help, Python arguments, docs and checks are made.

The options of engines (engine/options.py), of a question (plan/question.py) and of replicas are such fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from scoremode.core.typed import checked
from scoremode.errors import OptionError

Kind = Literal["str", "int", "float", "bool", "Pairs"]
Plain = str | float | bool | list[Any] | dict[str, Any] | None
Pairs = tuple[tuple[str, Plain], ...]
"""Names and values: ``--engine-arg NAME=VALUE``, repeated; in Python also a dictionary."""
TYPES: dict[Kind, Any] = {"str": str, "int": int, "float": float, "bool": bool, "Pairs": Mapping[str, Plain] | Pairs}


@dataclass(frozen=True, slots=True)
class Details:
    """Details of an option in addition to its name, type and default."""

    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    aliases: Mapping[str, str] | None = None  # other spellings of choices; the choice itself is stored
    above: float | None = None  # numbers must be larger
    at_most: float | None = None
    flag: str | None = None  # if it is not the name with dashes
    older_flags: tuple[str, ...] = ()  # still understood
    in_identity: bool = True  # may it change a score?
    identity_name: str | None = None  # if runs that were kept earlier know it by another name
    path: str | None = None  # the only path on which it is read: see core/plan/path.py; None: it is read on all of them
    cache_part: str | None = None  # of a type of the K/V cache: "k", "v" or "kv"; ``compare`` takes several types
    may_vary: bool = True  # is it worth comparing values of it, as ``scoremode paths --vary`` does?
    group: str | None = None  # heading in --help; None: the engine's own
    repeated: bool = False  # may the flag be given again?
    instead_of_flag: str | None = None  # of a secret, which only Python may pass: what to do on the command line


def option(help: str, **details: Any) -> Any:
    """A field that is an option; ``details`` are the other fields of Details."""
    return field(default=None, metadata={"option": Details(help, **details)})


@dataclass(frozen=True, slots=True)
class KnownOption:
    """One option with its name, type and details, for the command line, the docs and checks."""

    name: str
    kind: Kind
    details: Details

    @property
    def flag(self) -> str:
        return self.details.flag or "--" + self.name.replace("_", "-")

    def type_in_python(self) -> str:
        """The type that its values have in Python, as it is written, without None."""
        kind = {"Pairs": "Mapping[str, Plain] | Pairs"}.get(self.kind, self.kind)
        return f"{kind} | Sequence[{kind}]" if self.details.cache_part else kind

    def checked(self, value: Any) -> Any:
        """The value as the engine gets it; OptionError if it is not allowed."""
        d = self.details
        if d.cache_part is not None and isinstance(value, list | tuple):
            raise OptionError(
                f"{self.flag} has {len(value)} values, and only compare takes several types of the K/V cache",
                fix=f"give one, or use scoremode compare MODEL {self.flag} {','.join(map(str, value[:2]))}",
            )
        value = checked(self.name, value, TYPES[self.kind])
        if self.kind == "Pairs":
            return tuple(value.items()) if isinstance(value, Mapping) else value
        if self.kind == "str":
            value = (d.aliases or {}).get(value, value)
        if d.choices is not None and value not in d.choices:
            listed = " or ".join(d.choices) if len(d.choices) < 4 else f"one of {', '.join(d.choices)}"
            raise OptionError(f"{self.flag} {value} is not known", fix=f"give {listed}")
        if (d.above is not None and not value > d.above) or (d.at_most is not None and not value <= d.at_most):
            raise OptionError(f"{self.flag} {value} is not {self.bounds()}", fix="give another number")
        return value

    def bounds(self) -> str:
        """The numbers that are allowed, in words."""
        d = self.details
        low = f"above {d.above}" if d.above is not None else ""
        high = f"up to {d.at_most}" if d.at_most is not None else ""
        return " and ".join(part for part in (low, high) if part)


def options_of(declared: type) -> dict[str, KnownOption]:
    """Every option that a dataclass declares, by its name."""
    found = {}
    for f in fields(declared):
        details, kind = f.metadata["option"], str(f.type).partition(" | ")[0]
        assert kind in TYPES or details.repeated, f"{declared.__name__}.{f.name} has the type {f.type}"
        found[f.name] = KnownOption(f.name, kind if kind in TYPES else "str", details)
    return found


def chosen_of(value: Any) -> dict[str, Any]:
    """The options that were chosen, by name. A switch that is False counts as not chosen."""
    values = {f.name: getattr(value, f.name) for f in fields(value)}
    return {name: value for name, value in values.items() if value is not None and value is not False}
