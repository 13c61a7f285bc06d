"""What names of models elsewhere hand over to the house."""

from scoremode.core.extensions import Wing

WING = Wing(offers={"model-names": ("remote.models.hub:HUB_NAMES", "remote.models.ollama:OLLAMA_NAMES")})
