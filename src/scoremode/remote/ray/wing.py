"""What replicas hand over to the house."""

from scoremode.core.extensions import ReplicasOffer, Wing

WING = Wing(
    offers=(
        ReplicasOffer(
            about="several engines share the work, with the extra ray",
            code="remote.ray.replicas:RayReplicas",
        ),
    )
)
