"""A run as a person and a program see it: its first lines, its summary, and manifests with values that cannot be."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scoremode as sm
from scoremode.core.disk.folders import ABOUT, LOCK, SET_IT, entry_folder
from scoremode.core.disk.manifests import sealed
from scoremode.core.scores.parquet import ColumnFile
from scoremode.core.store.resumable import Resumable, lock_folder, require_possible
from scoremode.core.store.runs import MANIFEST, SCORES, Claim, is_run
from scoremode.errors import RunError
from tests.partial_engine import PartialEngine

TEXT = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture
def run(tmp_path: Path) -> sm.Run:
    return sm.ppl("table:uniform", text=TEXT, context_length=32, stride=16, out=tmp_path / "run")


def test_a_repr_has_the_main_numbers_settings_and_folder(run: sm.Run) -> None:
    assert repr(run).splitlines() == [
        "Run of table:uniform on text",
        "perplexity 256.0 ± ?, bits per byte 8.000 ± ?, top1 accuracy 0 ± ?",
        "269 targets by sliding-once (context length 32, stride 16)",
        "table, float64, cpu",
        f"in {run.path}",
    ]


def test_a_summary_has_each_metric_with_its_error_then_how_it_was_made(run: sm.Run) -> None:
    summary = run.summary()
    assert list(summary)[:4] == ["perplexity", "mean_nll", "perplexity_stderr", "mean_nll_stderr"]
    for name, metric in run.manifest["metrics"].items():
        assert (summary[name], summary[f"{name}_stderr"]) == (metric["value"], metric["stderr"])
    assert not {"metrics", "identity", "format", "scores_sha256", "seal"} & set(summary)
    assert (summary["model"], summary["cached"], summary["run"]) == ("table:uniform", False, run.path)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_what_an_engine_did_not_give_is_null_in_the_summary_and_named_where_it_is_wanted() -> None:
    run = sm.ppl("table:uniform", engine=PartialEngine(), text=TEXT)
    summary = run.summary()
    names = ("mean_rank", "top1_accuracy", "mean_entropy")
    assert [summary[name] for name in (*names, *(f"{name}_stderr" for name in names))] == [None] * 6
    with pytest.raises(RunError, match="mean_rank was not measured: the table engine gave no rank"):
        _ = run.mean_rank
    with pytest.raises(RunError, match="top1_accuracy was not measured"):
        _ = run.top1_accuracy
    run = sm.ppl("table:uniform", text="ab")
    assert run.by_slice() == {}
    with pytest.raises(RunError, match="this run has no word_perplexity"):
        _ = run.word_perplexity
    assert "top1 accuracy" not in repr(sm.ppl("table:uniform", engine=PartialEngine(), text=TEXT))


@pytest.mark.parametrize(
    ("field", "possible", "impossible"),
    [
        ("coverage", (0, 1), (-0.01, 1.01)),
        ("targets", (269,), (0, -1, 268, 1 << 63, 2.5)),
        ("windows", (1, 1 << 62), (0, -1, (1 << 62) + 1)),
        ("forward_tokens", (0,), (-1,)),
        ("seconds", (0, 1.5), (-1,)),
        ("tokens_per_second", (0, None), (-1, "fast")),
        ("bits_per_weight", (0, 1024, None), (-1, 1025)),
        ("method_settings", ({"stride": -1, "path": "decode", "on": True},), ({"stride": [1]}, {"path": ""})),
        ("documents", (0,), (-1,)),
        ("scores_sha256", (), ("0" * 63, "0" * 64)),
        ("noise_kl", (None, [0, 0.5]), ([-0.5], 3)),
        ("rerun", (None,), ({"rms": -1, "largest": None, "targets": 1, "words": "x"}, {})),
        ("sizes", ({"body": {"bytes": 0, "weights": 1}},), ({"body": {"bytes": 0, "weights": 0}},)),
        ("by_slice", ({},), ({"a": {"perplexity": 5}},)),
        ("format", (), (1, 3, "2")),
        ("question", (None, {"text": "x"}), ({"made_up": 1}, {"stride": "wide"})),
    ],
)
def test_a_manifest_with_a_value_that_cannot_be_is_refused(
    run: sm.Run, field: str, possible: Any, impossible: Any
) -> None:
    """Also with a seal that fits."""
    path = Path(run.path or "") / MANIFEST
    manifest = json.loads(path.read_text())
    for value in possible:
        path.write_text(json.dumps(sealed({**manifest, field: value})))
        assert sm.load(run.path or "").manifest[field] == value
    for value in impossible:
        path.write_text(json.dumps(sealed({**manifest, field: value})))
        with pytest.raises(RunError):
            sm.load(run.path or "")


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def with_column(run: sm.Run, name: str, values: Any) -> ColumnFile:
    table = run.to_arrow()
    path = Path(run.path or "") / SCORES
    pq.write_table(table.set_column(table.column_names.index(name), name, values), path)
    return ColumnFile(path)


def test_columns_that_no_run_has_are_refused(run: sm.Run) -> None:
    n, path = len(run.scores), f"{run.path}/{SCORES}"
    holes = pa.array([None, *[1.0] * (n - 1)])
    with pytest.raises(RunError, match="its column entropy is null in some rows"):
        with_column(run, "entropy", holes).require_possible()
    with pytest.raises(RunError, match="its column entropy is float"):
        with_column(run, "entropy", pa.array(np.ones(n, np.float32))).require_possible()
    with pytest.raises(RunError, match="rank is 0"):
        with_column(run, "rank", pa.array(np.zeros(n, np.int64))).require_possible()
    nulls = with_column(run, "entropy", pa.nulls(n, pa.float64()))
    nulls.require_possible()
    assert nulls.not_measured == {"entropy", "slice", "kl", "kl_reverse", "total_variation", "same_first"}
    assert nulls.read("entropy") is None
    texts = with_column(run, "text", pa.array(["é"] * n))  # without a dictionary, as other libraries write it
    found = texts.read("text")
    assert found is not None
    assert set(found) == {"é"}
    assert (texts.rows, str(texts.path)) == (n, path)


def test_a_divergence_of_stored_records_may_be_a_little_below_0(tmp_path: Path) -> None:
    sm.reference("table:uniform", tmp_path / "ref", text=TEXT)
    run = sm.compare(str(tmp_path / "ref"), "table:uniform", out=tmp_path / "out")[0].candidate
    with_column(run, "kl", pa.array(np.full(len(run.scores), -0.9))).require_possible()
    with pytest.raises(RunError, match=r"kl is -1\.1"):
        with_column(run, "kl", pa.array(np.full(len(run.scores), -1.1))).require_possible()


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_claim_of_a_finished_run_holds_no_lock_and_one_of_an_unfinished_one_does(run: sm.Run, tmp_path: Path) -> None:
    with Claim(Path(run.path or ""), run.manifest["identity"]) as claim:
        assert claim.finished is not None
        assert claim.finished.cached
        assert not (Path(run.path or "") / LOCK).exists()
    with Claim(tmp_path / "new", {"model": "m"}) as claim:
        assert claim.finished is None
        with pytest.raises(RunError, match=f"another process is scoring into {tmp_path / 'new'}"):
            lock_folder(tmp_path / "new", waits=False)
        with pytest.raises(RunError, match="another process is scoring into its name"):
            lock_folder(tmp_path / "new", waits=False, name="its name")
    lock = lock_folder(tmp_path / "new", waits=False)
    lock.release()
    assert [is_run(run.path or ""), is_run(tmp_path / "new")] == [True, False]


def test_an_entry_of_the_cache_says_what_it_will_be_until_it_is_finished() -> None:
    identity = {"model": "m"}
    folder, named = entry_folder("runs", identity), "a name"
    with Claim(folder, identity) as claim:
        claim.begin({"model": named})
        assert json.loads((folder / ABOUT).read_text()) == {"model": named}
        assert {path.name for path in folder.iterdir()} == {ABOUT, LOCK, "partial.journal"}
    made = sm.ppl("table:uniform", text=TEXT + "cached")
    assert {path.name for path in Path(made.path or "").iterdir()} == {MANIFEST, SCORES}
    os.utime(Path(made.path or "") / MANIFEST, (1, 1))
    assert sm.ppl("table:uniform", text=TEXT + "cached").cached
    assert (Path(made.path or "") / MANIFEST).stat().st_mtime > 1, "it was used"


def test_a_folder_of_the_user_has_no_such_note(tmp_path: Path) -> None:
    with Claim(tmp_path / "run", {"model": "m"}) as claim:
        claim.begin({"model": "a name"})
        assert {path.name for path in (tmp_path / "run").iterdir()} == {LOCK, "partial.journal"}


def test_a_finished_run_whose_journal_a_kill_left_is_read_and_tidied(run: sm.Run) -> None:
    folder = Path(run.path or "")
    other = Claim(folder.parent / "other", run.manifest["identity"])
    with other as claim:
        claim.begin()
        os.rename(claim.folder / "partial.journal", folder / "partial.journal")
    with Claim(folder, run.manifest["identity"]) as claim:
        assert claim.finished is not None
    assert {path.name for path in folder.iterdir()} == {MANIFEST, SCORES}


def test_columns_that_a_kill_left_beside_the_journal_are_discarded_and_its_scores_stay(
    run: sm.Run, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    for number in range(2):
        with Claim(folder, {"model": "m"}) as claim:
            claim.begin()
            assert sorted(path.name for path in folder.iterdir()) == [LOCK, "partial.journal"]
            journal = claim.open_journal()
            assert len(list(journal.replay())) == number
            journal.append(number, b"scores")
            shutil.copy(Path(run.path or "") / SCORES, folder / SCORES)


def test_a_copy_of_a_run_has_its_scores_and_an_identity_of_its_own(run: sm.Run, tmp_path: Path) -> None:
    identity = {**run.manifest["identity"], "engine": "another"}
    with Claim(tmp_path / "copy", identity) as claim:
        copy = claim.copy(run, "command", "question")
    loaded = sm.load(tmp_path / "copy")
    assert np.array_equal(loaded.scores.logprob, run.scores.logprob)
    assert (loaded.manifest["identity"], copy.path) == (identity, str(tmp_path / "copy"))
    assert set(run.manifest) - set(loaded.manifest) == {"command", "question"} & set(run.manifest)
    assert (run.plan_digest, run.perplexity) == (loaded.plan_digest, loaded.perplexity)


def test_a_cache_whose_file_system_has_no_locks_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(*_: object) -> None:
        asked.append(_)
        assert len(asked) < 3, "it asks again and again"
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match="cannot be locked"):
        sm.ppl("table:uniform", text=TEXT + "without locks")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="file is a file"):
        require_possible(tmp_path / "file")
    with pytest.raises(RunError, match="cannot be created") as refused:
        lock_folder(tmp_path / "file" / "folder", waits=False)
    assert refused.value.fix == "give another --out"
    assert SET_IT not in str(refused.value)
    require_possible(tmp_path / "absent")


def test_infinite_numbers_are_null_on_disk_and_infinite_again_in_memory(tmp_path: Path) -> None:
    run = sm.ppl("table:successor", text="abd", out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / MANIFEST).read_text())["metrics"]["perplexity"]["value"] is None
    assert sm.load(tmp_path / "run").perplexity.value == run.perplexity.value == math.inf
    assert run.summary()["perplexity"] is None
    assert "1 target has probability zero" in run.manifest["notes"]


# ── results of other kinds ───────────────────────────────────────────────────────────────────────────────────────────
class SumForm(msgspec.Struct):
    format: Literal[1]
    identity: dict[str, str]
    total: int


class Sum(Resumable[int]):
    """A result that keeps its journal, because terms may be added later."""

    what, other = "a sum", "another sum (it differs in: {})"
    manifest, journal, form, format = "sum.json", "partial.sum", SumForm, 1
    header: ClassVar[dict[str, str]] = {"for": "sum"}
    keeps_journal = True

    def _open(self, manifest: Mapping[str, Any]) -> int:
        return int(manifest["total"])


def test_a_result_that_keeps_its_journal_is_locked_while_it_is_read_and_may_grow(tmp_path: Path) -> None:
    folder = tmp_path / "sum"
    for term in range(3):
        with Sum(folder, {"of": "terms"}) as result:
            assert result.finished == (None if term == 0 else term - 1)
            with pytest.raises(RunError, match="another process"):
                lock_folder(folder, waits=False)
            result.begin()
            journal = result.open_journal()
            assert len(list(journal.replay())) == term
            journal.append(term, b"a term")
            result.finish({"format": 1, "identity": result.identity, "total": term})
        assert {path.name for path in folder.iterdir()} == {"sum.json", "partial.sum"}
    with pytest.raises(RunError, match=r"contains another sum \(it differs in: of\)"), Sum(folder, {"of": "others"}):
        pass
    with Sum(folder, {"of": "others"}, fresh=True) as result:
        assert result.finished is None
        result.begin()
        assert {path.name for path in folder.iterdir()} == {LOCK, "partial.sum"}
        assert list(result.open_journal().replay()) == []
