"""A file or folder that a user made is never replaced: every verb that writes, every file it makes, with --fresh too.

The verbs and their flags are those of the parser, so a new flag that names a file fails here until it has a command.
Each command is run once into a clean folder to see what it makes. Then a user's own file takes the place of each.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scoremode.cli.commands import build_parser
from scoremode.cli.parser import WRITTEN
from scoremode.core.disk import folders
from scoremode.reports.card import MARKERS
from tests.hostile.cases import Case
from tests.hostile.harness import run, snapshot
from tests.makers import make_tiny_model
from tests.studies.tasks.logs import drawn, write_log

READ = {"adapter", "path", "tokenizer", "file", "include_path", "prompts"}  # flags that name what is read
PATHS = ("FILE", "DIR", "FOLDER", "PREFIX", "PATH", "JSONL")  # in the metavar of a flag
TEXT = "--text abcdefabcdefabcdef"
SWAP = f"attribute {{model}} rtn:8:16 {TEXT} --dtype float32 --context-length 4"
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
OTHER_WRITERS = {"compare --report, rollouts": "compare rollouts:{rollouts} table:uniform --report {out}/x.html"}
JOURNALS = (folders.JOURNAL, folders.PARTIAL_TEXTS, folders.ROWS)  # gone when a command has ended


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
    import scoremode as sm

    folder = tmp_path_factory.mktemp("inputs")
    sm.compare("table:uniform", "table:successor", text="abcdefabcdefabcdef", out=folder / "runs")
    sm.rollouts("table:uniform", ["ab"], temperature=1, max_tokens=2, out=folder / "rollouts")
    model = make_tiny_model(folder / "model", adds_bos=False)
    log = write_log(folder / "log", drawn(1))
    return {"runs": folder / "runs", "rollouts": folder / "rollouts", "model": model, "log": log}


def test_every_flag_that_writes_has_a_command() -> None:
    assert sorted(flags_that_write()) == sorted(COMMANDS)


@pytest.mark.parametrize("flag", COMMANDS | OTHER_WRITERS)
def test_a_users_own_file_is_never_replaced(flag: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    verb = flag.split(maxsplit=1)[0]
    out = tmp_path / "out"
    words = shlex.split((COMMANDS | OTHER_WRITERS)[flag].format(out=out, **inputs))
    out.mkdir()
    if flag == "card --write":
        (out / "README.md").write_text("\n".join(MARKERS))
    done = run(Case("outputs", flag, ()), words)
    assert done.code == 0, done.err
    made = [path.relative_to(out) for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert made, "the command wrote nothing"
    own = {path.parent for path in made} - {Path()}  # folders of ours, which have journals while they are written
    made += [folder / name for folder in own for name in JOURNALS if verb != "card" and flag != "compare --records"]
    may_be_fresh = "--fresh" in build_parser().verbs()[verb].flags() and flag not in OTHER_WRITERS
    for path in made:
        for more in ([], ["--fresh"]) if may_be_fresh else ([],):
            _refuses(out, path, [*words, *more])


def _refuses(out: Path, path: Path, words: list[str]) -> None:
    """A user's own file lies where scoremode would write, and stays as it is."""
    shutil.rmtree(out)
    (out / path).parent.mkdir(parents=True)
    (out / path).write_text("mine\n")
    before = snapshot(out)
    done = run(Case("outputs", "", ()), words)
    after = snapshot(out)
    assert {name: after.get(name) for name in before} == before, (words, path)
    if path.name in JOURNALS and done.code == 0:
        return  # another kind of folder than this file's: the file is only left alone
    assert done.code == 2, (words, path, done)
    assert "--fresh" not in done.err.splitlines()[-1], done.err
    assert path.name in done.err, done.err
