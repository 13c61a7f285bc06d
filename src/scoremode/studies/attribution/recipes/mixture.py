"""A mixture of precisions, and a format's name in the words that recipes share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scoremode.studies.attribution.weight_formats.stored import ROUTER, StoredWeight

FLOATS = {"float64": 64, "float32": 32, "F32": 32, "float16": 16, "bfloat16": 16, "F16": 16, "BF16": 16}
INTEGERS = re.compile(r"(?:rtn |GPTQ |AWQ )(\d+) bit|W(\d+)A(\d+)")
GROUP = re.compile(r"\bg(\d+)\b")
BLOCK = re.compile(r"blocks (\d+)×(\d+)")
GGUF_BITS = re.compile(r"I?Q(\d)_")
EXL3_BITS = re.compile(r"EXL3 ([\d.]+) bit$")
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
BLOCKS = 32  # weights that share a scale in most GGUF types


@dataclass(frozen=True, slots=True)
class Mixture:
    """What each parameter of a model is to become."""

    model_type: str  # of the baseline's config
    parameters: Mapping[str, StoredWeight]  # by name; each as the candidate that was chosen for it stores it

    @property
    def matrices(self) -> Iterator[StoredWeight]:
        """What tools quantize: everything with more than one axis but routers of experts."""
        return (w for w in self.parameters.values() if len(w.shape) > 1 and not ROUTER.search(w.name))


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    tool: str
    suffix: str  # of its file, after the prefix that the user gave
    text: str
    command: str  # what to type, with FILE for the recipe's file
    notes: tuple[str, ...]  # what the tool cannot do exactly as it was measured


@dataclass(frozen=True, slots=True)
class Precision:
    """A format in words that tools share."""

    bits: int  # of one number, without its scale; 16 and more: kept as it is
    group: int | None = None  # weights that share a scale; None: a whole row
    is_float: bool = False
    is_symmetric: bool = True
    activation_bits: int = 16
    kind: str = ""  # NVFP4 or MXFP4
    blocks: tuple[int, int] | None = None  # rows and columns that share a scale

    @property
    def is_kept(self) -> bool:
        return self.bits >= 16


def modules_of(weight: StoredWeight) -> tuple[str, ...]:
    """The modules that a matrix consists of in files, where the experts of a layer are stored one by one: ``*``.

    >>> modules_of(StoredWeight("model.layers.0.mlp.experts.gate_up_proj", (8, 4, 2), 16, "bfloat16"))
    ('model.layers.0.mlp.experts.*.gate_proj', 'model.layers.0.mlp.experts.*.up_proj')
    """
    module, dot, leaf = weight.name.rpartition(".")
    if len(weight.shape) != 3 or leaf not in EXPERTS:
        return (weight.name.removesuffix(".weight"),)
    return tuple(f"{module}{dot}*.{piece}" for piece in EXPERTS[leaf])


def precision_of(weight: StoredWeight) -> tuple[Precision, bool]:
    """The precision of a stored weight, and whether its format says exactly that. Otherwise its bits decide.

    >>> precision_of(StoredWeight("w", (4, 64), 4.5, "rtn 4 bit g32"))
    (Precision(bits=4, group=32, is_float=False, is_symmetric=True, activation_bits=16, kind='', blocks=None), True)
    """
    name = weight.format.removesuffix(" + LoRA")
    if name in FLOATS:
        return Precision(FLOATS[name], is_float=True), True
    if name.startswith(("NVFP4", "MXFP4")):
        return Precision(
            4, 16 if name[0] == "N" else 32, True, activation_bits=16 if "A16" in name else 4, kind=name[:5]
        ), True
    if name.startswith("FP8"):
        block = BLOCK.search(name)
        blocks = (int(block[1]), int(block[2])) if block else None
        return Precision(8, is_float=True, activation_bits=16 if "A16" in name else 8, blocks=blocks), True
    if found := INTEGERS.search(name):
        group = GROUP.search(name)
        is_symmetric = not (name.startswith("AWQ") or " asym" in name)
        activations = int(found[3]) if found[3] else 16
        size = int(group[1]) if group else None
        return Precision(int(found[1] or found[2]), size, False, is_symmetric, activations), True
    named = GGUF_BITS.match(name) or EXL3_BITS.match(name)
    bits = max(2, min(math.ceil(float(named[1])) if named else int(weight.bits), 8))
    return Precision(bits if weight.bits < 16 else 16, BLOCKS, is_symmetric=False), False


def counted(count: int, what: str) -> str:
    """A number with its noun.

    >>> counted(1, "matrix"), counted(2, "matrix")
    ('1 matrix', '2 matrices')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what.removesuffix('x')}ces"
