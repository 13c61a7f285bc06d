"""What rollouts hand over to the house."""

from scoremode.core.extensions import Wing

HERE = "studies.rollouts"

WING = Wing(
    names={
        "rollouts": f"{HERE}.rollouts",
        "Rollouts": f"{HERE}.texts",
        "mismatch": f"{HERE}.mismatch",
        "Mismatch": f"{HERE}.mismatch",
    },
    verbs={"score one model": {"rollouts": f"{HERE}.command:RolloutsVerb"}},
    abilities={
        **{("writes", name): f"{HERE}.engines.writers:open_{name}" for name in ("llamacpp", "table", "transformers")},
        **{("writes", name): f"{HERE}.engines.{name}_writer:open_writer" for name in ("server", "vllm")},
    },
    offers={
        "corpus": (f"{HERE}.texts:CORPUS", f"{HERE}.prompts:CORPUS"),
        "page": (f"{HERE}.page:PAGE",),
        "part": (f"{HERE}.command:PART",),
    },
)
