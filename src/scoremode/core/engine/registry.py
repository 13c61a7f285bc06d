"""Finds engines by name: the folders of this package, which declare a PLUGIN, and the plug-ins of other packages.

Nothing is opened here, and nothing heavy is imported: a question that no engine can answer is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from scoremode import errors
from scoremode.core import entry_points, extensions
from scoremode.core.arguments import user_path
from scoremode.core.engine.options import KnownOption, Options
from scoremode.core.engine.plugin import CONTRACT, Capabilities, EnginePlugin, Work
from scoremode.core.entry_points import Plugins
from scoremode.core.plan.path import PREFILL
from scoremode.errors import EngineError, ModelError, OptionError, did_you_mean

if TYPE_CHECKING:
    from scoremode.core.engine.base import Engine
    from scoremode.core.models.subject import Subject

GROUP = "scoremode.engines"


@cache
def registry() -> Plugins[EnginePlugin]:
    """All engines that can be used here, by name, and the plug-ins that were refused."""
    # an engine of our own is a folder here whose ``__init__`` declares it
    folders = sorted(path.parent.name for path in extensions.HOUSE.glob("engines/*/__init__.py"))
    found: list[EnginePlugin] = [extensions.load(f"engines.{name}:PLUGIN")() for name in folders]
    ours = {plugin.name: plugin for plugin in found}
    theirs = entry_points.load(GROUP, ours, _accepted)
    engines = {**ours, **theirs.found}
    for plugin in engines.values():
        errors.switches.update(name for name, option in plugin.options.known().items() if option.kind == "bool")
    return Plugins(engines, theirs.refused)


def _accepted(name: str, loaded: Any) -> EnginePlugin:
    if not (isinstance(loaded, type) and issubclass(loaded, EnginePlugin)):
        raise ValueError("it is not a subclass of scoremode.core.engine.plugin.EnginePlugin; ask its author to fix it")
    written_for = loaded.__dict__.get("contract")
    if written_for != CONTRACT:
        raise ValueError(
            f"it was written for version {written_for} of the engine contract, and this is version {CONTRACT}; "
            "update it, or install the scoremode that it was written for"
        )
    if getattr(loaded, "name", None) != name:
        raise ValueError(f"its entry point is named '{name}' but the engine itself '{getattr(loaded, 'name', None)}'")
    return loaded()


def known_engines() -> dict[str, EnginePlugin]:
    return registry().found


def find_engine(name: str) -> EnginePlugin:
    """The engine with a name, or at an address; OptionError if there is none."""
    if name in known_engines():
        return known_engines()[name]
    for plugin in known_engines().values():
        if name.lower().startswith(plugin.addresses):
            found = copy(plugin)
            found.address = name
            return found
    for refused in registry().refused:
        if refused.name == name:
            raise OptionError(f"the engine '{name}' cannot be used", fix=f"{refused}")
    raise OptionError(f"there is no engine '{name}'", fix=did_you_mean(name, known_engines()))


def _owner(model: str) -> EnginePlugin | None:
    """The engine that claims the model's name as its own; None if no engine does."""
    return next((plugin for plugin in known_engines().values() if plugin.claims(model)), None)


def choose_engine(wanted: str | None, model: str) -> EnginePlugin:
    """The wanted engine, else the one that claims the model's name, else the default; an error if it does not fit."""
    if wanted is None or wanted in known_engines():  # a server's models may have any name
        _refuse_what_is_no_name(model)
    owner = _owner(model)
    natural = owner or next(plugin for plugin in known_engines().values() if plugin.is_default)
    chosen = natural if wanted is None else find_engine(wanted)
    if chosen.addresses and chosen.address is None:
        raise OptionError(
            f"the {chosen.name} engine needs an address", fix=f"give --engine {chosen.addresses[0]}HOST:PORT"
        )
    fits = chosen.claims(model) or (owner is None and chosen.opens_checkpoints)
    if not fits:
        raise OptionError(f"the {chosen.name} engine cannot score {model}", fix=f"use --engine {natural.name}")
    return chosen


