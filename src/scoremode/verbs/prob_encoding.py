"""A prompt and its target ─▶ tokens, cut at the boundary: the joined text is encoded, and split at the prompt's end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scoremode.errors import BoundaryError, InputError, ModelError, OptionError
from scoremode.text.batches import EncodedTexts, encode_many, ids_with_specials
from scoremode.text.corpus import is_text
from scoremode.text.tokenizer import Encoding, TextTokenizer
from scoremode.values import Ids, Ints


class EncodedPair(NamedTuple):
    """A prompt and its target as tokens, cut at the boundary."""

    prompt: str
    target: str
    ids: Ids  # (n,) prompt and target
    texts: tuple[str, ...]  # of the tokens from ``first`` on
    first: int  # index of the first scored token
    condition: str

    @property
    def fed(self) -> int:
        """Tokens that the model is given: the last one is only scored."""
        return len(self.ids) - 1


def longest_of(pairs: Iterable[EncodedPair]) -> int:
    """Tokens of the longest window that scoring these pairs will feed."""
    return max((pair.fed for pair in pairs), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class CutPairs:
    """Several pairs as tokens, each cut at its boundary, not yet taken apart."""

    pairs: Sequence[tuple[str, str]]
    targets: Sequence[str]  # as they are scored
    found: EncodedTexts
    fronts: Sequence[Ids]  # special tokens that go first
    cuts: Ints  # (pairs,) where each prompt ends in the joined text
    owns: Ints  # (pairs,) the first scored token, among the tokens of all pairs
    firsts: Ints  # (pairs,) the same, in the ids of its pair

    @property
    def fed(self) -> Ints:
        """Tokens that the model is given for each pair: the last one is only scored."""
        fronts = np.fromiter(map(len, self.fronts), np.int64, len(self.fronts))
        return np.diff(self.found.bounds) + fronts - 1

    @property
    def largest(self) -> int:
        """The largest id."""
        return max(int(self.found.ids.max(initial=-1)), int(np.concatenate(self.fronts).max(initial=-1)))

    @property
    def spans(self) -> bool:
        """Does a token span the end of its prompt anywhere?"""
        return bool((self.found.touches[self.owns] < self.cuts).any())

    def split(self) -> list[EncodedPair]:
        """The pairs, one by one."""
        joined, edges = self.found.joined, self.found.bounds.tolist()
        begins, ends = self.found.char_start.tolist(), self.found.char_end.tolist()
        owns, firsts = self.owns.tolist(), self.firsts.tolist()
        touches, cuts = self.found.touches[self.owns].tolist(), self.cuts.tolist()
        made = []
        for i, (prompt, _) in enumerate(self.pairs):
            own, stop, condition = owns[i], edges[i + 1], joined[touches[i] : cuts[i]]
            ids = self.found.ids[edges[i] : stop]
            if len(self.fronts[i]):
                ids = np.concatenate([self.fronts[i], ids])
            texts = [joined[a:b] for a, b in zip(begins[own:stop], ends[own:stop], strict=True)]
            if condition:
                texts[0] = condition + texts[0][len(condition) :]
            made.append(EncodedPair(prompt, self.targets[i], ids, tuple(texts), firsts[i], condition))
        return made


class PairEncoder:
    """Encodes pairs by one tokenizer and one rule for their boundary."""

    def __init__(self, tokenizer: TextTokenizer, *, leading_space: str, spanning: str, add_bos: bool) -> None:
        self.tokenizer = tokenizer
        self.leading_space, self.spanning, self.add_bos = leading_space, spanning, add_bos

    def as_scored(self, target: str) -> str:
        """The target with the space that ``leading_space`` puts in front of it."""
        return " " + target if self.leading_space == "add" and not target[:1].isspace() else target

    # ── one pair ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def one(self, prompt: str, target: str) -> EncodedPair:
        """One pair as tokens, or the reason why it cannot be scored."""
        if not target:
            raise InputError("a target is empty", fix='give it some text, as in --target " Paris"')
        if not is_text(prompt + target):
            raise InputError("a prompt or target is not UTF-8", fix="give text in UTF-8")
        target = self.as_scored(target)
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
        return EncodedPair(prompt, target, ids, tuple(texts), first, condition)

    def _without_trailing_specials(self, text: str) -> tuple[Ids, Encoding]:
        """Special tokens that go first, and the text's own encoding. An EOS after the target is not part of it."""
        plain, full = self.tokenizer.encode(text, special=False), self.tokenizer.encode(text, special=True)
        front = _front(full.ids.tolist(), plain.ids.tolist())
        if front is None:
            raise ModelError("this tokenizer changes its tokens when it adds special ones", fix="use another tokenizer")
        return self._with_bos(full.ids[:front]), plain

    def _with_bos(self, specials: Ids) -> Ids:
        if not self.add_bos or len(specials):
            return specials
        bos = self.tokenizer.facts.bos
        if bos is None:
            raise OptionError("--add-bos: this tokenizer has no BOS", fix="leave --add-bos out")
        return np.array([bos], dtype=np.int32)

    # ── many pairs ───────────────────────────────────────────────────────────────────────────────────────────────────
    def many(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair] | None:
        """Several pairs, each as ``one`` encodes it; None if ``one`` would refuse a pair, and knows why."""
        found = self.cut(pairs)
        return None if found is None else found.split()

    def cut(self, pairs: Sequence[tuple[str, str]]) -> CutPairs | None:
        """Several pairs in one piece, which is enough to measure them; None as for ``many``."""
        if not all(target for _, target in pairs):
            return None
        targets = [self.as_scored(target) for _, target in pairs]
        texts = [prompt + target for (prompt, _), target in zip(pairs, targets, strict=True)]
        if not is_text("".join(texts)):
            return None
        found = encode_many(self.tokenizer, texts)
        fronts = self._fronts(found, texts)
        if fronts is None:
            return None
        cuts = found.starts[:-1] + np.fromiter((len(prompt) for prompt, _ in pairs), np.int64, len(pairs))
        owns = np.searchsorted(found.char_end, cuts, side="right")
        firsts = owns - found.bounds[:-1] + np.fromiter(map(len, fronts), np.int64, len(pairs))
        if (owns >= found.bounds[1:]).any() or (firsts == 0).any():
            return None
        made = CutPairs(pairs, targets, found, fronts, cuts, owns, firsts)
        return None if self.spanning == "refuse" and made.spans else made

    def _fronts(self, found: EncodedTexts, texts: Sequence[str]) -> list[Ids] | None:
        """Special tokens that go first in each text; None if a text's own tokens change when they are added."""
        full, edges = ids_with_specials(self.tokenizer, texts), found.bounds.tolist()
        nothing = np.zeros(0, np.int32)
        if full is None:
            return [self._with_bos(nothing)] * len(texts)
        plain, fronts = found.ids.tolist(), []
        for i, whole in enumerate(full):
            front = _front(whole, plain[edges[i] : edges[i + 1]])
            if front is None:
                return None
            fronts.append(self._with_bos(np.array(whole[:front], np.int32) if front else nothing))
        return fronts

    # ── spanning tokens ──────────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def _sorted_pieces(self) -> tuple[list[bytes], Ids]:
        """The bytes of every id in alphabetical order, and the ids in that order: equal beginnings lie together."""
        pieces = self.tokenizer.pieces()
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        return [pieces[i] for i in order], np.array(order, dtype=np.int32)

    def beginning_with(self, condition: str, spanning_token: int) -> Ids:
        """Every id whose bytes begin with the prompt's part of a spanning token, ascending."""
        beginning = condition.encode()
        pieces, ids = self._sorted_pieces
        first = bisect_left(pieces, beginning)
        last = bisect_left(pieces, True, lo=first, key=lambda piece: not piece.startswith(beginning))
        allowed: Ids = np.sort(ids[first:last])
        if spanning_token not in allowed:
            raise BoundaryError(
                f"a token spans the end of the prompt at {beginning.decode('utf-8', 'replace')!r}, inside a character",
                fix="move the boundary to a whole character or word",
            )
        return allowed


def _front(whole: list[int], own: list[int]) -> int | None:
    """How many ids stand before a text's own ids; None if those are not there."""
    size = len(own)
    return next((i for i in range(len(whole) - size + 1) if whole[i : i + size] == own), None)
