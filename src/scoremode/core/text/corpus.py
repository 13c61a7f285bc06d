"""Named or local text ─▶ Corpus: rows that can be read any number of times, with a sha256.

A corpus does not keep its text in memory: each pass reads the source again, so a long file is in memory only during
the step that needs it, and of rows one at a time. The corpus's layout says how its rows are related, because recipes
treat them differently:

layout      rows                                       example
text        one document, verbatim                     notes.txt, --text, stdin
lines       the lines of one long text                 wikitext2
documents   unrelated texts                            python-docs, several files, .jsonl, .parquet, --dataset
chat        conversations (lists of messages)          .jsonl rows with "messages"
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from glob import glob
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from scoremode import errors
from scoremode.core import entry_points
from scoremode.core.disk.stores import store_of
from scoremode.core.disk.uri import RemotePath, is_uri, located, refuse_broken_uri
from scoremode.core.entry_points import Plugins
from scoremode.core.extensions import TextOffer, offered
from scoremode.core.options import option
from scoremode.core.reading import read_text, text_waits
from scoremode.core.text.files import (
    Row,
    RowsOf,
    check_readable,
    decoded,
    hub_dataset,
    is_text,
    lines_of,
    parquet_column,
    parquet_rows,
    require_datasets,
    rows_of_file,
    text_in_file,
    unchanged,
    wikitext2_from_hub,
)
from scoremode.core.typed import typed
from scoremode.errors import CorpusError, InputError, OptionError, StorageError

Layout = Literal["text", "lines", "documents", "chat"]

WIKITEXT2_BLANK = " \n"  # a blank line of wiki.test.raw; the rows on the hub have "" instead
ROWS = (".jsonl", ".ndjson", ".parquet")  # files of rows
TEXTS = (".txt", ".md", *ROWS)  # files that are read from a folder


@dataclass(frozen=True)
class Corpus:
    """Text with a name and a sha256. ``rows()`` starts a new pass over the source."""

    name: str
    layout: Layout
    rows: RowsOf
    sha256: str  # of the text itself ("text"), else of the rows as JSON lines
    row_count: int
    byte_count: int
    parts: tuple[str, ...] = ()  # the names of the texts, if there are several
    notes: tuple[str, ...] = ()  # what a reader of the result should know about the text
    own_tokens: Callable[..., Any] | None = None
    """Makes the documents and ``Tokens`` of texts that have prompts as context, from a tokenizer and rules of slices.
    None: the tokens are those of the rows."""

    def texts(self) -> Iterator[str]:
        """The rows as texts, for a corpus that is not a chat."""
        assert self.layout != "chat", "chat rows become text through a chat template"
        return cast(Iterator[str], self.rows())


@runtime_checkable
class CorpusSource(Protocol):
    """An object that can be given as a corpus, such as ``Rollouts``."""

    def as_corpus(self, count: int | None = None) -> Corpus:
        """Returns its texts as a corpus: all of them, or the first ``count``."""


def kind_of(corpus: Any) -> TextOffer | None:
    """The kind of text that an object is, or that the prefix of a name stands for; None for other texts."""
    names = corpus if isinstance(corpus, list | tuple) else [corpus]
    prefix = getattr(corpus, "prefix", None)  # of the texts of a wing
    for kind in offered(TextOffer):
        is_named = any(isinstance(name, str | os.PathLike) and str(name).startswith(kind.prefix) for name in names)
        if is_named or prefix == kind.prefix:
            return kind
    return None


Spec = str | os.PathLike[str]

DEFAULT = "python-docs-short"  # the text of a question that names none: a CPU answers it in about a minute
DEFAULT_NOTE = "the default text: "
SHORT_DOCUMENTS, SHORT_CHARACTERS = 24, 800  # of one length: at least 20 effective documents


def default() -> str:
    """The name of the default text. The command line refuses it where a text waits on standard input.

    Such a text is not scored unless asked for: in a loop with ``while read model`` it is the rest of the list.
    """
    if errors.names_flags and text_waits():
        fix = "give --corpus - to score it, or add < /dev/null to score the default text"
        raise CorpusError("a text waits on standard input, and no text is named", fix=fix)
    return DEFAULT


@dataclass(frozen=True, kw_only=True)
class TextSelection:
    """Which text is scored: names and files, a text itself, or a dataset. What cannot work is refused when it is made.

    Nothing is read or fetched for that.
    """

    corpus: Spec | Sequence[Spec] | Corpus | CorpusSource | None = option(  # noqa: RUF009 - it makes a field
        "wikitext2, wikitext2:FILE, python-docs, a file (.txt .md .jsonl .parquet), folder, pattern, "
        f"{''.join(f'{text.prefix}{text.value}, ' for text in offered(TextOffer))}- for stdin",
        metavar="TEXT",
        group="text",
        repeated=True,
    )
    text: str | None = option("a text given here (without any: python-docs-short)", metavar="TEXT", group="text")
    dataset: str | None = option("a dataset on the Hugging Face hub", metavar="NAME", group="text")
    dataset_config: str | None = option("of the dataset", metavar="CONFIG", group="text")
    split: str | None = option("of the dataset (default: test)", metavar="SPLIT", group="text")
    field: str | None = option("of .jsonl or .parquet rows (default: text, or messages)", metavar="FIELD", group="text")
    num_samples: int | None = option("only the first N rows (of one plain text: lines)", metavar="N", group="text")

    def __post_init__(self) -> None:
        if self.names_text and not isinstance(self.corpus, Corpus | CorpusSource):
            self._check()

    @property
    def names_text(self) -> bool:
        """Is a text named? Else it is that of a reference, or the default."""
        return any(value is not None for value in (self.corpus, self.text, self.dataset))

    @property
    def names(self) -> list[str]:
        """The names of the texts, as in ``--corpus``."""
        return [] if isinstance(self.corpus, Corpus | CorpusSource) else _names_in(self.corpus)

    def _check(self) -> None:
        for name in ("text", "field", "dataset", "dataset_config", "split"):
            if getattr(self, name) == "":
                example = ", as in --text WORDS" if name == "text" else ""
                raise CorpusError(f"{_flag(name)} is empty", fix=f"give it a value{example}")
        names, dataset = self.names, self.dataset
        flags = [f for f, value in (("--corpus", names), ("--text", self.text), ("--dataset", dataset)) if value]
        if len(flags) != 1:
            message = " and ".join(flags) + " were given together" if flags else "no text was given"
            raise CorpusError(message, fix=ONE_TEXT)
        if self.text is not None and not is_text(self.text):
            raise CorpusError("--text is not UTF-8", fix="give text in UTF-8, or a file with --corpus")
        if not dataset and (self.dataset_config or self.split):
            flag = "--dataset-config" if self.dataset_config else "--split"
            raise CorpusError(f"{flag} was given without --dataset", fix=f"name a dataset, or leave {flag} out")
        if self.num_samples is not None and self.num_samples < 1:
            raise CorpusError(f"--num-samples {self.num_samples} leaves no text", fix="give 1 or more")
        is_file = bool(dataset) and str(dataset).lower().endswith((*TEXTS, ".raw")) and os.path.isfile(str(dataset))
        if dataset in corpora().found or is_file:
            raise CorpusError(f"{dataset} is no dataset but a text that is known here", fix=f"give --corpus {dataset}")
        if dataset:
            require_datasets()
        if (kind := kind_of(names)) is not None:
            _check_alone(names, self.field, kind)
            kind.load().check(names[0].removeprefix(kind.prefix))
            return
        for name in names:
            named_text(name, fetch=False)


ONE_TEXT = "give one of --corpus NAME-or-FILE, --text TEXT, --dataset NAME"


def _check_alone(specs: list[str], field: str | None, kind: TextOffer) -> None:
    """Refuses texts of a kind together with other texts, and a field of them."""
    kind_name = kind.prefix.removesuffix(":")
    if len(specs) > 1:
        raise CorpusError(f"{kind_name} were given together with other texts", fix="score them in separate runs")
    if field is not None:
        raise CorpusError(f"--field does not apply to {kind_name}", fix="leave --field out")


@typed
def load(corpus: Spec | Sequence[Spec] | Corpus | CorpusSource | None = None, **more: Any) -> Corpus:
    """Loads one corpus: by names or files (``-`` for standard input), or as ``text=`` or ``dataset=``.

    >>> load(text="The quick brown fox").sha256[:12]
    '5cac4f980fed'
    """
    return open_text(TextSelection(corpus=corpus, **more))


def open_text(selection: TextSelection) -> Corpus:
    """The corpus that a user selected."""
    corpus, field, num_samples = selection.corpus, selection.field, selection.num_samples
    kind = kind_of(corpus)
    if isinstance(corpus, CorpusSource):
        if kind is not None:
            _check_alone([], field, kind)
        return _already_loaded(corpus.as_corpus(num_samples), replace(selection, num_samples=None))
    if isinstance(corpus, Corpus):
        return _already_loaded(corpus, selection)
    names, texts = selection.names, list[NamedText]()
    if kind is not None:
        return kind.load().open(names[0].removeprefix(kind.prefix)).as_corpus(num_samples)
    sources: list[Source]
    if selection.dataset:
        sources = [hub_dataset(selection.dataset, selection.dataset_config, selection.split, field)]
    elif names:
        texts = [named_text(name) for name in names]
        sources = [open_source(field) for _, unread in texts for open_source in unread]
    elif selection.text is not None:
        sources = [("text", "text", lambda: iter([selection.text or ""]))]
    else:
        raise CorpusError("no text was given", fix=ONE_TEXT)
    if field is not None and not selection.dataset and not any(name.lower().endswith(ROWS) for name, _, _ in sources):
        raise CorpusError("--field does not apply to plain text", fix="leave --field out, or give .jsonl or .parquet")
    opened = _single_source(*sources[0], num_samples) if len(sources) == 1 else _combined(sources, num_samples)
    if names == [DEFAULT]:
        cut = f"the first {SHORT_CHARACTERS:,} characters of {opened.row_count} documents of python-docs"
        opened = replace(opened, notes=(f"{DEFAULT_NOTE}{cut}",))
    return replace(opened, name="+".join(label for label, _ in texts)) if texts else opened


Source = tuple[str, Layout, RowsOf]
NamedText = tuple[str, list[Callable[[str | None], Source]]]
"""What a text is called in results, and what opens its sources; each takes the field of rows that has the text."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _already_loaded(corpus: Corpus, selection: TextSelection) -> Corpus:
    others = (f.name for f in fields(TextSelection) if f.name != "corpus" and getattr(selection, f.name) is not None)
    if name := next(others, None):
        raise OptionError(f"{_flag(name)} does not apply to a Corpus that is already loaded", fix="give it to load()")
    return corpus


