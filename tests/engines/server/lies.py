"""A server of stories260K that lies: what it does to the scores of a prompt, by name, and what must become of a run.

refused         an error
noted           a note names what is wrong; a refusal is as good
another model   no client can tell: the general note alone. What moves perplexity by less than 1 % may end here, too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scoremode as sm
from scoremode.errors import ScoremodeError
from scoremode.values import Floats
from tests.engines.server.small_server import SmallServer

Ids = list[int]
Distributions = Callable[[Ids], Floats]
BOS, V = 1, 512
WORDS = ("proven", "do not depend", "score worse", "a floor", "probability zero")  # of notes that name what is wrong
BATCH = 0.05 / 2**0.5  # nats, rms: what another batch moves in bfloat16 is the difference of two
BEYOND = 34  # tokens: the longest prompt of the first check, once


class Stories:
    """Distributions of the real model, and of a damaged one; each prompt is computed once."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)
        self.models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2)]
        damage = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.models[1].model.layers[2].parameters():
                weight.add_(0.2 * weight.std() * torch.randn(weight.shape, generator=damage))
        self.true, self.other = (cache(partial(self._rows, model)) for model in self.models)

    @torch.no_grad()
    def _rows(self, model: Any, *ids: int) -> Floats:
        found: Floats = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1).numpy()
        return found

    @torch.no_grad()
    def near(self, ids: Ids, length: int) -> Floats:
        """Distributions that see the last ``length`` tokens alone."""
        rows = [self.true(*ids[: length + 1])]
        if len(ids) > length + 1:
            parts = torch.tensor([ids[i - length : i] for i in range(length + 1, len(ids))])
            rows.append(self.models[0](parts).logits[:, -1].double().log_softmax(-1).numpy())
        return np.concatenate(rows)

    @torch.no_grad()
    def text(self, stories: int = 4, length: int = 300) -> str:
        """Texts that the model wrote itself, at temperature 1."""
        ids, draw = torch.full((stories, 1), BOS), torch.Generator().manual_seed(1)
        cached, last = None, ids
        for _ in range(length):
            found = self.models[0](last, past_key_values=cached, use_cache=True)
            p, cached = found.logits[:, -1].softmax(-1), found.past_key_values
            p[:, :3] = 0
            last = torch.multinomial(p, 1, generator=draw)
            ids = torch.cat([ids, last], 1)
        return "\n".join(self.tokenizer.decode(one[1:].tolist()) for one in ids)


@dataclass
class Lie:
    rows: Callable[[LyingServer, Ids], Floats]
    wanted: str = "refused"
    server: Mapping[str, Any] = field(default_factory=dict)  # other fields of the server
    own: Callable[[Floats], Floats] | None = None  # what is done to the scores of the tokens that were sent alone


