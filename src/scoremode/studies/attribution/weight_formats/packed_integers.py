"""GPTQ, AWQ and fp8: what no library that people have decodes on a CPU, a matrix at a time.

GPTQ and AWQ have whole numbers of a few bits in 32-bit words, with a scale and a zero point for each group of inputs.
Both store (input, output), the transpose of Transformers. GPTQ packs along the input, from the lowest bit of the first
word on; ``g_idx`` names the group of each input; its first version stores zero points less 1. AWQ packs eight outputs
into a word, in an order of its own. fp8 has numbers of 8 bits, with a scale for each block, each row or the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from scoremode.core.models.safetensors import StoredTensor
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import ModuleTensors, PlainTensors, Shape

if TYPE_CHECKING:
    import torch

GPTQ_BITS = (2, 3, 4, 8)
FLOAT8 = ("F8_E4M3", "F8_E5M2")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each four bits of a word belong to, from the lowest on
WORD = 32
UNPACKED_TOGETHER = 1 << 22  # numbers
VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what must be added to a stored zero point
OTHER_FORMAT = "give a checkpoint in another format, such as compressed-tensors or GGUF"


class PackedIntegers(ModuleTensors):
    leaves, marks = ("qweight", "qzeros", "scales", "g_idx"), ("qweight",)

    def __init__(self, label: str, plain: PlainTensors, quantization: Mapping[str, Any]) -> None:
        self._is_awq = quantization.get("quant_method") == "awq"
        self._bits, self._group = _read_config(label, quantization, self._is_awq)
        self._zero = 0 if self._is_awq else _zero_offset(label, quantization)
        super().__init__(label, plain)

    def _decoded(self, module: str, shape: Shape) -> torch.Tensor:
        import torch

        raw, tensors = self.plain.raw, self.plain.tensors
        outputs, inputs = shape
        scales, words = raw(f"{module}.scales").float(), raw(f"{module}.qweight")
        zeros = unpacked(raw(f"{module}.qzeros").T, self._bits, outputs).T
        group = torch.arange(inputs) // max(inputs // len(scales), 1)
        if self._is_awq:
            zeros = in_awq_order(zeros)
        else:
            zeros = (zeros + self._zero) & (2**self._bits - 1)  # a zero point of 0, less 1, has all bits set
            group = raw(f"{module}.g_idx").long() if f"{module}.g_idx" in tensors else group
        if int(group.min()) < 0 or int(group.max()) >= len(scales):
            raise ModelError(f"{module}.g_idx of {self.label} names groups that do not exist", fix="download it again")
        weight = torch.empty(outputs, inputs)
        for some in _blocks(inputs, outputs) if self._is_awq else _blocks(outputs, inputs):
            if self._is_awq:
                numbers = in_awq_order(unpacked(words[some].T, self._bits, outputs).T)
                weight[:, some] = ((numbers - zeros[group[some]]) * scales[group[some]]).T
            else:
                numbers = unpacked(words[:, some], self._bits, inputs)
                weight[some] = ((numbers - zeros[group, some]) * scales[group, some]).T
        return weight

    def _described(self, module: str, parts: Mapping[str, StoredTensor]) -> tuple[Shape, str]:
        if missing := {"qzeros", "scales"} - parts.keys():
            raise ModelError(f"{self.label} lacks {module}.{min(missing)}", fix="download it again")
        inputs, outputs = parts["qweight"].shape if len(parts["qweight"].shape) == 2 else (0, 0)
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
            and ("g_idx" not in parts or parts["g_idx"].shape == (inputs,))
            and ("g_idx" in parts or inputs % groups == 0)
        )
        if not fits:
            what = f"the tensors of {module} in {self.label} do not have the shapes that its config says"
            raise ModelError(what, fix="download it again")
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
    found = unsigned[word] >> offset
    spans = torch.nonzero(offset[:, 0] + bits > WORD)[:, 0]
    found[spans] |= unsigned[word[spans] + 1] << (WORD - offset[spans])
    numbers: torch.Tensor = found & (2**bits - 1)
    return numbers.to(torch.int32)


def _blocks(count: int, width: int) -> Iterator[slice]:
    """Parts of a matrix that are unpacked together, because unpacking takes several times the room of the result."""
    size = max(1, UNPACKED_TOGETHER // max(width, 1))
    return (slice(begin, begin + size) for begin in range(0, count, size))


def in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """The columns of AWQ's eights, from the order of their bits to their own."""
    import torch

    eights = numbers.reshape(len(numbers), -1, len(AWQ_ORDER))
    return eights[:, :, torch.argsort(torch.tensor(AWQ_ORDER))].reshape(numbers.shape)


