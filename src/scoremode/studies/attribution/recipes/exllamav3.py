"""A mixture for ExLlamaV3: its converter takes one mean for a model, so whole conversions are mixed afterwards.

``util/recompile.py`` of ExLlamaV3 copies a converted model and takes some tensors from other conversions, as a file in
YAML says: which conversions there are, and from which of them each tensor comes.
"""

from __future__ import annotations

import json
import math
from collections import Counter

from scoremode.core.models.sizes import EMBEDDING
from scoremode.studies.attribution.recipes.mixture import (
    EXL3_BITS,
    Mixture,
    WrittenRecipe,
    counted,
    modules_of,
    precision_of,
)

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
LEAST, MOST = 1, 8  # bits per weight
HEADER = """\
# python util/recompile.py -i model-exl3-{most}bpw -o model-exl3-mixed -or FILE
# Convert the model once for each number of bits first, the head too:
# python convert.py -i MODEL -o model-exl3-{most}bpw -w WORK -b {most} -hb {most}
"""
COMMAND = "python util/recompile.py -i model-exl3-{most}bpw -o model-exl3-mixed -or FILE"


def exllamav3_recipe(mixture: Mixture) -> WrittenRecipe | None:
    """The recipe; None if there is nothing that ExLlamaV3 would quantize."""
    bits: dict[str, int] = {}
    kept = near = 0  # what EXL3 rounds in another way than it was measured
    for weight in mixture.matrices:
        if EMBEDDING.search(weight.name):
            continue
        precision, _ = precision_of(weight)
        own = EXL3_BITS.match(weight.format)
        needed = math.ceil(float(own[1])) if own else precision.bits
        kept += precision.is_kept
        near += not precision.is_kept and (own is None or float(own[1]) != needed)
        keys = (module if mixture.model_type != "mixtral" else _in_mixtral(module) for module in modules_of(weight))
        bits |= {f"{key}.*": max(LEAST, min(MOST, needed)) for key in keys}
    if not bits:
        return None
    most = Counter(bits.values()).most_common(1)[0][0]
    others = {key: own for key, own in bits.items() if own != most}
    lines = [HEADER.format(most=most).rstrip("\n")]
    lines.append("sources:" if others else "sources: []")
    lines += [f'  - {{id: "{own}bpw", model_dir: "model-exl3-{own}bpw"}}' for own in sorted(set(others.values()))]
    lines.append("overrides:" if others else "overrides: []")
    lines += [f'  - {{key: {json.dumps(key)}, source: "{own}bpw"}}' for key, own in others.items()]
    notes = ["the conversions for it need a GPU, once for each number of bits"]
    if kept:
        notes.append(f"{counted(kept, 'matrix')} that the mixture keeps as they are get 8 bits, the most of EXL3")
    if near:
        notes.append(f"{counted(near, 'matrix')} get as many bits in EXL3, which rounds in its own way")
    command = COMMAND.format(most=most)
    return WrittenRecipe("ExLlamaV3", ".exllamav3.yaml", "\n".join(lines) + "\n", command, tuple(notes))


def _in_mixtral(module: str) -> str:
    """The name of an expert's matrix in the files of Mixtral."""
    stem, _, leaf = module.replace(".mlp.experts.", ".block_sparse_moe.experts.").rpartition(".")
    return f"{stem}.{MIXTRAL[leaf]}" if ".experts." in stem else module
