"""What the scores of every engine must be, on every path: one model, judged by its float64 reading in Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Window, WindowList, own_tokens
from tests.engines.judging import assert_defined, random_ids, random_windows, scored
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import VOCABULARY

NATS = 5e-4  # float32 on logits up to 13; of 128 tokens, MLX is off by 2e-4
OPTIONS: dict[str, dict[str, Any]] = {
    "transformers": {"dtype": "float32"},
    "llamacpp": {"threads": 1, "cache_type_k": "f32", "cache_type_v": "f32"},
    "mlx": {"dtype": "float32"},
}
PATHS = {"prefill": None, "decode": DecodePath(3), "decode after 5": DecodePath(2, 5)}


@pytest.fixture(scope="module", params=product(OPTIONS, PATHS), ids=", ".join)
def engine(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    name, path = request.param
    if name == "mlx" and find_spec("mlx_lm") is None:
        pytest.skip("needs mlx-lm")
    model = tiny
    if name == "llamacpp":
        require_llamacpp()
        model = gguf_of(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    opened = open_engine(choose(str(model), name, OPTIONS[name]), Work(longest=128, path=PATHS[path]))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def judge(tiny: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64, attn_implementation="eager")


@torch.inference_mode()
def assert_true(engine: Engine, source: WindowList, judge: Any) -> None:
    """Every column of every window; ids from the source's vocabulary on get no probability."""
    answers = scored(engine, source)
    assert sorted(answers) == list(range(len(source)))
    for index, window in enumerate(source.items):
        logits = judge(torch.from_numpy(window.ids.astype(np.int64))[None]).logits[0]
        assert_defined(answers[index], logits[window.rows.tolist(), : source.vocabulary], window, NATS)


def test_every_token_of_windows_of_any_length(engine: Engine, judge: Any) -> None:
    assert_true(engine, random_windows(128, 2, 127, 3, 40, 17, 40), judge)


def test_any_rows_and_any_number_of_targets(engine: Engine, judge: Any) -> None:
    windows = []
    for number, rows in enumerate(([0], [19], [0, 7, 19], [3, 4, 18], [0])):
        count = 3 if engine.path is not None else 1 + number % 3  # windows that are decoded together have as many
        targets = np.random.default_rng(number).integers(0, VOCABULARY, (len(rows), count)).astype(np.int32)
        ids = random_ids(20 if number < 4 else 1, number)
        windows.append(Window(ids, np.array(rows, np.int32), targets))
    assert_true(engine, WindowList(tuple(windows)), judge)


def test_ids_behind_the_plans_vocabulary_get_no_probability(engine: Engine, judge: Any) -> None:
    assert_true(engine, WindowList((own_tokens(random_ids(30) % 200),), vocabulary=200), judge)


def prompted(prompt: int = 60) -> WindowList:
    """Five windows that begin alike, and ask for what follows."""
    windows = []
    for length in (1, 1, 3, 6, 2):
        ids = np.concatenate([random_ids(prompt), random_ids(length, 100 + length)])
        rows = np.arange(prompt - 1, len(ids) - 1, dtype=np.int32)
        windows.append(Window(ids[:-1], rows, ids[prompt:, None]))
    return WindowList(tuple(windows), np.zeros(len(windows), np.int64))


def test_windows_that_share_a_prompt_or_nothing_have_the_scores_of_windows_alone(engine: Engine, judge: Any) -> None:
    assert_true(engine, prompted(), judge)
    assert_true(engine, WindowList(random_windows(5, 9, 2).items, np.full(3, 3)), judge)


@pytest.mark.parametrize("source", [random_windows(40, 7, 33, 2, 40), prompted()], ids=["alone", "sharing a prompt"])
def test_a_resumed_run_scores_what_is_missing_in_the_same_bits(engine: Engine, source: WindowList) -> None:
    everything, rest = scored(engine, source), scored(engine, source, done=(0, 2, 4))
    assert sorted(rest) == [1, 3]
    for index, answers in rest.items():
        for name, column in answers.arrays():
            assert np.array_equal(column, dict(everything[index].arrays())[name]), name
    assert scored(engine, source, done=(0, 1, 2, 3, 4)) == {}
