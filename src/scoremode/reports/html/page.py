"""The report as one HTML page: no network access, nothing to install, all text escaped.

Python computes, the templates in the folder beside this file write HTML and SVG, and one script (report.js) shows the
scored text. The script writes texts with textContent only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from markupsafe import Markup

from scoremode.core.extensions import PageOffer, PartOffer, ResultPart, ResultView, offered
from scoremode.core.statistics.comparison import Comparison, Comparisons, are_of_paths
from scoremode.core.store.run import Run
from scoremode.core.typed import typed
from scoremode.core.verbs.outputs import check_report
from scoremode.errors import InputError, RunError, UnknownArgumentError
from scoremode.reports.comparisons import comparison_notes, comparison_table, slices_blocks, summary
from scoremode.reports.html.charts import charts_section
from scoremode.reports.html.scored_text import TEXT_TARGETS, page_data, text_section, worst_view
from scoremode.reports.html.size_chart import size_section
from scoremode.reports.html.templating import fill, fill_page
from scoremode.reports.model_card import markdown, metadata
from scoremode.reports.parts import format_shown
from scoremode.reports.publish import about_run
from scoremode.reports.ranking import closest_first, pairs_tested, why_not_ranked
from scoremode.reports.runs import run_facts, run_slices, runs_notes, runs_table
from scoremode.reports.served import distinct_baselines, known, pairs, run_key, run_name, served_facts
from scoremode.reports.table import Block, Note
from scoremode.reports.text import in_title
from scoremode.values import usable


def render(
    comparisons: Sequence[Comparison],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    more: Sequence[str] = (),
    beside: Sequence[ResultPart] = (),
) -> str:
    """The page as HTML; ``runs`` are shown in addition to comparisons, or alone.

    ``more`` are the names of statistics that the table has in addition to the usual ones, ``beside`` what else
    is known about the candidates.
    """

    compared = {run_key(run) for c in comparisons for run in (c.baseline, c.candidate)}
    alone = [run for run in runs if run_key(run) not in compared]
    baselines = [c.baseline for c in distinct_baselines(comparisons)] or alone
    texts = in_title(list(dict.fromkeys(str(run.manifest.get("corpus", "a text")) for run in baselines)))
    names, best, tied = [c.name for c in comparisons], None, list[int]()
    of_paths = are_of_paths(comparisons)
    if comparisons and (len(comparisons) == 1 or not of_paths):
        with suppress(RunError, IndexError):  # baselines or texts differ, or no candidate has a KL
            best, tied = closest_first(comparisons)[0] if len(comparisons) > 1 else (0, [])
    all_sections: list[tuple[str, str, Any]] = [
        ("summary", "Summary", summary_section(comparisons, alone, more)),
        ("quality", "Size", "" if of_paths else size_section(comparisons)),
        ("charts", "Charts", charts_section(comparisons)),
        *((part.field.replace("_", "-"), part.title, part.section()) for part in beside),
        ("text", "Text", text_section(comparisons, alone, text_targets)),
        ("publish", "Publish", "" if of_paths else publish_section(comparisons)),
        ("provenance", "Provenance", provenance_section(comparisons, alone)),
    ]
    return fill_page(
        "report.html",
        about=[about_run(run) for run in (*(r for c in comparisons for r in (c.baseline, c.candidate)), *alone)],
        title=_title(names, baselines, texts, of_paths=of_paths),
        baseline=baselines[0] if baselines else None,
        texts=texts,
        names=names,
        best=best,
        tied=in_title([names[i] for i in tied]),
        not_ranked=why_not_ranked(comparisons),
        s=comparisons[best].statistics() if best is not None else {},
        pairs=pairs_tested(comparisons),
        sections={name: title for name, title, html in all_sections if html},
        parts=[html for *_, html in all_sections],
        data={**page_data(comparisons, alone, text_targets), "first": worst_view(comparisons, alone)},
    )


def summary_section(comparisons: Sequence[Comparison], alone: Sequence[Run], more: Sequence[str]) -> Markup:
    """The tables of comparisons, of runs alone, and of slices of their texts."""
    names = [run_name(run, alone) for run in alone]
    blocks: list[Block] = [*slices_blocks(comparisons)] if comparisons else []
    if alone:
        blocks += [runs_table(alone, names, "Run"), *map(Note, runs_notes(alone, names))]
    for name, run in zip(names, alone, strict=True):
        slices = run_slices(run)
        blocks += [Note(name, "bold"), *slices] if slices and len(alone) > 1 else slices
    shown = summary(comparisons, more) if comparisons else None
    return fill("summary.html", summary=shown, blocks=blocks)


def publish_section(comparisons: Sequence[Comparison]) -> Markup:
    """The texts of a model card, to copy; a text that cannot be made is left out, with the reason."""
    texts, notes = [], []
    for title, make in (("Markdown table", markdown), ("Metadata (model-index)", metadata)) if comparisons else ():
        try:
            texts.append((title, make(comparisons)))
        except RunError as refused:
            notes.append(f"{title}: {refused}.")
    return fill("publish.html", texts=texts, notes=notes) if comparisons else Markup()


def provenance_section(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> Markup:
    named_runs: list[tuple[str, Run]] = []
    for c in comparisons:
        if run_key(c.baseline) not in {run_key(run) for _, run in named_runs}:
            named_runs.append(("baseline", c.baseline))
        named_runs.append((c.name, c.candidate))
    named_runs += [(run_name(run, alone), run) for run in alone]
    if not named_runs:
        return Markup()
    facts = [provenance_facts(run) for _, run in named_runs]
    shared = {k: v for k, v in facts[0].items() if len(facts) > 1 and all(f.get(k) == v for f in facts)}
    runs = []
    for (name, run), details in zip(named_runs, facts, strict=True):
        number = next((i for i, c in enumerate(comparisons) if c.candidate is run), None)  # the table links to it
        runs.append((name, number, {k: v for k, v in details.items() if k not in shared}))
    commands = distinct_commands(comparisons)
    first = ("Same for all runs", shared) if shared else None
    return fill("provenance.html", commands=commands, first=first, runs=runs)


def provenance_facts(run: Run) -> dict[str, str]:
    """Facts that another person needs to reproduce the numbers; those that the manifest lacks are left out."""
    m = run.manifest
    speed, seconds = usable(m.get("tokens_per_second")), usable(m.get("seconds"))
    return known(
        {
            "model": m.get("model"),
            "model revision": m.get("model_revision"),
            "model sha256": m.get("model_fingerprint"),
            **served_facts(m),
            "hardware": pairs(m.get("hardware")),
            "method": m.get("method"),
            "method settings": pairs(m.get("method_settings")),
            "corpus": m.get("corpus"),
            "corpus sha256": m.get("corpus_sha256"),
            "corpus bytes": f"{m['corpus_bytes']:,}" if usable(m.get("corpus_bytes")) is not None else None,
            "tokenizer": m.get("tokenizer"),
            "plan digest": run.plan_digest,
            "targets": f"{len(run.scores):,}",
            "windows": f"{m['windows']:,}" if usable(m.get("windows")) is not None else None,
            "notes": "; ".join(map(str, m.get("notes") or [])),
            "scored at": m.get("created") or m.get("finished"),
            "seconds": f"{seconds:,.1f}" if seconds is not None else None,
            "tokens/s": f"{speed:,.0f}" if speed is not None else None,
            "folder": run.path,
        }
    )


def distinct_commands(comparisons: Iterable[Any]) -> list[str]:
    """The commands that made comparisons, as typed, as far as they are known."""
    return list(dict.fromkeys(command for c in comparisons if (command := c.manifest.get("command"))))


def _title(candidates: Sequence[str], baselines: Sequence[Run], texts: str, *, of_paths: bool) -> str:
    if not baselines:
        return "Nothing to report"
    unnamed = "the baseline" if candidates else "a model"
    models = in_title(list(dict.fromkeys(str(run.manifest.get("model", unnamed)) for run in baselines)))
    if of_paths:
        return f"{in_title(candidates)} against prefill of {models}"
    return f"{in_title(candidates)} against {models}" if candidates else f"{models} on {texts}"


@dataclass(frozen=True, slots=True)
class ResultPage:
    """The page and the table of results of one kind: the code of a ``PageOffer``."""

    render: Callable[[Sequence[Any]], str]
    refusal: tuple[str, str]
    several: bool = False
    blocks: Callable[[Any], Sequence[Block]] | None = None  # what notebooks show of it

    def table(self, result: Any) -> str | None:
        return None if self.blocks is None else str(fill("notebook.html", blocks=self.blocks(result)))


def _blocks(result: Run | Comparison | Comparisons) -> Sequence[Block]:
    if isinstance(result, Run):
        return [run_facts(result)]
    comparisons = [result] if isinstance(result, Comparison) else list(result)
    return [comparison_table(comparisons), *comparison_notes(comparisons)]


@overload
def report(path: Path, *found: Any, **details: Any) -> Path: ...
@overload
def report(path: str | Path, *found: Any, **details: Any) -> Path | str: ...
@typed
def report(path: str | Path, *found: Any, **details: Any) -> Path | str:
    """Writes comparisons or runs as one HTML page. Other results need a page each: tasks, mismatch, attribution.

    Names of files of records make a page as well: docs/records.md.

    With ``rollouts`` that comparisons were made on, the page also shows where candidates part from these texts. Returns
    the path of the page, or its URI as text.

    >>> import scoremode as sm
    >>> sm.report("report.html", *sm.compare("ref/", "candidate"))     # doctest: +SKIP
    """
    check_report(path)  # before the work
    page = _page(str(path), found, details)
    output = check_report(path, page=page)
    output.write(page.encode())
    return output.where


def _page(path: str, results: Sequence[Any], details: Mapping[str, Any]) -> str:
    parts = offered(PartOffer)
    for name in details:
        if not any(name in part.arguments for part in parts):
            raise UnknownArgumentError(f"report has no argument {name}", fix="leave it out")
    if results and all(isinstance(result, str | Path) for result in results):
        names = list(map(str, results))
        if (files := format_shown(names)) is not None:
            return files.render(names, path)
    for offer in offered(PageOffer):
        page_results = [result for result in results if offer.fits(result)]
        if page_results and (page := offer.load()) is not RESULTS:
            if len(page_results) < len(results) or (len(page_results) > 1 and not page.several):
                raise InputError(page.refusal[0], fix=page.refusal[1])
            return page.render(page_results)
    comparisons = [f for f in results if isinstance(f, Comparison)]
    beside = []
    for part in parts:
        arguments = {name: value for name, value in details.items() if name in part.arguments and value}
        beside += [part.load().make(comparisons, **arguments)] if arguments and comparisons else []
    return _page_of(results, beside)


def _page_of(results: Sequence[Any], beside: Sequence[ResultPart] = ()) -> str:
    comparisons = [f for f in results if isinstance(f, Comparison)]
    runs = [f for f in results if isinstance(f, Run)]
    if len(comparisons) + len(runs) < len(results):
        other = next(f for f in results if not isinstance(f, Comparison | Run))
        problem = f"found is of the type {type(other).__name__}, which no report shows"
        raise InputError(problem, fix="give comparisons or runs, or names of files of records")
    return render(comparisons, runs=runs, beside=beside)


RESULTS: ResultView = ResultPage(_page_of, ("comparisons and runs are shown with each other alone", ""), True, _blocks)