def _names_in(corpus: Spec | Sequence[Spec] | None) -> list[str]:
    if corpus is None:
        return []
    names = [str(name) for name in (corpus if isinstance(corpus, list | tuple) else [corpus])]
    if "" in names:
        raise CorpusError("--corpus is empty", fix="give a name or a file")
    if names.count("-") > 1:
        raise CorpusError("- was given twice, and standard input can be read only once", fix="give it once")
    return names


# ── rows, counted and hashed ─────────────────────────────────────────────────────────────────────────────────────────
def _single_source(name: str, layout: Layout, rows: RowsOf, count: int | None) -> Corpus:
    """The corpus of one source: all of it, or its first ``count`` rows, or lines if it is a plain text."""

    def first_lines() -> Iterator[Row]:
        for text in cast(Iterator[str], rows()):
            yield "".join(islice(lines_of(text), count))

    is_cut = layout == "text" and count is not None
    return _corpus_of_rows(name, layout, first_lines if is_cut else _first(rows, count))


def _first(rows: RowsOf, count: int | None) -> RowsOf:
    return lambda: islice(rows(), count)


def _combined(sources: Sequence[Source], count: int | None) -> Corpus:
    """The corpus of several sources in the given order: all rows, or the first ``count``; a plain text is one row."""
    layouts = {layout for _, layout, _ in sources}
    if "chat" in layouts and len(layouts) > 1:
        raise CorpusError("chat files and text files were given together", fix="score them in separate runs")
    if "lines" in layouts:  # they are one text, and would become documents
        problem = "the lines of WikiText and other texts were given together"
        raise CorpusError(problem, fix="score them in separate runs")
    hasher, parts, left = hashlib.sha256(), list[Corpus](), count
    for name, layout, rows in sources:
        if left == 0:
            fix = f"leave {name} out, or give a larger --num-samples"
            raise CorpusError(f"--num-samples {count} leaves no rows of {name}", fix=fix)
        parts.append(_corpus_of_rows(name, layout, _first(rows, left), hasher))
        left = None if left is None else left - parts[-1].row_count
    names = tuple(part.name for part in parts)
    return Corpus(
        name="+".join(names),
        layout="chat" if "chat" in layouts else "documents",
        rows=lambda: chain.from_iterable(part.rows() for part in parts),
        sha256=hasher.hexdigest(),
        row_count=sum(part.row_count for part in parts),
        byte_count=sum(part.byte_count for part in parts),
        parts=names,
        notes=tuple(note for part in parts for note in part.notes),
    )


