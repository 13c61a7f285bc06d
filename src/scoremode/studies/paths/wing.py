"""What paths hand over to the house."""

from scoremode.core.extensions import Wing

HERE = "studies.paths"

WING = Wing(
    names={"paths": f"{HERE}.paths", "noise": f"{HERE}.noise", "Noise": f"{HERE}.noise"},
    verbs={"compare models": {"paths": f"{HERE}.command:PathsVerb"}},
    offers={
        "candidate-variants": (f"{HERE}.variation:CacheTypes",),
        "model-method": (f"{HERE}.noise:NOISE_METHOD",),
    },
)
