"""What the service hands over to the house."""

from scoremode.core.extensions import Wing

WING = Wing(
    names={"serve": "remote.service.command"},
    verbs={"with other programs": {"serve": "remote.service.command:ServeVerb"}},
    needs=("engines/vllm",),
)
