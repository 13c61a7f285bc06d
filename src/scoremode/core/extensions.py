"""What wings can add to scoremode: the one file to read before writing a wing.

A wing is a folder with a ``wing.py`` that declares ``WING``. The folders themselves are the list: a folder that is
deleted takes its verbs, flags and public names along, and nothing else changes. Engines have a list of their own:
see engine/registry.py.

wing.py     data: names, flags, prefixes, and addresses of code (``module:name`` below scoremode)
an offer    the data that tells whether the wing is meant, and ``load()``, which imports its code

So nothing of a wing is imported in order to learn that it is not meant. The code of an offer is what the protocol
above it says. There are eight kinds of offers:

BaselineOffer   files that candidates are compared with        ReplicasOffer  a model as several replicas
FormatOffer     files and layouts of other programs            StoreOffer     files behind URIs
TextOffer       texts whose names have a prefix                NamesOffer     names of models elsewhere
PageOffer       results that have a page of their own          PartOffer      what comparisons show beside their numbers
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from scoremode.core.reading import open_regular

if TYPE_CHECKING:  # for its types alone, this page looks up to rooms above it
    import argparse

    from scoremode.core.disk.uri import RemotePath
    from scoremode.core.engine.base import Engine, EngineFacts
    from scoremode.core.engine.plugin import Work
    from scoremode.core.engine.registry import ChosenEngine
    from scoremode.core.plan.question import Question
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.store.run import Run
    from scoremode.core.text.corpus import CorpusSource
    from scoremode.core.verbs.baselines import OpenBaseline
    from scoremode.core.verbs.model import LazyModel
    from scoremode.core.verbs.place import Place
    from scoremode.core.verbs.progress import Progress
    from scoremode.core.verbs.replicas import OpenWorker, Pieces, Spread
    from scoremode.reports.table import Block
    from scoremode.values import Bools

HOUSE = Path(__file__).parents[1]
PACKAGE = __name__.split(".", maxsplit=1)[0]
T = TypeVar("T")
Flags = Mapping[str, str]
"""Flags as the help shows them, and what they do.

``--out DIR`` has a value, ``--fresh`` is a switch, ``--target TEXT …`` may be given again, N is a whole number, and
``N,…`` are one or several.
"""


def load(address: str) -> Any:
    """Imports the object at an address, ``module:name``."""
    module, _, name = address.partition(":")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Generic[T]):
    """One thing that a wing hands over."""

    code: str
    """The address of what does the work."""

    needs: str = ""
    """A folder without which it is not offered, as in ``reports/html``."""

    def load(self) -> T:
        code: T = load(self.code)
        return code


# ── baselines ────────────────────────────────────────────────────────────────────────────────────────────────────────
class ComparisonBaseline(Protocol):
    """A baseline of any kind."""

    def accept(
        self,
        question: Question,
        of_baseline: Mapping[str, Any],
        models: Mapping[str, LazyModel],
        finished: Sequence[str],
    ) -> Mapping[str, LazyModel]:
        """Refuses arguments and candidates that it cannot take: models, or ``finished`` runs.

        ``of_baseline`` are arguments of the baseline alone, by name. Returns the models, with what they must have from
        the baseline.
        """
        return models

    def open_for(self, candidate: LazyModel, question: Question, place: Place) -> AbstractContextManager[OpenBaseline]:
        """Opens it for one candidate; refuses a candidate that cannot be compared with it."""

    def finished(self, question: Question, place: Place) -> Run:
        """Its run, for candidates that are finished runs."""


class StoredKind(Protocol):
    """A class of baselines that are stored."""

    def __call__(self, name: str, /) -> ComparisonBaseline:
        """The baseline with a name that it claims."""

    def claims(self, name: str) -> bool:
        """Is a baseline of this kind stored under the name?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineOffer(Offer[StoredKind]):
    """Files that a candidate can be compared with."""

    suffix: str  # of their names
    begins: bytes  # what the files themselves begin with, whatever they are called
    about: str  # for the help of ``compare``: "a .kld file"

    def claims(self, name: str) -> bool:
        return self._may_claim(name) and self.load().claims(name)

    def _may_claim(self, name: str) -> bool:
        if self.suffix in name:
            return True
        try:
            with open_regular(Path(name)) as file:
                return file.read(len(self.begins)) == self.begins
        except (OSError, ValueError):
            return False


