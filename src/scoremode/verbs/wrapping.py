"""A model that is loaded already, in a notebook or a training loop, asked as any other."""

from __future__ import annotations

from typing import Any

from scoremode.engines.registry import Chosen
from scoremode.errors import OptionError
from scoremode.verbs.model import HeldModel
from scoremode.verbs.session import Model


def wrap(
    hf_model: Any,
    tokenizer: Any,
    *,
    name: str | None = None,
    batch_tokens: int | None = None,
    head: str | None = None,
    head_kernel: str | None = None,
) -> Model:
    """Ask a causal LM of Transformers that is loaded already, with its tokenizer.

    The model is put into evaluation mode for each question and back afterwards. Its weights may change between two
    questions, so answers are kept only where ``out`` says so, and never found again. ``examples/training_loop.py``
    logs perplexity and KL while a model is trained.

    >>> model = sm.wrap(hf_model, tokenizer)                       # doctest: +SKIP
    >>> model.ppl(text="The quick brown fox").perplexity           # doctest: +SKIP
    """
    from scoremode.engines.transformers.transformers_options import TransformersOptions
    from scoremode.engines.transformers.wrapped import WrappedModel

    plugin = WrappedModel(hf_model)
    given = {"batch_tokens": batch_tokens, "head": head, "head_kernel": head_kernel}
    options = TransformersOptions.of(given)
    known = name or getattr(plugin.model.config, "_name_or_path", None) or type(plugin.model).__name__
    if isinstance(tokenizer, str):
        raise OptionError("tokenizer is a string", fix="give the tokenizer itself: AutoTokenizer.from_pretrained(…)")
    return Model(HeldModel(Chosen(plugin, options, plugin.subject(str(known), options, tokenizer))))
