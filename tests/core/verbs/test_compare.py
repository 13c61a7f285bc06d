"""Comparisons: KL in closed form, against float64 on a real model, from references and models, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scoremode.core.disk.folders import entry_folder
from scoremode.core.engine import baseline
from scoremode.core.references.writer import MeasuredNoise
from scoremode.core.scores.journal import Journal
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store import runs
from scoremode.core.verbs.compare import compare, score_in_turn
from scoremode.core.verbs.ppl import ppl
from scoremode.core.verbs.reference import reference
from scoremode.engines.transformers.model import CausalModel
from scoremode.errors import CorpusError, EngineError, InputError, ModelError, RunError, StorageError
from scoremode.head.divergence import define_divergence
from tests.command_line import Command
from tests.house import needs_wing
from tests.makers import Phases, ask, make_tiny_model, with_changed_tensors

TEXT = "The quick brown fox jumps over the lazy dog. " * 6
SMALL: dict[str, Any] = {"text": TEXT, "context_length": 32, "stride": 16}


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_kl_to_what_never_happens_is_infinite_and_back_is_not() -> None:
    (certain,) = compare("table:successor", "table:uniform", text="abc")
    (even,) = compare("table:uniform", "table:successor", text="abc")
    assert certain.kl == pytest.approx([np.log(256)] * 2, rel=1e-6)
    assert even.kl is not None
    assert np.isinf(even.kl).all()


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model, and the same with weights moved a little."""
    folder = tmp_path_factory.mktemp("models")
    original = make_tiny_model(folder / "original", adds_bos=False)
    random = torch.Generator().manual_seed(1)

    def move(_: str, weight: torch.Tensor) -> torch.Tensor:
        return weight * (1 + 0.1 * torch.randn(weight.shape, generator=random))

    return original, with_changed_tensors(original, folder / "moved", move)


@pytest.fixture(scope="module")
def kept(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references") / "ref"
    reference(str(models[0]), folder, **SMALL)
    return folder


def kl_of(found: Comparison) -> Any:
    assert found.kl is not None
    return found.kl


def test_the_divergence_is_that_of_a_models_logits_in_float64(models: tuple[Path, Path], tmp_path: Path) -> None:
    (found,) = compare(*map(str, models), out=tmp_path / "all", divergence="all", **SMALL)
    (alone,) = compare(*map(str, models), out=tmp_path / "kl", **SMALL)
    assert alone.divergences.measured == ("kl",)
    assert np.array_equal(kl_of(alone), kl_of(found))
    plan = ask(str(models[0]), **SMALL).plan
    both = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64) for m in models]
    expected = []
    for index in range(len(plan)):
        window = plan.window(index)
        with torch.no_grad():
            logits = [m(torch.from_numpy(window.ids.astype(np.int64))[None]).logits[0, window.rows] for m in both]
        targets = torch.from_numpy(window.targets.astype(np.int64))
        expected.append(define_divergence(logits[0], logits[1], targets))
    truth = torch.cat([one.kl for one in expected]).numpy()
    assert truth.mean() > 1e-3, "the models differ"
    assert kl_of(found).mean() == pytest.approx(truth.mean(), rel=1e-6)
    assert kl_of(found) == pytest.approx(truth, rel=1e-4, abs=1e-9)
    for name in ("kl_reverse", "total_variation", "same_first"):
        exact = torch.cat([getattr(one, name) for one in expected]).numpy()
        assert getattr(found.divergences, name) == pytest.approx(exact, rel=1e-4, abs=1e-7), name


def test_a_reference_gives_the_bits_of_its_model(models: tuple[Path, Path], kept: Path, tmp_path: Path) -> None:
    (beside,) = compare(*map(str, models), out=tmp_path / "beside", **SMALL)
    (stored,) = compare(str(kept), str(models[1]), out=tmp_path / "stored")
    assert np.array_equal(kl_of(beside), kl_of(stored))
    assert np.array_equal(beside.candidate.scores.logprob, stored.candidate.scores.logprob)
    assert np.array_equal(beside.baseline.scores.logprob, stored.baseline.scores.logprob)


LONG: dict[str, Any] = {"text": TEXT * 8, "context_length": 128, "stride": 128}  # batches of more than 128 rows


