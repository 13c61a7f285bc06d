"""Errors say what is wrong and what to type next."""

from __future__ import annotations

import pytest

from scoremode.errors import (
    BoundaryError,
    CorpusError,
    EngineError,
    InputError,
    MethodError,
    ModelError,
    OptionError,
    RunError,
    ScoremodeError,
    did_you_mean,
)

NAMES = ("gptq", "llamacpp", "sliding-once", "exl3-2025", "exl3-2026")


def test_an_error_reads_as_what_is_wrong_then_what_to_type() -> None:
    error = ScoremodeError("the text is empty", fix="give some")
    assert (str(error), error.message, error.fix) == ("the text is empty; give some", "the text is empty", "give some")
    assert str(ScoremodeError("the text is empty")) == "the text is empty"


def test_every_refusal_is_caught_by_one_name_and_what_a_user_gave_wrongly_by_another() -> None:
    assert all(issubclass(kind, InputError) for kind in (CorpusError, MethodError, ModelError, OptionError))
    assert all(issubclass(kind, ScoremodeError) for kind in (InputError, BoundaryError, EngineError, RunError))


@pytest.mark.parametrize(
    ("typed", "meant"), [("gpqt", "gptq"), ("GPTQ", "gptq"), ("slidingonce", "sliding-once"), ("llama.cpp", "llamacpp")]
)
def test_the_nearest_name_is_suggested(typed: str, meant: str) -> None:
    assert did_you_mean(typed, NAMES) == f"did you mean '{meant}'?"


def test_where_nothing_is_near_all_names_are_listed() -> None:
    assert did_you_mean("zzzzzz", ["b", "a"]) == "known: a, b"
