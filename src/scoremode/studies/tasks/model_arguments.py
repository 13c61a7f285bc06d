"""``--model_args`` of the harness ─▶ the model, its engine and our own settings. Unknown arguments are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scoremode.core.arguments import require_flag, require_text, whole_number
from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import EnginePlugin
from scoremode.core.engine.registry import all_options, choose_engine, require_read
from scoremode.core.plan.path import PREFILL
from scoremode.core.verbs.model import LazyModel
from scoremode.errors import OptionError, UnknownArgumentError, did_you_mean, print_line

GREEDY = ("measured", "unknown-is-false")
OTHER_NAMES = {"pretrained": "model", "peft": "adapter"}  # names that the harness's own back ends use
INSTEAD = {
    "parallelize": "give device=auto for several GPUs",
    "load_in_8bit": "give a quantized checkpoint",
    "load_in_4bit": "give a quantized checkpoint",
    "gptqmodel": "leave it out: the checkpoint declares its quantization",
    "autogptq": "leave it out: the checkpoint declares its quantization",
    "gguf_file": "give the file itself: model=FILE.gguf",
    "data_parallel_size": "leave it out",
    "softmax_dtype": "leave it out: scores are computed in float32, or in float64 with dtype=float64",
    "logits_cache": "leave it out: choices always share their context",
}
TOKEN = "the harness writes its model arguments into its results, so an access token must not be among them"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of the adapter itself, not of an engine."""

    max_length: int | None = None  # the most tokens that are fed; None: the model's context
    add_bos_token: bool | None = None  # None: the tokenizer's own rule
    prefix_token_id: int | None = None  # the token before texts without context; None: BOS, else EOS
    greedy: str = "measured"  # or "unknown-is-false": answer False if the engine does not measure ranks
    out: str | None = None  # folder for the score of every token
    enable_thinking: bool | None = None  # for chat templates that have this setting
    chat_template_args: Mapping[str, Any] | None = None
    max_gen_toks: int = 256  # for tasks that set no limit


def read(given: Mapping[str, Any], device: str | None) -> tuple[LazyModel, AdapterSettings]:
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
    ours = {f.name: named.pop(f.name) for f in fields(AdapterSettings) if f.name in named}
    settings = _checked(ours)
    name = _text("model", model) or ""
    if device is not None and "device" not in named and not isinstance(engine, Engine):
        _put_on(device, choose_engine(engine, name), named)
    held = LazyModel.named(name, engine, _engine_options(named), tokenizer, many_questions=True)
    require_read(held.chosen.options, PREFILL, has_flag=False)
    held.settings()  # refuses options that cannot work
    return held, settings


def _put_on(device: str, plugin: EnginePlugin, named: dict[str, Any]) -> None:
    """Passes the harness's ``--device`` to an engine that has this option; else prints that it is not used."""
    if "device" in plugin.options.known():
        named["device"] = device
        return
    instead = plugin.instead.get("device", "it chooses devices itself")
    print_line(f"scoremode: --device {device} is not used by the {plugin.name} engine: {instead}")


def _engine_options(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine's options. The harness turns digits into numbers; this turns them back into text if needed."""
    known = all_options()
    found = {}
    for name, value in named.items():
        if name in INSTEAD:
            raise OptionError(f"{name} is not an argument of scoremode", fix=INSTEAD[name])
        if name not in known:
            names = [*known, *(f.name for f in fields(AdapterSettings)), "model", "engine", "tokenizer"]
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


def _checked(ours: dict[str, Any]) -> AdapterSettings:
    for name in ("max_length", "prefix_token_id", "max_gen_toks"):
        if name in ours:
            ours[name] = whole_number(name, ours[name])
    for name in ("add_bos_token", "enable_thinking"):
        if name in ours:
            require_flag(name, ours[name])
    if "out" in ours:
        ours["out"] = _text("out", ours["out"])
    if not isinstance(ours.get("chat_template_args", {}), Mapping):
        raise OptionError("chat_template_args is not a mapping", fix='give it as JSON: {"name": value}')
    if ours.get("max_gen_toks", 1) < 1:
        raise OptionError(f"max_gen_toks {ours['max_gen_toks']} leaves nothing to write", fix="give 1 or more")
    if ours.get("greedy", "measured") not in GREEDY:
        raise OptionError(f"greedy={ours['greedy']} is not known", fix=f"give {' or '.join(GREEDY)}")
    return AdapterSettings(**ours)
