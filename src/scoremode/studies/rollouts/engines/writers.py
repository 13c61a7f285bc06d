"""Texts that engines of this process write, token by token, by one rule for drawing.

A writer of an engine feeds its model; ``TextsInProgress`` draws from the logits and knows which texts have ended. The
rules are applied in the order temperature, min-p, top-k, top-p. All of it is float64, on the device of the logits; an
id and two numbers per row leave it. A row is drawn with one uniform number, which belongs to its text and step alone: a
text depends neither on the texts beside it nor on the device.

Transformers     shortest prompt      then one token of each text per step
text 0           │ p p p p p          │ d d d d d d       d: drawn, p: of its prompt
text 1           │ p p p p p          │ p p d d d         a longer prompt is fed to its end meanwhile

There, all texts of a batch begin at position 0 and advance together, so no text needs padding or a mask, and a text is
computed as the decode path would replay it. llama.cpp reads each prompt at once, up to its last token; from there on,
one token of each text is fed in every step, as llama-server does. A table needs its last token alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.plugin import EnginePlugin, Work
from scoremode.core.models.subject import Subject
from scoremode.core.plan.path import DecodePath
from scoremode.errors import EngineError
from scoremode.studies.rollouts.texts import WrittenTokens
from scoremode.studies.rollouts.writing import (
    DrawingRules,
    Tell,
    Writer,
    WritingRequest,
    batches_of_texts,
    end_tokens,
)
from scoremode.values import Bools, Floats, Ids, Ints

if TYPE_CHECKING:
    from scoremode.engines.llamacpp.engine import LlamaCppEngine
    from scoremode.engines.table.engine import TableEngine
    from scoremode.engines.transformers.engine import TransformersEngine


def draw(logits: Tensor, rules: DrawingRules, uniform: Floats) -> tuple[Ids, Floats, Floats]:
    """Draws a token from each row of logits (n, vocabulary); ``uniform`` (n,) are numbers from 0 to below 1.

    Returns the ids, their log-probabilities in the distribution that they were drawn from, and in the model's own.
    """
    x = logits.double()
    if rules.is_greedy:
        chosen = (x == x.amax(1, keepdim=True)).int().argmax(1)  # of equal ones, the lowest id
        drawn = torch.zeros_like(x[:, 0])
    else:
        masked_logits = filtered(x / rules.temperature, rules)
        chosen = _at(masked_logits.softmax(1), torch.from_numpy(uniform).to(x.device))
        drawn = _logprob(masked_logits, chosen)
    raw = _logprob(x, chosen)
    columns = torch.stack([chosen.double(), drawn, raw]).cpu().numpy()  # an id is exact in float64
    if np.isnan(columns).any():
        raise EngineError("the model gives NaN", fix="try --dtype float32; if it stays, the weights are damaged")
    return columns[0].astype(np.int32), np.minimum(columns[1], 0.0), np.minimum(columns[2], 0.0)


def filtered(x: Tensor, rules: DrawingRules) -> Tensor:
    """Returns scaled logits in which the tokens that the rules leave out are -inf. Equal logits are kept together."""
    if rules.min_p:
        x = x.masked_fill(x < x.amax(1, keepdim=True) + math.log(rules.min_p), -math.inf)
    if 0 < rules.top_k < x.shape[1]:
        x = x.masked_fill(x < x.topk(rules.top_k, 1).values[:, -1:], -math.inf)
    if rules.top_p < 1:
        ranked, order = x.sort(dim=1, descending=True, stable=True)
        share = ranked.softmax(1)
        before = share.cumsum(1) - share  # probability of the tokens that rank higher
        left_out = torch.zeros_like(x, dtype=torch.bool).scatter(1, order, before >= rules.top_p)
        x = x.masked_fill(left_out, -math.inf)
    return x


def _at(share: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the sum of the probabilities of all ids up to it exceeds a uniform number."""
    total = share.cumsum(1)
    ids = torch.searchsorted(total, (uniform * total[:, -1])[:, None], right=True)[:, 0]
    return torch.where(ids < share.shape[1], ids, share.argmax(1))  # the product may round up to the whole sum


def _logprob(x: Tensor, chosen: Tensor) -> Tensor:
    logprob: Tensor = x.gather(1, chosen[:, None])[:, 0] - x.logsumexp(1)
    return logprob


class TextsInProgress:
    """Texts that are written side by side: what was drawn for each, and which have ended."""

    def __init__(self, requests: Sequence[WritingRequest], rules: DrawingRules, ends: frozenset[int]) -> None:
        self.rules, self.ends = rules, ends
        self.prompts, self._rooms = [request.prompt for request in requests], [request.room for request in requests]
        self._drawn: list[list[tuple[int, float, float]]] = [[] for _ in requests]
        self._numbers = [np.random.Generator(np.random.Philox(key=request.seed)) for request in requests]
        self.last = np.array([prompt[-1] for prompt in self.prompts], np.int32)  # the token that each is fed next
        self.ended: Bools = np.zeros(len(requests), np.bool_)

    @property
    def unfinished(self) -> Ints:
        return np.flatnonzero(~self.ended)

    def draw(self, places: Ints, logits: Tensor) -> None:
        """Draws a token for the texts at these places from their rows of logits."""
        uniform = np.array([self._numbers[place].random() for place in places])
        ids, logprob, raw = draw(logits, self.rules, uniform)
        self.last[places] = ids
        for place, *token in zip(places.tolist(), ids.tolist(), logprob.tolist(), raw.tolist(), strict=True):
            tokens: Any = self._drawn[place]
            tokens.append(tuple(token))
            self.ended[place] = token[0] in self.ends or len(tokens) >= self._rooms[place]

    def written(self, place: int) -> WrittenTokens:
        ids, logprob, raw = zip(*self._drawn[place], strict=True)
        return WrittenTokens(np.array(ids, np.int32), np.array(logprob), np.array(raw))


