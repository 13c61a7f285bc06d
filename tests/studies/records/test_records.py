"""Records: the same on every machine, grouped by proof, and harmless whoever wrote them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import scoremode as sm
from scoremode.cli.main import main
from scoremode.core.disk.manifests import is_sealed, sealed
from scoremode.studies.records.reading import blocks, distinct_names, facts, group_notes, group_table, grouped, read
from tests.command_line import Command, Refused

BASE, CANDIDATE = "table:uniform", "table:successor"
TIMES = {"written", "seconds", "seal"}
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 4

MLX_KLD = {
    "schema_version": 1,
    "teacher": {"path": "models/base-bf16", "revision": None, "precision": "bfloat16", "tokenizer_hash": "79" * 32},
    "student": {"path": "models/base-4bit", "format": "mlx-affine", "size_bytes": 10**9, "effective_bpw": 4.7},
    "calibration": {
        **{"corpus": "org/text:raw", "num_samples": 512, "max_seq_len": 512, "seed": 123, "top_k": 32768},
        **{"score_window": [256, 512], "corpus_tokens_hash": "3862684d4e318b3b"},
    },
    "kld": {"se": 0.0008, "floor_mean": 0.0018, "mean": 0.057},
    "agreement": {"top1": 0.9, "top5": 0.99},
    "tokens_scored": 131072,
    "scorer_version": "mlx-kld 0.1.0",
    "kld_histogram": {"bin_edges": [0.0, 10.0, float("inf")], "counts": [1, 2]},
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A record of two tables."""
    folder = tmp_path_factory.mktemp("made")
    words = ["compare", "table:uniform", "table:successor", "--text", "abcabd" * 9, "--records", str(folder), "--json"]
    assert main(words) == 0
    found: dict[str, Any] = json.loads(next(folder.iterdir()).read_text())
    return found


Write = Callable[..., Path]


@pytest.fixture
def written(record: dict[str, Any], tmp_path: Path) -> Write:
    """``written("a", name="q4")``: a file with a record, sealed anew with other fields."""

    def write(stem: str, **fields: Any) -> Path:
        path = tmp_path / f"{stem}.json"
        path.write_text(json.dumps(sealed({**record, **fields})))
        return path

    return write


# ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_records_of_two_machines_are_equal_but_for_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two homes with folders and caches of their own; the models are copies."""
    texts = []
    for user in ("alice", "bob smith"):
        home = tmp_path / user
        home.mkdir()
        (home / "story.txt").write_text(STORY)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("SCOREMODE_CACHE", str(home / "cache"))
        monkeypatch.setattr("sys.argv", ["scoremode", "compare", BASE, CANDIDATE, "--corpus", str(home / "story.txt")])
        sm.compare(BASE, CANDIDATE, corpus=home / "story.txt", out=home / "runs")
        text = (home / "runs" / CANDIDATE / "record.json").read_text()
        assert [word for word in (user, str(tmp_path)) if word in text] == []
        assert is_sealed(json.loads(text))
        texts.append(re.sub(rf'"({"|".join(sorted(TIMES))})": .*', r'"\1"', text))
    assert texts[0] == texts[1]


def test_every_comparison_leaves_its_record(tmp_path: Path, command: Command) -> None:
    runs = tmp_path / "runs"
    compared = sm.compare(BASE, CANDIDATE, text="abcabd" * 9, out=runs, records=tmp_path / "copies", max_windows=0)
    beside = (runs / CANDIDATE / "record.json").read_text()
    assert (tmp_path / "copies" / "table_successor.json").read_text() == beside
    asked = f"scoremode compare {BASE} {CANDIDATE} --text {'abcabd' * 9} --max-windows 0"
    assert json.loads(beside)["command"] == compared[0].manifest["command"] == asked
    with sm.open(BASE) as base, sm.open(CANDIDATE) as candidate:
        candidate.compare(base, text="abcabd", out=tmp_path / "asked")
    assert (tmp_path / "asked" / CANDIDATE / "record.json").exists()
    (runs / CANDIDATE / "record.json").write_text("mine")
    told = command("compare", BASE, CANDIDATE, "--text", "abcabd" * 9, "--max-windows", 0, "--out", runs)
    assert (told.code, told.out) == (2, "")
    assert "is not a record of scoremode" in told.err
    assert (runs / CANDIDATE / "record.json").read_text() == "mine"