def _corpus_of_rows(name: str, layout: Layout, rows: RowsOf, together: Any = None) -> Corpus:
    """Makes a corpus in one pass over its rows; ``together`` is the hasher of the corpus that it is a part of.

    A text is hashed verbatim, other rows as lines of JSON.
    """
    sha256, row_count, byte_count, marked = hashlib.sha256(), 0, 0, False
    for row in rows():
        data = row.encode() if isinstance(row, str) else json.dumps(row, ensure_ascii=False, sort_keys=True).encode()
        if layout == "text":
            sha256.update(data)
            marked = marked or data.startswith(BOM_UTF8)
        if layout != "text" or together is not None:
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
            for hasher in (together, None if layout == "text" else sha256):
                if hasher is not None:
                    hasher.update(line)
        row_count, byte_count = row_count + 1, byte_count + len(data)
    if byte_count == 0:
        raise CorpusError(f"{name} contains no text", fix="give a file with at least two tokens of text")
    note = f"{name} begins with a byte order mark, which is scored as part of the text"
    return Corpus(name, layout, rows, sha256.hexdigest(), row_count, byte_count, notes=(note,) if marked else ())


# ── named corpora ────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class NamedCorpus:
    """A text that has a name. Other packages add corpora with an entry point in the group "scoremode.corpora"."""

    layout: Layout
    open: Callable[[], RowsOf]  # checks that the text is available; its result starts a new pass over the rows
    summary: str = ""


