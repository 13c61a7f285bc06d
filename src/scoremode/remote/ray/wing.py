"""Declares what replicas add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import ReplicasOffer, Wing

WING = Wing(
    offers=(
        ReplicasOffer(
            about="several engines share the work, with the extra ray",
            code="remote.ray.replicas:RayReplicas",
        ),
    )
)
