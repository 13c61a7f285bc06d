"""A model with its weights rounded to a few bits and back: what quantization does to them, without its kernels.

    python examples/emulate_quantization.py smollm2-135m runs/models --bits 8 4

Every matrix inside the layers is split into groups of 32 numbers of a row; each group gets one scale, and its numbers
are rounded to the nearest of 2**bits steps. Embeddings, norms and the head are unchanged. The checkpoints are plain
safetensors that any engine loads. A served quantized checkpoint (examples/make_checkpoints.py) uses different
arithmetic.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scoremode.core.models.facts import resolve

GROUP = 32


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Symmetric round-to-nearest with one scale per group of a row."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, -1, GROUP if columns % GROUP == 0 else columns)
    largest = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    return ((groups / scale).round().clamp(-largest - 1, largest) * scale).reshape(rows, columns).to(weight.dtype)


def emulate(model: str, folder: Path, bits: int) -> Path:
    """A copy of the model's folder with rounded weights; ``folder/NAME-w8``."""
    source = resolve(model)
    made = folder / f"{Path(model).name}-w{bits}"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(source, made, ignore=shutil.ignore_patterns("*.safetensors", "scoremode.json"))
    stored = count = 0.0
    for path in sorted(source.glob("*.safetensors")):
        weights = load_file(path)
        inner = {name for name, w in weights.items() if ".layers." in name and w.dim() == 2}
        changed = {name: rounded(w, bits) if name in inner else w for name, w in weights.items()}
        save_file(changed, made / path.name, {"format": "pt"})
        stored += sum(w.numel() * (bits + 16 / GROUP if n in inner else 8 * w.itemsize) for n, w in weights.items())
        count += sum(w.numel() for w in weights.values())
    config = json.loads((made / "config.json").read_text())
    config["bits_per_weight"] = stored / count  # with a scale of 16 bits per group; the rest counts at its stored size
    config["emulated_bits"] = bits  # of the numbers inside the layers
    (made / "config.json").write_text(json.dumps(config, indent=1))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2-135m, or a checkpoint folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    given = parser.parse_args()
    for bits in given.bits:
        print(emulate(given.model, given.folder, bits))


if __name__ == "__main__":
    main()
