"""Text of any size: memory and time of planning a long text, and whether its tokens are those of the whole text.

    python benchmarks/text.py --tokenizer FOLDER
    python benchmarks/text.py --tokenizer FOLDER --megabytes 1000 --text wiki.test.raw

FOLDER is a checkpoint with a fast tokenizer, or a model's name; without it, ids are bytes. The long text repeats
python-docs, the files given with ``--text``, and words in ten scripts, in a seeded order. A child process plans it.
Before it, another plans one line: what it takes is what imports and the tokenizer take. Their peak of resident memory
is VmHWM.

The tokenizer's own time is that of ``encode_batch`` with lists of ids and offsets over pieces of the same text, in one
process, in turn with ours, on the same cores; CPU time of all threads, which other work on a machine changes least.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import SRC, say, temporary_folder
from ten_scripts import PARAGRAPHS, prose

sys.path.insert(0, str(SRC))

WANTED_SPEED = 0.9
PIECE = 1 << 17  # characters
PLAN = """
import json, sys, time
import scoremode as sm
began, used = time.time(), time.process_time()
plan = sm.plan(sys.argv[1], corpus=sys.argv[2])
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({"seconds": time.time() - began, "cpu_seconds": time.process_time() - used, "tokens": plan["tokens"],
                  "digest": plan["plan_digest"], "notes": plan["notes"],
                  "peak_mb": int(status["VmHWM"].split()[0]) * 1024 / 1e6}))
"""


# ── the long text ────────────────────────────────────────────────────────────────────────────────────────────────────
def write_long_text(path: Path, size: int, files: list[Path]) -> None:
    """A text of about ``size`` bytes."""
    from scoremode.core.text.corpus import load

    parts = [*load("python-docs").texts(), *(file.read_text(encoding="utf-8") for file in files)]
    parts += [prose(script, 20_000) for script in PARAGRAPHS]
    data, chooser, written = [part.encode() + b"\n\n" for part in parts], random.Random(1), 0
    with path.open("wb") as file:
        while written < size:
            written += file.write(chooser.choice(data))


def pieces_of(path: Path, most: int) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        for _ in range(most):
            piece = file.read(PIECE)
            if not piece:
                return
            yield piece


# ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────────────
def planned(model: str, text: Path, folder: Path) -> dict[str, Any]:
    """What a process that plans this text says about itself."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "SCOREMODE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", PLAN, model, str(text)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"planning failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cpu_time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def of_own_speed(tokenizer: Any, pieces: list[str], repeats: int) -> dict[str, float]:
    """The tokenizer's own CPU time divided by ours with all columns: the median of several turns, and their range."""
    from scoremode.core.text.documents import Document
    from scoremode.core.text.long_text import TOGETHER
    from scoremode.core.text.tokens import tokenize

    backend, together = tokenizer.hf.backend_tokenizer, TOGETHER // PIECE

    def own() -> None:
        for first in range(0, len(pieces), together):
            for encoding in backend.encode_batch(pieces[first : first + together], add_special_tokens=False):
                _ = encoding.ids, encoding.offsets

    found = list[float]()
    for turn in range(repeats):
        times = cpu_time(own), cpu_time(lambda: tokenize([Document("".join(pieces))], tokenizer, special=True))
        found.append(times[0] / times[1])
        say(f"turn {turn + 1}: {times[0]:.2f} s of the tokenizer's own, {times[1]:.2f} s of ours")
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def is_same(tokenizer: Any, text: str) -> bool:
    """Are ids, positions and the plan's digest those of the whole text at once, for parts of three sizes?"""
    from scoremode.core.plan.build import make_plan
    from scoremode.core.plan.recipes import find_method
    from scoremode.core.text import long_text
    from scoremode.core.text.documents import Document
    from scoremode.core.text.tokens import tokenize

    whole, digests = tokenizer.encode(text, special=True), set[str]()
    for part in (10 * len(text), long_text.PART, 8_000, 600):
        with patch.object(long_text, "PART", part):
            found = tokenize([Document(text)], tokenizer, special=True)
        if not (np.array_equal(found.ids, whole.ids) and np.array_equal(found.char_end, whole.char_end)):
            return False
        digests.add(make_plan(find_method("sliding-once"), found).digest)
    return len(digests) == 1


def identity(tokenizer: Any, characters: int) -> dict[str, bool]:
    found = dict[str, bool]()
    for script in PARAGRAPHS:
        found[script] = is_same(tokenizer, prose(script, characters))
        say(f"{script}: {'same' if found[script] else 'DIFFERENT'}")
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    folder = temporary_folder("text")
    path, line = folder / "long.txt", folder / "line.txt"
    model = given.tokenizer or "table:uniform"
    line.write_text("One line of text.\n", encoding="utf-8")
    write_long_text(path, given.megabytes * 10**6, given.text)
    say(f"{path.stat().st_size:,} bytes written; planning")
    result: dict[str, Any] = {"bytes": path.stat().st_size, "cores": len(os.sched_getaffinity(0))}
    result["line"], result["first"] = (planned(model, text, folder) for text in (line, path))
    if given.tokenizer:
        from scoremode.core.verbs.model import LazyModel

        tokenizer = LazyModel.named(given.tokenizer).subject.tokenizer
        pieces = list(pieces_of(path, given.speed_megabytes * 10**6 // PIECE))
        result["of_own_speed"] = of_own_speed(tokenizer, pieces, given.repeats)
        result["same"] = identity(tokenizer, given.script_characters) if given.script_characters else {}
    return result


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────────
def table(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value, and whether a goal is met."""
    first, line = result["first"], result["line"]
    beyond = (first["peak_mb"] - line["peak_mb"]) * 1e6 / first["tokens"]
    rows = [
        ("bytes", f"{result['bytes']:,}", ""),
        ("tokens", f"{first['tokens']:,}", ""),
        ("cores", str(result["cores"]), ""),
        ("seconds", f"{first['seconds']:.1f}", ""),
        ("CPU seconds", f"{first['cpu_seconds']:.1f}", ""),
        ("peak RSS of one line, MB", f"{line['peak_mb']:.0f}", ""),
        ("peak RSS, MB", f"{first['peak_mb']:.0f}", ""),
        ("bytes per token above that of a line", f"{beyond:.1f}", ""),
    ]
    if "of_own_speed" in result:
        speed = result["of_own_speed"]
        value = f"{speed['median']:.2f} ({speed['least']:.2f} to {speed['most']:.2f})"
        rows.append(("tokenizer's own CPU time / ours", value, said(speed["median"] >= WANTED_SPEED)))
    rows += [(f"same tokens, {script}", "", said(same)) for script, same in result.get("same", {}).items()]
    rows += [("note", note, "") for note in first["notes"]]
    return rows


def said(good: bool) -> str:
    return "yes" if good else "NO"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a checkpoint's folder or a model's name; default: bytes, the table engine")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--text", type=Path, action="append", default=[], help="more text to repeat; may be repeated")
    parser.add_argument("--speed-megabytes", type=int, default=10, help="how much both ways encode in each turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--script-characters", type=int, default=150_000, help="of each script; 0 leaves them out")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    if missing := [str(path) for path in given.text if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    result = measure(given)
    rows = table(result)
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value, met in rows:
            print(f"{name:<34} {value:>24}  {met}".rstrip())
    return 0 if all(met != "NO" for _, _, met in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
