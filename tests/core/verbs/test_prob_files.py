"""Results in a file: whose they are, what a kill leaves, and what is done with a file that somebody changed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scoremode.core.disk.locks import Lock
from scoremode.core.disk.manifests import sealed
from scoremode.core.disk.records import HEAD, RecordFile
from scoremode.core.verbs.prob import many_pairs
from scoremode.core.verbs.prob.many_pairs import Written, check_results, question, score_to_file
from scoremode.core.verbs.prob.sequence import SequenceProbability
from scoremode.errors import InputError, RunError
from scoremode.values import NUMERICS

CHUNK, CHUNKS = 16, 4  # smaller chunks than usual, for speed
PAIRS = [(f"prompt {i}", f" target {i}") for i in range(3 * CHUNK + 5)]


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_pairs, "CHUNK", CHUNK)
        yield


class Files:
    """The names of a file of results and of those beside it."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest, self.partial, self.lock = (
            path.with_name(name.format(path.name)) for name in ("{}", "{}.manifest.json", "{}.partial", ".{}.lock")
        )


def score(folder: Path, pairs: Any = PAIRS, *, fresh: bool = False, **settings: Any) -> Written:
    with SequenceProbability("table:uniform", **settings) as lm:
        return score_to_file(lm, pairs, check_results(str(folder / "r.jsonl"), "--out"), fresh=fresh)


