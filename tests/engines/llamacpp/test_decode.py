"""llama.cpp on the decode path: its logits against a loop over its C functions, bit for bit."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.base import SCORES
from scoremode.core.engine.logits import LogitsReducer
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.engine.steps import StepReducer
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Window, WindowList, measured
from scoremode.engines.llamacpp.engine import LlamaCppEngine
from scoremode.engines.llamacpp.library import Batch, library
from scoremode.errors import EngineError, OptionError
from tests.engines.judging import random_windows, scored
from tests.engines.llamacpp.test_engine import assert_same_bits, kl_of
from tests.gguf_files import gguf_of
from tests.makers import VOCABULARY

Logits = dict[tuple[int, int], np.ndarray[Any, Any]]
"""The logits after each token: by window and position."""

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
SOURCE = random_windows(40, 7, 33, 2, 40, 21, 12)


def single_token_loop(
    file: Path, batches: Sequence[Sequence[int]], *, cache: str, sequences: int, prefilled: int = 1
) -> Logits:
    """Decodes windows of SOURCE with llama.cpp's own functions: one token per sequence and call, as a server does."""
    llama = library().call
    model = library().load(file, llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.n_seq_max, parameters.flash_attn_type = 64 * sequences, sequences, 0
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.type_k = parameters.type_v = GGML_TYPES[cache]
    found: Logits = {}
    for batch in batches:
        context = llama.llama_init_from_model(model, parameters)  # a new one for each batch: nothing can be left over
        ids = [SOURCE.window(index).ids for index in batch]
        together = prefilled if prefilled > 1 else 0
        calls = [[(place, at) for at in range(min(together, len(own)))] for place, own in enumerate(ids) if together]
        calls += [
            [(place, at) for place, own in enumerate(ids) if at < len(own)]
            for at in range(together, max(map(len, ids)))
        ]
        for number, fed in enumerate(calls):
            each = [(ctypes.c_int32 * 1)(place) for place, _ in fed]
            n = len(fed)
            token = (ctypes.c_int32 * n)(*(int(ids[place][at]) for place, at in fed))
            position = (ctypes.c_int32 * n)(*(at for _, at in fed))
            counts = (ctypes.c_int32 * n)(*[1] * n)
            pointers = (ctypes.c_void_p * n)(*(ctypes.addressof(one) for one in each))
            # a step gives the logits of every sequence, a prefill those of the rows that are asked for
            is_step = number >= len(calls) - (max(map(len, ids)) - together)
            asked = [is_step or at in SOURCE.window(batch[place]).rows for place, at in fed]
            wanted = (ctypes.c_int8 * n)(*asked)
            arrays = [ctypes.addressof(x) for x in (token, position, counts, pointers, wanted)]
            assert llama.llama_decode(context, Batch(n, arrays[0], None, *arrays[1:])) == 0
            for i, (place, at) in ((i, one) for i, one in enumerate(fed) if asked[i]):
                row = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (VOCABULARY,))
                found[batch[place], at] = row.copy()
        llama.llama_free(context)
    llama.llama_model_free(model)
    return found


def engine_of(file: Path, path: DecodePath | None, cache: str = "f16", **options: Any) -> LlamaCppEngine:
    given = {"threads": 1, "cache_type_k": cache, "cache_type_v": cache, **options}
    engine = open_engine(choose(str(file), None, given), Work(longest=64, path=path))
    assert isinstance(engine, LlamaCppEngine)
    return engine


@pytest.fixture(params=[(1, 1), (3, 1), (3, 5), (16, 1)], ids=str)
def path(request: pytest.FixtureRequest) -> DecodePath:
    return DecodePath(*request.param)


