"""Baselines that have logits and no exact head: GGUF files, and a table in the place of EXL3."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.base import SCORES, Engine, EngineFacts, Wanted
from scoremode.core.engine.logits import LogitsReducer
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.question import Question
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.core.scores.schema import DIVERGENCE
from scoremode.core.store.runs import MANIFEST
from scoremode.core.verbs import compared_models
from scoremode.core.verbs.model import LazyModel
from scoremode.engines.llamacpp.engine import LlamaCppEngine
from scoremode.engines.llamacpp.library import Batch, library
from scoremode.errors import EngineError, InputError, OptionError
from scoremode.head.divergence import define_divergence
from scoremode.values import Bools
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import VOCABULARY, make_tiny_model

TEXT = "The quick brown fox jumps over 12345 lazy dogs, and the dog does not mind. " * 6
QUESTION: Any = {"text": TEXT, "context_length": 48, "stride": 20}
EXACT: Any = {"threads": 1, "cache_type_k": "f32", "cache_type_v": "f32"}
ASKED: Any = {**QUESTION, **EXACT}
CLOSE = 1e-9  # nats: KL has its sums in float64, so from equal logits hardly more than their rounding remains
ABOUT = 1e-4  # between logits of float32 that were computed in different ways


@pytest.fixture(scope="module", autouse=True)
def _llamacpp() -> None:
    require_llamacpp()


def noisy(seed: int) -> Any:
    """A change of every matrix, by a tenth of its size."""
    random = np.random.default_rng(seed)

    def change(_: str, x: Any) -> Any:
        return x if x.ndim == 1 else (x + 0.1 * x.std() * random.standard_normal(x.shape)).astype(np.float32)

    return change


@pytest.fixture(scope="module")
def files(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A baseline and two candidates."""
    folder = tmp_path_factory.mktemp("files")
    return [
        gguf_of(tiny, folder / "base.gguf"),
        gguf_of(tiny, folder / "first.gguf", weights=noisy(1)),
        gguf_of(tiny, folder / "second.gguf", "F16", weights=noisy(2)),
    ]


# ── the judge: llama.cpp's own logits, row by row, in float64 ────────────────────────────────────────────────────────
def llamacpp_logits(file: Path, windows: list[Window], **cache: Any) -> list[torch.Tensor]:
    """The logits of the rows of windows, by llama.cpp's C functions alone: one decode each, read row by row."""
    call = library().call
    model = library().load(file, call.llama_model_default_params())
    parameters = call.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.flash_attn_type = 0
    parameters.type_k = parameters.type_v = cache.get("kind", 0)  # float32
    context = call.llama_init_from_model(model, parameters)
    size = call.llama_vocab_n_tokens(call.llama_model_get_vocab(model))
    found = []
    for window in windows:
        n = len(window.ids)
        sequence = ctypes.c_int32(0)
        arrays = (
            (ctypes.c_int32 * n)(*window.ids.tolist()),
            (ctypes.c_int32 * n)(*range(n)),
            (ctypes.c_int32 * n)(*[1] * n),
            (ctypes.c_void_p * n)(*[ctypes.addressof(sequence)] * n),
            (ctypes.c_int8 * n)(*[int(row in window.rows) for row in range(n)]),
        )
        token, position, count, sequences, output = (ctypes.addressof(one) for one in arrays)
        call.llama_memory_clear(call.llama_get_memory(context), True)
        assert call.llama_decode(context, Batch(n, token, None, position, count, sequences, output)) == 0
        rows = [call.llama_get_logits_ith(context, int(row))[:size] for row in window.rows]
        found.append(torch.tensor(rows, dtype=torch.float64))
    call.llama_free(context)
    call.llama_model_free(model)
    return found


def plan_of(model: Path | str, question: dict[str, Any]) -> Plan:
    return LazyModel.named(str(model)).ask(Question(**question)).plan


def windows_of(plan: Plan) -> list[Window]:
    return [plan.window(index) for index in range(len(plan))]


