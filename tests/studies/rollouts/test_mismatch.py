"""Trainer against rollout: against closed forms of tables, verl's formulas, and a real model with its samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.errors import InputError, OptionError
from scoremode.studies.rollouts.mismatch import FIELDS, Mismatch
from scoremode.studies.rollouts.tables import mismatch_blocks
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import Floats
from tests.makers import VOCABULARY, make_tokenizer
from tests.reports.test_table import drawn

V = 7


def distributions(seed: int, distance: float) -> tuple[Floats, Floats]:
    """Two tables, one row per kind of context, whose logits lie ``distance`` apart."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 1.5, (6, V))
    other = logits + random.normal(0, distance, logits.shape)
    pi, tau = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (logits, other))
    return pi, tau


def sampled(
    pi: Floats, tau: Floats, *, prompts: int = 200, samples: int = 3, tokens: int = 20, seed: int = 1
) -> Mismatch:
    """Tokens drawn from ``pi``; each prompt has mostly one kind of context, so that its tokens are alike."""
    random = np.random.default_rng(seed)
    n = prompts * samples * tokens
    prompt = np.repeat(np.arange(prompts), samples * tokens)
    context = np.where(random.random(n) < 0.7, random.integers(0, 6, prompts)[prompt], random.integers(0, 6, n))
    token = (random.random(n)[:, None] > np.cumsum(pi, axis=1)[context]).sum(axis=1).clip(0, V - 1)
    return Mismatch(
        rollout=np.log(pi)[context, token],
        trainer=np.log(tau)[context, token],
        prompt=prompt,
        sample=np.tile(np.repeat(np.arange(samples), tokens), prompts),
        position=np.tile(np.arange(tokens), prompts * samples),
        kl=(pi * np.log(pi / tau)).sum(axis=1)[context],
    )


# ── estimates ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("distance", [0.02, 0.3])
def test_estimates_converge_to_the_exact_kl_within_their_errors(distance: float) -> None:
    pi, tau = distributions(2, distance)
    found = sampled(pi, tau)
    s = found.statistics()
    for name in ("k1", "k3"):
        assert abs(s[name] - s["kl"]) < 4 * s[f"{name}_stderr"]
        assert s[f"{name}_low"] < s[name] < s[f"{name}_high"]
    exact, biased = (pi * np.log(pi / tau)).sum(axis=1), (pi * np.log(tau / pi) ** 2 / 2).sum(axis=1)
    share = np.array([(found.kl == kl).mean() for kl in exact])  # of each kind of context
    assert s["kl"] == pytest.approx(share @ exact)
    assert abs(s["k2"] - share @ biased) < 4 * s["k2_stderr"]
    assert share @ biased == pytest.approx(s["kl"], rel=distance)  # the bias of k2 is of third order
    assert s["k3_stderr"] < s["k1_stderr"]
    assert s["ratio_mean"] == pytest.approx(1, abs=4 * s["ratio_mean_stderr"])


def test_bounds_contain_the_kl_in_95_of_100_samples_of_prompts() -> None:
    pi, tau = distributions(3, 0.3)
    truth = float((pi * np.log(pi / tau)).sum(axis=1).mean())  # every kind of context is as likely
    hits = 0
    for seed in range(200):
        s = sampled(pi, tau, prompts=40, samples=2, tokens=10, seed=seed).statistics()
        hits += s["k3_low"] <= truth <= s["k3_high"]
    assert hits >= 0.9 * 200


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def small(**changes: Any) -> Mismatch:
    """Two prompts of two samples of two tokens."""
    columns: dict[str, Any] = {
        "rollout": np.log([0.5, 0.5, 0.5, 0.5, 0.4, 0.4, 0.2, 0.2]),
        "trainer": np.log([0.5, 0.5, 0.6, 0.5, 0.2, 0.4, 0.25, 0.2]),
        "prompt": np.repeat([5, 9], 4),
        "sample": np.array([0, 0, 1, 1, 0, 0, 3, 3]),
        "position": np.tile([0, 1], 4),
        "slices": np.array(["thinking", "answer"] * 4, dtype=object),
    }
    return Mismatch(**{**columns, **changes})


def test_ratios_by_hand() -> None:
    s = small().statistics()
    assert (s["tokens"], s["samples"], s["prompts"], s["zero_probability"]) == (8, 4, 2, 0)
    assert s["ratio_min"] == pytest.approx(0.5)
    assert s["ratio_max"] == pytest.approx(1.25)
    assert s["outside_clip"] == pytest.approx(2 / 8)  # 0.5 and 1.25; 1.2 is rounded to one side or the other
    assert s["sequence_ratio_min"] == pytest.approx(0.5)
    ratios = np.array([1, 1.2, 0.5, 1.25])
    assert s["k1"] == pytest.approx(-np.log(ratios).sum() / 8)
    assert s["k2"] == pytest.approx((np.log(ratios) ** 2).sum() / 16)
    assert s["k3"] == pytest.approx((ratios - 1 - np.log(ratios)).sum() / 8)
    assert s["sequence_effective_sample_size"] == pytest.approx(ratios.sum() ** 2 / (4 * (ratios**2).sum()))
    assert s["sequence_k1"] == pytest.approx(-np.log(ratios).mean())
    assert (s["k1_stderr"], s["kl"], s["kl_infinite"]) == (None, None, None)  # two prompts are too few
    assert json.loads(json.dumps(s, allow_nan=False)) == s
    assert set(FIELDS) <= set(s)


