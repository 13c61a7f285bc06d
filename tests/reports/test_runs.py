"""What a terminal shows of runs, plans and pairs: names that tell runs apart, sizes, a token in its context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import scoremode as sm
from scoremode.console.output import print_blocks
from scoremode.core.store.run import Run
from scoremode.reports.comparisons import summary
from scoremode.reports.runs import plan_blocks, sequence_blocks
from scoremode.reports.served import distinct_baselines, run_name
from tests.core.statistics.test_comparison import random_comparison


def shown(blocks: Any, capsys: pytest.CaptureFixture[str]) -> str:
    print_blocks(blocks)
    return capsys.readouterr().out


@pytest.fixture
def run() -> Run:
    return sm.ppl("table:successor", text="abcdefghij abcdefghij", fresh=True)


def named(run: Run, path: str | None = None, **facts: str) -> Run:
    return replace(run, path=path, manifest={**run.manifest, "model": "m", **facts})


def test_a_run_has_the_name_that_tells_it_from_the_others(run: Run) -> None:
    one, other = named(run, "runs/a"), named(run, "runs/b")
    assert run_name(one, [one]) == "m"
    assert run_name(one, [one, other]) == "m · runs/a"
    assert run_name(one, [one, named(run, model="n")]) == "m"
    assert run_name(named(run), [named(run), other]) == "m"  # it lies nowhere
    texts = [named(run, "runs/a", corpus="x"), named(run, "runs/b", corpus="y")]
    assert [run_name(each, texts) for each in texts] == ["m · x", "m · y"]
    dtypes = [named(run, dtype="float32"), named(run, dtype="bfloat16")]
    assert run_name(dtypes[1], dtypes) == "m · bfloat16"


def test_one_baseline_is_counted_once() -> None:
    compared = sm.compare("table:uniform", "table:successor", "table:uniform", text="abcdefg")
    assert distinct_baselines(compared) == [compared[0]]


def test_a_plan_says_which_tokens_each_window_feeds_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    plan = sm.plan("table:uniform", text="abcdefgh", context_length=4, stride=2)
    out = shown(plan_blocks(plan), capsys)
    first = plan["first_windows"][0]
    assert (
        f"{first['feeds_from']}…{first['feeds_to'] - 1}, scores {first['scores_from']}…{first['scores_to'] - 1}" in out
    )
    assert f"{plan['targets']:,} ({100 * plan['coverage']:.1f}% of the tokens covered)" in out
    nothing = dict.fromkeys(plan["memory"], 0)
    assert "memory" not in shown(plan_blocks({**plan, "memory": nothing}), capsys)  # of a model on a server
    size = {"weights": 1 << 30, "activations": 0, "logits": 1 << 20, "kv_cache": 1 << 21, "logits_if_whole": 1 << 31}
    large = {**plan, "memory": size, "reference": {"total": 1 << 22, "logits_fp16": 1 << 23}}
    out = " ".join(shown(plan_blocks(large), capsys).split())
    assert "weights 1.0 GiB, activations 0.0 MiB, logits 1.0 MiB, K/V cache 2.0 MiB (all logits" in out
    assert "would take 2.0 GiB)" in out
    assert "4.0 MiB on disk (float16 logits would take 8.0 MiB)" in out


def test_pairs_stand_below_their_prompts_with_what_to_know_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    one = sm.prob("table:uniform", prompt="Once", targets=["upon", " upon"])
    out = shown(sequence_blocks(one), capsys)
    assert [line.split()[0] for line in out.splitlines()[1:] if line.startswith(("'", '"'))] == ["'upon'", "'"]
    assert "reads 'Onceupon': after a word give ' …', or --leading-space add" in out
    assert "#" in out  # ranks
    assert "reads" not in shown(sequence_blocks(one[1:]), capsys)
    assert "reads" not in shown(sequence_blocks(sm.prob("table:uniform", prompt="1 + 1 =", targets=["2"])), capsys)
    assert "reads" not in shown(sequence_blocks(sm.prob("table:uniform", prompt="x1", targets=["y"])), capsys)
    added = sm.prob("table:uniform", prompt="Once", targets=["upon"], leading_space="add")
    assert "a leading space was added to targets without one" in shown(sequence_blocks(added), capsys)
    two = shown(sequence_blocks([*one, *sm.prob("table:uniform", prompt="Twice", targets=["x"])]), capsys)
    assert [line.strip() for line in two.splitlines()[1:] if line.split()[:1] in (["Once"], ["Twice"])] == [
        "Once",
        "Twice",
    ]


def test_what_errors_rest_on_is_said_or_why_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (shown(summary([random_comparison(groups)]).blocks(), capsys) for groups in (3, 50))
    assert "3 documents give no ± (5 are needed)" in few
    assert "give no ±" not in many
    assert "50 documents" in many
