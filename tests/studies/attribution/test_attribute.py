"""Attribution: swaps against real checkpoints with the same weights, the account, folders that resume, bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import scoremode as sm
from scoremode.cli.cache import cache
from scoremode.errors import InputError, ModelError, RunError
from scoremode.studies.attribution.result import ordered
from scoremode.studies.attribution.swap_loop import ATTRIBUTION, PARTIAL_ATTRIBUTION, SwapJob, SwapMeasurement
from scoremode.studies.attribution.units import units_of
from scoremode.studies.attribution.weight_formats.round_to_nearest import round_groups
from tests import rounding
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import make_tiny_model, with_changed_tensors

SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind; item "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven documents, one of them a single letter."""
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    texts = [*(SENTENCE * (1 + i % 3) + str(7 * i) for i in range(6)), "a"]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), adds_bos=True, num_hidden_layers=3)


def noisy(part: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    return lambda name, t: t + 0.05 * torch.randn(t.shape, generator=random) if part in name else t


def asked(corpus: str, **more: Any) -> dict[str, Any]:
    return {"corpus": corpus, "context_length": 32, "dtype": "float32", **more}


def as_compared(compared: dict[str, Any], model: Path) -> Any:
    """A mean KL that another computation gives.

    δ nats in log-probabilities move KL by at most δ · Σ |p - q|, which is at most δ · √(2 KL) (Pinsker's inequality);
    the errors of different targets are as often above 0 as below.
    """
    return as_computed(compared["kl_mean"], model, compared["targets"])


def as_computed(kl: float, model: Path, targets: int) -> Any:
    return pytest.approx(kl, abs=rounding.of_checkpoint(model) * math.sqrt(2 * kl / targets))


@pytest.mark.parametrize("part", ["layers.1.", "embed_tokens", "lm_head", "layers.2.mlp.up_proj"])
def test_a_swap_equals_a_checkpoint_with_that_unit_replaced(part: str, base: Path, corpus: str, tmp_path: Path) -> None:
    candidate = str(with_changed_tensors(base, tmp_path / "other", noisy(part)))
    found = sm.attribute(str(base), candidate, by="matrix" if "mlp" in part else "layer", **asked(corpus))
    compared = sm.compare(str(base), candidate, **asked(corpus))[0].statistics()
    changed = [one for one in found[0].units if one.damage.is_changed]
    assert len(changed) == 1
    own = found.statistics(changed[0].damage)
    assert own["kl"] == as_compared(compared, base)
    assert own["kl_stderr"] == pytest.approx(compared["kl_mean_stderr"], rel=1e-3)
    gap = rounding.of_checkpoint(base) / math.sqrt(compared["targets"])
    assert own["delta_logprob"] == pytest.approx(compared["delta_logprob_mean"], abs=gap)
    assert own["same_top"] == compared["same_top"]
    for one in found[0].units:
        if one is not changed[0]:
            assert found.kl(one).value == 0.0
    account = found.account(found[0])
    assert account.whole.value == account.parts.value == found.kl(changed[0]).value
    assert account.interaction.value == 0.0
    assert found.noise is not None


def test_a_candidate_with_a_head_of_its_own_beside_a_tied_baseline(corpus: str, tmp_path: Path) -> None:
    tied = make_tiny_model(tmp_path / "tied", adds_bos=True, tie_word_embeddings=True)
    candidate = str(with_changed_tensors(tied, tmp_path / "own", lambda name, t: t))
    tensors = load_file(f"{candidate}/model.safetensors")
    tensors["lm_head.weight"] = noisy("head")("head", tensors["model.embed_tokens.weight"])
    save_file(tensors, f"{candidate}/model.safetensors", {"format": "pt"})
    config = json.loads(Path(candidate, "config.json").read_text())
    Path(candidate, "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    found = sm.attribute(str(tied), candidate, engine="transformers", **asked(corpus))
    changed = [one for one in found[0].units if one.damage.is_changed]
    assert [one.name for one in changed] == ["head"]
    compared = sm.compare(str(tied), candidate, **asked(corpus))[0].statistics()
    assert found.kl(changed[0]).value == as_compared(compared, tied)
    account = found.account(found[0])
    assert found[0].served_by == "transformers"
    assert account.served is not None
    assert account.served.value == as_computed(account.whole.value, tied, compared["targets"])
    assert any("is its embedding; a candidate has a head of its own" in note for note in found.notes)
    alone = sm.attribute(str(tied), "rtn:4:16:all", **asked(corpus))
    both = sm.attribute(str(tied), candidate, "rtn:4:16:all", **asked(corpus))
    again, whole = both.kl(both[0].units[-1]).value, alone.account(alone[0]).whole.value
    assert found.kl(changed[0]).value == as_computed(again, tied, compared["targets"])
    assert both.account(both[1]).whole.value == as_computed(whole, tied, compared["targets"])
    # what was kept for embedding and head together is not taken for the embedding alone
    (together,) = [one for one in alone[0].units if one.name == "embedding and head"]
    (embedding,) = [one for one in both[1].units if one.name == "embedding"]
    assert both.kl(embedding).value != alone.kl(together).value
    fresh = sm.attribute(str(tied), candidate, "rtn:4:16:all", out=tmp_path / "fresh", **asked(corpus))
    assert fresh.as_json()["candidates"] == both.as_json()["candidates"]


def test_a_damaged_matrix_of_a_served_gguf_is_found(base: Path, corpus: str, tmp_path: Path) -> None:
    require_llamacpp()
    file = gguf_of(base, tmp_path / "x.gguf", "F16", weights=lambda name, x: x * (1.2 if "blk.1.ffn_up" in name else 1))
    found = sm.attribute(str(base), str(file), by="matrix", engine="llamacpp", **asked(corpus))
    worst, second = ordered(found, found[0].units)[:2]
    assert worst.name == "layer 1 up_proj"
    assert worst.format == "F16"
    assert worst.bits == 16.0
    assert found.kl(worst).value > 100 * found.kl(second).value
    account = found.account(found[0])
    assert found[0].served_by == "llamacpp"
    assert account.served is not None
    assert account.rest is not None
    assert account.served.value == pytest.approx(account.whole.value, rel=0.1)  # F16 products and sums of llama.cpp
    assert account.rest.value == pytest.approx(account.served.value - account.whole.value)


def test_the_account_adds_up(base: Path, corpus: str) -> None:
    found = sm.attribute(str(base), "rtn:6:16", "rtn:3:16:all", by="layer", **asked(corpus))
    facts = found.as_json()
    fine, coarse = facts["candidates"]
    assert fine["bits_per_weight"] > coarse["bits_per_weight"]
    assert 0 < fine["account"]["whole"] < coarse["account"]["whole"]
    for candidate in (fine, coarse):
        account, units = candidate["account"], candidate["units"]
        assert account["parts"] == pytest.approx(sum(row["kl"] for row in units))
        assert account["whole"] == pytest.approx(account["parts"] + account["interaction"])
        assert account["whole_stderr"] is not None
        assert sum(row["share"] for row in units) == pytest.approx(1)
        assert account["served"] is None
    by_name = {row["unit"]: row for row in fine["units"]}
    assert by_name["embedding"]["changed"] is False
    assert by_name["embedding"]["kl"] == 0.0
    assert by_name["layer 1"]["bits_saved"] > 0
    assert by_name["layer 1"]["kl_per_gigabit"] == pytest.approx(
        by_name["layer 1"]["kl"] * 1e9 / by_name["layer 1"]["bits_saved"]
    )
    assert {row["changed"] for row in coarse["units"] if row["unit"] in ("embedding", "head")} == {True}


def test_a_killed_attribution_resumes_to_the_same_numbers(base: Path, corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def measured(**more: Any) -> dict[str, Any]:
        return sm.attribute(str(base), "rtn:4:16", out=out, **asked(corpus, **more)).as_json()

    whole, journal = measured(by="matrix"), (out / PARTIAL_ATTRIBUTION).read_bytes()
    for damaged in (journal[: len(journal) // 2], journal, b"", journal[:-200] + b"\xff" + journal[-199:]):
        (out / ATTRIBUTION).unlink()
        (out / PARTIAL_ATTRIBUTION).write_bytes(damaged)
        assert measured(by="matrix") == whole
    other = measured()  # shares the folder
    assert other["candidates"][0]["whole"] == whole["candidates"][0]["whole"]
    with pytest.raises(RunError, match="another attribution"):
        measured(max_windows=1)
    (out / ATTRIBUTION).write_text((out / ATTRIBUTION).read_text().replace('"by": "layer"', '"by": "kind"'))
    for fresh in (False, True):
        with pytest.raises(RunError, match="or which is damaged; remove that file"):
            measured(fresh=fresh)
    (out / ATTRIBUTION).unlink()
    assert measured(fresh=True) == other
    (out / PARTIAL_ATTRIBUTION).write_bytes(b"x" + journal[1:])
    with pytest.raises(RunError, match="or which is damaged; remove that file"):
        measured()
    (out / PARTIAL_ATTRIBUTION).unlink()
    with pytest.raises(RunError, match="without its journal"):
        measured()


def test_units_are_kept_in_the_cache(base: Path, corpus: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    first = sm.attribute(str(base), "rtn:5:16", **asked(corpus))
    (entry,) = cache(kind=["attributions"])["entries"]
    assert {base.name, "transformers"} <= set(entry["contents"].split(", "))
    again, measured = list[int](), SwapMeasurement._measure

    def counted(measurement: SwapMeasurement, jobs: Sequence[SwapJob]) -> None:
        again.append(len(jobs))
        measured(measurement, jobs)

    monkeypatch.setattr(SwapMeasurement, "_measure", counted)
    assert sm.attribute(str(base), "rtn:5:16", **asked(corpus)).as_json() == first.as_json()
    assert not again
    sm.attribute(str(base), "rtn:5:16", "rtn:6:16", **asked(corpus))
    assert again == [len(first[0].units) + 1]  # of the new candidate, and all its weights
    (tmp_path / entry["path"] / ATTRIBUTION).unlink()
    (entry,) = cache(kind=["attributions"])["entries"]
    assert entry["contents"] == "unfinished"
    sm.attribute(str(base), "rtn:5:16", fresh=True, **asked(corpus))
    assert again[1:] == [len(first[0].units) + 1]


def test_units_of_a_kind_and_half_precision(base: Path, corpus: str) -> None:
    found = sm.attribute(str(base), "rtn:3:16", by="kind", **asked(corpus, dtype="bfloat16"))
    assert any("rounded to bfloat16" in note for note in found.notes)
    names = [one.name for one in found[0].units]
    assert {"q_proj", "down_proj", "norms", "embedding", "head"} <= set(names)
    changed = {one.name for one in found[0].units if one.damage.is_changed}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_mixture_is_predicted_built_and_measured(base: Path, corpus: str, tmp_path: Path) -> None:
    options, prefix = ["rtn:3:16", "rtn:4:16", "rtn:6:16"], str(tmp_path / "recipe")
    size = sm.attribute(str(base), options[1], **asked(corpus))[0].bits_per_weight
    found = sm.attribute(
        str(base), *options, by="kind", bits_budget=size, write_recipe=prefix, out=tmp_path / "out", **asked(corpus)
    )
    recipe = found.recipe
    assert recipe is not None
    assert recipe.bits_per_weight <= size * (1 + 1e-6)
    assert set(recipe.chosen.values()) <= {"baseline", *options}
    expected = sum(
        found.cells.mean(one.damage.kl, "first").value
        for candidate in found.candidates
        for one in candidate.units
        if recipe.chosen[one.name] == candidate.name
    )
    assert recipe.predicted == pytest.approx(expected)
    facts = found.as_json()["recipe"]
    assert "rtn:4:16" in facts["verdict"]
    four = next(row for row in facts["uniform"] if row["name"] == "rtn:4:16")
    assert facts["measured_kl"] - four["kl"] == pytest.approx(four["difference"])
    assert len(list(tmp_path.glob("recipe.*"))) == 3
    again = sm.attribute(str(base), *options, by="kind", bits_budget=size, out=tmp_path / "out", **asked(corpus))
    assert again.as_json() == found.as_json()
    mixture = {name: recipe.chosen[unit.name] for unit in units_of(shapes_of(base), "kind") for name in unit.tensors}
    built = str(with_changed_tensors(base, tmp_path / "built", lambda name, t: rounded(mixture[name], name, t)))
    compared = sm.compare(str(base), built, **asked(corpus))[0].statistics()
    assert found.cells.mean(recipe.damage.kl).value == as_compared(compared, base)


def shapes_of(base: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in load_file(base / "model.safetensors").items()}


def rounded(candidate: str, name: str, weight: torch.Tensor) -> torch.Tensor:
    """What the candidate of that name stores, by hand."""
    if candidate == "baseline" or weight.dim() < 2 or ".layers." not in name:
        return weight
    _, bits, group = candidate.split(":")
    return round_groups(weight, int(bits), int(group))


def test_what_is_refused(base: Path, corpus: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no candidate"):
        sm.attribute(str(base), **asked(corpus))
    fewer = make_tiny_model(tmp_path, adds_bos=True, num_hidden_layers=2)
    with pytest.raises(ModelError, match="2 layers, and the baseline has 3"):
        sm.attribute(str(base), str(fewer), **asked(corpus))
    with pytest.raises(InputError, match="two halves"):
        sm.attribute(str(base), "rtn:3:16", text="a few words", bits_budget=30, dtype="float32")