# ── formats of other programs ────────────────────────────────────────────────────────────────────────────────────────
class Format:
    """Files and layouts of another program. A wing's class has the methods for what its offer declares."""

    def score(self, model: LazyModel, file: str | Path, question: Question, place: Place) -> Run:
        """For ``reference``: scores the question and writes the file alone; the run is not kept.

        Refuses, before that, a file that cannot be written, a question that it cannot have, and a folder for the run.
        """
        raise NotImplementedError

    def used_by(self, file: str) -> list[str]:
        """For ``reference``: lines that say what to do with the file."""
        raise NotImplementedError

    def check(self, folder: str | Path | None, candidates: Mapping[str, Path | RemotePath | None]) -> None:
        """For ``compare``: refuses what cannot be written, before anything is scored.

        The files go into ``folder``, or into the candidates' runs; ``candidates`` are names as in tables, with the
        folders of their runs.
        """
        raise NotImplementedError

    def write(self, comparisons: Sequence[Comparison], place: Place, folder: str | Path | None) -> None:
        """For ``compare``: writes files into the runs below ``place.out``, and to the folder, if one was named."""
        raise NotImplementedError

    def text(self, comparison: Comparison) -> str:
        """For ``compare`` and ``card``: a comparison in the layout."""
        raise NotImplementedError

    def claims(self, names: Sequence[str]) -> bool:
        """For ``report``: are these its files? InputError if only some of them are."""
        raise NotImplementedError

    def show(self, parsed: argparse.Namespace) -> None:
        """For ``report``: does what the verb was asked for."""
        raise NotImplementedError

    def render(self, names: Sequence[str], page: str) -> str:
        """For ``report``: the HTML page; ``page`` is the file that it will be written to."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOffer(Offer[Format]):
    """A format of another program. Its class needs only the methods for what is declared here."""

    name: str
    """Of the argument that names its file, and of its layout."""

    reference: Flags = field(default_factory=dict)
    """The flag of ``reference`` for a file that it writes instead of hidden states."""

    instead_of_states: str = ""
    """What to do with a baseline that has no hidden states."""

    compare: Flags = field(default_factory=dict)
    """The flag of ``compare`` for files that every comparison leaves besides its runs."""

    layout: str = ""
    """What a comparison is in this layout: the help of ``compare --NAME``, a dialect of ``card``."""

    title: str = ""
    """How the layout is introduced in a model card."""

    report: str = ""
    """Files, not runs, that ``report`` shows: what they are, for the help."""

    suffix: str = ""
    """Of the names of these files."""


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class TextReader(Protocol):
    """Reads texts whose names have a prefix. Their class has the prefix as ``prefix``."""

    def check(self, name: str, /) -> object:
        """Refuses a name that cannot work; nothing is read. The prefix is removed."""

    def open(self, name: str, /) -> CorpusSource:
        """Reads what a name without the prefix stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOffer(Offer[TextReader]):
    """Texts whose names have a prefix, as in ``rollouts:DIR``."""

    prefix: str
    value: str  # what stands behind the prefix, for the help: DIR
    whole_divergence: bool = False  # do comparisons need more than KL?
    as_baseline: str = ""  # what to type for a comparison of a model with the texts themselves


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class ResultView(Protocol):
    """How results of a class are shown. ``reports/html/page.py`` has a class for it."""

    @property
    def refusal(self) -> tuple[str, str]:
        """What is wrong with results that cannot be on this page, and what to do."""

    @property
    def several(self) -> bool:
        """Can one page show several of them?"""

    def render(self, results: Sequence[Any], /) -> str:
        """The page that ``sm.report`` writes."""

    def table(self, result: Any, /) -> str | None:
        """What a notebook shows of one, as HTML; None if it has no table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOffer(Offer[ResultView]):
    """Results that have a page of their own, or a table in notebooks."""

    shows: tuple[str, ...]
    """The addresses of their classes."""

    def fits(self, result: object) -> bool:
        classes = (f"{base.__module__.removeprefix(f'{PACKAGE}.')}:{base.__name__}" for base in type(result).__mro__)
        return any(name in self.shows for name in classes)


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A field of each candidate in the JSON, blocks below the table, and a section of the page."""

    field: str
    facts: Callable[[], Sequence[Any]]  # for each candidate; an empty one is left out
    blocks: Callable[[], Sequence[Block]]
    title: str = ""  # of the section
    section: Callable[[], str] = str  # HTML; '' if it has none


