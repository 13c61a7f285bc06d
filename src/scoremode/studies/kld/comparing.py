"""A file of base logits (``.kld``) as the baseline of a comparison: it has its own tokens and chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from scoremode.core.disk.files import remembered_sha256
from scoremode.core.engine.base import SCORES, Engine, EngineFacts, Wanted
from scoremode.core.engine.options import Options
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Work
from scoremode.core.engine.registry import ChosenEngine, require
from scoremode.core.models.subject import Subject
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.question import Question
from scoremode.core.plan.recipes import find_method, llamacpp_chunks
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.core.store.run import Run
from scoremode.core.verbs.baselines import OpenBaseline
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import announce
from scoremode.core.verbs.scoring import score_run
from scoremode.errors import EngineError, InputError, ModelError, OptionError
from scoremode.studies.kld.file import Coarseness, FileBaseline, KldFile, is_kld, read_scores
from scoremode.studies.kld.stored_text import text_of_ids
from scoremode.values import Bools

NO_NOISE = {"noise_kl": None, "noise_perturbed": "a file cannot be computed in another way"}


@dataclass(frozen=True)
class KldBaseline:
    """A file of base logits that candidates are compared with."""

    name: str

    @staticmethod
    def claims(name: str | Path) -> bool:
        return is_kld(name)

    def accept(
        self,
        question: Question,
        of_baseline: Mapping[str, Any],
        models: Mapping[str, LazyModel],
        finished: Sequence[str],
    ) -> Mapping[str, LazyModel]:
        self._require_none({**question.chosen(), **of_baseline})
        for name in finished:
            fix = "name the model"
            raise InputError(f"{name} is a finished run, and {self.name} needs a model to compare with", fix=fix)
        return models

    def _require_none(self, arguments: Mapping[str, object]) -> None:
        for name in arguments:
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"{self.name} has its own tokens and chunks", fix=f"leave {flag} out")

    @contextmanager
    def open_for(self, candidate: LazyModel, question: Question, place: Place) -> Iterator[OpenBaseline]:
        self._require_none(question.chosen())
        require(candidate.plugin, "divergence", "be compared with a baseline")
        file = KldFile(self.name)
        file_question = _question_of(file, candidate.subject, place)
        run = self._run(file, file_question, place)
        # the effects of the baseline's 16 bits are noted with the candidate's numbers too
        notes = (*file_question.plan.notes, *(f"baseline: {note}" for note in run.manifest["model_notes"]))
        file_question = replace(file_question, plan=replace(file_question.plan, notes=notes))
        yield OpenBaseline(file_question, run, stored=lambda: FileBaseline(file), noise=NO_NOISE)

    def _run(self, file: KldFile, question: PlannedQuestion, place: Place) -> Run:
        doubts = (*_notes_on_start(file, question.subject), *question.corpus.notes)
        announce(place.progress, "checking the file")
        sha256 = remembered_sha256(file.path)
        subject = Subject(
            name=self.name,
            tokenizer=question.subject.tokenizer,
            fingerprint=sha256,
            vocabulary=file.layout.vocabulary,
            files={file.path.name: sha256},
        )
        model, question = (
            LazyModel.of(ChosenEngine(BaseLogitsPlugin(file, doubts), Options(), subject)),
            replace(question, subject=subject),
        )
        with model.claimed(question, place.within("baseline")) as claim:
            run = claim.finished or score_run(question, model.opened(Work()), claim, place.progress)
        return replace(run, manifest={**run.manifest, "model": self.name})  # the file may have had another name

    def finished(self, question: Question, place: Place) -> Run:
        raise AssertionError("finished runs were refused")


def _question_of(file: KldFile, subject: Subject, place: Place) -> PlannedQuestion:
    """Makes the question from the tokens and chunks of a file, with the tokenizer of the candidate."""
    announce(place.progress, "reading the tokens of the file")
    if subject.vocabulary is not None and subject.vocabulary != file.layout.vocabulary:  # else its engine refuses it
        raise ModelError(
            f"{file.path} has {file.layout.vocabulary:,} ids and the candidate {subject.vocabulary:,}",
            fix="compare a model with the vocabulary of the file",
        )
    corpus, documents, tokens = text_of_ids(file.tokens.reshape(-1), subject.tokenizer, file.path.name)
    method = replace(find_method("llamacpp"), windows=llamacpp_chunks)
    plan = make_plan(method, tokens, context_length=file.layout.context, model_context=subject.context_length)
    return PlannedQuestion(subject, corpus, method, documents, tokens, plan)


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


# ── the scores in a file ─────────────────────────────────────────────────────────────────────────────────────────────
class BaseLogitsEngine(Engine):
    """Reads log-probabilities and first choices from a file of base logits. Ranks and entropies would not be exact."""

    def __init__(self, file: KldFile, notes: tuple[str, ...] = ()) -> None:
        """``notes`` tell a reader about the file, in addition to the notes that follow from its records."""
        self.file, self._notes = file, notes
        self.facts = EngineFacts(
            engine="base-logits",
            dtype="uint16",
            device="file",
            head="16-bit log-probabilities",
            vocabulary=file.layout.vocabulary,
            context_length=file.layout.context,
        )

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if want != SCORES:
            raise EngineError("a file of base logits gives scores and nothing else", fix="name a model")
        seen = Coarseness()
        for index in range(len(source)):  # done or not: the notes are about all of the file
            window = source.window(index)
            answers = read_scores(self.file, index, window.targets[:, 0], seen)
            if not done[index]:
                yield index, answers
        self.facts = replace(self.facts, notes=(*seen.notes(), *self._notes))


class BaseLogitsPlugin(EnginePlugin):
    """The engine of a file of base logits. It opens no model, and ``--engine`` cannot choose it."""

    contract = 1
    name = "base-logits"
    summary = "a file of base logits of llama.cpp"
    capabilities: ClassVar[Capabilities] = Capabilities(top=True)

    def __init__(self, file: KldFile, notes: tuple[str, ...] = ()) -> None:
        self.file, self.notes = file, notes

    def subject(self, model: str, options: Any, tokenizer: str | None) -> Subject:
        raise AssertionError("a file is asked about with the tokenizer of a candidate")

    def open(self, subject: Subject, options: Any, work: Work) -> Engine:
        return BaseLogitsEngine(self.file, self.notes)
