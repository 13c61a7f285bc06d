"""Slices of runs and of comparisons: closed forms, longhand sums, files and tables."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.comparison import Comparison
from scoremode.reports.parts import comparison_parts
from tests.command_line import Command, Refused
from tests.core.text.test_slices import EVERY

THINK = "thinking=<think>..</think>"
DIGESTS = {  # before there were slices
    ("table:uniform", False): "43283aca62ee8489cfde3904da7d81f9ac105c9b86a223df5f04a460c662c0e4",
    ("table:uniform", True): "3064dc628ac97b7fc8813d4710dce311866d5bc7327ee2d4ae6ab32a7784fad9",
    ("smollm2-135m", False): "d455231eeb8c691c0a143050c8443f9aac77ce8a1e152d3ac1bb5c93846eb4fe",
    ("smollm2-135m", True): "666e2c61eae493bd2087e1b1ef9c55d3481283ea2533b84e265fe90103cb8d94",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven documents of different lengths with a part between markers."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = ({"text": f"{n} words <think>{'hm é ' * (n + 1)}</think> more words{' and more' * n}"} for n in range(7))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def compared(texts: str) -> Comparison:
    made = sm.compare("table:uniform", "table:uniform", corpus=texts, slice=[THINK])[0]
    random, n = np.random.default_rng(1), len(made.groups)
    top = np.array(made.candidate.scores.top) + (random.random(n) < 0.3)
    scores = replace(made.candidate.scores, logprob=np.array(-random.exponential(2.0, n)), top=top.astype(np.int32))
    divergences = Divergences(kl=random.exponential(0.1, n))
    return replace(made, divergences=divergences, candidate=replace(made.candidate, scores=scores))


@pytest.mark.parametrize(("model", "assistant_only"), DIGESTS)
def test_plans_are_those_from_before(model: str, assistant_only: bool, tmp_path: Path) -> None:
    rows = [EVERY[:5], EVERY[1:5]]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    plan = sm.plan(model, corpus=str(tmp_path / "chat.jsonl"), assistant_only=assistant_only)
    assert plan["plan_digest"] == DIGESTS[model, assistant_only]


def test_a_uniform_table_has_its_vocabulary_as_perplexity_in_each_slice(texts: str) -> None:
    found = sm.ppl("table:uniform", corpus=texts, slice=THINK).by_slice()
    assert list(found) == ["thinking", "rest"]
    for its in found.values():
        assert its["perplexity"].value == pytest.approx(256)
        assert its["perplexity"].stderr == pytest.approx(0, abs=1e-9)
        assert its["mean_nll"].value == pytest.approx(math.log(256))
    assert found["thinking"]["perplexity"].n == sum(
        len(f"<think>{'hm é ' * (n + 1)}</think>".encode()) for n in range(7)
    )


def test_slices_add_up_to_the_run(tiny: Path, texts: str) -> None:
    run = sm.ppl(str(tiny), corpus=texts, slice=THINK)
    label, nll = np.array(run.facts.slice), -run.scores.logprob
    for name, its in run.by_slice().items():
        here = label == name
        assert its["mean_nll"].n == int(here.sum())
        assert its["mean_nll"].value == pytest.approx(nll[here].mean(), rel=1e-12)
        assert its["perplexity"].value == pytest.approx(math.exp(nll[here].mean()), rel=1e-12)
        assert its["mean_nll"].stderr is not None
    whole = sum(its["mean_nll"].value * its["mean_nll"].n for its in run.by_slice().values())
    assert whole / len(nll) == pytest.approx(run.mean_nll.value, rel=1e-12)


def test_means_of_a_comparison_are_those_of_the_targets_of_the_slice(compared: Comparison) -> None:
    label, groups = np.array(compared.candidate.facts.slice), np.array(compared.groups)
    kl, moved = measured(compared.kl), compared.candidate.scores.logprob - compared.baseline.scores.logprob
    same = measured(compared.candidate.scores.top) == measured(compared.baseline.scores.top)
    for row in compared.by_slice():
        here = label == row.name
        for found, values in ((row.kl, kl), (row.delta_logprob, moved), (row.same_top, same)):
            its = measured(found)
            assert (its.n, its.groups) == (int(here.sum()), 7)
            assert its.value == pytest.approx(values[here].mean(), rel=1e-12)
            sizes = np.array([(groups[here] == g).sum() for g in range(7)])
            rests = np.array([(values[here][groups[here] == g] - its.value).sum() for g in range(7)])
            error = np.sqrt((rests**2 / (1 - sizes / sizes.sum())).sum()) / sizes.sum()
            assert its.stderr == pytest.approx(error, rel=1e-6)


def test_a_stored_run_knows_its_slices(texts: str, tmp_path: Path, command: Command) -> None:
    asked = ("ppl", "table:uniform", "--corpus", texts, "--slice", THINK, "--out", tmp_path / "run")
    assert command(*asked).code == 0
    shown = command("report", tmp_path / "run").out
    assert "by slice of the text" in shown
    assert "thinking" in shown
    run = sm.load(tmp_path / "run")
    assert set(run.to_arrow().column("slice").to_pylist()) == {"thinking", "rest"}
    assert [*run.by_slice()] == ["thinking", "rest"]
    stored = command("report", tmp_path / "run", "--json").json["by_slice"]
    assert stored["thinking"]["perplexity"]["value"] == pytest.approx(256)
    both = sm.compare(str(tmp_path / "run"), str(tmp_path / "run"))[0]
    assert [row.name for row in both.by_slice()] == ["thinking", "rest"]
    assert "slice" in both.to_arrow().column_names


def test_a_run_without_slices_has_no_column(tmp_path: Path, command: Command) -> None:
    run = sm.ppl("table:uniform", text="any text", out=tmp_path / "run")
    assert "slice" not in run.to_arrow().column_names
    assert run.facts.slice is None
    assert run.by_slice() == {}
    assert sm.compare(str(tmp_path / "run"), str(tmp_path / "run"))[0].by_slice() == []
    assert "by slice" not in command("report", tmp_path / "run").out


def test_other_slices_are_another_run(texts: str, tmp_path: Path, refused: Refused) -> None:
    first = sm.ppl("table:uniform", corpus=texts, slice=THINK, out=tmp_path / "run")
    other = sm.ppl("table:uniform", corpus=texts, slice="m=more..words")
    assert first.plan_digest == other.plan_digest
    assert [*other.by_slice()] == ["m", "rest"]
    asked = ("ppl", "table:uniform", "--corpus", texts, "--slice", "m=more..words")
    assert "differs in: slices" in refused(*asked, "--out", tmp_path / "run")


def test_a_reference_brings_its_slices_and_candidates_may_have_others(tiny: Path, texts: str, tmp_path: Path) -> None:
    for name, given in (("with", {"slice": THINK}), ("without", {})):
        sm.reference(str(tiny), tmp_path / name, corpus=texts, **given)  # type: ignore[arg-type]
    found = sm.compare(str(tmp_path / "with"), str(tiny))[0]
    assert [row.name for row in found.by_slice()] == ["thinking", "rest"]
    assert all(measured(row.kl).value == pytest.approx(0, abs=1e-6) for row in found.by_slice())
    assert sm.compare(str(tmp_path / "without"), str(tiny))[0].by_slice() == []
    found = sm.compare(str(tmp_path / "without"), str(tiny), slice=THINK)[0]
    assert [row.name for row in found.by_slice()] == ["thinking", "rest"]


def test_tables_show_slices(compared: Comparison, texts: str, command: Command) -> None:
    asked = ("compare", "table:uniform", "table:uniform", "--corpus", texts)
    one = command(*asked, "--slice", THINK)
    assert "by slice of the text" in one.out
    assert "Δ logprob" in one.out
    assert "by slice" not in command(*asked).out
    rows = command(*asked, "--slice", THINK, "--json").json["candidates"][0]["by_slice"]
    assert [row["slice"] for row in rows] == ["thinking", "rest"]
    assert all(row["kl_mean"] == 0 and row["same_top"] == 1 for row in rows)
    (part,) = comparison_parts([compared], by_depth=False, beside=[], tested=[])
    assert part.facts()[0][0]["kl_mean_stderr"] is not None


def test_a_chat_is_divided_without_being_asked(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": EVERY}) + "\n")
    every = sm.ppl("table:uniform", corpus=str(tmp_path / "chat.jsonl"), slice="call=uhr..)")
    roles = ["call", "system", "user", "thinking", "answer", "tool call", "tool", "template"]
    assert [*every.by_slice()] == roles
    some = sm.ppl("table:uniform", corpus=str(tmp_path / "chat.jsonl"), assistant_only=True)
    assert [*some.by_slice()] == ["thinking", "answer", "tool call"]


def test_two_candidates_share_a_table(tiny: Path, texts: str, tmp_path: Path, command: Command) -> None:
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(tiny)
    asked = ("compare", tiny, tmp_path / "one", tmp_path / "two", "--corpus", texts, "--slice", THINK)
    table = command(*asked).out.partition("KL mean by slice of the text")[2]
    assert [line.split()[0] for line in table.splitlines() if line.startswith(("thinking", "rest"))] == [
        "thinking",
        "rest",
    ]
    assert table.split()[:3] == ["targets", "one", "two"]


def test_infinite_values_are_counted_or_make_a_slice_infinite(compared: Comparison, texts: str) -> None:
    kl = np.array(measured(compared.kl))
    kl[np.flatnonzero(np.array(compared.candidate.facts.slice) == "rest")[3]] = np.inf
    found = replace(compared, divergences=Divergences(kl=kl))
    assert {row.name: row.unbounded for row in found.by_slice()} == {"thinking": 0, "rest": 1}
