"""A long text, whose tokens are kept on disk, gives the same run as a short one: numbers, words and digests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.scores.columns import TargetFacts
from scoremode.core.text import long_text
from scoremode.core.verbs import question

LINES = " \n = Title = \n \n Words über Flüße . \n = = Part = = \n \n More . \n = Other = \n \n End . \n"
METHODS = ("sliding-once", "exl3-2025", "gptq", "hf-stride", "llamacpp")


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


@pytest.mark.parametrize("method", METHODS)
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
