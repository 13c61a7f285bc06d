"""scoremode: exactly what a language model, as it is served, thinks of a text.

    import scoremode as sm
    run = sm.ppl("smollm2-135m")  # or corpus="notes.txt", method="gptq", context_length=2048, …
    run.perplexity        # value ± standard error
    run.scores.logprob    # NumPy, one per target
    sm.prob("smollm2-135m", prompt="The capital of France is", targets=[" Paris", " London"])

Names are loaded when they are first used, so that ``import scoremode`` and ``scoremode --help`` stay instant.
"""

from __future__ import annotations

from scoremode.version import __version__ as __version__

TYPE_CHECKING = False  # importing typing would take longer than all the rest, and Ctrl-C may come meanwhile
if TYPE_CHECKING:
    from typing import Any

_HOME = {
    "open": "core.verbs.session",
    "wrap": "core.verbs.session",
    "Model": "core.verbs.session",
    "ppl": "core.verbs.ppl",
    "compare": "core.verbs.compare",
    "reference": "core.verbs.reference",
    "Comparison": "core.statistics.comparison",
    "Comparisons": "core.statistics.comparison",
    "plan": "core.verbs.plan",
    "prob": "core.verbs.prob.sequence",
    "card": "reports.card",
    "info": "cli.info",
    "cache": "cli.cache",
    "completion": "cli.completion",
    "Progress": "core.verbs.progress",
    "SequenceProbability": "core.verbs.prob.sequence",
    "SequenceScore": "core.verbs.prob.sequence",
    "load": "core.store.runs",
    "ScoremodeError": "errors",
    "Estimate": "values",
    "Plan": "core.plan.plan",
    "Run": "core.store.run",
    "Scores": "core.scores.columns",
    "Tokens": "core.text.tokens",
}


_GONE = {"task_prompts": ": write rows with prompt and answer to a .jsonl file, as docs/rollouts.md shows"}
"""Names of older versions, and what to do instead."""


def _homes() -> dict[str, str]:
    """All public names, those of wings too, each with its module."""
    from scoremode.core.extensions import public_names

    return {**_HOME, **public_names()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("__"):
        raise AttributeError(f"module 'scoremode' has no attribute {name!r}")
    from importlib import import_module

    home = _HOME.get(name) or _homes().get(name)
    if home is None:
        raise AttributeError(f"module 'scoremode' has no attribute {name!r}{_GONE.get(name, '')}")
    return getattr(import_module(f"scoremode.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*_homes(), "__version__"})
