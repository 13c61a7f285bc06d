"""Several types of the K/V cache in one command: each is a candidate of the same model."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.core.store import runs
from scoremode.errors import InputError, OptionError
from tests.command_line import Command, Refused
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import make_tiny_model

TEXT = "The quick brown fox jumps over 12345 lazy dogs, and the dog does not mind. " * 4
QUESTION: Any = {"text": TEXT, "context_length": 48, "stride": 48, "threads": 1, "flash_attn": "on"}
FLAGS = ("--text", TEXT, "--context-length", 48, "--stride", 48, "--threads", 1, "--flash-attn", "on")
GRID = ("--cache-type-k", "f16,q8_0", "--cache-type-v", "f16,q4_0")
NAMES = ["k f16 v q4_0", "k q8_0 v f16", "k q8_0 v q4_0"]


@pytest.fixture(scope="module", autouse=True)
def _llamacpp() -> None:
    require_llamacpp()


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads that blocks of 32 numbers divide."""
    sizes = {"hidden_size": 128, "intermediate_size": 96}
    return make_tiny_model(tmp_path_factory.mktemp("wider"), adds_bos=False, **sizes)


@pytest.fixture(scope="module")
def file(wider: Path) -> Path:
    return gguf_of(wider, wider.parent / "wider.gguf")


def kl(found: sm.Comparison) -> Any:
    return np.array(measured(found.kl))


# ── the grid ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_combination_but_the_first_is_a_candidate(file: Path, command: Command, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    found = command("compare", file, *GRID, *FLAGS, "--out", out, "--report", page, "--json")
    assert found.code == 0, found.err
    assert [one["name"] for one in found.json["candidates"]] == NAMES
    assert [one["kv_cache"] for one in found.json["candidates"]] == NAMES
    assert found.json["baseline_served"]["kv_cache"] == "k f16 v f16"
    assert "k q8_0 v q4_0: " not in found.err  # nothing failed
    for name in NAMES:
        run = runs.load(out / name.replace(" ", "-"))
        settings = run.manifest["engine_settings"]
        assert f"k {settings['cache_type_k']} v {settings['cache_type_v']}" == run.manifest["variant"] == name
        assert name in page.read_text()
    assert 'id="quality"' not in page.read_text()  # all of them have the same size


@pytest.mark.parametrize("path", [{}, {"path": "decode", "sequences": 3}], ids=["prefill", "decode"])
def test_the_grid_gives_the_numbers_of_single_comparisons(file: Path, path: dict[str, Any]) -> None:
    types: Any = {"cache_type_k": ["f16", "q4_0"], "cache_type_v": ("f16", "q8_0")}
    found = sm.compare(str(file), **types, **QUESTION, **path)
    assert [one.name for one in found] == ["k f16 v q8_0", "k q4_0 v f16", "k q4_0 v q8_0"]
    for one in found:
        _, keys, _, values = one.name.split()
        alone = sm.ppl(str(file), cache_type_k=keys, cache_type_v=values, fresh=True, **QUESTION, **path)
        assert np.array_equal(one.candidate.scores.logprob, alone.scores.logprob)
        assert one.baseline.manifest["engine_settings"]["cache_type_k"] == "f16"
    by_name = {one.name: kl(one).mean() for one in found}
    assert 0 < by_name["k f16 v q8_0"] < by_name["k q4_0 v f16"]


def test_candidates_that_are_named_get_every_combination(wider: Path, file: Path, command: Command) -> None:
    found = command("compare", wider, file, "--cache-type-k", "f32,q8_0", *FLAGS, "--json")
    assert found.code == 0, found.err
    assert [one["name"] for one in found.json["candidates"]] == ["wider.gguf k f32", "wider.gguf k q8_0"]
    assert found.json["candidates"][0]["kl_mean"] < found.json["candidates"][1]["kl_mean"]
    assert found.json["baseline_served"]["engine"] == "transformers"


def test_cards_and_pages_of_kept_runs_have_the_names(file: Path, command: Command, tmp_path: Path) -> None:
    table = command("compare", file, *GRID, *FLAGS, "--out", tmp_path / "out")
    assert table.code == 0, table.err
    assert "\nwider.gguf, k f16 v f16" in table.out
    card = command("card", tmp_path / "out")
    assert "wider.gguf, k f16 v f16 (baseline)" in card.out
    assert all(name.replace("_", "\\_") in card.out for name in NAMES)
    runs_kept = [tmp_path / "out" / name for name in ("baseline", "k-q8_0-v-f16")]
    page = tmp_path / "page.html"
    assert command("report", *runs_kept, "--output", page).code == 0
    assert "k q8_0 v f16" in page.read_text()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "CANDIDATE is missing; .* several K/V types of the baseline's model"),
        (("--cache-type-k", "q8_0"), "CANDIDATE is missing"),
        (("--cache-type-k", "f16,f16"), "--cache-type-k has f16 twice; give each type once"),
        (("--cache-type-k", "f16,"), "'f16,' is not a list of types, as in f16,q8_0"),
        (("--cache-type-k", "f16,q3"), "--cache-type-k q3 is not known; give one of f32"),
        (("--cache-type-v", "f16,q8_0", "--flash-attn", "off"), "--cache-type-v q8_0 works .* add --flash-attn on"),
    ],
)
def test_what_cannot_be_compared_is_refused(file: Path, refused: Refused, given: tuple[str, ...], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refused("compare", file, "--text", TEXT, *given))


def test_other_verbs_and_engines_have_no_types(file: Path, wider: Path, refused: Refused) -> None:
    grid = ("--text", TEXT, "--cache-type-k", "f16,q8_0")
    assert "use scoremode compare MODEL --cache-type-k f16,q8_0" in refused("ppl", file, *grid)
    assert "--cache-type-k does not apply to the transformers engine" in refused("compare", wider, *grid)


def test_the_baseline_has_the_first_type(file: Path) -> None:
    with pytest.raises(OptionError, match="the baseline has the first type of --cache-type-k; leave cache_type_k"):
        sm.compare(str(file), cache_type_k=["f16", "q8_0"], baseline_options={"cache_type_k": "f32"}, **QUESTION)
    with pytest.raises(InputError, match="there is no candidate"):
        sm.compare(str(file), cache_type_k=["f16"], **QUESTION)
    with pytest.raises(OptionError, match="--cache-type-k has no value"):
        sm.compare(str(file), cache_type_k=[], **QUESTION)


# ── declarations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_types_that_are_numbers_of_bits(wider: Path, tmp_path: Path, command: Command, refused: Refused) -> None:
    """On a machine without ExLlamaV3, the numbers are read, and the library is what is missing."""
    folder = tmp_path / "exl3"
    shutil.copytree(wider, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "exl3"}}))
    flags = ("--cache-bits-v", "8,4", "--path", "decode", "--text", TEXT)
    assert "'x' is not a whole number" in refused("compare", folder, "--cache-bits-k", "8,x", *flags)
    assert "--cache-bits-k has 8 twice" in refused("compare", folder, "--cache-bits-k", "8,8", *flags)
    if importlib.util.find_spec("exllamav3") is None:
        assert (
            "k 4 v 4 failed: ExLlamaV3 is not installed"
            in command("compare", folder, "--cache-bits-k", "8,4", *flags).err
        )
