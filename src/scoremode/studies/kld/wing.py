"""Declares what llama.cpp's files of base logits add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import BaselineOffer, FormatOffer, Wing

HERE = "studies.kld"

WING = Wing(
    offers=(
        BaselineOffer(
            suffix=".kld", begins=b"_logits_", about="a .kld file of llama.cpp", code=f"{HERE}.comparing:KldBaseline"
        ),
        FormatOffer(
            name="kld",
            reference={"--kld FILE": "its distributions in 16 bits for llama.cpp's tool, by the method llamacpp"},
            instead_of_states="keep the baseline's distributions first, rounded to 16 bits and by the method llamacpp: "
            "scoremode reference MODEL --kld FILE",
            code=f"{HERE}.command:KLD",
        ),
        FormatOffer(
            name="llamacpp",
            layout="print what llama.cpp's tool prints, by its formulas",
            title="By the formulas of llama.cpp's tool",
            code=f"{HERE}.command:LAYOUT",
        ),
    )
)
