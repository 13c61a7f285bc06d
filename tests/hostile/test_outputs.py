"""What a user made is never replaced: every verb that writes, every file it makes, with --fresh too.

The verbs and their flags are those of the parser, so a new flag that names a file fails here until it has a command.
Each command is run once into a clean folder to see what it makes. Then something of the user's takes the place of each:
a file, one in which our words occur, a folder, a link, a FIFO, a result of another question, a read-only folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.cli.commands import build_parser
from scoremode.core.disk import folders
from scoremode.core.verbs.outputs import Output
from scoremode.errors import CandidatesError, RunError
from scoremode.reports.card import MARKERS
from scoremode.studies.rollouts.texts import PARTIAL_TEXTS
from tests.hostile.cases import WRITTEN, Case
from tests.hostile.harness import Outcome, run, snapshot
from tests.makers import make_tiny_model
from tests.studies.tasks.logs import drawn, write_log

READ = {"adapter", "path", "tokenizer", "file", "include_path", "prompts"}  # flags that name what is read
PATHS = ("FILE", "DIR", "FOLDER", "PREFIX", "PATH", "JSONL")  # in the metavar of a flag
TEXT = "--text abcdefabcdefabcdef"
SWAP = f"attribute {{model}} rtn:8:16 {TEXT} --dtype float32 --context-length 4"
EVALUATION = "--dialect eval-results --benchmark a/b --task-id c --metric same_top"
COMMANDS = {
    "ppl --out": f"ppl table:uniform {TEXT} --out {{out}}/x",
    "prob --out": "prob table:uniform --prompt a --target b --out {out}/x.jsonl",
    "rollouts --out": "rollouts table:uniform --prompt ab --max-tokens 2 --out {out}/x",
    "compare --out": f"compare table:uniform table:successor {TEXT} --out {{out}}/x",
    "compare --records": f"compare table:uniform table:successor {TEXT} --records {{out}}/x",
    "compare --report": f"compare table:uniform table:successor {TEXT} --report {{out}}/x.html",
    "paths --out": f"paths table:uniform {TEXT} --out {{out}}/x",
    "paths --report": f"paths table:uniform {TEXT} --report {{out}}/x.html",
    "attribute --out": f"{SWAP} --out {{out}}/x",
    "attribute --report": f"{SWAP} --report {{out}}/x.html",
    "attribute --write-recipe": f"{SWAP} --bits-budget 24 --write-recipe {{out}}/x",
    "tasks --report": "tasks {log} {log} --report {out}/x.html",
    "reference --out": f"reference table:uniform {TEXT} --out {{out}}/x",
    "reference --kld": f"reference table:uniform {TEXT} --context-length 4 --kld {{out}}/x.kld",
    "report --output": "report {runs}/baseline --output {out}/x.html",
    "card --out": "card {runs} --dialect json --out {out}/x",
    "card --write": "card {runs} --write {out}/README.md",
}
OTHER_WRITERS = {
    "compare --report, rollouts": "compare rollouts:{rollouts} table:uniform --report {out}/x.html",
    "card --out, eval-results": f"card {{runs}} {EVALUATION} --out {{out}}/x",
    "report --output, records": "report {records} --output {out}/x.html",
}
BESIDE = {"compare --records", "card --out", "card --out, eval-results"}  # names of ours: another result is kept
OTHERS = {"runs": "others", "records": "notes", "rollouts": "other rollouts", "log": "other log"}  # other questions
JOURNALS = (folders.JOURNAL, PARTIAL_TEXTS, folders.ROWS)  # gone when a command has ended


def flags_that_write() -> Iterator[str]:
    for name, parser in build_parser().verbs().items():
        for action in parser._actions:
            if not action.option_strings or action.metavar is None:
                continue
            if action.dest in WRITTEN:
                yield f"{name} {action.option_strings[-1]}"
            elif any(word in str(action.metavar).upper() for word in PATHS):
                assert action.dest in READ, f"{name} {action.option_strings[-1]} names a file: is it read or written?"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    sm.compare("table:uniform", "table:successor", text="abcdefabcdefabcdef", out=folder / "runs")
    sm.rollouts("table:uniform", ["ab"], temperature=1, max_tokens=2, out=folder / "rollouts")
    sm.compare("table:uniform", "table:successor", text="another text", out=folder / "others", records=folder / "notes")
    sm.compare("table:uniform", "table:successor", text="abcdefabcdefabcdef", records=folder / "records")
    sm.rollouts("table:uniform", ["cd"], temperature=1, max_tokens=2, out=folder / "other rollouts")
    make_tiny_model(folder / "model", adds_bos=False)
    for number, name in ((1, "log"), (2, "other log")):
        write_log(folder / name, drawn(number))
    names = ("runs", "rollouts", "records", "model", "log", "others", "notes", "other rollouts", "other log")
    return {name: folder / name for name in names}


def test_every_flag_that_writes_has_a_command() -> None:
    assert sorted(flags_that_write()) == sorted(COMMANDS)


MARKED = {
    ".json": {"scoremode": "0.1.0", "record": 1, "format": 2, "identity": {"model": "m"}, "seal": "ab" * 32},
    ".jsonl": {"prompt": "a", "target": "b", "log_prob": -1.0, "prob": 0.1, "note": "mine"},
    ".html": '<!doctype html>\n<meta name="generator" content="scoremode 0">\n<!-- scoremode: about 00, seal 00 -->',
    ".yaml": "- notes: mine; scoremode 0.1.0\n# scoremode: about 00, seal 00",
    ".kld": "_logits_ mine",
    ".parquet": "PAR1 mine PAR1",
}


def own_file(path: Path) -> None:
    path.write_text("mine\n")


def own_file_with_our_words(path: Path) -> None:
    words = MARKED.get(path.suffix, '{"for": "rollouts", "format": 3, "identity": "scm2"}\nscm2 mine')
    path.write_text(f"{words if isinstance(words, str) else json.dumps(words)}\n")


def own_folder(path: Path) -> None:
    path.mkdir()
    own_file(path / "thesis.txt")


def link_to_own_file(path: Path) -> None:
    own_file(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


THINGS = (own_file, own_file_with_our_words, own_folder, link_to_own_file, link_to_nothing, os.mkfifo)


def words_of(flag: str, out: Path, inputs: dict[str, Path]) -> list[str]:
    return shlex.split((COMMANDS | OTHER_WRITERS)[flag].format(out=out, **inputs))


def run_within(seconds: int, words: list[str]) -> Outcome:
    """What the command does; a test that hangs fails."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"it hangs: {words}"))
    signal.alarm(seconds)
    try:
        return run(Case("outputs", "", ()), words)
    finally:
        signal.alarm(0)


