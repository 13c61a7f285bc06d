"""P(target | prompt): the joined text is encoded, cut at the prompt's last character, and the rest is scored.

The boundary is the hard part, because "…is" + "Paris" is not the token sequence of "…is Paris". Where a token spans
the cut, everything from that token on is scored, on the condition that the token begins with the prompt's part of it:

prompt  "The capital of Fran"       target  "ce is Paris"
tokens  The| capital| of| France| is| Paris
                       ^ spans: P( France| is| Paris) / P(a token that begins with " Fran")

Tokens that cover less than the prompt's part are not in that condition: it is about the next token alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.cache import write_atomically
from scoremode.corpus import is_text
from scoremode.engines.base import Engine, EngineOptions, gather_options
from scoremode.engines.lookup import Subject, engine_name, find_subject, open_engine
from scoremode.errors import BoundaryError, InputError, ModelError, OptionError
from scoremode.methods import plan_of_pairs
from scoremode.scoring import Progress, check_answers, check_fits
from scoremode.types import Answers, Ids, Ints, Window, WindowList

LEADING_SPACE = ("as-given", "add")
SPANNING = ("constrain", "refuse")
USUAL_LENGTH = 8192  # tokens that an engine is made ready for where a model could take many more


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a target."""

    id: int
    text: str
    logprob: float  # nats
    rank: int


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """What the model thinks of a target behind a prompt."""

    prompt: str
    target: str  # as it was scored, with the space that was added where one was
    log_prob: float  # nats: the sum over tokens, less the condition where a token spans the boundary
    prob: float
    perplexity: float  # exp(-log_prob / tokens)
    boundary: str  # "clean" or "spanning"
    tokens: tuple[TokenScore, ...]
    leading_space: str = "as-given"
    condition: str = ""  # the prompt's part of the spanning token
    condition_log_prob: float = 0.0  # nats, of all tokens that begin with it

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is not finite becomes None, because JSON has no infinity."""
        value = asdict(self)
        value["tokens"] = [{**t, "logprob": _finite(t["logprob"])} for t in value["tokens"]]
        return {k: _finite(v) if isinstance(v, float) else v for k, v in value.items()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> SequenceScore:
        """The result that ``as_json`` wrote."""
        unbounded = {"log_prob": -math.inf, "perplexity": math.inf}
        tokens = tuple(
            TokenScore(t["id"], t["text"], -math.inf if t["logprob"] is None else t["logprob"], t["rank"])
            for t in value["tokens"]
        )
        known: dict[str, Any] = {k: unbounded.get(k) if v is None else v for k, v in value.items()}
        return SequenceScore(**{**known, "tokens": tokens})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class _Pair:
    prompt: str
    target: str
    ids: Ids  # (n,) prompt and target
    texts: tuple[str, ...]  # of the tokens from ``first`` on
    first: int  # index of the first scored token
    condition: str


class SequenceProbability:
    """A model held ready to answer P(target | prompt).

    >>> lm = SequenceProbability("table:uniform")
    >>> lm.get_log_prob("ab", "cd")[0].prob == 2.0**-16
    True
    """

    def __init__(
        self,
        model: str,
        *,
        engine: str | Engine | None = None,
        options: EngineOptions | None = None,
        tokenizer: str | None = None,
        leading_space: str = "as-given",
        spanning: str = "constrain",
        add_bos: bool = False,
        **engine_options: Any,
    ) -> None:
        if leading_space not in LEADING_SPACE:
            raise OptionError(f"--leading-space {leading_space} is not known", fix="give as-given or add")
        if spanning not in SPANNING:
            raise OptionError(f"--spanning {spanning} is not known", fix="give constrain or refuse")
        options = gather_options(options, engine_options)
        if engine_options:
            raise TypeError(f"SequenceProbability has no argument {next(iter(engine_options))!r}")
        self.subject: Subject = find_subject(
            model, tokenizer=tokenizer, trust_remote_code=bool(options.trust_remote_code)
        )
        self.leading_space, self.spanning, self.add_bos = leading_space, spanning, add_bos
        if isinstance(engine, Engine):
            self.engine = engine
        else:
            shared = replace(options, shares_prompts=True)
            longest = min(self.subject.context_length or USUAL_LENGTH, USUAL_LENGTH)
            self.engine = open_engine(self.subject, engine_name(engine, self.subject), shared, longest)

    def identity(self) -> dict[str, Any]:
        """What must be equal for stored results to be these."""
        facts = self.engine.facts
        return {
            "model": self.subject.fingerprint,
            "tokenizer": self.subject.tokenizer.facts.fingerprint,
            "engine": [facts.engine, facts.dtype, facts.device, facts.head],
            "boundary": [self.leading_space, self.spanning, self.add_bos],
        }

    def get_log_prob(
        self, prompts: str | Sequence[str], targets: str | Sequence[str], progress: Progress | None = None
    ) -> list[SequenceScore]:
        """One result for each pair, in the order given. A single prompt serves all targets, and the other way round."""
        pairs = [self._encode(p, t) for p, t in _paired(prompts, targets)]
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(p.prompt for p in pairs))}
        groups = np.array([numbers[p.prompt] for p in pairs], dtype=np.int64)
        answers = self._scored(pairs, groups, progress)
        conditions = self._conditions(pairs)
        return [
            self._result(pair, answer, condition)
            for pair, answer, condition in zip(pairs, answers, conditions, strict=True)
        ]

    # ── the boundary ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _encode(self, prompt: str, target: str) -> _Pair:
        if not target:
            raise InputError("a target is empty", fix='give it some text, as in --target " Paris"')
        if not is_text(prompt + target):
            raise InputError("a prompt or target is not UTF-8", fix="give text in UTF-8")
        if self.leading_space == "add" and not target[:1].isspace():
            target = " " + target
        text, cut = prompt + target, len(prompt)
        specials, encoding = self._without_trailing_specials(text)
        ids = np.concatenate([specials, encoding.ids]).astype(np.int32)
        own = int(np.searchsorted(encoding.char_end, cut, side="right"))  # the first token that reaches past the cut
        if own == len(encoding.ids):
            raise InputError(f"the target {target!r} has no token of its own", fix="give a longer target")
        first = own + len(specials)
        if first == 0:
            where = "the prompt is empty" if not prompt else "the prompt has no token of its own"
            raise InputError(
                f"{where} and this tokenizer adds no BOS, so the first token has no context",
                fix="give a prompt, or --add-bos",
            )
        begins = int(encoding.touches[own])
        condition = text[begins:cut]
        if condition and self.spanning == "refuse":
            raise BoundaryError(
                f"the token {text[begins : int(encoding.char_end[own])]!r} spans the end of the prompt {prompt!r}",
                fix="move the boundary, as in a target that begins with the space, or use --spanning constrain",
            )
        spans = zip(encoding.char_start[own:].tolist(), encoding.char_end[own:].tolist(), strict=True)
        texts = [text[a:b] for a, b in spans]
        texts[0] = condition + texts[0][len(condition) :] if condition else texts[0]
        return _Pair(prompt, target, ids, tuple(texts), first, condition)

    def _without_trailing_specials(self, text: str) -> tuple[Ids, Any]:
        """Special tokens that go in front, and the text's own encoding: an EOS behind the target is no part of it."""
        tokenizer = self.subject.tokenizer
        plain, full = tokenizer.encode(text, special=False), tokenizer.encode(text, special=True)
        front = next((i for i in range(len(full.ids) - len(plain.ids) + 1) if _begins(full.ids[i:], plain.ids)), None)
        if front is None:
            raise ModelError("this tokenizer changes its tokens when it adds special ones", fix="use another tokenizer")
        specials = full.ids[:front]
        if self.add_bos and not len(specials):
            if tokenizer.facts.bos is None:
                raise OptionError("--add-bos: this tokenizer has no BOS", fix="leave --add-bos out")
            specials = np.array([tokenizer.facts.bos], dtype=np.int32)
        return specials, plain

    # ── the scores ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _scored(self, pairs: list[_Pair], groups: Ints, progress: Progress | None) -> list[Answers]:
        if not pairs:
            return []
        plan = plan_of_pairs([(p.ids, p.first) for p in pairs], groups)
        check_fits(plan, self.engine.facts.vocabulary, self.engine.facts.context_length)
        found: dict[int, Answers] = {}
        fed = 0
        for index, answers in self.engine.score(plan, np.zeros(len(plan), dtype=np.bool_)):
            check_answers(index, plan.window(index), answers)
            found[index] = answers
            fed += int(plan.lengths[index])
            if progress:
                progress(fed, plan.forward_tokens)
        return [found[i] for i in range(len(pairs))]

    def _conditions(self, pairs: list[_Pair]) -> list[float]:
        """log P(the next token begins with the prompt's part), 0 where the boundary is clean."""
        logs = [0.0] * len(pairs)
        asked = [(i, p) for i, p in enumerate(pairs) if p.condition]
        windows = []
        for _, pair in asked:
            allowed = self._beginning_with(pair.condition.encode(), int(pair.ids[pair.first]))
            rows = np.array([pair.first - 1], dtype=np.int32)
            windows.append(Window(pair.ids[: pair.first], rows, allowed[None, :]))
        source = WindowList(tuple(windows))
        for index, answers in self.engine.score(source, np.zeros(len(source), dtype=np.bool_)):
            logs[asked[index][0]] = min(0.0, float(np.logaddexp.reduce(answers.logprob[0])))
        return logs

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self.subject.tokenizer.pieces()

    def _beginning_with(self, beginning: bytes, spanning_token: int) -> Ids:
        allowed = [i for i, piece in enumerate(self._pieces) if piece.startswith(beginning)]
        if spanning_token not in allowed:
            raise BoundaryError(
                f"a token spans the end of the prompt at {beginning.decode('utf-8', 'replace')!r}, inside a character",
                fix="move the boundary to a whole character or word",
            )
        return np.array(allowed, dtype=np.int32)

    def _result(self, pair: _Pair, answers: Answers, condition_log_prob: float) -> SequenceScore:
        logprobs, ranks = answers.logprob[:, 0].tolist(), answers.rank[:, 0].tolist()
        ids = pair.ids[pair.first :].tolist()
        log_prob = min(0.0, math.fsum(logprobs) - condition_log_prob)
        per_token = -log_prob / len(ids)
        return SequenceScore(
            prompt=pair.prompt,
            target=pair.target,
            log_prob=log_prob,
            prob=math.exp(log_prob),
            perplexity=math.exp(per_token) if per_token < 700 else math.inf,
            boundary="spanning" if pair.condition else "clean",
            tokens=tuple(TokenScore(i, t, lp, r) for i, t, lp, r in zip(ids, pair.texts, logprobs, ranks, strict=True)),
            leading_space=self.leading_space,
            condition=pair.condition,
            condition_log_prob=condition_log_prob,
        )


