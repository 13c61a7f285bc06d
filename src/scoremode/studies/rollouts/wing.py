"""What rollouts hand over to the house."""

from __future__ import annotations

from scoremode.core.extensions import Wing

HERE = "studies.rollouts"

WING = Wing(
    names={
        "rollouts": f"{HERE}.rollouts",
        "Rollouts": f"{HERE}.texts",
        "mismatch": f"{HERE}.mismatch",
        "Mismatch": f"{HERE}.mismatch_statistics",
    },
    verbs={
        "score one model": {"rollouts": f"{HERE}.command:RolloutsVerb"},
        "compare models": {"mismatch": f"{HERE}.mismatch_command:MismatchVerb"},
    },
    offers={"corpus": (f"{HERE}.texts:CORPUS", f"{HERE}.answers:CORPUS")},
)
