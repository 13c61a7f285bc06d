"""The verbs that compare and publish: compare and card. Their flags, and what they print."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scoremode.core import extensions
from scoremode.errors import CandidatesError, ScoremodeError
from scoremode.reports.command import flags
from scoremode.reports.command.output import (
    checked_report,
    command_line,
    print_json,
    progress_bar,
    show,
    verdict,
    write_report,
)
from scoremode.reports.command.verb import Verb
from scoremode.reports.parts import comparison_outputs, comparison_parts, offered_parts

if TYPE_CHECKING:
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.reports.parts import ResultPart
    from scoremode.reports.table import Block

logger = logging.getLogger(__name__)

CANDIDATES_FAILED = 2  # the exit code


class CompareVerb(Verb):
    summary = "what changed between a baseline and its candidates, with errors"
    examples = (
        "scoremode compare org/model model-Q4_K_M.gguf --corpus wikitext2",
        "scoremode compare reference/ org/model-W4A16 --report report.html",
    )
    everyday = (
        *flags.EVERYDAY_TEXT,
        "--method",
        "--context-length",
        *flags.EVERYDAY_ENGINE,
        "--out",
        "--fail-if",
        "--report",
        "--markdown",
        "--json",
    )
    epilog = (
        "A BASELINE may also be a reference or a .kld file of llama.cpp; both may be runs kept with --out. "
        "Several K/V types, as in --cache-type-k f16,q8_0, are candidates of one model. "
        "Exit code 1: a --fail-if rule holds, or --no-worse-than is not shown; "
        "2: a candidate failed, and the others are shown."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"baseline BASELINE": "a model (a GGUF too), a reference, a .kld file or a run"})
        models = "models of any format (GGUF and EXL3 too), runs, or folders or patterns of them"
        candidates = parser.add_argument("candidates", metavar="CANDIDATE", nargs="+", help=models)
        candidates.required = False  # several types of the K/V cache are candidates, too
        flags.add_question(parser)
        flags.add_engine(parser)
        flags.add_baseline(parser)
        kept = {
            "--out DIR": "keep the runs there; an interrupted comparison resumes",
            "--fresh": "score again even if runs are there, and replace them",
            "--keep": "keep files that are fetched for org/repo:*; else each is removed after it was scored",
            "--fail-if RULE …": 'as in "kl_mean > 0.02" or "same_top < 0.9 surely"',
            "--by-depth": "also KL by depth in the window (always if K/V types are compared)",
            **{flag: about for part in offered_parts() for flag, about in part.flags.items()},
            **{flag: about for output in comparison_outputs() for flag, about in output.flags.items()},
            **flags.COLUMNS,
            **flags.REPORT,
        }
        group = parser.add_argument_group("comparison")
        flags.add(group, kept)
        margin = "exit code 1 unless the text is surely not less likely by so many nats per token"
        flags.add(group, {"--no-worse-than NATS": margin}, type=flags.amount)
        layouts = {f"--{layout.name}": layout.about for layout in extensions.offered("comparison-layout")}
        flags.add(parser.add_mutually_exclusive_group(), {**flags.CARDS, **layouts, **flags.JSON})

    def run(self, parsed: argparse.Namespace) -> int:
        from scoremode.core.statistics.comparison import comparison_statistics
        from scoremode.core.statistics.equivalence import require_margin
        from scoremode.core.store.runs import is_run
        from scoremode.core.verbs.compare import compare
        from scoremode.reports import gate
        from scoremode.reports.numbers import read_columns

        rules = [gate.parse(text) for text in parsed.fail_if or ()]  # before an hour of scoring
        more = read_columns(parsed.columns)
        if parsed.no_worse_than is not None:
            require_margin(parsed.no_worse_than)
        output = checked_report(parsed)
        for left in comparison_outputs():
            left.check(parsed)
        failed: dict[str, ScoremodeError] = {}
        asked = [(part, given) for part in offered_parts() if (given := part.asked(parsed))]
        with progress_bar("scoring") as progress:
            try:
                compared: Sequence[Comparison] = compare(
                    parsed.baseline,
                    *(parsed.candidates or ()),
                    out=parsed.out,
                    fresh=parsed.fresh,
                    keep=parsed.keep,
                    columns=[*more, *(rule.name for rule in rules)],
                    progress=progress,
                    **flags.question(parsed),
                    **flags.model_arguments(parsed),
                    **flags.baseline_arguments(parsed),
                )
            except CandidatesError as error:
                compared, failed = list(error.found.values()), error.failed
        if not compared:
            return _tell_failed(failed)
        found = list(compared)
        if not all(map(is_run, parsed.candidates or [""])):  # finished runs do not say how they were made
            found = [replace(c, manifest={**c.manifest, "command": command_line()}) for c in found]
        statistics = [comparison_statistics(c) for c in found]
        tested = [] if parsed.no_worse_than is None else [c.no_worse_than(parsed.no_worse_than) for c in found]
        beside = [part.make(found, **given) for part, given in asked]
        parts = comparison_parts(found, by_depth=parsed.by_depth, beside=beside, tested=tested)
        _show_comparison(parsed, found, statistics, failed, parts)
        if output:
            from scoremode.reports.html.page import render

            write_report(parsed, output, render(found, statistics, more=more, beside=beside))
        for left in comparison_outputs():
            left.write(parsed, found, statistics)
        worse = [f"{one.name}: {one.sentence}" for one in tested if not one.no_worse]
        kind = str(found[0].baseline.manifest.get("stderr_groups", "groups"))
        code = verdict([*(gate.check(rule, one, kind) for rule in rules for one in statistics), *worse])
        return _tell_failed(failed) if failed else code


def _show_comparison(
    parsed: argparse.Namespace,
    found: Sequence[Comparison],
    statistics: Sequence[dict[str, Any]],
    failed: Mapping[str, ScoremodeError],
    parts: Sequence[ResultPart],
) -> None:
    """Prints a comparison in the layout that was asked for; ``parts`` are shown below its table."""
    from scoremode.reports.comparisons import comparison_json, summary
    from scoremode.reports.model_card import markdown, model_index
    from scoremode.reports.numbers import read_columns
    from scoremode.reports.publish import layouts
    from scoremode.reports.text import shown

    layout = next((one for name, one in layouts().items() if getattr(parsed, name)), None)
    if parsed.markdown:
        print(markdown(found, statistics))
    elif layout is not None:
        texts = [layout.text(c).rstrip("\n") for c in found]
        named = [f"{shown(c.name)}\n\n{text}" for c, text in zip(found, texts, strict=True)]
        print("\n\n".join(named if len(found) > 1 else texts))
    elif parsed.model_index:
        print("\n".join(map(model_index, found, statistics)))
    else:

        def facts() -> dict[str, Any]:
            reasons = {"failed": [{"name": name, "reason": str(error)} for name, error in failed.items()]}
            told = {**comparison_json(found, statistics), **(reasons if failed else {})}
            for part in parts:
                for row, own in zip(told["candidates"], part.facts(), strict=True):
                    row.update({part.field: own} if own else {})
            return told

        def blocks() -> list[Block]:
            shown = summary(found, statistics, read_columns(parsed.columns)).blocks()
            return [*shown, *(block for part in parts for block in part.blocks())]

        show(parsed, facts, blocks)


def _tell_failed(failed: Mapping[str, ScoremodeError]) -> int:
    """Prints which candidates failed and why, and returns the exit code."""
    for name, error in failed.items():
        logger.error("%s failed: %s", name, error)
    again = "the others are kept: the same command scores only these"
    logger.error("%d %s not scored; %s", len(failed), "candidate was" if len(failed) == 1 else "candidates were", again)
    return CANDIDATES_FAILED


class CardVerb(Verb):
    summary = "comparisons for a model card, in the dialects of publishers"
    examples = (
        "scoremode card runs/quants --write README.md",
        "scoremode card runs/quants --dialect json --out results",
    )
    epilog = (
        "DIALECT is markdown, compact, exl3, model-index, eval-results, json or the name of a layout that compare can "
        "print, such as llamacpp. --write replaces what stands "
        "between <!-- scoremode begin --> and <!-- scoremode end -->, or for model-index between # scoremode begin and "
        "# scoremode end, and leaves the rest of the file alone."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        runs = "the folder of compare --out; or folders of runs, the baseline first"
        flags.add(parser, {"run_folders RUN …": runs, "--dialect DIALECT": "what to write (default: markdown)"})
        flags.add(parser, {"--write FILE": "replace the part between two markers, as in README.md"})
        flags.add(parser, {"--out DIR": "write one file per candidate there (eval-results and json)"})
        flags.add(parser, {"--benchmark DATASET": "for eval-results: a dataset of the hub that is a benchmark"})
        flags.add(parser, {"--task-id ID": "for eval-results: the task in that dataset's eval.yaml"})
        flags.add(parser, {"--metric NAME": "for eval-results: the number (default: ppl_candidate)"})
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.errors import InputError, OptionError, did_you_mean
        from scoremode.reports import publish, readme

        dialect = parsed.dialect or ("json" if parsed.json else "markdown")
        if dialect not in publish.dialects():
            raise OptionError(f"there is no dialect '{dialect}'", fix=did_you_mean(dialect, publish.dialects()))
        in_files = dialect in publish.FILES
        if parsed.write is not None and in_files:
            raise OptionError(f"--write does not fit --dialect {dialect}", fix="give --out DIR")
        if parsed.out is not None and not in_files:
            raise OptionError(f"--out does not fit --dialect {dialect}", fix="give --write README.md")
        given = parsed.benchmark and parsed.task_id
        benchmark = (
            publish.Benchmark(parsed.benchmark, parsed.task_id, parsed.metric or "ppl_candidate") if given else None
        )
        markers = readme.YAML_MARKERS if dialect == "model-index" else readme.MARKERS
        output = None if parsed.write is None else readme.check_readme(parsed.write, markers)  # before columns are read
        from scoremode.core.statistics.comparison import comparison_statistics
        from scoremode.core.store.runs import is_run
        from scoremode.core.verbs.finished_runs import of_runs

        first, *others = readme.run_folders(parsed.run_folders)
        if not others:
            what = "is one run, and a card compares" if is_run(first) else "is not a folder of compare --out"
            raise InputError(f"{first} {what}", fix="give the baseline's run, then those of its candidates")
        found = of_runs(first, others)
        statistics = [comparison_statistics(c) for c in found]
        if in_files:
            self._files(parsed, publish.published_files(dialect, found, statistics, benchmark))
            return
        text = publish.readme_parts()[dialect](found, statistics)
        if output is None:
            print(text, end="")
        else:
            changed = readme.replace_between(output, text, markers)
            print(f"{output} {'now has' if changed else 'already has'} these results")

    def _files(self, parsed: argparse.Namespace, files: dict[str, str]) -> None:
        from pathlib import Path

        from scoremode.core.verbs.outputs import write_files

        if parsed.out is None:
            if parsed.dialect == "json" or parsed.json:
                import json

                print_json([json.loads(text) for text in files.values()])
            else:
                print("".join(f"# {name}\n{text}" for name, text in files.items()), end="")
            return
        own = "; scoremode " if parsed.dialect == "eval-results" else '"scoremode": "'  # as publish.py writes it
        texts = {Path(parsed.out, name): text for name, text in files.items()}
        for output in write_files(texts, "--out", "a card of scoremode", own):
            print(f"written to {output}")
