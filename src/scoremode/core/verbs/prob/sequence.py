"""What a model thinks of targets after prompts: SequenceProbability holds a model, SequenceScore is one answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, starmap
from typing import Any, Unpack

import msgspec
import numpy as np

from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import require, require_read
from scoremode.core.models.subject import Subject
from scoremode.core.plan.path import PREFILL
from scoremode.core.scores.answers import Window, WindowList
from scoremode.core.scores.frames import few_lines
from scoremode.core.typed import typed
from scoremode.core.verbs.arguments import ModelArguments, read_arguments, spelled_out
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel
from scoremode.core.verbs.planned import identify
from scoremode.core.verbs.prob.boundary import EncodedPair, PairEncoder, longest_of
from scoremode.core.verbs.progress import Progress, shows_progress
from scoremode.core.verbs.scoring import answered, check_ids, likelihoods, no_more_than_certain
from scoremode.errors import BoundaryError, InputError, ModelError, OptionError, UnknownArgumentError, one_line

LEADING_SPACE = ("as-given", "add")
SPANNING = ("constrain", "refuse")
BATCH = 256  # pairs that are encoded, and answers that are checked, at a time


class TokenScore(msgspec.Struct, frozen=True, gc=False):
    id: int
    text: str
    logprob: float  # nats
    rank: int | None  # None: not measured


class SequenceScore(msgspec.Struct, frozen=True):
    """The probability of a target after a prompt, and the scores of its tokens."""

    prompt: str
    target: str  # as it was scored, with the space if one was added
    log_prob: float  # nats: the sum over tokens, minus that of the prompt's part of a token that spans the boundary
    prob: float
    perplexity: float  # exp(-log_prob / tokens)
    boundary: str  # "clean" or "spanning"
    tokens: tuple[TokenScore, ...]
    leading_space: str = "as-given"
    condition: str = ""  # the prompt's part of the spanning token
    condition_log_prob: float = 0.0  # nats, of all tokens that begin with it

    def __repr__(self) -> str:
        texts = self.target, self.prompt
        target, prompt = (text if len(text) <= 40 else f"{text[:20]}…{text[-19:]}" for text in texts)
        said = f"P({target!r} | {prompt!r}) = {self.prob:.4g}"
        return few_lines(said, f"log_prob {self.log_prob:.5f}, {len(self.tokens)} tokens, boundary {self.boundary}")

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is not finite becomes None, because JSON has no infinity."""
        found: dict[str, Any] = msgspec.json.decode(self.as_line())
        return found

    def as_line(self) -> bytes:
        """``as_json`` as text, without a line break."""
        return msgspec.json.format(msgspec.json.encode(self), indent=0)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SequenceScore:
        """Reads a result that ``as_json`` wrote."""
        unbounded = {"log_prob": -math.inf, "logprob": -math.inf, "perplexity": math.inf}
        tokens = [{name: unbounded.get(name) if x is None else x for name, x in t.items()} for t in value["tokens"]]
        known = {name: unbounded.get(name) if x is None else x for name, x in value.items()}
        return msgspec.convert({**known, "tokens": tokens}, SequenceScore)


