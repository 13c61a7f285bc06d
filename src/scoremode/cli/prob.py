"""scoremode prob: probability of targets behind a prompt"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scoremode import json_files
from scoremode.cli import options
from scoremode.errors import InputError

EPILOG = 'Rows of --file: {"prompt": "…", "target": "…"} or {"prompt": "…", "targets": ["…", "…"]}.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompt", help="what stands before")
    parser.add_argument("--target", action="append", metavar="TEXT", help="what may follow; give it once for each")
    parser.add_argument("--file", metavar="PAIRS.jsonl", help="pairs from a file")
    parser.add_argument("--out", metavar="RESULTS.jsonl", help="write one result a line; an interrupted one goes on")
    parser.add_argument(
        "--leading-space",
        default="as-given",
        choices=("as-given", "add"),
        help='score the target as it is, or " Paris" for "Paris" (default: as-given)',
    )
    parser.add_argument(
        "--spanning",
        default="constrain",
        choices=("constrain", "refuse"),
        help="what to do where a token spans the end of the prompt (default: constrain)",
    )
    parser.add_argument("--add-bos", action="store_true", help="put a BOS in front where the tokenizer does not")
    options.add_engine(parser)
    options.add_vllm(parser)
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.cli.progress import progress_bar
    from scoremode.display.table import sequence_table
    from scoremode.sequence import SequenceProbability, score_to_file

    pairs = list(_pairs(parsed))
    if parsed.out:
        _check_out(Path(parsed.out), parsed.file)
    lm = SequenceProbability(
        parsed.model,
        engine=parsed.engine,
        options=options.engine_options(parsed),
        tokenizer=parsed.tokenizer,
        leading_space=parsed.leading_space,
        spanning=parsed.spanning,
        add_bos=parsed.add_bos,
    )
    with progress_bar("scoring", "pairs" if parsed.out else "tokens") as progress:
        if parsed.out:
            results = score_to_file(lm, pairs, Path(parsed.out), progress)
        else:
            results = lm.get_log_prob([p for p, _ in pairs], [t for _, t in pairs], progress)
    lm.engine.close()
    if parsed.json:
        options.print_json([r.as_json() for r in results])
    elif parsed.out:
        print(f"{len(results)} results in {parsed.out}")
    else:
        options.print_parts(sequence_table(results))


def _check_out(out: Path, pairs_file: str | None) -> None:
    if out.is_dir():
        raise InputError(f"{out} is a folder", fix="give --out a file name, as in results.jsonl")
    if not out.absolute().parent.is_dir():
        raise InputError(f"there is no folder {out.parent}", fix="make it first, or give another --out")
    if pairs_file and out.exists() and out.samefile(pairs_file):
        raise InputError("--out would overwrite --file", fix="give --out another name")


def _pairs(parsed: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if parsed.file and (parsed.prompt is not None or parsed.target):
        raise InputError("--file was given together with --prompt or --target", fix="give one or the other")
    if parsed.file:
        yield from _pairs_of_file(Path(parsed.file))
        return
    if parsed.prompt is None or not parsed.target:
        raise InputError(
            "a prompt and a target are needed", fix='as in --prompt "The capital of France is" --target " Paris"'
        )
    for target in parsed.target:
        yield parsed.prompt, target


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _pairs_of_file(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        raise InputError(f"there is no file '{path}'", fix="check the path given to --file")
    found = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json_files.parse(line, constants=True)
                targets = row["targets"] if "targets" in row else [row["target"]]
                good = isinstance(row["prompt"], str) and _are_texts(targets)
            except (ValueError, KeyError, TypeError):
                good = False
            if not good:
                raise InputError(
                    f"{path} line {number} is not a pair", fix='use rows like {"prompt": "…", "target": "…"}'
                )
            for target in targets:
                found = True
                yield row["prompt"], target
    if not found:
        raise InputError(f"{path} holds no pairs", fix='use rows like {"prompt": "…", "target": "…"}')
