"""Declares what tasks add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import PageOffer, VerbEntry, Wing

HERE = "studies.tasks"

WING = Wing(
    names={
        "tasks": f"{HERE}.tasks",
        "lm_eval": f"{HERE}.lm_eval_command",
        "TasksComparison": f"{HERE}.results",
    },
    verbs={
        "compare models": {
            "tasks": VerbEntry(
                "candidates against a baseline on tasks, from what lm-eval logged", f"{HERE}.command:TasksVerb"
            )
        },
        "with other programs": {
            "lm-eval": VerbEntry(
                "lm-evaluation-harness's own command line, with its tasks scored by any engine here",
                f"{HERE}.lm_eval_command:LmEvalVerb",
            )
        },
    },
    offers=(PageOffer(shows=(f"{HERE}.results:TasksComparison",), code=f"{HERE}.page:PAGE", needs="reports/html"),),
)