class ComparisonPart(Protocol):
    """A part that only some comparisons have."""

    def asked(self, parsed: argparse.Namespace, /) -> Mapping[str, Any]:
        """Arguments for ``make``, read and checked before anything is scored; none if comparisons have no such part."""

    def make(self, comparisons: Sequence[Comparison], /, **arguments: Any) -> ResultPart:
        """The part, with what ``asked`` gave, or with the arguments of ``sm.report``."""

    def instead(self, parsed: argparse.Namespace, /) -> int | None:
        """Answers a command whose baseline is of a kind of its own, and returns the exit code; None for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOffer(Offer[ComparisonPart]):
    """What comparisons show beside their numbers, if their text or their baseline has a prefix."""

    prefix: str
    flags: Flags = field(default_factory=dict)  # of ``scoremode compare``
    arguments: tuple[str, ...] = ()  # of ``sm.report``, for ``make``
    as_baseline: str = ""  # for the help of ``compare``


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Pool(Protocol):
    """Replicas that were opened for a study, of which at least one is ready."""

    about: Any  # see ``Worker``
    facts: EngineFacts

    def share(self, pieces: Pieces, done: Bools) -> Iterator[tuple[int, Any]]:
        """Yields all results that are not ``done``, with their indices, in any order."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of one worker."""

    def notes(self) -> list[str]:
        """What a reader of the results must know about the replicas."""

    def close(self) -> None: ...


class Replicas(Protocol):
    """A model that runs as several replicas."""

    chosen: ChosenEngine  # with the options of one replica

    def __init__(self, chosen: ChosenEngine, spread: Spread, tokenizer: str | None) -> None:
        """Refuses an engine or resources that cannot work, before a text is read."""

    def engine(self, work: Work, progress: Progress | None) -> Engine:
        """Opens the replicas as one engine."""

    def pool(self, work: Work, open_worker: OpenWorker, progress: Progress | None) -> Pool:
        """Opens the replicas for a study, each with a worker of its own. The caller closes them."""

    @staticmethod
    def read(given: Mapping[str, Any]) -> Spread:
        """Reads arguments about replicas, at least one; refuses those that cannot work."""

    @staticmethod
    def require() -> None:
        """Refuses replicas if a package that they need is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasOffer(Offer["type[Replicas]"]):
    """One model as several replicas."""

    about: str  # for the help


# ── files behind URIs, and models elsewhere ──────────────────────────────────────────────────────────────────────────
class Store(Protocol):
    """Files behind URIs. Copies lie in the cache; all errors are ScoremodeErrors."""

    def has_file(self, place: RemotePath, /) -> bool:
        """Is there a file?"""

    def read(self, place: RemotePath, most: int, /) -> bytes | None:
        """The first bytes of a file, at most so many; None if there is no such file."""

    def write(self, place: RemotePath, data: bytes, /) -> None:
        """Writes a file whole."""

    def problem_with_output(self, place: RemotePath, /) -> str | None:
        """Why no file may be written there, as in "is a folder"; None if one may."""

    def copy_of_file(self, place: RemotePath, /) -> Path:
        """A copy of a file as it is now."""

    def copies_of_texts(self, place: RemotePath, endings: tuple[str, ...], /) -> list[Path]:
        """Copies of a file, of the files that match a pattern, or of those in a folder with one of these endings."""

    def copy_of_run(self, place: RemotePath, /, *, states: bool = False) -> Path:
        """A folder with a copy of a finished run; with ``states``, of the files of its reference too."""

    def claim(self, place: RemotePath, identity: Mapping[str, Any], /, *, fresh: bool = False, kind: str = "") -> Any:
        """A ``Claim`` (store/runs.py) that sends the finished run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOffer(Offer[Store]):
    """Files behind URIs."""


