"""``sm.card``: comparisons in a dialect of publishers, as text, in a README or as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scoremode.core.arguments import path_text
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.runs import is_run
from scoremode.core.verbs.finished_runs import of_runs
from scoremode.core.verbs.outputs import write_files
from scoremode.errors import InputError, OptionError, did_you_mean
from scoremode.reports import publish, readme

Place = str | Path | None

# files that may be replaced have these words, as publish.py writes them
MARKS = {"eval-results": "; scoremode ", "json": '"scoremode": "'}


def card(
    *found: str | Path | Comparison,
    dialect: str = "markdown",
    write: str | Path | None = None,
    out: str | Path | None = None,
    benchmark: str | None = None,
    task_id: str | None = None,
    metric: str | None = None,
) -> str | dict[str, str]:
    """Returns comparisons as a part of a model card; ``eval-results`` and ``json`` are texts of files, by their names.

    ``found`` are comparisons, the folder of ``compare(…, out=…)``, or folders of runs, the baseline first. ``write``
    also replaces what stands between two markers of a README. ``out`` also writes the files there. ``benchmark`` and
    ``task_id`` say where the hub lists ``eval-results``, ``metric`` which statistic that is.

    >>> import scoremode as sm
    >>> sm.card(*sm.compare("table:uniform", "table:uniform", text="any text"), dialect="compact").splitlines()[0]
    '| model | size | perplexity | KL | same top |'
    """
    where = benchmark, task_id, metric
    return published(found, dialect=dialect, write=write, out=out, where=where)[0]


def published(
    found: Sequence[str | Path | Comparison], *, dialect: str, write: Place, out: Place, where: tuple[str | None, ...]
) -> tuple[str | dict[str, str], list[str]]:
    """The text or the files of a card, and lines that say what was written. Arguments are as those of ``card``."""
    if dialect not in publish.dialects():
        raise OptionError(f"there is no dialect '{dialect}'", fix=did_you_mean(dialect, publish.dialects()))
    in_files, (dataset, task, metric) = dialect in publish.FILES, where
    if write is not None and in_files:
        raise OptionError(f"--write does not fit --dialect {dialect}", fix="give --out DIR")
    if out is not None and not in_files:
        raise OptionError(f"--out does not fit --dialect {dialect}", fix="give --write README.md")
    benchmark = publish.Benchmark(dataset, task, metric or "ppl_candidate") if dataset and task else None
    markers = readme.YAML_MARKERS if dialect == "model-index" else readme.MARKERS
    output = None if write is None else readme.check_readme(str(write), markers)  # before columns are read
    compared = _compared(found)
    if in_files:
        files = publish.published_files(dialect, compared, benchmark)
        texts = {Path(out, name): text for name, text in files.items()} if out is not None else {}
        written = write_files(texts, "--out", "a card of scoremode", MARKS[dialect])
        return files, [f"written to {one}" for one in written]
    text = publish.readme_parts()[dialect](compared)
    if output is None:
        return text, []
    changed = readme.replace_between(output, text, markers)
    return text, [f"{output} {'now has' if changed else 'already has'} these results"]


def _compared(found: Sequence[str | Path | Comparison]) -> list[Comparison]:
    compared = [one for one in found if isinstance(one, Comparison)]
    if compared and len(compared) == len(found):
        return compared
    if compared or not found:
        raise InputError("a card is made of comparisons, or of folders of runs", fix="give one kind of them")
    first, *others = readme.run_folders([path_text("found", one) for one in found])
    if not others:
        what = "is one run, and a card compares" if is_run(first) else "is not a folder of compare --out"
        raise InputError(f"{first} {what}", fix="give the baseline's run, then those of its candidates")
    return of_runs(first, others)
