"""The page of tasks: everything on it is escaped, its numbers are those of the statistics, and it loads nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.errors import InputError
from scoremode.reports.html.page import report
from scoremode.studies.tasks.logs import TaskDocument
from scoremode.studies.tasks.page import FLIPS_SHOWN, render_tasks
from scoremode.studies.tasks.results import TasksComparison, shares
from scoremode.studies.tasks.statistics import PairedTask
from scoremode.studies.tasks.tables import tasks_markdown

BAD = "<script>alert('x')</script> & \"quotes\" \u202e|`"
FACTS = {
    "model": BAD,
    "engine": "table",
    "dtype": "float32",
    "head": "closed-form",
    "versions": {},
    "samples": {BAD: "0" * 64},
}


def made(name: str = "q4", *, documents: int = 60, bad: str = BAD) -> TasksComparison:
    """Documents with two choices each, whose answers are drawn."""
    rng = np.random.default_rng(2)
    asked = [TaskDocument(i, ((bad, " yes"), (bad, f" no {bad}")), (0,)) for i in range(documents)]
    base, cand = (-rng.exponential(2.0, (documents, 2)) for _ in range(2))
    chosen = base.argmax(1), cand.argmax(1)
    right = [(side == 0).astype(float) for side in chosen]
    margins = [side[:, 0] - side[:, 1] for side in (base, cand)]
    task = PairedTask(
        bad, "acc", {"acc": (right[0], right[1])}, margin=(margins[0], margins[1]),
        documents=asked, baseline=list(base), candidate=list(cand), chosen=chosen, shots=0,
    )  # fmt: skip
    settings = {
        "lm_eval": "0", "limit": None, "num_fewshot": {bad: 0}, "apply_chat_template": False,
        "seeds": {"fewshot": 1234},
    }  # fmt: skip
    return TasksComparison(name, bad, (task,), {}, (bad,), FACTS, FACTS, settings, (bad,), {"command": bad})


def test_nothing_on_the_page_is_markup_of_a_file() -> None:
    page = render_tasks([made(BAD)])
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert page.count("<script") == 2  # its data and its own script
    assert "&lt;script&gt;alert" in page


def test_flips_are_listed_with_both_models_choices() -> None:
    found = made(documents=200, bad="plain")
    flips = list(found.flips())
    row = found.overall
    assert len(flips) == row["lost_documents"] + row["gained_documents"]
    assert sum(flip.gained for flip in flips) == row["gained_documents"]
    page = render_tasks([found])
    assert page.count('<article class="flip">') == min(len(flips), FLIPS_SHOWN)
    assert f"{len(flips) - FLIPS_SHOWN} more are not shown" in page
    first = flips[0]
    share = shares(first.baseline)[0]
    assert f"{100 * share:.1f}%" in page
    for flip in flips:
        chose = flip.chosen[1] if flip.gained else flip.chosen[0]
        assert chose == 0  # the right answer
        assert flip.chosen[0] != flip.chosen[1]


def test_model_cards_are_escaped() -> None:
    table = tasks_markdown([made(BAD)])
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert "<script>" not in table.split("Command:")[0]


def test_a_notebook_shows_a_comparison() -> None:
    shown = str(made(bad="plain")._repr_html_())
    assert "recovery" in shown
    assert "lost" in shown


def test_reports_of_tasks_and_of_texts_are_two_pages(tmp_path: Path) -> None:
    found = made()
    assert report(tmp_path / "page.html", found).read_text().startswith("<!doctype html>")
    run = sm.ppl("table:uniform", text="any text")
    with pytest.raises(InputError, match="two reports"):
        report(tmp_path / "other.html", found, run)


def test_a_probability_of_zero_is_shown_as_such() -> None:
    assert np.isnan(shares([-math.inf, -math.inf])).all()
    found = made(bad="plain")
    assert "probability 0" not in render_tasks([found])
    answers = found.tasks[0].baseline
    assert answers is not None
    answers[next(found.flips()).document.number][1] = -math.inf
    assert "probability 0" in render_tasks([found])