@cache
def corpora() -> Plugins[NamedCorpus]:
    """The built-in corpora, those of other packages, and those that were refused."""
    theirs = entry_points.load("scoremode.corpora", OURS, _accepted)
    return Plugins({**OURS, **theirs.found}, theirs.refused)


def _accepted(name: str, loaded: object) -> NamedCorpus:
    if not isinstance(loaded, NamedCorpus):
        raise ValueError("it is not a scoremode.core.text.corpus.NamedCorpus; ask its author to fix it")
    return loaded


# ── what a name stands for ───────────────────────────────────────────────────────────────────────────────────────────
def named_text(name: str, *, fetch: bool = True) -> NamedText:
    """Finds out what a name stands for, and refuses a file that cannot be read; nothing is read before it is opened.

    -                        standard input
    python-docs              a corpus that has a name
    s3://BUCKET/KEY          copies of what is behind a URI; without ``fetch``, none are made
    wikitext2:FILE           a copy of WikiText-2, also behind a URI
    notes/   notes/*.txt     the files of a folder, and those that match a pattern, sorted by name
    notes.txt   rows.jsonl   a file
    """
    file = name.removeprefix("wikitext2:")
    if name == "-":
        return "stdin", [lambda field: ("stdin", "text", _standard_input())]
    if (corpus := corpora().found.get(name)) is not None:
        return name, [lambda field: (name, corpus.layout, corpus.open())]
    for refused in corpora().refused:
        if refused.name == name and not os.path.exists(name):
            raise CorpusError(f"the corpus '{name}' cannot be used", fix=str(refused))
    if is_uri(file):
        texts = [named_text(name.removesuffix(file) + path) for path in (_local_copies(file) if fetch else ())]
        return "wikitext2" if file != name else Path(file).name, [source for _, unread in texts for source in unread]
    if file != name:
        check_readable(Path(file))
        return "wikitext2", [lambda field: ("wikitext2", "lines", _wikitext2_lines(Path(file)))]
    refuse_broken_uri(name)
    is_pattern = any(sign in name for sign in "*?[") and not os.path.exists(name)
    files = _matching_files(name) if is_pattern else _visible_texts(name) if os.path.isdir(name) else [Path(name)]
    return name if is_pattern else Path(name).name or name, [_unread_file(path) for path in sorted(files, key=str)]


