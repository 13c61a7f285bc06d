"""The ExLlamaV3 engine: what it says without a GPU, and its numbers where there is one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.engines.exllamav3 import ExllamaPlugin
from scoremode.engines.plugin import Work
from scoremode.engines.registry import choose, open_engine
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.models.facts import inspect
from scoremode.models.subject import format_of
from tests.makers import make_small_llama, make_tokenizer

EXL3 = {"quant_method": "exl3", "bits": 3.5}


def as_exl3(tiny: Path, folder: Path, quantization: object = EXL3) -> Path:
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def require_gpu() -> None:
    if importlib.util.find_spec("exllamav3") is None or not torch.cuda.is_available():
        reason = "exllamav3 and an NVIDIA GPU are needed"
        print(reason)
        pytest.skip(reason)


# ── without a GPU ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_folder_is_claimed_by_what_its_config_says(tiny: Path, tmp_path: Path) -> None:
    plugin = ExllamaPlugin()
    assert plugin.claims(str(as_exl3(tiny, tmp_path / "exl3")))
    assert choose(str(tmp_path / "exl3")).plugin.name == "exllamav3"
    for name, quantization in {"gptq": {"quant_method": "gptq"}, "list": [EXL3], "none": None}.items():
        assert not plugin.claims(str(as_exl3(tiny, tmp_path / name, quantization)))
    for name, content in {"cut": "{", "number": "7", "deep": "[" * 100_000, "empty": ""}.items():
        (tmp_path / f"damaged-{name}").mkdir()
        (tmp_path / f"damaged-{name}" / "config.json").write_text(content)
        assert not plugin.claims(str(tmp_path / f"damaged-{name}"))
    assert not plugin.claims(str(tmp_path))
    assert not plugin.claims("a\0b")


def test_without_the_package_or_a_gpu_one_line_says_what_is_missing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose(str(as_exl3(tiny, tmp_path / "exl3")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(EngineError, match=r"ExLlamaV3 is not installed; install a CUDA build of torch, then pip inst"):
        open_engine(chosen, Work(longest=16))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.6.5")
    with pytest.raises(EngineError, match=r"needs an NVIDIA GPU, and torch finds none; score it on a machine with a G"):
        open_engine(chosen, Work(longest=16))


def test_an_unquantized_width_that_it_cannot_run_is_refused_before_it_is_opened(tiny: Path) -> None:
    with pytest.raises(ModelError, match="hidden size of 48 is not a multiple of 128; score it with --engine transf"):
        choose(str(tiny), "exllamav3").settings()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "--dtype does not apply.*computes in float16"),
        ({"batch_tokens": 3}, "--batch-tokens does not apply.*one window"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size does not apply.*--tensor-p"),
    ],
)
def test_options_of_other_engines_are_refused(tiny: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        choose(str(as_exl3(tiny, tmp_path / "exl3")), None, options)


def test_switches_of_its_kernels_are_a_part_of_the_identity(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose(str(as_exl3(tiny, tmp_path / "exl3")))
    before = chosen.settings()
    monkeypatch.setenv("EXL3_SOME_KERNEL", "1")
    assert chosen.settings() == {**before, "EXL3_SOME_KERNEL": "1"}


def test_size_and_format_from_a_header_written_by_hand(tiny: Path, tmp_path: Path) -> None:
    """128 × 256 weights of 3 bits: 8 × 16 tiles of 256 weights, 48 words of 16 bits each."""
    folder = as_exl3(tiny, tmp_path / "exl3")
    shapes = {
        "model.layers.0.self_attn.q_proj.trellis": ("I16", [8, 16, 48]),
        "model.layers.0.self_attn.q_proj.suh": ("F16", [128]),
        "model.layers.0.self_attn.q_proj.svh": ("F16", [256]),
        "model.layers.0.self_attn.q_proj.mcg": ("I32", []),
        "model.layers.1.input_layernorm.weight": ("F16", [128]),
        "model.embed_tokens.weight": ("F16", [10, 128]),
        "lm_head.trellis": ("I16", [8, 1, 96]),
    }
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = int(np.prod(shape, dtype=np.int64)) * {"I16": 2, "F16": 2, "I32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(at))
    found = inspect(str(folder))
    assert found.sizes is not None
    assert {name: (part.bytes, part.weights) for name, part in found.sizes.parts.items()} == {
        "body": (8 * 16 * 96 + 2 * 384 + 4 + 256, 128 * 256 + 128),
        "embedding": (2560, 1280),
        "head": (8 * 192, 2048),
    }
    assert found.sizes.parts["head"].bits_per_weight == 6
    assert found.bits_per_weight == pytest.approx(8 * at / (128 * 256 + 128 + 1280 + 2048))
    assert format_of(found.config, None) == "EXL3 3.5 bpw"
    header["lm_head.trellis"]["shape"] = [8, 96]
    header["lm_head.trellis"]["data_offsets"][1] = header["lm_head.trellis"]["data_offsets"][0] + 8 * 192
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(at))
    assert inspect(str(folder)).bits_per_weight is None, "a trellis of another shape is not understood"


# ── with one ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_unquantized_weights_give_what_transformers_gives(tmp_path: Path) -> None:
    require_gpu()
    from scoremode.plan.windows import Window, WindowList

    folder = make_small_llama(tmp_path / "small")
    make_tokenizer(folder, adds_bos=False)
    ids = np.random.default_rng(0).integers(2, 1000, 200).astype(np.int32)
    rows = np.arange(50, 199, 3, dtype=np.int32)
    source = WindowList(
        (Window(ids, np.arange(199, dtype=np.int32), ids[1:, None]), Window(ids, rows, ids[rows][:, None]))
    )
    done = np.zeros(2, np.bool_)
    engines: dict[str, dict[str, Any]] = {"exllamav3": {}, "transformers": {"dtype": "float16", "device": "cuda"}}
    found = {}
    for name, options in engines.items():
        engine = open_engine(choose(str(folder), name, options), Work(longest=200))
        found[name] = dict(engine.score(source, done))
        engine.close()
    for index in (0, 1):
        gap = np.abs(found["exllamav3"][index].logprob - found["transformers"][index].logprob)
        assert gap.mean() < 0.01
        assert gap.max() < 0.1


def test_a_baseline_with_logits_alone_has_the_divergence_of_its_own_logits(tmp_path: Path) -> None:
    """Unquantized weights against 3 bits, both by ExLlamaV3, judged by its own logits in float64."""
    require_gpu()
    import scoremode as sm

    baseline = make_small_llama(tmp_path / "baseline")
    make_tokenizer(baseline, adds_bos=False)
    candidate, rows = tmp_path / "candidate", ["-b", "3", "-cr", "4", "-cc", "256"]
    words = ["-i", str(baseline), "-o", str(candidate), "-w", str(tmp_path / "work"), *rows]
    subprocess.run([sys.executable, "-m", "exllamav3.conversion.convert_model", *words], check=True)
    text = "the quick brown fox jumps over the lazy dog " * 12
    models = str(baseline), str(candidate), str(baseline)
    found, itself = sm.compare(*models, engine="exllamav3", text=text, context_length=512)
    assert found.kl is not None
    assert itself.kl is not None
    assert itself.kl.max() == 0
    logs = []
    for folder in (baseline, candidate):
        chosen = choose(str(folder), "exllamav3")
        ids = torch.from_numpy(chosen.subject.tokenizer.encode(text, special=False).ids.astype(np.int64))[None]
        engine: Any = open_engine(chosen, Work(longest=512))
        logits = engine.model.forward(ids, {"attn_mode": "flash_attn_nc"})[0, :-1, :1003]
        logs.append(torch.log_softmax(logits.double().cpu(), -1))
        engine.close()
    judged = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).numpy()
    assert np.abs(found.kl - judged).max() < 1e-6
