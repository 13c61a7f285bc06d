"""``sm.card``: comparisons in a dialect of publishers, as text, between two markers of a README, or as records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scoremode.core.disk.uri import is_uri
from scoremode.core.reading import read_file
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.runs import is_run
from scoremode.core.typed import typed
from scoremode.core.verbs.baselines import of_runs
from scoremode.core.verbs.outputs import ANY, EVALUATION, Output, check_output, write_files
from scoremode.errors import InputError, OptionError, did_you_mean
from scoremode.reports.model_card import readme_parts
from scoremode.reports.publish import RECORD_FILE, evaluation_files, record_files

MARKERS = ("<!-- scoremode begin -->", "<!-- scoremode end -->")
YAML_MARKERS = ("# scoremode begin", "# scoremode end")
KINDS = {"json": RECORD_FILE, "eval-results": EVALUATION}


@typed
def card(
    *found: str | Path | Comparison,
    dialect: str = "markdown",
    write: str | Path | None = None,
    out: str | Path | None = None,
    benchmark: str | None = None,
    task_id: str | None = None,
    metric: str | None = None,
    few_documents: bool = False,
) -> str | dict[str, str]:
    """Returns comparisons as a part of a model card; ``json`` and ``eval-results`` are texts by names of files.

    ``found`` are comparisons, the folder of ``compare(…, out=…)``, or folders of runs, the baseline first. ``write``
    also puts the text between two markers of a README. With ``out``, the files are also written to that folder.
    ``benchmark`` and ``task_id`` say where the hub lists ``eval-results``, ``metric`` which statistic that is.
    ``few_documents`` is that of ``compare``.

    >>> import scoremode as sm
    >>> sm.card(*sm.compare("table:uniform", "table:uniform", text="any text"), dialect="exl3").splitlines()[0][:15]
    '| model | bpw |'
    """
    where = benchmark, task_id, metric
    few = few_documents
    return published(found, dialect=dialect, write=write, out=out, where=where, few_documents=few)[0]


def published(
    sources: Sequence[str | Path | Comparison],
    *,
    dialect: str,
    write: str | Path | None,
    out: str | Path | None,
    where: tuple[str | None, str | None, str | None],
    few_documents: bool = False,
) -> tuple[str | dict[str, str], list[str]]:
    """The text or the records of a card, and lines that say what was written. Arguments are as those of ``card``."""
    dialects = [*readme_parts(), *KINDS]
    if dialect not in dialects:
        raise OptionError(f"there is no dialect '{dialect}'", fix=did_you_mean(dialect, dialects))
    if write is not None and dialect in KINDS:
        raise OptionError(f"--write does not fit --dialect {dialect}", fix="give --out DIR")
    if out is not None and dialect not in KINDS:
        raise OptionError(f"--out does not fit --dialect {dialect}", fix="give --write README.md")
    markers = YAML_MARKERS if dialect == "model-index" else MARKERS
    output = None if write is None else check_readme(str(write), markers)  # before columns are read
    compared = [replace(c, few_documents=c.few_documents or few_documents) for c in _compared(sources)]
    if dialect in KINDS:
        files = record_files(compared) if dialect == "json" else evaluation_files(compared, *where)
        texts = {Path(out, name): text for name, text in files.items()} if out is not None else {}
        return files, [f"written to {output}" for output in write_files(texts, "--out", KINDS[dialect])]
    text = readme_parts()[dialect](compared)
    if output is None:
        return text, []
    changed = replace_between(output, text, markers)
    return text, [f"{output} {'now has' if changed else 'already has'} these results"]


def _compared(sources: Sequence[str | Path | Comparison]) -> list[Comparison]:
    compared = [source for source in sources if isinstance(source, Comparison)]
    if compared and len(compared) == len(sources):
        return compared
    if compared or not sources:
        raise InputError("a card is made of comparisons, or of folders of runs", fix="give one kind of them")
    first, *others = run_folders(list(map(str, sources)))
    if not others:
        problem = "is one run, and a card compares" if is_run(first) else "is not a folder of compare --out"
        raise InputError(f"{first} {problem}", fix="give the baseline's run, then those of its candidates")
    return of_runs(first, others)


def run_folders(folders: list[str]) -> list[str]:
    """The runs that were named, baseline first; for the folder of ``compare --out``, the runs inside it."""
    if len(folders) > 1 or is_uri(folders[0]) or is_run(folders[0]) or not is_run(Path(folders[0], "baseline")):
        return folders
    inside = sorted(p for p in Path(folders[0]).iterdir() if p.is_dir() and p.name != "baseline" and is_run(p))
    return [str(Path(folders[0], "baseline")), *map(str, inside)]


def check_readme(name: str, markers: tuple[str, str]) -> Output:
    """Checks the file of ``--write`` before any column is read; InputError says what to add to it."""
    output = check_output(name, "--write", ANY)  # only what is between its markers is replaced
    if output.place is not None:
        raise InputError(f"{name} is not a file on this machine", fix="give --write a README.md")
    _parts(output, markers)
    return output


def replace_between(output: Output, text: str, markers: tuple[str, str]) -> bool:
    """Writes the text between the markers; returns whether the file changed.

    The text gets the file's line endings.
    """
    before, between, after = _parts(output, markers)
    end = b"\r\n" if b"\r\n" in between else b"\n"
    new = before + f"\n{text.strip()}\n".encode().replace(b"\n", end) + after
    if new == before + between + after:
        return False
    output.write(new)
    return True


def _parts(output: Output, markers: tuple[str, str]) -> tuple[bytes, bytes, bytes]:
    """The bytes up to the end of the first marker, those between, and those from the second marker on."""
    name, (begin, end) = output.name, markers
    add = f"add these two lines where the results belong: {begin} and {end}"
    try:
        content = read_file(output.path)
        content.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        why = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read ({reason})"
        raise InputError(f"{name} {why}", fix=f"give --write a text file, and {add}") from None
    before, begin_marker, rest = content.partition(begin.encode())
    between, end_marker, after = rest.partition(end.encode())
    if not begin_marker or not end_marker or content.count(begin.encode()) > 1 or content.count(end.encode()) > 1:
        raise InputError(f"{name} does not have one {begin} and after it one {end}", fix=add)
    return before + begin_marker, between, end_marker + after