class SequenceProbability:
    """A model held ready to answer P(target | prompt). Its engine starts with the first question.

    >>> with SequenceProbability("table:uniform") as lm:
    ...     round(lm.get_log_prob("ab", "cd")[0].log_prob, 6)
    -11.090355
    """

    @spelled_out(ModelArguments)
    def __init__(
        self,
        model: GivenModel | LazyModel,
        *,
        engine: str | Engine | None = None,
        tokenizer: GivenTokenizer | None = None,
        leading_space: str = "as-given",
        spanning: str = "constrain",
        add_bos: bool = False,
        **options: Unpack[ModelArguments],
    ) -> None:
        if leading_space not in LEADING_SPACE:
            raise OptionError(f"--leading-space {leading_space} is not known", fix="give as-given or add")
        if spanning not in SPANNING:
            raise OptionError(f"--spanning {spanning} is not known", fix="give constrain or refuse")
        question, engine_options = read_arguments(options)
        for name in question.chosen():
            raise UnknownArgumentError(f"SequenceProbability has no argument {name}", fix="leave it out")
        self._is_ours = not isinstance(model, LazyModel)
        self.held = model if isinstance(model, LazyModel) else LazyModel.named(model, engine, engine_options, tokenizer)
        require_read(self.held.chosen.options, PREFILL, has_flag=False)
        self.subject: Subject = self.held.subject
        self.leading_space, self.spanning, self.add_bos = leading_space, spanning, add_bos
        self.encoder = PairEncoder(
            self.subject.tokenizer, leading_space=leading_space, spanning=spanning, add_bos=add_bos
        )
        shares = {} if self.held.is_given else {"shares_prompts": True}
        self.settings = {**self.held.settings(), **shares}

    def __repr__(self) -> str:
        return one_line(f"SequenceProbability({self.subject.name!r}, engine={self.held.engine_name!r})")

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def engine(self) -> Engine:
        """The engine; started here if it is not running."""
        return self.open(self.held.usual_length)

    @typed
    def open(self, longest: int, progress: Progress | None = None) -> Engine:
        """Start the engine, ready for ``longest`` tokens. One that is running and ready for them is kept."""
        return self.held.opened(Work(longest, shares_prompts=True), progress)

    def close(self) -> None:
        """Stop the engine, unless the caller brought it. The next question starts it again."""
        if self._is_ours:
            self.held.close()

    def __enter__(self) -> SequenceProbability:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def identity(self) -> Mapping[str, object]:
        """The facts that must be equal for stored results to be this model's; known before the engine is started."""
        rule = {"leading_space": self.leading_space, "spanning": self.spanning, "add_bos": self.add_bos}
        return identify(self.subject, self.held.engine_name, self.settings, boundary=rule)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────
    @typed
    def get_log_prob(
        self, prompts: str | Sequence[str], targets: str | Sequence[str], progress: Progress | None = None
    ) -> list[SequenceScore]:
        """One result for each pair, in the order given. A single prompt serves all targets, and the other way round."""
        pairs = self.encode(paired(prompts, targets))
        if not self.held.is_open:
            self.open(max(longest_of(pairs), self.held.usual_length))  # more questions may come
        return self.score(pairs, progress)

    @typed
    def encode(self, pairs: Iterable[tuple[str, str]], number: int = 1) -> list[EncodedPair]:
        """Encodes pairs as tokens. Pairs that cannot be scored are refused here, before an engine is started.

        ``number`` is the number of the first pair, for error messages.
        """
        found: list[EncodedPair] = []
        waiting = iter(pairs)
        while batch := list(islice(waiting, BATCH)):
            found += self._cut(batch, number + len(found))
        return found

    def _cut(self, pairs: Sequence[tuple[str, str]], number: int) -> list[EncodedPair]:
        """Encodes and cuts pairs; the error for a refused pair is that of the first one, with its number."""
        try:
            return self._cut_all(pairs)
        except (InputError, BoundaryError) as error:
            if len(pairs) == 1:
                which = f"pair {number}: " if number > 1 else ""
                raise type(error)(f"{which}{error.message}", fix=error.fix) from None
        return [one for at, pair in enumerate(pairs, number) for one in self._cut([pair], at)]

    def _cut_all(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        """Encodes and cuts pairs; raises an error if the model cannot take them."""
        cut, facts, chosen = self.encoder.cut(pairs), self.held.given_facts, self.held.chosen.options.limit
        largest = int(np.concatenate([pair.ids for pair in cut]).max())
        check_ids(largest, facts.vocabulary if facts else self.subject.vocabulary)
        limit, longest = self.held.longest_window, longest_of(cut)
        if limit is not None and longest > limit:
            what = f"{chosen[0]} {limit}" if chosen else f"the model's context of {limit}"
            fix = "shorten the prompt" + (f", or give a larger {chosen[0]}" if chosen else "")
            raise ModelError(f"a prompt and its target feed {longest} tokens, more than {what}", fix=fix)
        if any(pair.condition for pair in cut):
            require(self.held.plugin, "any_target", "score a token that spans the end of a prompt")
        return cut

    @typed
    def score(self, pairs: Sequence[EncodedPair], progress: Progress | None = None) -> list[SequenceScore]:
        """One result for each pair that ``encode`` made, in the order given."""
        if not pairs:
            return []
        engine = self.open(longest_of(pairs), progress)
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(p.prompt for p in pairs))}
        groups = np.array([numbers[p.prompt] for p in pairs], dtype=np.int64)
        found = dict(likelihoods(engine, pairs, groups, progress=progress, together=BATCH))
        conditions = self._conditions(engine, pairs)
        results = []
        for i, (pair, condition) in enumerate(zip(pairs, conditions, strict=True)):
            answers, ids = found[i].answers, pair.ids[pair.first :].tolist()
            logprobs = answers.logprob[:, 0].tolist()
            ranks = [None] * len(ids) if answers.rank is None else answers.rank[:, 0].tolist()
            log_prob = no_more_than_certain(math.fsum(logprobs) - condition)
            per_token = -log_prob / len(ids)
            tokens = zip(ids, pair.texts, logprobs, ranks, strict=True)
            results.append(
                SequenceScore(
                    prompt=pair.prompt,
                    target=pair.target,
                    log_prob=log_prob,
                    prob=math.exp(log_prob),
                    perplexity=math.exp(per_token) if per_token < 700 else math.inf,
                    boundary="spanning" if pair.condition else "clean",
                    tokens=tuple(starmap(TokenScore, tokens)),
                    leading_space=self.leading_space,
                    condition=pair.condition,
                    condition_log_prob=condition,
                )
            )
        return results

    def _conditions(self, engine: Engine, pairs: Sequence[EncodedPair]) -> list[float]:
        """For each pair, log P(the next token begins with the prompt's part of it); 0 where the boundary is clean."""
        logs = [0.0] * len(pairs)
        asked = [(i, p) for i, p in enumerate(pairs) if p.condition]
        windows = []
        for _, pair in asked:
            allowed = self.encoder.beginning_with(pair.condition, int(pair.ids[pair.first]))
            rows = np.array([pair.first - 1], dtype=np.int32)
            windows.append(Window(pair.ids[: pair.first], rows, allowed[None, :]))
        found = dict(answered(engine, WindowList(tuple(windows)), together=BATCH))
        for at, (i, pair) in enumerate(asked):
            logs[i] = no_more_than_certain(float(np.logaddexp.reduce(found[at].logprob[0])))
            if logs[i] == -math.inf:
                raise BoundaryError(
                    f"the model gives {pair.condition!r} at the end of the prompt {pair.prompt!r} probability zero, so "
                    "nothing follows from it",
                    fix="move the boundary to the beginning of that token",
                )
        return logs


