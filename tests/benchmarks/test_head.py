"""The benchmark of the head runs anywhere, on a shape that takes no time, and says what it measured."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.benchmarks.conftest import load

TINY = ("--device", "cpu", "--rows", "70", "--repeats", "2")


@pytest.fixture(scope="module")
def printed() -> tuple[dict[str, Any], str]:
    options = ("--shapes", "32:1500", "--only", "naive,liger,scoremode,scoremode KL", "--json", "-")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        assert load("head").main([*TINY, *options]) == 0
    return json.loads(out.getvalue()), err.getvalue()


def test_the_document_says_where_and_how_it_was_measured(printed: tuple[dict[str, Any], str]) -> None:
    document, _ = printed
    assert document["hardware"]
    assert document["versions"].keys() >= {"torch", "triton", "liger-kernel", "cut-cross-entropy"}
    assert (document["dtype"], document["hidden_rows"]) == ("float32", 70)


def test_a_row_for_each_implementation_that_runs(printed: tuple[dict[str, Any], str]) -> None:
    rows = {row["implementation"]: row for row in printed[0]["rows"]}
    assert list(rows) == ["matmul", "naive", "scoremode", "scoremode KL"]
    for row in rows.values():
        assert row["shape"] == "D32 V1500"
        assert row["milliseconds"] > 0
        assert row["peak_mib"] >= 0
        assert row["columns"]
        assert row["x_matmul"] == pytest.approx(row["milliseconds"] / rows["matmul"]["milliseconds"])
    assert rows["matmul"]["max_error"] is None
    assert rows["naive"]["max_error"] < 1e-4
    assert rows["scoremode"]["max_error"] < 1e-4
    assert rows["scoremode KL"]["max_error"] < 1e-6


def test_what_cannot_run_is_skipped_with_its_reason(printed: tuple[dict[str, Any], str]) -> None:
    document, table = printed
    assert document["skipped"] == [
        {"implementation": "liger", "shape": "D32 V1500", "reason": "its kernels need a GPU"}
    ]
    assert "skipped: its kernels need a GPU" in table


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(SystemExit, match="nonsense is not known"):
        load("head").main([*TINY, "--only", "nonsense"])


def test_a_plot_is_drawn_from_a_saved_document(tmp_path: Path) -> None:
    middle = {"rows": 512, "vocabulary": 49152, "width": 576}
    points = [
        {"axis": axis, **middle, axis: middle[axis] * factor, "matmul_ms": 1.5 * factor, "scoremode_ms": 1.8 * factor}
        for axis in middle
        for factor in (1, 2, 4)
    ]
    document = {"hardware": "a <machine>", "versions": {"torch": "2.13"}, "dtype": "float32", "scaling": points}
    saved, drawn = tmp_path / "head.json", tmp_path / "head.svg"
    saved.write_text(json.dumps(document), encoding="utf-8")
    assert load("head").main(["--from", str(saved), "--plot", str(drawn)]) == 0
    picture = ElementTree.fromstring(drawn.read_text(encoding="utf-8"))
    assert len(picture.findall(".//{*}circle")) == 2 * len(points) + 2  # two marks a point, two in the legend
    words = [x.text for x in picture.findall(".//{*}text")]
    assert "scoremode" in words
    assert "a <machine>, torch 2.13, float32" in words
