"""Declares what attributions add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import CacheFiles, PageOffer, VerbEntry, Wing

HERE = "studies.attribution"

WING = Wing(
    names={
        "attribute": f"{HERE}.attribute",
        "Attribution": f"{HERE}.result",
        "layer_profile": f"{HERE}.layer_profile",
        "DepthProfile": f"{HERE}.layer_profile",
        "routing": f"{HERE}.routing",
        "Routing": f"{HERE}.routing",
    },
    verbs={
        "compare models": {
            "attribute": VerbEntry(
                "which layers and matrices of a candidate do the damage", f"{HERE}.command:AttributeVerb"
            )
        }
    },
    abilities={
        ("layer_states", "llamacpp"): f"{HERE}.engines.llamacpp_layers:open_layers",
        ("layer_states", "transformers"): f"{HERE}.engines.transformers_layers:open_layers",
        ("layer_states", "vllm"): f"{HERE}.engines.vllm_layers:open_layers",
        ("layer_replay", "transformers"): f"{HERE}.engines.transformers_layers:open_layers",
        ("routes", "transformers"): f"{HERE}.engines.transformers_layers:open_routes",
        ("swaps", "transformers"): f"{HERE}.engines.transformers_swaps:open_swaps",
    },
    offers=(PageOffer(shows=(f"{HERE}.result:Attribution",), code=f"{HERE}.page:PAGE", needs="reports/html"),),
    cache={"attributions": CacheFiles(mark="attribution.json", journal="attribution.journal")},
)
