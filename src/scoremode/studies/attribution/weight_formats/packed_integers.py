"""GPTQ and AWQ: what no library that people have decodes on a CPU, a matrix at a time.

GPTQ and AWQ have whole numbers of a few bits in 32-bit words, with a scale and a zero point for each group of inputs.
Both store (input, output), the transpose of Transformers. GPTQ packs along the input, from the lowest bit of the first
word on; ``g_idx`` names the group of each input; its first version stores zero points less 1. AWQ packs eight outputs
into a word, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scoremode.core.models.safetensors import StoredTensor
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import OTHER_FORMAT, ModuleTensors, PlainTensors, Shape

if TYPE_CHECKING:
    import torch

BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each four bits of a word belong to, from the lowest on
WORD = 32
VERSIONS = {"gptq": {"gptq": 1, "gptq_v2": 0}, "awq": {"gemm": 0}}  # and what must be added to a stored zero point


class PackedIntegers(ModuleTensors):
    leaves, marks = ("qweight", "qzeros", "scales", "g_idx"), ("qweight",)

    def __init__(self, label: str, plain: PlainTensors, quantization: Mapping[str, Any]) -> None:
        method = quantization["quant_method"]
        self._is_awq = method == "awq"
        self._bits = bits = quantization.get("bits", quantization.get("w_bit"))
        self._group = group = quantization.get("group_size", 128)
        version = quantization.get("version" if self._is_awq else "checkpoint_format") or next(iter(VERSIONS[method]))
        if type(bits) is not int or bits not in BITS[method] or str(version).lower() not in VERSIONS[method]:
            message = f"{label} is {method.upper()} with {bits} bits in the version {version}"
            raise ModelError(f"{message}, which scoremode cannot unpack", fix=OTHER_FORMAT)
        self._zero = VERSIONS[method][str(version).lower()]
        if type(group) is not int or group == 0 or group < -1:
            raise ModelError(f"the config of {label} gives {group} as the size of a group", fix="download it again")
        super().__init__(label, plain)

    def _decoded(self, module: str, shape: Shape) -> torch.Tensor:
        import torch

        outputs, inputs = shape
        words, zeros, scales = (self.plain.raw(f"{module}.{leaf}") for leaf in ("qweight", "qzeros", "scales"))
        zeros = unpacked(zeros.T, self._bits, outputs).T
        group = torch.arange(inputs) // max(inputs // len(scales), 1)
        if self._is_awq:
            numbers, zeros = in_awq_order(unpacked(words.T, self._bits, outputs).T), in_awq_order(zeros)
        else:
            numbers = unpacked(words, self._bits, inputs)
            zeros = (zeros + self._zero) & (2**self._bits - 1)  # a zero point of 0, less 1, has all bits set
            if f"{module}.g_idx" in self.plain.tensors:
                group = self.plain.raw(f"{module}.g_idx").long()
        self.require(int(group.min()) >= 0 and int(group.max()) < len(scales), module)
        return ((numbers - zeros[group]) * scales.float()[group]).T.contiguous()

    def _described(self, module: str, parts: Mapping[str, StoredTensor]) -> tuple[Shape, str]:
        self.require({"qzeros", "scales"} <= parts.keys() and len(parts["qweight"].shape) == 2, module)
        inputs, outputs = parts["qweight"].shape
        if self._is_awq:
            outputs = outputs * WORD // self._bits
        else:
            inputs = inputs * WORD // self._bits
        groups = -(-inputs // self._group) if self._group > 0 else 1
        fits = (
            inputs > 0
            and parts["qweight"].dtype == parts["qzeros"].dtype == "I32"
            and parts["scales"].shape == (groups, outputs)
            and parts["qzeros"].shape == (groups, -(-outputs * self._bits // WORD))
            and (parts["g_idx"].shape == (inputs,) if "g_idx" in parts else inputs % groups == 0)
        )
        self.require(fits, module)
        group = f" g{self._group}" if self._group > 0 else ""
        return (outputs, inputs), f"{'AWQ' if self._is_awq else 'GPTQ'} {self._bits} bit{group}"


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first ``count`` numbers of each column of 32-bit words: (words, columns) becomes (count, columns).

    Numbers follow each other from the lowest bit of the first word on; with 3 bits, some span two words.
    """
    import torch

    at = torch.arange(count) * bits
    word, offset = at // WORD, (at % WORD).to(torch.int64)[:, None]
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    shifted = unsigned[word] >> offset
    spans = torch.nonzero(offset[:, 0] + bits > WORD)[:, 0]
    shifted[spans] |= unsigned[word[spans] + 1] << (WORD - offset[spans])
    numbers: torch.Tensor = shifted & (2**bits - 1)
    return numbers.to(torch.int32)


def in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """The columns of AWQ's eights, from the order of their bits to their own."""
    import torch

    eights = numbers.reshape(len(numbers), -1, len(AWQ_ORDER))
    return eights[:, :, torch.argsort(torch.tensor(AWQ_ORDER))].reshape(numbers.shape)
