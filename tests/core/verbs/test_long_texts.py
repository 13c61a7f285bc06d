"""A text that is cut into parts gives the same run to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import METHODS, find_method
from scoremode.core.scores.columns import TargetFacts
from scoremode.core.text import long_text, tokens
from scoremode.core.text.documents import Document
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.core.text.tokens import tokenize
from tests.core.plan.test_recipes import tokens_of


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
def test_targets_are_those_of_the_windows(plan: Plan) -> None:
    windows = [plan.window(index) for index in range(len(plan))]
    ids = np.concatenate([window.targets[:, 0] for window in windows])
    assert np.array_equal(plan.ids[plan.target_token], ids)
    assert np.array_equal(plan.target_window, np.repeat(np.arange(len(plan)), [len(w.rows) for w in windows]))
    assert (plan.doc_starts[plan.target_document] <= plan.target_token).all()
    assert (plan.target_token < plan.doc_starts[plan.target_document + 1]).all()
    assert plan.covered == len(np.unique(plan.target_token))


def test_bytes_and_words_of_tokens_do_not_depend_on_how_many_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [Document(text) for text in ("Thé 東京 👩‍🔬 words,  and\nmore ASCII words here", "", "second né")]
    at_once = tokenize(texts, ByteTokenizer(), special=False)
    monkeypatch.setattr(tokens, "BLOCK", 7)
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
