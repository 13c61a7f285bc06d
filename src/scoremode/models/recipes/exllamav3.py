"""A mixture for ExLlamaV3: its converter takes one mean for a model, so whole conversions are mixed afterwards.

``util/recompile.py`` of ExLlamaV3 copies a converted model and takes some tensors from other conversions, as a file in
YAML says: which conversions there are, and from which of them each tensor comes.
"""

from __future__ import annotations

import json
from collections import Counter

from scoremode.models.recipes.mixture import Mixture, WrittenRecipe, counted, precision_of
from scoremode.models.sizes import EMBEDDING

LEAST, MOST = 1, 8  # bits per weight
HEADER = """\
# python util/recompile.py -i model-exl3-{most}bpw -o model-exl3-mixed -or FILE
# Convert the model once for each of these first: python convert.py -i MODEL -o model-exl3-{most}bpw -b {most}
"""
COMMAND = "python util/recompile.py -i model-exl3-{most}bpw -o model-exl3-mixed -or FILE"


def exllamav3_recipe(mixture: Mixture) -> WrittenRecipe | None:
    """The recipe; None if there is nothing that ExLlamaV3 would quantize."""
    bits: dict[str, int] = {}
    kept = near = 0
    for weight in mixture.matrices:
        if EMBEDDING.search(weight.name):
            continue
        precision, _ = precision_of(weight)
        kept += precision.is_kept
        near += not precision.is_kept
        module = weight.name.removesuffix(".weight")
        bits[f"{module}.*"] = max(LEAST, min(MOST, precision.bits))
    if not bits:
        return None
    most = Counter(bits.values()).most_common(1)[0][0]
    others = {key: own for key, own in bits.items() if own != most}
    lines = [HEADER.format(most=most).rstrip("\n")]
    lines += _sources(sorted(set(others.values())))
    lines += ["overrides:" if others else "overrides: []"]
    lines += [f'  - {{key: {json.dumps(key)}, source: "{own}bpw"}}' for key, own in others.items()]
    notes = ["the conversions for it need a GPU, once for each number of bits"]
    if kept:
        notes.append(f"{counted(kept, 'matrix')} that the mixture keeps as they are get 8 bits, the most of EXL3")
    if near:
        notes.append(f"{counted(near, 'matrix')} get the same number of bits in EXL3, which rounds in its own way")
    command = COMMAND.format(most=most)
    return WrittenRecipe("ExLlamaV3", ".exllamav3.yaml", "\n".join(lines) + "\n", command, tuple(notes))


def _sources(others: list[int]) -> list[str]:
    if not others:
        return ["sources: []"]
    return ["sources:", *(f'  - {{id: "{own}bpw", model_dir: "model-exl3-{own}bpw"}}' for own in others)]
