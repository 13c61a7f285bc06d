"""The verbs that score with one model: ppl, plan, reference and prob. Their flags, and what they print."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from scoremode.console import flags
from scoremode.console.flags import Verb
from scoremode.console.output import print_blocks, print_json_list, progress_bar, show
from scoremode.core.extensions import FormatOffer, offered
from scoremode.core.verbs.shared_flags import RUN
from scoremode.errors import InputError, OptionError

if TYPE_CHECKING:
    from scoremode.core.plan.question import Question
    from scoremode.core.verbs.outputs import Output
    from scoremode.core.verbs.place import Place
    from scoremode.core.verbs.prob.many_pairs import Pairs
    from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore

SECTION = 1 << 14
"""Pairs that are scored together without --out. It decides last digits, because small groups share a batch."""


class PplVerb(Verb):
    examples = (
        "scoremode ppl smollm2-135m --corpus python-docs --num-samples 5",
        "scoremode ppl model-Q4_K_M.gguf --corpus wikitext2 --method llamacpp",
    )
    everyday = (*flags.EVERYDAY_TEXT, *flags.EVERYDAY_METHOD, *flags.EVERYDAY_ENGINE, "--out", "--fresh", "--json")
    epilog = "Without --out the run is kept in the cache folder; asking the same again reads it back."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, several=True)
        keep = parser.add_argument_group("run")
        flags.add(keep, {**RUN, "--out DIR": f"{RUN['--out DIR']} (of several questions, each has a folder in DIR)"})
        flags.add(keep, flags.WORST, type=flags.count, default=0)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.plan.question import Question
        from scoremode.core.verbs.model import LazyModel
        from scoremode.core.verbs.place import Place
        from scoremode.reports.runs import questions_blocks, run_blocks

        questions = [Question.of(arguments).with_text() for arguments in flags.questions(parsed)]
        with progress_bar("scoring") as progress:
            places = _places(questions, Place.at(parsed.out, fresh=parsed.fresh, progress=progress))
            options, several = flags.engine_options(parsed), len(questions) > 1
            model = LazyModel.named(parsed.model, parsed.engine, options, parsed.tokenizer, many_questions=several)
            with closing(model):
                runs = [model.score(question, place) for question, place in zip(questions, places, strict=True)]
        first = runs[0]
        if len(runs) > 1:
            show(parsed, lambda: [run.summary() for run in runs], lambda: questions_blocks(runs))
            return
        again = ["", f"read from {first.path}, where it was scored before; --fresh scores it again"]
        show(parsed, first.summary, lambda: run_blocks(first, parsed.worst) + (again if first.cached else []))


def _places(questions: Sequence[Question], place: Place) -> list[Place]:
    """The place of each run: of several, a folder in ``place`` that is named as in ``wikitext2-gptq``."""
    from scoremode.core.plan.question import DEFAULT_METHOD

    if len(questions) == 1 or place.out is None:
        return [place] * len(questions)
    names = []
    for question in questions:
        corpus = str(question.corpus or question.dataset or "text")
        readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(corpus).name or corpus)
        names.append(f"{readable}-{question.method or DEFAULT_METHOD}")
    if len(set(names)) < len(names):
        raise InputError("two of the questions would be kept in one folder", fix="leave --out out, or ask one by one")
    return list(map(place.within, names))


class PlanVerb(Verb):
    examples = (
        "scoremode plan smollm2-135m --corpus python-docs",
        "scoremode plan org/model --corpus wikitext2 --method gptq",
    )
    everyday = (*flags.EVERYDAY_TEXT, *flags.EVERYDAY_METHOD, "--engine", "--json")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, several=True, replicas=False)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.verbs.plan import plan
        from scoremode.reports.runs import plan_blocks

        kwargs = flags.model_arguments(parsed)
        with progress_bar("planning") as progress:
            made = [plan(parsed.model, progress=progress, **question, **kwargs) for question in flags.questions(parsed)]
        parts = [part for facts in made for part in ("", *plan_blocks(facts))]
        show(parsed, lambda: made[0] if len(made) == 1 else made, lambda: parts[1:])


class ReferenceVerb(Verb):
    examples = (
        "scoremode reference org/model --corpus wikitext2 --out reference",
        "scoremode reference org/model --corpus wikitext2 --method gptq --out ref",
    )
    everyday = (
        *(*flags.EVERYDAY_TEXT, *flags.EVERYDAY_METHOD, *flags.EVERYDAY_ENGINE),
        *("--out", *(flag.split()[0] for kind in offered(FormatOffer) for flag in kind.reference), "--fresh", "--json"),
    )
    epilog = (
        "A reference holds the exact distributions of every target: scoremode compare DIR CANDIDATE needs nothing else."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser)
        reference_flags = {
            "--out DIR": "keep it there; an interrupted one resumes",
            **{flag: about for kind in _files() for flag, about in kind.reference.items()},
            "--fresh": "make it again even if one is there, and replace it",
        }
        flags.add(parser.add_argument_group("reference"), reference_flags)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.verbs.reference import reference
        from scoremode.reports.runs import run_blocks

        files = {kind.name: getattr(parsed, kind.name) for kind in _files()}
        if parsed.out is None and not any(files.values()):
            others = "".join(f", or {flag}" for kind in _files() for flag in kind.reference)
            raise OptionError("the reference has no place to go", fix=f"give --out DIR{others}")
        with progress_bar("scoring") as progress:
            result = reference(
                parsed.model,
                parsed.out,
                **files,
                fresh=parsed.fresh,
                progress=progress,
                **flags.question(parsed),
                **flags.model_arguments(parsed),
            )
        lines = [f"kept in {parsed.out}; scoremode compare {parsed.out} CANDIDATE"] if parsed.out else []
        lines += [line for kind in _files() if (file := files[kind.name]) for line in kind.load().used_by(file)]
        facts = {**result.summary(), "reference": parsed.out, **files}
        show(parsed, lambda: facts, lambda: [*run_blocks(result), "", *lines])


def _files() -> list[FormatOffer]:
    """Formats of files that a reference can be written as."""
    return [kind for kind in offered(FormatOffer) if kind.reference]


class ProbVerb(Verb):
    examples = (
        'scoremode prob smollm2-135m --prompt "1 + 1 =" --target " 2" --target " 3"',
        "scoremode prob org/model --file pairs.jsonl --out results.jsonl",
    )
    everyday = (
        *("--prompt", "--target", "--file", "--out", "--fresh", "--leading-space", "--spanning"),
        *(*flags.EVERYDAY_ENGINE, "--json"),
    )
    epilog = 'Rows of --file: {"prompt": "…", "target": "…"} or {"prompt": "…", "targets": ["…", "…"]}.'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        prob_flags = {
            **flags.model_flag(),
            "--prompt PROMPT": "what stands before",
            "--target TEXT …": "what may follow; give it once for each",
            "--file PAIRS.jsonl": "pairs from a file",
            "--out RESULTS.jsonl": "write one result on each line; resumes after a kill",
            "--fresh": "score again even if --out holds results, and replace them",
        }
        flags.add(parser, prob_flags)
        for flag, choices, about in (
            ("--leading-space", ("as-given", "add"), 'score the target as it is, or " Paris" for "Paris"'),
            ("--spanning", ("constrain", "refuse"), "what to do if a token spans the end of the prompt"),
        ):
            help_text = f"{about} (default: {choices[0]})"
            parser.add_argument(flag, default=choices[0], choices=choices, help=help_text)
        flags.add(parser, {"--add-bos": "put a BOS first if the tokenizer does not"})
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.verbs.prob.sequence import SequenceProbability
        from scoremode.reports.runs import sequence_blocks

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
            results = _scored(lm, pairs)
        if parsed.json:
            print_json_list(result.as_json() for result in results)
        else:
            print_blocks(sequence_blocks(results))


def _scored(lm: SequenceProbability, pairs: Pairs) -> list[SequenceScore]:
    """The results of all pairs. Unusable pairs are refused before the engine starts."""
    from scoremode.core.verbs.prob.boundary import longest_of
    from scoremode.core.verbs.progress import part_of

    encoded, done = lm.encode(pairs), 0
    results: list[SequenceScore] = []
    fed = sum(pair.fed for pair in encoded)
    with progress_bar("scoring") as progress:
        lm.open(longest_of(encoded), progress)
        for begin in range(0, len(encoded), SECTION):
            section = encoded[begin : begin + SECTION]
            results += lm.score(section, part_of(progress, done, fed))
            done += sum(pair.fed for pair in section)
    return results


def _score_into(output: Output, lm: SequenceProbability, pairs: Pairs, parsed: argparse.Namespace) -> None:
    from scoremode.core.verbs.prob.many_pairs import score_to_file

    with progress_bar("scoring", "pairs") as progress:
        written = score_to_file(lm, pairs, output, fresh=parsed.fresh, progress=progress)
    if parsed.json:
        print_json_list(written.rows())
    note = "; they were kept: --fresh scores again" if written.reused else ""
    output.announce(f"{len(pairs)} results in {output}{note}", quiet=parsed.json)


def _checked_output(parsed: argparse.Namespace) -> Output:
    from scoremode.core.disk.uri import located
    from scoremode.core.verbs.prob.many_pairs import check_results

    source = located(parsed.file) if parsed.file else None
    if isinstance(source, Path) and source.exists() and os.path.exists(parsed.out) and source.samefile(parsed.out):
        raise InputError("--out would overwrite --file", fix="give --out another name")
    return check_results(parsed.out, "--out")


def _pairs(parsed: argparse.Namespace) -> Pairs:
    from scoremode.core.disk.stores import local_file
    from scoremode.core.verbs.prob.many_pairs import read_pairs

    if parsed.file and (parsed.prompt is not None or parsed.target):
        raise InputError("--file was given together with --prompt or --target", fix="give one or the other")
    if parsed.file:
        return read_pairs(local_file(parsed.file))
    if parsed.prompt is None or not parsed.target:
        raise InputError(
            "a prompt and a target are needed", fix='as in --prompt "The capital of France is" --target " Paris"'
        )
    return [(parsed.prompt, target) for target in parsed.target]
