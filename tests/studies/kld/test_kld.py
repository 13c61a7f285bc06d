"""Comparing with a file of base logits, and writing one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.base import SCORES, Wanted
from scoremode.core.extensions import FormatOffer, offered
from scoremode.core.scores.answers import Answers, measured
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.verbs.reference import FileArguments
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, InputError, RunError
from scoremode.reports.comparisons import comparison_json
from scoremode.reports.model_card import markdown
from scoremode.reports.text import model_notes
from scoremode.studies.kld.file import KldFile
from scoremode.studies.kld.statistics import llamacpp_statistics
from scoremode.values import Floats
from tests.studies.kld.kld_files import kl_longhand, log_p, random_logits, record, write_file

TEXT = "The quick brown fox jumps over the lazy dog — naïve 東京, and the dog does not mind. " * 6
CONTEXT = 32
LINES = random_logits(256, 256, seed=4, size=5.0)  # a table: the logits after each byte
OTHER = LINES + random_logits(256, 256, seed=5, size=0.3)


def table_file(path: Path, lines: Any = LINES, text: str = TEXT) -> Path:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return write_file(path, tokens, 256, lambda chunk, row: lines[tokens[chunk * CONTEXT + row]], CONTEXT)


def kl_of(comparison: Comparison) -> Floats:
    assert comparison.kl is not None
    return comparison.kl


def compared(path: Path, lines: Any, **more: Any) -> Comparison:
    with sm.open("table:uniform", engine=TableEngine(lines.astype(np.float64))) as model:
        return model.compare(path, **more)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_kl_of_every_target_is_that_of_the_longhand(tmp_path: Path) -> None:
    path = table_file(tmp_path / "base.kld")
    found = compared(path, OTHER)
    tokens = KldFile(path).tokens
    at = 0
    for chunk, ids in enumerate(tokens):
        for i, row in enumerate(range(CONTEXT // 2, CONTEXT - 1)):
            stored, codes = log_p(path, chunk, i)
            assert kl_of(found)[at] == pytest.approx(kl_longhand(stored, OTHER[ids[row]]), rel=1e-9, abs=1e-12)
            assert found.baseline.scores.logprob[at] == pytest.approx(stored[ids[row + 1]], abs=1e-12)
            assert measured(found.baseline.scores.top)[at] == codes.index(max(codes))
            assert found.candidate.facts.id[at] == ids[row + 1]
            at += 1
    assert at == len(kl_of(found)) > 100


def test_a_model_against_its_own_file_may_be_negative_and_says_why(tmp_path: Path) -> None:
    found = compared(table_file(tmp_path / "base.kld"), LINES)
    assert kl_of(found).min() < 0 < kl_of(found).max()
    assert abs(kl_of(found)).max() < 1e-4
    least = llamacpp_statistics(found)["kld_min"]
    assert least is not None
    assert least < 0
    notes = found.baseline.manifest["model_notes"]
    assert any("16-bit baseline" in note for note in notes)
    assert any("slightly negative" in note for note in notes)
    assert all(f"baseline: {note}" in found.candidate.manifest["notes"] for note in notes), "stored with the candidate"
    assert found.baseline.scores.rank is None
    assert found.baseline.scores.entropy is None
    assert found.statistics()["same_top"] == 1.0


def test_candidates_by_name_resume_and_are_found_again(tmp_path: Path, tiny: Path) -> None:
    path = written(tiny, tmp_path / "base.kld")
    out = tmp_path / "out"
    (first,) = sm.compare(str(path), str(tiny), out=out, dtype="bfloat16")
    (again,) = sm.compare(str(path), str(tiny), out=out, dtype="bfloat16")
    assert not first.candidate.cached
    assert again.candidate.cached
    assert again.baseline.cached
    assert np.array_equal(kl_of(first), kl_of(again))
    assert (out / "baseline" / "manifest.json").exists()
    runs = sm.compare(str(out / "baseline"), str(out / tiny.name))[0]
    assert np.array_equal(kl_of(runs), kl_of(first)), "finished runs still know their divergence"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1  # the last code: another baseline, to which these runs do not belong
    path.write_bytes(bytes(data))
    with pytest.raises(RunError, match="another run"):
        sm.compare(str(path), str(tiny), out=out, dtype="bfloat16")


def test_several_candidates_and_their_report(tmp_path: Path) -> None:
    path = table_file(tmp_path / "base.kld")
    found = sm.compare(str(path), "table:uniform", "table:successor")
    assert [c.name for c in found] == ["table:uniform", "table:successor"]
    assert found[1].statistics()["kl_infinite"] == len(kl_of(found[1]))
    page = sm.report(tmp_path / "report.html", *found).read_text()
    assert ": 16-bit baseline" in page, "in the note below the table, not only in the provenance"
    assert "16-bit baseline" in markdown(found)
    assert "16-bit" in " ".join(comparison_json(found)["baseline_notes"])


def test_bos_is_read_in_front_of_each_chunk(tmp_path: Path, tiny_bos: Path) -> None:
    path = written(tiny_bos, tmp_path / "base.kld")
    file = KldFile(path)
    (found,) = sm.compare(str(path), str(tiny_bos))
    assert abs(kl_of(found)).max() < 1e-4, "the same model, which read BOS in both cases"
    assert int(file.tokens[0, 0]) == 0
    assert (file.tokens[1:, 0] != 0).any(), "the tokens as tokenized: BOS is not stored where it was only read"
    without = np.array(file.tokens)
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, 20, int(without[0, 1]))
    (tmp_path / "no-bos.kld").write_bytes(bytes(data))
    with pytest.raises(InputError, match="puts BOS"):
        sm.compare(str(tmp_path / "no-bos.kld"), str(tiny_bos))


def test_a_bos_that_only_the_file_has_is_noted(tmp_path: Path, tiny: Path, tiny_bos: Path) -> None:
    path = written(tiny_bos, tmp_path / "base.kld")
    (found,) = sm.compare(str(path), str(tiny))  # the same weights, but a tokenizer that adds no BOS
    assert any("begins with BOS" in note for note in found.candidate.manifest["notes"])
    assert any("begins with BOS" in note for note in model_notes(found.baseline)), "and is printed"
    assert abs(kl_of(found)).max() > 1e-3, "and it matters"


def test_an_interrupted_comparison_goes_on(tmp_path: Path, tiny: Path) -> None:
    path = written(tiny, tmp_path / "base.kld")
    whole = sm.compare(str(path), str(tiny), out=tmp_path / "whole", dtype="bfloat16", batch_tokens=64)[0]

    def stop(done: int, total: int) -> None:
        if 3 * CONTEXT < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sm.compare(str(path), str(tiny), out=tmp_path / "out", dtype="bfloat16", batch_tokens=64, progress=stop)
    found = sm.compare(str(path), str(tiny), out=tmp_path / "out", dtype="bfloat16", batch_tokens=64)[0]
    assert np.array_equal(kl_of(found), kl_of(whole))
    assert found.baseline.manifest["model_notes"] == whole.baseline.manifest["model_notes"]


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def written(model: Path | str, path: Path, **more: Any) -> Path:
    sm.reference(str(model), kld=path, text=TEXT, context_length=CONTEXT, **more)
    return path


def test_a_table_writes_the_longhand_byte_for_byte(tmp_path: Path) -> None:
    with sm.open("table:uniform", engine=TableEngine(LINES.astype(np.float64))) as model:
        run = model.reference(kld=tmp_path / "ours.kld", text=TEXT, method="llamacpp", context_length=CONTEXT)
        logp = TableEngine(LINES.astype(np.float64)).logprobs.astype(np.float32)
    assert (tmp_path / "ours.kld").read_bytes() == table_file(tmp_path / "theirs.kld", logp).read_bytes()
    assert run.path is None
    assert run.manifest["method"] == "llamacpp"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours.kld", "theirs.kld"], "nothing is left beside it"


@pytest.mark.parametrize("head", [None, "as-served"])
def test_a_model_writes_the_distributions_of_its_logits(tmp_path: Path, tiny: Path, head: str | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    file = KldFile(written(tiny, tmp_path / "ours.kld", dtype="float32", head=head))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(file.tokens[2].astype(np.int64))[None]).logits[0].numpy()
    for i, row in enumerate(range(CONTEXT // 2, CONTEXT - 1)):
        (scale, lowest), theirs = struct.unpack_from("<ff", record(logits[row])), record(logits[row])
        ours = file.records(2)[i]
        floats = np.ascontiguousarray(ours[:4]).view("<f4")
        assert floats.tolist() == pytest.approx([scale, lowest], rel=1e-5)
        codes = np.frombuffer(theirs, "<u2")[4:].astype(int)
        assert abs(ours[4:].astype(int) - codes).max() <= 2, "float noise moves a code by a step or two"


def test_only_an_older_kld_file_is_replaced(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"text": TEXT, "context_length": CONTEXT}
    path, link = tmp_path / "there.kld", tmp_path / "link.kld"
    sm.reference("table:uniform", kld=path, **asked)
    with pytest.raises(InputError, match=r"exists; .* --fresh"):
        sm.reference("table:uniform", kld=path, **asked)
    link.symlink_to(path)
    before = path.stat().st_ino
    with pytest.raises(InputError, match="about another model or question"):
        sm.reference("table:uniform", kld=link, fresh=True, text=TEXT[::-1], context_length=CONTEXT)
    assert path.stat().st_ino == before
    sm.reference("table:uniform", kld=link, fresh=True, **asked)
    assert path.stat().st_ino != before
    assert link.is_symlink()


def test_killed_after_its_file_is_complete_the_same_command_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"kld": tmp_path / "x.kld", "text": TEXT, "context_length": CONTEXT}

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("scoremode.studies.kld.writing.remove_files", "scoremode.core.verbs.scoring.UnfinishedRun.save"):
        with monkeypatch.context() as patched:
            patched.setattr(place, killed)
            with pytest.raises(KeyboardInterrupt):
                sm.reference("table:uniform", **asked)
        written = (tmp_path / "x.kld").read_bytes()
        assert sm.reference("table:uniform", **asked).perplexity.value == pytest.approx(256)
        assert [p.name for p in tmp_path.iterdir()] == ["x.kld"]
        assert (tmp_path / "x.kld").read_bytes() == written
        (tmp_path / "x.kld").unlink()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_foreign_folder_beside_the_file_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    folder = tmp_path / ".x.kld.scoremode"
    sm.ppl("table:uniform", text=TEXT, out=folder)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="another run"):
        sm.reference("table:uniform", kld=tmp_path / "x.kld", text=TEXT, context_length=CONTEXT, fresh=fresh)
    assert sm.load(folder).scores.logprob.size
    assert (folder / "thesis.txt").read_text() == "mine"


def test_an_engine_without_distributions_is_told_so(tmp_path: Path) -> None:
    class Plain(TableEngine):
        def score(self, source: Any, done: Any, want: Wanted = SCORES) -> Any:
            for index, answers in super().score(source, done):
                yield index, Answers(answers.logprob)

    with (
        sm.open("table:uniform", engine=Plain(LINES.astype(np.float64))) as model,
        pytest.raises(EngineError, match="no distributions"),
    ):
        model.reference(kld=tmp_path / "x.kld", text=TEXT, method="llamacpp", context_length=CONTEXT)
    assert not (tmp_path / "x.kld").exists()


def test_an_interrupted_writer_goes_on_to_the_same_bytes(tmp_path: Path, tiny: Path) -> None:
    whole, path = written(tiny, tmp_path / "whole.kld", batch_tokens=64), tmp_path / "stopped.kld"

    def stop(done: int, total: int) -> None:
        if 3 * CONTEXT < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(tiny, path, batch_tokens=64, progress=stop)
    assert not path.exists(), "nothing that looks complete"
    assert (tmp_path / ".stopped.kld.scoremode" / "partial.journal").stat().st_size > 0
    assert written(tiny, path, batch_tokens=64).read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stopped.kld", "whole.kld"]


def test_type_checkers_know_the_files_that_wings_write() -> None:
    assert set(FileArguments.__annotations__) == {kind.name for kind in offered(FormatOffer) if kind.reference}
