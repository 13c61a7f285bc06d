"""Candidates against a file of base logits (``.kld``), which brings its own tokens and chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scoremode.disk.files import remembered_sha256
from scoremode.engines.base import Want
from scoremode.engines.baseline import BaseLogitsPlugin, FileBaseline
from scoremode.engines.options import Options
from scoremode.engines.plugin import Work
from scoremode.engines.registry import Chosen, require
from scoremode.errors import InputError, ModelError, OptionError
from scoremode.models.subject import Subject
from scoremode.plan.build import make_plan
from scoremode.plan.recipes import find_method, llamacpp_chunks
from scoremode.references.kld import KldFile, least_divergence
from scoremode.statistics.comparison import Comparison
from scoremode.store import runs
from scoremode.store.run import Run
from scoremode.text.tokens import text_of_ids
from scoremode.verbs.model import LazyModel
from scoremode.verbs.progress import announce
from scoremode.verbs.question import Question
from scoremode.verbs.scoring import UnfinishedRun, score_run
from scoremode.verbs.sides import Folders, as_comparison, compared_with, short

NO_NOISE = {"noise_kl": None, "noise_perturbed": "a file cannot be computed in another way"}


def require_no_question(name: str, question: Mapping[str, Any]) -> None:
    """A file of base logits has its own question; one that is given beside it is refused."""
    if question:
        flag = "--" + next(iter(question)).replace("_", "-")
        raise OptionError(f"{name} has its own tokens and chunks", fix=f"leave {flag} out")


def against_file(name: str | Path, held: LazyModel, question: Mapping[str, Any], folders: Folders) -> Comparison:
    """A model that is held against the distributions in a file."""
    require_no_question(str(name), question)
    require(held.plugin, "divergence", "be compared with a baseline")
    file = KldFile(name)
    asked = _question_of(file, held.subject, folders)
    doubts = (*_notes_on_start(file, held.subject), *asked.corpus.notes)
    announce(folders.progress, "checking the file")
    sha256 = remembered_sha256(file.path)
    own = Subject(
        name=str(name),
        tokenizer=held.subject.tokenizer,
        fingerprint=sha256,
        vocabulary=file.layout.vocabulary,
        files={file.path.name: sha256},
    )
    held_p = LazyModel(Chosen(BaseLogitsPlugin(file, doubts), Options(), own))
    asked_p = replace(asked, subject=own)
    with held_p.claimed(asked_p, folders.folder("baseline"), fresh=folders.fresh) as claim_p:
        run_p = claim_p.finished
        if run_p is None:
            run_p = score_run(asked_p, held_p.engine(Work()), claim_p, folders.progress)
    run_p = replace(run_p, manifest={**run_p.manifest, "model": str(name)})  # the file may have had another name
    run_q = _candidate(file, held, asked, run_p, folders)
    return as_comparison(short(held.subject.name), run_p, run_q, run_q.kl)


def _candidate(file: KldFile, held: LazyModel, asked: Question, run_p: Run, folders: Folders) -> Run:
    out = folders.folder(held.subject.name)
    with held.claimed(asked, out, fresh=folders.fresh, against=run_p.manifest["identity"]) as claim:
        if claim.finished is not None:
            return claim.finished
        worker = held.engine_for(asked, folders.progress)
        _require_vocabulary(file, worker.facts.known_vocabulary)
        # what the baseline's 16 bits did is noted with the candidate's numbers too
        notes = (*asked.plan.notes, *(f"baseline: {note}" for note in run_p.manifest["model_notes"]))
        asked = replace(asked, plan=replace(asked.plan, notes=notes))
        least = least_divergence(file.layout.vocabulary)
        with UnfinishedRun(asked, worker, claim, folders.progress, with_kl=True, least_kl=least) as run:
            run.score(Want(against=FileBaseline(file)))
            run_q = run.save(run.manifest() | compared_with(run_p, NO_NOISE))
        return held.outliving(run_q, out)


def _question_of(file: KldFile, subject: Subject, folders: Folders) -> Question:
    """The question that a file asks, with the tokenizer of the candidate."""
    announce(folders.progress, "reading the tokens of the file")
    if subject.vocabulary is not None:
        _require_vocabulary(file, subject.vocabulary)
    corpus, documents, tokens = text_of_ids(file.tokens.reshape(-1), subject.tokenizer, file.path.name)
    method = replace(find_method("llamacpp"), windows=llamacpp_chunks)
    plan = make_plan(method, tokens, context_length=file.layout.context, model_context=subject.context_length)
    return Question(subject, corpus, method, documents, tokens, plan)


def _require_vocabulary(file: KldFile, vocabulary: int) -> None:
    if file.layout.vocabulary != vocabulary:
        raise ModelError(
            f"{file.path} has {file.layout.vocabulary:,} ids and the candidate {vocabulary:,}",
            fix="compare a model with the vocabulary of the file",
        )


def _notes_on_start(file: KldFile, subject: Subject) -> list[str]:
    """llama.cpp puts a BOS in front of the text, and feeds it at the start of each chunk, or does neither.

    So the first token tells what the baseline read. A candidate that would read BOS where the baseline did not is
    refused. The other way round is noted, because the text itself may begin with that token.
    """
    facts, first = subject.tokenizer.facts, int(file.tokens[0, 0])
    if facts.adds_bos and first != facts.bos:
        raise InputError(
            f"{file.path} begins with the token {first}, and the candidate's tokenizer puts BOS ({facts.bos}) first: "
            "the baseline read other tokens than the candidate would",
            fix="give the baseline's tokenizer with --tokenizer",
        )
    if not facts.adds_bos and first == facts.bos:
        return [
            "the file begins with BOS, which the candidate's tokenizer does not add: unless the text begins with it, "
            "the baseline read BOS at the start of each chunk, and the candidate did not"
        ]
    return []


def require_models(name: str, candidates: tuple[str, ...]) -> None:
    """Refuse finished runs as candidates of a file: their distributions are gone."""
    for candidate in candidates:
        if runs.is_run(candidate):
            raise InputError(
                f"{candidate} is a finished run, and {name} needs a model to compare with", fix="name the model"
            )
