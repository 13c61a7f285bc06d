"""Other versions of a GGUF file, rounded to nearest by the gguf package: no data, no search for better scales.

    python examples/requantize_gguf.py model.gguf runs/models --types F32 Q8_0 Q5_0 Q4_0

llama.cpp's own llama-quantize makes better ones (and K-quants). A file that is quantized already is de-quantized
first, so what was lost there stays lost. The types of norms are kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize

WRITTEN_BY_THE_WRITER = ("GGUF.", "general.architecture", "general.file_type")


def requantize(source: Path, target: Path, kind: str) -> None:
    """Write ``target`` with the matrices of ``source`` in another type."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    for name, field in reader.fields.items():
        if not name.startswith(WRITTEN_BY_THE_WRITER):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    wanted = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim == 1:
            writer.add_tensor(tensor.name, weights.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, quantize(weights, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--types", nargs="+", required=True, choices=("F32", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for kind in given.types:
        target = given.folder / f"{given.model.stem}-{kind}.gguf"
        requantize(given.model, target, kind)
        print(f"{target}  {target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
