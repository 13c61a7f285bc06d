"""``--model_args`` of the harness ─▶ the model, its engine and our own settings. Unknown arguments are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from scoremode.core.arguments import require_text
from scoremode.core.engine.base import Engine
from scoremode.core.engine.registry import all_options, require_read
from scoremode.core.plan.path import PREFILL
from scoremode.core.verbs.model import LazyModel
from scoremode.errors import OptionError, UnknownArgumentError, did_you_mean

OTHER_NAMES = {"pretrained": "model", "peft": "adapter"}  # names that the harness's own back ends use
TOKEN = "the harness writes its model arguments into its results, so an access token must not be among them"


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the adapter itself, not of an engine."""

    max_length: int | None = None  # the most tokens that are fed; None: the model's context
    add_bos_token: bool | None = None  # None: the tokenizer's own rule
    prefix_token_id: int | None = None  # the token before texts without context; None: BOS, else EOS
    greedy: Literal["measured", "unknown-is-false"] = "measured"  # unknown: the engine does not measure ranks
    enable_thinking: bool | None = None  # for chat templates that have this setting; never True for log-likelihoods
    chat_template_args: dict[str, Any] | None = None


def read(given: Mapping[str, Any]) -> tuple[LazyModel, AdapterSettings]:
    """Reads the model and the settings. Refuses everything that can be refused before the model is loaded."""
    named = {OTHER_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    if len(named) < len([value for value in given.values() if value is not None]):
        raise OptionError("the model is given twice", fix="give model or pretrained, not both")
    if "token" in named:
        raise OptionError(TOKEN, fix="set HF_TOKEN instead")
    model = named.pop("model", None)
    if model is None:
        raise OptionError("no model was given", fix="give --model_args model=NAME")
    engine = named.pop("engine", None)
    if not isinstance(engine, Engine):  # an engine that is already open is used as it is
        engine = _text("engine", engine)
    tokenizer = _text("tokenizer", named.pop("tokenizer", None))
    try:
        ours = {name: named.pop(name) for name in AdapterSettings.__struct_fields__ if name in named}
        settings = msgspec.convert(ours, AdapterSettings)
    except msgspec.ValidationError as error:
        raise OptionError(f"model_args: {error}", fix="see docs/tasks.md") from None
    if settings.enable_thinking:
        raise OptionError("enable_thinking is not for log-likelihoods", fix="leave enable_thinking out")
    held = LazyModel.named(_text("model", model) or "", engine, _engine_options(named), tokenizer, many_questions=True)
    require_read(held.chosen.options, PREFILL, has_flag=False)
    held.settings()  # refuses options that cannot work
    return held, settings


def _engine_options(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine's options. The harness turns digits into numbers; this turns them back into text if needed."""
    known = all_options()
    found = {}
    for name, value in named.items():
        if name not in known:
            names = [*known, *AdapterSettings.__struct_fields__, "model", "engine", "tokenizer"]
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, names))
        is_text = known[name][1].kind == "str"
        found[name] = str(value) if is_text and isinstance(value, int) and not isinstance(value, bool) else value
    return found


def _text(name: str, value: Any) -> str | None:
    if isinstance(value, Path) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)  # a folder may have a number as its name
    if value is None:
        return None
    require_text(name, value)
    return str(value)