def _begins(ids: Ids, with_ids: Ids) -> bool:
    return len(ids) >= len(with_ids) and bool((ids[: len(with_ids)] == with_ids).all())


def _paired(prompts: str | Sequence[str], targets: str | Sequence[str]) -> Iterator[tuple[str, str]]:
    left = [prompts] if isinstance(prompts, str) else list(prompts)
    right = [targets] if isinstance(targets, str) else list(targets)
    if isinstance(prompts, str):
        left = left * len(right)
    elif isinstance(targets, str):
        right = right * len(left)
    if len(left) != len(right):
        raise InputError(f"{len(left)} prompts and {len(right)} targets do not pair up", fix="give one target a prompt")
    if not left:
        raise InputError("no prompt and target were given", fix="give at least one pair")
    yield from zip(left, right, strict=True)


def prob(
    model: str,
    *,
    prompt: str | Sequence[str],
    targets: str | Sequence[str],
    **settings: Any,
) -> list[SequenceScore]:
    """P(target | prompt) for one prompt and several targets, or for pairs. ``settings`` as in SequenceProbability.

    >>> import scoremode as sm
    >>> [round(s.log_prob, 6) for s in sm.prob("table:uniform", prompt="ab", targets=["c", "de"])]
    [-5.545177, -11.090355]
    """
    lm = SequenceProbability(model, **settings)
    try:
        return lm.get_log_prob(prompt, targets)
    finally:
        if not isinstance(settings.get("engine"), Engine):
            lm.engine.close()


