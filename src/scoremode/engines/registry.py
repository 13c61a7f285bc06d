"""Engines by name."""

from __future__ import annotations

from typing import Any

from scoremode.engines.base import Engine, EngineOptions, refuse_options
from scoremode.errors import OptionError, did_you_mean
from scoremode.models.facts import inspect
from scoremode.models.subject import Subject
from scoremode.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer

ENGINES = {
    "transformers": "any causal LM that Transformers loads, in this process (the default)",
    "vllm": "quantized weights as served, any parallel size: pip install 'scoremode[vllm]'",
    "table": "answers known in closed form: table:uniform and table:successor, over bytes",
}

FOR_ALL = {"trust_remote_code", "shares_prompts"}


def find_subject(model: str, *, tokenizer: str | None = None, trust_remote_code: bool = False) -> Subject:
    """The model of that name, no weights loaded."""
    if model.startswith("table:"):
        from scoremode.engines.table.engine import require_table

        require_table(model.removeprefix("table:"))
        if tokenizer:
            raise OptionError(
                "--tokenizer does not apply to a table: its tokens are bytes", fix="leave --tokenizer out"
            )
        return Subject(model, None, ByteTokenizer(), 256, None, model)
    facts = inspect(model)
    folder = tokenizer or facts.path
    loaded = HuggingFaceTokenizer.load(folder, trust_remote_code=trust_remote_code)
    return Subject(model, facts, loaded, facts.vocabulary, facts.context_length, facts.fingerprint)


def engine_name(wanted: str | None, subject: Subject) -> str:
    """The engine that was asked for, else the one that fits the model."""
    natural = "table" if subject.facts is None else "transformers"
    if wanted is None:
        return natural
    if wanted not in ENGINES:
        raise OptionError(f"there is no engine '{wanted}'", fix=did_you_mean(wanted, ENGINES))
    if (wanted == "table") != (natural == "table"):
        raise OptionError(f"the {wanted} engine cannot score {subject.name}", fix=f"use --engine {natural}")
    return wanted


def open_engine(subject: Subject, name: str, options: EngineOptions, longest: int | None = None) -> Engine:
    """Start an engine on a model: here weights are loaded. ``longest`` is the longest window that will come."""
    if name == "table":
        from scoremode.engines.table.engine import TableEngine

        refuse_options("table", options, FOR_ALL, {})
        return TableEngine.named(subject.name.removeprefix("table:"))
    if name == "vllm":
        from scoremode.engines.vllm.engine import VllmEngine

        assert subject.facts is not None
        return VllmEngine.load(subject.facts, options, longest)
    from scoremode.engines.transformers.engine import TransformersEngine

    assert subject.facts is not None
    return TransformersEngine.load(subject.facts, options)


def chosen_settings(subject: Subject, name: str, options: EngineOptions) -> dict[str, Any]:
    """What the engine would use, decided before it starts: a stored run is found without loading a weight."""
    given = {k: v for k, v in options.given().items() if v is not False}
    if name == "table":
        refuse_options("table", options, FOR_ALL, {})
        return given
    if name == "vllm":
        from scoremode.engines.vllm import support
        from scoremode.engines.vllm.options import VllmOptions

        VllmOptions.from_engine_options(options).arguments()  # refuses what cannot be scored with
        return {**given, **support.kernel_switches(), "vllm": support.installed_version()}
    from scoremode.engines.transformers.engine import chosen_device_and_dtype

    assert subject.facts is not None
    device, dtype = chosen_device_and_dtype(options, subject.facts)
    return {**given, "device": device, "dtype": dtype}
