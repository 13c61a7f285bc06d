"""Declares what rollouts add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import PageOffer, PartOffer, TextOffer, VerbEntry, Wing

HERE = "studies.rollouts"

WING = Wing(
    names={
        "rollouts": f"{HERE}.rollouts",
        "Rollouts": f"{HERE}.texts",
        "mismatch": f"{HERE}.mismatch",
        "Mismatch": f"{HERE}.mismatch",
    },
    verbs={
        "score one model": {
            "rollouts": VerbEntry(
                "texts that a model writes, and how likely each token was", f"{HERE}.command:RolloutsVerb"
            )
        }
    },
    abilities={
        **{("writes", name): f"{HERE}.engines.writers:open_{name}" for name in ("llamacpp", "table", "transformers")},
        **{("writes", name): f"{HERE}.engines.{name}_writer:open_writer" for name in ("server", "vllm")},
    },
    offers=(
        TextOffer(
            prefix="rollouts:",
            value="DIR",
            whole_divergence=True,
            as_baseline="use sm.mismatch(DIR, MODEL)",
            code=f"{HERE}.texts:READER",
        ),
        TextOffer(prefix="answers:", value="FILE", code=f"{HERE}.prompts:READER"),
        PageOffer(shows=(f"{HERE}.mismatch:Mismatch",), code=f"{HERE}.page:PAGE", needs="reports/html"),
        PartOffer(
            prefix="rollouts:",
            flags={
                "--clip-low RATIO": "with the baseline rollouts:DIR: smallest importance ratio (default: 0.8)",
                "--clip-high RATIO": "with the baseline rollouts:DIR: largest (default: 1.2)",
            },
            arguments=("rollouts",),
            as_baseline="rollouts:DIR with the trainer as the CANDIDATE",
            code=f"{HERE}.command:PART",
        ),
    ),
)
