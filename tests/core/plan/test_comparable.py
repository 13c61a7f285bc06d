"""Two models can be compared if they scored the same targets; else the error says what differs, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode.core.plan.comparable import ComparableFacts, first_difference, require_comparable
from scoremode.core.text.corpus import Corpus, load
from scoremode.core.text.documents import RereadDocuments
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.core.text.tokens import tokenize
from scoremode.errors import InputError

BASELINE = ComparableFacts("t", 256, "digest", "gptq", {"stride": 4, "context_length": 8}, "text")
OTHER_PLAN = {"plan_digest": "other"}
OTHER_TOKENIZER = OTHER_PLAN | {"tokenizer": "u"}
DECODE = {"stride": 2, "path": "decode"}


@pytest.mark.parametrize(
    ("changes", "place", "line"),
    [
        ({"vocabulary": 300}, None, "vocabulary 256 vs 300: distributions over different ids cannot be compared"),
        (OTHER_PLAN, "at x", "different tokenizers: at x; feed both with one: --tokenizer FOLDER"),
        (OTHER_TOKENIZER | {"method": "llamacpp"}, "at x", "different tokenizers: at x"),
        (OTHER_PLAN, None, "different plans: different windows or texts; give --context-length"),
        (OTHER_PLAN | {"method": "llamacpp"}, "at x", "different plans: method gptq vs llamacpp; give"),
        (OTHER_PLAN | {"settings": {"stride": 2}}, "at x", "different plans: context length 8 vs None, stride 4 vs 2;"),
        (OTHER_PLAN | {"settings": DECODE}, "at x", "different plans: path prefill vs decode; give --context-length"),
        (OTHER_PLAN | {"corpus_sha256": "o"}, "at x", "different texts: the baseline was scored on another"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], place: str | None, line: str) -> None:
    candidate = replace(BASELINE, **changes)
    with pytest.raises(InputError) as refusal:
        require_comparable(BASELINE, candidate, lambda: place)
    assert str(refusal.value).startswith(line)
    require_comparable(candidate, candidate, lambda: place)


def test_equal_plans_are_comparable_whatever_the_tokenizers_are_called() -> None:
    """The plan holds the ids; a baseline that brings its question is told to be asked for it."""
    require_comparable(BASELINE, replace(BASELINE, tokenizer="u", settings={}), lambda: "not asked")
    with pytest.raises(InputError, match="leave text, method and sizes out: scoremode compare ref CANDIDATE has those"):
        require_comparable(BASELINE, replace(BASELINE, plan_digest="other"), lambda: None, own_question="ref")


TEXTS = ("the first text", "naïve second text that is a little longer")  # 14 and 42 bytes


@pytest.mark.parametrize(
    ("changed", "count", "words"),
    [
        (None, 56, None),
        (
            0,
            56,
            "they give other ids from character 0 of document 1 on, at 'the first text'; 56 tokens in the baseline",
        ),
        (18, 56, "they give other ids from character 3 of document 2 on, at 've second text that is a'; 56 tokens"),
        (None, 60, "the candidate's end early, 60 tokens in the baseline and 56 in the candidate"),
        (58, 60, "the candidate's end early, 60 tokens in the baseline and 56 in the candidate"),
        (None, 50, "they give other ids from character 35 of document 2 on, at 'longer'; 50 tokens in the baseline"),
    ],
)
def test_the_first_token_that_differs_is_shown_in_its_text(changed: int | None, count: int, words: str | None) -> None:
    documents = RereadDocuments(Corpus("two", "documents", lambda: iter(TEXTS), "", 2, 56), "texts", ByteTokenizer())
    tokens = tokenize(documents, ByteTokenizer(), special=False)
    ids = np.resize(tokens.ids, count).copy()
    if changed is not None:
        ids[[changed, -1]] = 1
    difference = first_difference(np.arange(count), ids, count, tokens, documents)
    assert difference is None if words is None else str(difference).startswith(words)
    if count == len(tokens):  # a baseline may know the ids of its targets alone
        assert first_difference(np.arange(0, 56, 2), ids[::2], count, tokens, documents) == difference


def test_one_document_has_no_number() -> None:
    documents = RereadDocuments(load(text="abcdef"), "texts", ByteTokenizer())
    tokens = tokenize(documents, ByteTokenizer(), special=False)
    difference = first_difference(np.array([2]), np.array([1]), 6, tokens, documents)
    assert (
        difference
        == "they give other ids from character 2 on, at 'cdef'; 6 tokens in the baseline and 6 in the candidate"
    )
