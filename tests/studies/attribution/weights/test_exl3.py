"""EXL3: tiles decoded bit by bit, whole matrices, and ExLlamaV3's own results on an H200."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.exl3 import MULTIPLIERS, codebook, decoded_tiles
from tests.studies.attribution.weights.checkpoints import CONFIG, Tensors, opened, save

MODULE = "model.layers.0.self_attn.q_proj"
# sha256 of what ExLlamaV3 1.6.5 decoded from these tiles on an H200, its first 16 digits
BITS = (*range(1, 9), 1.5, 2.5, 3.5)
RECORDED = {
    "3inst": """
        2537bfa01153f706 0daeb043891c3247 a995dc4d40116944 3a5f9257e454db85 8e09da524069dbae
        2b23dbf64ffb3b6b e5d02155258ebc14 14a13a18c85ed24e
    """,
    "mcg": """
        05708ba084dbcca2 2a9d1099a5f3317e cee75f0098910988 8597dbaaf1b5a622 16f75b31060a99c9
        5040d4c239a621e6 05fcceb45ba028de add11d5a4d151021
    """,
    "mul1": """
        1686669041ebad9f d67e772a155705cd 43abaffba0ee8ff3 4a2f322aa5b1e2bd bff1c23757a23671
        b7a7a953ce8908e5 327c0bbfdbc1fa1b bbe35b9aa7f11eb2 e5ceb8036955a9d1 c75a6af67af163e1
        9e6e02194b4e9a93
    """,
}
CASES = [(formula, *case) for formula in RECORDED for case in zip(BITS, RECORDED[formula].split(), strict=False)]


def seeded_trellis(bits: float, rows: int = 8, columns: int = 16) -> torch.Tensor:
    """Any bits are a valid code."""
    words = np.random.default_rng(round(10 * bits)).integers(0, 1 << 16, (rows, columns, round(16 * bits)))
    return torch.from_numpy(words.astype(np.uint16).view(np.int16))


def seeded_factors(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).normal(0, 1, size).astype(np.float16))


def decoded_by_hand(tile: torch.Tensor, formula: str, bits: float) -> np.ndarray:
    """One tile, from a string of its bits."""
    halves = [int(word) & 0xFFFF for word in tile]
    ring = "".join(f"{halves[i + 1]:016b}{halves[i]:016b}" for i in range(0, len(halves), 2))
    found = np.zeros((16, 16), np.float16)
    for number in range(256):
        end = int((number + 1) * bits)
        state = int("".join(ring[bit % len(ring)] for bit in range(end - 16, end)), 2)
        lane, part = divmod(number, 8)
        row = lane % 4 * 2 + part % 2 + 8 * (part // 2 % 2)
        column = lane // 4 + 8 * (part // 4)
        found[row, column] = codebook(formula)[state]
    return found


@pytest.mark.parametrize(("formula", "bits", "recorded"), CASES)
def test_tiles_are_decoded_as_by_hand_and_by_exllamav3(formula: str, bits: float, recorded: str) -> None:
    trellis = seeded_trellis(bits)
    found = decoded_tiles(trellis, formula).numpy()
    assert hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()[:16] == recorded
    for row, column in ((0, 0), (5, 11), (7, 15)):
        tile = found[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        assert np.array_equal(tile, decoded_by_hand(trellis[row, column], formula, bits))


def exl3_tensors(bits: float = 4, formula: str = "mcg") -> Tensors:
    tensors = {f"{MODULE}.trellis": seeded_trellis(bits)}
    tensors |= {f"{MODULE}.suh": seeded_factors(128), f"{MODULE}.svh": seeded_factors(256)}
    if formula in MULTIPLIERS:
        word = np.array(MULTIPLIERS[formula], np.uint32).view(np.int32)
        tensors[f"{MODULE}.{formula}"] = torch.from_numpy(word.reshape(1))[0].clone()
    return tensors


def saved(folder: Path, tensors: Tensors) -> str:
    return save(folder, tensors, num_hidden_layers=1, quantization_config={"quant_method": "exl3", "bits": 4.0})


def baseline(outputs: int = 256, inputs: int = 128) -> Tensors:
    return {f"{MODULE}.weight": torch.zeros(outputs, inputs)}


def by_definition(bits: float, formula: str) -> np.ndarray:
    """svh · H tilesᵀ H · suh, in float64."""
    matrix = np.array([[(-1) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]) / 128**0.5
    inner = decoded_tiles(seeded_trellis(bits), formula).double().numpy()
    inner = np.kron(np.eye(1), matrix) @ inner @ np.kron(np.eye(2), matrix)
    found = (inner * seeded_factors(128).double().numpy()[:, None] * seeded_factors(256).double().numpy()).T
    return np.asarray(found)


@pytest.mark.parametrize(("formula", "bits"), [("3inst", 3), ("mcg", 4), ("mul1", 2.5), ("mul1", 8)])
def test_a_matrix_is_its_definition(formula: str, bits: float, tmp_path: Path) -> None:
    found = opened(saved(tmp_path / "exl3", exl3_tensors(bits, formula)), baseline(), CONFIG)
    expected = by_definition(bits, formula)
    assert np.abs(found.tensor(f"{MODULE}.weight").numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    stored = found.stored[f"{MODULE}.weight"]
    words = 8 * 16 * 16 * bits + 128 + 256 + (0 if formula == "3inst" else 2)
    assert stored.format == f"EXL3 {bits:g} bit"
    assert stored.bits == pytest.approx(16 * words / (128 * 256), abs=1e-12)


def test_sizes_that_were_filled_up_are_cut(tmp_path: Path) -> None:
    folder = saved(tmp_path / "exl3", exl3_tensors())
    whole = opened(folder, baseline()).tensor(f"{MODULE}.weight")
    assert torch.equal(opened(folder, baseline(200, 96)).tensor(f"{MODULE}.weight"), whole[:200, :96])
    with pytest.raises(ModelError, match=r"has the shape 256 × 128, and the baseline's .* has 128 × 128"):
        opened(folder, baseline(128, 128))


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    good = exl3_tensors()
    cases = [
        ("svh", seeded_factors(128)),
        ("suh", torch.ones(128, dtype=torch.int32)),
        ("suh", None),
        ("trellis", seeded_trellis(2.5)),  # only mul1 has half numbers of bits
        ("trellis", seeded_trellis(4, rows=7)),
        ("trellis", seeded_trellis(4).reshape(-1)),
        ("mcg", torch.tensor(7, dtype=torch.int32)),  # another formula
        ("mul1", good[f"{MODULE}.mcg"].clone()),  # and mcg besides
    ]
    for number, (leaf, tensor) in enumerate(cases):
        tensors = {name: own for name, own in good.items() if name != f"{MODULE}.{leaf}"}
        tensors |= {} if tensor is None else {f"{MODULE}.{leaf}": tensor}
        with pytest.raises(ModelError, match=rf"the tensors of {MODULE} in .* are missing, damaged"):
            opened(saved(tmp_path / str(number), tensors), baseline())
