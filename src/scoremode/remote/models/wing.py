"""Declares what names of models elsewhere add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import NamesOffer, Wing

WING = Wing(
    offers=(
        NamesOffer(
            pattern=r"[\w.-]+/[\w.-]+(:[\w.*-]+|/[^*?\x00-\x1f]+\.(?i:gguf))", code="remote.models.hub:HUB_NAMES"
        ),
        NamesOffer(pattern="(?s:ollama:.*)", code="remote.models.ollama:OLLAMA_NAMES"),
    )
)
