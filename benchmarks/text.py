"""Text of any size: memory and time of planning a long text, and whether its tokens are those of the whole text.

    python benchmarks/text.py --tokenizer FOLDER --megabytes 100
    python benchmarks/text.py --tokenizer FOLDER --megabytes 1000 --text wiki.test.raw

FOLDER is a checkpoint with a fast tokenizer; without it, ids are bytes. The long text repeats python-docs, the files
given with ``--text``, and names in ten scripts, in a seeded order. It is planned twice by child processes: once cutting
it into tokens, once with the tokens of the first. Their peak of resident memory is VmHWM. The tokenizer's own time is
that of ``encode_batch`` with ids and offsets over pieces of the same text, in this process, with the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from common import SRC, say, temporary_folder

sys.path.insert(0, str(SRC))

ALLOWED_MB, ALLOWED_PER_TOKEN = 400, 2
LANGUAGES = {
    "Latin": "de",
    "Cyrillic": "ru",
    "Greek": "el",
    "Arabic": "ar",
    "Hebrew": "he",
    "Devanagari": "hi",
    "Chinese": "zh",
    "Japanese": "ja",
    "Korean": "ko",
    "Thai": "th",
}
MARKS = ["👩‍🔬", "👍🏽", "🇩🇪", "e\u0301", "a\u0308\u0323", "क\u094dष", "\u200d", "\u200b"]  # emoji and combining marks
PIECE = 1 << 17  # characters
PLAN = """
import json, sys, time
import scoremode as sm
began = time.time()
plan = sm.plan(sys.argv[1], corpus=sys.argv[2])
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({"seconds": time.time() - began, "tokens": plan["tokens"], "digest": plan["plan_digest"],
                  "notes": plan["notes"], "peak_mb": int(status["VmHWM"].split()[0]) / 1024}))
"""


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def names_in(language: str) -> list[str]:
    """Names of places, languages and currencies in one language, from Babel's data."""
    from babel import Locale

    known = Locale(language)
    return [str(name) for table in (known.territories, known.languages, known.currencies) for name in table.values()]


def prose(language: str, characters: int, seed: int = 0) -> str:
    """Names as sentences and paragraphs, with numbers, marks and odd spaces between them."""
    chooser, words = random.Random(seed), names_in(language)
    parts, length = list[str](), 0
    while length < characters:
        joint = chooser.choices([" ", ", ", ". ", "\n", "\n\n", "\r\n", "  ", ""], [60, 12, 9, 8, 4, 1, 3, 3])[0]
        odd = chooser.random()
        word = chooser.choice(MARKS) if odd < 0.01 else str(chooser.randrange(10**6)) if odd < 0.04 else ""
        parts.append((word or chooser.choice(words)) + joint)
        length += len(parts[-1])
    return "".join(parts)


def write_long_text(path: Path, size: int, files: list[Path]) -> None:
    """A text of about ``size`` bytes."""
    from scoremode.text.corpus import load

    parts = [*load("python-docs").texts(), *(file.read_text(encoding="utf-8") for file in files)]
    parts += [prose(language, 20_000) for language in LANGUAGES.values()]
    data, chooser, written = [part.encode() + b"\n\n" for part in parts], random.Random(1), 0
    with path.open("wb") as file:
        while written < size:
            written += file.write(chooser.choice(data))


# ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────────────
def planned(model: str, text: Path, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "SCOREMODE_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PLAN, model, str(text)], env=environment, check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pieces_of(path: Path, most: int) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        for _ in range(most):
            piece = file.read(PIECE)
            if not piece:
                return
            yield piece


def throughput(folder: str, path: Path, most: int) -> dict[str, float]:
    """Characters per second of all cores: the tokenizer's own, and ours with all columns."""
    from scoremode.text.tokenizer import HuggingFaceTokenizer
    from scoremode.text.tokens import OpenDocument, tokenize

    tokenizer = HuggingFaceTokenizer.load(folder)
    pieces = list(pieces_of(path, most))
    characters, times = sum(map(len, pieces)), {"own": 1e9, "ours": 1e9}
    for _ in range(3):  # in turn; the best of each
        began = time.perf_counter()
        for first in range(0, len(pieces), 4):
            for encoding in tokenizer.hf.backend_tokenizer.encode_batch(pieces[first : first + 4]):
                np.array(encoding.ids, np.int32)
                np.fromiter(chain.from_iterable(encoding.offsets), np.int64)
        times["own"] = min(times["own"], time.perf_counter() - began)
        began = time.perf_counter()
        tokenize([OpenDocument(pieces)], tokenizer, special=True)
        times["ours"] = min(times["ours"], time.perf_counter() - began)
    return {name: characters / seconds for name, seconds in times.items()}


def identity(folder: str, characters: int) -> dict[str, bool]:
    """For each script: are ids, positions and the plan's digest those of the whole text at once?"""
    from scoremode.plan.making import make_plan
    from scoremode.plan.recipes import find_method
    from scoremode.text.pieces import Sizes
    from scoremode.text.tokenizer import HuggingFaceTokenizer
    from scoremode.text.tokens import Document, tokenize

    tokenizer, found = HuggingFaceTokenizer.load(folder), dict[str, bool]()
    for script, language in LANGUAGES.items():
        text = prose(language, characters)
        whole = tokenizer.encode(text, special=True)
        one = tokenize([Document(text, 1, 1)], tokenizer, special=True, sizes=Sizes(step=10 * characters))
        good = True
        for sizes in (Sizes(), Sizes(step=8_000), Sizes(step=600, overlap=250, margin=20)):
            many = tokenize([Document(text, 1, 1)], tokenizer, special=True, sizes=sizes)
            digests = [make_plan(find_method("sliding-once"), tokens).digest for tokens in (one, many)]
            good = good and np.array_equal(many.ids, whole.ids) and np.array_equal(many.char_end, whole.char_end)
            good = good and digests[0] == digests[1]
        found[script] = good
        say(f"{script}: {len(text):,} characters, {len(whole.ids):,} tokens, {'same' if good else 'DIFFERENT'}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder of a checkpoint; default: bytes, with the table engine")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--text", type=Path, action="append", default=[], help="more text to repeat; may be repeated")
    parser.add_argument("--script-characters", type=int, default=300_000, help="of each script; 0 leaves them out")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    folder = temporary_folder("text")
    path, cache, model = folder / "long.txt", folder / "cache", given.tokenizer or "table:uniform"
    write_long_text(path, given.megabytes * 10**6, given.text)
    result: dict[str, Any] = {"bytes": path.stat().st_size, "cores": len(os.sched_getaffinity(0))}
    result["first"], result["again"] = (planned(model, path, cache) for _ in range(2))
    allowed = ALLOWED_MB + ALLOWED_PER_TOKEN * result["first"]["tokens"] / 1e6
    result["allowed_mb"], result["within"] = allowed, result["first"]["peak_mb"] * 1.048576 <= allowed
    result["beyond_per_token"] = (result["first"]["peak_mb"] * 1.048576 - ALLOWED_MB) * 1e6 / result["first"]["tokens"]
    if given.tokenizer:
        result["characters_per_second"] = speeds = throughput(given.tokenizer, path, 40)
        result["of_own_throughput"] = speeds["ours"] / speeds["own"]
        result["same"] = identity(given.tokenizer, given.script_characters) if given.script_characters else {}
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:<24} {value}")
    same = result["first"]["digest"] == result["again"]["digest"] and all(result.get("same", {}).values())
    return 0 if same and result["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