class StepWriter(Writer):
    """Writes texts side by side with an open engine, a token of each per step, and closes that engine."""

    def __init__(self, engine: Any, size: int, ends: frozenset[int], rules: DrawingRules) -> None:
        self.engine, self.facts, self.size, self.ends, self.rules = engine, engine.facts, size, ends, rules

    def write(self, requests: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        for batch in batches_of_texts(requests, self.size or 1):
            if done[batch].all():
                continue
            texts = TextsInProgress([requests[i] for i in batch], self.rules, self.ends)
            try:
                for places, logits in self._steps(texts):
                    texts.draw(places, logits)
                    tell(len(places))
                    for place in places[texts.ended[places] & ~done[batch[places]]]:
                        yield int(batch[place]), texts.written(place)
            except torch.OutOfMemoryError:
                raise EngineError(
                    f"{len(batch)} texts side by side do not fit in this device's memory",
                    fix=f"give --sequences {max(1, len(batch) // 2)}, or fewer --max-tokens",
                ) from None

    @abstractmethod
    def _steps(self, texts: TextsInProgress) -> Iterator[tuple[Ints, Tensor]]:
        """Yields texts by their places, with the logits of their next tokens, until all texts have ended."""

    def close(self) -> None:
        self.engine.close()


def _for_steps(plugin: EnginePlugin, subject: Subject, options: Any, work: Work) -> tuple[Any, int]:
    """An open engine, and how many texts it takes in a step."""
    path = work.path or DecodePath()
    return plugin.open(subject, options, replace(work, path=path)), path.sequences


# ── Transformers ─────────────────────────────────────────────────────────────────────────────────────────────────────
def open_transformers(plugin: EnginePlugin, subject: Subject, options: Any, work: Work, rules: DrawingRules) -> Writer:
    engine, size = _for_steps(plugin, subject, options, work)
    return TransformersWriter(engine, size, end_tokens(subject), rules)


class TransformersWriter(StepWriter):
    engine: TransformersEngine

    def _steps(self, texts: TextsInProgress) -> Iterator[tuple[Ints, Tensor]]:
        from scoremode.engines.transformers import batches

        prompts = texts.prompts
        reached = min(map(len, prompts))
        cache, places = self.engine.cache.empty(), np.arange(len(prompts))
        rows = self.engine.fed(np.stack([prompt[:reached] for prompt in prompts]), cache)
        while True:
            ready = np.flatnonzero([reached >= len(prompts[i]) and not texts.ended[i] for i in places])
            if len(ready):
                yield places[ready], self.engine.logits_of(rows[torch.from_numpy(ready).to(rows.device)])
            left = np.flatnonzero(~texts.ended[places])
            if not len(left):
                return
            if 2 * len(left) <= len(places) and self.engine.cache.name is None:
                cache = batches.selected(cache, torch.from_numpy(left).to(rows.device))
                places = places[left]
            following = [prompts[i][reached] if reached < len(prompts[i]) else texts.last[i] for i in places]
            rows = self.engine.fed(np.array(following, np.int32)[:, None], cache)
            reached += 1

    def account(self) -> list[str]:
        return list(self.engine.account().get("notes", ()))


# ── llama.cpp ────────────────────────────────────────────────────────────────────────────────────────────────────────
def open_llamacpp(plugin: EnginePlugin, subject: Subject, options: Any, work: Work, rules: DrawingRules) -> Writer:
    engine, size = _for_steps(plugin, subject, options, work)
    return LlamaCppWriter(engine, size, engine.end_tokens(), rules)


class LlamaCppWriter(StepWriter):
    engine: LlamaCppEngine

    def _steps(self, texts: TextsInProgress) -> Iterator[tuple[Ints, Tensor]]:
        self.engine.clear()
        for place, prompt in enumerate(texts.prompts):
            self._read(place, prompt[:-1])
        positions = np.array([len(prompt) - 1 for prompt in texts.prompts])
        while len(places := texts.unfinished):
            yield places, self.engine.feed(texts.last[places], positions[places], places, np.arange(len(places)))
            positions += 1

    def _read(self, place: int, prompt: Ids) -> None:
        step = self.engine.at_once
        for begin in range(0, len(prompt), step):
            part = prompt[begin : begin + step]
            positions = np.arange(begin, begin + len(part))
            self.engine.feed(part, positions, np.full(len(part), place), np.zeros(0, np.int64))


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def open_table(plugin: EnginePlugin, subject: Subject, options: Any, work: Work, rules: DrawingRules) -> Writer:
    return TableWriter(plugin.open(subject, options, work), 0, frozenset(), rules)


class TableWriter(StepWriter):
    """A table has no end token."""

    engine: TableEngine

    def _steps(self, texts: TextsInProgress) -> Iterator[tuple[Ints, Tensor]]:
        table = self.engine.logprobs
        while len(places := texts.unfinished):
            yield places, torch.from_numpy(table[texts.last[places] % len(table)])
