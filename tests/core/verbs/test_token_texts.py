"""The two columns of texts in a run: equal ids have equal texts, on disk and in tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.reports.runs import worst_table
from tests.gguf_files import gguf_of
from tests.reports.test_table import drawn

TEXT = "Once upon a time there was a naïve 東京 cat. Once upon a time it said: hi.\n\nThe end" * 3


def model_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "table":
        return "table:uniform"
    if kind == "gguf":
        pytest.importorskip("xllamacpp")
        return str(gguf_of(request.getfixturevalue("tiny"), folder / "tiny.gguf"))
    return str(request.getfixturevalue(kind))


@pytest.mark.parametrize("kind", ["table", "tiny", "stories", "gguf"])
def test_equal_ids_have_equal_texts(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    sm.ppl(model_of(kind, request, tmp_path), text=TEXT, context_length=32, out=tmp_path / "run")
    run = sm.load(tmp_path / "run")
    text, top_text = run.facts.text, measured(run.facts.top_text)
    known: dict[int, str] = {}
    for ids, texts in ((run.facts.id, text), (measured(run.scores.top), top_text)):
        for token, word in zip(ids.tolist(), texts.tolist(), strict=True):
            assert known.setdefault(token, word) == word
    assert "" not in known.values()
    assert "�" not in known.values()
    table = run.to_arrow().to_pandas()
    alike = table.text == table.top_text  # raises if the two columns have different categories
    assert alike[table.id == table.top].all()
    assert np.array_equal(alike, text == top_text)


def test_what_the_model_expected_is_never_empty(stories: Path) -> None:
    """▁ alone is a token of this model: a space, where its decoder gives nothing."""
    run = sm.ppl(str(stories), text=TEXT, context_length=64)
    assert " " in measured(run.facts.top_text).tolist() + run.facts.text.tolist()
    expected = drawn([worst_table(run, len(run.scores))])
    assert "  '' p=" not in expected
    assert "  ' " in expected
