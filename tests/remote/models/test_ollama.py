"""Models that Ollama keeps: found by their manifests, never started. Other answers are rows of names.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.errors import ModelError
from scoremode.remote.models.ollama import WEIGHTS, manifest_of
from tests.gguf_files import gguf_of, require_llamacpp

TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture
def store(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ollama's folder with one model, llama3.2:3b."""
    require_llamacpp()
    root = tmp_path / "ollama"
    made = gguf_of(tiny, tmp_path / "made.gguf")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    (root / "blobs").mkdir(parents=True)
    made.rename(root / "blobs" / f"sha256-{digest}")
    manifest = root / "manifests" / manifest_of("llama3.2:3b")
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "text/plain", "digest": "sha256:0", "size": 1}]
    layers += [{"mediaType": WEIGHTS, "digest": f"sha256:{digest}", "size": 98_000_000}]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    return root


def test_a_model_of_ollama_is_scored_by_its_file(store: Path) -> None:
    run = sm.ppl("ollama:llama3.2:3b", text=TEXT)
    (blob,) = (store / "blobs").iterdir()
    (store / "same.gguf").symlink_to(blob)
    assert run.manifest["model"] == "ollama:llama3.2:3b"
    assert run.perplexity == sm.ppl(str(store / "same.gguf"), text=TEXT).perplexity


def test_a_damaged_store_is_refused(store: Path) -> None:
    (store / "manifests" / manifest_of("llama3.2:3b")).write_text('{"layers": [{"mediaType": 1}]}')
    with pytest.raises(ModelError, match="cannot be read"):
        sm.ppl("ollama:llama3.2:3b", text=TEXT)
    (store / "manifests" / manifest_of("llama3.2:3b")).write_text('{"layers": []}')
    with pytest.raises(ModelError, match="has no GGUF file"):
        sm.ppl("ollama:llama3.2:3b", text=TEXT)


def test_a_machine_without_ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with pytest.raises(ModelError, match="Ollama keeps no models"):
        sm.ppl("ollama:llama3.2:3b", text=TEXT)
