"""A path is part of a plan: which one, what it changes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import scoremode as sm
from scoremode.core.engine.registry import choose, find_engine, require_path
from scoremode.core.plan.path import DecodePath, path_of, read_path
from scoremode.core.plan.question import Question
from scoremode.core.verbs.planned import plan_question
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, OptionError, UnknownArgumentError
from tests.house import needs_wing

TEXT = "the text that is scored, and some more of it"


def plan_of(**question: Any) -> Any:
    return plan_question(choose("table:uniform").subject, Question(text=TEXT, context_length=16, **question)).plan


def test_prefill_is_the_default_and_changes_no_plan() -> None:
    plain, named = plan_of(), plan_of(path="prefill")
    assert plain.path is None
    assert plain.digest == named.digest
    assert "path" not in dict(plain.settings)
    # the digest that this plan had before there were paths
    assert plain.digest == "a438f04e2d384abdb813eaa5058de8458205ca907af7a5698f17beacc072a3bd"


def test_every_setting_of_the_decode_path_is_in_the_identity() -> None:
    asked: list[dict[str, Any]] = [{}, {"sequences": 3}, {"prefill_tokens": 2}, {"sequences": 3, "prefill_tokens": 2}]
    plans = [plan_of(path="decode", **settings) for settings in asked]
    assert len({plan.digest for plan in (*plans, plan_of())}) == 5
    assert [plan.path for plan in plans] == [DecodePath(), DecodePath(3), DecodePath(16, 2), DecodePath(3, 2)]
    for plan in plans:
        assert plan.targets == plan_of().targets
        assert path_of(dict(plan.settings)) == plan.path


def test_targets_that_no_step_predicts_and_sequences_that_stay_empty_are_noted() -> None:
    plan = plan_of(path="decode", prefill_tokens=5, sequences=9)
    rows = [row for index in range(len(plan)) for row in plan.window(index).rows.tolist()]
    early = sum(row < 5 for row in rows)
    assert 0 < early < len(rows)
    assert f"{early} of {len(rows)} targets are predicted by prefill, the others by decode" in plan.notes
    assert f"{len(plan)} of 9 sequences in use: there are no more windows" in plan.notes
    assert not any("prefill" in note or "sequences" in note for note in plan_of(path="decode", sequences=2).notes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": "decoding"}, "did you mean 'decode'"),
        ({"sequences": 4}, "add --path decode"),
        ({"path": "prefill", "prefill_tokens": 4}, "add --path decode"),
        ({"path": "decode", "sequences": 0}, "--sequences 0 is less than 1"),
        ({"path": "decode", "prefill_tokens": -1}, "--prefill-tokens -1 is less than 1"),
        ({"path": "decode", "sequences": 4097}, "give 4096 or fewer"),
        ({"path": "decode", "sequences": 1.5}, "not a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        read_path(**given)
    with pytest.raises(OptionError, match=words):
        sm.ppl("table:uniform", text=TEXT, **given)


def test_the_smallest_and_the_largest_setting_are_accepted() -> None:
    assert read_path("decode", sequences=1, prefill_tokens=1) == DecodePath(1, 1)
    assert read_path("decode", sequences=4096) == DecodePath(4096, 1)


@needs_wing("engines/exllamav3")
def test_an_engine_without_the_path_says_so_before_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = find_engine("exllamav3")
    monkeypatch.setattr(plugin, "capabilities", replace(plugin.capabilities, paths=("prefill",)))
    with pytest.raises(EngineError, match=r"exllamav3 engine has no decode path; leave --path out, or use --engine tr"):
        require_path(plugin, "decode")
    with pytest.raises(EngineError, match="has no decode path"):
        sm.ppl("table:uniform", engine=TableEngine.named("uniform"), text=TEXT, path="decode")
    with pytest.raises(UnknownArgumentError):
        sm.prob("table:uniform", prompt="a", targets=["b"], path="decode")  # type: ignore[call-arg]


# ── the table engine ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("settings", [{}, {"sequences": 1}, {"sequences": 3, "prefill_tokens": 4}])
def test_a_table_decodes_to_the_same_bits(settings: dict[str, Any]) -> None:
    question: dict[str, Any] = {"text": "abcdefg hijklmn abc", "context_length": 8, "stride": 4}
    prefill = sm.ppl("table:successor", **question)
    decode = sm.ppl("table:successor", path="decode", **settings, **question)
    for name in ("logprob", "rank", "entropy", "top", "top_logprob"):
        assert (getattr(prefill.scores, name) == getattr(decode.scores, name)).all(), name
    assert decode.manifest["method_settings"]["path"] == "decode"
    assert "path decode" in repr(decode)
    assert sm.ppl("table:successor", path="decode", **settings, **question).cached
    assert sm.ppl("table:successor", **question).plan_digest == prefill.plan_digest != decode.plan_digest


@needs_wing("studies/kld")
def test_a_reference_brings_its_path(tmp_path: Any) -> None:
    question: dict[str, Any] = {"text": TEXT, "context_length": 8}
    decoded = sm.reference("table:uniform", tmp_path / "ref", path="decode", sequences=3, **question)
    (comparison,) = sm.compare(str(decoded.path), "table:uniform")
    assert comparison.candidate.manifest["method_settings"]["sequences"] == 3
    assert comparison.kl is not None
    assert comparison.kl.max() == 0.0
    prefilled = sm.reference("table:uniform", tmp_path / "prefilled", **question)
    with pytest.raises(sm.ScoremodeError, match="path prefill vs decode"):
        sm.compare(str(prefilled.path), "table:uniform", path="decode")
    with pytest.raises(sm.ScoremodeError, match="sequences 3 vs 5; leave text, method and sizes out"):
        sm.compare(str(decoded.path), "table:uniform", path="decode", sequences=5)
    with pytest.raises(OptionError, match="cannot say that its distributions were decoded"):
        sm.reference("table:uniform", kld=tmp_path / "a.kld", path="decode", **question)
