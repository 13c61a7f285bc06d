"""``scoremode reference``: score a text with a baseline and keep its distributions for comparisons.

--out DIR    its hidden states and its head: a reference
--… FILE     its distributions in a format that a wing offers
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from scoremode.core.cache.entries import drop_entry
from scoremode.core.cache.units import size_words
from scoremode.core.disk.folders import entry_folder
from scoremode.core.engine.base import Engine, Wanted
from scoremode.core.engine.baseline import noise_facts, noise_floor, states_dtype, states_in, stored_states
from scoremode.core.engine.registry import require
from scoremode.core.extensions import Format, FormatOffer, offered
from scoremode.core.plan.question import Question
from scoremode.core.references.format import RAW_DTYPES
from scoremode.core.references.writer import StatesWriter, require_disk
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.model import TOLD_FROM, GivenModel, GivenTokenizer, LazyModel
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.core.verbs.scoring import UnfinishedRun
from scoremode.errors import InputError, print_line

REPEATED = ("plan_digest", "method", "method_settings", "model_fingerprint", "tokenizer", "corpus", "corpus_sha256")
"""Facts of the run's manifest that the manifest of the reference repeats."""


class FileArguments(TypedDict, total=False):
    """Files that wings write, named here for editors and type checkers alone; see ``FormatOffer``."""

    kld: str | Path | None
    """a file for llama.cpp's tool, by the method llamacpp"""


class ReferenceArguments(AllArguments, FileArguments, total=False):
    """Arguments of a question, of a model, and files that wings write."""


@spelled_out(ReferenceArguments)
@shows_progress
def reference(
    model: GivenModel,
    out: str | Path | None = None,
    *,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[ReferenceArguments],
) -> Run:
    """Score a text with a baseline, and keep its final hidden states for later comparisons.

    ``arguments`` are those of a question, and the engine's options. Without ``out`` the reference lies in the cache
    folder; the run's ``path`` says where. ``kld`` names a file in the format of llama.cpp that the distributions are
    written to, by the method llamacpp; nothing else is kept then.

    >>> reference("table:uniform", "ref", text="any text").perplexity    # doctest: +SKIP
    256.0 ± ?
    """
    files, rest = split_files(arguments)
    question, options = read_arguments(rest)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as lazy:
        place = Place.at(out, fresh=fresh, progress=progress)
        return reference_of(lazy, question.with_text(), place, files=files)


Files = list[tuple[Format, str | Path]]
"""Files in other forms that a user named."""


def split_files(arguments: Mapping[str, Any]) -> tuple[Files, dict[str, Any]]:
    """Splits arguments into files that wings write, and all others."""
    formats = {kind.name: kind for kind in offered(FormatOffer) if kind.reference}
    files = [(formats[name].load(), file) for name, file in arguments.items() if name in formats and file is not None]
    return files, {name: value for name, value in arguments.items() if name not in formats}


def reference_of(
    model: LazyModel,
    question: Question,
    place: Place,
    *,
    files: Files = [],  # noqa: B006 - it is only read
    tell: Callable[[PlannedQuestion, runs.Claim], None] | None = None,
) -> Run:
    """Makes a reference of a model, or files of its distributions. ``tell`` is called before the engine starts."""
    if files:
        return [output.score(model, file, question, place) for output, file in files][-1]
    require(model.plugin, "hidden_states", "give the hidden states that a reference keeps")
    if place.out is None and model.is_given:
        raise InputError("a reference of a model in memory needs a folder", fix='give one, as in out="ref/"')
    planned = model.ask(question, place.progress)
    repeatable = question.repeatable()
    if repeatable is not None:
        named = {} if model.tokenizer is None else {"tokenizer": model.tokenizer}
        repeatable |= {"method": planned.plan.method, **named}
    return finish(model, planned, place, question=repeatable, tell=tell)


@contextmanager
def temporary_reference(model: LazyModel, planned: PlannedQuestion, place: Place) -> Iterator[Run]:
    """A reference that is removed when the block ends. One that the cache has is used instead, and stays there.

    What is cut off, by an error or by Ctrl-C, stays in the cache as a run does, so that the same command goes on.
    """
    if model.is_given:
        with tempfile.TemporaryDirectory(prefix="scoremode-") as folder:
            yield finish(model, planned, Place(Path(folder), progress=place.progress))
        return
    is_kept = not place.fresh and runs.is_run(entry_folder("references", model.identity(planned, **KEPT)))
    reference = finish(model, planned, replace(place, out=None), kind="references" if is_kept else "runs")
    yield reference
    if not is_kept:
        drop_entry(Path(str(reference.path)))


# ── a folder ─────────────────────────────────────────────────────────────────────────────────────────────────────────
KEPT = {"keeps": "states"}  # in the settings of a reference's identity


def finish(
    model: LazyModel,
    planned: PlannedQuestion,
    place: Place,
    *,
    question: Mapping[str, object] | None = None,
    kind: str = "references",
    tell: Callable[[PlannedQuestion, runs.Claim], None] | None = None,
) -> Run:
    """The reference of a planned question, in the place or in the cache as an entry of this kind: read, or made.

    ``question`` are the arguments that ask it again.
    """
    with model.claimed(planned, place, kind=kind, **KEPT) as claim:
        if tell is not None:
            tell(planned, claim)
        run = claim.finished
        if run is not None:
            announce(place.progress, "checking the files of the reference")
            claim.check_reference()
            return run
        return _score_and_store(planned, model.opened_for(planned, place.progress), claim, question, place.progress)


def _score_and_store(
    planned: PlannedQuestion,
    worker: Engine,
    claim: runs.Claim,
    question: Mapping[str, object] | None,
    progress: Progress | None,
) -> Run:
    head, plan = worker.stored_head(), planned.plan
    width, dtype = head.weight.shape[1], states_dtype(worker, head)
    size = plan.targets * width * RAW_DTYPES[dtype].itemsize
    if size >= TOLD_FROM:
        print_line(f"scoremode: {plan.targets:,} hidden states take about {size_words(size)} of disk")
    require_disk(claim.folder, size + head.weight.nbytes)
    with (
        UnfinishedRun(planned, worker, claim, progress) as run,
        StatesWriter(
            claim.folder,
            targets=plan.targets,
            width=width,
            dtype=dtype,
            identity=claim.identity,
        ) as writer,
    ):
        # after a kill, the journal may contain windows whose states are incomplete
        run.forget_except(writer.complete_windows(plan.target_offsets))
        for index, answers in run.answers(Wanted(states=True)):
            writer.write(int(plan.target_offsets[index]), states_in(answers))
            run.keep(index, answers)
        manifest = run.manifest() | {"question": question}
        writer.write_head(head.weight, head.bias, scale=head.scale, softcap=head.softcap, vocabulary=head.vocabulary)
        facts = {name: manifest[name] for name in REPEATED}
        engine = {name: manifest[name] for name in ("engine", "dtype", "device", "head")}
        stored = writer.finish({**facts, "engine": engine})
        announce(progress, "measuring the noise floor")
        noise = noise_facts(noise_floor(worker, plan, stored_states(stored, plan.target_offsets), writer.noise))
        return run.save(manifest | noise)