def assert_defined(
    found: sm.Comparison, p: list[torch.Tensor], q: list[torch.Tensor], windows: list[Window], close: float = CLOSE
) -> None:
    """Every column of both runs, and of their divergence, equals the float64 definition."""
    targets = [torch.from_numpy(window.targets.astype(np.int64)) for window in windows]
    truth = [define_divergence(*each) for each in zip(p, q, targets, strict=True)]
    base = [define_divergence(*each) for each in zip(p, p, targets, strict=True)]
    assert found.kl is not None
    for name in (column.name for column in DIVERGENCE):
        exact = torch.cat([getattr(one, name) for one in truth]).numpy()
        assert np.abs(getattr(found.divergences, name) - exact).max() < close, name
    for run, columns in ((found.candidate, [one.q for one in truth]), (found.baseline, [one.q for one in base])):
        for name in ("logprob", "entropy", "top_logprob"):
            exact = torch.cat([getattr(one, name).reshape(-1) for one in columns]).numpy()
            assert np.abs(getattr(run.scores, name) - exact).max() < max(close, 2e-5), name
        for name in ("rank", "top"):
            exact = torch.cat([getattr(one, name).reshape(-1) for one in columns]).numpy()
            assert (getattr(run.scores, name) == exact).all(), name


@pytest.mark.parametrize("batches", [(2048, 2048), (7, 2048), (2048, 11), (13, 5)])
def test_every_column_equals_the_definition_whatever_the_batches_are(
    files: list[Path], batches: tuple[int, int], tmp_path: Path
) -> None:
    assert VOCABULARY == 311
    windows = windows_of(plan_of(files[0], QUESTION))
    assert len(windows) > 5
    own: Any
    its: Any
    own, its = ({"n_batch": n, "n_ubatch": min(n, 512)} for n in batches)
    (found,) = sm.compare(str(files[0]), str(files[1]), **ASKED, **own, baseline_options=its, out=tmp_path)
    p, q = (llamacpp_logits(file, windows) for file in files[:2])
    assert_defined(found, p, q, windows, CLOSE if min(batches) > 48 else ABOUT)  # ggml's kernels may know the batch
    assert 0.01 < found.kl.mean() < 5  # type: ignore[union-attr]
    stored = json.loads((tmp_path / "first.gguf" / MANIFEST).read_text())
    assert stored["against"]["model"] == str(files[0])
    assert stored["identity"]["settings"]["against"] == found.baseline.manifest["identity"]
    kept = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert kept < found.kl.size * VOCABULARY, "nothing of the size of a vocabulary is kept"  # type: ignore[union-attr]


def test_a_file_against_itself_is_exactly_zero_and_all_of_a_divergence_is_always_measured(files: list[Path]) -> None:
    (same,) = sm.compare(str(files[0]), str(files[0]), **QUESTION)
    numbers = same.statistics()
    assert (numbers["kl_max"], numbers["same_top"], numbers["ppl_ratio"]) == (0.0, 1.0, 1.0)
    (before,) = sm.compare(*map(str, files[:2]), **ASKED)
    (found,) = sm.compare(*map(str, files[:2]), **ASKED, divergence="all")
    assert {"kl_reverse_mean", "overlap", "top2_same"} <= found.statistics().keys()
    assert found.candidate.path == before.candidate.path, "no other run"
    with pytest.raises(OptionError, match="--divergence kl is not known; give all"):
        sm.compare(*map(str, files[:2]), **ASKED, divergence="kl")


def test_a_checkpoint_of_transformers_beside_a_gguf_baseline(files: list[Path], tiny: Path) -> None:
    from transformers import LlamaForCausalLM

    asked: Any = {**ASKED, "dtype": "float32"}
    (found,) = sm.compare(str(files[1]), str(tiny), **asked)
    windows = windows_of(plan_of(files[1], QUESTION))
    judge = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    with torch.inference_mode():
        q = [judge(torch.from_numpy(w.ids.astype(np.int64))[None]).logits[0, w.rows] for w in windows]
    assert_defined(found, llamacpp_logits(files[1], windows), q, windows, ABOUT)
    alone = sm.ppl(str(tiny), **QUESTION, dtype="float32", fresh=True)
    assert (alone.scores.logprob == found.candidate.scores.logprob).all(), "the bits of a model alone"


