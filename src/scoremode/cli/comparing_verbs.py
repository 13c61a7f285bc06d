"""The verbs that compare and publish: compare, report and card. Their flags, and what they print."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.console import flags
from scoremode.console.flags import Verb
from scoremode.console.output import checked_report, print_json, progress_bar, show, verdict, write_report
from scoremode.core.extensions import BaselineOffer, FormatOffer, PartOffer, offered
from scoremode.errors import CandidatesError, OptionError, ScoremodeError, listed
from scoremode.reports.parts import comparison_parts, format_shown, parts_meant

if TYPE_CHECKING:
    from scoremode.core.extensions import ResultPart
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.reports.table import Block

logger = logging.getLogger(__name__)

CANDIDATES_FAILED = 2  # the exit code
FILES = [kind.about.removeprefix("a ").partition(" of ")[0] for kind in offered(BaselineOffer)]
BASELINES = [kind.about for kind in offered(BaselineOffer)]
BASELINES += [part.as_baseline for part in offered(PartOffer) if part.as_baseline]


class CompareVerb(Verb):
    examples = (
        "scoremode compare org/model model-Q4_K_M.gguf --corpus wikitext2",
        "scoremode compare reference/ org/model-W4A16 --report report.html",
    )
    everyday = (
        *(*flags.EVERYDAY_TEXT, "--method", "--context-length", *flags.EVERYDAY_ENGINE),
        *("--out", "--fail-if", "--report", "--markdown", "--json"),
    )
    epilog = (
        f"A BASELINE may also be {listed(['a reference', *BASELINES], 'or')}; both may be runs kept with --out. "
        "Several K/V types, as in --cache-type-k f16,q8_0, are candidates of one model. "
        "Exit code 1: a --fail-if rule holds, or --no-worse-than is not shown; "
        "2: a candidate failed, and the others are shown."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"baseline BASELINE": listed(["a model", "reference", *FILES, "run"], "or")})
        models = "models of any format, runs, or folders or patterns of them"
        candidates = parser.add_argument("candidates", metavar="CANDIDATE", nargs="+", help=models)
        candidates.required = False  # several types of the K/V cache are candidates, too
        flags.add_question(parser)
        flags.add_engine(parser)
        baseline = parser.add_argument_group("baseline", "if it is scored in a different way than the candidates")
        flags.add(baseline, flags.BASELINE)
        comparison_flags = {
            "--out DIR": "keep the runs there; an interrupted comparison resumes",
            "--fresh": "score again even if runs are there, and replace them",
            "--keep": "keep files that are fetched for org/repo:*; else each is removed after it was scored",
            "--fail-if RULE …": 'as in "kl_mean > 0.02" or "same_top < 0.9 surely"',
            "--by-depth": "also KL by depth in the window (always if K/V types are compared)",
            "--no-worse-than NATS": "exit code 1 unless the text is surely not less likely by so many nats per token",
            **flags.FEW_DOCUMENTS,
            **{flag: about for part in offered(PartOffer) for flag, about in part.flags.items()},
            **{flag: about for kind in offered(FormatOffer) for flag, about in kind.compare.items()},
            **flags.COLUMNS,
            **flags.REPORT,
        }
        flags.add(parser.add_argument_group("comparison"), comparison_flags)
        layouts = {f"--{kind.name}": kind.layout for kind in offered(FormatOffer) if kind.layout}
        flags.add(parser.add_mutually_exclusive_group(), {**flags.CARDS, **layouts, **flags.JSON})

    def run(self, parsed: argparse.Namespace) -> int:
        from scoremode.core.statistics.equivalence import require_margin
        from scoremode.core.verbs.compare import compare
        from scoremode.reports import gate
        from scoremode.reports.numbers import read_columns

        wing_parts = parts_meant(parsed)
        for part in wing_parts:
            if (code := part.instead(parsed)) is not None:
                return code
        rules = [gate.parse(text) for text in parsed.fail_if or ()]  # before an hour of scoring
        more = read_columns(parsed.columns)
        if parsed.no_worse_than is not None:
            require_margin(parsed.no_worse_than)
        output = checked_report(parsed)
        failed: dict[str, ScoremodeError] = {}
        unwritten: ScoremodeError | None = None
        part_arguments = [(part, arguments) for part in wing_parts if (arguments := part.asked(parsed))]
        with progress_bar("scoring") as progress:
            try:
                comparisons: Sequence[Comparison] = compare(
                    parsed.baseline,
                    *(parsed.candidates or ()),
                    out=parsed.out,
                    fresh=parsed.fresh,
                    keep=parsed.keep,
                    columns=[*more, *(rule.name for rule in rules)],
                    few_documents=parsed.few_documents,
                    progress=progress,
                    **flags.question(parsed),
                    **flags.model_arguments(parsed),
                    baseline_engine=parsed.baseline_engine,
                    baseline_options={"dtype": parsed.baseline_dtype} if parsed.baseline_dtype else None,
                    **{kind.name: getattr(parsed, kind.name) for kind in offered(FormatOffer) if kind.compare},
                )
            except CandidatesError as error:
                comparisons, failed, unwritten = list(error.found.values()), error.failed, error.unwritten
        if not comparisons:
            if parsed.json:
                print_json({"baseline": parsed.baseline, "candidates": [], **_reasons(failed)})
            return _tell_failed(failed)
        tested = [] if parsed.no_worse_than is None else [c.no_worse_than(parsed.no_worse_than) for c in comparisons]
        beside = [part.make(comparisons, **arguments) for part, arguments in part_arguments]
        parts = comparison_parts(comparisons, by_depth=parsed.by_depth, beside=beside, tested=tested)
        _show_comparison(parsed, comparisons, failed, parts)
        if output:
            from scoremode.reports.html.page import render

            try:
                write_report(parsed, output, render(comparisons, more=more, beside=beside))
            except ScoremodeError as error:  # rules and failures are still told
                unwritten = unwritten or error
        worse = [f"{test.name}: {test.sentence}" for test in tested if not test.no_worse]
        kind, few = comparisons[0].baseline.group_kind, parsed.few_documents
        failures = [gate.check(rule, c.statistics(), kind, few_documents=few) for rule in rules for c in comparisons]
        code = verdict([*failures, *worse])
        if unwritten is not None:
            logger.error(str(unwritten))
        if failed:
            return _tell_failed(failed, others=True, fresh=parsed.fresh)
        return CANDIDATES_FAILED if unwritten else code


def _show_comparison(
    parsed: argparse.Namespace,
    comparisons: Sequence[Comparison],
    failed: Mapping[str, ScoremodeError],
    parts: Sequence[ResultPart],
) -> None:
    """Prints a comparison in the layout that was asked for; ``parts`` are shown below its table."""
    from scoremode.reports.model_card import markdown, metadata
    from scoremode.reports.text import shown

    layout = next((kind for kind in offered(FormatOffer) if kind.layout and getattr(parsed, kind.name)), None)
    if parsed.markdown:
        print(markdown(comparisons))
    elif layout is not None:
        lines = layout.load()
        texts = [lines.text(c).rstrip("\n") for c in comparisons]
        sections = [f"{shown(c.name)}\n\n{text}" for c, text in zip(comparisons, texts, strict=True)]
        print("\n\n".join(sections if len(comparisons) > 1 else texts))
    elif parsed.model_index:
        print(metadata(comparisons), end="")
    else:
        _show_table(parsed, comparisons, failed, parts)


def _show_table(
    parsed: argparse.Namespace,
    comparisons: Sequence[Comparison],
    failed: Mapping[str, ScoremodeError],
    parts: Sequence[ResultPart],
) -> None:
    """Prints a comparison as a table or as JSON."""
    from scoremode.reports.comparisons import comparison_json, summary
    from scoremode.reports.numbers import read_columns

    def facts() -> dict[str, Any]:
        told = {**comparison_json(comparisons), **(_reasons(failed) if failed else {})}
        for part in parts:
            for row, fact in zip(told["candidates"], part.facts(), strict=True):
                row.update({part.field: fact} if fact else {})
        return told

    def blocks() -> list[Block]:
        shown = summary(comparisons, read_columns(parsed.columns)).blocks()
        return [*shown, *(block for part in parts for block in part.blocks())]

    show(parsed, facts, blocks)


def _reasons(failed: Mapping[str, ScoremodeError]) -> dict[str, Any]:
    return {"failed": [{"name": name, "reason": str(error)} for name, error in failed.items()]}


def _tell_failed(failed: Mapping[str, ScoremodeError], *, others: bool = False, fresh: bool = False) -> int:
    """Prints which candidates failed and why, and returns the exit code. ``others``: were some of them scored?"""
    for name, error in failed.items():
        logger.error("%s failed: %s", name, error)
    scores = f"the same command{' without --fresh' * fresh} scores only these"
    again = f"the others are kept: {scores}" if others else "run the same command again"
    logger.error("%d %s not scored; %s", len(failed), "candidate was" if len(failed) == 1 else "candidates were", again)
    return CANDIDATES_FAILED


class ReportVerb(Verb):
    examples = (
        "scoremode report runs/base",
        "scoremode report runs/base runs/q4 runs/q8 --output page.html",
    )
    renamed: ClassVar[Mapping[str, tuple[str, str]]] = {"show": ("report {}", "RUN")}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        runs = "a folder written with --out; of several, the first is the baseline of the others"
        others = "".join(f"; or {kind.report}" for kind in offered(FormatOffer) if kind.report)
        flags.add(parser, {"run_folders RUN …": runs + others})
        if flags.HAS_PAGES:
            page = "write the HTML page there, as in page.html (default: show the numbers here)"
            parser.add_argument("-o", "--output", metavar="FILE", help=page)
        flags.add(parser, flags.WORST, type=flags.count, default=0)
        flags.add(parser, {**flags.FEW_DOCUMENTS, **flags.COLUMNS, **flags.JSON})

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.store.runs import load
        from scoremode.core.verbs.baselines import of_runs
        from scoremode.core.verbs.outputs import check_report
        from scoremode.reports.card import run_folders
        from scoremode.reports.numbers import read_columns
        from scoremode.reports.runs import run_blocks

        if (shown := format_shown(parsed.run_folders)) is not None:
            shown.show(parsed)
            return
        page: Any = getattr(parsed, "output", None)
        more, output = read_columns(parsed.columns), check_report(page) if page else None  # before columns are read
        first, *others = run_folders(parsed.run_folders)
        if parsed.worst and (others or page):
            raise OptionError("--worst is about one run in the terminal", fix="leave --worst out")
        if more and not others:
            raise OptionError("--columns is about comparisons", fix="name several runs, or leave --columns out")
        comparisons = of_runs(first, others, few_documents=parsed.few_documents)
        if output is not None:
            from scoremode.reports.html.page import render

            alone = [] if comparisons else [load(first)]
            html = render(comparisons, runs=alone, more=more)
            output = check_report(page, page=html)
            output.write(html.encode())
            if parsed.json:
                print_json({"report": page, "runs": 1 + len(others)})
            output.announce(f"written to {output}", quiet=parsed.json)
        elif comparisons:
            parts = comparison_parts(comparisons, by_depth=False, beside=[], tested=[])
            _show_table(parsed, comparisons, {}, parts)
        else:
            run = load(first)
            show(parsed, run.summary, lambda: run_blocks(run, parsed.worst))


DIALECTS = ["markdown", "compact", "exl3", "model-index", "eval-results", "json"]
DIALECTS += [kind.name for kind in offered(FormatOffer) if kind.layout]


class CardVerb(Verb):
    examples = (
        "scoremode card runs/quants --write README.md",
        "scoremode card runs/quants --dialect json --out results",
    )
    epilog = (
        f"DIALECT is {listed(DIALECTS, 'or')}. --write replaces what stands "
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
        flags.add(parser, {**flags.FEW_DOCUMENTS, **flags.JSON})

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.reports.card import published

        dialect = parsed.dialect or ("json" if parsed.json else "markdown")
        where = parsed.benchmark, parsed.task_id, parsed.metric
        few = parsed.few_documents
        card, lines = published(
            parsed.run_folders, dialect=dialect, write=parsed.write, out=parsed.out, where=where, few_documents=few
        )
        if lines:
            print("\n".join(lines))
        elif isinstance(card, str):
            print(card, end="")
        elif dialect == "json":
            print_json([json.loads(text) for text in card.values()])
        else:
            print("".join(f"# {name}\n{text}" for name, text in card.items()), end="")
