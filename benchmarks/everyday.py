"""Everyday mistakes and everyday commands: how long each takes, in wall time and CPU time of a fresh process.

python benchmarks/everyday.py --json after.json                    this checkout
python benchmarks/everyday.py --source OTHER --json before.json    another checkout, with this Python and its libraries
python benchmarks/everyday.py --table before.json after.json       both, as a Markdown table

Every row is one command line. Before the first, each checkout scores once what later rows read from the cache, so
bytecode is compiled and the embedded model is made. CPU time includes children, and means more than wall time on a
machine that does other work. A row "without PACKAGE" runs with a copy of this environment that lacks the package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

TEXT = "The quick brown fox jumps over the lazy dog."
QUESTION = "--corpus python-docs --num-samples 3 --document-tokens 200 --context-length 128 --stride 128"
MODEL, OWN = "smollm2-135m", "{folder}/own-class"  # OWN: the same weights, and a tokenizer of a class of its own
SAY = f"--text '{TEXT}'"

MISTAKES = (
    f"ppl {MODEL} --method gpt {SAY}",
    f"ppl {OWN} --method gpt {SAY}",
    f"ppl {MODEL}",
    f"ppl {OWN} --corpus nofile.txt",
    f"ppl {MODEL} --corpus wikitex2",
    f"ppl {OWN} --dtype fp17 {SAY}",
    f"ppl {MODEL} --metod gptq {SAY}",
    f"pl {MODEL} {SAY}",
    "ppl",
    f"ppl smolm2-135m {SAY}",
    f"ppl no/such/folder {SAY}",
    f"ppl {MODEL} --engine vlm {SAY}",
    f"ppl {MODEL} --engine llamacpp {SAY}",
    f"ppl {OWN} --text ''",
    f"ppl {OWN} {SAY} --corpus python-docs",
    f"ppl {OWN} --corpus python-docs --num-samples 0",
    f"ppl {MODEL} --context-length abc {SAY}",
    f"ppl {MODEL} --device gpu {SAY}",
    f"ppl {MODEL} --tensor-parallel-size 2 {SAY}",
    f"ppl {OWN} --corpus {{folder}}/rows.jsonl --field body",
    f"ppl {OWN} --corpus {{folder}}/empty.txt",
    f"ppl {OWN} --corpus '{{folder}}/*.md'",
    f"ppl {OWN} --head exakt {SAY}",
    f"ppl missing.gguf {SAY}",
    f"compare {MODEL}",
    f"compare {MODEL} {OWN}",
    f"compare {MODEL} {OWN} {SAY} --fail-if 'kl_men > 1'",
    f"compare {MODEL} nothing {SAY}",
    f"tasks {MODEL} {OWN} --tasks arc_esy",
    "report nothing",
    "report nothing -o page.html",
    f"prob {OWN} --prompt Hello",
    f"without vllm: ppl {OWN} --engine vllm {SAY}",
    f"without xllamacpp: ppl {{gguf}} {SAY}",
    f"without ray: ppl {OWN} --replicas 2 {SAY}",
    f"without datasets: ppl {OWN} --dataset imdb",
    f"ppl org/none {SAY}",
    f"ppl {OWN} --dataset org/none",
    f"ppl {OWN} --corpus s3://none/a.txt",
    f"ppl {OWN} --corpus hf://datasets/org/none/a.txt",
)
COMMANDS = (
    "--version",
    "--help",
    "ppl --help",
    "info methods",
    "info methods gptq",
    "info engines",
    "cache",
    f"plan table:uniform {SAY}",
    f"plan {MODEL} {SAY}",
    f"plan {MODEL} --corpus python-docs",
    f"plan {OWN} --corpus python-docs --num-samples 3",
    f"plan {OWN} --dtype bfloat16 {QUESTION} --json",
    f"plan {{gguf}} {SAY}",
    f"ppl {MODEL} {QUESTION}",
    f"ppl {OWN} {QUESTION} --json",
    "report {folder}/run",
    "compare {folder}/run {folder}/other",
    "report {folder}/run {folder}/other -o {folder}/page.html",
    f"ppl table:uniform {SAY}",
    f"prob {MODEL} --prompt 'The capital of France is' --target ' Paris'",
)
PREPARATION = (
    f"ppl {MODEL} {QUESTION}",
    f"ppl {OWN} {QUESTION}",
    f"ppl {MODEL} {QUESTION} --out {{folder}}/run",
    f"ppl {OWN} {QUESTION} --out {{folder}}/other",
    f"tasks table:uniform {MODEL} --tasks nothing",
)


@dataclass(frozen=True)
class Measured:
    """One command line, what it took and how it ended."""

    words: str
    seconds: float
    cpu_seconds: float
    code: int
    lines: int  # on standard error
    last: str  # line of standard error, or of standard output


class Place:
    """A temporary folder with the cache and the files that the command lines name."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.source = folder, source
        (folder / "rows.jsonl").write_text('{"text": "one row"}\n')
        (folder / "empty.txt").write_text("")
        from scoremode.core.models.embedded import embedded_gguf, embedded_model

        self.gguf = embedded_gguf()
        if (folder / "own-class").exists():  # made by an earlier measurement
            return
        model = embedded_model()
        shutil.copytree(model, folder / "cache" / "models" / model.name, copy_function=_linked)
        own = folder / "own-class"
        own.mkdir()
        for path in model.iterdir():
            if path.name not in ("tokenizer_config.json", "scoremode.json"):
                (own / path.name).symlink_to(path)
        about = json.loads((model / "tokenizer_config.json").read_text())
        (own / "tokenizer_config.json").write_text(json.dumps(about | {"tokenizer_class": "GPT2Tokenizer"}))

    def measure(self, words: str) -> Measured:
        """Runs a command line in a fresh process."""
        line, lacking = words, ""
        if words.startswith("without "):
            lacking, line = words.removeprefix("without ").split(": ", 1)
        arguments = shlex.split(line.format(folder=self.folder, gguf=self.gguf))
        python, paths = sys.executable, [str(self.source / "src")]
        if lacking:
            python = getattr(sys, "_base_executable", sys.executable)
            paths.append(str(self._without(lacking)))
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": os.pathsep.join(paths),
            "SCOREMODE_CACHE": str(self.folder / "cache"),
        }
        command = [python, "-m", "scoremode", *arguments]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began = time.perf_counter()
            child = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=self.folder)
            _, status, used = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - began
            child.returncode = os.waitstatus_to_exitcode(status)
            said, shown = (_lines(file) for file in (err, out))
        last = next((text.strip() for text in reversed(said or shown) if text.strip()), "")
        cpu = used.ru_utime + used.ru_stime
        return Measured(words, seconds, cpu, child.returncode, len(said), last.replace(str(self.folder), "…")[:160])

    def _without(self, package: str) -> Path:
        """A folder with links to all installed packages but one."""
        folder = self.folder / f"without-{package}"
        if not folder.exists():
            folder.mkdir()
            for path in Path(sysconfig.get_path("purelib")).iterdir():
                if not path.name.lower().replace("-", "_").startswith(package):
                    (folder / path.name).symlink_to(path)
        return folder


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()


