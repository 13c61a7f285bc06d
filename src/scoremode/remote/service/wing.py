"""Declares what the service adds to scoremode: see core/extensions.py."""

from scoremode.core.extensions import VerbEntry, Wing

WING = Wing(
    names={"serve": "remote.service.command"},
    verbs={
        "with other programs": {
            "serve": VerbEntry(
                "load a model once, and answer many clients over HTTP", "remote.service.command:ServeVerb"
            )
        }
    },
    needs=("engines/vllm",),
)
