"""An engine that gives only some columns, from its answers to the gate: the others are not measured, anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scoremode as sm
from scoremode.core.disk.records import HEAD
from scoremode.core.engine import registry
from scoremode.core.engine.base import SCORES as ONLY_SCORES
from scoremode.core.engine.base import Wanted
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.core.scores.journal import COLUMNS_ARE
from scoremode.core.scores.parquet import ColumnFile
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.runs import JOURNAL, MANIFEST, SCORES
from scoremode.core.verbs.baselines import of_runs
from scoremode.errors import EngineError, RunError
from scoremode.reports.comparisons import summary
from scoremode.reports.gate import check, parse
from scoremode.reports.html.page import RESULTS, render
from scoremode.reports.model_card import markdown
from scoremode.reports.runs import run_blocks, sequence_blocks
from scoremode.studies.kld.statistics import llamacpp_statistics, llamacpp_text
from scoremode.values import Bools
from tests.partial_engine import ALL, LOGITS, SUBSETS, PartialEngine, named
from tests.reports.test_table import drawn

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
COLUMNS = BUILT_IN.names
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 32, "stride": 16}
NEEDS = {"mean_rank": "rank", "top1_accuracy": "rank", "mean_entropy": "entropy"}
every_subset = pytest.mark.parametrize("columns", SUBSETS, ids=named)

Using = Callable[[PartialEngine], None]


@pytest.fixture
def using(monkeypatch: pytest.MonkeyPatch) -> Using:
    """Makes every verb open this engine, whatever it asks for."""

    def use(engine: PartialEngine) -> None:
        monkeypatch.setattr(registry, "open_engine", lambda *_, **__: engine)

    return use


def scored(out: Path, *columns: str, **more: Any) -> sm.Run:
    return sm.ppl("table:uniform", engine=PartialEngine(*columns, **more), out=out, **QUESTION)


def printed(parts: Sequence[Any]) -> str:
    return drawn(parts, width=140)


def line_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(label))


# ── the journal ──────────────────────────────────────────────────────────────────────────────────────────────────────
@every_subset
@pytest.mark.parametrize("torn", [0, 11])
def test_an_interrupted_run_resumes_to_the_same_numbers(
    tmp_path: Path, using: Using, columns: tuple[str, ...], torn: int
) -> None:
    """Its journal names its columns, and an engine that gives others does not resume it."""
    using(PartialEngine(*columns, windows=4))
    with pytest.raises(KeyboardInterrupt):
        sm.ppl("table:uniform", out=tmp_path / "run", **QUESTION)
    journal = tmp_path / "run" / JOURNAL
    first = journal.read_bytes().partition(b"\n")[2]
    _, number, length, _ = HEAD.unpack_from(first)
    assert number == COLUMNS_ARE
    assert json.loads(first[HEAD.size : HEAD.size + length]) == ["logprob", *columns]
    journal.write_bytes(journal.read_bytes()[: -torn or None])
    if not torn:  # a torn end is cut off
        before = journal.read_bytes()
        using(PartialEngine(*(("rank",) if columns != ("rank",) else ())))
        with pytest.raises(RunError, match="for each target, but the engine now gives logprob"):
            sm.ppl("table:uniform", out=tmp_path / "run", **QUESTION)
        assert journal.read_bytes() == before
    using(PartialEngine(*columns))
    resumed = sm.ppl("table:uniform", out=tmp_path / "run", **QUESTION)
    whole = scored(tmp_path / "whole", *columns)
    assert resumed.to_arrow().equals(whole.to_arrow())
    assert resumed.manifest["metrics"] == whole.manifest["metrics"]


# ── what an engine may not do ────────────────────────────────────────────────────────────────────────────────────────
class Changing(PartialEngine):
    """Answers that ``change`` has changed, by the number of the window."""

    def __init__(self, change: Callable[[int, Answers], Answers]) -> None:
        super().__init__(*ALL)
        self.change = change

    def score(self, source: WindowSource, done: Bools, want: Wanted = ONLY_SCORES) -> Iterator[tuple[int, Answers]]:
        for index, answers in super().score(source, done, want):
            yield index, self.change(index, answers)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda i, a: replace(a, rank=None) if i == 2 else a, "window 2 has logprob, entropy, top and top_logprob"),
        (lambda i, a: replace(a, entropy=None) if i < 2 else a, "window 2 has .*, and windows before it have logprob"),
        (lambda i, a: replace(a, rank=a.rank[:-1]), r"window 0 asked for .* values of rank and got \(30, 1\)"),
    ],
)
def test_columns_that_come_and_go_or_have_a_wrong_shape_are_refused(change: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        sm.ppl("table:uniform", engine=Changing(change), **QUESTION)


# ── a finished run ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module", params=SUBSETS, ids=named)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], sm.Run]:
    """Columns, and a run that has these alone."""
    return request.param, scored(tmp_path_factory.mktemp("some") / "run", *request.param)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> sm.Run:
    return scored(tmp_path_factory.mktemp("all") / "run", *ALL)


Given = tuple[tuple[str, ...], sm.Run]


def test_a_run_has_the_columns_that_were_measured_and_none_in_place_of_others(given: Given, full: sm.Run) -> None:
    columns, run = given
    for scores in (sm.load(str(run.path)).scores, replace(run.scores)):
        assert [name for name in COLUMNS if scores.has(name)] == ["logprob", *columns]
        for name in COLUMNS:
            found, known = getattr(scores, name), getattr(full.scores, name)
            assert found is None or np.array_equal(found, known)
            assert (found is None) == (name not in ("logprob", *columns))
    table, every = (pq.read_table(Path(str(one.path)) / SCORES) for one in (run, full))
    assert table.schema.equals(every.schema)


def test_summary_and_manifest_say_what_was_not_measured(given: Given) -> None:
    columns, run = given
    summary = json.loads(json.dumps(run.summary()))
    for metric, column in NEEDS.items():
        assert (summary[metric] is not None) == (column in columns), metric
        assert f"{metric}_stderr" in summary
    assert summary["perplexity"] > 1
    manifest = json.loads((Path(str(run.path)) / MANIFEST).read_text())
    assert manifest.get("not_measured", []) == [name for name in ALL if name not in columns]
    assert ("not_measured" in manifest) == (columns != ALL)
    assert set(NEEDS) & manifest["metrics"].keys() == {name for name, column in NEEDS.items() if column in columns}


@pytest.mark.parametrize("name", [*ALL, "top_text", "logprob", "id"])
def test_a_column_that_is_null_in_some_rows_is_refused(full: sm.Run, tmp_path: Path, name: str) -> None:
    table = full.to_arrow()
    values = [None, *table.column(name).to_pylist()[1:]]
    index, field = table.column_names.index(name), table.schema.field(name)
    column = pa.array(values, type=pa.string() if name == "top_text" else field.type)
    changed = table.set_column(index, name, column.dictionary_encode() if name == "top_text" else column)
    pq.write_table(changed, tmp_path / "torn.parquet")
    with pytest.raises(RunError, match=f"its column {name} is null in"):
        ColumnFile(tmp_path / "torn.parquet").read(name)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_table_and_a_notebook_say_not_measured(given: Given) -> None:
    columns, run = given
    shown = printed(run_blocks(run))
    for label, column in (("mean rank", "rank"), ("top-1 accuracy", "rank"), ("entropy (nats)", "entropy")):
        assert ("not measured" in line_of(shown, label)) == (column not in columns), label
    assert "nan" not in shown
    assert "None" not in shown
    assert (RESULTS.table(run) or "").count("not measured") == sum(column not in columns for column in NEEDS.values())


def test_the_report_shows_nothing_that_was_not_measured(given: Given) -> None:
    columns, run = given
    page = render([], runs=[run])
    data = json.loads(page.split('id="scoremode-data">')[1].split("</script>")[0])
    (scores,) = data["scores"]
    assert (scores["rank"] is None) == ("rank" not in columns)
    assert (scores["topWord"] is None) == (scores["topLogprob"] is None) == ("top" not in columns)
    labels = [("mean rank", "rank"), ("entropy", "entropy"), ("first choices", "top")]
    missing = [label for label, column in labels if column not in columns]
    for label in missing:
        assert label in page[page.index('class="note"') :]
    assert ("not measured." in page) == bool(missing)


# ── comparisons ──────────────────────────────────────────────────────────────────────────────────────────────────────
def compared(folder: Path, baseline: tuple[str, ...], candidate: tuple[str, ...]) -> Comparison:
    scored(folder / "baseline", *baseline)
    scored(folder / "candidate", *candidate, logits=LOGITS[:, ::-1])
    return of_runs(str(folder / "baseline"), [str(folder / "candidate")])[0]


@every_subset
def test_a_comparison_lacks_the_same_top_alone_where_a_run_has_no_first_choices(
    tmp_path: Path, columns: tuple[str, ...]
) -> None:
    every = compared(tmp_path / "all", ALL, ALL).statistics()
    others = {name: value for name, value in every.items() if "same_top" not in name}
    for side, (base, cand) in {"baseline": (columns, ALL), "candidate": (ALL, columns)}.items():
        found = compared(tmp_path / side, base, cand).statistics()
        for part in ("", "_stderr", "_low", "_high"):
            assert found[f"same_top{part}"] is None or "top" in columns
        assert (found["same_top"] is not None) == ("top" in columns)
        assert {name: value for name, value in found.items() if "same_top" not in name} == others


def test_the_comparison_table_says_not_measured_and_why(tmp_path: Path) -> None:
    found = compared(tmp_path, ("rank",), ("rank",))
    shown = printed(summary([found]).blocks())
    assert line_of(shown, "candidate").endswith("  not measured")
    assert "same top: not measured (no first choices from the baseline and candidate)" in shown


def test_gates_ranks_cards_and_pages_say_that_there_is_no_same_top(tmp_path: Path) -> None:
    found = compared(tmp_path / "unknown", ALL, ("rank",))
    statistics = found.statistics()
    for rule in ("same_top < 0.5", "same_top > 0.5", "same_top < 0.5 surely", "same_top_low < 0.1"):
        said = check(parse(rule), statistics) or ""
        assert said.endswith("is not known: the first choices (top) of a run were not measured"), rule
    card = markdown([found])
    assert card.splitlines()[3].endswith("| not measured |")
    assert "Same top: not measured (no first choices from candidate)." in card
    assert "Same top: not measured (no first choices from candidate)." in render([found])
    assert "not measured" in (RESULTS.table(found) or "")
    theirs = llamacpp_statistics(found)
    assert "same_top" not in theirs
    assert "Same top p: not measured" in llamacpp_text(theirs)


@every_subset
def test_models_that_are_compared_may_lack_columns(tmp_path: Path, using: Using, columns: tuple[str, ...]) -> None:
    using(PartialEngine(*columns))
    sm.reference("table:uniform", tmp_path / "ref", **QUESTION)
    (beside,) = sm.compare("table:uniform", "table:uniform", out=tmp_path / "beside", **QUESTION)
    assert beside.statistics()["kl_max"] < 1e-12
    assert [name for name in COLUMNS if beside.baseline.scores.has(name)] == ["logprob", *columns]
    using(PartialEngine(*columns, logits=LOGITS[:, ::-1]))
    (found,) = sm.compare(str(tmp_path / "ref"), "table:uniform", out=tmp_path)
    assert found.statistics()["kl_mean"] > 0
    assert (found.statistics()["same_top"] is None) == ("top" not in columns)


def test_an_engine_that_gives_no_divergence_is_refused(tmp_path: Path, using: Using) -> None:
    using(PartialEngine())
    sm.reference("table:uniform", tmp_path / "ref", **QUESTION)
    using(Changing(lambda i, a: replace(a, kl=None)))
    with pytest.raises(EngineError, match="window 0 has no divergence"):
        sm.compare(str(tmp_path / "ref"), "table:uniform", out=tmp_path)


# ── noise and prob ───────────────────────────────────────────────────────────────────────────────────────────────────
@every_subset
def test_noise_needs_logprobs_alone(using: Using, columns: tuple[str, ...]) -> None:
    using(PartialEngine(*columns))
    (found,) = sm.noise("table:uniform", **QUESTION).settings
    assert found.repeats is not None
    assert found.repeats.max == 0.0
    assert found.perplexity > 1


def test_ranks_of_tokens_are_null_and_not_in_the_table_where_they_were_not_measured() -> None:
    for columns in ((), ALL):
        found = sm.prob("table:uniform", prompt="ab", targets=["cd"], engine=PartialEngine(*columns))
        assert [token.rank is None for token in found[0].tokens] == ["rank" not in columns] * 2
        shown = printed(sequence_blocks(found))
        assert ("#" in shown, "rank not measured" in shown) == ("rank" in columns, "rank" not in columns)
