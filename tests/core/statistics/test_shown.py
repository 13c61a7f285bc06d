"""What a reader meets beside the numbers: which rank, what is better, sentences, and the first lines of a ``repr``."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from scoremode.core.statistics.comparison import (
    BY_NAME,
    STATISTICS,
    Comparisons,
    are_of_paths,
    needs_whole_divergence,
)
from scoremode.core.statistics.depth import depths_of, means_by_stretch
from scoremode.core.statistics.equivalence import equivalence
from scoremode.core.statistics.estimate import beyond, quantiles, reach, square_root
from scoremode.core.statistics.groups import FALSE_OF_FEW, character_groups, false_of_few, grouping, why_unsure
from scoremode.core.statistics.paired import PairedMeans, chance_of_no_change
from scoremode.core.statistics.run import LlamacppMean, llamacpp_stderr
from scoremode.core.statistics.statistic import Statistic, estimates, fields_of, plain
from scoremode.errors import NotMeasuredError
from scoremode.values import Estimate
from tests.core.statistics.test_comparison import compared, random_comparison
from tests.core.statistics.test_equivalence import of_documents
from tests.core.statistics.test_groups import plan_of

PAGE = (Path(__file__).parents[3] / "docs" / "statistics.md").read_text()


# ── declarations ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_candidates_are_ranked_by_these_and_the_better_value_is_marked() -> None:
    assert {s.name: s.ranks for s in STATISTICS if s.ranks} == {
        **{"ppl_ratio": -1, "log_ppl_ratio": -1, "kl_mean": -1, "kl_reverse_mean": -1, "total_variation_mean": -1},
        **{"overlap": 1, "delta_logprob_mean": 1, "delta_p_mean": 1, "same_top": 1, "worse": -1},
        **{f"top{count}_same": 1 for count in range(2, 6)},
    }
    shares = {"overlap", "delta_p_rms", "same_top", "worse", *(f"top{count}_same" for count in range(2, 6))}
    assert {s.name for s in STATISTICS if s.percent} == shares
    assert {s.factor for s in STATISTICS if s.percent} == {100.0}
    assert {s.name for s in STATISTICS if s.better == "one"} == {"ppl_ratio"}
    assert {s.name for s in STATISTICS if s.better == "high"} == shares - {"delta_p_rms", "worse"} | {"answer_logprob"}
    leaves = {s.name: s.column.leaves for s in STATISTICS if s.column}
    assert (
        leaves.pop("ppl_ratio") == leaves.pop("kl_mean") == leaves.pop("same_top") == leaves.pop("ppl_candidate") == 0
    )
    assert sorted(leaves, key=lambda name: -leaves[name]) == ["kl_max", "kl_median", "kl_p99"], "first out, first named"


def test_the_cost_of_a_value_is_less_where_it_is_better() -> None:
    assert BY_NAME["ppl_ratio"].cost(0.5) == BY_NAME["ppl_ratio"].cost(2.0) == math.log(2)
    assert BY_NAME["ppl_ratio"].cost(0.0) == math.inf
    assert BY_NAME["kl_mean"].cost(0.1) == 0.1
    assert BY_NAME["same_top"].cost(0.9) == -0.9


def test_what_more_than_kl_is_computed_for() -> None:
    assert needs_whole_divergence(["kl_mean", "overlap"])
    assert needs_whole_divergence(["top2_same_low"])
    assert not needs_whole_divergence(["kl_mean", "kl_p99", "ppl_ratio", "made up"])


class Rows:
    """Four rows of two groups."""

    groups, values = np.array([0, 0, 1, 1]), np.array([1.0, 2.0, 3.0, 6.0])
    weights, nothing = np.array([1.0, 0.0, 1.0, 0.0]), None

    @property
    def inner(self) -> Rows:
        return self

    mean = Statistic(about="their mean", mean=lambda rows: rows.values)
    estimates: ClassVar[dict[str, Any]] = {"mean": None}


def test_a_statistic_of_rows_is_a_mean_a_weighted_mean_or_of_the_whole_and_none_without_what_it_needs() -> None:
    statistics = (
        Rows.mean,
        Statistic("weighted", mean=lambda rows: rows.values, per=lambda rows: rows.weights),
        Statistic("absent", mean=lambda rows: rows.values, needs="nothing"),
        Statistic("inside", mean=lambda rows: rows.values, rows="inner", needs="values"),
        plain("count", "how many", lambda rows: len(rows.values)),
    )
    numbers = estimates(statistics, Rows())
    assert [getattr(value, "value", value) for value in numbers.values()] == [3.0, 6.0, None, 3.0, 4]
    assert fields_of(statistics[3:]) == ("inside", "inside_stderr", "inside_low", "inside_high", "count")
    assert plain("rate", "", lambda rows: 0.0).as_fields(math.inf) == {"rate": None}
    with pytest.raises(NotMeasuredError, match="mean of Rows was not measured"):
        print(Rows().mean)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_quantiles_are_those_of_numpy(n: int) -> None:
    c = random_comparison(60)
    few = compared(c.baseline.scores.logprob[:n], c.candidate.scores.logprob[:n], kl=np.array(c.kl)[:n])
    found, delta_p = few.statistics(), np.exp(few.cand) - np.exp(few.base)
    fractions = {"median": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}
    for name, fraction in fractions.items():
        assert found[f"delta_p_{name}"] == pytest.approx(np.quantile(delta_p, fraction), rel=1e-12)
        if name != "p75":
            assert found[f"kl_{name}"] == pytest.approx(np.quantile(np.array(few.kl), fraction), rel=1e-12)
    for name, fraction in {"min": 0.0, "p001": 0.001, "p01": 0.01, "p05": 0.05, "p10": 0.1, "p25": 0.25}.items():
        assert found[f"delta_p_{name}"] == pytest.approx(np.quantile(delta_p, fraction), rel=1e-12)
    assert quantiles(np.array([1.0, math.inf]), {"low": 0.0, "half": 0.5}) == {"low": 1.0, "half": math.inf}
    assert math.isnan(quantiles(np.array([]), {"half": 0.5})["half"])


def test_moves_and_concentration_by_hand() -> None:
    """Six groups; the first two hold 8 of 12 nats of KL."""
    change = np.array([-0.5, 0.1, 0.2, 0.0, -0.1, 0.3])
    found = compared(np.full(6, -2.0), -2.0 + change, kl=[4.0, 4.0, 1.0, 1.0, 1.0, 1.0]).statistics()
    assert found["delta_logprob_rms"] == pytest.approx(math.sqrt((change**2).mean()))
    assert found["delta_logprob_max"] == pytest.approx(0.5)
    assert (found["targets"], found["groups"], found["kl_half_groups"]) == (6, 6, 2)
    assert found["groups_effective"] == pytest.approx(6)
    assert found["unseen_share"] == pytest.approx(1 - 0.05 ** (1 / 6))
    uneven = compared([-1.0] * 6, [-1.0] * 6, kl=[1.0] * 6, groups=[0, 1, 1, 1, 1, 1]).statistics()
    assert uneven["groups_effective"] == pytest.approx(36 / 26)
    even = compared([-1.0] * 5, [-1.0] * 5, kl=[0.0] * 5).statistics()
    assert even["kl_half_groups"] is None


@pytest.mark.parametrize("method", ["sliding-once", "mean-of-texts"])
@pytest.mark.parametrize("shift", [-0.03, -0.004, 0.0, 0.004, 0.03])
def test_the_chance_of_no_change_is_below_5_in_100_where_the_bounds_exclude_1(method: str, shift: float) -> None:
    for seed in range(8):
        c = random_comparison(25, seed=seed, method=method)
        noise = 0.3 * np.random.default_rng(seed).normal(size=25)[c.groups]
        cand = replace(c.candidate.scores, logprob=c.base + shift * 10 + noise)
        moved = replace(c, candidate=replace(c.candidate, scores=cand))
        chance, ratio = chance_of_no_change(PairedMeans(moved)), moved.ppl_ratio
        assert ratio.low is not None
        assert ratio.high is not None
        assert 0 <= chance <= 1
        assert (chance < 0.05) == (not ratio.low <= 1 <= ratio.high), (seed, chance, ratio.low, ratio.high)
        if method == "mean-of-texts" and ratio.value > 1:  # the bounds of a positive mean, on its log scale
            reached = math.log(ratio.value) * ratio.value / (ratio.stderr or math.nan)
            assert chance == pytest.approx(min(1, 2 * stats.t.sf(reached, ratio.freedom)))
    equal = replace(c, candidate=c.baseline)
    assert chance_of_no_change(PairedMeans(equal)) == 1.0
    sure = replace(c, candidate=replace(c.candidate, scores=replace(cand, logprob=c.base - 1.0)))
    assert chance_of_no_change(PairedMeans(sure)) == pytest.approx(0, abs=1e-9)
    assert chance_of_no_change(PairedMeans(compared([-1.0], [-2.0]))) == 1.0, "one group has no error"


@pytest.mark.parametrize("zero", ["baseline", "candidate"])
def test_a_document_of_probability_zero_leaves_no_ratio_of_means_of_documents(zero: str) -> None:
    usual, never = [-1.0] * 6, [-math.inf, *[-1.0] * 5]
    base, cand = (never, usual) if zero == "baseline" else (usual, never)
    found = compared(base, cand, document=np.arange(6), method="mean-of-texts").statistics()
    assert found["log_ppl_ratio"] is found["ppl_difference"] is found["log_ppl_ratio_stderr"] is None
    assert found["ppl_ratio"] == (0.0 if zero == "baseline" else None)


def test_reach_and_beyond_are_inverse_and_a_tail_on_the_other_side_changes_nothing() -> None:
    assert reach(9.0, 0.0) == reach(9.0, -3.0) == pytest.approx(stats.t.ppf(0.975, 9))
    for skewness in (0.0, 0.05, 0.2, 0.7, 3.0, 10.0):
        for tail in (0.1, 0.05, 0.01):
            assert beyond(reach(9.0, skewness, tail), 9.0, skewness) == pytest.approx(tail)
    assert beyond(-1.0, 9.0, 2.0) == pytest.approx(stats.t.sf(-1.0, 9))
    below = square_root(Estimate(4.0, 0.4, 9, 9, 8.0, -1.0, 9.0))
    assert (below.value, below.low, below.high) == (2.0, 0.0, 3.0)
    assert below.stderr == pytest.approx(0.1)
    assert square_root(Estimate(0.0, 0.4, 9, 9, 8.0, 0.0, 9.0)).stderr == 0.0


def test_llamacpps_errors() -> None:
    values = np.array([1.0, 2.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0])
    mean = LlamacppMean(values)
    assert mean.n == 11
    assert mean.mean == pytest.approx(values.mean())
    assert mean.error == pytest.approx(values.std() / math.sqrt(10))
    assert LlamacppMean(values[:10]).error == 0.0, "llama.cpp prints 0 for up to ten"
    assert LlamacppMean(np.ones(20)).error == LlamacppMean(np.zeros(0)).mean == 0.0
    assert llamacpp_stderr(-values[:1]) is None
    assert llamacpp_stderr(np.array([-1.0, -4.0])) == pytest.approx(math.exp(2.5) * math.sqrt(17 / 2 - 2.5**2))
    assert llamacpp_stderr(np.array([-1.0, -math.inf, -1.0])) is None
    assert llamacpp_stderr(np.array([-1.0, -2000.0])) is None


# ── depth, slices, groups ────────────────────────────────────────────────────────────────────────────────────────────
def test_means_by_stretch_and_depths_by_hand() -> None:
    depth, groups = np.array([0, 1, 2, 3, 5, 9]), np.array([0, 0, 1, 1, 1, 0])
    means = means_by_stretch(np.array([1.0, 3.0, 5.0, math.nan, 8.0, 9.0]), depth, groups, np.array([0, 2, 5, 8]))
    assert [(mean.value, mean.n, mean.groups) for mean in means] == [(2.0, 2, 1), (5.0, 1, 1), (8.5, 2, 2)]
    run = compared([-1.0] * 6, [-1.0] * 6).baseline
    facts = replace(run.facts, window=np.array([4, 4, 4, 7, 7, 7]), token=np.array([10, 11, 13, 8, 20, 9]))
    assert depths_of(replace(run, facts=facts)).tolist() == [0, 1, 3, 0, 12, 1]
    c = compared([-1.0] * 6, [-1.5] * 6)
    alone = replace(c, baseline=replace(run, facts=replace(run.facts, window=np.arange(6))))
    assert [(row.first, row.last, row.kl, row.delta_logprob.value) for row in alone.by_depth()] == [(0, 0, None, -0.5)]


def test_how_often_claims_of_few_documents_are_false_is_as_the_docs_say() -> None:
    lines = [line.split("|") for line in PAGE.splitlines() if line.startswith(("| no worse", "| likelier", "| any of"))]
    table = {cells[1].strip(): tuple(int(cell) for cell in cells[2:-1]) for cells in lines}
    assert list(table.values()) == [FALSE_OF_FEW[claim] for claim in ("no worse", "direction", "ranking")]
    for effective, share in ((0.4, 4), (1.0, 4), (1.99, 4), (2.0, 7), (9.99, 7)):
        assert f"up to {share} % of skewed samples" in false_of_few("direction", effective, "documents")
    assert false_of_few("direction", 10.0, "documents") == ""
    assert why_unsure(9, 9.99, "documents", few_documents=False).startswith("10.0 effective documents are too few")
    assert (
        why_unsure(9, 9.99, "documents", few_documents=True) == why_unsure(9, 10.0, "texts", few_documents=False) == ""
    )


def test_a_character_belongs_to_the_group_of_its_first_token() -> None:
    """Tokens of no bytes follow the one that owns the character; not across a document or a gap."""
    plan = plan_of("sliding-once", 2000, context_length=512, stride=512)
    groups = grouping(plan)
    assert (groups.count, groups.splits_characters) == (5, True)
    cut = int(np.flatnonzero(np.diff(groups.of_target))[0]) + 1
    byte_len = np.ones(plan.targets, np.int32)
    assert np.array_equal(character_groups(plan, groups, byte_len), groups.of_target)
    byte_len[cut : cut + 2] = 0
    moved = character_groups(plan, groups, byte_len)
    assert np.flatnonzero(moved != groups.of_target).tolist() == [cut, cut + 1]
    assert moved[cut + 1] == groups.of_target[cut - 1]
    few = plan_of("sliding-once", *[200] * 6, context_length=64, stride=64)
    whole = grouping(few)
    assert character_groups(few, whole, np.zeros(few.targets, np.int32)) is whole.of_target, (
        "no group begins inside one"
    )


# ── sentences ────────────────────────────────────────────────────────────────────────────────────────────────────────
def verdict(level: float, spread: float = 0.001, n: int = 20) -> Any:
    change = level + spread * np.linspace(-1, 1, n)
    return equivalence(of_documents([[one] for one in change]), 0.01)


def test_the_whole_sentences_of_verdicts() -> None:
    near = verdict(0.005, 0.004)
    assert near.p_worse < near.p_better < 0.05
    error = near.per_token.stderr
    assert (
        near.sentence
        == f"equivalent within 0.01, with 95 %: +0.005 ± {error:.2g} nats per token (p = {near.p_better:.2g})"
    )
    below = verdict(-0.005, 0.004)
    assert below.p_better < below.p_worse < 0.05
    assert below.sentence.endswith(f"(p = {below.p_worse:.2g})")
    far = verdict(0.5)
    assert (far.p_better, far.no_better, far.no_worse) == (pytest.approx(1), False, True)
    assert far.sentence.endswith(f"nats per token (p = {far.p_worse:.2g})")
    assert not replace(far, effective=3.0).no_worse, "three documents show nothing"
    never = np.full(6, -math.inf)
    impossible = compared(never, never, groups=np.arange(6), document=np.arange(6))
    assert equivalence(impossible, 0.01).sentence == "cannot be judged: a target has probability zero"
    few = replace(verdict(-0.5), few_documents=True, effective=3.0)
    assert few.sentence.endswith(
        "(p = 1); with 3.0 effective documents such a claim is false in up to 9 % of skewed samples"
    )
    unsure = replace(verdict(-0.009, 0.05), few_documents=True, effective=3.0)
    assert not unsure.sentence.endswith("samples"), "nothing is claimed"
    none = verdict(-0.02, spread=0.0)
    assert (none.p_worse, none.p_better) == (1.0, 0.0)
    assert equivalence(of_documents([[-0.25]] * 6), 0.25).p_worse == 1.0, "exactly by the margin is not less than it"


def test_the_numbers_of_a_verdict_in_json() -> None:
    found = verdict(0.0)
    facts = found.as_json()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert (facts["margin"], facts["targets"], facts["groups"], facts["groups_effective"]) == (0.01, 20, 20, 20.0)
    assert (facts["no_worse"], facts["equivalent"], facts["sentence"]) == (True, True, found.sentence)
    assert facts["per_document"] == pytest.approx(facts["per_token"], abs=1e-12)
    assert verdict(0.5).as_json()["equivalent"] is verdict(-0.5).as_json()["no_worse"] is False


# ── reprs and tables ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_repr_has_the_main_numbers_in_four_lines() -> None:
    c = compared([-1.0] * 6, [-1.0 - n / 10 for n in range(6)], kl=[0.5] * 6, tops=([1] * 6, [1] * 6))
    ratio = f"ppl ratio {c.ppl_ratio}"
    lines = repr(c).splitlines()
    assert lines[0] == "Comparison of q4 with base-model"
    assert lines[1].startswith("perplexity 3.")
    assert ", the baseline's 2." in lines[1]
    assert lines[2].startswith(ratio[:12])
    assert lines[3] == "6 targets by sliding-once on python-docs"
    bare = compared([-1.0] * 6, [-1.5] * 6)
    assert "kl" not in repr(bare)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9])
def test_a_repr_of_many_shows_the_first(count: int) -> None:
    lines = repr(Comparisons([compared([-1.0] * 6, [-1.5] * 6, name=f"q{n}") for n in range(count)])).splitlines()
    if not count:
        assert lines == ["no comparison"]
        return
    shown = count if count <= 4 else 3
    assert lines[0] == f"{count} compared with base-model"
    assert [line.split(":")[0] for line in lines[1 : shown + 1]] == [f"q{n}" for n in range(shown)]
    assert lines[shown + 1 :] == ([] if count <= 4 else [f"and {count - 3} more"])


def test_a_table_of_comparisons_has_types_also_where_nothing_was_measured() -> None:
    table = Comparisons([compared([-1.0] * 6, [-1.5] * 6, manifest={"engine": "vllm", "bytes": 5})]).to_arrow()
    assert table.column_names[:6] == ["name", "baseline", "engine", "model_format", "bytes", "bits_per_weight"]
    names = ("model_format", "engine", "bits_per_weight", "kl_mean")
    assert [table.schema.field(name).type for name in names] == [pa.string()] * 2 + [pa.float64()] * 2


def test_a_model_against_itself_on_two_paths_has_prefill_as_its_baseline() -> None:
    path, other = compared([-1.0], [-1.0], manifest={"rerun": {}}), compared([-1.0], [-1.0])
    assert (path.baseline_name, other.baseline_name) == ("prefill", "base-model")
    assert [are_of_paths(found) for found in ([path], [path, other], [])] == [True, False, False]
