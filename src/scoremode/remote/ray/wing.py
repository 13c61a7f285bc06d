"""What replicas hand over to the house."""

from scoremode.core.extensions import ReplicasOffer, Wing

WING = Wing(
    offers=(
        ReplicasOffer(
            about="several engines share the work, with the extra ray",
            flags={
                "--replicas N": "engines at a time (default: one, in this process)",
                "--ray ADDRESS": "auto, or HOST:PORT of a Ray cluster (default: Ray is started here)",
            },
            shares={
                "--gpus-per-replica N": "GPUs of each, also a share (default: what it needs)",
                "--cpus-per-replica N": "CPU cores of each (default: 1 for each process of the engine)",
            },
            code="remote.ray.replicas:RayReplicas",
        ),
    )
)