def test_slices_and_positions_by_hand() -> None:
    found = small()
    thinking, answer = found.by_slice()
    assert (thinking["slice"], thinking["tokens"], answer["slice"]) == ("thinking", 4, "answer")
    assert thinking["k1"] == pytest.approx(-np.log([1, 1.2, 0.5, 1.25]).mean())
    assert answer["k1"] == 0
    assert [row["tokens"] for row in found.by_position()] == [8]
    far = replace(found, position=np.tile([0, 100], 4))
    assert [(row["first"], row["last"], row["tokens"]) for row in far.by_position()] == [(0, 63, 4), (64, 100, 4)]
    assert far.by_position()[1]["k3"] == 0
    assert replace(found, slices=None).by_slice() == []


def test_an_impossible_token_is_counted_and_a_rule_says_so() -> None:
    trainer = small().trainer.copy()
    trainer[3] = -np.inf
    found = small(trainer=trainer)
    s = found.statistics()
    assert (s["zero_probability"], s["k1"], s["k3"], s["ratio_min"]) == (1, None, None, 0)
    assert found.failures("k3 > 1") == ["trainer: k3 is not known: of 8 tokens, 1 are impossible for the trainer"]


def test_rules() -> None:
    found = replace(small(), names=("base", "fsdp"))
    assert found.failures("k3 > 0.5", "outside_clip > 0.9") == []
    assert found.failures("outside_clip > 0.2", "tokens < 5") == ["fsdp: outside_clip is 0.25, above 0.2"]
    few = "fsdp: k3 cannot be judged 'surely': 2 prompts give no ± (5 are needed)"
    assert found.failures("k3 > 0 surely") == [few]
    assert found.failures("kl > 0") == ["fsdp: kl is not known: the distributions were not compared"]
    with pytest.raises(OptionError, match="no statistic 'k4'"):
        found.failures("k4 > 1")
    with pytest.raises(OptionError, match="has no error"):
        found.failures("ratio_max > 1 surely")


@pytest.mark.parametrize("clip", [(1.1, 1.2), (0.8, math.inf)])
def test_a_clip_range_lies_around_1(clip: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="does not lie around 1"):
        small(clip=clip)


def test_no_tokens() -> None:
    nothing = np.zeros(0, np.int64)
    empty = Mismatch(np.zeros(0), np.zeros(0), nothing, nothing, nothing)
    s = empty.statistics()
    assert (s["tokens"], s["k3"], s["effective_sample_size"]) == (0, None, None)
    assert empty.failures("k3 > 1") == ["trainer: k3 is not known: of 0 tokens, 0 are impossible for the trainer"]


def test_shown_in_a_terminal_on_a_page_and_as_a_table(tmp_path: Path) -> None:
    far = replace(small(), position=np.tile([0, 100], 4), names=("base", "<b>fsdp</b>"), notes=("a <note>",))
    shown = drawn(mismatch_blocks(far))
    for words in (
        "<b>fsdp</b> against the rollouts of base",
        "outside 0.8 to 1.2",
        "64 to 100",
        "thinking",
        "a <note>",
    ):
        assert words in shown
    page = Path(str(sm.report(tmp_path / "page.html", far))).read_text()
    for words in ("&lt;b&gt;fsdp&lt;/b&gt;", "64 to 100", "thinking", "A &lt;note&gt;."):
        assert words in page
    assert "<b>fsdp" not in page
    table = far.to_arrow()
    assert table.column_names == [
        *("prompt", "sample", "position", "slice", "logprob_rollout", "logprob_trainer", "log_ratio"),
    ]
    assert table["log_ratio"].to_numpy() == pytest.approx(far.log_ratio)
    assert "8 tokens of 4 samples, 2 prompts" in repr(far)
    assert (float(far.k3), far.outside_clip.stderr) == (
        far.statistics()["k3"],
        far.statistics()["outside_clip_stderr"],
    )
    with pytest.raises(InputError, match="page of its own"):
        sm.report(tmp_path / "two.html", far, far)


# ── a real model ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def texts(tiny: Path) -> Rollouts:
    prompts = [f"{n} quick brown foxes and the {word}" for n in range(10) for word in ("dog", "cat", "model", "fox")]
    return sm.rollouts(str(tiny), prompts, samples=3, temperature=1, max_tokens=20, dtype="float32")


