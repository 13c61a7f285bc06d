"""Pairs in a file and their results: what a kill leaves, which file is replaced, and what is kept in the cache."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.disk.folders import RESULTS, entry_folder
from scoremode.core.disk.records import RecordFile
from scoremode.core.verbs.prob import many_pairs
from scoremode.core.verbs.prob.many_pairs import check_results, question, read_pairs, score_to_file
from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore, TokenScore
from scoremode.errors import BoundaryError, InputError, RunError
from scoremode.values import NUMERICS

CHUNK = 16  # smaller than usual, for speed
PAIRS = [(f"prompt {i}", f" target {i}") for i in range(3 * CHUNK + 5)]
ODD = [
    ("a", "b"),
    ("The quick brown fox", " jumps over"),
    ("The quick brown fox ", "jumps"),  # a token may span the boundary
    ("naïve 東", "京 👩‍🔬"),
    ("x", " " * 9),
    *((f"prompt {i % 3}", f" target {i}") for i in range(40)),
]


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_pairs, "CHUNK", CHUNK)
        yield


def score(out: Path, pairs: Any = PAIRS, *, fresh: bool = False, **settings: Any) -> tuple[int, bool]:
    """The number of results, and whether they were kept before."""
    with SequenceProbability("table:uniform", **settings) as lm:
        written = score_to_file(lm, pairs, check_results(str(out), "--out"), fresh=fresh)
    return len(list(written.rows())), written.reused


def kept_in() -> Path:
    with SequenceProbability("table:uniform") as lm:
        return entry_folder("prob", question(lm, PAIRS))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "r.jsonl"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a call that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCOREMODE_CACHE", str(folder / "cache"))
        assert score(folder / "r.jsonl") == (len(PAIRS), False)
    return (folder / "r.jsonl").read_bytes()


def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scoremode.core.engine.registry.open_engine", lambda *_: pytest.fail("an engine was started"))


# ── pairs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_rows_have_one_target_or_several(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "targets": ["b", "c"]}, {"prompt": "東", "target": " d"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n \n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert read_pairs(path) == [("a", "b"), ("a", "c"), ("東", " d")]
    with path.open("a") as file:
        file.write('\n{"prompt": "a"}')
    with pytest.raises(InputError, match="line 4 is not a pair"):
        read_pairs(path)


@pytest.mark.parametrize("model", ["table", "tiny", "tiny_bos"])
@pytest.mark.parametrize("rule", [{}, {"leading_space": "add"}])
def test_pairs_encoded_together_are_those_encoded_alone(
    model: str, rule: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = "table:uniform" if model == "table" else str(request.getfixturevalue(model))
    lm = SequenceProbability(name, **rule)
    for pair, given in zip(lm.encoder.cut(ODD), ODD, strict=True):
        (alone,) = lm.encoder.cut([given])
        assert np.array_equal(pair.ids, alone.ids)
        assert pair.ids.dtype == alone.ids.dtype
        for field in ("prompt", "target", "texts", "first", "condition"):
            assert getattr(pair, field) == getattr(alone, field), field


def test_a_refused_pair_is_named_by_its_number() -> None:
    lm = SequenceProbability("table:uniform")
    with pytest.raises(InputError, match=f"^pair {len(ODD) + 1}: a target is empty"):
        lm.encode([*ODD, ("no target", ""), *ODD])


def test_a_spanning_token_may_begin_with_any_piece(tiny: Path) -> None:
    encoder = SequenceProbability(str(tiny)).encoder
    pieces = encoder.tokenizer.pieces()
    for beginning in (" ", " t", "q", "th"):
        expected = [i for i, piece in enumerate(pieces) if piece.startswith(beginning.encode())]
        if expected:
            assert encoder.beginning_with(beginning, expected[0]).tolist() == expected
    with pytest.raises(BoundaryError, match="inside a character"):
        encoder.beginning_with("no piece begins like this", 0)


def test_a_line_is_read_back_whole() -> None:
    tokens = (TokenScore(3, 'é"\\\n\u2028', -1.5, 1), TokenScore(4, "", float("-inf"), None))
    result = SequenceScore("p\x00", "t", float("-inf"), 0.0, float("inf"), "clean", tokens)
    assert b"\n" not in result.as_line()
    assert json.loads(result.as_line()) == result.as_json()
    assert SequenceScore.from_json(result.as_json()) == result


# ── what a kill leaves ───────────────────────────────────────────────────────────────────────────────────────────────
def kill_at(step: int, out: Path, fresh: bool) -> None:
    """In a process of its own: score, and die at a step. Steps lie around all that changes a file."""
    left = iter(range(step, -1, -1))

    def passed() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            passed()
            found = original(*given, **named)
            passed()
            return found

        return call

    def torn(self: RecordFile, *parts: bytes) -> None:
        """A record in two writes, so that a kill can fall between them."""
        data = b"".join(parts)
        self._file.write(data[: len(data) // 2])
        passed()
        self._file.write(data[len(data) // 2 :])

    for name in ("replace", "unlink", "fsync", "open"):
        setattr(os, name, watched(getattr(os, name)))
    RecordFile._write = watched(torn)  # type: ignore[method-assign]
    score(out, fresh=fresh)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_kill_at_any_step_leaves_what_the_same_command_accepts(
    tmp_path: Path, whole: bytes, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, ended = 0, False
    while not ended:
        folder = tmp_path / str(steps)
        folder.mkdir()
        monkeypatch.setenv("SCOREMODE_CACHE", str(folder / "cache"))
        if fresh:
            score(folder / "r.jsonl")
        process = multiprocessing.get_context("fork").Process(target=kill_at, args=(steps, folder / "r.jsonl", fresh))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        ended = process.exitcode == 0
        assert score(folder / "r.jsonl", fresh=fresh)[0] == len(PAIRS)
        assert (folder / "r.jsonl").read_bytes() == whole, f"killed at step {steps}"
        steps += 1
    assert steps > 20, "too few steps to be a test"


def test_an_interrupted_call_goes_on_where_it_stopped(out: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    original = SequenceProbability.score

    def stopping(self: Any, pairs: Any, progress: Any = None) -> Any:
        scored.append(len(pairs))
        if len(scored) == 3:
            raise KeyboardInterrupt
        return original(self, pairs, progress)

    monkeypatch.setattr(SequenceProbability, "score", stopping)
    with pytest.raises(KeyboardInterrupt):
        score(out)
    assert not out.exists()
    assert score(out) == (len(PAIRS), False)
    assert (out.read_bytes(), scored) == (whole, [CHUNK, CHUNK, CHUNK, CHUNK, 5])


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_kept_results_are_read_and_no_engine_starts(out: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    score(out)
    no_engine(monkeypatch)
    before = out.stat().st_mtime_ns
    assert score(out) == (len(PAIRS), True)
    assert out.stat().st_mtime_ns == before
    assert score(out.with_name("other.jsonl")) == (len(PAIRS), True)
    assert out.with_name("other.jsonl").read_bytes() == whole


def test_fresh_scores_again_and_replaces_other_results(out: Path, whole: bytes) -> None:
    score(out)
    assert score(out, fresh=True) == (len(PAIRS), False)
    with pytest.raises(RunError, match="has other results; give another --out, or --fresh to replace it"):
        score(out, PAIRS[:-1], leading_space="add")
    assert out.read_bytes() == whole
    score(out, PAIRS[:-1], leading_space="add", fresh=True)
    assert out.read_bytes().count(b"\n") == len(PAIRS) - 1


def test_a_changed_file_is_refused_and_kept_results_that_changed_too(out: Path, whole: bytes) -> None:
    score(out)
    out.write_bytes(whole[:-1])
    for fresh in (False, True):
        with pytest.raises(InputError, match="or was changed"):
            score(out, fresh=fresh)
    assert out.read_bytes() == whole[:-1]
    out.unlink()
    (kept_in() / RESULTS).write_bytes(whole[:-1])
    with pytest.raises(RunError, match="was changed after scoremode wrote it"):
        score(out)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("content", ["mine", '{"prompt": "a", "target": "b"}\n'])
def test_a_file_of_somebody_else_is_never_overwritten(out: Path, content: str, fresh: bool) -> None:
    out.write_text(content)
    with pytest.raises(InputError, match="is not a file of scoremode prob, or was changed; give another --out"):
        score(out, fresh=fresh)
    assert out.read_text() == content


def test_a_file_that_appears_while_scoring_is_not_overwritten(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceProbability.score

    def meanwhile(self: Any, pairs: Any, progress: Any = None) -> Any:
        out.write_text("mine")
        return original(self, pairs, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceProbability, "score", meanwhile)
        with pytest.raises(InputError, match="is not a file of scoremode prob"):
            score(out)
    assert out.read_text() == "mine"
    out.rename(out.with_name("mine"))
    no_engine(monkeypatch)
    assert score(out) == (len(PAIRS), True)


def test_nothing_is_lost_when_fresh_cannot_start_its_engine(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError

    score(out)
    with monkeypatch.context() as patch:
        patch.setattr("scoremode.core.engine.registry.open_engine", failing)
        with pytest.raises(MemoryError):
            score(out, fresh=True)
    assert score(out) == (len(PAIRS), True)


def test_infinities_are_possible_results(out: Path) -> None:
    with sm.open("table:successor") as model:
        (found, _) = model.prob("a", ["z", "b"], out=out)
        assert model.prob("a", ["z", "b"], out=out)[0] == found
    first = json.loads(out.read_bytes().split(b"\n", 1)[0])
    assert (first["log_prob"], first["prob"], first["perplexity"]) == (None, 0.0, None)


# ── identity ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_identity_is_known_without_an_engine_and_holds_all_that_moves_a_number(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_engine(monkeypatch)

    def asked(**settings: Any) -> Any:
        return question(SequenceProbability(str(tiny), **settings), PAIRS)

    plain = asked()
    assert plain == json.loads(json.dumps(plain)), "as it comes back from a file"
    assert set(plain) >= {"model", "tokenizer", "engine", "settings", "versions", "boundary", "pairs"}
    assert plain["versions"].keys() >= {"torch", "transformers", "tokenizers"}
    assert plain["numerics"] == NUMERICS
    others: dict[str, list[dict[str, Any]]] = {
        "settings": [{"dtype": "bfloat16"}, {"batch_tokens": 64}, {"head": "as-served"}, {"head_kernel": "plain"}],
        "boundary": [{"leading_space": "add"}, {"spanning": "refuse"}, {"add_bos": True}],
    }
    for name, settings in others.items():
        for one in settings:
            other = asked(**one)
            assert [k for k in plain if plain[k] != other[k]] == [name], one
