"""``scoremode reference --kld FILE``: the distributions of a baseline in 16 bits, for llama.cpp's own tool.

FILE                    renamed to this name when it is complete
.FILE.scoremode/        meanwhile, without --out: the scores and records so far; the same command resumes
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from scoremode.core.disk.folders import JOURNAL, MANIFEST, SCORES, remove_files
from scoremode.core.disk.manifests import digest_of
from scoremode.core.engine.base import Wanted
from scoremode.core.engine.registry import require
from scoremode.core.plan.path import DECODE
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.question import Question
from scoremode.core.scores.answers import FAULT
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.verbs.model import LazyModel, in_memory
from scoremode.core.verbs.outputs import About, FileKind, Output, check_output, require_standing
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.scoring import UnfinishedRun
from scoremode.errors import EngineError, InputError, MethodError, OptionError, RunError
from scoremode.studies.kld.file import KldLayout, KldWriter, tokens_in
from scoremode.values import Ids

METHOD = "llamacpp"
RECORDS = "records.partial"  # in the hidden folder
WORK = (RECORDS, MANIFEST, SCORES, JOURNAL)  # what may be in it


def write_kld(model: LazyModel, name: str | Path, question: Question, place: Place) -> Run:
    """Scores a text and writes the distributions of all its targets; the run itself is returned and not stored."""
    if place.out is not None:
        fix = "leave --out out, and run a second command for the reference"
        raise OptionError("--kld and --out write one file each", fix=fix)
    output, question = _check(name, fresh=place.fresh), _with_method(question)
    require(model.plugin, "distributions", "give the whole distributions that a .kld file keeps")
    planned = model.ask(question, place.progress)
    work = _work_folder(output)
    if runs.is_run(work):
        settings = runs.load(work).manifest["identity"].get("settings")
        if not isinstance(settings, dict) or settings.get("keeps") != "records":
            fix = "move it, or give another name to --kld"
            raise RunError(f"{work} is another run, and --kld needs that folder", fix=fix)
        if not output.exists:
            remove_files(work, WORK)  # the file was complete, and somebody removed it
    _require_same_text(output, planned.plan)
    with model.claimed(planned, Place(work, place.fresh), keeps="records") as claim:
        # a finished run: a process was killed after the file was complete
        run = in_memory(claim.finished or _score_records(model, planned, output, claim, place.progress))
    remove_files(work, WORK, empty=True)
    return run


def _require_same_text(output: Output, plan: Plan) -> None:
    """Refuses to replace the distributions of another text; the file does not say of which model they are."""
    require_standing(output, KLD, _about_tokens(_chunk_tokens(plan)))


def _score_records(
    model: LazyModel, planned: PlannedQuestion, output: Output, claim: runs.Claim, progress: Progress | None
) -> Run:
    """Scores into a work folder, and moves the file to its place when it is complete."""
    worker = model.opened_for(planned, progress)
    layout = _layout(planned.plan, worker.facts.known_vocabulary)
    with (
        UnfinishedRun(planned, worker, claim, progress) as unfinished,
        closing(KldWriter(claim.folder / RECORDS, layout, _chunk_tokens(planned.plan))) as writer,
    ):
        # a chunk is on disk before the journal has its scores, unless somebody removed the file
        unfinished.forget_except(np.full(layout.chunks, not writer.is_new))
        for index, answers in unfinished.answers(Wanted(records=True)):
            if answers.records is None:
                raise EngineError("the engine gave no distributions", fix=FAULT)
            writer.write(index, answers.records)
            unfinished.keep(index, answers)
        manifest = unfinished.manifest()
        _require_same_text(output, planned.plan)  # again: somebody's file may have come to lie there meanwhile
        writer.finish(output.path)
        return unfinished.save(manifest)


def _about_tokens(tokens: Ids) -> About:
    return frozenset({digest_of(tokens.tolist())})


def _about(file: IO[bytes]) -> About | None:
    tokens = tokens_in(file)
    return None if tokens is None else _about_tokens(tokens)


KLD = FileKind("a .kld file", _about)


def _check(name: str | Path, *, fresh: bool) -> Output:
    """Checks that the file a user named can be written. Only an older .kld file may be replaced, with ``fresh``."""
    output = check_output(name, "--kld", KLD)
    if output.place is not None:
        raise InputError(f"--kld writes a file of this machine, not {name}", fix="give a file name to --kld")
    if output.exists and not fresh and not _work_folder(output).is_dir():  # else a process was killed after it wrote
        raise InputError(f"{name} exists", fix="give another name to --kld, or --fresh to replace it")
    return output


def _work_folder(output: Output) -> Path:
    """The folder beside a .kld file that has what was scored, until everything is done."""
    return output.path.with_name(f".{output.path.name}.scoremode")


def _with_method(question: Question) -> Question:
    """The question with the method of .kld files; refuses another method."""
    method = question.method or METHOD
    if method != METHOD:
        raise MethodError(f"--kld writes the chunks of llama.cpp, not those of {method}", fix=f"give --method {METHOD}")
    if question.path == DECODE:
        fix = "leave --path out, or keep a reference with --out, which knows its path"
        raise OptionError("a .kld file cannot say that its distributions were decoded", fix=fix)
    if question.assistant_only:
        raise OptionError(
            "--kld keeps every row of a chunk, and --assistant-only drops rows", fix="leave --assistant-only out"
        )
    return replace(question, method=METHOD)


def _layout(plan: Plan, vocabulary: int) -> KldLayout:
    return KldLayout(int(dict(plan.settings)["context_length"]), vocabulary, len(plan))


def _chunk_tokens(plan: Plan) -> Ids:
    """The tokens of each chunk as the tokenizer gave them: the model reads a BOS in place of the first."""
    context = _layout(plan, 0).context
    return np.stack([plan.ids[stop - context : stop] for stop in plan.stop.tolist()]).astype(np.int32)
