"""What replicas hand over to the house."""

from scoremode.core.extensions import Wing

WING = Wing(offers={"replicas": ("remote.ray.replicas:RayReplicas",)})