@dataclass
class LyingServer(SmallServer):
    stories: Any = None
    lie: Any = None
    noise: float = 0.0  # nats, rms, of every logit
    cached: bool = False  # the noise is that of a prefix cache: only in prompts that begin like an earlier one
    answers: int = 0
    asked: int = 0  # the tokens that are listed
    before: Any = None  # the distributions of the last answer

    def true(self, ids: Ids) -> Floats:
        found: Floats = self.stories.true(*ids)
        return found

    def rows(self, ids: Ids) -> Floats:
        with self.lock:
            self.answers += 1
            draw = np.random.default_rng(self.answers)
        found: Floats = self.true(ids) if self.lie is None else self.lie.rows(self, ids)
        if self.noise and not (self.cached and draw.random() < 0.5):
            found = normal(found + draw.normal(0, self.noise, found.shape))
        self.before = self.true(ids)
        return found

    def complete(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked = asked.get("prompt_logprobs") or 0
        status, value = super().complete(asked)
        own = None if self.lie is None else self.lie.own
        if own and status == 200:
            for token, listed in zip(asked["prompt"][1:], value["choices"][0]["prompt_logprobs"][1:], strict=True):
                listed[str(token)]["logprob"] = float(own(np.array(listed[str(token)]["logprob"])))
        return status, value


def normal(rows: Floats) -> Floats:
    found: Floats = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
    return found


# ── what is done to distributions ────────────────────────────────────────────────────────────────────────────────────
def honest(s: LyingServer, ids: Ids) -> Floats:
    return s.true(ids)


def mapped(change: Callable[[Floats], Floats]) -> Callable[[LyingServer, Ids], Floats]:
    return lambda s, ids: change(s.true(ids))


def scaled(x: float) -> Callable[[LyingServer, Ids], Floats]:
    return mapped(lambda rows: rows * x)


def tempered(t: float) -> Callable[[LyingServer, Ids], Floats]:
    return mapped(lambda rows: normal(rows / t))


def damaged(s: LyingServer, ids: Ids) -> Floats:
    found: Floats = s.stories.other(*ids)
    return found


def elsewhere(s: LyingServer, ids: Ids) -> Floats:
    """The distributions of another prompt."""
    return s.true([BOS, *ids[:0:-1]])


def without_bos(s: LyingServer, ids: Ids) -> Floats:
    if len(ids) < 3:
        return s.true(ids)
    rows = s.true(ids[1:])
    return np.concatenate([rows[:1], rows])


def two_bos(s: LyingServer, ids: Ids) -> Floats:
    return s.true([BOS, *ids])[1:]


def near(length: int) -> Callable[[LyingServer, Ids], Floats]:
    return lambda s, ids: s.stories.near(ids, length)


def unigram(s: LyingServer, ids: Ids) -> Floats:
    mean: Floats = np.log(np.exp(s.true(list(range(3, 300)))).mean(0))
    return np.broadcast_to(mean, (len(ids) - 1, V))


def boosted(s: LyingServer, ids: Ids) -> Floats:
    rows = s.true(ids).copy()
    rows[np.arange(len(rows)), ids[1:]] += 1
    return normal(rows)


def kept(rows: Floats, k: int) -> Floats:
    least = np.sort(rows, axis=-1)[:, -k][:, None]
    return np.where(rows >= least, rows, -np.inf)


def nucleus(rows: Floats, p: float) -> Floats:
    order = np.argsort(-rows, axis=-1)
    ordered = np.take_along_axis(rows, order, -1)
    out = np.cumsum(np.exp(ordered), -1) - np.exp(ordered) > p
    found = np.empty_like(rows)
    np.put_along_axis(found, order, np.where(out, -np.inf, ordered), -1)
    return normal(found)


def shifted(by: int) -> Callable[[LyingServer, Ids], Floats]:
    def rows(s: LyingServer, ids: Ids) -> Floats:
        own = s.true(ids)[np.arange(len(ids) - 1), ids[1:]]
        found = s.true(ids).copy()
        found[np.arange(len(found)), ids[1:]] = np.roll(own, by)
        return found

    return rows


def longer_than(length: int, lie: Callable[[LyingServer, Ids], Floats]) -> Callable[[LyingServer, Ids], Floats]:
    return lambda s, ids: lie(s, ids) if len(ids) > length else s.true(ids)


def at_positions(first: int, lie: Callable[[LyingServer, Ids], Floats]) -> Callable[[LyingServer, Ids], Floats]:
    return lambda s, ids: np.concatenate([s.true(ids)[: first - 1], lie(s, ids)[first - 1 :]])


def each(number: int, lie: Callable[[LyingServer, Ids], Floats]) -> Callable[[LyingServer, Ids], Floats]:
    return lambda s, ids: lie(s, ids) if s.answers % number == 0 else s.true(ids)


def after(number: int, lie: Callable[[LyingServer, Ids], Floats]) -> Callable[[LyingServer, Ids], Floats]:
    return lambda s, ids: lie(s, ids) if s.answers > number else s.true(ids)


def unlisted(lie: Callable[[LyingServer, Ids], Floats]) -> Callable[[LyingServer, Ids], Floats]:
    return lambda s, ids: s.true(ids) if s.asked else lie(s, ids)


def stale(s: LyingServer, ids: Ids) -> Floats:
    """A prefix cache that keeps an earlier request's scores."""
    rows = s.true(ids).copy()
    if s.before is not None:
        count = min(len(rows), len(s.before)) // 16 * 16
        rows[:count] = s.before[:count]
    return rows


def tail(power: float, below: float) -> Callable[[LyingServer, Ids], Floats]:
    return mapped(lambda rows: np.where(rows < np.log(below), rows * power, rows))


RARE = np.arange(V) >= 400
LONG: dict[str, Lie] = {
    f"{name} in long prompts": Lie(longer_than(BEYOND, lie), wanted)
    for name, lie, wanted in (
        ("×2", scaled(2), "refused"),
        ("×1.1", scaled(1.1), "refused"),
        ("×0.9", scaled(0.9), "refused"),
        ("another model", damaged, "refused"),
        ("another prompt's distributions", elsewhere, "refused"),
        ("temperature 2", tempered(2), "refused"),
        ("temperature 0.5", tempered(0.5), "refused"),
        ("no BOS", without_bos, "refused"),
        ("two BOS", two_bos, "refused"),
        ("a context of 1", near(1), "refused"),
        ("a context of 8", near(8), "refused"),
        ("a context of 24", near(24), "noted"),
        ("a unigram", unigram, "refused"),
        ("a nat for the token sent", boosted, "refused"),
        ("shifted", shifted(1), "refused"),
        ("a floor of -3", mapped(lambda rows: np.maximum(rows, -3)), "refused"),
        ("top-k", mapped(partial(kept, k=5)), "refused"),
    )
}
EVERYWHERE: dict[str, Lie] = {
    **{f"×{x} everywhere": Lie(scaled(x), "noted") for x in (1.02, 1.1, 1.4427)},
    **{f"×{x} everywhere": Lie(scaled(x)) for x in (0.4343, 0.5, 0.9, 2, 3)},
    **{f"temperature {t} everywhere": Lie(tempered(t), "another model") for t in (0.7, 1.3, 2)},
    "a context of 1": Lie(near(1), "noted"),
    "a context of 8": Lie(near(8), "noted"),
    "a context of 16": Lie(near(16), "noted"),
    "a context of 24": Lie(near(24), "noted"),
    "a unigram": Lie(unigram, "noted"),
    "two BOS": Lie(two_bos, "another model"),
    "no BOS": Lie(without_bos, "another model"),
    "a damaged model": Lie(damaged, "another model"),
    "a nat for the token sent": Lie(boosted),
    "-100 for improbable tokens": Lie(mapped(lambda rows: np.where(rows < -7, -100, rows)), "noted"),
    "-100 for rare tokens": Lie(mapped(lambda rows: np.where(RARE, -100, rows)), "noted"),
    "-9999 for rare tokens": Lie(mapped(lambda rows: np.where(RARE, -np.inf, rows)), "noted"),
    "a floor of -10": Lie(mapped(lambda rows: np.maximum(rows, -10)), "noted"),
    "a floor of -6": Lie(mapped(lambda rows: np.maximum(rows, -6))),
    "top-k": Lie(mapped(partial(kept, k=5)), "noted"),
    "top-p": Lie(mapped(partial(nucleus, p=0.9)), "noted"),
    "equal scores": Lie(mapped(lambda rows: np.full_like(rows, -6.0)), "noted"),
    "rounded to 0.1": Lie(mapped(lambda rows: np.round(rows, 1))),
    "rounded to 0.01": Lie(mapped(lambda rows: np.round(rows, 2))),
    "probabilities": Lie(mapped(np.exp)),
    "shifted": Lie(shifted(1)),
    "shifted back": Lie(shifted(-1)),
    "reversed": Lie(elsewhere),
    "×1.2 below 1 %": Lie(tail(1.2, 0.01), "another model"),
    "×1.5 below 0.1 %": Lie(tail(1.5, 0.001), "another model"),
    "a tenth of all mass for all alike": Lie(
        mapped(lambda rows: np.log(0.9 * np.exp(rows) + 0.1 / V)), "another model"
    ),
}
SOMETIMES: dict[str, Lie] = {
    "another model in each seventh answer": Lie(each(7, damaged)),
    "×2 in each fifth answer": Lie(each(5, scaled(2))),
    "temperature 1.5 in each fourth answer": Lie(each(4, tempered(1.5))),
    "another model after 60 answers": Lie(after(60, damaged)),
    "another model at one length": Lie(lambda s, ids: damaged(s, ids) if len(ids) == 128 else s.true(ids)),
    "scores of the prompt before": Lie(stale),
    "×2 from position 40 on": Lie(at_positions(40, scaled(2)), "noted"),
    "another prompt's distributions from position 40 on": Lie(at_positions(40, elsewhere), "noted"),
    "temperature 3 from position 40 on": Lie(at_positions(40, tempered(3)), "noted"),
    "×1.1 if no tokens are listed": Lie(unlisted(scaled(1.1))),
    "another model if no tokens are listed": Lie(unlisted(damaged)),
}
ALONE: dict[str, Lie] = {
    f"{name}, nothing listed": Lie(honest, "noted", {"most": 0}, own)
    for name, own in (
        ("×2", lambda x: 2 * x),
        ("×0.5", lambda x: x / 2),
        ("×1.1", lambda x: 1.1 * x),
        ("-1 for all", lambda x: -1 + 0 * x),
        ("a nat less", lambda x: x - 1),
    )
}
LISTING: dict[str, Lie] = {
    f"{name}, all tokens listed": Lie(lie, "refused", {"most": V})
    for name, lie in (
        ("×1.02", scaled(1.02)),
        ("×1.2 below 1 %", tail(1.2, 0.01)),
        ("×1.5 below 0.1 %", tail(1.5, 0.001)),
        ("-100 for improbable tokens", mapped(lambda rows: np.where(rows < -7, -100, rows))),
    )
}
LIES = {**LONG, **EVERYWHERE, **SOMETIMES, **ALONE, **LISTING}
HONEST: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"noise": BATCH},
    "prefix cache": {"noise": BATCH, "cached": True},
    "float32, all tokens listed": {"most": V},
    "bfloat16, nothing listed": {"noise": BATCH, "most": 0},
}


def outcome(stories: Stories, text: str, lie: Lie | None = None, first: int = 0, **how: Any) -> tuple[str, float]:
    """What becomes of a run, with its notes, and its perplexity (NaN if it was refused)."""
    how = {**how, **(lie.server if lie else {})}
    with LyingServer(stories=stories, lie=lie, answers=first, ids=V, tokenizes=False, max_model_len=512, **how) as s:
        try:
            run = sm.ppl(
                "small", engine=s.address, tokenizer=str(stories.folder), text=text, context_length=128, fresh=True
            )
        except ScoremodeError as error:
            return f"refused: {error}", np.nan
    assert any("no client can see" in note for note in run.manifest["notes"])
    notes = [note for note in run.manifest["notes"] if any(word in note for word in WORDS)]
    return f"noted: {'; '.join(notes)}" if notes else "another model", float(run.perplexity.value)


def is_good(lie: Lie, found: str, perplexity: float, truth: float) -> bool:
    """Is a lie believed no further than it must be?"""
    enough = {"refused": ("refused",), "noted": ("noted", "refused"), "another model": ("",)}[lie.wanted]
    return found.startswith(enough) or abs(perplexity / truth - 1) < 0.01
