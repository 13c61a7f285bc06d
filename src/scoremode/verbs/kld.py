"""``scoremode reference --kld FILE``: a model's distributions as a file that llama.cpp's own tool reads.

FILE                    the file, renamed to this name when it is complete
.FILE.scoremode/        meanwhile: the scores and records so far, beside it; the same command resumes
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from scoremode.engines.base import Want
from scoremode.engines.baseline import StoredBaseline
from scoremode.engines.plugin import Work
from scoremode.engines.registry import require
from scoremode.errors import EngineError, InputError, MethodError, OptionError, RunError
from scoremode.places.uri import Place
from scoremode.plan.plan import Plan
from scoremode.store import runs
from scoremode.store.files import written_atomically
from scoremode.store.kld import MAGIC, KldLayout
from scoremode.store.kld_writer import KldWriter
from scoremode.store.outputs import Output, beginning_of, check_output
from scoremode.store.reference import Reference
from scoremode.store.run import Run
from scoremode.values import Ids, Raw
from scoremode.verbs.model import HeldModel, in_memory
from scoremode.verbs.progress import Progress, announce
from scoremode.verbs.question import Question
from scoremode.verbs.scoring import UnfinishedRun

METHOD = "llamacpp"
RECORDS = "records.partial"  # in the hidden folder


def check_kld(name: str | Path, *, fresh: bool, made_later: str | Path | Place | None = None) -> Output:
    """The file that a user named, if it can be written. Only an older .kld file may be replaced, with ``fresh``."""
    output = check_output(name, "--kld", made_later=None if made_later is None else str(made_later))
    if output.place is not None:
        raise InputError(f"{output.name} is a URI, and --kld writes a file of this machine", fix="give a file name")
    if output.is_stream:
        raise InputError(f"{name} is not a plain file", fix="give a file name to --kld")
    if output.exists and beginning_of(output, len(MAGIC)) != MAGIC:
        raise InputError(f"{name} exists and is not a .kld file", fix="give another name to --kld")
    if output.exists and not fresh:
        raise InputError(f"{name} exists", fix="give another name to --kld, or --fresh to replace it")
    return output


def with_method(question: Mapping[str, Any]) -> dict[str, Any]:
    """The question, by the only method that the file knows."""
    method = question.get("method") or METHOD
    if method != METHOD:
        raise MethodError(f"--kld writes the chunks of llama.cpp, not those of {method}", fix=f"give --method {METHOD}")
    if question.get("assistant_only"):
        raise OptionError("--kld keeps every row of a chunk", fix="leave --assistant-only out")
    return {**question, "method": METHOD}


def write_kld(
    held: HeldModel,
    question: Mapping[str, Any],
    output: Output,
    *,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Score a text and write the distributions of all its targets; the run itself is returned and not kept."""
    require(held.plugin, "distributions", "give the whole distributions that a .kld file keeps")
    asked = held.ask(with_method(question), progress)
    work = output.path.with_name(f".{output.path.name}.scoremode")
    if runs.is_run(work):
        if not _is_left_over(work):
            raise RunError(
                f"{work} is another run, and --kld needs that folder", fix="move it, or give another name to --kld"
            )
        shutil.rmtree(work)
    with held.claimed(asked, work, fresh=fresh, keeps="records") as claim:
        worker = held.engine(Work(longest=int(asked.plan.lengths.max())), progress)
        with UnfinishedRun(asked, worker, claim, progress) as unfinished:
            layout = layout_of(asked.plan, worker.facts.known_vocabulary)
            with KldWriter(work / RECORDS, layout, chunk_tokens(asked.plan)) as writer:
                unfinished.forget_except(writer.complete_chunks())
                for index, answers in unfinished.answers(Want(records=True)):
                    writer.write(index, records_in(answers.records))
                    unfinished.keep(index, answers)
                manifest = unfinished.manifest()
                writer.finish(output.path)
                run = unfinished.save(manifest)
        run = in_memory(run)
    shutil.rmtree(work, ignore_errors=True)
    return run


def _is_left_over(work: Path) -> bool:
    """Was a process killed when all was done but the tidying up? Another folder of this name is not touched."""
    settings = runs.load(work).manifest["identity"].get("settings")
    return isinstance(settings, dict) and settings.get("keeps") == "records"


def records_in(records: Raw | None) -> Raw:
    """The records of an answer for which they were wanted."""
    if records is None:
        raise EngineError("the engine gave no distributions", fix="this is a fault of the engine")
    return records


def layout_of(plan: Plan, vocabulary: int) -> KldLayout:
    return KldLayout(int(dict(plan.settings)["context_length"]), vocabulary, len(plan))


def chunk_tokens(plan: Plan) -> Ids:
    """The tokens of each chunk as tokenized: without the BOS that the model reads instead of the first of them."""
    context = layout_of(plan, 0).context
    return np.stack([plan.ids[stop - context : stop] for stop in plan.stop.tolist()]).astype(np.int32)


# ── from a reference ─────────────────────────────────────────────────────────────────────────────────────────────────
def write_from_reference(
    folder: str | Path | Place, asked: Question, output: Output, progress: Progress | None
) -> None:
    """The distributions of a reference as a file: from its hidden states and its head, without the model."""
    announce(progress, f"writing {output.name}")
    baseline = StoredBaseline(Reference.open(folder), asked.plan)
    layout = layout_of(asked.plan, baseline.head.vocabulary)
    try:
        with written_atomically(output.path) as file:
            _write_all(file, layout, asked.plan, _records_of(baseline, asked.plan))
    except OSError as error:
        raise RunError(
            f"{output.name} cannot be written ({error.strerror})", fix="give another file to --kld"
        ) from None


def _records_of(baseline: StoredBaseline, plan: Plan) -> Iterator[Raw]:
    import torch

    from scoremode.engines.distributions import LogitsOfStates

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = LogitsOfStates.by(baseline.head, baseline.dtype, device)
    for index in range(len(plan)):
        yield made.records(baseline.states(index, plan.window(index)))


def _write_all(file: IO[bytes], layout: KldLayout, plan: Plan, chunks: Iterator[Raw]) -> None:
    file.write(layout.header() + np.ascontiguousarray(chunk_tokens(plan), "<i4").tobytes())
    for records in chunks:
        file.write(np.ascontiguousarray(records, "<u2").data)
    assert file.tell() == layout.size, "a file that its header does not describe"