def prepared(flag: str, out: Path) -> None:
    """A clean folder, with what a command needs to write."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if flag == "card --write":
        (out / "README.md").write_text("\n".join(MARKERS))


@pytest.mark.parametrize("flag", COMMANDS | OTHER_WRITERS)
def test_what_is_the_users_is_never_replaced(flag: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    verb, out = flag.split(maxsplit=1)[0], tmp_path / "out"
    words = words_of(flag, out, inputs)
    prepared(flag, out)
    done = run_within(100, words)
    assert done.code == 0, done.err
    made = [
        path.relative_to(out) for path in out.rglob("*") if path.is_file() and not path.name.startswith(".scoremode")
    ]
    assert made, "the command wrote nothing"
    own = {path.parent for path in made} - {Path(), Path("x/.eval_results")}  # ours, with journals while it is written
    made += [folder / name for folder in own for name in JOURNALS if verb != "card" and flag != "compare --records"]
    may_be_fresh = "--fresh" in build_parser().verbs()[verb].flags() and flag not in OTHER_WRITERS
    if flag == "attribute --write-recipe":
        made = sorted(made)[:1]  # a second each, because a recipe is known when it is measured
    for path, thing in product(made, THINGS):
        if not may_be_fresh or thing is own_file:
            _keeps(out, path, thing, words)
        if may_be_fresh:
            _keeps(out, path, thing, [*words, "--fresh"])


def _keeps(out: Path, path: Path, thing: Callable[[Path], None], words: list[str]) -> None:
    """Something of the user's lies where scoremode would write, and stays as it is."""
    shutil.rmtree(out)
    (out / path).parent.mkdir(parents=True)
    thing(out / path)
    before = snapshot(out)
    done = run_within(30, words)
    after = snapshot(out)
    assert {name: after.get(name) for name in before} == before, (words, path, thing)
    if done.code == 0 and (path.name in JOURNALS or thing is link_to_nothing):
        return  # another kind of folder than this file's; or the link stays, and its target is made
    assert done.code == 2, (words, path, thing, done)
    assert len(done.err.splitlines()) == 1 or done.out, done.err
    assert "--fresh" not in done.err.splitlines()[-1], done.err
    assert path.name in done.err or "elsewhere" in done.err, done.err


