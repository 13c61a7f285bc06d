"""Candidates one after the other: one that fails stops no other, unless the question is wrong."""

from __future__ import annotations

import pytest

from scoremode.core.verbs.candidates import score_in_turn
from scoremode.errors import CandidatesError, CorpusError, EngineError, StorageError


def test_candidates_in_turn_are_all_tried_but_not_if_the_question_or_the_storage_is_wrong() -> None:
    tried: list[str] = []

    def score(name: str) -> str:
        tried.append(name)
        if name in errors:
            raise errors[name]
        return name.upper()

    errors: dict[str, Exception] = {"b": EngineError("NaN"), "c": MemoryError(), "d": CorpusError("too short for d")}
    with pytest.raises(CandidatesError) as error:
        score_in_turn("abcde", score)
    assert (tried, error.value.found) == (list("abcde"), {"a": "A", "e": "E"})
    assert [str(one).partition(";")[0] for one in error.value.failed.values()] == [
        "NaN",
        "this machine's memory is used up",
        "too short for d",
    ]
    for first in (CorpusError("no text"), StorageError("the bucket is gone")):
        tried.clear()
        errors = {"a": first}
        with pytest.raises(type(first)):
            score_in_turn("abcde", score)
        assert tried == ["a"]
    errors = {"a": EngineError("NaN")}
    with pytest.raises(EngineError):
        score_in_turn("a", score)
    assert score_in_turn("bc", score) == {"b": "B", "c": "C"}
