"""scoremode: exactly what a language model, as it is served, thinks of a text.

    import scoremode as sm
    run = sm.ppl("smollm2-135m", corpus="python-docs", method="sliding-once", context_length=512, stride=256)
    run.perplexity        # value ± standard error
    run.scores.logprob    # NumPy, one a target
    sm.prob("smollm2-135m", prompt="The capital of France is", targets=[" Paris", " London"])

Names are loaded when they are first used, so that ``import scoremode`` and ``scoremode --help`` stay instant.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # importing typing would take longer than all the rest, and Ctrl-C may come meanwhile
if TYPE_CHECKING:
    from typing import Any

    from scoremode.baselines import reference
    from scoremode.comparing import compare
    from scoremode.display.html import report
    from scoremode.drift import Noise, noise
    from scoremode.engines.base import EngineOptions
    from scoremode.errors import ScoremodeError
    from scoremode.perplexity import plan, ppl
    from scoremode.runs import load
    from scoremode.sequence import SequenceProbability, SequenceScore, prob
    from scoremode.types import Comparison, Estimate, Plan, Run, Scores, Tokens

_HOME = {
    "ppl": "perplexity",
    "compare": "comparing",
    "reference": "baselines",
    "report": "display.html",
    "Comparison": "types",
    "plan": "perplexity",
    "prob": "sequence",
    "noise": "drift",
    "Noise": "drift",
    "SequenceProbability": "sequence",
    "SequenceScore": "sequence",
    "load": "runs",
    "EngineOptions": "engines.base",
    "ScoremodeError": "errors",
    "Estimate": "types",
    "Plan": "types",
    "Run": "types",
    "Scores": "types",
    "Tokens": "types",
}

__all__ = [
    "Comparison",
    "EngineOptions",
    "Estimate",
    "Noise",
    "Plan",
    "Run",
    "ScoremodeError",
    "Scores",
    "SequenceProbability",
    "SequenceScore",
    "Tokens",
    "__version__",
    "compare",
    "load",
    "noise",
    "plan",
    "ppl",
    "prob",
    "reference",
    "report",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"scoremode.{_HOME[name]}"), name)
    raise AttributeError(f"module 'scoremode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
