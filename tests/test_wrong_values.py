"""Each parameter of each public function and method, with values that it may not have: a refusal that names it.

Functions, methods and parameters are read from the declarations, so new ones are tried as well. The suite tries some
values of each; ``SCOREMODE_ALL_CALLS=1 pytest tests/test_wrong_values.py`` tries all of them, in some minutes.
"""

from __future__ import annotations

import inspect
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode import errors
from scoremode.core.typed import checked, declared
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.replicas import Spread
from scoremode.errors import ScoremodeError, WrongTypeError
from scoremode.studies.attribution.result import UnitDamage

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
WRONG: list[Any] = [
    *(None, True, 5, -1, 0, 2**70, 10**5000, 1.5, float("nan"), float("inf"), 1j, b"x", "", "\0", "\ud800", "x y"),
    *([], [None], [5], ["\ud800"], (), {}, {5: 5}, {"x": object()}, set(), iter([1]), ENDLESS, range(3), Path("\0")),
    *(object(), object, int, threading.Lock(), lambda: None, lambda *_: None, slice(1), Ellipsis),
    *(np.array([1.5]), np.array([[1, 2]]), np.array("x"), np.array(None), np.int64(3), np.float32("nan"), np.bool_(1)),
]
SHARE = 1.0 if os.environ.get("SCOREMODE_ALL_CALLS") else 0.1
BESIDE: dict[str, dict[str, Any]] = {  # without which a parameter would not be looked at
    **{name: {"text": None} for name in ("corpus", "dataset", "dataset_config", "split", "field")},
    **{name: {"path": "decode"} for name in ("sequences", "prefill_tokens")},
    **{name: {"action": "prune", "dry_run": True} for name in ("larger_than", "older_than", "dry_run")},
}
STARTS = {"serve", "lm_eval", *Spread.options()}  # what starts other programs if the type is right
INSIDE = (sm.Comparisons, sm.Estimate, sm.Plan, sm.Progress, sm.Scores, sm.ScoremodeError, sm.Tokens)
"""Classes whose methods take nothing from users, or only what Python's own lists take."""


