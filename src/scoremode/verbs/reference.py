"""``scoremode reference``: score a text with a baseline and keep its hidden states for comparisons."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

from scoremode.engines.base import Engine, Want
from scoremode.engines.baseline import StoredBaseline, noise_facts, noise_floor, states_dtype, states_in
from scoremode.engines.plugin import Work
from scoremode.engines.registry import require
from scoremode.errors import InputError
from scoremode.places.uri import Place
from scoremode.store import runs
from scoremode.store.reference_writer import StatesWriter
from scoremode.store.run import Run
from scoremode.text.corpus import Corpus, specs_of
from scoremode.verbs.arguments import AllArguments, spelled_out
from scoremode.verbs.kld import check_kld, with_method, write_from_reference, write_kld
from scoremode.verbs.model import LazyModel
from scoremode.verbs.progress import Progress, announce
from scoremode.verbs.question import Question, split_arguments
from scoremode.verbs.scoring import UnfinishedRun

REPEATED = ("plan_digest", "method", "method_settings", "model_fingerprint", "tokenizer", "corpus", "corpus_sha256")
"""Facts of the run's manifest that the manifest of the reference repeats."""


@spelled_out(AllArguments)
def reference(
    model: str,
    out: str | Path | None = None,
    *,
    kld: str | Path | None = None,
    engine: str | None = None,
    tokenizer: str | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Run:
    """Score a text with a baseline, and keep its final hidden states for later comparisons.

    ``arguments`` are those of a question, and the engine's options. Without ``out`` the reference lies in the cache
    folder; the run's ``path`` says where. ``kld`` names a file in the format of llama.cpp that the distributions are
    written to, by the method llamacpp; without ``out``, nothing else is kept then.

    >>> reference("table:uniform", "ref", text="any text").perplexity    # doctest: +SKIP
    256 ± ?
    """
    question, options = split_arguments(arguments)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as held:
        return reference_of(held, question, out, kld=kld, tokenizer=tokenizer, fresh=fresh, progress=progress)


def reference_of(
    held: LazyModel,
    question: dict[str, Any],
    out: str | Path | Place | None = None,
    *,
    kld: str | Path | None = None,
    tokenizer: str | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Run:
    """A reference of a model that is held, a file of its distributions, or both."""
    if kld is None:
        return _reference_folder(held, question, out, tokenizer=tokenizer, fresh=fresh, progress=progress)
    question, output = with_method(question), check_kld(kld, fresh=fresh, made_later=out)
    if out is None:
        return write_kld(held, question, output, fresh=fresh, progress=progress)
    run = _reference_folder(held, question, out, tokenizer=tokenizer, fresh=fresh, progress=progress)
    write_from_reference(out, held.ask(question, progress), output, progress)
    return run


def _reference_folder(
    held: LazyModel,
    question: dict[str, Any],
    out: str | Path | Place | None = None,
    *,
    tokenizer: str | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Run:
    require(held.plugin, "hidden_states", "give the hidden states that a reference keeps")
    if not held.is_kept(out):
        raise InputError("a reference of a model in memory needs a folder", fix='give one, as in out="ref/"')
    asked = held.ask(question, progress)
    with held.claimed(asked, out, fresh=fresh, kind="references", keeps="states") as claim:
        if claim.finished is not None:
            announce(progress, "checking the files of the reference")
            claim.check_reference()
            return claim.finished
        worker = held.engine(Work(longest=int(asked.plan.lengths.max())), progress)
        repeatable = _repeatable({**question, "method": asked.plan.method, "tokenizer": tokenizer})
        return _score_and_keep(asked, worker, claim, repeatable, progress)


def _score_and_keep(
    asked: Question, worker: Engine, claim: runs.Claim, question: dict[str, Any] | None, progress: Progress | None
) -> Run:
    head, plan = worker.stored_head(), asked.plan
    width, dtype = head.weight.shape[1], states_dtype(worker, head)
    with (
        UnfinishedRun(asked, worker, claim, progress) as run,
        StatesWriter(
            claim.folder,
            targets=plan.targets,
            width=width,
            dtype=dtype,
            identity=claim.identity,
            shard_bytes=claim.shard_bytes,
            elsewhere=claim.shards_go_to(),
        ) as writer,
    ):
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
    if isinstance(corpus, Corpus) or "-" in specs_of(corpus):
        return None
    named = {} if corpus is None else {"corpus": specs_of(corpus)}
    return {name: value for name, value in question.items() if value is not None and value is not False} | named
