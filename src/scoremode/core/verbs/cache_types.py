"""Types of the K/V cache: each combination is a candidate of its own, as in

cache_type_k=["f16", "q8_0"], cache_type_v=["f16", "q4_0"]

baseline     k f16 v f16         the first type of each option
candidates   k f16 v q4_0        the same model; candidates that the user names get all four combinations
             k q8_0 v f16
             k q8_0 v q4_0
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from scoremode.core.engine.registry import all_options
from scoremode.core.verbs.compared_models import CompareRequest, short
from scoremode.core.verbs.model import LazyModel
from scoremode.errors import OptionError

T = TypeVar("T")
HINT = "several K/V types of the baseline's model, as in --cache-type-k f16,q8_0"


def combinations(varied: Mapping[str, Sequence[T]]) -> list[dict[str, T]]:
    """All combinations of the values of several settings; that of all first values comes first."""
    return [dict(zip(varied, chosen, strict=True)) for chosen in itertools.product(*varied.values())]


@dataclass(frozen=True, slots=True)
class CacheTypes:
    """Options that name a type of the K/V cache, with the types that were given for each."""

    types: Mapping[str, list[Any]]

    @classmethod
    def asked_for(cls, request: CompareRequest) -> Self | None:
        """Reads the options with several types; None if there are none. Refuses a type that is given twice.

        The baseline has the first type of each, so its own options must not name one.
        """
        flags, types = all_options(), dict[str, list[Any]]()
        for name, value in request.options.items():
            if name not in flags or flags[name][1].details.cache_part is None or not isinstance(value, list | tuple):
                continue
            flag = flags[name][1].flag
            if not value:
                raise OptionError(f"{flag} has no value", fix="give a type")
            twice = next((cache_type for cache_type in value if value.count(cache_type) > 1), None)
            if twice is not None:
                raise OptionError(f"{flag} has {twice} twice", fix="give each type once")
            if (request.baseline_options or {}).get(name) is not None:
                raise OptionError(f"the baseline has the first type of {flag}", fix=f"leave {name} of the baseline out")
            types[name] = list(value)
        return cls(types) if types else None

    def first(self, model: LazyModel) -> LazyModel:
        return model.changed(**{name: each[0] for name, each in self.types.items() if name in model.arguments})

    def of_candidate(self, model: LazyModel, *, is_baseline: bool) -> list[LazyModel]:
        """One candidate for each combination of the types that the model's engine knows.

        Options that cannot work are refused here, before a weight is loaded.
        """
        types, candidates = {name: each for name, each in self.types.items() if name in model.arguments}, []
        for picked in combinations(types):
            label = " ".join(f"{all_options()[name][1].details.cache_part} {value}" for name, value in picked.items())
            name = label if is_baseline else f"{short(model.name)} {label}"
            candidates.append(model.changed(variant=name if types else None, **picked))
            candidates[-1].settings()
        return candidates[1:] if is_baseline else candidates