def _refuse_what_is_no_name(model: str) -> None:
    """Refuses an address, which --engine takes, and a pattern, which candidates of ``compare`` may be."""
    if model.lower().startswith(tuple(start for plugin in known_engines().values() for start in plugin.addresses)):
        page = re.match(r"https://(?:huggingface|hf)\.co/([\w.-]+/[\w.-]+)", model)
        fix = f"its name is {page[1]}" if page else f"give the model's name there, and --engine {model}"
        raise ModelError(f"{model} is an address, not a model", fix=fix)
    if "*" in model and not user_path(model).exists():  # other signs of patterns are in names of files on the hub
        fix = f"name one; scoremode compare BASELINE '{model}' takes several"
        raise ModelError(f"'{model}' is a pattern, and one model is wanted", fix=fix)


def engine_for(wanted: str | None, model: str) -> EnginePlugin:
    """The engine for one of several models: the wanted one if it can score the model, else the one that claims it.

    So ``--engine`` chooses among engines for checkpoints, and a file that only one engine opens goes to that engine.
    """
    try:
        return choose_engine(wanted, model)
    except OptionError:
        owner = _owner(model)
        if owner is None or wanted not in known_engines():
            raise
        return owner


def share_options(plugin: EnginePlugin, all_used: Sequence[EnginePlugin], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are meant for ``plugin``, one of the engines in ``all_used``.

    An option is meant for those that take its value, as in ``--kv-cache-dtype fp8``; if none does, for those that have
    it; if none has it, for all. They refuse it later.
    """

    def meant_for(name: str, value: Any) -> Sequence[EnginePlugin]:
        having = [engine for engine in all_used if name in engine.options.known()]
        return [engine for engine in having if _refusal(engine, name, value) is None] or having or all_used

    return {name: value for name, value in given.items() if plugin in meant_for(name, value)}


def _refusal(plugin: EnginePlugin, name: str, value: Any) -> OptionError | None:
    """Why an engine does not take a value for an option that it has; None if it does."""
    try:
        plugin.options.known()[name].checked(value)
    except OptionError as error:
        return error
    return None


def read_options(plugin: EnginePlugin, given: Mapping[str, Any]) -> Any:
    """Converts options to the engine's dataclass. If the engine lacks one, the error names the engines that have it."""
    chosen = {name: value for name, value in given.items() if value is not None}
    known = plugin.options.known()
    for name, value in chosen.items():
        if name not in known and value is not False:
            raise _not_an_option(plugin, name)
    return plugin.options.of({name: value for name, value in chosen.items() if name in known})


def _not_an_option(plugin: EnginePlugin, name: str) -> OptionError:
    everywhere = all_options()
    if name not in everywhere:
        return OptionError(f"there is no option {name}", fix=did_you_mean(name, everywhere))
    flag = everywhere[name][1].flag
    others = [other for other, engine in known_engines().items() if name in engine.options.known()]
    fix = f"leave {flag} out; it is an option of --engine {' or '.join(others)}"
    return OptionError(f"{flag} does not apply to the {plugin.name} engine", fix=fix)


def all_options() -> dict[str, tuple[list[str], KnownOption]]:
    """All options of all engines by name: the engines that have it, and the option as the default engine declares it.

    If engines allow different values, the option here allows any, and its help has what each engine says.
    """
    declared: dict[str, dict[str, KnownOption]] = {}
    for engine, plugin in sorted(known_engines().items(), key=lambda item: not item[1].is_default):
        for name, option in plugin.options.known().items():
            declared.setdefault(name, {})[engine] = option
    return {name: ([*own], _shared(own)) for name, own in declared.items()}


def _shared(own: Mapping[str, KnownOption]) -> KnownOption:
    """One option for all engines that have it."""
    first, *others = own.values()
    if all(option.details.choices == first.details.choices for option in others):
        return first
    words = "; ".join(f"{engine}: {_with_choices(option)}" for engine, option in own.items())
    return replace(first, details=replace(first.details, help=words, choices=None))


def _with_choices(option: KnownOption) -> str:
    choices = option.details.choices
    return option.details.help + (f" ({', '.join(choices)})" if choices else "")


def check_values(given: Mapping[str, Any]) -> None:
    """Refuses a value that no engine accepts for its option, before it is known which engine will be asked.

    Of several types of the K/V cache, which ``compare`` takes, each is checked.
    """
    each = [(name, one) for name, value in given.items() for one in (value if isinstance(value, list) else [value])]
    for name, one in each:
        refusals = [_refusal(p, name, one) for p in known_engines().values() if name in p.options.known()]
        if refusals and refusals[0] is not None and None not in refusals:
            raise refusals[0]


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """An engine, its options and the model that it will score; nothing is opened yet."""

    plugin: EnginePlugin
    options: Options
    subject: Subject

    def settings(self) -> dict[str, Any]:
        """The settings that the engine would use: a part of a run's identity."""
        return self.plugin.settings(self.subject, self.options)


def choose(
    model: str,
    engine: str | EnginePlugin | None = None,
    given: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> ChosenEngine:
    """Chooses the engine for a model and reads its options; refuses here what can be refused before it is opened."""
    plugin = engine if isinstance(engine, EnginePlugin) else choose_engine(engine, model)
    options = read_options(plugin, given or {})
    return ChosenEngine(plugin, options, plugin.subject(model, options, tokenizer))


def open_engine(chosen: ChosenEngine, work: Work) -> Engine:
    """Start an engine on a model: the one place where weights are loaded."""
    return chosen.plugin.open(chosen.subject, chosen.options, work)


def require_path(plugin: EnginePlugin, path: str | None, fix: str = "leave --path out") -> None:
    """Refuses a path by which an engine cannot feed its model, before it is opened."""
    if path is not None and path not in plugin.able().paths:
        others = _named(lambda other: path in other.capabilities.paths)
        raise EngineError(f"the {plugin.name} engine has no {path} path", fix=f"{fix}, or use --engine {others}")


def _named(fits: Callable[[EnginePlugin], bool]) -> str:
    """The names of engines, the embedded one first."""
    found = sorted(filter(fits, known_engines().values()), key=lambda plugin: not plugin.is_default)
    return " or ".join(plugin.name for plugin in found)


def require_read(options: Options, path: str | None, *, has_flag: bool = True) -> None:
    """Refuses options that an engine would not read on a path, before it is opened.

    ``has_flag`` says whether the command has ``--path``, by which the user could choose another path.
    """
    path = path or PREFILL
    for name in options.given():
        option = options.known()[name]
        if option.details.path not in (None, path):
            other = f"add --path {option.details.path}, or " if has_flag else ""
            raise OptionError(f"{option.flag} has no effect on the {path} path", fix=f"{other}leave {option.flag} out")


def can(plugin: EnginePlugin, what: str) -> bool:
    """Has an engine a capability, or an ability of its own or of a wing?"""
    able = plugin.able()
    if what in (field.name for field in fields(Capabilities)):
        return bool(getattr(able, what))
    of_wings = any((what, plugin.name) in wing.abilities for wing in extensions.wings())
    return what in plugin.abilities or (not able.scores_only and of_wings)


def open_for(chosen: ChosenEngine, ability: str, work: Work, *more: Any) -> Any:
    """Opens a model for an ability that its engine has. Who asks for the ability says what is returned."""
    opens = chosen.plugin.abilities.get(ability) or extensions.ability(ability, chosen.plugin.name)
    assert opens is not None, "require comes first"
    return opens(chosen.plugin, chosen.subject, chosen.options, work, *more)


def require(plugin: EnginePlugin, capability: str, what: str) -> None:
    """Refuse a question that an engine cannot answer, before it is opened: it lacks a capability or an ability."""
    if can(plugin, capability):
        return
    fixes = [kind.instead_of_states for kind in extensions.offered(extensions.FormatOffer) if kind.instead_of_states]
    if capability == "hidden_states" and plugin.able().distributions and fixes:
        raise EngineError(f"the {plugin.name} engine cannot {what}", fix=fixes[0])
    raise EngineError(
        f"the {plugin.name} engine cannot {what}", fix=f"use --engine {_named(lambda other: can(other, capability))}"
    )
