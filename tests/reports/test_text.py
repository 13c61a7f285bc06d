"""Corpus text on a terminal: no control sequence in it takes effect."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import scoremode as sm
from scoremode.reports.text import context_before, shown, worst_targets


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain naïve 東京", "plain naïve 東京"),
        ("a\nb\tc\rd", "a⏎b⇥c␍d"),
        ("\x1b[31mred", "�[31mred"),
        ("\x9b31m", "�31m"),
        ("a\u202eb", "a�b"),
        ("a\u200bb", "a�b"),
        ("a\u2028b\u2029", "a�b�"),
        ("[red]", "[red]"),
    ],
)
def test_text_is_shown_on_one_line_without_control_characters(text: str, safe: str) -> None:
    assert shown(text) == safe


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_ever_shown(text: str) -> None:
    assert [c for c in shown(text) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")] == []


@given(st.text())
def test_shown_text_is_as_long_as_the_text(text: str) -> None:
    assert len(shown(text)) == len(text)


def test_the_worst_targets_come_worst_first() -> None:
    run = sm.ppl("table:successor", text="abxyz")
    assert [str(run.facts.text[i]) for i in worst_targets(run, 1)] == ["x"]


def test_a_token_that_was_scored_twice_is_listed_once() -> None:
    run = sm.ppl("table:uniform", text="abcdefghij", method="exl3-2025", context_length=4, stride=1)
    listed = [int(run.facts.token[i]) for i in worst_targets(run, 99)]
    assert (len(listed), len(run.scores) > len(listed)) == (len(set(listed)), True)


def test_no_more_targets_are_listed_than_asked_for() -> None:
    assert len(worst_targets(sm.ppl("table:uniform", text="abcdefghij"), 3)) == 3


def test_context_is_the_scored_text_in_front() -> None:
    run = sm.ppl("table:uniform", text="abcdef")
    assert context_before(run, 4, 99) == "bcde"


def test_context_is_cut_to_its_width_on_the_left() -> None:
    run = sm.ppl("table:uniform", text="abcdef")
    assert context_before(run, 4, 2) == "de"


def test_context_does_not_reach_into_another_document(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("documents")
    for name, text in (("a.txt", "abc"), ("b.txt", "xyz")):
        (folder / name).write_text(text)
    run = sm.ppl("table:uniform", corpus=[str(folder / "a.txt"), str(folder / "b.txt")])
    assert [context_before(run, i, 99) for i in range(4)] == ["", "b", "", "y"]


def test_the_first_target_has_no_scored_text_in_front() -> None:
    assert context_before(sm.ppl("table:uniform", text="abc"), 0, 99) == ""
