"""What tasks hand over to the house."""

from scoremode.core.extensions import Wing

HERE = "studies.tasks"

WING = Wing(
    names={
        "tasks": f"{HERE}.tasks",
        "lm_eval": f"{HERE}.lm_eval_command",
        "TasksComparison": f"{HERE}.results",
    },
    verbs={
        "compare models": {"tasks": f"{HERE}.command:TasksVerb"},
        "with other programs": {"lm-eval": f"{HERE}.lm_eval_command:LmEvalVerb"},
    },
    offers={"page": (f"{HERE}.page:PAGE",)},
)