def begin(folder: Path, chunks: int = 2) -> Files:
    """Score some chunks of the pairs and stop, as an interruption does."""
    done: list[int] = []
    original = SequenceProbability.score

    def stopping(self: Any, pairs: Any, progress: Any = None) -> Any:
        if len(done) == chunks:
            raise KeyboardInterrupt
        done.append(1)
        return original(self, pairs, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceProbability, "score", stopping)
        with pytest.raises(KeyboardInterrupt):
            score(folder)
    return Files(folder / "r.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a call that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert score(folder) == Written(len(PAIRS), reused=False)
    return (folder / "r.jsonl").read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def records(partial: Path) -> tuple[bytes, list[bytes]]:
    """The header line, and every record as it lies there."""
    line, rest = partial.read_bytes().split(b"\n", 1)
    found = []
    while rest:
        size = HEAD.size + HEAD.unpack(rest[: HEAD.size])[2]
        found.append(rest[:size])
        rest = rest[size:]
    return line + b"\n", found


# ── what a kill leaves ───────────────────────────────────────────────────────────────────────────────────────────────
def test_an_interrupted_call_resumes_to_the_same_file(tmp_path: Path, whole: bytes) -> None:
    files = begin(tmp_path)
    assert sorted(contents(tmp_path)) == ["r.jsonl.partial"]
    assert len(records(files.partial)[1]) == 2
    assert score(tmp_path) == Written(len(PAIRS), reused=False)
    assert files.path.read_bytes() == whole
    assert sorted(contents(tmp_path)) == ["r.jsonl", "r.jsonl.manifest.json"]


def kill_at(step: int, folder: Path, fresh: bool) -> None:
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

    def torn(self: RecordFile, data: bytes) -> None:
        """A record in two writes, so that a kill can fall between them."""
        self._file.write(data[: len(data) // 2])
        passed()
        self._file.write(data[len(data) // 2 :])

    for name in ("replace", "unlink", "fsync", "open"):
        setattr(os, name, watched(getattr(os, name)))
    RecordFile._write = watched(torn)  # type: ignore[method-assign]
    score(folder, fresh=fresh)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_kill_at_any_step_leaves_what_the_same_command_accepts(tmp_path: Path, whole: bytes, fresh: bool) -> None:
    steps, ended = 0, False
    while not ended:
        folder = tmp_path / str(steps)
        folder.mkdir()
        if fresh:
            score(folder)
        process = multiprocessing.get_context("fork").Process(target=kill_at, args=(steps, folder, fresh))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        ended = process.exitcode == 0
        assert score(folder).count == len(PAIRS)
        assert (folder / "r.jsonl").read_bytes() == whole, f"killed at step {steps}"
        names = {p.name for p in folder.iterdir() if not p.name.endswith((".tmp", ".lock"))}
        assert names == {"r.jsonl", "r.jsonl.manifest.json"}
        steps += 1
    assert steps > 20, "too few steps to be a test"


# ── a .partial that was changed ──────────────────────────────────────────────────────────────────────────────────────
def _another_digit(line: bytes, found: list[bytes]) -> bytes:
    return line + found[0].replace(b"5.545177444479562", b"5.545177444479563", 1) + found[1]


def _another_number(line: bytes, found: list[bytes]) -> bytes:
    magic, _, length, checksum = HEAD.unpack(found[0][: HEAD.size])
    return line + HEAD.pack(magic, 3, length, checksum) + found[0][HEAD.size :] + found[1]


def _a_line_of_json_removed(line: bytes, found: list[bytes]) -> bytes:
    return line + found[0][: HEAD.size] + found[0][HEAD.size :].split(b"\n", 1)[1] + found[1]


CHANGES: dict[str, Callable[[bytes, list[bytes]], bytes]] = {
    "a digit": _another_digit,
    "the number of a record": _another_number,
    "a line of JSON removed": _a_line_of_json_removed,
    "a record removed": lambda line, found: line + found[1],
    "records swapped": lambda line, found: line + found[1] + found[0],
    "the last record torn": lambda line, found: line + found[0] + found[1][:-7],
    "nothing but half a header": lambda line, found: line[:40],
    "empty": lambda line, found: b"",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_partial_file_changes_no_result(
    tmp_path: Path, whole: bytes, change: Callable[[bytes, list[bytes]], bytes]
) -> None:
    files = begin(tmp_path)
    files.partial.write_bytes(change(*records(files.partial)))
    score(tmp_path)
    assert files.path.read_bytes() == whole


@pytest.mark.parametrize("data", [b"my notes\n", b'{"pairs": "others"}\n{"nonsense": 1}\n'])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_partial_file_that_is_not_ours_is_never_touched(tmp_path: Path, data: bytes, fresh: bool) -> None:
    (tmp_path / "r.jsonl.partial").write_bytes(data)
    with pytest.raises(RunError, match="is not a file of scoremode prob"):
        score(tmp_path, fresh=fresh)
    assert contents(tmp_path) == {"r.jsonl.partial": data}


# ── a finished file ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def finished(tmp_path: Path) -> Files:
    score(tmp_path)
    return Files(tmp_path / "r.jsonl")


def test_a_finished_file_is_read_and_no_engine_starts(
    finished: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starting(*_: Any) -> Any:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("scoremode.core.engine.registry.open_engine", starting)
    before = contents(tmp_path)
    assert score(tmp_path) == Written(len(PAIRS), reused=True)
    assert contents(tmp_path) == before


def test_fresh_scores_again(finished: Files, tmp_path: Path, whole: bytes) -> None:
    os.utime(finished.path, (1, 1))
    assert score(tmp_path, fresh=True) == Written(len(PAIRS), reused=False)
    assert finished.path.read_bytes() == whole
    assert finished.path.stat().st_mtime > 1


def test_a_finished_file_of_another_question_is_refused_by_what_differs(finished: Files, tmp_path: Path) -> None:
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"contains results of another question \(it differs in: boundary, pairs\)"):
        score(tmp_path, PAIRS[:-1], leading_space="add")
    assert contents(tmp_path) == before
    score(tmp_path, PAIRS[:-1], leading_space="add", fresh=True)
    assert finished.path.read_bytes().count(b"\n") == len(PAIRS) - 1


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"-5.545177444479562", b"-5.545177444479563", 1),
        lambda data: data.split(b"\n", 1)[1],
        lambda data: data + data.split(b"\n", 1)[0] + b"\n",
        lambda data: data[:-1],
    ],
    ids=["digit", "line removed", "line doubled", "cut"],
)
def test_a_finished_file_that_was_changed_is_refused_and_kept(
    finished: Files, tmp_path: Path, change: Callable[[bytes], bytes], fresh: bool
) -> None:
    """Its changes may be somebody's work."""
    finished.path.write_bytes(change(finished.path.read_bytes()))
    before = contents(tmp_path)
    with pytest.raises(RunError, match="was changed after scoremode wrote it"):
        score(tmp_path, fresh=fresh)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("fresh", [False, True])
def test_a_file_of_somebody_else_is_never_overwritten(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "r.jsonl").write_text("mine")
    with pytest.raises(InputError, match="exists and is not a file of scoremode prob; give another --out"):
        score(tmp_path, fresh=fresh)
    assert contents(tmp_path) == {"r.jsonl": b"mine"}


def test_a_file_that_appears_while_scoring_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceProbability.score

    def meanwhile(self: Any, pairs: Any, progress: Any = None) -> Any:
        (tmp_path / "r.jsonl").write_text("mine")
        return original(self, pairs, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceProbability, "score", meanwhile)
        with pytest.raises(RunError, match="written by something else meanwhile"):
            score(tmp_path)
    assert (tmp_path / "r.jsonl").read_text() == "mine"
    (tmp_path / "r.jsonl").rename(tmp_path / "mine")
    monkeypatch.setattr(SequenceProbability, "open", lambda *_: pytest.fail("everything was scored already"))
    assert score(tmp_path) == Written(len(PAIRS), reused=False)


def test_a_file_that_appears_while_the_engine_opens_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SequenceProbability.open

    def meanwhile(self: Any, *given: Any) -> Any:
        (tmp_path / "r.jsonl").write_text("mine")
        return original(self, *given)

    monkeypatch.setattr(SequenceProbability, "open", meanwhile)
    with pytest.raises(RunError, match="is not a file of scoremode prob"):
        score(tmp_path)
    assert (tmp_path / "r.jsonl").read_text() == "mine"


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "sha256 edited": lambda m: m.update(sha256="0" * 64),
    "results edited": lambda m: m.update(results=7),
    "identity edited": lambda m: m["identity"].update(model="other"),
    "of something else": lambda m: m.update({"for": "my program"}),
    "sealed anew with a wrong type": lambda m: (m.update(identity=3), m.update(sealed(m))),
    "sealed anew without sha256": lambda m: (m.pop("sha256"), m.update(sealed(m))),
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("edit", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_that_was_changed_vouches_for_nothing(
    finished: Files, tmp_path: Path, edit: Callable[[dict[str, Any]], object], fresh: bool
) -> None:
    value = json.loads(finished.manifest.read_bytes())
    edit(value)
    finished.manifest.write_text(json.dumps(value))
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"r\.jsonl\.manifest\.json (is damaged|was changed)"):
        score(tmp_path, fresh=fresh)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[" * 100_000, b"[]"])
def test_a_manifest_that_is_no_json_is_refused(finished: Files, tmp_path: Path, data: bytes) -> None:
    finished.manifest.write_bytes(data)
    with pytest.raises(RunError, match="is damaged"):
        score(tmp_path)


def test_results_with_the_seal_of_earlier_versions_are_read(finished: Files, tmp_path: Path) -> None:
    """Their seal was over JSON with spaces."""
    value = json.loads(finished.manifest.read_bytes())
    del value["seal"]
    value["seal"] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    finished.manifest.write_text(json.dumps(value))
    assert score(tmp_path) == Written(len(PAIRS), reused=True)


# ── identity and lock ────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_identity_is_known_without_an_engine_and_holds_all_that_moves_a_number(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scoremode.core.engine.registry.open_engine", lambda *_: pytest.fail("an engine was started"))

    def asked(**settings: Any) -> dict[str, Any]:
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


def test_settings_of_vllm_are_part_of_the_identity(tiny: Path) -> None:
    pytest.importorskip("vllm")

    def asked(**settings: Any) -> dict[str, Any]:
        return question(SequenceProbability(str(tiny), engine="vllm", **settings), PAIRS)

    plain = asked()
    others: list[dict[str, Any]] = [
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 2},
        {"engine_args": (("seed", 1),)},
    ]
    for settings in others:
        other = asked(**settings)
        assert [k for k in plain if plain[k] != other[k]] == ["settings"], settings
        assert other == asked(**settings)


def test_a_second_process_is_refused_before_its_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scoremode.core.engine.registry.open_engine", lambda *_: pytest.fail("an engine was started"))
    lock = Lock(Files(tmp_path / "r.jsonl").lock)
    assert lock.acquire()
    with pytest.raises(RunError, match=r"another process is writing .*r\.jsonl; wait for it, or give another --out"):
        score(tmp_path)
    lock.release()
    assert contents(tmp_path) == {}


def test_links_to_one_file_share_its_lock_and_its_results(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "r.jsonl").symlink_to(tmp_path / "a" / "r.jsonl")
    lock = Lock(Files(tmp_path / "a" / "r.jsonl").lock)
    assert lock.acquire()
    with pytest.raises(RunError, match="another process is writing"):
        score(tmp_path / "b")
    lock.release()
    score(tmp_path / "b")
    assert (tmp_path / "b" / "r.jsonl").is_symlink()
    assert (tmp_path / "a" / "r.jsonl").read_bytes() == whole
    assert score(tmp_path / "a").reused


def test_nothing_is_lost_when_fresh_cannot_start_its_engine(
    finished: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("scoremode.core.engine.registry.open_engine", failing)
    before = contents(tmp_path)
    with pytest.raises(MemoryError):
        score(tmp_path, fresh=True)
    assert contents(tmp_path) == before


def test_files_keep_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        files = begin(tmp_path)
        modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
        score(tmp_path)
        modes |= {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys((files.partial.name, files.path.name, files.manifest.name), 0o600)


def test_infinities_are_possible_results(tmp_path: Path) -> None:
    pairs = [("a", "z"), *PAIRS]
    output = check_results(str(tmp_path / "r.jsonl"), "--out")
    original = SequenceProbability.score
    made: list[int] = []

    def stopping(self: Any, some: Any, progress: Any = None) -> Any:
        if made:
            raise KeyboardInterrupt
        made.append(1)
        return original(self, some, progress)

    with SequenceProbability("table:successor") as lm:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SequenceProbability, "score", stopping)
            with pytest.raises(KeyboardInterrupt):
                score_to_file(lm, pairs, output)
        assert score_to_file(lm, pairs, output).count == len(pairs)
    first = json.loads(output.path.read_bytes().split(b"\n", 1)[0])
    assert (first["log_prob"], first["prob"], first["perplexity"]) == (None, 0.0, None)
