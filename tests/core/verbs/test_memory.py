"""What a comparison holds in memory: text, tokens and KL, whatever the length of the text; and no bit moves for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.plan import plan
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import METHODS, find_method
from scoremode.core.scores import columns as scores
from scoremode.core.scores import parquet as columns
from scoremode.core.scores.columns import Scores, TargetFacts
from scoremode.core.statistics import streams
from scoremode.core.statistics.comparison import Comparison, comparison_statistics
from scoremode.core.statistics.run import all_metrics
from scoremode.core.text import long_text, tokens
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.core.text.tokens import tokenize
from scoremode.core.verbs import question
from scoremode.core.verbs.compare import compare
from tests.core.plan.test_recipes import tokens_of
from tests.core.statistics.test_comparison import random_comparison
from tests.core.statistics.test_groups import groups_of
from tests.memory import measured_alone, peak_of


def compared(folder: Path, targets: int) -> Comparison:
    words = "Thé quick brown fox jumps over the lazy dog. "
    text = folder / f"{targets}.txt"
    text.write_text(words * (targets // len(words.encode()) + 1))
    (found,) = compare(
        *("table:uniform", "table:uniform"), corpus=str(text), context_length=256, stride=256, out=folder / str(targets)
    )
    return found


FEW, MANY = 4_000, 12_000


def peaks(folder: str) -> list[int]:
    """Of comparing few targets and many, then of their statistics."""
    in_blocks_of(512, pytest.MonkeyPatch())
    comparison_statistics(compared(Path(folder), 1000))  # what is loaded on first use is not counted
    found: list[Comparison] = []
    scoring = [peak_of(lambda n=n: found.append(compared(Path(folder), n))) for n in (FEW, MANY)]  # type: ignore[misc]
    return [*scoring, *(peak_of(partial(comparison_statistics, one)) for one in found)]


def test_a_target_more_takes_few_bytes_more(tmp_path: Path) -> None:
    """Text 1, ids 4, ends 8, bytes and words 4 each, KL 8: 29. Scores and texts of two runs alone would be 100 more."""
    few, many, few_told, many_told = measured_alone(peaks, str(tmp_path))
    assert (many - few) / (MANY - FEW) < 40
    assert (many_told - few_told) / (MANY - FEW) < 20


def in_blocks_of(targets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (columns, streams, tokens, plan, scores):
        monkeypatch.setattr(module, "BLOCK", targets)


@pytest.mark.parametrize("method", ["sliding-once", "mean-of-texts"])
def test_statistics_do_not_depend_on_the_block(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = random_comparison(30, method=method, noise_kl=[0.0, 0.1])
    at_once = comparison_statistics(c)
    in_blocks_of(7, monkeypatch)
    assert comparison_statistics(c) == at_once


def plans() -> list[Plan]:
    one, several = tokens_of(90), tokens_of(40, 1, 25, 33)
    masked = tokens_of(40, 30)
    object.__setattr__(masked, "target_mask", np.random.default_rng(0).random(70) < 0.4)
    sizes: dict[str, Any] = {name: {"stride": 5} if m.stride else {} for name, m in METHODS.items()}
    return [
        make_plan(find_method(name), given, context_length=16, **sizes[name])
        for name in METHODS
        for given in (one, several, masked)
        if name != "llamacpp" or given is one
    ]


@pytest.mark.parametrize("plan", plans(), ids=repr)
def test_metrics_and_groups_do_not_depend_on_the_block(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    n, chance = plan.targets, np.random.default_rng(1)
    scores = Scores(
        -chance.gamma(1, 2, n), chance.integers(1, 9, n), chance.gamma(1, 2, n), np.zeros(n, np.int32), np.zeros(n)
    )
    given = tokens_of(*np.diff(plan.doc_starts).tolist())
    at_once, (kind, groups) = all_metrics(plan, given, scores), groups_of(plan)
    in_blocks_of(7, monkeypatch)
    assert len(list(plan.blocks())) > 1 or len(plan) == 1
    assert all_metrics(plan, given, scores) == at_once
    assert groups_of(plan)[0] == kind
    assert np.array_equal(groups_of(plan)[1], groups)
    for name in ("window", "token", "document"):
        parts = [getattr(block, name) for block in plan.blocks()]
        assert np.array_equal(np.concatenate(parts), getattr(plan, f"target_{name}")), name
    assert [block.begin for block in plan.blocks()][1:] == [block.end for block in plan.blocks()][:-1]
    assert plan.covered == len(np.unique(plan.target_token))


def test_tokens_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from scoremode.core.text.documents import Document

    texts = [Document([text]) for text in ("Thé 東京 👩‍🔬 words,  and\nmore ASCII words here", "", "second né")]
    at_once = tokenize(texts, ByteTokenizer(), special=False)
    in_blocks_of(7, monkeypatch)
    again = tokenize(texts, ByteTokenizer(), special=False)
    for name in ("ids", "char_start", "char_end", "byte_len", "word_starts"):
        assert np.array_equal(getattr(again, name), getattr(at_once, name)), name
    assert int(again.byte_len.sum()) == sum(d.source_bytes for d in texts)


LINES = " \n = Title = \n \n Words über Flüße . \n = = Part = = \n \n More . \n = Other = \n \n End . \n"
JOINING = ("sliding-once", "exl3-2025", "gptq", "hf-stride", "llamacpp")


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, Any]:
    plain, rows, wiki = tmp_path / "plain.txt", tmp_path / "rows.jsonl", tmp_path / "wiki.raw"
    plain.write_text("Ein Fluß fließt 👩‍🔬 durch die Stadt.\n" * 60, encoding="utf-8")
    rows.write_text("".join(f'{{"text": "Zeile {i} über\\n den Fluß"}}\n' for i in range(40)), encoding="utf-8")
    wiki.write_text(LINES * 12, encoding="utf-8")
    chat = tmp_path / "chat.jsonl"
    turns = '[{"role": "user", "content": "was %d?"}, {"role": "assistant", "content": "über %d Flüße"}]'
    chat.write_text("".join(f'{{"messages": {turns % (i, i)}}}\n' for i in range(40)), encoding="utf-8")
    return {
        "plain": plain,
        "rows": rows,
        "wiki": f"wikitext2:{wiki}",
        "several": [plain, rows],
        "mixed": [f"wikitext2:{wiki}", plain, rows],
        "chat": chat,
    }


def answer(corpus: Any, method: str, **more: Any) -> tuple[Mapping[str, Any], TargetFacts]:
    run = sm.ppl("table:uniform", corpus=corpus, method=method, context_length=24, fresh=True, **more)
    return run.manifest, run.facts


def assert_same_answers(corpus: Any, method: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    manifest, facts = answer(corpus, method, **more)
    with monkeypatch.context() as changed:
        changed.setattr(question, "STORED_FROM", 0)
        changed.setattr(long_text, "PART", 300)
        changed.setattr(long_text, "REACH", 100)
        again, facts_again = answer(corpus, method, **more)
    for name in ("identity", "tokens", "documents", "targets", "metrics", "notes", "plan_digest"):
        assert manifest.get(name) == again.get(name), name
    for name in ("window", "document", "token", "id", "byte_len", "word_starts", "group", "weight", "text"):
        assert np.array_equal(getattr(facts, name), getattr(facts_again, name)), name


@pytest.mark.parametrize("method", JOINING)
@pytest.mark.parametrize("name", ["plain", "rows", "wiki", "several", "mixed"])
def test_a_text_that_is_read_again_gives_the_same_run(
    name: str, method: str, corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_answers(corpora[name], method, monkeypatch)


@pytest.mark.parametrize("name", ["rows", "chat", "several"])
def test_shortened_documents_samples_and_chats_are_the_same(
    name: str, corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_answers(corpora[name], "sliding-once", monkeypatch, num_samples=30)
    assert_same_answers(corpora[name], "sliding-once", monkeypatch, document_tokens=7)
    if name == "chat":
        assert_same_answers(corpora[name], "sliding-once", monkeypatch, assistant_only=True)
