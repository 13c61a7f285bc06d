"""scoremode: exactly what a language model, as it is served, thinks of a text.

    import scoremode as sm
    run = sm.ppl("smollm2-135m", corpus="python-docs", method="sliding-once", context_length=512, stride=256)
    run.perplexity        # value ± standard error
    run.scores.logprob    # NumPy, one per target
    sm.prob("smollm2-135m", prompt="The capital of France is", targets=[" Paris", " London"])

Names are loaded when they are first used, so that ``import scoremode`` and ``scoremode --help`` stay instant.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # importing typing would take longer than all the rest, and Ctrl-C may come meanwhile
if TYPE_CHECKING:
    from typing import Any

    from scoremode.core.plan.plan import Plan
    from scoremode.core.scores.columns import Scores
    from scoremode.core.statistics.comparison import Comparison, Comparisons
    from scoremode.core.store.run import Run
    from scoremode.core.store.runs import load
    from scoremode.core.text.tokens import Tokens
    from scoremode.core.verbs.compare import compare
    from scoremode.core.verbs.dry_run import plan
    from scoremode.core.verbs.ppl import ppl
    from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore, prob
    from scoremode.core.verbs.progress import Progress
    from scoremode.core.verbs.reference import reference
    from scoremode.core.verbs.session import Model, open, wrap
    from scoremode.errors import ScoremodeError
    from scoremode.reports.html.page import report
    from scoremode.studies.attribution.attribute import attribute
    from scoremode.studies.attribution.depth_profile import DepthProfile
    from scoremode.studies.attribution.layer_profile import layer_profile
    from scoremode.studies.attribution.result import Attribution
    from scoremode.studies.attribution.routing import routing
    from scoremode.studies.attribution.routing_statistics import Routing
    from scoremode.studies.paths.noise import Noise, noise
    from scoremode.studies.paths.paths import paths
    from scoremode.studies.rollouts.mismatch import mismatch
    from scoremode.studies.rollouts.mismatch_statistics import Mismatch
    from scoremode.studies.rollouts.rollouts import rollouts
    from scoremode.studies.rollouts.texts import Rollouts
    from scoremode.studies.tasks.prompts import task_prompts
    from scoremode.studies.tasks.results import TasksComparison
    from scoremode.studies.tasks.tasks import tasks
    from scoremode.values import Estimate

_HOME = {
    "open": "core.verbs.session",
    "wrap": "core.verbs.session",
    "Model": "core.verbs.session",
    "ppl": "core.verbs.ppl",
    "compare": "core.verbs.compare",
    "paths": "studies.paths.paths",
    "attribute": "studies.attribution.attribute",
    "Attribution": "studies.attribution.result",
    "layer_profile": "studies.attribution.layer_profile",
    "DepthProfile": "studies.attribution.depth_profile",
    "mismatch": "studies.rollouts.mismatch",
    "Mismatch": "studies.rollouts.mismatch_statistics",
    "reference": "core.verbs.reference",
    "rollouts": "studies.rollouts.rollouts",
    "Rollouts": "studies.rollouts.texts",
    "routing": "studies.attribution.routing",
    "Routing": "studies.attribution.routing_statistics",
    "report": "reports.html.page",
    "Comparison": "core.statistics.comparison",
    "Comparisons": "core.statistics.comparison",
    "plan": "core.verbs.dry_run",
    "prob": "core.verbs.prob.sequence",
    "noise": "studies.paths.noise",
    "Progress": "core.verbs.progress",
    "tasks": "studies.tasks.tasks",
    "task_prompts": "studies.tasks.prompts",
    "TasksComparison": "studies.tasks.results",
    "Noise": "studies.paths.noise",
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
            import_module("scoremode.reports.html.notebooks").install()
        return found
    raise AttributeError(f"module 'scoremode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
