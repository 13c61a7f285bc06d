"""How large a KL is, beside those of usual quantization types: KL(original‖quantized) on WikiText-2, nats per token.

LLaMA 3 8B     llama.cpp's scoreboard, rows without importance matrix: tools/perplexity/README.md at commit b21e4de;
               figures of 2024 (revision f364eb6, CUDA, f16 original, context 512, the whole test set)
SmolLM2-135M   measured by the same tool on 60 chunks: docs/reading.md has the versions

The KL of different models, texts and contexts compare only roughly: the same scoreboard has 0.11 for Q2_K of LLaMA 2
7B, a quarter of that of LLaMA 3 8B. A row of SmolLM2's 576 weights cannot be cut into the blocks of 256 that K types
need, so llama.cpp stores most of its matrices in a type of more bits than the name says. Its Q5_K_M (0.074) is left
out: what it is mostly stored in, Q5_1, is worse on these weights than the Q5_0 of its Q4_K_M.
"""

from __future__ import annotations

MODELS: dict[str, dict[str, float]] = {
    "LLaMA 3 8B": {
        "Q8_0": 0.001355,
        "Q6_K": 0.005452,
        "Q5_K_M": 0.010762,
        "Q4_K_M": 0.031273,
        "Q3_K_M": 0.101913,
        "Q2_K": 0.445132,
    },
    "SmolLM2-135M": {
        "Q8_0": 0.003986,
        "Q6_K": 0.009233,
        "Q4_K_M": 0.056045,
        "Q3_K_M": 0.142932,
        "Q2_K": 0.430484,
    },
}
ABOUT = 1.25  # a KL within this factor of a type's is called about that of the type
SOURCE = (
    "scale: KL on WikiText-2 by llama.cpp's tool, of LLaMA 3 8B (its scoreboard, 2024) and SmolLM2-135M (its K types "
    "hold more bits than they say); other models and texts compare only roughly"
)


def scale_words(kl: float) -> str:
    """Where a KL lies between those of usual quantization types, in one line.

    >>> scale_words(0.03)
    'for scale: about Q4_K_M of LLaMA 3 8B; between Q6_K and Q4_K_M of SmolLM2-135M'
    """
    return "for scale: " + "; ".join(f"{_place(kl, types)} of {model}" for model, types in MODELS.items())


def _place(kl: float, types: dict[str, float]) -> str:
    known = sorted(types.items(), key=lambda one: one[1])
    near = min(range(len(known)), key=lambda i: max(kl / known[i][1], known[i][1] / kl))
    if max(kl / known[near][1], known[near][1] / kl) <= ABOUT:
        return f"about {known[near][0]}"
    above = sum(value < kl for _, value in known)
    if above == 0:
        return f"{'far ' if kl < known[0][1] / 10 else ''}below {known[0][0]} ({known[0][1]:.2g})"
    if above == len(known):
        return f"beyond {known[-1][0]} ({known[-1][1]:.2g})"
    return f"between {known[above - 1][0]} and {known[above][0]}"