@pytest.mark.parametrize("cache", ["f16", "f32"])
def test_every_logit_is_that_of_a_loop_over_single_tokens(tiny_gguf: Path, path: DecodePath, cache: str) -> None:
    engine = engine_of(tiny_gguf, path, cache)
    batches = engine.batches(SOURCE)
    assert batches is not None
    assert [len(batch) for batch in batches][:-1] == [path.sequences] * (len(batches) - 1)
    expected = single_token_loop(
        tiny_gguf,
        [batch.tolist() for batch in batches],
        cache=cache,
        sequences=path.sequences,
        prefilled=path.prefill_tokens,
    )
    reducer = LogitsReducer(SOURCE, SCORES, torch.device("cpu"), VOCABULARY)
    found = scored(engine, SOURCE)
    count = 0
    for batch in batches:
        windows = [SOURCE.window(int(index)) for index in batch]
        again = StepReducer(reducer, [(int(index), SOURCE.window(int(index))) for index in batch])
        for rows, logits in engine.steps(windows):
            for line, (place, row) in enumerate(rows):
                at = int(windows[place].rows[row])
                assert np.array_equal(logits[line].numpy(), expected[int(batch[place]), at])
                count += 1
            again.reduce(rows, torch.from_numpy(np.stack([own_row(expected, batch, windows, one) for one in rows])))
        for index, answers in again.answers():
            assert_same_bits(answers, found[index])
    assert count == sum(len(window.rows) for window in SOURCE.items)
    engine.close()


def own_row(expected: Logits, batch: Any, windows: Sequence[Window], row: tuple[int, int]) -> Any:
    return expected[int(batch[row[0]]), int(windows[row[0]].rows[row[1]])]


def test_a_step_must_fit_into_a_decode(tiny_gguf: Path) -> None:
    with pytest.raises(EngineError, match=r"n_seq_max must be <= 256; .* or fewer --sequences"):
        engine_of(tiny_gguf, DecodePath(300))
    with pytest.raises(OptionError, match=r"--n-batch 8 has no room for a step of 16 sequences; give --n-batch 16"):
        engine_of(tiny_gguf, DecodePath(), n_batch=8)
    split = engine_of(tiny_gguf, DecodePath(4), "f32", n_batch=8, n_ubatch=2)  # a step is computed in two parts
    whole = scored(engine_of(tiny_gguf, DecodePath(4), "f32"), SOURCE)
    for index, answers in scored(split, SOURCE).items():
        assert np.abs(answers.logprob - whole[index].logprob).max() < 1e-4


# ── comparisons ──────────────────────────────────────────────────────────────────────────────────────────────────────
QUESTION: dict[str, Any] = {
    "text": "the cat sat on the mat and the dog ran away " * 4,
    "context_length": 24,
    "path": "decode",
    "threads": 1,
}


