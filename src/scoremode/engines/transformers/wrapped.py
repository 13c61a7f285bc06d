"""Scores a model that the caller has already loaded, and restores its training mode afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Work
from scoremode.core.engine.registry import ChosenEngine
from scoremode.core.models.subject import Subject
from scoremode.core.plan.path import PATHS, DecodePath
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import ModelError, OptionError

# the options of a model that is loaded already
OF_LOADED = ("batch_tokens", "divergence", "head", "head_kernel", "kv_cache_dtype")


def wrapped(model: Any, tokenizer: Any, options: Mapping[str, Any], *, name: str | None) -> ChosenEngine:
    """Wraps a causal LM that is loaded already, and its tokenizer. Refuses options that such a model does not have."""
    plugin = WrappedModel(model)
    for option, value in options.items():
        if option not in OF_LOADED and value is not None and value is not False:
            message = f"{option} does not apply to a model that is loaded already"
            raise OptionError(message, fix=f"leave {option} out, or use it where the model is loaded")
    if tokenizer is None or isinstance(tokenizer, str):
        message = "tokenizer is a string" if tokenizer is not None else "a model that is loaded needs its tokenizer"
        raise OptionError(message, fix="give the tokenizer itself: tokenizer=AutoTokenizer.from_pretrained(…)")
    read = TransformersOptions.of({option: options.get(option) for option in OF_LOADED})
    model_name = name or getattr(plugin.model.config, "_name_or_path", None) or type(plugin.model).__name__
    return ChosenEngine(plugin, read, plugin.subject(str(model_name), read, tokenizer))


class WrappedModel(EnginePlugin):
    """The Transformers engine on a model in memory. Its weights may change between questions, so nothing is cached."""

    contract = 1
    name = "transformers"
    summary = "a model that is already loaded"
    capabilities: ClassVar[Capabilities] = Capabilities.all(paths=PATHS, scores_only=True)
    options = TransformersOptions
    keeps_runs = False
    opens_for_each_question = True

    def __init__(self, model: Any) -> None:
        self.model, self._instance, self._questions = plain_model(model), uuid.uuid4().hex, 0

    def subject(self, model: str, options: Any, tokenizer: Any) -> Subject:
        config = self.model.config.get_text_config()
        return Subject(
            name=model,
            tokenizer=HuggingFaceTokenizer(tokenizer, model),
            fingerprint=f"in memory: {self._instance}",
            vocabulary=getattr(config, "vocab_size", None),
            context_length=getattr(config, "max_position_embeddings", None),
            hidden_size=getattr(config, "hidden_size", None),
            dtype=str(self.model.dtype).removeprefix("torch."),
        )

    def settings(self, subject: Subject, options: Any) -> dict[str, Any]:
        return {**options.identity(), "instance": f"{self._instance} {self._questions}"}

    def open(self, subject: Subject, options: TransformersOptions, work: Work) -> Engine:
        self._questions += 1
        return WrappedEngine(self.model, options, work.path)


def plain_model(model: Any) -> Any:
    """Returns the causal LM inside the wrappers of torch.compile, data parallelism and PEFT."""
    for _ in range(8):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if inner is None and hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            inner = model.get_base_model()  # the adapter's layers are inside it
        if inner is None:
            break
        model = inner
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise ModelError(
            f"a {type(model).__name__} is not a causal language model of Transformers",
            fix="give what AutoModelForCausalLM.from_pretrained returns",
        )
    return model


class WrappedEngine(TransformersEngine):
    """The Transformers engine on a model whose training mode is restored when the engine is closed."""

    def __init__(self, model: Any, options: TransformersOptions, path: DecodePath | None = None) -> None:
        self._in_training = [module for module in model.modules() if module.training]
        try:
            super().__init__(model, None, options, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for module in self._in_training:
            module.training = True
