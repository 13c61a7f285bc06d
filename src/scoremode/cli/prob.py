"""The verb prob: its flags, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from scoremode.cli import flags
from scoremode.cli.output import print_json_list, print_parts, progress_bar
from scoremode.cli.parser import Verb
from scoremode.errors import InputError, OptionError

if TYPE_CHECKING:
    from scoremode.verbs.outputs import Output
    from scoremode.verbs.prob.many_pairs import Pairs
    from scoremode.verbs.prob.sequence import SequenceProbability, SequenceScore
    from scoremode.verbs.progress import Progress

SECTION = 1 << 14
"""Pairs that are scored and printed together without --out: more would not fit into a bounded memory."""


class ProbVerb(Verb):
    summary = "probability of targets after a prompt"
    epilog = 'Rows of --file: {"prompt": "…", "target": "…"} or {"prompt": "…", "targets": ["…", "…"]}.'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        asked = {
            **flags.MODEL,
            "--prompt PROMPT": "what stands before",
            "--target TEXT …": "what may follow; give it once for each",
            "--file PAIRS.jsonl": "pairs from a file",
            "--out RESULTS.jsonl": "write one result on each line; resumes after a kill",
            "--fresh": "score again even if --out holds results, and replace them",
        }
        flags.add(parser, asked)
        for flag, choices, about in (
            ("--leading-space", ("as-given", "add"), 'score the target as it is, or " Paris" for "Paris"'),
            ("--spanning", ("constrain", "refuse"), "what to do if a token spans the end of the prompt"),
        ):
            words = f"{about} (default: {choices[0]})"
            parser.add_argument(flag, default=choices[0], choices=choices, help=words)
        flags.add(parser, {"--add-bos": "put a BOS first if the tokenizer does not"})
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.report.terminal.run_tables import sequence_table
        from scoremode.verbs.prob.sequence import SequenceProbability

        if parsed.fresh and parsed.out is None:
            raise OptionError("--fresh without --out has nothing to discard", fix="leave --fresh out")
        pairs = _pairs(parsed)
        output = _checked_output(parsed) if parsed.out is not None else None
        with SequenceProbability(
            parsed.model,
            leading_space=parsed.leading_space,
            spanning=parsed.spanning,
            add_bos=parsed.add_bos,
            **flags.model_arguments(parsed),
        ) as lm:
            if output is not None:
                _score_into(output, lm, pairs, parsed)
                return
            scored = _scored(lm, pairs)
            first = next(
                scored
            )  # one list, unless there are very many pairs: then nothing is printed before it is scored
            sections = chain(iter([first]), scored)
            del first
            if parsed.json:
                print_json_list(result.as_json() for results in sections for result in results)
            else:
                for results in sections:
                    print_parts(sequence_table(results))


def _scored(lm: SequenceProbability, pairs: Pairs) -> Iterator[list[SequenceScore]]:
    """The results of all pairs, SECTION at a time. What cannot be scored is refused before the engine is started."""
    from scoremode.verbs.prob.many_pairs import EncodedChunks

    encoded, done = EncodedChunks(lm, pairs, SECTION), 0
    lm.open(encoded.longest)
    for number in range(encoded.count):
        section, before = encoded[number], done
        with progress_bar("scoring") as progress:

            def shown(fed: int, _: int, before: int = before, bar: Progress | None = progress) -> None:
                if bar:
                    bar(before + fed, encoded.fed)

            results = lm.score(section, shown if progress else None)
        done += sum(pair.fed for pair in section)
        del section
        yield results


def _score_into(output: Output, lm: SequenceProbability, pairs: Pairs, parsed: argparse.Namespace) -> None:
    from scoremode.verbs.outputs import worked_on_here
    from scoremode.verbs.prob.many_pairs import read_results, score_to_file, score_to_stream

    with progress_bar("scoring", "pairs") as progress, worked_on_here(output, fresh=parsed.fresh) as local:
        if output.is_stream:
            written = score_to_stream(lm, pairs, output, progress)
        else:
            written = score_to_file(lm, pairs, local, fresh=parsed.fresh, progress=progress)
    if parsed.json:
        print_json_list(read_results(local.path))
    said = f"{written.count} results read from {output}; --fresh scores again"
    output.announce(said if written.reused else f"{written.count} results in {output}", quiet=parsed.json)


def _checked_output(parsed: argparse.Namespace) -> Output:
    from scoremode.remote.uri import located
    from scoremode.verbs.outputs import check_output

    output = check_output(parsed.out, "--out")
    if output.place is not None:
        return output
    if output.is_stream and (parsed.json or parsed.fresh):
        flag = "--json" if parsed.json else "--fresh"
        raise OptionError(f"{flag} does not apply to {output.name}, which keeps nothing", fix=f"leave {flag} out")
    source = located(parsed.file) if parsed.file else None
    if isinstance(source, Path) and source.exists() and output.path.exists() and output.path.samefile(source):
        raise InputError("--out would overwrite --file", fix="give --out another name")
    return output


def _pairs(parsed: argparse.Namespace) -> Pairs:
    from scoremode.verbs.prob.many_pairs import PairFile

    if parsed.file and (parsed.prompt is not None or parsed.target):
        raise InputError("--file was given together with --prompt or --target", fix="give one or the other")
    if parsed.file:
        return PairFile(_local(parsed.file))
    if parsed.prompt is None or not parsed.target:
        raise InputError(
            "a prompt and a target are needed", fix='as in --prompt "The capital of France is" --target " Paris"'
        )
    return [(parsed.prompt, target) for target in parsed.target]


def _local(file: str) -> Path:
    from scoremode.remote.copies import copy_of_file
    from scoremode.remote.uri import Place, located

    where = located(file)
    return copy_of_file(where) if isinstance(where, Place) else where
