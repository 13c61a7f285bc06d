"""Tables at the widths of common terminals: no line is too wide, and no word, name or quoted token is torn."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.command_line import Command

WIDTHS = (80, 100, 120)
BASELINE, CANDIDATE = "A-Model-Of-72B-Instruct-from-a-folder-with-a-long-name", "A-Model-Of-72B-Instruct-W4A16-G128-v1"
SENTENCE = "The capital of France is Paris, said the teacher; and then he went home quickly.\n"
TEXT = "--corpus texts.jsonl"
VERBS = {
    "ppl": f"ppl {{baseline}} {TEXT}",
    "ppl, one file": "ppl {baseline} --corpus one.txt",
    "ppl, several": f"ppl {{baseline}} {TEXT} --method sliding-once --method mean-of-texts",
    "report": "report run",
    "prob": "prob {baseline} --file pairs.jsonl",
    "plan": f"plan {{baseline}} {TEXT}",
    "noise": f"paths {{baseline}} {TEXT} --vary batch-tokens=64,256 --max-windows 2",
    "compare": f"compare {{baseline}} {{candidate}} {TEXT} --by-depth",
    "paths": f"paths {{baseline}} {TEXT} --sequences 1,4 --max-windows 2",
    "attribute": f"attribute {{baseline}} rtn:4:16 {TEXT}",
    "rollouts": "rollouts {baseline} --prompt France --max-tokens 5 --out rollouts",
    "methods": "info methods",
    "engines": "info engines",
    "info": "info --test --engine table",
    "cache": "cache",
}


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("widths")
    for name in (BASELINE, CANDIDATE):
        shutil.copytree(tiny, made / name)
    rows = [json.dumps({"text": SENTENCE * count}) for count in range(1, 7)]
    (made / "texts.jsonl").write_text("\n".join(rows))
    (made / "one.txt").write_text(SENTENCE * 150)
    pair = {"prompt": "The capital of France is", "targets": [" Paris, the beautiful city of light", " London"]}
    (made / "pairs.jsonl").write_text(json.dumps(pair))
    return made


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_torn(verb: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    typed = VERBS[verb].format(baseline=BASELINE, candidate=CANDIDATE).split()
    if verb == "cache":  # of its own: others keep names in theirs that are longer than a line
        monkeypatch.setenv("SCOREMODE_CACHE", str(folder / "cache"))
        command("ppl", "table:uniform", "--text", "abc abd")
    if verb == "report":
        command("ppl", BASELINE, "--corpus", "texts.jsonl", "--out", "run")

    def printed(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        done = command(*typed)
        assert done.code == 0, done.err
        return done.out

    printed(400)  # what is kept is read back from here on, and said so
    wide = printed(400)
    whole = set(alike(wide).split())
    for width in WIDTHS:
        out = printed(width)
        for line in out.splitlines():
            assert cell_len(line) <= width, line
            assert line == line.rstrip(), repr(line)
        torn = {word for word in alike(out).split() if word not in whole and "…" not in word}
        assert out.count("5 blocks of") == ("one.txt" in typed), out
        assert not torn, out
        for token in re.findall(r"'[^'\n]*' -\d+\.\d+ #\d+", wide):
            assert token in out, token


def alike(text: str) -> str:
    """Ages and times differ from call to call, what is said of left-out columns is new, and a digest is no word."""
    return re.sub(
        r"plan digest\s+\w+(\n\s+\w{1,2}\n)?|\d+ (?=(s|min) ago)|\(\d+\.\d s\)|,(?=\s)"
        r"|(?s:left out at this width:.*?shows\s+them)",
        "",
        text,
    )


def test_without_columns_a_file_has_lines_of_100(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, "", "0", "many"):
        monkeypatch.delenv("COLUMNS", raising=False) if given is None else monkeypatch.setenv("COLUMNS", given)
        out = command("plan", "table:uniform", "--text", "one two " * 30).out
        assert 80 < max(map(len, out.splitlines())) <= 100
