"""``scoremode reference``: score a text with a baseline and keep its distributions for comparisons.

--out DIR               its hidden states and its head: a reference
--kld FILE              its distributions in 16 bits, for llama.cpp's own tool; renamed to this name when it is complete
.FILE.scoremode/        meanwhile, without --out: the scores and records so far; the same command resumes
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from scoremode.core.cache.units import size_words
from scoremode.core.disk.files import written_atomically
from scoremode.core.disk.uri import Place
from scoremode.core.engine.base import Engine, Want
from scoremode.core.engine.baseline import StoredBaseline, noise_facts, noise_floor, states_dtype, states_in
from scoremode.core.engine.registry import require
from scoremode.core.plan.path import DECODE
from scoremode.core.plan.plan import Plan
from scoremode.core.references.format import RAW_DTYPES
from scoremode.core.references.reader import open_reference
from scoremode.core.references.writer import StatesWriter
from scoremode.core.scores.answers import FAULT
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.text.corpus import Corpus, CorpusSource, specs_of
from scoremode.core.verbs.arguments import AllArguments, spelled_out, split_arguments
from scoremode.core.verbs.model import TOLD_FROM, GivenModel, GivenTokenizer, LazyModel, in_memory, tokenizer_name
from scoremode.core.verbs.outputs import Output, check_output
from scoremode.core.verbs.progress import Progress, announce
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.question import Question
from scoremode.core.verbs.scoring import UnfinishedRun
from scoremode.errors import EngineError, InputError, MethodError, OptionError, RunError, print_line
from scoremode.studies.kld.file import MAGIC, KldLayout, KldWriter
from scoremode.values import Ids

KLD_METHOD = "llamacpp"
RECORDS = "records.partial"  # in the hidden folder
REPEATED = ("plan_digest", "method", "method_settings", "model_fingerprint", "tokenizer", "corpus", "corpus_sha256")
"""Facts of the run's manifest that the manifest of the reference repeats."""


