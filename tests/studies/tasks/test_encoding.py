"""Pairs as ids, against the harness's own encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from scoremode.errors import InputError, ModelError
from scoremode.studies.tasks.encoding import HarnessEncoder

pytest.importorskip("lm_eval", reason="needs lm-eval")

from tests.studies.tasks.judge import harness_model, instances

PAIRS = [
    ("The quick brown", " fox"),
    ("The quick brown", " fox jumps over the lazy dog."),
    ("The quick brown ", "fox"),
    ("A line\n\n", "another line"),
    ("", "The fox"),
    ("", "<s>The fox"),
    ("<s>The quick", " brown"),
    ("naïve 東", "京 2024"),
    ("mode", "l and the lang"),
    ("x " * 300, "y"),
    ("The dog", "\n"),
]


def encoded_by_the_harness(lm: Any, pairs: list[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """What its back end feeds, and where the continuation begins."""
    seen: list[Any] = []
    lm._loglikelihood_tokens = lambda requests, **_: list(map(seen.append, requests))
    lm.loglikelihood(instances(pairs), disable_tqdm=True)
    found = [((before + target)[-(lm.max_length + 1) :], len(target)) for _, before, target in seen]
    return [(ids, len(ids) - count) for ids, count in found]


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("which", ["tiny", "tiny_bos", "stories"])
def test_ids_are_those_of_the_harness(which: str, add_bos: bool | None, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    lm = harness_model(folder, add_bos_token=add_bos, max_length=100)
    encoder = HarnessEncoder(HuggingFaceTokenizer.load(folder), max_length=100, add_bos=add_bos)
    ours = [encoder.pair(*pair).continuation for pair in PAIRS]
    assert [(one.ids.tolist(), one.first) for one in ours] == encoded_by_the_harness(lm, PAIRS)


def test_only_spaces_are_a_text_without_context(tiny: Path) -> None:
    """The harness fails on these with an assertion, where the tokenizer adds no BOS."""
    found = HarnessEncoder(HuggingFaceTokenizer.load(tiny), max_length=100).pair("  ", "fox").continuation
    assert (found.ids[0], found.first) == (0, 1)


def test_texts_in_windows_are_those_of_the_harness(tiny_bos: Path) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    lm = harness_model(tiny_bos, max_length=16)
    encoder = HarnessEncoder(HuggingFaceTokenizer.load(tiny_bos), max_length=16)
    for text in ("", "x", "The quick brown fox. " * 9, "<s>begins with it", "naïve 東京 " * 7):
        windows = get_rolling_token_windows(lm.tok_encode(text), lm.prefix_token_id, lm.max_length, 1)
        wanted = [(before + target, len(before)) for before, target in map(make_disjoint_window, windows)]
        assert [(one.ids.tolist(), one.first) for one in encoder.rolling(text)] == wanted


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("abc", ""), "has 0 tokens"),
        (("abc", "d" * 9), "has 9 tokens, and max_length is 8"),
        (("abc", "\ud800"), "not UTF-8"),
    ],
)
def test_what_cannot_be_scored_is_refused(pair: tuple[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        HarnessEncoder(ByteTokenizer(), max_length=8).pair(*pair)


def test_no_prefix_token_is_an_error_only_where_it_is_needed() -> None:
    encoder = HarnessEncoder(ByteTokenizer(), max_length=8)
    assert encoder.pair("a", "b").continuation.first == 1
    with pytest.raises(ModelError, match="neither BOS nor EOS"):
        encoder.pair("", "b")
    assert HarnessEncoder(ByteTokenizer(), max_length=8, prefix=7).pair("", "b").continuation.ids.tolist() == [7, 98]