def _read_config(label: str, quantization: Mapping[str, Any], is_awq: bool) -> tuple[int, int]:
    bits, group = quantization.get("bits", quantization.get("w_bit")), quantization.get("group_size", 128)
    known = (4,) if is_awq else GPTQ_BITS
    method = "AWQ" if is_awq else "GPTQ"
    if type(bits) is not int or bits not in known:
        raise ModelError(f"{label} is {method} with {bits} bits, which scoremode cannot unpack", fix=OTHER_FORMAT)
    if type(group) is not int or group == 0 or group < -1:
        raise ModelError(f"the config of {label} gives {group} as the size of a group", fix="download it again")
    version = str(quantization.get("version", "gemm")).lower()
    if is_awq and version != "gemm":
        raise ModelError(f"{label} is AWQ in the version {version}, and only gemm is known", fix=OTHER_FORMAT)
    return bits, group


def _zero_offset(label: str, quantization: Mapping[str, Any]) -> int:
    stored = str(quantization.get("checkpoint_format") or "gptq").lower()
    if stored not in VERSIONS:
        raise ModelError(f"{label} is GPTQ in the format {stored}, which scoremode cannot unpack", fix=OTHER_FORMAT)
    return VERSIONS[stored]


# ── fp8 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Float8Tensors(ModuleTensors):
    scales = ("weight_scale_inv", "weight_scale")
    never_weights = (*scales, "input_scale", "activation_scale")
    leaves = ("weight", *never_weights)

    def __init__(self, label: str, plain: PlainTensors, quantization: Mapping[str, Any]) -> None:
        block = quantization.get("weight_block_size") or [1, 1]
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise ModelError(f"the config of {label} gives {block} as the size of a block", fix="download it again")
        self._block = (block[0], block[1])
        super().__init__(label, plain)

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"{self.label} also rounds activations; here only its weights are put in",)

    def _quantized(self) -> list[str]:
        matrices = ((n, tensor) for n, tensor in self.plain.tensors.items() if n.endswith(".weight"))
        return [n.removesuffix(".weight") for n, tensor in matrices if tensor.dtype in FLOAT8]

    def _scale_of(self, module: str) -> str | None:
        return next((leaf for leaf in self.scales if f"{module}.{leaf}" in self.plain.stored), None)

    def _decoded(self, module: str, shape: Shape) -> torch.Tensor:
        weight, scale = self.plain.read(f"{module}.weight"), self.plain.read(f"{module}.{self._scale_of(module)}")
        if scale.numel() == 1:
            return weight * scale.reshape(1, 1)
        rows, columns = self._block if scale.shape != (shape[0], 1) else (1, shape[1])
        whole = scale.repeat_interleave(rows, 0)[: shape[0]]
        return weight * whole.repeat_interleave(columns, 1)[:, : shape[1]]

    def _described(self, module: str, parts: Mapping[str, StoredTensor]) -> tuple[Shape, str]:
        shape = parts["weight"].shape
        if (leaf := self._scale_of(module)) is None:
            raise ModelError(f"{self.label} has no scale for {module}.weight", fix="download it again")
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or (parts[leaf].size != 1 and parts[leaf].shape not in (blocks, (shape[0], 1))):
            what = f"{module}.{leaf} of {self.label} does not have one number for each block"
            raise ModelError(what, fix="download it again")
        return shape, "FP8" if parts[leaf].size == 1 else f"FP8 blocks {self._block[0]}×{self._block[1]}"
