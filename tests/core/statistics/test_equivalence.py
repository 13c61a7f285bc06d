"""No worse than a margin: against tests by SciPy, simulated documents, and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.equivalence import equivalence
from scoremode.errors import OptionError
from scoremode.reports.gate import check, parse
from tests.command_line import Command
from tests.core.statistics.test_comparison import compared


def of_documents(changes: list[list[float]]) -> Comparison:
    """Documents whose tokens changed by these numbers of nats."""
    change = np.concatenate([np.array(own) for own in changes])
    document = np.repeat(np.arange(len(changes)), [len(own) for own in changes])
    base = np.full(len(change), -3.0)
    return compared(base, base + change, groups=document, document=document)


def by_hall(values: np.ndarray, mean: float) -> float:
    """p of a mean above ``mean`` by Hall's transformation, written out, with 2.5 times the skewness."""
    n, skewness = len(values), 2.5 * stats.skew(values)
    t = (values.mean() - mean) / stats.sem(values)
    skewness = max(skewness, -4.5 * n**0.5 / t)  # beyond this one, p would become smaller again
    moved = t + skewness * t**2 / (3 * n**0.5) + skewness**2 * t**3 / (27 * n) + skewness / (6 * n**0.5)
    return float(stats.t.sf(moved, n - 1))


@pytest.mark.parametrize("sign", [1, -1])
def test_tests_of_documents_of_one_token_are_those_of_scipy_and_hall(sign: int) -> None:
    """On the side of the long tail Hall's p counts, on the other one Student's."""
    change = -0.003 + sign * (np.random.default_rng(1).lognormal(-4.5, 0.8, 30) - 0.015)
    found = equivalence(of_documents([[one] for one in change]), 0.01)
    students = stats.ttest_1samp(change, -0.01, alternative="greater").pvalue
    others = stats.ttest_1samp(change, 0.01, alternative="less").pvalue
    assert found.p_worse == pytest.approx(max(students, by_hall(change, -0.01)), rel=1e-6)
    assert found.p_better == pytest.approx(max(others, by_hall(-change, -0.01)), rel=1e-6)
    assert (found.p_worse == pytest.approx(students)) == (sign == 1)
    assert found.per_token.value == pytest.approx(change.mean())


def test_blocks_of_one_text_show_nothing_about_other_texts() -> None:
    level = of_documents([[0.001 * n] for n in range(9)])
    kind = "blocks of 300 tokens of this one text"
    baseline = replace(level.baseline, manifest={**level.baseline.manifest, "stderr_groups": kind})
    found = equivalence(replace(level, baseline=baseline), 0.01)
    assert (found.p_worse, found.no_worse, found.no_better) == (None, False, False)
    assert found.sentence == f"cannot be judged: the error is over 9 {kind}, and 5 unrelated texts are needed"


def test_documents_count_by_their_tokens_or_alike() -> None:
    changes = [[-0.1] * n for n in (1, 2, 3, 4, 5)]
    changes[4] = [-0.5] * 5
    found = equivalence(of_documents(changes), 0.01)
    assert found.per_token.value == pytest.approx((-0.1 * 10 - 0.5 * 5) / 15)
    sums = np.array([sum(own) for own in changes])
    assert found.per_document.value == pytest.approx(sums.mean())
    assert found.per_document.stderr == pytest.approx(sums.std(ddof=1) / math.sqrt(5))


def test_verdicts() -> None:
    def said(level: float, spread: float = 0.001, n: int = 20) -> str:
        change = level + spread * np.linspace(-1, 1, n)
        return equivalence(of_documents([[one] for one in change]), 0.01).sentence

    assert said(0.0).startswith("equivalent within 0.01, with 95 %")
    assert said(0.5).startswith("no worse than 0.01, with 95 %")
    assert said(-0.5).startswith("not shown to be no worse than 0.01, it is worse by more")
    assert said(-0.009, 0.05).startswith("not shown to be no worse than 0.01, it may be worse")
    assert said(0.0, n=4) == "cannot be judged: 4 documents give no ± (5 are needed)"
    assert said(-math.inf).startswith("cannot be judged: a target has probability zero")
    assert said(0.0, spread=0.0).startswith("equivalent within 0.01")


def test_a_candidate_that_is_worse_by_the_margin_passes_in_five_of_a_hundred_texts() -> None:
    random, shown, trials = np.random.default_rng(2), 0, 600
    for _ in range(trials):
        level = random.normal(-0.01, 0.02, 25)
        changes = [list(level[i] + random.normal(0, 0.05, n)) for i, n in enumerate(random.integers(5, 40, 25))]
        shown += equivalence(of_documents(changes), 0.01).no_worse
    assert 0.025 <= shown / trials <= 0.08


