"""Corpus text on a terminal: no control sequence in it takes effect."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.reports.text import shown


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
