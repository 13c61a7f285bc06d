"""scoremode ppl: the facts for machines, the table for people, and every bad input as one line."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scoremode.core.disk.files import file_sha256
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
from tests.command_line import Command, Refused

TEXT = "Once upon a time there was a little girl named Lily."
LEAST = {
    *("perplexity", "perplexity_stderr", "mean_nll", "bits_per_byte", "targets", "windows", "method", "plan_digest"),
    *("corpus_sha256", "tokenizer", "engine", "dtype", "head", "seconds", "tokens_per_second"),
}


@pytest.fixture
def checkpoint(stories: Path, tmp_path: Path) -> Path:
    """A copy of stories260K to damage."""
    return Path(shutil.copytree(stories, tmp_path / "checkpoint"))


def rewrite_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ── the facts ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_json_is_one_object_with_the_promised_facts(command: Command, stories: Path) -> None:
    outcome = command("ppl", stories, "--text", TEXT, "--json")
    assert outcome.code == 0
    assert outcome.json.keys() >= LEAST
    assert outcome.err == ""


def test_a_manifest_has_what_another_person_needs(command: Command, stories: Path, tmp_path: Path) -> None:
    command("ppl", stories, "--text", TEXT, "--out", tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["model_files"]["model.safetensors"] == file_sha256(stories / "model.safetensors")
    assert manifest.keys() >= (LEAST - {"perplexity", "perplexity_stderr", "mean_nll", "bits_per_byte"})
    assert manifest["versions"].keys() >= {"scoremode", "torch", "transformers", "python"}


def test_the_embedded_model_answers_to_its_name(command: Command) -> None:
    found = command("ppl", "smollm2-135m", "--text", "The quick brown fox jumps", "--json").json
    assert (found["model"], found["targets"], found["perplexity"] > 1) == ("smollm2-135m", 4, True)


def test_a_text_of_one_word_is_not_called_impossible(command: Command) -> None:
    """Its only word begins at the first token, which has no score: words are unknown, but no target is impossible."""
    assert "probability zero" not in command("ppl", "table:uniform", "--text", "aaaa").out


def test_markup_in_a_file_name_is_printed_as_it_is(command: Command, tmp_path: Path) -> None:
    (tmp_path / "[red]a[b].txt").write_text("one two")
    assert "[red]a[b].txt" in command("ppl", "table:uniform", "--corpus", tmp_path / "[red]a[b].txt").out


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_damaged_run_in_the_cache_says_what_to_type(
    command: Command, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    arguments = ["ppl", "table:uniform", "--text", TEXT]
    command(*arguments)
    [folder] = (tmp_path / "runs").iterdir()
    (folder / "scores.parquet").unlink()
    assert "--fresh" in refused(*arguments)


@pytest.mark.parametrize("at", [1, 2], ids=["while the columns are written", "while the manifest is written"])
def test_a_disk_that_fills_up_leaves_no_manifest_and_the_command_goes_on(
    command: Command, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int
) -> None:
    calls: list[int] = []
    fsync = os.fsync

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    arguments = ["ppl", "table:uniform", "--text", TEXT, "--out", tmp_path / "run"]
    monkeypatch.setattr("scoremode.core.disk.files.os.fsync", full)
    assert "the disk is full" in refused(*arguments)
    assert not (tmp_path / "run" / "manifest.json").exists()
    assert command(*arguments).code == 0


# ── bad models ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_nan_for_one_token_of_the_text_only_is_refused_too(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    """The embedding is untied first, so that the head is whole and a text without that token would pass."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    spoiled = int(HuggingFaceTokenizer.load(checkpoint).encode(TEXT, special=True).ids[4])

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.embed_tokens.weight"][spoiled] = math.nan

    rewrite_weights(checkpoint, spoil)
    line = refused("ppl", checkpoint, "--text", TEXT, "--out", tmp_path / "run")
    assert "NaN in window 0" in line
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_tokenizer_that_was_refused_does_not_occupy_the_run(
    command: Command, refused: Refused, tiny: Path, stories: Path, tmp_path: Path
) -> None:
    """Nothing was scored, so the right command needs no --fresh."""
    arguments = ["ppl", tiny, "--text", TEXT, "--out", tmp_path / "run"]
    refused(*arguments, "--tokenizer", stories)
    assert command(*arguments).code == 0


def test_remote_code_is_not_trusted_unless_asked(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    remote = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": remote}))
    (checkpoint / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "--trust-remote-code" in refused("ppl", checkpoint, "--text", TEXT)
    assert not (tmp_path / "ran").exists()
