"""What names of models elsewhere hand over to the house."""

from scoremode.core.extensions import NamesOffer, Wing

WING = Wing(
    offers=(
        NamesOffer(
            pattern=r"[\w.-]+/[\w.-]+(:[\w.*-]+|/[^*?\x00-\x1f]+\.(?i:gguf))", code="remote.models.hub:HUB_NAMES"
        ),
        NamesOffer(pattern="(?s:ollama:.*)", code="remote.models.ollama:OLLAMA_NAMES"),
    )
)