@pytest.mark.parametrize(
    "flag", [f for f in COMMANDS | OTHER_WRITERS if f not in ("card --write", "attribute --write-recipe")]
)
def test_a_result_of_another_question_is_never_replaced(flag: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    words = words_of(flag, tmp_path, inputs)
    swapped = {str(inputs[name]): str(inputs[other]) for name, other in OTHERS.items()} | {"ab": "cd", "a": "c"}
    others = [swapped.get(word, word.replace("abcdefabcdef", "ghijklghijkl")) for word in words]
    others = [word.replace(f"rollouts:{inputs['rollouts']}", f"rollouts:{inputs['other rollouts']}") for word in others]
    assert run_within(100, [word.replace(str(inputs["runs"]), str(inputs["others"])) for word in others]).code == 0
    before = snapshot(tmp_path)
    done = run_within(100, words)
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before
    if flag in BESIDE:
        assert (done.code, len(after)) == (0, len(before) + 1)
        assert "stays; beside it" in done.err
        assert run_within(100, words).code == 0
        assert len(snapshot(tmp_path)) == len(after), "the same is replaced"
    else:
        assert done.code == 2, done
        assert done.err.splitlines()[-1].startswith("scoremode: ")


@pytest.mark.parametrize("flag", [flag for flag in COMMANDS if flag != "card --write"])
def test_a_folder_that_cannot_be_written_is_one_line(flag: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    read_only = tmp_path if os.geteuid() else Path("/sys")  # root's only such folder
    done = run_within(100, words_of(flag, read_only, inputs))
    assert (done.code, done.out) == (2, ""), done
    assert len(done.err.splitlines()) == 1, done.err


# ── comparisons ──────────────────────────────────────────────────────────────────────────────────────────────────────
COMPARE = ["compare", "table:uniform", "table:successor", "--text", "abcdefabcdefabcdef"]


def test_candidates_whose_files_would_have_one_name_have_two(tmp_path: Path) -> None:
    for number, name in enumerate(("base", "a b", "a_b")):
        sm.ppl(
            ("table:uniform", "table:successor", "table:uniform")[number], text="abcabc", out=tmp_path / "runs" / name
        )
    words = ["compare", *(str(tmp_path / "runs" / name) for name in ("base", "a b", "a_b"))]
    for order in (words, [*words[:2], *words[:1:-1]]):
        assert run_within(30, [*order, "--records", str(tmp_path / "records")]).code == 0
    records = [json.loads(path.read_text())["name"] for path in (tmp_path / "records").iterdir()]
    assert sorted(records) == ["a b", "a_b"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_if_a_record_cannot_be_written_after_all_the_table_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    def put(output: Output, data: bytes) -> None:
        raise RunError(f"{output.name} cannot be written (No space left on device)", fix="give another file")

    monkeypatch.setattr("scoremode.core.verbs.outputs.Output.write", put)
    done = run_within(30, [*COMPARE, "--records", str(tmp_path / "records"), *more])
    assert done.code == 2
    assert "table:successor" in done.out
    assert done.err.splitlines()[-1].endswith("cannot be written (No space left on device); give another file")
    with pytest.raises(CandidatesError, match="the comparison is finished, but") as caught:
        sm.compare("table:uniform", "table:successor", text="abc", records=tmp_path)
    assert [c.name for c in caught.value.found.values()] == ["table:successor"]


def test_if_all_candidates_fail_none_is_said_to_be_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    words = ["compare", "table:uniform", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), "--text", "abc"]
    done = run_within(30, [*words, "--json"])
    assert done.code == 2
    told = json.loads(done.out)
    assert (told["candidates"], len(told["failed"])) == ([], 2)
    assert "kept" not in done.err


def test_unfinished_files_of_others_stay(tmp_path: Path) -> None:
    """``.scoremode-x.tmp`` is nobody's business; ours has 16 digits."""
    own_file(tmp_path / ".scoremode-mine.tmp")
    own_file(tmp_path / ".scoremode-0123456789abcdef.tmp")
    for fresh in (False, True):
        sm.ppl("table:uniform", text="abc", out=tmp_path, fresh=fresh)
    assert {path.name for path in tmp_path.glob(".*")} == {".scoremode-mine.tmp"}


def test_the_folder_of_an_unfinished_kld_file_keeps_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".x.kld.scoremode").mkdir()
    own_file(tmp_path / ".x.kld.scoremode" / ".thesis")
    sm.reference("table:uniform", kld=tmp_path / "x.kld", text="abcdefabcdefabcdef", context_length=4)
    assert [path.name for path in (tmp_path / ".x.kld.scoremode").iterdir()] == [".thesis"]
