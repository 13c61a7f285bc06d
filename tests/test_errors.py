"""Errors say what is wrong and what to type next."""

from __future__ import annotations

import pytest

from scoremode import errors
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
    assert str(ScoremodeError("the text is empty", fix="give some")) == "the text is empty; give some"


def test_an_error_without_a_fix_ends_after_its_message() -> None:
    assert str(ScoremodeError("the text is empty")) == "the text is empty"


def test_message_and_fix_can_be_read_apart() -> None:
    error = ScoremodeError("wrong", fix="right")
    assert (error.message, error.fix) == ("wrong", "right")


@pytest.mark.parametrize("kind", [CorpusError, MethodError, ModelError, OptionError])
def test_what_a_user_gave_wrongly_is_an_input_error(kind: type[ScoremodeError]) -> None:
    assert issubclass(kind, InputError)


@pytest.mark.parametrize("kind", [InputError, BoundaryError, EngineError, RunError])
def test_every_refusal_is_caught_by_one_name(kind: type[ScoremodeError]) -> None:
    assert issubclass(kind, ScoremodeError)


def test_every_error_of_the_file_is_in_the_tree_drawn_at_its_top() -> None:
    kinds = [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, ScoremodeError)]
    assert errors.__doc__ is not None
    assert [name for name in kinds if name not in errors.__doc__] == []


@pytest.mark.parametrize(
    ("typed", "meant"), [("gpqt", "gptq"), ("GPTQ", "gptq"), ("slidingonce", "sliding-once"), ("llama.cpp", "llamacpp")]
)
def test_the_nearest_name_is_suggested(typed: str, meant: str) -> None:
    assert did_you_mean(typed, NAMES) == f"did you mean '{meant}'?"


def test_where_nothing_is_near_all_names_are_listed() -> None:
    assert did_you_mean("zzzzzz", ["b", "a"]) == "known: a, b"
