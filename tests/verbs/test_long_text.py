"""A text that is read again gives the same run as one that is kept in memory: numbers, words and digests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.scores.columns import TargetFacts
from scoremode.text import documents, pieces
from scoremode.text.pieces import Sizes
from scoremode.text.reading import Excerpts, ReadAgain
from scoremode.text.tokens import Document, OpenDocument

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
        changed.setattr(documents, "IN_MEMORY", 0)
        changed.setattr(pieces, "Sizes", lambda: Sizes(300, 100, 16, 64))
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


def test_places_are_read_in_any_order() -> None:
    texts = ["first text", "", "the second, longer text", "x"]

    def opened() -> Any:
        return (OpenDocument([text[i : i + 3] for i in range(0, len(text), 3)]) for text in texts)

    source = Excerpts(ReadAgain(opened, len(texts)))
    for places in ([(0, 0, 5), (0, 4, 10), (2, 0, 3)], [(2, 1, 9), (2, 4, 6), (3, 0, 1)], [(3, 0, 1), (0, 2, 4)], []):
        d, a, b = (np.array([place[i] for place in places], np.int64) for i in range(3))
        assert source.at(d, a, b) == [texts[i][j:k] for i, j, k in places]
    whole = ReadAgain(opened, len(texts))
    assert [one.text for one in whole] == texts
    assert (whole[-1].text, [one.text for one in whole[1:3]]) == ("x", texts[1:3])
    assert isinstance(whole[0], Document)
    with pytest.raises(IndexError):
        whole[4]
