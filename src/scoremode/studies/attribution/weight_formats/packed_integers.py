"""GPTQ and AWQ: whole numbers of a few bits in 32-bit words, with a scale and a zero point for each group of inputs.

Both store (input, output), the transpose of Transformers. GPTQ packs along the input, from the lowest bit of the first
word on; ``g_idx`` names the group of each input; its first version stores zero points less 1. AWQ packs eight outputs
into a word, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from scoremode.core.models.safetensors import StoredTensor
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import PlainTensors, StoredWeight

if TYPE_CHECKING:
    import torch

PACKED = ".qweight"
BESIDE = ("qweight", "qzeros", "scales", "g_idx")
GPTQ_BITS = (2, 3, 4, 8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each four bits of a word belong to, from the lowest on
WORD = 32
UNPACKED_TOGETHER = 1 << 22  # numbers
VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what must be added to a stored zero point
OTHER_FORMAT = "give a checkpoint in another format, such as compressed-tensors or GGUF"


class PackedIntegers:
    def __init__(self, label: str, plain: PlainTensors, quantization: Mapping[str, Any]) -> None:
        self._plain, self._label = plain, label
        self._is_awq = quantization.get("quant_method") == "awq"
        self._bits, self._group = _read_config(label, quantization, self._is_awq)
        self._zero = 0 if self._is_awq else _zero_offset(label, quantization)
        modules = [name.removesuffix(PACKED) for name in plain.tensors if name.endswith(PACKED)]
        self._modules = {f"{module}.weight": module for module in modules}
        beside = {f"{module}.{leaf}" for module in modules for leaf in BESIDE}
        self.stored = {name: stored for name, stored in plain.stored.items() if name not in beside}
        self.stored |= {name: self._stored(name, module) for name, module in self._modules.items()}

    def read(self, name: str) -> torch.Tensor:
        module = self._modules.get(name)
        if module is None:
            return self._plain.read(name)
        import torch

        raw, tensors = self._plain.raw, self._plain.tensors
        outputs, inputs = self.stored[name].shape
        scales, words = raw(f"{module}.scales").float(), raw(f"{module}.qweight")
        zeros = unpacked(raw(f"{module}.qzeros").T, self._bits, outputs).T
        group = torch.arange(inputs) // max(inputs // len(scales), 1)
        if self._is_awq:
            zeros = in_awq_order(zeros)
        else:
            zeros = (zeros + self._zero) & (2**self._bits - 1)  # a zero point of 0, less 1, has all bits set
            group = raw(f"{module}.g_idx").long() if f"{module}.g_idx" in tensors else group
        if int(group.min()) < 0 or int(group.max()) >= len(scales):
            raise ModelError(f"{module}.g_idx of {self._label} names groups that do not exist", fix="download it again")
        weight = torch.empty(outputs, inputs)
        for some in _blocks(inputs, outputs) if self._is_awq else _blocks(outputs, inputs):
            if self._is_awq:
                numbers = in_awq_order(unpacked(words[some].T, self._bits, outputs).T)
                weight[:, some] = ((numbers - zeros[group[some]]) * scales[group[some]]).T
            else:
                numbers = unpacked(words[:, some], self._bits, inputs)
                weight[some] = ((numbers - zeros[group, some]) * scales[group, some]).T
        return weight

    def _stored(self, name: str, module: str) -> StoredWeight:
        tensors = self._plain.tensors
        parts = {leaf: tensors[key] for leaf in BESIDE if (key := f"{module}.{leaf}") in tensors}
        if missing := {"qzeros", "scales"} - parts.keys():
            raise ModelError(f"{self._label} lacks {module}.{min(missing)}", fix="download it again")
        inputs, outputs = parts["qweight"].shape if len(parts["qweight"].shape) == 2 else (0, 0)
        if self._is_awq:
            outputs = outputs * WORD // self._bits
        else:
            inputs = inputs * WORD // self._bits
        self._require_shapes(module, parts, inputs, outputs)
        bits = 8 * sum(part.end - part.begin for part in parts.values()) / max(inputs * outputs, 1)
        method = "AWQ" if self._is_awq else "GPTQ"
        group = f" g{self._group}" if self._group > 0 else ""
        return StoredWeight(name, (outputs, inputs), bits, f"{method} {self._bits} bit{group}")

    def _require_shapes(self, module: str, parts: Mapping[str, StoredTensor], inputs: int, outputs: int) -> None:
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
            raise ModelError(
                f"the tensors of {module} in {self._label} do not have the shapes that its config says",
                fix="download it again",
            )


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