CHUNK = 256  # pairs scored between two writes


def score_to_file(
    lm: SequenceProbability, pairs: list[tuple[str, str]], path: Path, progress: Progress | None = None
) -> list[SequenceScore]:
    """Results of many pairs as JSON lines, written as they come; an interrupted call goes on where it stopped.

    The file gets its name when it is whole. Until then ``NAME.partial`` holds what is done; its lines are used again
    only for the same model, settings and pairs.
    """
    partial = path.with_name(path.name + ".partial")
    header = json.dumps({"scoremode": lm.identity(), "pairs": _digest(pairs)}, sort_keys=True)
    results = _read_partial(partial, header, pairs)
    with partial.open("a", encoding="utf-8") as file:
        if not results:
            file.truncate(0)
            file.write(header + "\n")
        for begin in range(len(results), len(pairs), CHUNK):
            chunk = pairs[begin : begin + CHUNK]
            scored = lm.get_log_prob([p for p, _ in chunk], [t for _, t in chunk])
            file.writelines(json.dumps(r.as_json(), ensure_ascii=False) + "\n" for r in scored)
            file.flush()
            results += scored
            if progress:
                progress(len(results), len(pairs))
    write_atomically(path, "".join(json.dumps(r.as_json(), ensure_ascii=False) + "\n" for r in results).encode())
    partial.unlink()
    return results


def _digest(pairs: list[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _read_partial(partial: Path, header: str, pairs: list[tuple[str, str]]) -> list[SequenceScore]:
    """Whole chunks that an earlier call left, so that the rest meets the same batches; a torn line ends them."""
    try:
        with partial.open(encoding="utf-8", errors="replace", newline="\n") as file:
            lines = list(file)  # not splitlines: a text may hold other line ends
    except OSError:
        return []
    if not lines or lines[0].rstrip("\n") != header:
        return []
    found: list[SequenceScore] = []
    for line in lines[1:]:
        try:
            found.append(SequenceScore.from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            break
    kept = len(found) if len(found) == len(pairs) else len(found) // CHUNK * CHUNK
    with partial.open("w", encoding="utf-8") as file:
        file.writelines([header + "\n", *lines[1 : kept + 1]])
    return found[:kept]