def test_only_answers_count_where_a_text_has_slices() -> None:
    base, cand = np.full(40, -2.0), np.full(40, -2.5)
    document, answer = np.repeat(np.arange(8), 5), np.tile([False, False, False, True, True], 8)
    cand[answer] = -1.9 - 0.01 * document[answer]
    cand[0] = -np.inf  # outside the answers, so that it is not part of this number
    whole = compared(base, cand, groups=document, document=document)
    sliced = replace(whole, answer=answer)
    s = sliced.statistics()
    expected = (cand - base)[answer]
    assert s["answer_logprob"] == pytest.approx(expected.mean())
    by_document = expected.reshape(8, 2).mean(axis=1)
    assert s["answer_logprob_stderr"] == pytest.approx(by_document.std(ddof=1) / math.sqrt(8))
    assert s["delta_logprob_mean"] is None
    found = equivalence(sliced, 0.01)
    assert (found.per_token.n, found.per_document.n) == (16, 8)
    assert found.per_document.value == pytest.approx(2 * expected.mean())
    none = replace(whole, answer=np.zeros(40, np.bool_))
    assert equivalence(none, 0.01).sentence == "cannot be judged: no target is part of an answer"
    assert check(parse("answer_logprob < -0.01"), replace(none, candidate=none.baseline).statistics()) == (
        "q4: answer_logprob is not known: no target is part of an answer"
    )


def test_without_slices_all_targets_are_answers() -> None:
    found = of_documents([[0.1, -0.2], [0.0], [0.1], [0.3], [-0.2, 0.1, 0.2]]).statistics()
    for name in ("", "_stderr", "_low", "_high"):
        assert found[f"answer_logprob{name}"] == found[f"delta_logprob_mean{name}"]
    sure = of_documents([[-0.1 - 0.001 * n] for n in range(10)])
    why = check(parse("answer_logprob < -0.01 surely"), sure.statistics())
    assert why is not None
    assert "surely below -0.01" in why


@pytest.mark.parametrize("margin", [0, -1, math.nan, math.inf])
def test_margins_that_mean_nothing_are_refused(margin: float) -> None:
    with pytest.raises(OptionError, match="not a number above 0"):
        equivalence(of_documents([[0.0]]), margin)


def test_the_command_line_prints_the_verdict_and_exits_by_it(command: Command, tmp_path: Path) -> None:
    text = "one two three. " * 40
    rows = "".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(10))
    file = tmp_path / "texts.jsonl"
    file.write_text(rows)
    asked = ("compare", "table:uniform", "table:uniform", "--corpus", str(file), "--no-worse-than")
    code, out, _ = command(*asked, "0.01")
    assert code == 0
    assert "equivalent within 0.01, with 95 %" in out
    code, out, _ = command(*asked, "0.01", "--json")
    assert json.loads(out)["candidates"][0]["equivalence"]["equivalent"] is True
    code, out, err = command(*asked, "0.01", "--num-samples", "3")
    assert code == 1
    assert "the error is over 6 blocks of at most 361 tokens of these 3 texts" in " ".join((out + err).split())
    code, out, err = command(*asked, "0.01", "--num-samples", "1")
    assert code == 1
    assert "give no ±" in out + err
    code, out, err = command(*asked, "0.01", "--num-samples", "6", "--fail-if", "same_top < 0.9 surely")
    few = "6.0 effective documents are too few; give at least 10 of about equal length, or --few-documents"
    assert (code, " ".join((out + err).split()).count(few)) == (1, 2 + 1)
    few_documents = (*asked, "0.01", "--num-samples", "6", "--fail-if", "same_top < 0.9 surely", "--few-documents")
    code, out, _ = command(*few_documents)
    assert code == 0
    assert "such a claim is false in up to 10 % of skewed samples" in " ".join(out.split())
    code, out, _ = command(*few_documents, "--out", str(tmp_path / "runs"), "--markdown")
    assert code == 0
    assert "--corpus texts.jsonl --num-samples 6 --few-documents`" in out  # the command that says the same
    for wrong in ("0", "-1", "much"):
        code, _, err = command(*asked, wrong)
        assert code == 2
        assert "no-worse-than" in err


def test_a_document_in_several_groups_is_counted_whole() -> None:
    whole = of_documents([[0.1] * 4, [0.2] * 4])
    found = equivalence(replace(whole, groups=np.arange(8)), 0.01)
    assert (found.per_token.groups, found.per_document.groups, found.per_document.stderr) == (8, 2, None)
    assert found.per_document.value == pytest.approx(0.6)
