"""What llama.cpp's files of base logits hand over to the house."""

from scoremode.core.extensions import Wing

HERE = "studies.kld"

WING = Wing(
    offers={
        "baseline": (f"{HERE}.comparing:KldBaseline",),
        "reference-output": (f"{HERE}.command:OUTPUT",),
        "comparison-layout": (f"{HERE}.command:LAYOUT",),
    }
)
