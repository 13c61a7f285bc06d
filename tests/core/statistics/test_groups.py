"""What is independent, and how much a target counts: follows from the plan, and is stored with the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import METHODS, find_method
from scoremode.core.statistics.groups import FEWEST, SHORTEST, STRETCH, are_blocks, grouping, weights_of
from scoremode.core.verbs.baselines import of_runs
from scoremode.values import Ints
from tests.core.plan.streams import tokens_of
from tests.makers import ask


def plan_of(method: str, *lengths: int, joined_at: list[int] | None = None, **sizes: Any) -> Plan:
    tokens = tokens_of(*lengths)
    if joined_at is not None:
        tokens = replace(tokens, joined_at=np.array(joined_at))
    return make_plan(find_method(method), tokens, **sizes)


def groups_of(plan: Plan) -> tuple[str, Ints]:
    """What a group is, in words, and the group of each target (0, 1, …)."""
    found = grouping(plan)
    return found.kind, found.of_target


def test_documents_with_targets_are_groups_where_there_are_enough_of_them_and_windows_are_not() -> None:
    kind, groups = groups_of(plan_of("sliding-once", 1, *[20] * 5, context_length=8, stride=4))
    assert (kind, sorted(set(groups.tolist()))) == ("documents", [0, 1, 2, 3, 4])
    kind, groups = groups_of(plan_of("sliding-once", 1000, context_length=8, stride=8))
    assert (kind, groups.max()) == ("document", 0)


def test_texts_that_a_model_wrote_after_one_prompt_are_one_group() -> None:
    plan = plan_of("sliding-once", *[20] * 6, context_length=8, stride=8)
    kind, groups = groups_of(replace(plan, doc_group=np.array([0, 0, 4, 4, 4, 9])))
    assert kind == "prompts"
    assert np.array_equal(groups, np.array([0, 0, 1, 1, 1, 2])[plan.target_document])
    assert groups_of(replace(plan, doc_group=np.zeros(6, np.int64)))[0] == "prompt"


def test_texts_that_were_joined_are_groups_again() -> None:
    """One stream of six texts, with overlapping windows that score tokens twice: a token still has one group."""
    plan = plan_of("exl3-2025", 121, joined_at=[20, 40, 60, 80, 100], context_length=8, stride=2)
    kind, groups = groups_of(plan)
    assert kind == "joined texts"
    assert np.array_equal(groups, np.minimum(plan.target_token // 20, 5))


def test_a_long_text_is_cut_into_long_equal_stretches() -> None:
    plan = plan_of("gptq", 6 * STRETCH + 999, context_length=2048)
    kind, groups = groups_of(plan)
    assert kind == f"stretches of at least {STRETCH:,} tokens"
    sizes = np.bincount(groups)
    assert len(sizes) == 6
    assert sizes.min() > 0.99 * sizes.max()
    assert (np.diff(groups) >= 0).all()


def test_few_long_documents_are_cut_and_never_across_their_ends() -> None:
    plan = plan_of("sliding-once", 3 * STRETCH, 2 * STRETCH + 5, context_length=4096, stride=4096)
    kind, groups = groups_of(plan)
    assert kind.startswith("stretches")
    assert groups.max() + 1 == 5
    assert set(groups[plan.target_document == 0]) == {0, 1, 2}
    assert set(groups[plan.target_document == 1]) == {3, 4}


def test_one_text_too_short_for_stretches_is_cut_into_few_long_blocks() -> None:
    plan = plan_of("sliding-once", (FEWEST - 1) * STRETCH, context_length=4096, stride=4096)
    kind, groups = groups_of(plan)
    assert kind == "blocks of 26,214 tokens of this one text"
    assert are_blocks(kind)
    sizes = np.bincount(groups)
    assert (len(sizes), sizes[0], sizes.max()) == (5, 26213, 26215)  # the first token is not scored
    assert (np.diff(groups) >= 0).all()


def test_blocks_begin_where_the_first_target_is() -> None:
    plan = plan_of("llamacpp", 4096, context_length=1024)  # the first half of each window is not scored
    kind, groups = groups_of(plan)
    sizes = np.bincount(groups)
    assert (kind, len(sizes)) == ("blocks of 716 tokens of this one text", FEWEST)
    assert sizes[0] > 0.9 * sizes.mean(), "not a block whose first 512 tokens have no score"


def test_blocks_never_cross_the_end_of_a_text() -> None:
    plan = plan_of("sliding-once", 3000, 1000, context_length=512, stride=512)
    kind, groups = groups_of(plan)
    assert kind == "blocks of at most 800 tokens of these 2 texts"
    assert set(groups[plan.target_document == 0]) == {0, 1, 2, 3}
    assert set(groups[plan.target_document == 1]) == {4, 5}


@pytest.mark.parametrize("tokens", [FEWEST * SHORTEST - 2, 40])
def test_a_text_too_short_for_blocks_has_too_few_groups(tokens: int) -> None:
    kind, groups = groups_of(plan_of("sliding-once", tokens, context_length=512, stride=512))
    assert (kind, groups.max()) == ("document", 0)
    assert not are_blocks(kind)


# ── kept with the run ────────────────────────────────────────────────────────────────────────────────────────────────
def texts(folder: Path, count: int = 6, size: int = 70) -> list[str]:
    random = np.random.default_rng(3)
    paths = [folder / f"{i}.txt" for i in range(count)]
    for path in paths:
        path.write_text("".join(random.choice(list("abcdefgh ijk"), size=size + int(random.integers(40)))))
    return [str(path) for path in paths]


@pytest.mark.parametrize("method", METHODS)
def test_two_finished_runs_have_the_errors_of_a_comparison_that_knows_the_plan(
    method: str, tiny: Path, tiny_bos: Path, tmp_path: Path
) -> None:
    """For every method, the ratio is the quotient of the perplexities, with the groups and weights of the plan."""
    question: dict[str, Any] = {"corpus": texts(tmp_path), "method": method, "context_length": 16, "max_windows": 0}
    if METHODS[method].stride is not None:
        question["stride"] = 4
    first = sm.ppl(str(tiny_bos), out=tmp_path / "a", **question)
    sm.ppl(str(tiny_bos), out=tmp_path / "b", dtype="bfloat16", **question)
    found = of_runs(str(tmp_path / "a"), [str(tmp_path / "b")])[0].statistics()
    assert found["ppl_ratio"] == pytest.approx(found["ppl_candidate"] / found["ppl_baseline"], rel=1e-12)
    assert found["ppl_ratio_stderr"] is not None
    asked = ask(str(tiny_bos), **question)
    kind, groups = groups_of(asked.plan)
    assert first.manifest["stderr_groups"] == kind
    assert np.array_equal(first.facts.group, groups)
    assert np.array_equal(first.facts.weight, weights_of(asked.plan))
    assert found["groups"] == first.perplexity.groups == groups.max() + 1 == 6


def test_wikitext_joined_into_one_stream_is_grouped_by_its_articles(wikitext_file: Path) -> None:
    """The six pages, whether the recipe joins rows or uses the original file."""
    counts = {}
    question: dict[str, Any] = {"corpus": f"wikitext2:{wikitext_file}", "context_length": 512, "max_windows": 0}
    for method in ("gptq", "sliding-once", "llamacpp"):
        asked = ask("table:uniform", method=method, **question)
        kind, groups = groups_of(asked.plan)
        assert kind == "joined texts"
        counts[method] = int(groups.max()) + 1
        if method == "gptq":
            (document,) = asked.documents
            text = document.text
            begins = [text[at : at + 30] for at in document.joined_at]
            assert len(begins) == 5
            assert all(begin.startswith(" = ") for begin in begins)
    # llamacpp scores the second half of each chunk, and one page (bytes 24,577 to 24,691) lies in a first half
    assert counts == {"gptq": 6, "sliding-once": 6, "llamacpp": 5}