@spelled_out(AllArguments)
@shows_progress
def reference(
    model: GivenModel,
    out: str | Path | None = None,
    *,
    kld: str | Path | None = None,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Run:
    """Score a text with a baseline, and keep its final hidden states for later comparisons.

    ``arguments`` are those of a question, and the engine's options. Without ``out`` the reference lies in the cache
    folder; the run's ``path`` says where. ``kld`` names a file in the format of llama.cpp that the distributions are
    written to, by the method llamacpp; without ``out``, nothing else is kept then.

    >>> reference("table:uniform", "ref", text="any text").perplexity    # doctest: +SKIP
    256.0 ± ?
    """
    question, options = split_arguments(arguments, needs_text=True)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as lazy:
        named = tokenizer_name(tokenizer)
        return reference_of(lazy, question, out, kld=kld, tokenizer=named, fresh=fresh, progress=progress)


def reference_of(
    model: LazyModel,
    question: dict[str, Any],
    out: str | Path | Place | None = None,
    *,
    kld: str | Path | None = None,
    tokenizer: str | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Makes a reference of a model, a file of its distributions, or both."""
    output = None
    if kld is not None:
        question, output = _kld_question(question), _check_kld(kld, fresh=fresh, made_later=out)
        if out is None:
            return _write_kld(model, question, output, fresh=fresh, progress=progress)
    require(model.plugin, "hidden_states", "give the hidden states that a reference keeps")
    if out is None and model.is_given:
        raise InputError("a reference of a model in memory needs a folder", fix='give one, as in out="ref/"')
    asked = model.ask(question, progress)
    with model.claimed(asked, out, fresh=fresh, kind="references", keeps="states") as claim:
        run = claim.finished
        if run is not None:
            announce(progress, "checking the files of the reference")
            claim.check_reference()
        else:
            worker = model.engine_for(asked, progress)
            repeatable = _repeatable({**question, "method": asked.plan.method, "tokenizer": tokenizer})
            run = _score_and_store(asked, worker, claim, repeatable, progress)
    if output is not None:
        assert out is not None
        _convert_to_kld(out, asked, output, progress)
    return run


# ── a folder ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _score_and_store(
    asked: Question, worker: Engine, claim: runs.Claim, question: dict[str, Any] | None, progress: Progress | None
) -> Run:
    head, plan = worker.stored_head(), asked.plan
    width, dtype = head.weight.shape[1], states_dtype(worker, head)
    size = plan.targets * width * RAW_DTYPES[dtype].itemsize
    if size >= TOLD_FROM:
        print_line(f"scoremode: the reference takes about {size_words(size)} of disk ({plan.targets:,} hidden states)")
    with (
        UnfinishedRun(asked, worker, claim, progress) as run,
        StatesWriter(
            claim.folder,
            targets=plan.targets,
            width=width,
            dtype=dtype,
            identity=claim.identity,
            shard_bytes=claim.shard_bytes,
        ) as writer,
    ):
        # after a kill, the journal may contain windows whose states are incomplete
        run.forget_except(writer.complete_windows(plan.target_offsets))
        for index, answers in run.answers(Want(states=True)):
            writer.write(int(plan.target_offsets[index]), states_in(answers))
            writer.flush()
            run.keep(index, answers)
        manifest = run.manifest() | {"question": question}
        writer.write_head(head.weight, head.bias, scale=head.scale, softcap=head.softcap, vocabulary=head.vocabulary)
        facts = {name: manifest[name] for name in REPEATED}
        engine = {name: manifest[name] for name in ("engine", "dtype", "device", "head")}
        stored = writer.finish({**facts, "engine": engine})
        noise = noise_facts(noise_floor(worker, plan, StoredBaseline(stored, plan)))
        return run.save(manifest | noise)


def _repeatable(question: dict[str, Any]) -> dict[str, Any] | None:
    """The question, if names and files are enough to ask it again; None for a text that was piped in."""
    corpus = question.get("corpus")
    if isinstance(corpus, Corpus | CorpusSource) or "-" in specs_of(corpus):
        return None
    named = {} if corpus is None else {"corpus": specs_of(corpus)}
    slices = question.get("slice")
    named |= {"slice": [slices]} if isinstance(slices, str) else {}
    return {name: value for name, value in question.items() if value is not None and value is not False} | named


# ── a .kld file ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _check_kld(name: str | Path, *, fresh: bool, made_later: str | Path | Place | None) -> Output:
    """Checks that the file a user named can be written. Only an older .kld file may be replaced, with ``fresh``."""
    later = None if made_later is None else str(made_later)
    output = check_output(name, "--kld", "a .kld file", lambda o: o.beginning(len(MAGIC)) == MAGIC, made_later=later)
    if output.place is not None:
        raise InputError(f"{output.name} is a URI, and --kld writes a file of this machine", fix="give a file name")
    if output.is_stream:
        raise InputError(f"{name} is not a plain file", fix="give a file name to --kld")
    if output.exists and not fresh and not _work_folder(output).is_dir():  # else a process was killed after it wrote
        raise InputError(f"{name} exists", fix="give another name to --kld, or --fresh to replace it")
    return output


def _work_folder(output: Output) -> Path:
    """The folder beside a .kld file that has what was scored, until everything is done."""
    return output.path.with_name(f".{output.path.name}.scoremode")


def _kld_question(question: dict[str, Any]) -> dict[str, Any]:
    """The question with the method of .kld files; refuses another method."""
    method = question.get("method") or KLD_METHOD
    if method != KLD_METHOD:
        raise MethodError(
            f"--kld writes the chunks of llama.cpp, not those of {method}", fix=f"give --method {KLD_METHOD}"
        )
    if question.get("path") == DECODE:
        fix = "leave --path out, or keep a reference with --out, which knows its path"
        raise OptionError("a .kld file cannot say that its distributions were decoded", fix=fix)
    if question.get("assistant_only"):
        raise OptionError(
            "--kld keeps every row of a chunk, and --assistant-only drops rows", fix="leave --assistant-only out"
        )
    return {**question, "method": KLD_METHOD}


def _write_kld(
    model: LazyModel, question: dict[str, Any], output: Output, *, fresh: bool, progress: Progress | None
) -> Run:
    """Score a text and write the distributions of all its targets; the run itself is returned and not stored."""
    require(model.plugin, "distributions", "give the whole distributions that a .kld file keeps")
    asked = model.ask(question, progress)
    work = _work_folder(output)
    if runs.is_run(work):
        settings = runs.load(work).manifest["identity"].get("settings")
        if not isinstance(settings, dict) or settings.get("keeps") != "records":
            raise RunError(
                f"{work} is another run, and --kld needs that folder", fix="move it, or give another name to --kld"
            )
        if not output.exists:
            shutil.rmtree(work)  # the file was complete, and somebody removed it
    with model.claimed(asked, work, fresh=fresh, keeps="records") as claim:
        # a finished run: a process was killed after the file was complete
        run = in_memory(claim.finished or _score_records(model, asked, claim, output, progress))
    shutil.rmtree(work, ignore_errors=True)
    return run


def _score_records(
    model: LazyModel, asked: Question, claim: runs.Claim, output: Output, progress: Progress | None
) -> Run:
    """Scores into a work folder, and moves the file to its place when it is complete."""
    worker = model.engine_for(asked, progress)
    layout = _kld_layout(asked.plan, worker.facts.known_vocabulary)
    with (
        UnfinishedRun(asked, worker, claim, progress) as unfinished,
        KldWriter(claim.folder / RECORDS, layout, _chunk_tokens(asked.plan)) as writer,
    ):
        unfinished.forget_except(writer.complete_chunks())
        for index, answers in unfinished.answers(Want(records=True)):
            if answers.records is None:
                raise EngineError("the engine gave no distributions", fix=FAULT)
            writer.write(index, answers.records)
            unfinished.keep(index, answers)
        manifest = unfinished.manifest()
        writer.finish(output.path)
        return unfinished.save(manifest)


def _convert_to_kld(folder: str | Path | Place, asked: Question, output: Output, progress: Progress | None) -> None:
    """Write the distributions of a reference as a .kld file: from its hidden states and its head, without the model."""
    import torch

    from scoremode.core.engine.distributions import LogitsOfStates

    announce(progress, f"writing {output.name}")
    plan, baseline = asked.plan, StoredBaseline(open_reference(folder), asked.plan)
    layout = _kld_layout(plan, baseline.head.vocabulary)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = LogitsOfStates.by(baseline.head, baseline.dtype, device)
    try:
        with written_atomically(output.path) as file:
            file.write(layout.beginning(_chunk_tokens(plan)))
            for index in range(len(plan)):
                records = logits.records(baseline.states(index, plan.window(index)))
                file.write(np.ascontiguousarray(records, "<u2").data)
            assert file.tell() == layout.size, "a file that its header does not describe"
    except OSError as error:
        raise RunError(
            f"{output.name} cannot be written ({error.strerror})", fix="give another file to --kld"
        ) from None


def _kld_layout(plan: Plan, vocabulary: int) -> KldLayout:
    return KldLayout(int(dict(plan.settings)["context_length"]), vocabulary, len(plan))


def _chunk_tokens(plan: Plan) -> Ids:
    """The tokens of each chunk as the tokenizer gave them: the model reads a BOS in place of the first."""
    context = _kld_layout(plan, 0).context
    return np.stack([plan.ids[stop - context : stop] for stop in plan.stop.tolist()]).astype(np.int32)
