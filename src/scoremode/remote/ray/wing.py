"""What replicas hand over to the house."""

from __future__ import annotations

from scoremode.core.extensions import Wing

WING = Wing(offers={"replicas": ("remote.ray.replicas:RayReplicas",)})