# ── several candidates ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that llama.cpp loads from here on."""
    found: list[str] = []
    load = LlamaCppEngine._load

    def counted(self: LlamaCppEngine, facts: Any) -> None:
        found.append(facts.files[0].name)
        load(self, facts)

    monkeypatch.setattr(LlamaCppEngine, "_load", counted)
    return found


def test_each_file_is_loaded_once_and_the_second_time_none(
    files: list[Path], opened: list[str], tiny: Path, tmp_path: Path
) -> None:
    names = [*map(str, files), str(tiny)]
    asked = {**ASKED, "dtype": "float32"}
    several = sm.compare(*names, **asked, fresh=True, out=tmp_path)
    assert opened == ["base.gguf", "first.gguf", "second.gguf"]
    assert [one.name for one in several] == ["first.gguf", "second.gguf", tiny.name]
    opened.clear()
    again = sm.compare(*names, **asked, out=tmp_path)
    assert opened == []
    one_by_one = [sm.compare(names[0], name, **(asked if name == names[-1] else ASKED))[0] for name in names[1:]]
    for found, kept, alone in zip(several, again, one_by_one, strict=True):
        assert (found.kl == kept.kl).all()  # type: ignore[union-attr]
        assert (found.kl == alone.kl).all()  # type: ignore[union-attr]
        assert found.statistics() == alone.statistics()
    alone_p = sm.ppl(names[0], **ASKED, fresh=True)
    assert (alone_p.scores.logprob == several[0].baseline.scores.logprob).all(), "the bits of a model alone"


def test_another_baseline_or_its_options_make_another_run(files: list[Path], opened: list[str]) -> None:
    sm.compare(*map(str, files[:2]), **ASKED)
    opened.clear()
    sm.compare(*map(str, files[:2]), **ASKED, baseline_options={"n_batch": 9, "n_ubatch": 9})
    sm.compare(str(files[2]), str(files[1]), **ASKED)
    assert opened == ["base.gguf", "first.gguf", "second.gguf", "first.gguf"]


def test_finished_runs_are_candidates_too(files: list[Path], tmp_path: Path) -> None:
    sm.compare(*map(str, files[:2]), **ASKED, out=tmp_path / "all")
    sm.ppl(str(files[2]), **ASKED, out=tmp_path / "plain")
    kept, plain = sm.compare(str(files[0]), str(tmp_path / "all" / "first.gguf"), str(tmp_path / "plain"), **ASKED)
    assert kept.kl is not None
    assert plain.kl is None
    assert plain.statistics()["ppl_ratio"] == pytest.approx(
        sm.compare(str(files[0]), str(files[2]), **ASKED)[0].statistics()["ppl_ratio"]
    )


def test_open_models_and_one_that_cannot_run_beside_itself(files: list[Path]) -> None:
    with sm.open(str(files[0]), **EXACT) as base, sm.open(str(files[1]), **EXACT) as other:
        found = other.compare(base, **QUESTION)
        assert (found.kl == sm.compare(*map(str, files[:2]), **ASKED)[0].kl).all()  # type: ignore[union-attr]
        with pytest.raises(InputError, match="beside itself"):
            base.compare(base, **QUESTION)