@pytest.fixture(scope="module")
def models(tiny: Path) -> tuple[Any, Any, Any]:
    """The model that wrote, the same as bfloat16 would have it, computed in float32, and their tokenizer."""
    from transformers import AutoModelForCausalLM

    model, trainer = (AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model, trainer, make_tokenizer(tiny, adds_bos=False)


@torch.no_grad()
def exact_kl(texts: Rollouts, model: Any, trainer: Any) -> Floats:
    """At each written token, in float64."""
    rows = []
    for prompt, written in zip(texts.prompt_ids, texts.written, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, written]).astype(np.int64))[None]
        p, q = (m(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for m in (model, trainer))
        rows.append((p.exp() * (p - q)).sum(-1).numpy())
    return np.concatenate(rows)


def test_a_wrapped_trainer_reads_the_rollouts(texts: Rollouts, models: tuple[Any, Any, Any], tiny: Path) -> None:
    model, trainer, tokenizer = models
    s = sm.mismatch(texts, sm.wrap(trainer, tokenizer, name="trainer")).statistics()
    kl = exact_kl(texts, model, trainer)
    for name in ("k1", "k3"):
        assert abs(s[name] - kl.mean()) < 4 * s[f"{name}_stderr"]
    assert 0 < s["k3"] < 0.1
    itself = sm.mismatch(texts, str(tiny), dtype="float32").statistics()  # a name: the weights that sampled
    assert itself["k3"] < 1e-9
    assert itself["sequence_effective_sample_size"] == pytest.approx(1, abs=1e-6)
    assert (itself["name"], itself["notes"]) == (str(tiny), [])


def test_a_temperature_is_told(models: tuple[Any, Any, Any], tiny: Path) -> None:
    texts = sm.rollouts(str(tiny), ["The fox"], temperature=0.5, max_tokens=5, dtype="float32")
    found = sm.mismatch(texts, sm.wrap(models[1], models[2]), clip=(0.9, 1.1))
    assert any("not estimates of KL" in note for note in found.statistics()["notes"])
    assert found.clip == (0.9, 1.1)


def test_a_comparison_with_the_writer_has_the_exact_kl(texts: Rollouts, tiny: Path) -> None:
    precision: Any = {"dtype": "bfloat16", "baseline_options": {"dtype": "float32"}}
    (compared,) = sm.compare(str(tiny), str(tiny), corpus=texts, **precision)
    found = sm.mismatch(texts, compared)
    assert found.kl is not None
    assert np.array_equal(found.kl, measured(compared.kl))
    assert np.array_equal(found.trainer, compared.candidate.scores.logprob)
    of_another = replace(texts, manifest={**texts.manifest, "model_fingerprint": "another"})
    assert sm.mismatch(of_another, compared).kl is None
    assert "KL of the run is left out" in sm.mismatch(of_another, compared).notes[0]


def test_a_run_must_have_scored_exactly_these_tokens(texts: Rollouts, tiny: Path) -> None:
    other = sm.ppl(str(tiny), text="some other text that is long enough to be scored")
    with pytest.raises(InputError, match="did not score exactly these sampled tokens"):
        sm.mismatch(texts, other)
    with pytest.raises(InputError, match=r"rollouts is a value of the type dict, which is not"):
        sm.mismatch({"logprobs": []}, other)  # type: ignore[arg-type]
    run = sm.ppl(str(tiny), corpus=texts, dtype="float32")
    order = np.random.default_rng(5).permutation(texts.tokens)  # windows may come in any order
    columns = {name: np.asarray(getattr(run.facts, name))[order] for name in ("document", "token", "id", "slice")}
    scores = replace(run.scores, logprob=run.scores.logprob[order])
    shuffled = replace(run, facts=replace(run.facts, **columns), scores=scores)
    assert np.array_equal(sm.mismatch(texts, shuffled).trainer, run.scores.logprob)


def test_log_probabilities_of_ids(models: tuple[Any, Any, Any]) -> None:
    model, _, tokenizer = models
    asked = sm.wrap(model, tokenizer)
    prompts, texts = [np.array([3, 4, 5]), np.array([7])], [np.array([9, 8]), np.array([], np.int64)]
    found = asked.logprobs(prompts, texts)
    with torch.no_grad():
        exact = torch.log_softmax(model(torch.tensor([[3, 4, 5, 9, 8]])).logits[0].double(), dim=-1)
    assert found[0] == pytest.approx([float(exact[2, 9]), float(exact[3, 8])], abs=1e-5)
    assert len(found[1]) == 0
    assert asked.logprobs([], []) == []
    with pytest.raises(InputError, match="has no token"):
        asked.logprobs([[]], [[3]])
    with pytest.raises(sm.ScoremodeError, match="vocabulary"):
        asked.logprobs([[3]], [[VOCABULARY]])
