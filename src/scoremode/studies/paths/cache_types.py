"""Several types of the K/V cache: each combination of them is a candidate of its own.

cache_type_k=["f16", "q8_0"], cache_type_v=["f16", "q4_0"]

baseline     k f16 v f16         the first type of each option
candidates   k f16 v q4_0        the same model; candidates that the user names get all four combinations
             k q8_0 v f16
             k q8_0 v q4_0
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from scoremode.core.engine.registry import all_options
from scoremode.core.store import runs
from scoremode.core.verbs.sides import CompareRequest, Folders, ModelSettings, assign_engines, short
from scoremode.errors import InputError, OptionError
from scoremode.studies.kld.file import is_kld

Types = dict[str, list[Any]]
"""Options that name a type of the K/V cache -> the types that were given."""


def sides_in_types(
    baseline: str, named: Sequence[str], request: CompareRequest, folders: Folders
) -> tuple[ModelSettings | None, tuple[str, ...], dict[str, ModelSettings]]:
    """Returns the settings of the baseline, the names of all candidates, and the settings of those that are models.

    Several types of the K/V cache make several candidates of each model. If no candidate is named, they are types of
    the baseline's own model. Candidates that cannot be told apart are refused.
    """
    types = several_types(request.options, request.baseline_options)
    is_alone = bool(types) and not named and not (is_kld(baseline) or runs.is_run(baseline))
    given = [baseline] if is_alone else named
    if not given:
        raise InputError(
            "CANDIDATE is missing",
            fix="name a model or a run, as in scoremode compare BASELINE CANDIDATE --corpus FILE, or several K/V types "
            "of the baseline's model, as in --cache-type-k f16,q8_0",
        )
    folders.require_candidates(given)
    its, models = assign_engines(baseline, given, request)
    if not types:
        return its, tuple(named), models
    variants = {name: in_each_type(model, types, is_alone=is_alone) for name, model in models.items()}
    found = [one for name in given for one in ([v.called for v in variants[name]] if name in variants else [name])]
    folders.require_candidates(found)
    if its is not None:
        its = replace(its, options=_chosen(its.options, [each[0] for each in types.values()], types))
    return its, tuple(found), {one.called: one for each in variants.values() for one in each}


def several_types(options: Mapping[str, Any], of_baseline: Mapping[str, Any] | None = None) -> Types:
    """Returns the options for which several types of the K/V cache were given; refuses a type that is given twice.

    ``of_baseline`` are options of the baseline alone. They must not name a type then: the baseline has the first one.
    """
    known, found = all_options(), Types()
    for name, value in options.items():
        if name not in known or known[name][1].details.cache_part is None or not isinstance(value, list | tuple):
            continue
        flag = known[name][1].flag
        if not value:
            raise OptionError(f"{flag} has no value", fix="give a type")
        twice = next((one for one in value if value.count(one) > 1), None)
        if twice is not None:
            raise OptionError(f"{flag} has {twice} twice", fix="give each type once")
        if (of_baseline or {}).get(name) is not None:
            raise OptionError(f"the baseline has the first type of {flag}", fix=f"leave {name} of the baseline out")
        found[name] = list(value)
    return found


def in_each_type(model: ModelSettings, types: Types, *, is_alone: bool) -> list[ModelSettings]:
    """Returns the candidates that one model becomes: one for each combination of the types that its engine knows.

    A model that ``is_alone`` is the baseline's own: there, the first combination is the baseline. Options that cannot
    work are refused here, before a weight is loaded.
    """
    own = {name: each for name, each in types.items() if name in model.options}
    found = []
    for types_here in itertools.product(*own.values()):
        words = " ".join(map(_words, own, types_here))
        name = words if is_alone else f"{short(model.model)} {words}"
        found.append(replace(model, options=_chosen(model.options, types_here, own), name=name if own else None))
    for one in found:
        with closing(one.prepare()) as lazy:
            lazy.settings()
    return found[1:] if is_alone else found


def _chosen(options: Mapping[str, Any], chosen: Sequence[Any], types: Types) -> dict[str, Any]:
    """Returns the options with one chosen type for each of ``types``, where the options have it."""
    picked = dict(zip(types, chosen, strict=True))
    return {name: picked.get(name, value) for name, value in options.items()}


def _words(option: str, chosen: Any) -> str:
    return f"{all_options()[option][1].details.cache_part} {chosen}"
