"""Load once, ask often: ``sm.open`` and ``sm.wrap`` give a model that stays open between questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import Work
from scoremode.core.plan.question import Question
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.core.typed import typed
from scoremode.core.verbs.argument_types import QuestionArguments
from scoremode.core.verbs.arguments import (
    ModelArguments,
    read_arguments,
    spelled_out,
)
from scoremode.core.verbs.compare import OutputArguments, check_outputs, compare_model, leave, split_outputs
from scoremode.core.verbs.compared_models import name_of, place_of
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.prob.many_pairs import check_results, score_to_file
from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore, paired
from scoremode.core.verbs.progress import Progress, shows_progress
from scoremode.core.verbs.reference import FileArguments, ReferenceArguments, reference_of, split_files
from scoremode.core.verbs.scoring import Continuation, likelihoods
from scoremode.errors import InputError, OptionError
from scoremode.values import Floats, Ids


class CompareQuestion(QuestionArguments, OutputArguments, total=False):
    """Arguments of a question, and files that wings write."""


class Model:
    """A model that answers many questions. Its engine is opened by the first question that no kept run answers.

    >>> import scoremode as sm
    >>> with sm.open("table:uniform") as model:
    ...     model.ppl(text="any text").perplexity
    256.0 ± ?
    """

    def __init__(self, model: LazyModel) -> None:
        """Use ``scoremode.open`` or ``scoremode.wrap`` instead."""
        self._model = model

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def engine(self) -> str:
        return self._model.engine_name

    def __repr__(self) -> str:
        return f"Model({self.name!r}, engine={self.engine!r}{', open' if self._model.is_open else ''})"

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────
    @spelled_out(QuestionArguments)
    @shows_progress
    def ppl(
        self,
        *,
        out: str | Path | None = None,
        fresh: bool = False,
        progress: Progress | None = None,
        **question: Unpack[QuestionArguments],
    ) -> Run:
        """The perplexity of a text by a named method; see :func:`scoremode.ppl`."""
        with self._asking():
            return self._model.score(Question.of(question).with_text(), Place.at(out, fresh=fresh, progress=progress))

    @typed
    @shows_progress
    def prob(
        self,
        prompt: str | Sequence[str],
        targets: str | Sequence[str],
        *,
        leading_space: str = "as-given",
        spanning: str = "constrain",
        add_bos: bool = False,
        out: str | Path | None = None,
        fresh: bool = False,
        progress: Progress | None = None,
    ) -> list[SequenceScore]:
        """P(target | prompt) for one prompt and several targets, or for pairs.

        With ``out`` the results are also kept in that file, one line for each; an interrupted call resumes.
        """
        lm = SequenceProbability(self._model, leading_space=leading_space, spanning=spanning, add_bos=add_bos)
        with self._asking():
            if out is None:
                return lm.score(lm.encode(paired(prompt, targets)), progress)
            output = check_results(str(out), "out")
            written = score_to_file(lm, list(paired(prompt, targets)), output, fresh=fresh, progress=progress)
            return [SequenceScore.from_json(row) for row in written.rows()]

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer that cuts texts for this model."""
        return self._model.subject.tokenizer

    @typed
    @shows_progress
    def logprobs(
        self,
        prompts: Sequence[Ids | Sequence[int]],
        continuations: Sequence[Ids | Sequence[int]],
        *,
        progress: Progress | None = None,
    ) -> list[Floats]:
        """The log-probability of each id of continuations after the ids of their prompts, in nats, by prefill.

        >>> import scoremode as sm
        >>> with sm.open("table:uniform") as model:
        ...     [column.round(4).tolist() for column in model.logprobs([[1, 2]], [[3, 4]])]
        [[-5.5452, -5.5452]]
        """
        if len(prompts) != len(continuations):
            what = f"{len(prompts)} prompts and {len(continuations)} continuations do not pair up"
            raise InputError(what, fix="give exactly one continuation per prompt")
        found = [np.zeros(0) for _ in continuations]
        texts = [np.array([*a, *b], np.int64) for a, b in zip(prompts, continuations, strict=True)]
        ids, size = np.concatenate([[0], *texts]), self._model.subject.vocabulary or 2**31
        if not 0 <= ids.min() <= ids.max() < size:
            what = f"prompts and continuations have ids from {ids.min()} to {ids.max()}"
            raise InputError(f"{what}, and the vocabulary ends at {size - 1}", fix="give ids of its tokenizer")
        if any(not len(prompt) for prompt in prompts):
            raise InputError("a prompt has no token, and the first token of a text has no score", fix="add a BOS token")
        numbers = [i for i, ids in enumerate(continuations) if len(ids)]
        asked = [Continuation(texts[i].astype(np.int32), len(prompts[i])) for i in numbers]
        if asked:
            with self._asking():
                engine = self._model.opened(Work(longest=max(one.fed for one in asked)), progress)
                # each text has its own number: a shared prompt would not be computed as a trainer does
                for i, one in likelihoods(engine, asked, np.arange(len(asked)), progress=progress, together=256):
                    found[numbers[i]] = one.answers.logprob[:, 0]
        return found

    @spelled_out(QuestionArguments, FileArguments)
    @shows_progress
    def reference(
        self,
        out: str | Path | None = None,
        *,
        fresh: bool = False,
        progress: Progress | None = None,
        **question: Unpack[ReferenceArguments],
    ) -> Run:
        """Keep this model's hidden states on a text, for comparisons; see :func:`scoremode.reference`."""
        files, rest = split_files(question)
        to_ask, place = Question.of(rest).with_text(), Place.at(out, fresh=fresh, progress=progress)
        with self._asking():
            return reference_of(self._model, to_ask, place, files=files)

    @spelled_out(QuestionArguments, OutputArguments)
    @shows_progress
    def compare(
        self,
        baseline: str | Path | Run | Model,
        *,
        out: str | Path | None = None,
        fresh: bool = False,
        few_documents: bool = False,
        progress: Progress | None = None,
        **question: Unpack[CompareQuestion],
    ) -> Comparison:
        """Compares this model with a baseline: a reference (its folder or run), a ``.kld`` file, or another open model.

        A reference and a file bring their own question. See :func:`scoremode.compare`.
        """
        outputs, rest = split_outputs(question)
        to_ask = Question.of(rest)
        place = replace(Place.at(out, fresh=fresh, progress=progress), few_documents=few_documents)
        check_outputs(outputs, {name_of(self._model): place_of(self._model, place).out})
        with ExitStack() as asking:
            asking.enter_context(self._asking())
            if isinstance(baseline, Model):
                asking.enter_context(baseline._asking())
                to_ask = to_ask.with_text()
            first = baseline._model if isinstance(baseline, Model) else baseline
            comparison = compare_model(first, self._model, to_ask, place)
        return leave(outputs, {comparison.name: comparison}, {}, place)[0]

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A context for one question. A model whose weights may change is closed afterwards, to be read anew."""
        try:
            yield
        finally:
            if self._model.plugin.opens_for_each_question:
                self._model.close()

    def close(self) -> None:
        """Stop the engine. The next question opens it again."""
        self._model.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@spelled_out(ModelArguments)
def open(
    model: GivenModel,
    *,
    engine: str | Engine | None = None,
    tokenizer: GivenTokenizer | None = None,
    **options: Unpack[ModelArguments],
) -> Model:
    """Makes a model that is loaded once and asked often. ``options`` are the engine's; ``replicas=N`` opens N engines.

    Answers are kept and found again as those of the command line are. Nothing is loaded before a question needs it.

    >>> import scoremode as sm
    >>> with sm.open("table:uniform") as model:
    ...     [round(s.prob, 6) for s in model.prob("ab", ["c", "d"])]
    [0.003906, 0.003906]
    """
    question, model_options = read_arguments(options)
    for name in question.chosen():
        raise OptionError(f"open has no argument {name}", fix="give it to the question, as in model.ppl")
    lazy = LazyModel.named(model, engine, model_options, tokenizer, many_questions=True)
    lazy.settings()  # refuses options that cannot work
    return Model(lazy)


@typed
def wrap(
    hf_model: Any,
    tokenizer: Any,
    *,
    name: str | None = None,
    batch_tokens: int | None = None,
    head: str | None = None,
    head_kernel: str | None = None,
    divergence: str | None = None,
) -> Model:
    """Ask a causal LM of Transformers that is loaded already, with its tokenizer.

    The model is put into evaluation mode for each question and back afterwards. Its weights may change between two
    questions, so answers are kept only where ``out`` says so, and never found again. ``examples/training_loop.py``
    logs perplexity and KL while a model is trained. ``name`` is what tables call it;
    ``batch_tokens``, ``head``, ``head_kernel`` and ``divergence`` are options of the engine transformers.

    >>> model = sm.wrap(hf_model, tokenizer)                       # doctest: +SKIP
    >>> model.ppl(text="The quick brown fox").perplexity           # doctest: +SKIP
    """
    given = {"batch_tokens": batch_tokens, "head": head, "head_kernel": head_kernel, "divergence": divergence}
    return Model(LazyModel.wrapped(hf_model, tokenizer, given, name=name))