@pytest.fixture(scope="module")
def louder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``tiny`` with a head that is larger by a tenth."""
    file = tmp_path_factory.mktemp("louder") / "louder.gguf"
    return gguf_of(tiny, file, weights=lambda name, x: x * 1.1 if name == "output.weight" else x)


@pytest.mark.parametrize("sequences", [1, 3])
def test_two_files_are_compared_step_by_step(tiny_gguf: Path, louder: Path, sequences: int) -> None:
    found = sm.compare(str(tiny_gguf), str(louder), sequences=sequences, **QUESTION)[0]
    columns = [
        [np.array(run.scores.logprob), np.array(run.scores.entropy)] for run in (found.baseline, found.candidate)
    ]
    alone = [sm.ppl(str(file), sequences=sequences, fresh=True, **QUESTION) for file in (tiny_gguf, louder)]
    for (logprob, entropy), own in zip(columns, alone, strict=True):
        assert np.array_equal(logprob, own.scores.logprob)
        assert np.array_equal(entropy, measured(own.scores.entropy))
    expected = list(divergences(tiny_gguf, sequences))
    assert np.abs(measured(found.kl) - np.concatenate(expected)).max() < 1e-5
    assert measured(found.kl).mean() > 1e-4


def divergences(file: Path, sequences: int) -> Iterator[Any]:
    """Yields the KL of each window of the plan, from the logits of the file and the same logits times 1.1."""
    from tests.makers import ask

    question = {name: value for name, value in QUESTION.items() if name != "threads"}
    plan = ask(str(file), sequences=sequences, **question).plan
    engine = engine_of(file, DecodePath(sequences))
    rows: dict[tuple[int, int], torch.Tensor] = {}
    for batch in engine.batches(plan) or ():
        for places, logits in engine.steps([plan.window(int(index)) for index in batch]):
            rows |= {(int(batch[place]), row): logits[i].double() for i, (place, row) in enumerate(places)}
    for index in range(len(plan)):
        p = torch.stack([rows[index, row] for row in range(len(plan.window(index).rows))])
        yield kl_of(p, p * 1.1)


def test_a_checkpoint_is_the_baseline_of_a_decoded_file(tiny: Path, louder: Path) -> None:
    options: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "baseline_options": {"dtype": "float32"}}
    decode = sm.compare(str(tiny), str(louder), sequences=3, **QUESTION, **options)[0]
    prefill = sm.compare(str(tiny), str(louder), **{**QUESTION, "path": None}, **options)[0]
    assert measured(decode.kl).mean() > 1e-4
    assert np.abs(measured(decode.kl) - measured(prefill.kl)).max() < 2e-5


def test_a_file_is_the_baseline_of_a_checkpoint_only_one_sequence_at_a_time(tiny: Path, tiny_gguf: Path) -> None:
    with pytest.raises(EngineError, match="give --sequences 1"):
        sm.compare(str(tiny_gguf), str(tiny), sequences=3, **QUESTION)
    found = sm.compare(str(tiny_gguf), str(tiny), sequences=1, dtype="float32", cache_type_k="f32", **QUESTION)[0]
    assert measured(found.kl).max() < 1e-3


def test_a_coarser_cache_does_more_damage_on_both_paths(wider: Path, tmp_path: Path) -> None:
    file = gguf_of(wider, tmp_path / "wider.gguf")
    for path in (None, DecodePath(3)):
        truth = scored(engine_of(file, path, "f32"), SOURCE)
        moved = []
        for cache in ("f16", "q8_0", "q4_0"):
            found = scored(engine_of(file, path, cache, flash_attn="on"), SOURCE)
            both = [np.square(answers.logprob - truth[index].logprob) for index, answers in found.items()]
            moved.append(float(np.sqrt(np.concatenate(both).mean())))
        assert moved[0] < moved[1] < moved[2], (path, moved)


PROMPTS = ["The quick brown fox", "A model", "dog", "In 1999 there were cats", "the lazy dog, and", "东"]
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}


def test_texts_are_those_of_transformers(tiny: Path, tiny_gguf: Path) -> None:
    drawn: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "samples": 2, "seed": 5}
    for how in ({}, drawn):
        here = sm.rollouts(str(tiny_gguf), PROMPTS, max_tokens=12, sequences=4, **EXACT, **how)
        there = sm.rollouts(str(tiny), PROMPTS, max_tokens=12, dtype="float32", **how)
        assert [ids.tolist() for ids in here.written] == [ids.tolist() for ids in there.written]
        for name in ("raw_logprob", "logprob"):
            far = [np.abs(a - b).max() for a, b in zip(getattr(here, name), getattr(there, name), strict=True)]
            assert max(far) < 1e-4
        assert here.manifest["sampling"]["ends"] == there.manifest["sampling"]["ends"]


def test_rows_that_are_not_asked_for_are_fed_and_not_given(tiny_gguf: Path) -> None:
    engine = engine_of(tiny_gguf, DecodePath(2, 4))
    few = WindowList(
        tuple(Window(w.ids, w.rows[[1, 3, -1]], w.targets[[1, 3, -1]]) for w in SOURCE.items if len(w.ids) > 9)
    )
    every = WindowList(tuple(w for w in SOURCE.items if len(w.ids) > 9))
    whole, part = scored(engine, every), scored(engine, few)
    reach = 0.0 if platform.machine() in ("x86_64", "AMD64") else 5e-6  # ARM: the bits depend on the rows of a product
    for index, answers in part.items():
        assert np.abs(answers.logprob - whole[index].logprob[[1, 3, -1]]).max() <= reach
