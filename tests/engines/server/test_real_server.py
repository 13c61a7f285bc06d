"""The server engine against a real inference server: its numbers, its tokens, and windows that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose
from scoremode.core.scores.answers import Window, WindowList
from scoremode.engines.server.engine import ServerEngine
from scoremode.engines.server.forms import FORMS as KNOWN_FORMS
from scoremode.errors import MethodError
from scoremode.head.columns import define_columns
from tests.engines.judging import random_ids, random_windows, scored
from tests.engines.server.conftest import RealServer

NATS = 2e-4
TEXT = "the cat sat on the mat and the dog ran to the park with the cat " * 60
FORMS = (None, KNOWN_FORMS[-1])


def windows() -> list[Window]:
    ids = random_ids(50)
    some = np.array([4, 9, 30], np.int32)
    whole = random_windows(200, 33, 7, 2).items
    fed = [replace(window, ids=window.ids[:-1]) for window in whole]  # the last target is not fed
    return [*fed, Window(ids, some, ids[some + 1][:, None])]


def judged(model: Path, window: Window) -> Any:
    """The definition in float64, on a model in float64."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits = loaded(torch.from_numpy(window.ids.astype(np.int64))[None]).logits[0, window.rows.tolist()]
    return define_columns(logits, torch.from_numpy(window.targets.astype(np.int64))).logprob.numpy()


def opened(real: RealServer, **options: Any) -> ServerEngine:
    chosen = choose("llama", real.address, options, str(real.model))
    engine = chosen.plugin.open(chosen.subject, chosen.options, Work())
    assert isinstance(engine, ServerEngine)
    return engine


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "prompt_logprobs" if form is None else form.name)
def test_scores_are_those_of_the_definition(real: RealServer, form: Any) -> None:
    engine = opened(real)
    if form is not None:
        engine.form = form
    asked = windows()
    found = scored(engine, WindowList(tuple(asked)))
    engine.close()
    for index, window in enumerate(asked):
        gap = np.abs(found[index].logprob - judged(real.model, window)).max()
        assert gap <= NATS, f"window {index} differs by {gap} nats"


def test_perplexity_is_that_of_a_local_engine(real: RealServer) -> None:
    question: dict[str, Any] = {"text": TEXT, "context_length": 100, "fresh": True}
    ours = sm.ppl("llama", engine=real.address, tokenizer=str(real.model), **question)
    local = sm.ppl(str(real.model), engine="transformers", dtype="float32", **question)
    assert ours.plan_digest == local.plan_digest
    assert ours.manifest["tokenizer"] == local.manifest["tokenizer"]
    np.testing.assert_allclose(ours.scores.logprob, local.scores.logprob, rtol=0, atol=NATS)
    (compared,) = sm.compare(str(local.path), str(ours.path))
    assert compared.kl is None
    facts = ours.manifest["engine_settings"]
    assert facts["max_model_len"] == 256
    assert facts["root"] == str(real.model)
    assert facts["system_fingerprint"].startswith("vllm-")
    assert ours.manifest["versions"]["server"] in facts["system_fingerprint"]
    assert not [note for note in ours.manifest["notes"] if "tokenizer" in note]  # all of the text was compared


def test_the_servers_own_tokenizer(real: RealServer) -> None:
    served, local = (choose("llama", real.address, {}, name).subject.tokenizer for name in (None, str(real.model)))
    for text in (TEXT[:300], "12 naïve — 東京 👩‍🔬\n\tx", ""):
        for special in (False, True):
            ours, theirs = served.encode(text, special=special), local.encode(text, special=special)
            for name in ("ids", "char_start", "char_end"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    run = sm.ppl("llama", engine=real.address, text=TEXT, context_length=100, fresh=True)
    same = sm.ppl("llama", engine=real.address, tokenizer=str(real.model), text=TEXT, context_length=100)
    np.testing.assert_allclose(run.scores.logprob, same.scores.logprob, rtol=0, atol=NATS)


def test_windows_up_to_the_last_token_that_fits(real: RealServer) -> None:
    run = sm.ppl("llama", engine=real.address, text=TEXT, context_length=254, fresh=True)
    assert run.perplexity.value > 1
    with pytest.raises(MethodError, match="give --context-length 254"):
        sm.ppl("llama", engine=real.address, text=TEXT, context_length=255)


def test_rollouts_have_the_log_probabilities_of_a_local_model(real: RealServer, tmp_path: Path) -> None:
    how: dict[str, Any] = {"engine": real.address, "tokenizer": str(real.model)}
    ours: dict[str, Any] = {"engine": "transformers", "dtype": "float32"}
    found = sm.rollouts(
        "llama", ["the cat", "a dog ran"], temperature=1, samples=2, max_tokens=12, out=tmp_path / "w", **how
    )
    local = sm.ppl(str(real.model), corpus=found, **ours)
    np.testing.assert_allclose(local.scores.logprob, np.concatenate(found.raw_logprob), rtol=0, atol=NATS)
    warm = sm.rollouts("llama", ["the cat"], temperature=0.7, top_p=0.9, max_tokens=8, **how)
    assert warm.manifest["missing"] == ["logprob"]
    local = sm.ppl(str(real.model), corpus=warm, **ours)
    np.testing.assert_allclose(local.scores.logprob, warm.raw_logprob[0], rtol=0, atol=NATS)
    greedy = sm.rollouts("llama", ["the cat"], max_tokens=8, **how)
    assert (
        greedy.written[0].tolist()
        == sm.rollouts(str(real.model), ["the cat"], max_tokens=8, **ours).written[0].tolist()
    )