class ModelNames(Protocol):
    """Reads names of models that are not paths of this machine. Their models are GGUF files."""

    def claims(self, name: str) -> bool:
        """Has the name this form? Nothing outside this machine is asked."""

    def expand(self, name: str, baseline: str) -> list[str]:
        """All models of a pattern but the baseline, the smallest first; the name itself if it is no pattern."""

    def models_in(self, repo: str) -> list[str]:
        """The names of the models in a repository, with their sizes; none if it is no repository."""

    def find(self, name: str) -> Path:
        """The model's (first) file on this machine; it is fetched if it is not there."""

    def release(self, name: str) -> None:
        """Removes the files that ``find`` has fetched in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesOffer(Offer[ModelNames]):
    """Names of models elsewhere, such as those of a hub."""

    pattern: str  # that such a name matches

    def claims(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None and self.load().claims(name)


# ── a wing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class VerbEntry:
    """A verb of the command line: its line in the help of scoremode, and the address of its ``Verb``."""

    summary: str
    code: str


@dataclass(frozen=True, slots=True)
class CacheFiles:
    """The names of the files in entries of the cache of one kind."""

    mark: str  # of the file that is written last
    journal: str = ""  # of the file that is there while the entry is made


@dataclass(frozen=True, slots=True)
class Wing:
    """Everything that a wing hands over."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Public names of scoremode, each with its module."""

    verbs: Mapping[str, Mapping[str, VerbEntry]] = field(default_factory=dict)
    """Commands in groups of the help."""

    abilities: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """What an engine can do for this wing besides scoring: (ability, engine) and the address of what opens it."""

    offers: tuple[Offer[Any], ...] = ()

    cache: Mapping[str, CacheFiles] = field(default_factory=dict)
    """Kinds of entries of the cache."""

    needs: tuple[str, ...] = ()
    """Folders of wings that it is made of. Where one is missing, this wing is not there either."""


@cache
def wings() -> tuple[Wing, ...]:
    """All wings whose needs are there, in the order of their folders' names."""
    folders = sorted(path.parent.relative_to(HOUSE) for path in HOUSE.glob("*/*/wing.py"))
    declared = (import_module(".".join((PACKAGE, *folder.parts, "wing"))).WING for folder in folders)
    return tuple(wing for wing in declared if all(map(_is_there, wing.needs)))


def _is_there(folder: str) -> bool:
    return (HOUSE / folder / "__init__.py").is_file()


O = TypeVar("O", bound=Offer[Any])  # noqa: E741


def offered(kind: type[O]) -> list[O]:
    """Everything of one kind that the wings offer. No code of theirs is imported."""
    offers = (offer for wing in wings() for offer in wing.offers if isinstance(offer, kind))
    return [offer for offer in offers if not offer.needs or _is_there(offer.needs)]


def ability(name: str, engine: str) -> Any | None:
    """What opens an engine for an ability; None if no wing says that the engine has it."""
    addresses = (wing.abilities[name, engine] for wing in wings() if (name, engine) in wing.abilities)
    address = next(addresses, None)
    return None if address is None else load(address)


def public_names() -> dict[str, str]:
    """Public names of wings, each with its module."""
    return {name: module for wing in wings() for name, module in wing.names.items()}


def verbs() -> dict[str, dict[str, VerbEntry]]:
    """Commands of wings in groups."""
    groups: dict[str, dict[str, VerbEntry]] = {}
    for wing in wings():
        for group, commands in wing.verbs.items():
            groups.setdefault(group, {}).update(commands)
    return groups