# ── what is said and refused ─────────────────────────────────────────────────────────────────────────────────────────
def test_memory_is_said_before_anything_is_loaded_and_too_much_is_refused(
    files: list[Path], opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(compared_models, "print_line", said.append)
    monkeypatch.setattr(compared_models, "available", lambda: 10_000)
    asked: Any = {**ASKED, "stride": 19}
    with pytest.raises(
        EngineError, match=r"about .* of memory must be free for both models at once, and this machine has 10 kB left"
    ) as no:
        sm.compare(*map(str, files[:2]), **asked)
    assert opened == []
    assert "scoremode reference MODEL --kld FILE" in str(no.value)
    assert "16 bits" in str(no.value)
    assert "method llamacpp" in str(no.value)
    assert len(said) == 1
    assert "for base.gguf, " in said[0]
    assert said[0].endswith("for first.gguf)")
    monkeypatch.setattr(compared_models, "available", lambda: None)
    sm.compare(*map(str, files[:2]), **asked)
    assert len(said) == 2
    sm.compare(*map(str, files[:2]), **asked)
    assert len(said) == 2, "kept runs need no memory"


def test_what_cannot_be_compared_is_refused_in_one_line(files: list[Path], tiny: Path, tmp_path: Path) -> None:
    digits = gguf_of(tiny, tmp_path / "digits.gguf", pre="smollm")
    with pytest.raises(InputError, match="other ids from character 30 on"):
        sm.compare(str(files[0]), str(digits), **ASKED)
    larger = make_tiny_model(tmp_path / "larger", adds_bos=False, vocab_size=VOCABULARY + 2)
    with pytest.raises(InputError, match=f"vocabulary {VOCABULARY} vs {VOCABULARY + 2}"):
        sm.compare(str(files[0]), str(larger), **ASKED)
    with pytest.raises(EngineError, match=r"runs in this process.*leave --replicas out"):
        sm.compare(*map(str, files[:2]), replicas=2, **ASKED)
    with pytest.raises(OptionError, match="--dtype does not apply"):
        sm.compare(*map(str, files[:2]), dtype="float32", **ASKED)


# ── a table in the place of EXL3 ─────────────────────────────────────────────────────────────────────────────────────
class HalfTable(Engine):
    """Gives float16 logits by the previous token, all rows of a window at once, and no hidden states."""

    def __init__(self, seed: int, vocabulary: int = 256, *, blocks: int = 1) -> None:
        random = torch.Generator().manual_seed(seed)
        self.table = torch.randn(256, vocabulary, generator=random).half()
        self.blocks = blocks
        self.facts = EngineFacts("halftable", "float16", "cpu", "as-served", vocabulary, None)

    def logits(self, window: Window) -> Iterator[tuple[slice, torch.Tensor]]:
        edges = np.linspace(0, len(window.rows), self.blocks + 1).astype(int).tolist()
        for begin, end in itertools.pairwise(edges):
            if end > begin:
                rows = self.table[torch.from_numpy(window.ids[window.rows[begin:end]]).long()]
                yield slice(begin, end), rows
                rows.fill_(float("nan"))  # as the next decode does

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        reducer = LogitsReducer(source, want, torch.device("cpu"), self.table.shape[1])
        for index in np.flatnonzero(~done).tolist():
            window = source.window(index)
            parts = [x for rows, logits in self.logits(window) for x in reducer.reduce((index, window), rows, logits)]
            yield index, reducer.answers(parts, window.targets.shape[1])


@pytest.mark.parametrize("blocks", [(1, 1), (3, 1), (2, 5)])
def test_float16_logits_of_an_engine_without_hidden_states(blocks: tuple[int, int]) -> None:
    one, other = HalfTable(1, blocks=blocks[0]), HalfTable(2, blocks=blocks[1])
    base, candidate = (sm.open("table:uniform", engine=engine) for engine in (one, other))
    asked: Any = {"text": "any text of a few bytes, and more", "context_length": 12}
    found = candidate.compare(base, **asked)
    windows = windows_of(plan_of("table:uniform", asked))
    p, q = ([engine.table[torch.from_numpy(w.ids[w.rows]).long()].double() for w in windows] for engine in (one, other))
    assert_defined(found, p, q, windows)
    assert (base.ppl(**asked).scores.logprob == found.baseline.scores.logprob).all()
    same = sm.open("table:uniform", engine=HalfTable(1)).compare(base, **asked)
    assert (same.kl == 0).all()  # type: ignore[union-attr]
    closed_form = sm.open("table:uniform").compare(base, **asked)
    assert np.abs(closed_form.kl - (np.log(256) - entropy(p))).max() < 1e-9


def entropy(logits: list[torch.Tensor]) -> Any:
    log_p = torch.cat(logits).log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).numpy()
