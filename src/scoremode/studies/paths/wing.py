"""Declares what the study of paths adds to scoremode: see core/extensions.py."""

from scoremode.core.extensions import VerbEntry, Wing

HERE = "studies.paths"

WING = Wing(
    names={"paths": f"{HERE}.paths", "noise": f"{HERE}.noise", "Noise": f"{HERE}.noise"},
    verbs={
        "compare models": {
            "paths": VerbEntry(
                "a model against itself: fed in other ways, or computed in other settings", f"{HERE}.command:PathsVerb"
            )
        }
    },
)