def _linked(source: str, target: str) -> None:
    """Links a file, or copies it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def measure_all(place: Place, only: str, json_file: Path | None, *, prepared: bool, after: int) -> None:
    found = []
    for words in PREPARATION if prepared else ():
        print(f"{place.measure(words).seconds:8.2f} s  to prepare: {words}", flush=True)
    rows = [*((words, "mistake") for words in MISTAKES), *((words, "command") for words in COMMANDS)]
    for words, kind in rows[after:]:
        if only not in words:
            continue
        one = place.measure(words)
        found.append({"kind": kind, **asdict(one)})
        print(f"{one.seconds:8.2f} s {one.cpu_seconds:8.2f} CPU s  exit {one.code}  {words}", flush=True)
        print(f"{'':24}{one.lines} lines on stderr; {one.last}", flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1, ensure_ascii=False))
    for kind in ("mistake", "command"):
        times = sorted(row["cpu_seconds"] for row in found if row["kind"] == kind)
        if times:
            middle = times[len(times) // 2]
            print(f"{len(times)} {kind}s: {middle:.2f} CPU s in the middle, {times[-1]:.2f} at most")


def machine() -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers"))
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {libraries}"


def print_table(before: Path, after: Path) -> None:
    """Prints two measurements as one Markdown table."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    earlier = {row["words"]: row for row in old["rows"]}
    for kind in ("mistake", "command"):
        print(f"| {kind} | wall before | after | CPU s before | after | it says |")
        print("|---|--:|--:|--:|--:|---|")
        for row in new["rows"]:
            if row["kind"] == kind:
                both = (earlier.get(row["words"], {}), row)
                figures = [one.get(name) for name in ("seconds", "cpu_seconds") for one in both]
                times = " | ".join("not measured" if figure is None else f"{figure:.2f}" for figure in figures)
                said = row["last"].removeprefix("scoremode: ").replace("|", "\\|") if kind == "mistake" else ""
                print(f"| `{row['words'].replace('|', '')}` | {times} | {said} |")
        print()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="the checkout to measure")
    parser.add_argument("--only", default="", help="only command lines that contain this")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="leave out the first N command lines")
    parser.add_argument("--folder", type=Path, help="an existing folder for cache and files, which stays there")
    parser.add_argument("--unprepared", action="store_true", help="score nothing first")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--table", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="print two files as a table")
    given = parser.parse_args(words)
    if given.table:
        print_table(*given.table)
    else:
        with tempfile.TemporaryDirectory(prefix="everyday-") as temporary:
            place = Place(given.folder or Path(temporary), given.source.resolve())
            measure_all(place, given.only, given.json, prepared=not given.unprepared, after=given.after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
