"""The plugin that vLLM loads from the entry point ``vllm.general_plugins`` in every process it starts.

It runs in the front end, the engine core, every worker and the process that inspects model classes, several times
each, and also in engines that have nothing to do with scoring. So it imports nothing heavy, may run any number of
times, and does nothing unless ``SCOREMODE_VLLM=1`` is in the environment, which our engine sets while it starts.
"""

from __future__ import annotations

import os

from scoremode.engines.vllm import guard

SWITCH = "SCOREMODE_VLLM"


def asked_for() -> bool:
    return os.environ.get(SWITCH) == "1"


def register() -> None:
    """Make ``runner="pooling", convert="embed"`` build a model that scores instead of one that embeds.

    Also make this process end with the scoremode process: see ``guard``.

    vLLM looks up ``as_embedding_model`` in its module at each call, so replacing that one attribute is enough. The
    replacement checks the switch at each call, so a process can score and later embed.
    """
    if not asked_for():
        return
    guard.watch_parent()
    from vllm.model_executor.models import adapters

    if getattr(adapters.as_embedding_model, "stock", None) is None:
        adapters.as_embedding_model = _either(adapters.as_embedding_model)


class _either:  # noqa: N801  (replaces a function)
    def __init__(self, stock: object) -> None:
        self.stock = stock

    def __call__(self, model_class: type) -> type:
        if not asked_for():
            return self.stock(model_class)  # type: ignore[operator,no-any-return]
        from scoremode.engines.vllm.pooler import as_score_model

        return as_score_model(model_class)
