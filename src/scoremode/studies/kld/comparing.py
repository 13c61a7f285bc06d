"""Compares candidates with a file of base logits (``.kld``), which has its own tokens and chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scoremode.core.disk.files import remembered_sha256
from scoremode.core.engine.baseline import BaseLogitsPlugin
from scoremode.core.engine.options import Options
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen, require
from scoremode.core.models.subject import Subject
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.recipes import find_method, llamacpp_chunks
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store import runs
from scoremode.core.text.tokens import text_of_ids
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.progress import announce
from scoremode.core.verbs.question import Question
from scoremode.core.verbs.scoring import score_run
from scoremode.core.verbs.sides import Folders, require_vocabulary, score_against
from scoremode.errors import InputError, OptionError
from scoremode.studies.kld.file import KldFile

NO_NOISE = {"noise_kl": None, "noise_perturbed": "a file cannot be computed in another way"}


def require_no_question(name: str, question: Mapping[str, Any]) -> None:
    """Refuses a question together with a file of base logits, because the file has its own tokens and chunks."""
    if question:
        flag = "--" + next(iter(question)).replace("_", "-")
        raise OptionError(f"{name} has its own tokens and chunks", fix=f"leave {flag} out")


def against_file(name: str | Path, model: LazyModel, question: Mapping[str, Any], folders: Folders) -> Comparison:
    """Compares a model with the distributions in a file."""
    require_no_question(str(name), question)
    require(model.plugin, "divergence", "be compared with a baseline")
    file = KldFile(name)
    asked = _question_of(file, model.subject, folders)
    doubts = (*_notes_on_start(file, model.subject), *asked.corpus.notes)
    announce(folders.progress, "checking the file")
    sha256 = remembered_sha256(file.path)
    own = Subject(
        name=str(name),
        tokenizer=model.subject.tokenizer,
        fingerprint=sha256,
        vocabulary=file.layout.vocabulary,
        files={file.path.name: sha256},
    )
    baseline = LazyModel(Chosen(BaseLogitsPlugin(file, doubts), Options(), own))
    asked_p = replace(asked, subject=own)
    with baseline.claimed(asked_p, folders.folder("baseline"), fresh=folders.fresh) as claim_p:
        run_p = claim_p.finished
        if run_p is None:
            run_p = score_run(asked_p, baseline.engine(Work()), claim_p, folders.progress)
    run_p = replace(run_p, manifest={**run_p.manifest, "model": str(name)})  # the file may have had another name
    # the effects of the baseline's 16 bits are noted with the candidate's numbers too
    notes = (*asked.plan.notes, *(f"baseline: {note}" for note in run_p.manifest["model_notes"]))
    asked = replace(asked, plan=replace(asked.plan, notes=notes))
    return score_against(model, asked, run_p, file, folders, noise=NO_NOISE)


def _question_of(file: KldFile, subject: Subject, folders: Folders) -> Question:
    """Makes the question from the tokens and chunks of a file, with the tokenizer of the candidate."""
    announce(folders.progress, "reading the tokens of the file")
    if subject.vocabulary is not None:
        require_vocabulary(file, subject.vocabulary)
    corpus, documents, tokens = text_of_ids(file.tokens.reshape(-1), subject.tokenizer, file.path.name)
    method = replace(find_method("llamacpp"), windows=llamacpp_chunks)
    plan = make_plan(method, tokens, context_length=file.layout.context, model_context=subject.context_length)
    return Question(subject, corpus, method, documents, tokens, plan)


def _notes_on_start(file: KldFile, subject: Subject) -> list[str]:
    """Checks BOS, which llama.cpp puts both before the text and at the start of each chunk it feeds, or at neither.

    So the first token shows whether the baseline was fed BOS. A candidate that would be fed BOS when the baseline was
    not is refused. The opposite case is noted, because the text itself may begin with that token.
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


def require_models(name: str, candidates: Sequence[str]) -> None:
    """Refuses finished runs as candidates against a file, because a run does not store its distributions."""
    for candidate in candidates:
        if runs.is_run(candidate):
            raise InputError(
                f"{candidate} is a finished run, and {name} needs a model to compare with", fix="name the model"
            )