@dataclass(frozen=True)
class Call:
    """A function that users call, its class if it is a method, and the parameter that gets a wrong value."""

    name: str
    kind: type | None
    function: Callable[..., Any]
    parameter: str

    def arguments(self, value: Any, valid: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Valid arguments, except for this value."""
        positional, named, parameters = list[Any](), dict[str, Any](), inspect.signature(self.function).parameters
        beside = {"text": "one two three", **BESIDE.get(self.parameter, {}), self.parameter: value}
        for name, parameter in parameters.items():
            known = next((valid[key] for key in (f"{self.name}.{name}", name) if key in valid), None)
            is_needed = parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
            if name == "self":
                positional.append(valid[self.owner] if self.owner in valid else object.__new__(self.kind or object))
            elif is_needed and parameter.kind != parameter.KEYWORD_ONLY:
                positional.append(beside.get(name, known))
            elif is_needed or name in beside:
                named[name] = beside.get(name, known)
        return positional, named

    @property
    def owner(self) -> str:
        """The name of the class; '' of a function, and of what makes an object."""
        return self.kind.__name__ if self.kind is not None and self.function.__name__ != "__init__" else ""


def functions() -> Iterator[tuple[str, type | None, Callable[..., Any]]]:
    """All that users call."""
    for name in sm.__dir__():
        value = getattr(sm, name)
        if inspect.isfunction(value):
            yield name, None, value
        elif inspect.isclass(value) and value not in INSIDE:
            for method, stored in inspect.getmembers_static(value):
                function = getattr(stored, "__func__", stored)
                is_ours = inspect.isfunction(function) and function.__module__.startswith("scoremode")
                if is_ours and not method.startswith("_") and method != "from_json":
                    yield f"{name}.{method}", value, function
    yield "SequenceProbability.__init__", sm.SequenceProbability, vars(sm.SequenceProbability)["__init__"]


CALLS = [
    pytest.param(Call(name, kind, function, parameter), id=f"{name}-{parameter}")
    for name, kind, function in functions()
    for parameter in inspect.signature(function).parameters
    if parameter != "self"
]


@pytest.fixture(scope="module")
def valid() -> dict[str, Any]:
    """Values of parameters without a default, by name, and an object of each class that is made quickly."""
    lm, whole = sm.SequenceProbability("table:uniform"), np.zeros(1, np.int64)
    comparison = sm.compare("table:uniform", "table:uniform", text="one two three")[0]
    return {
        **dict.fromkeys(("model", "baseline", "candidate", "candidates", "trainer", "folder"), "table:uniform"),
        **{"prompt": "a b", "prompts": ["a"], "targets": ["c"], "pairs": [("a", "c")], "longest": 8, "shell": "bash"},
        **{"margin": 0.1, "names": ["k3"], "rules": "k3 > 1", "words": "-h", "rollouts": "run", "path": "page.html"},
        **{
            "Model.logprobs.prompts": [[1, 2]],
            "continuations": [[3]],
            "found": comparison,
            "count": 1,
            "one": object.__new__(UnitDamage),
        },
        **{"SequenceProbability.score.pairs": lm.encode([("a", "c")]), "Model": sm.open("table:uniform")},
        **{
            "SequenceProbability": lm,
            "Comparison": comparison,
            "Mismatch": sm.Mismatch(np.zeros(1), np.zeros(1), whole, whole, whole),
        },
    } | {"Model.compare.baseline": sm.open("table:uniform")}


@pytest.fixture
def _in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(errors, "names_flags", False)
    monkeypatch.setattr("scoremode.cli.info.examine", lambda engine: {})


@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_value_is_refused_by_the_name_of_its_parameter(call: Call, valid: dict[str, Any]) -> None:
    chance, problems = random.Random(f"{call.name} {call.parameter}"), list[str]()
    for number, value in enumerate(WRONG):
        if chance.random() < SHARE and (problem := problem_of(call, value, valid)):
            problems.append(f"value {number}, a {type(value).__name__}: {problem}")
    assert not problems, "\n".join(problems)


def problem_of(call: Call, value: Any, valid: Mapping[str, Any]) -> str:
    """Why the outcome of a call with one wrong value is not what it should be; '' if it is."""
    name, needs_refusal = call.parameter, False
    signature, hints = declared(call.function)
    is_one_of_several = (
        name in signature.parameters and signature.parameters[name].kind == inspect.Parameter.VAR_POSITIONAL
    )
    try:
        checked(name, [value] if is_one_of_several else value, hints.get(name, Any))
    except ScoremodeError:
        needs_refusal = True
    if not needs_refusal and ({call.name, name} & STARTS or (call.kind is not None and call.owner not in valid)):
        return ""
    positional, named = call.arguments(value, valid)
    try:
        call.function(*positional, **named)
    except Exception as error:
        is_ours = isinstance(error, ScoremodeError) and not needs_refusal
        is_named = isinstance(error, TypeError | ScoremodeError) and name in str(error)
        return "" if is_ours or is_named else f"{type(error).__name__}: {str(error)[:300]}"
    return "it was taken" if needs_refusal else ""


# ── values that are taken ────────────────────────────────────────────────────────────────────────────────────────────
class Text(str):
    """A string of a class of its own."""


class Place:
    def __fspath__(self) -> str:
        return "runs/a"


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (np.int64(3), int | None, 3),
        (np.float32(0.5), float, 0.5),
        (3, float, 3),
        (np.bool_(True), bool, True),
        (Text("a"), str, "a"),
        (Place(), str | Path | None, Path("runs/a")),
        (("a", Path("b")), str | Sequence[str | Path], ("a", Path("b"))),
        (np.array([1, 2]), int | Sequence[int], [1, 2]),
        (np.array([1.5, 2]), tuple[float, float], (1.5, 2.0)),
        ({"seed": 1}, Mapping[str, Any] | None, {"seed": 1}),
        (print, Progress | None, print),
    ],
)
def test_what_means_the_same_is_taken(value: Any, hint: Any, expected: Any) -> None:
    found = checked("x", value, hint)
    assert found == expected
    assert type(found) is type(expected)


def test_paths_takes_numbers_of_numpy() -> None:
    sizes: dict[str, Any] = {"context_length": np.int32(6), "stride": np.int64(3), "sequences": np.array([1, 2])}
    assert len(sm.paths("table:uniform", text="one two three", **sizes)) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"token": b"hf_hidden"},
        {"token": ["hf_hidden"]},
        {"api_key_env": ["hf_hidden"]},
        {"engine_args": "a_token=hf_hidden"},
    ],
)
def test_a_refusal_shows_no_secret(arguments: dict[str, Any]) -> None:
    with pytest.raises(WrongTypeError, match=next(iter(arguments))) as caught:
        sm.plan("table:uniform", text="one two", **arguments)
    assert "hidden" not in str(caught.value)
    with pytest.raises(WrongTypeError) as caught:
        sm.compare("table:uniform", "table:uniform", baseline_options=arguments)  # type: ignore[arg-type]
    assert "hidden" not in str(caught.value)
