"""``rtn:BITS:GROUP``: the baseline itself, rounded to nearest. For people who have not quantized anything yet.

Every matrix of the decoder layers is cut into groups of GROUP numbers along its input. A group is stored as one scale
in float16 and whole numbers of BITS bits, symmetric around zero. So a weight takes BITS + 16 / GROUP bits. With
``rtn:BITS:GROUP:asym`` a group has its smallest number in float16 as well, and its steps go from there to its largest:
BITS + 32 / GROUP bits. Embedding, head, norms, biases and routers of experts are the baseline's own; with ``:all`` at
the end, embedding and head are rounded too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from scoremode.core.models.facts import LAYER
from scoremode.errors import ModelError, OptionError, harmless
from scoremode.studies.attribution.weight_formats.stored import ROUTER, Shape, StoredWeight, TensorReader

if TYPE_CHECKING:
    import torch

PREFIX = "rtn:"
NAMED = re.compile(r"rtn:(\d{1,2}):(\d{1,6})(:asym)?(:all)?")
LEAST_BITS, MOST_BITS = 2, 16
INPUT_FIRST = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}  # matrices are stored as (input, output)
EXPERTS_INPUT_FIRST = {"gpt_oss", "llama4", "llama4_text"}  # experts are stored as (expert, input, output)
EXAMPLE = "give bits and the size of a group, as in rtn:4:32"


class RoundedWeights(TensorReader):
    """``stored`` says how the baseline's weights are stored, and ``read`` gives one of them."""

    def __init__(
        self, label: str, stored: Mapping[str, StoredWeight], read: Callable[[str], torch.Tensor], model_type: str
    ) -> None:
        self._read, self._model_type = read, model_type
        self._bits, self._group, self._asymmetric, everything = read_name(label)
        self._rounded = {
            name
            for name, w in stored.items()
            if len(w.shape) >= 2 and name.endswith(("weight", "_proj")) and not ROUTER.search(name)
            if everything or LAYER.match(name) is not None
        }
        if not self._rounded:
            raise ModelError(f"the baseline has no matrices that {label} could round", fix="name another candidate")
        self.stored = {name: self._stored(w) if name in self._rounded else w for name, w in stored.items()}
        rest = "norms and biases are" if everything else "embedding, head, norms and biases are"
        self.notes = (f"{label} is the baseline rounded to nearest; {rest} unchanged",)

    def read(self, name: str) -> torch.Tensor:
        weight = self._read(name).float()  # on the device of the baseline
        if name not in self._rounded:
            return weight
        axis = self._input_axis(name, tuple(weight.shape))
        rounded = round_groups(weight.movedim(axis, -1), self._bits, self._group, asymmetric=self._asymmetric)
        return rounded.movedim(-1, axis).contiguous()

    def _stored(self, weight: StoredWeight) -> StoredWeight:
        columns = weight.shape[self._input_axis(weight.name, weight.shape)]
        per_group, suffix = (32, " asym") if self._asymmetric else (16, "")
        bits = self._bits + per_group * -(-columns // self._group) / columns
        return StoredWeight(weight.name, weight.shape, bits, f"rtn {self._bits} bit g{self._group}{suffix}")

    def _input_axis(self, name: str, shape: Shape) -> int:
        first = EXPERTS_INPUT_FIRST if len(shape) == 3 else INPUT_FIRST
        return len(shape) - 2 if self._model_type in first and LAYER.match(name) else len(shape) - 1


def round_groups(weight: torch.Tensor, bits: int, group: int, *, asymmetric: bool = False) -> torch.Tensor:
    """The weights after rounding to nearest, in groups along the last axis; the last group may be shorter."""
    import torch

    *rows, columns = weight.shape
    group = min(group, columns)  # a group larger than a row is that row
    if columns % group:  # by numbers that do not change the smallest and the largest
        weight = torch.cat([weight, weight[..., -1:].expand(*rows, -columns % group)], -1)
    groups = weight.reshape(*rows, -1, group)
    if asymmetric:
        least, first, last = groups.amin(-1, keepdim=True).half().float(), 0, 2**bits - 1
        reach = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    else:
        least, first, last = torch.zeros_like(groups[..., :1]), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        reach = groups.abs().amax(-1, keepdim=True)
    scale = (reach / last).half().float()
    steps = torch.where(scale > 0, (groups - least) / scale, torch.zeros_like(groups)).round().clamp(first, last)
    rounded: torch.Tensor = (steps * scale + least).reshape(*rows, -1)
    return rounded[..., :columns]


def read_name(label: str) -> tuple[int, int, bool, bool]:
    """Bits, size of a group, whether it is asymmetric, and whether everything is rounded."""
    match = NAMED.fullmatch(label)
    if match is None:
        raise OptionError(f"{harmless(label[:40])} is not a rounding to nearest", fix=EXAMPLE)
    bits, group = int(match[1]), int(match[2])
    if not LEAST_BITS <= bits <= MOST_BITS or group < 1:
        message = f"{label} asks for {bits} bits in groups of {group}"
        raise OptionError(message, fix=f"give {LEAST_BITS} to {MOST_BITS} bits, as in rtn:4:32")
    return bits, group, match[3] is not None, match[4] is not None
