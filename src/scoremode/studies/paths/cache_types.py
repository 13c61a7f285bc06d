"""Several types of the K/V cache: each combination of them is a candidate of its own.

cache_type_k=["f16", "q8_0"], cache_type_v=["f16", "q4_0"]

baseline     k f16 v f16         the first type of each option
candidates   k f16 v q4_0        the same model; candidates that the user names get all four combinations
             k q8_0 v f16
             k q8_0 v q4_0
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from scoremode.core.engine.registry import all_options
from scoremode.core.verbs.compared_models import CompareRequest, ModelSettings, short
from scoremode.errors import OptionError
from scoremode.studies.paths.variation import combinations


@dataclass(frozen=True, slots=True)
class CacheTypes:
    """Options that name a type of the K/V cache, with the types that were given for each."""

    types: Mapping[str, list[Any]]

    hint: ClassVar[str] = "several K/V types of the baseline's model, as in --cache-type-k f16,q8_0"

    @classmethod
    def asked_for(cls, request: CompareRequest) -> Self | None:
        """Reads the options with several types; None if there are none. Refuses a type that is given twice.

        The baseline has the first type of each, so its own options must not name one.
        """
        known, found = all_options(), dict[str, list[Any]]()
        for name, value in request.options.items():
            if name not in known or known[name][1].details.cache_part is None or not isinstance(value, list | tuple):
                continue
            flag = known[name][1].flag
            if not value:
                raise OptionError(f"{flag} has no value", fix="give a type")
            twice = next((one for one in value if value.count(one) > 1), None)
            if twice is not None:
                raise OptionError(f"{flag} has {twice} twice", fix="give each type once")
            if (request.baseline_options or {}).get(name) is not None:
                raise OptionError(f"the baseline has the first type of {flag}", fix=f"leave {name} of the baseline out")
            found[name] = list(value)
        return cls(found) if found else None

    def of_baseline(self, model: ModelSettings) -> ModelSettings:
        return _with_types(model, {name: each[0] for name, each in self.types.items()})

    def of_candidate(self, model: ModelSettings, *, is_baseline: bool) -> list[ModelSettings]:
        """One candidate for each combination of the types that the model's engine knows.

        Options that cannot work are refused here, before a weight is loaded.
        """
        own, found = {name: each for name, each in self.types.items() if name in model.options}, []
        for picked in combinations(own):
            words = " ".join(f"{all_options()[name][1].details.cache_part} {one}" for name, one in picked.items())
            name = words if is_baseline else f"{short(model.model)} {words}"
            found.append(replace(_with_types(model, picked), name=name if own else None))
            with closing(found[-1].prepare()) as lazy:
                lazy.settings()
        return found[1:] if is_baseline else found


def _with_types(model: ModelSettings, picked: Mapping[str, Any]) -> ModelSettings:
    return replace(model, options={name: picked.get(name, value) for name, value in model.options.items()})