@pytest.mark.parametrize(
    ("dtype", "batch_tokens", "way"),
    [("float32", 1, "beside"), ("float32", None, "stored"), ("bfloat16", None, "beside"), ("bfloat16", 1, "stored")],
)
def test_a_model_is_exactly_as_good_as_itself(
    models: tuple[Path, Path], tmp_path: Path, dtype: str, batch_tokens: int | None, way: str
) -> None:
    """The baseline is scored alone and the candidate beside its divergence: the bits must be the same."""
    model = str(models[0])
    options: Any = {"dtype": dtype, "batch_tokens": batch_tokens}
    if way == "stored":
        reference(model, tmp_path / "ref", **options, **LONG)
        (found,) = compare(str(tmp_path / "ref"), model, **options, out=tmp_path / "out")
    else:
        (found,) = compare(model, model, **options, out=tmp_path / "out", **LONG)
    for name in ("logprob", "entropy", "top_logprob", "rank", "top"):
        assert np.array_equal(getattr(found.baseline.scores, name), getattr(found.candidate.scores, name)), name
    assert kl_of(found).max() == 0.0
    assert found.statistics()["ppl_ratio"] == 1.0


def test_several_candidates_share_one_baseline_and_have_the_scores_that_they_have_alone(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = compare(str(models[0]), str(models[1]), str(models[0]), out=tmp_path, **SMALL)
    assert kl_of(first).mean() > 1e-3
    assert kl_of(second).max() == 0.0
    assert (tmp_path / "baseline" / "reference.json").exists()
    alone = ppl(str(models[1]), out=tmp_path / "alone", **SMALL).scores
    for name in ("logprob", "entropy", "rank"):
        assert np.array_equal(getattr(first.candidate.scores, name), getattr(alone, name)), name


def test_several_candidates_and_a_baseline_with_settings_of_its_own(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The reference that is made of the baseline has them; it is not asked again whether it takes them."""
    names = [str(models[0]), str(models[1]), str(models[0])]
    found = compare(*names, dtype="float32", baseline_options={"dtype": "bfloat16"}, out=tmp_path, **SMALL)
    assert all(kl_of(one).mean() > 0 for one in found)
    assert found[0].baseline.manifest["dtype"] == "bfloat16"
    assert found[0].candidate.manifest["dtype"] == "float32"


# ── whose KL it is ───────────────────────────────────────────────────────────────────────────────────────────────────
@needs_wing("reports/html")
def test_kl_of_a_finished_run_belongs_to_its_whole_baseline(
    models: tuple[Path, Path], kept: Path, tmp_path: Path, command: Command
) -> None:
    """The same weights in another dtype, or under another batch size, are another baseline."""
    compare(str(kept), str(models[1]), out=tmp_path)
    candidate = str(tmp_path / models[1].name)
    settings: dict[str, dict[str, Any]] = {"same": {}, "half": {"dtype": "bfloat16"}, "batch": {"batch_tokens": 64}}
    for name, how in settings.items():
        ppl(str(models[0]), out=tmp_path / name, **SMALL, **how)
    assert kl_of(compare(str(kept), candidate)[0]).mean() > 1e-3
    assert kl_of(compare(str(tmp_path / "same"), candidate)[0]).mean() > 1e-3, "states or not, the scores are the same"
    for name, differs in (("half", "settings dtype"), ("batch", "settings batch_tokens")):
        (found,) = compare(str(tmp_path / name), candidate)
        why = f"KL was measured against another baseline: it differs in {differs}"
        assert (found.kl, found.noise_kl, found.manifest["kl_missing"]) == (None, None, why)
        assert why in " ".join(command("compare", tmp_path / name, candidate).out.split())
        assert command("compare", tmp_path / name, candidate, "--json").json["candidates"][0]["kl_missing"] == why
        assert command("report", tmp_path / name, candidate, "-o", tmp_path / f"{name}.html").code == 0
        assert why in (tmp_path / f"{name}.html").read_text()


# ── the reference that a comparison keeps for itself ─────────────────────────────────────────────────────────────────
def test_the_cached_reference_is_named_by_all_that_decides_it(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another dtype, an edited text or an upgrade is another reference, not an error about a folder nobody named."""
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    names = [str(models[0]), str(models[1]), str(models[0])]
    asked: dict[str, Any] = {"corpus": str(text), "context_length": 32, "stride": 16}
    compare(*names, **asked)
    compare(*names, dtype="bfloat16", **asked)
    text.write_text(TEXT[:-20])
    compare(*names, **asked)
    monkeypatch.setattr("scoremode.core.verbs.planned.NUMERICS", 99)
    compare(*names, **asked)
    folders = sorted((tmp_path / "cache" / "references").iterdir())
    assert len(folders) == 4
    for folder in folders:
        identity = runs.load(folder).manifest["identity"]
        assert folder == entry_folder("references", dict(identity))


def test_runs_that_would_share_a_folder_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(models[1], tmp_path / "baseline")
    with pytest.raises(InputError, match="would lie in"):
        compare(str(models[0]), str(tmp_path / "baseline"), out=tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()


def test_windows_whose_states_were_lost_are_scored_again(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A kill may cut the states of windows that the journal knows: those alone are scored again, and said so in it."""
    folder = tmp_path / "ref"
    whole = reference(str(models[0]), tmp_path / "whole", **SMALL)
    adding, added = Journal.add, []

    def stop(self: Journal, window: int, *given: Any) -> None:
        adding(self, window, *given)
        added.append(window)
        if len(added) == 6:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            reference(str(models[0]), folder, **SMALL)
    notes = folder / "partial.rows"
    notes.write_bytes(notes.read_bytes()[:-40])  # the last note is torn, and the one before it with it
    forgetting, resumed = Journal.forget, []

    def noted(self: Journal, window: int) -> None:
        resumed.append(window)
        forgetting(self, window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "forget", noted)
        run = reference(str(models[0]), folder, **SMALL)
    assert sorted(resumed) == sorted(added[-2:])
    assert np.array_equal(run.scores.logprob, whole.scores.logprob)
    states = [(tmp_path / name / "states-00000.safetensors").read_bytes() for name in ("ref", "whole")]
    assert states[0] == states[1]


# ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Fed:
    """Tokens that went through the body of each model, by its folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[str, int] = {}
        honest = CausalModel.hidden

        def counted(model: CausalModel, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
            name = Path(model.whole.config._name_or_path).name
            self.tokens[name] = self.tokens.get(name, 0) + ids.numel()
            return honest(model, ids, cache)

        monkeypatch.setattr(CausalModel, "hidden", counted)


def test_two_models_take_one_pass_each(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a little for the noise floor. Afterwards both runs are those that either model has alone."""
    monkeypatch.setattr(baseline, "NOISE_WINDOWS", 1)
    fed, question = Fed(monkeypatch), {**SMALL, "text": TEXT * 8, "batch_tokens": 1}
    (found,) = compare(*map(str, models), out=tmp_path / "both", **question)
    whole = ask(str(models[0]), **SMALL | {"text": TEXT * 8}).plan.forward_tokens
    assert fed.tokens[models[1].name] < 1.1 * whole
    assert fed.tokens[models[0].name] < 1.3 * whole
    alone = ppl(str(models[0]), out=tmp_path / "alone", **question)
    assert np.array_equal(found.baseline.scores.logprob, alone.scores.logprob)
    assert found.baseline.perplexity.value == alone.perplexity.value


@pytest.mark.parametrize("of", [0, 1], ids=["baseline", "candidate"])
def test_a_comparison_that_goes_on_computes_what_is_missing(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: int
) -> None:
    """Wherever it was cut off. The hidden states are removed when it is complete."""
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(baseline, "NOISE_WINDOWS", 1)
    question = {**SMALL, "text": TEXT * 8, "batch_tokens": 1}
    passes: list[int] = []

    def stop(done: int, total: int) -> None:
        passes.extend([done] if done == 0 else [])
        if done > 0.8 * total and len(passes) > of:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(*map(str, models), out=tmp_path / "out", progress=stop, **question)
    assert len(states_in(tmp_path)) == 1
    fed = Fed(monkeypatch)
    (found,) = compare(*map(str, models), out=tmp_path / "out", **question)
    whole = ask(str(models[0]), **SMALL | {"text": TEXT * 8}).plan.forward_tokens
    assert (fed.tokens[models[1].name] < 0.3 * whole) == bool(of)
    assert fed.tokens.get(models[0].name, 0) < 0.5 * whole * (1 - of) + 1
    assert states_in(tmp_path) == []
    (at_once,) = compare(*map(str, models), out=tmp_path / "again", **question)
    assert np.array_equal(kl_of(found), kl_of(at_once))
    assert np.array_equal(found.noise_kl, at_once.noise_kl)  # type: ignore[arg-type]
    for name in ("baseline", "candidate"):
        went_on, other = (getattr(c, name).scores.logprob for c in (found, at_once))
        assert np.array_equal(went_on, other)


def states_in(folder: Path) -> list[Path]:
    return list(folder.rglob("states-*.safetensors"))


def test_a_reference_in_the_cache_is_used_and_stays(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    reference(str(models[0]), **SMALL)
    fed = Fed(monkeypatch)
    (found,) = compare(*map(str, models), **SMALL)
    assert models[0].name not in fed.tokens
    assert found.noise_kl is not None
    assert [path.parent.parent.name for path in states_in(tmp_path)] == ["references"]
    assert ppl(str(models[0]), **SMALL).cached, "the baseline's run is kept as that of ppl"


def test_a_noise_floor_that_was_cut_off_goes_on(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {**SMALL, "text": TEXT * 8}
    whole = reference(str(models[0]), tmp_path / "whole", **question).manifest
    measured: list[int] = []
    adding = MeasuredNoise.__setitem__

    def stop(self: MeasuredNoise, window: int, kl: Any) -> None:
        adding(self, window, kl)
        measured.append(window)
        if len(measured) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(MeasuredNoise, "__setitem__", stop)
    phases = Phases()
    with pytest.raises(KeyboardInterrupt):
        reference(str(models[0]), tmp_path / "ref", progress=phases, **question)
    assert phases.words[-1] == "measuring the noise floor"
    again = reference(str(models[0]), tmp_path / "ref", **question).manifest
    assert len(measured) == len(set(measured)) > 7
    assert again["noise_kl"] == whole["noise_kl"]
    assert again["noise_perturbed"] == whole["noise_perturbed"]


def test_states_that_do_not_fit_on_the_disk_are_refused_before_anything_is_scored(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(
        RunError, match=r"take about .* of disk, and .* has 1 kB left; free some space, score less text"
    ):
        compare(*map(str, models), fresh=True, **SMALL)
    assert sum(fed.tokens.values()) < 60, "nothing but the probe of the head"


def test_a_finished_candidate_needs_only_its_baseline(models: tuple[Path, Path], tmp_path: Path) -> None:
    (first,) = compare(*map(str, models), out=tmp_path, **SMALL)
    shutil.rmtree(tmp_path / "baseline")
    (again,) = compare(*map(str, models), out=tmp_path, **SMALL)
    assert np.array_equal(first.baseline.scores.logprob, again.baseline.scores.logprob)


def test_a_head_that_cannot_be_given_is_refused_before_anything_is_scored(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(monkeypatch)
    with pytest.raises(ModelError, match="not a plain matrix"):
        compare(*map(str, models), baseline_options={"head": "as-served"}, out=tmp_path, **SMALL)
    assert sum(fed.tokens.values()) < 60, "nothing but the probe of the head"


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_other_tokens_and_plans_are_refused_with_what_differs(
    kept: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    one, other = map(str, models)
    ppl(one, out=tmp_path / "a", **SMALL)
    ppl(other, out=tmp_path / "b", **{**SMALL, "stride": 8})
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    long = "Something else entirely, and long enough to be scored."
    for against, candidate, asked, words in (
        (str(kept), "table:uniform", {}, "different tokenizers"),
        (one, "table:uniform", SMALL, "different tokenizers"),
        (str(kept), other, {"context_length": 24}, "context length 32 vs 24; leave text, method and sizes out"),
        (str(kept), other, {"max_windows": 2}, "max windows 0 vs 2; leave text, method and sizes out"),
        (str(kept), other, {"text": long}, "different texts.*; leave text, method and sizes out"),
        (str(kept), other, {"method": "exl3-2025"}, "method sliding-once vs exl3-2025"),
        (a, other, {}, "without hidden states"),
    ):
        with pytest.raises(InputError, match=words):
            compare(against, candidate, **asked)
    with pytest.raises(RunError, match="different plans"):
        compare(a, b)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_json_and_gate(models: tuple[Path, Path], kept: Path, tmp_path: Path, command: Command) -> None:
    asked = ("compare", kept, models[1], "--out", tmp_path)
    code, out, err = command(*asked, "--json", "--fail-if", "kl_mean > 1e-9")
    assert (code, err.count("\n")) == (1, 1)
    assert "kl_mean is" in err
    document = json.loads(out)
    assert {"baseline", "method", "plan_digest", "candidates"} <= document.keys()
    wanted = """name ppl_baseline ppl_candidate ppl_ratio ppl_ratio_stderr kl_mean kl_mean_stderr kl_median kl_p99
        kl_max same_top noise_floor_kl_mean targets"""
    assert set(wanted.split()) <= document["candidates"][0].keys()
    assert command(*asked, "--fail-if", "kl_mean > 100").code == 0


def test_candidates_in_turn_are_all_tried_but_not_if_the_question_or_the_storage_is_wrong() -> None:
    tried: list[str] = []

    def score(name: str) -> str:
        tried.append(name)
        if name in errors:
            raise errors[name]
        return name.upper()

    errors: dict[str, Exception] = {"b": EngineError("NaN"), "c": MemoryError(), "d": CorpusError("too short for d")}
    found, failed = score_in_turn("abcde", score)
    assert (tried, found) == (list("abcde"), {"a": "A", "e": "E"})
    assert [str(one).partition(";")[0] for one in failed.values()] == [
        "NaN",
        "this machine's memory is used up",
        "too short for d",
    ]
    for first in (CorpusError("no text"), StorageError("the bucket is gone")):
        tried.clear()
        errors = {"a": first}
        with pytest.raises(type(first)):
            score_in_turn("abcde", score)
        assert tried == ["a"]
    errors = {"a": EngineError("NaN")}
    with pytest.raises(EngineError):
        score_in_turn("a", score)
    assert score_in_turn("bc", score) == ({"b": "B", "c": "C"}, {})
