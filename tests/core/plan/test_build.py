"""From a method and tokens to a plan: sizes, limits, what is noted, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode.core.plan.build import make_plan
from scoremode.core.plan.recipes import METHODS, Span, find_method
from scoremode.errors import InputError, MethodError
from tests.core.plan.streams import FACTS, plan_for, tokens_of

CONTEXT = "context length {} instead of the recipe's 2048"


@pytest.mark.parametrize(
    ("name", "lengths", "sizes", "notes"),
    [
        ("sliding-once", (40,), {"context": 512, "stride": 512}, [CONTEXT.format(512)]),
        (
            "sliding-once",
            (40,),
            {"context": 8, "stride": 1},
            [CONTEXT.format(8), "stride 1 instead of the recipe's 512"],
        ),
        ("sliding-once", (40,), {"context": None, "model_context": 16}, [CONTEXT.format(16)]),
        ("sliding-once", (40,), {"context": 2048, "model_context": 2048}, []),
        (
            "sliding-once",
            (1, 9, 0, 2),
            {"context": 2, "model_context": 2},
            [CONTEXT.format(2), "2 documents too short to have a target"],
        ),
        ("lm-eval-rolling", (1, 9, 0), {"context": 16}, ["1 document too short to have a target"]),
        ("mean-of-texts", (3, 4, 9), {"context": 4}, ["2 texts cut to the context"]),
        ("mean-of-texts", (3, 0), {"context": 4}, ["1 document too short to have a target"]),
    ],
)
def test_differences_from_the_recipe_are_noted(
    name: str, lengths: tuple[int, ...], sizes: dict[str, Any], notes: list[str]
) -> None:
    assert list(plan_for(name, *lengths, **sizes).notes) == notes


def test_exl3_2025_stops_at_a_hundred_windows_by_default() -> None:
    plan = plan_for("exl3-2025", 80_000, context=2048, stride=512)
    assert (len(plan), int(plan.stop.max()), plan.notes) == (100, 52_736, ("100 of 153 windows scored",))
    assert len(plan_for("exl3-2025", 80_000, context=2048, stride=512, max_windows=0)) == 153
    assert len(plan_for("exl3-2025", 80_000, context=2048, stride=512, max_windows=20)) == 20


def test_weights_are_the_recipes_or_one_each() -> None:
    """hf-stride weighs a window by its new tokens but one; where no window has any, all count alike."""
    assert plan_for("hf-stride", 7, context=4, stride=2).weight.tolist() == [3, 1, 0]  # type: ignore[union-attr]
    assert plan_for("hf-stride", 4, context=2, stride=1).weight.tolist() == [1, 0, 0]  # type: ignore[union-attr]
    assert plan_for("sliding-once", 7, context=4, stride=2).weight is None


LONG = {"context": 99, "model_context": 64}
NONE = np.zeros(9, np.bool_)


@pytest.mark.parametrize(
    ("name", "tokens", "sizes", "line"),
    [
        ("sliding-once", 40, {"context": 8, "stride": 9}, "--stride 9 is larger than the context of 8"),
        ("sliding-once", 40, LONG, "--context-length 99 is longer than the model's 64; give --context-length 64"),
        ("gptq", 40, LONG | {"context": None}, "gptq's own context of 2048 is longer than the model's 64; give"),
        ("hf-stride", 40, {"context": None}, "this model does not say how long its context is; give --context-length"),
        ("llamacpp", 9, {"context": 2}, "llamacpp scores nothing in a context below 3; give --context-length 3 or"),
        ("llamacpp", 7, {"context": 4}, "llamacpp needs at least 8 tokens (two contexts), the text has 7; give a lo"),
        ("sliding-once", 1, {"context": 4}, "the text has 1 token; the first has no context, so there is nothing"),
        ("gptq", 0, {"context": 4}, "the text has 0 tokens; the first has no context, so there is nothing"),
        ("gptq", 2, {"context": 4}, "gptq needs full windows of 4 tokens and the text has 2; give a longer text, --"),
        ("gptq", 3, {"context": 4}, "gptq needs full windows of 4 tokens and the text has 3; give a longer text, --"),
        ("sliding-once", 9, {"context": 4, "target_mask": NONE}, "no token that is fed may be a target; leave"),
    ],
)
def test_a_refusal_says_what_would_do(name: str, tokens: int, sizes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refusal:
        plan_for(name, tokens, **sizes)
    assert str(refusal.value).startswith(line)


@pytest.mark.parametrize(
    ("name", "tokens", "context", "fix"),
    [
        ("llamacpp", 7, 4, "give a longer text or --context-length 3"),
        ("llamacpp", 5, 3, "give a longer text"),
        ("gptq", 3, 4, "give a longer text, --context-length 2, or --method sliding-once"),
        ("gptq", 7, 8, "give a longer text, --context-length 3, or --method sliding-once"),
    ],
)
def test_a_context_that_would_fit_is_named(name: str, tokens: int, context: int, fix: str) -> None:
    with pytest.raises(InputError) as refusal:
        plan_for(name, tokens, context=context)
    assert refusal.value.fix == fix


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("context", [None, 8])
def test_a_model_with_a_context_of_one_is_refused(name: str, context: int | None) -> None:
    with pytest.raises(InputError, match="the model's context of 1 token leaves no room for a target"):
        plan_for(name, 40, context=context, model_context=1)


@pytest.mark.parametrize("name", ["lm-eval-rolling", "mean-of-texts"])
def test_a_tokenizer_without_a_token_to_put_in_front_is_refused(name: str) -> None:
    tokens = tokens_of(9, facts=replace(FACTS, bos=None, eos=None))
    with pytest.raises(MethodError, match=r"this tokenizer has n.* to insert before a .*; use --method"):
        make_plan(find_method(name), tokens, context_length=4)


def test_windows_without_a_target_are_refused() -> None:
    """Not by an assertion: ``python -O`` would save a run with no score."""
    none = replace(find_method("gptq"), windows=lambda tokens, sizes: iter([Span(0, 4, 4, 4), Span(4, 8, 8, 8)]))
    with pytest.raises(MethodError, match="no target in windows of 4 tokens"):
        make_plan(none, tokens_of(40), context_length=4)
