"""Loads plug-ins of other packages from entry points: engines, methods, corpora.

Each plug-in is loaded separately. If it fails to import, has a taken name or has the wrong type, it becomes an entry
in ``refused``, and the other plug-ins still work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from scoremode.errors import harmless

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refused:
    """A plug-in that cannot be used."""

    name: str
    package: str
    problem: str  # what is wrong and what to do, in one line

    def __str__(self) -> str:
        return f"{self.name} of the package {self.package}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Plugins(Generic[T]):
    """The plug-ins of a group of entry points."""

    found: dict[str, T]
    refused: tuple[Refused, ...]


def load(group: str, taken: Iterable[str], accept: Callable[[str, Any], T]) -> Plugins[T]:
    """Loads the plug-ins of a group. ``taken`` are built-in names; ``accept`` checks and may convert a loaded object.

    ``accept`` raises ValueError with the reason if it refuses the object.
    """
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=group), key=lambda point: point.name)
    packages = [point.dist.name if point.dist is not None else "?" for point in points]
    plugins: dict[str, T] = {}
    refused: list[Refused] = []
    for point, package in zip(points, packages, strict=True):
        others = [p for o, p in zip(points, packages, strict=True) if o.name == point.name and o is not point]
        if point.name in taken:
            problem = f"'{point.name}' is the name of a built-in; rename it, or uninstall {package}"
        elif others:
            problem = f"the package {others[0]} has the same name; uninstall one of the two"
        else:
            try:
                plugins[point.name] = accept(point.name, point.load())
                continue
            except ValueError as error:
                problem = str(error)
            except Exception as error:  # another package may raise anything
                problem = f"it cannot be imported ({type(error).__name__}: {error}); update or uninstall {package}"
        refused.append(Refused(point.name, package, harmless(" ".join(problem.split())[:300])))
    return Plugins(plugins, tuple(refused))