def test_a_record_is_there_before_anything_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with contextlib.suppress(BrokenPipeError, SystemExit):
        main(["compare", BASE, CANDIDATE, "--text", "abcabd", "--out", str(tmp_path / "runs")])
    assert (tmp_path / "runs" / CANDIDATE / "record.json").exists()


def test_what_compare_writes_report_reads(tmp_path: Path, command: Command) -> None:
    text = "abc /home/me/x " * 160
    assert command("compare", BASE, CANDIDATE, "--text", text, "--records", tmp_path).code == 0
    (group,) = command("report", tmp_path, "--json").json["groups"]
    assert len(group["records"]) == 1
    written = next(tmp_path.iterdir()).read_text()
    assert "…" in json.loads(written)["command"]
    assert "/home" not in written


def test_finished_runs_have_the_same_record(command: Command, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert command("compare", BASE, CANDIDATE, "--text", "abcabd" * 9, "--out", runs).code == 0
    made = command("compare", runs / "baseline", runs / CANDIDATE, "--records", tmp_path / "left", "--json")
    assert made.code == 0, made.err
    assert command("card", runs, "--dialect", "json", "--out", tmp_path / "card").code == 0
    first, *others = (
        json.loads(path.read_text())
        for path in (runs / CANDIDATE / "record.json", *tmp_path.glob("left/*"), *tmp_path.glob("card/*"))
    )
    assert len(others) == 2
    for other in others:
        assert {name for name in first if first[name] != other[name]} <= {"written", "seal"}


def test_a_file_that_is_no_record_is_not_replaced(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "successor.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    compare = ("compare", "table:uniform", "table:successor", "--text", "abcabd", "--markdown", "--records")
    assert "is a file" in refused(*compare, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_groups_are_made_by_proof(written: Write, record: dict[str, Any]) -> None:
    names = [
        written("q4", name="q4", statistics={**record["statistics"], "kl_mean": 0.2}),
        written("q8", name="q8", statistics={**record["statistics"], "kl_mean": 0.1}),
        written("text", corpus_sha256="ab" * 32, plan_digest="cd" * 32),
        written("plan", plan_digest="ef" * 32),
        written("other", baseline_sha256="another", name="q4"),
        written("dtype", baseline_dtype="float16"),
        written("flash", baseline_settings={"flash_attn": "on", "n_ubatch": 16}),
        written("cache", baseline_served={**record["baseline_served"], "kv_cache": "k q4_0 v f16"}),
        written("words", vocabulary="another"),
        written("device", baseline_device="cuda:0"),
    ]
    found = grouped(read(list(map(str, names))))
    assert [[one.its.name for one in group.records] for group in found.groups[:1]] == [["q8", "q4", CANDIDATE]]
    assert "device cpu, cuda:0" in group_notes(found.groups[0])[1].text
    assert [group.apart.partition(": ")[2] for group in found.groups] == [
        *("", "another text", "another plan", "another baseline"),
        "another baseline's dtype (float16, not float64)",
        "another baseline's head (none, not closed-form), another baseline's flash_attn (on, not none), "
        "another baseline's n_ubatch (16, not none)",
        "another baseline's K/V cache (k q4_0 v f16, not none)",
        "another vocabulary",
    ]


def test_a_row_has_the_dtype_of_its_candidate(written: Write, command: Command) -> None:
    """One file in two dtypes: two rows that differ. The baseline's dtype is in the heading alone."""
    files = [written(dtype, dtype=dtype, format="safetensors float32", engine="table") for dtype in ("float32", "bf16")]
    (group,) = grouped(read(list(map(str, files)))).groups
    shown = [cell.text for cell in group_table(group).columns[0].cells if cell is not None]
    assert shown == [f"safetensors float32, table, dtype {dtype}" for dtype in ("float32", "bf16")]
    assert "(table float64)" in command("report", *files).out.splitlines()[0]


def test_equal_names_have_their_files(written: Write) -> None:
    first, other = written("first"), written("other", command="another")
    (group,) = grouped(read([str(first), str(other)])).groups
    assert distinct_names(group.records) == [f"table:successor ({file})" for file in (first, other)]


def test_a_record_that_was_changed_is_shown_as_such(written: Write, command: Command, tmp_path: Path) -> None:
    honest, edited = written("honest"), written("edited", name="too-good")
    better = json.loads(edited.read_text())
    better["statistics"]["kl_mean"] = 0.001
    edited.write_text(json.dumps(better))
    told = command("report", honest, edited)
    assert told.code == 0
    assert "too-good" in told.out
    assert "changed after they were written" in " ".join(told.out.split())
    assert command("report", honest, edited, "--json").json["changed"] == [str(edited)]
    page = Path(sm.report(tmp_path / "page.html", honest, edited)).read_text()
    assert "Changed by hand" in page
    assert page.count('<a href="edited.json">') == 1, "it is in the list, not in a chart or a table"


def test_records_of_mlx_kld_are_marked_as_theirs(written: Write, command: Command, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps(MLX_KLD))
    told = command("report", written("ours"), theirs, "--json").json["groups"]
    assert [group["records"][0]["by"].split()[0] for group in told] == ["scoremode", "mlx-kld"]
    said = " ".join(command("report", theirs).out.split())
    assert "KL over the 32,768 likeliest ids" in said
    assert "floor (0.0018 nats)" in said
    theirs.write_text(json.dumps({**MLX_KLD, "kld": {"mean": float("nan")}}))
    assert command("report", theirs).code == 2


# ── records from anybody ─────────────────────────────────────────────────────────────────────────────────────────────
HOSTILE = '"><script>alert(1)</script>\x1b[2J\u202e'


def test_what_a_record_says_is_escaped(written: Write, command: Command, tmp_path: Path) -> None:
    path = written("javascript:alert(1)", name=HOSTILE, corpus=HOSTILE, baseline=HOSTILE, command=HOSTILE)
    shown = command("report", path)
    assert shown.code == 0
    assert "\x1b[2J" not in shown.out
    page = Path(sm.report(tmp_path / "page.html", path)).read_text()
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert 'href="javascript%3Aalert%281%29.json"' in page


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"record": 2}, "is not a record of version 1; give records of this version's"),
        ({"name": 5}, "no usable name"),
        ({"statistics": {"kl_mean": "low"}}, "no usable statistics"),
        ({"statistics": []}, "no usable statistics"),
        ({"baseline_settings": {"n_ubatch": [16]}}, "no usable baseline_settings"),
        ({"bits_per_weight": -1}, "no usable bits_per_weight"),
        ({"weight_bytes": 1 << 80}, "no usable weight_bytes"),
        ({"corpus_sha256": "x"}, "no usable corpus_sha256"),
        ({"baseline_served": None}, "no usable baseline_served"),
        ({"name": "n" * 20_000}, "no usable name"),
        ({"baseline": "n" * 20_000}, "no usable baseline"),
        ({"sentence": "n" * 200_000}, "no usable sentence"),
        ({"settings": {"n" * 2000: 1}}, "no usable settings"),
        ({"versions": {f"n{i}": "1" for i in range(1000)}}, "no usable versions"),
        ({"bits_per_weight": 5e-324}, "no usable bits_per_weight"),
        ({"statistics": {"same_top": 1e308}}, "no usable statistics"),
        ({"statistics": {"same_top": -1e308}}, "no usable statistics"),
    ],
)
def test_what_no_record_says_is_refused(fields: dict[str, Any], says: str, written: Write, refused: Refused) -> None:
    for more in ([], ["-o", "page.html"]):
        assert says in refused("report", written("bad", **fields), *more)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not JSON", "is not a record"),
        ("{}", "is not a record"),
        ('{"record": 1, "name": NaN}', "no usable name"),
        ('{"schema_version": 1, "teacher": {}}', "is not a record"),
    ],
)
def test_a_file_that_is_no_record_is_refused(text: str, says: str, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert says in refused("report", path)


def test_records_and_runs_do_not_share_a_page(refused: Refused, written: Write, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert "two reports" in refused("report", tmp_path / "run", written("a"))
    assert "not a file" in refused("report", tmp_path / "missing.json")


def test_links_lead_from_the_page_to_the_records(written: Write, tmp_path: Path, command: Command) -> None:
    path = written("a b#1")
    (tmp_path / "site").mkdir()
    assert command("report", path, "--output", tmp_path / "site" / "page.html").code == 0
    page = (tmp_path / "site" / "page.html").read_text()
    assert 'href="../a%20b%231.json"' in page
    assert "paint-order: stroke" in page, "names stay legible on the front"
    assert "or records" in command("report", "--help").out


@pytest.mark.parametrize("number", [5e-324, -5e-324, 1e-300, 1e300, -1e300, 0, 1 << 62, None])
def test_numbers_at_the_ends_of_their_ranges_are_shown(
    number: float | None, record: dict[str, Any], written: Write, tmp_path: Path, command: Command
) -> None:
    numbers = {name: None if value is None else number for name, value in record["statistics"].items()}
    size = abs(number or 0)
    numbers |= {
        "targets": 100,
        "kl_mean": number,
        "kl_mean_stderr": size,
        "ppl_ratio": number,
        "ppl_ratio_stderr": size,
    }
    sizes = {"bits_per_weight": 0.001, "weight_bytes": int(size) if size < 1 << 63 else 1 << 62}
    names = [written("a", statistics=numbers, **sizes), written("b", name="x" * 1000, weight_bytes=1 << 62)]
    for more in ([], ["--json"], ["-o", tmp_path / "page.html"]):
        told = command("report", *names, *more)
        assert (told.code, told.err) == (0, ""), more
    page = (tmp_path / "page.html").read_text()
    assert "nan" not in page.partition("<main>")[2].partition("<footer>")[0].lower().replace("instance", "")


@pytest.mark.parametrize("version", [2, "1", [], None, 1.5])
def test_other_schemas_of_mlx_kld_are_refused(version: object, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "a.json").write_text(json.dumps(MLX_KLD | {"schema_version": version}))
    assert "mlx-kld's schema 1 (no usable schema_version)" in refused("report", tmp_path / "a.json")


def test_a_name_that_is_not_utf8_is_linked(written: Write, tmp_path: Path, command: Command) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9\xff.json")
    written("a").rename(odd)
    for more in ([], ["--json"], ["-o", tmp_path / "page.html"]):
        assert command("report", odd, odd, *more).code == 0, more
    assert 'href="caf%E9%FF.json"' in (tmp_path / "page.html").read_text()


def test_many_groups_are_compared_with_the_largest_alone(written: Write, command: Command) -> None:
    first = read([str(written("a"))])[0]
    many = [first._replace(must_agree={**first.must_agree, "baseline": str(i)}) for i in range(3000)]
    begin = time.process_time()
    found = grouped([*many[:1], *many])
    assert time.process_time() - begin < 2
    assert len(found.groups) == 3000
    assert {group.apart for group in found.groups[1:]} == {"not comparable with group 1: another baseline"}
    shown = blocks(found)
    assert "2,950 smaller groups are only in a page (-o) or in --json" in str(shown[-1])
    assert len(facts(found)["groups"]) == 3000