def _local_copies(uri: str) -> list[str]:
    """The path that a file:// URI names; of other URIs, paths of copies of the texts."""
    try:
        place = located(uri)
        copies = store_of(place).copies_of_texts(place, TEXTS) if isinstance(place, RemotePath) else [place]
    except (InputError, StorageError) as error:
        raise CorpusError(error.message, fix=error.fix) from None
    return [str(path) for path in copies]


def _visible_texts(folder: str) -> list[Path]:
    try:
        paths = [path for path in Path(folder).rglob("*") if path.suffix.lower() in TEXTS and path.is_file()]
    except RecursionError:
        raise CorpusError(f"the folders in {folder} are too deep", fix="name a folder further inside") from None
    texts = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not texts:
        fix = f"put files there that end in {' '.join(TEXTS)}"
        raise CorpusError(f"the folder {folder} contains no text", fix=fix)
    return texts


def _matching_files(pattern: str) -> list[Path]:
    files = [path for path in map(Path, glob(pattern, recursive=True)) if path.is_file()]
    if not files:
        fix = "check it; in a shell it needs quotes, as in 'notes/*.txt'"
        raise CorpusError(f"no file matches the pattern {pattern}", fix=fix)
    return files


def _unread_file(path: Path) -> Callable[[str | None], Source]:
    check_readable(path)
    if path.name.lower().endswith(ROWS):
        return lambda field: (path.name, *rows_of_file(path, field))
    return lambda field: (path.name, "text", text_in_file(path))


def _standard_input() -> RowsOf:
    """The text that is piped in. It can be read only once, so it is kept."""
    fix = "pipe a text into it, as in: scoremode ppl MODEL --corpus - < notes.txt"
    if sys.stdin is None:
        raise CorpusError("standard input is closed", fix=fix)
    try:
        text = decoded(read_text(sys.stdin.buffer, "standard input"), "standard input")
    except (OSError, ValueError) as error:
        raise CorpusError(f"standard input cannot be read ({error})", fix=fix) from None
    return lambda: iter([text])


def _python_docs() -> Iterator[Row]:
    """The prose of Python's reference topics, which every Python installation includes."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _python_docs_short() -> Iterator[Row]:
    long = (row for row in _python_docs() if len(row) >= SHORT_CHARACTERS)
    for row in islice(long, SHORT_DOCUMENTS):
        yield row[:SHORT_CHARACTERS]


def _wikitext2_lines(path: Path) -> RowsOf:
    """A local wiki.test.raw (or the hub's Parquet file) as the same rows as on the hub."""
    if path.suffix.lower() == ".parquet":
        column = parquet_column(path, "text")
        return unchanged(path, lambda: parquet_rows(path, column))
    texts = text_in_file(path)
    return lambda: (line if line.strip() else "" for text in texts() for line in lines_of(text))


OURS = {
    "wikitext2": NamedCorpus("lines", wikitext2_from_hub, "the test part of WikiText-2, from the Hugging Face hub"),
    "python-docs": NamedCorpus("documents", lambda: _python_docs, "Python's own reference topics, on every machine"),
    DEFAULT: NamedCorpus("documents", lambda: _python_docs_short, "the beginnings of 24 of them: the default"),
}
"""The built-in corpora."""