def paired(prompts: str | Sequence[str], targets: str | Sequence[str]) -> Iterator[tuple[str, str]]:
    """Prompts and targets as pairs. A single prompt serves all targets, and the other way round."""
    left, right = ([given] if isinstance(given, str) else list(given) for given in (prompts, targets))
    if isinstance(prompts, str):
        left *= len(right)
    elif isinstance(targets, str):
        right *= len(left)
    if len(left) != len(right):
        raise InputError(
            f"{len(left)} prompts and {len(right)} targets do not pair up", fix="give exactly one target per prompt"
        )
    if not left:
        raise InputError("no prompt and target were given", fix="give at least one pair")
    yield from zip(left, right, strict=True)


@spelled_out(ModelArguments)
@shows_progress
def prob(
    model: GivenModel,
    *,
    prompt: str | Sequence[str],
    targets: str | Sequence[str],
    engine: str | Engine | None = None,
    tokenizer: GivenTokenizer | None = None,
    leading_space: str = "as-given",
    spanning: str = "constrain",
    add_bos: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ModelArguments],
) -> list[SequenceScore]:
    """P(target | prompt) for one prompt and several targets, or for pairs.

    A target is scored as it is; ``leading_space="add"`` reads " Paris" for "Paris". ``spanning="refuse"`` refuses a
    token that spans the end of the prompt. ``add_bos`` puts a BOS first if the tokenizer does not.

    >>> import scoremode as sm
    >>> [round(s.log_prob, 6) for s in sm.prob("table:uniform", prompt="ab", targets=["c", "de"])]
    [-5.545177, -11.090355]
    """
    with SequenceProbability(
        model,
        engine=engine,
        tokenizer=tokenizer,
        leading_space=leading_space,
        spanning=spanning,
        add_bos=add_bos,
        **options,
    ) as lm:
        return lm.score(lm.encode(paired(prompt, targets)), progress)
