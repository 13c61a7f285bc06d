"""Shared engines and checks: starting an engine takes half a minute on two cores."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.scores.answers import Answers, Window, WindowList, measured, own_tokens
from scoremode.engines.vllm.engine import VllmEngine
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.head.columns import define_columns
from scoremode.values import Ids
from tests import forked, rounding
from tests.engines.judging import all_scored
from tests.makers import checkpoint_maker

QUIET = "ignore::FutureWarning"  # as our engine sets it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests here start real engines; they are skipped with a reason if vLLM is not installed."""
    absent = importlib.util.find_spec("vllm") is None
    for item in items:
        if "engines/vllm/" in item.nodeid:
            item.add_marker(pytest.mark.slow)
            if absent:
                item.add_marker(pytest.mark.skip(reason="needs vLLM"))


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    """Half of an engine's start is importing vLLM once more, in each of its processes."""
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm.model_executor.models.registry")
    forked.inspect_here()
    with forked.vllm_engines():
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from scoremode.core.models.facts import resolve

    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def quantize() -> Callable[[str, Path, str], Path]:
    """``make(model, folder, name)`` from the example script."""
    return checkpoint_maker()


@pytest.fixture(scope="session")
def real_ids(smollm2: Path) -> Ids:
    from scoremode.core.text.corpus import load
    from scoremode.core.text.tokenizer import HuggingFaceTokenizer

    text = "\n\n".join(load("python-docs").texts())[:20_000]
    return HuggingFaceTokenizer.load(smollm2).encode(text, special=False).ids


@contextmanager
def engine_of(model: Path, **options: Any) -> Iterator[VllmEngine]:
    with VllmEngine(str(model), replace(LaunchArguments(max_model_len=512), **options)) as engine:
        yield engine


@contextmanager
def ordinary(model: Path, **arguments: Any) -> Iterator[Any]:
    """An ordinary engine, with the plugin installed: the reference for ours."""
    from vllm import LLM

    from scoremode.engines.vllm.processes import Processes, stop
    from scoremode.engines.vllm.support import environment

    processes = Processes()
    with environment({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": QUIET}, {}):
        llm = LLM(str(model), enforce_eager=True, **arguments)
    processes.started(llm)
    try:
        yield llm
    finally:
        stop(llm, processes)


def own(ids: Any) -> Window:
    return own_tokens(np.asarray(ids, np.int32))


def score(
    engine: VllmEngine, windows: list[Window], groups: Any = None, vocabulary: int | None = None
) -> list[Answers]:
    return all_scored(engine, WindowList(tuple(windows), prefix_group=groups, vocabulary=vocabulary))


class Judge:
    """Transformers in float32, reduced by the definition in float64."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @cached_property
    def nats(self) -> float:
        return rounding.of_model(self.model)

    def logits(self, window: Window) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.from_numpy(window.ids.astype(np.int64))[None]).logits[0]
        return logits[window.rows.tolist()]

    def check(self, window: Window, answers: Answers, nats: float | None = None, vocabulary: int | None = None) -> None:
        """Every number within ``nats``, every rank one that logits within ``nats`` of these could have."""
        nats = self.nats if nats is None else nats
        x, targets = self.logits(window)[:, :vocabulary], torch.from_numpy(window.targets.astype(np.int64))
        columns = define_columns(x, targets)
        for name in ("logprob", "entropy", "top_logprob"):
            gap = np.abs(getattr(answers, name) - getattr(columns, name).numpy()).max(initial=0.0)
            assert gap <= nats, f"{name} differs by {gap} nats"
        at = x.gather(1, targets)
        best = 1 + torch.stack([(x > at[:, j : j + 1] + 2 * nats).sum(1) for j in range(at.shape[1])], 1).numpy()
        worst = torch.stack([(x >= at[:, j : j + 1] - 2 * nats).sum(1) for j in range(at.shape[1])], 1).numpy()
        assert np.all((best <= measured(measured(answers.rank))) & (measured(answers.rank) <= worst))
        chosen = x.gather(1, torch.from_numpy(measured(answers.top).astype(np.int64))[:, None])[:, 0]
        assert bool((chosen >= x.amax(1) - 2 * nats).all())


@pytest.fixture(scope="session")
def smollm2_judge(smollm2: Path) -> Judge:
    return Judge(smollm2)


@pytest.fixture(scope="session")
def llama_judge(small_llama: Path) -> Judge:
    return Judge(small_llama)


def assert_same(found: list[Answers], wanted: list[Answers], nats: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.logprob.shape == b.logprob.shape
        for name in ("logprob", "entropy", "top_logprob"):
            assert np.abs(getattr(a, name) - getattr(b, name)).max(initial=0.0) <= nats
        assert np.all(np.abs(measured(a.rank) - measured(measured(b.rank))) <= 2 + 0.002 * measured(measured(b.rank)))
