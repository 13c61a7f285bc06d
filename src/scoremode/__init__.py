"""scoremode: exactly what a language model, as it is served, thinks of a text.

    import scoremode as sm
    run = sm.ppl("smollm2-135m", corpus="python-docs", method="sliding-once", context_length=512, stride=256)
    run.perplexity        # value ± standard error
    run.scores.logprob    # NumPy, one per target
    sm.prob("smollm2-135m", prompt="The capital of France is", targets=[" Paris", " London"])

Names are loaded when they are first used, so that ``import scoremode`` and ``scoremode --help`` stay instant.
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"

TYPE_CHECKING = False  # importing typing would take longer than all the rest, and Ctrl-C may come meanwhile
if TYPE_CHECKING:
    from typing import Any

    from scoremode.errors import ScoremodeError
    from scoremode.harness.prompts import task_prompts
    from scoremode.harness.results import TasksComparison
    from scoremode.harness.tasks import tasks
    from scoremode.plan.plan import Plan
    from scoremode.report.html.page import report
    from scoremode.scores.columns import Scores
    from scoremode.statistics.attribution import Attribution
    from scoremode.statistics.comparison import Comparison, Comparisons
    from scoremode.statistics.depth_profile import DepthProfile
    from scoremode.statistics.mismatch import Mismatch
    from scoremode.statistics.routing import Routing
    from scoremode.store.run import Run
    from scoremode.store.runs import load
    from scoremode.text.rollouts import Rollouts
    from scoremode.text.tokens import Tokens
    from scoremode.values import Estimate
    from scoremode.verbs.attribute import attribute
    from scoremode.verbs.compare import compare
    from scoremode.verbs.depth_profile import layer_profile
    from scoremode.verbs.mismatch import mismatch
    from scoremode.verbs.noise import Noise, noise
    from scoremode.verbs.paths import paths
    from scoremode.verbs.plan import plan
    from scoremode.verbs.ppl import ppl
    from scoremode.verbs.prob.sequence import SequenceProbability, SequenceScore, prob
    from scoremode.verbs.progress import Progress
    from scoremode.verbs.reference import reference
    from scoremode.verbs.rollouts import rollouts
    from scoremode.verbs.routing import routing
    from scoremode.verbs.session import Model, open, wrap

_HOME = {
    "open": "verbs.session",
    "wrap": "verbs.session",
    "Model": "verbs.session",
    "ppl": "verbs.ppl",
    "compare": "verbs.compare",
    "paths": "verbs.paths",
    "attribute": "verbs.attribute",
    "Attribution": "statistics.attribution",
    "layer_profile": "verbs.depth_profile",
    "DepthProfile": "statistics.depth_profile",
    "mismatch": "verbs.mismatch",
    "Mismatch": "statistics.mismatch",
    "reference": "verbs.reference",
    "rollouts": "verbs.rollouts",
    "Rollouts": "text.rollouts",
    "routing": "verbs.routing",
    "Routing": "statistics.routing",
    "report": "report.html.page",
    "Comparison": "statistics.comparison",
    "Comparisons": "statistics.comparison",
    "plan": "verbs.plan",
    "prob": "verbs.prob.sequence",
    "noise": "verbs.noise",
    "Progress": "verbs.progress",
    "tasks": "harness.tasks",
    "task_prompts": "harness.prompts",
    "TasksComparison": "harness.results",
    "Noise": "verbs.noise",
    "SequenceProbability": "verbs.prob.sequence",
    "SequenceScore": "verbs.prob.sequence",
    "load": "store.runs",
    "ScoremodeError": "errors",
    "Estimate": "values",
    "Plan": "plan.plan",
    "Run": "store.run",
    "Scores": "scores.columns",
    "Tokens": "text.tokens",
}

_SHOWS_RUNS = {
    "Comparison",
    "Comparisons",
    "Run",
    "TasksComparison",
    "compare",
    "load",
    "open",
    "paths",
    "ppl",
    "reference",
    "tasks",
    "wrap",
}  # their values, in notebooks

__all__ = [
    "Attribution",
    "Comparison",
    "Comparisons",
    "DepthProfile",
    "Estimate",
    "Mismatch",
    "Model",
    "Noise",
    "Plan",
    "Progress",
    "Rollouts",
    "Routing",
    "Run",
    "ScoremodeError",
    "Scores",
    "SequenceProbability",
    "SequenceScore",
    "TasksComparison",
    "Tokens",
    "__version__",
    "attribute",
    "compare",
    "layer_profile",
    "load",
    "mismatch",
    "noise",
    "open",
    "paths",
    "plan",
    "ppl",
    "prob",
    "reference",
    "report",
    "rollouts",
    "routing",
    "task_prompts",
    "tasks",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        found = getattr(import_module(f"scoremode.{_HOME[name]}"), name)
        if name in _SHOWS_RUNS:
            import_module("scoremode.report.html.notebooks").install()
        return found
    raise AttributeError(f"module 'scoremode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Names(type(sys)):  # type: ignore[misc]
    """A module whose functions ``plan`` and ``report`` stay functions when the folders of those names are imported.

    Python puts every imported folder into its parent as an attribute. ``from scoremode.plan.recipes import …`` does not
    need that, and ``sm.plan(…)`` must work.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, type(sys))):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Names
