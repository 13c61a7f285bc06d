"""A prompt and its target ─▶ tokens: the joined text is encoded, and the tokens after the prompt's end are scored.

The boundary is the hard part, because "…is" + "Paris" is not the token sequence of "…is Paris". If a token spans the
cut, that token and all after it are scored, given that the token at the cut begins with the prompt's last characters:

prompt  "The capital of Fran"       target  "ce is Paris"
tokens  The| capital| of| France| is| Paris
                       ^ spans: P( France| is| Paris) / P(a token that begins with " Fran")

The condition is about this one token: shorter tokens that spell " Fran" together are not in the denominator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scoremode.core.text.files import is_text
from scoremode.core.text.tokenizer import EncodedTexts, TextTokenizer, encode_many, ids_with_specials
from scoremode.core.verbs.scoring import Continuation
from scoremode.errors import BoundaryError, InputError, ModelError, OptionError
from scoremode.values import Ids


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPair(Continuation):
    """A prompt and its target as tokens, cut at the boundary."""

    prompt: str
    target: str
    texts: tuple[str, ...]  # texts of the tokens from ``first`` on
    condition: str  # the prompt's part of a token that spans the boundary


def longest_of(pairs: Iterable[EncodedPair]) -> int:
    """Returns the length, in tokens, of the longest window that scoring these pairs will feed."""
    return max((pair.fed for pair in pairs), default=0)


class PairEncoder:
    """Encodes pairs with one tokenizer and one rule for their boundary."""

    def __init__(self, tokenizer: TextTokenizer, *, leading_space: str, spanning: str, add_bos: bool) -> None:
        self.tokenizer = tokenizer
        self.leading_space, self.spanning, self.add_bos = leading_space, spanning, add_bos

    def cut(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        """Encodes and cuts several pairs. Raises an error if any is invalid: cut them one by one to find which one."""
        if not all(target for _, target in pairs):
            raise InputError("a target is empty", fix='give it some text, as in --target " Paris"')
        adds = self.leading_space == "add"
        targets = [" " + target if adds and not target[:1].isspace() else target for _, target in pairs]
        texts = [prompt + target for (prompt, _), target in zip(pairs, targets, strict=True)]
        if not is_text("".join(texts)):
            raise InputError("a prompt or target is not UTF-8", fix="give text in UTF-8")
        found = encode_many(self.tokenizer, texts)
        fronts = self._fronts(found, texts)
        ends_of_prompts = found.starts[:-1] + np.fromiter((len(prompt) for prompt, _ in pairs), np.int64, len(pairs))
        owns = np.searchsorted(found.char_end, ends_of_prompts, side="right")  # the first tokens that reach past them
        if len(none := np.flatnonzero(owns >= found.bounds[1:])):
            raise InputError(f"the target {targets[none[0]]!r} has no token of its own", fix="give a longer target")
        edges, touches, cuts = (array.tolist() for array in (found.bounds, found.touches[owns], ends_of_prompts))
        begins, ends, joined, made = found.char_start.tolist(), found.char_end.tolist(), found.joined, []
        for i, own in enumerate(owns.tolist()):
            begin, stop, front, prompt = edges[i], edges[i + 1], fronts[i], pairs[i][0]
            condition = joined[touches[i] : cuts[i]]
            first = own - begin + len(front)
            if not first:
                where = "the prompt has no token of its own" if prompt else "the prompt is empty"
                raise InputError(
                    f"{where} and this tokenizer adds no BOS, so the first token has no context",
                    fix="give a prompt, or --add-bos",
                )
            if condition and self.spanning == "refuse":
                raise BoundaryError(
                    f"the token {joined[touches[i] : ends[own]]!r} spans the end of the prompt {prompt!r}",
                    fix="move the boundary, as in a target that begins with the space, or use --spanning constrain",
                )
            ids = np.concatenate([front, found.ids[begin:stop]]) if len(front) else found.ids[begin:stop]
            parts = [joined[a:b] for a, b in zip(begins[own:stop], ends[own:stop], strict=True)]
            if condition:
                parts[0] = condition + parts[0][len(condition) :]
            made.append(EncodedPair(ids, first, prompt, targets[i], tuple(parts), condition))
        return made

    def _fronts(self, found: EncodedTexts, texts: Sequence[str]) -> list[Ids]:
        """Returns the special tokens before each text. An EOS after the target is left out."""
        full, edges = ids_with_specials(self.tokenizer, texts), found.bounds.tolist()
        if full is None:
            return [self._with_bos([])] * len(texts)
        plain, fronts = found.ids.tolist(), []
        for i, whole in enumerate(full):
            own = plain[edges[i] : edges[i + 1]]
            starts = range(len(whole) - len(own) + 1)
            front = next((at for at in starts if whole[at : at + len(own)] == own), None)
            if front is None:
                what = "this tokenizer changes its tokens when it adds special ones"
                raise ModelError(what, fix="use another tokenizer")
            fronts.append(self._with_bos(whole[:front]))
        return fronts

    def _with_bos(self, specials: list[int]) -> Ids:
        bos = self.tokenizer.facts.bos
        if self.add_bos and not specials:
            if bos is None:
                raise OptionError("--add-bos: this tokenizer has no BOS", fix="leave --add-bos out")
            specials = [bos]
        return np.array(specials, dtype=np.int32)

    # ── spanning tokens ──────────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def _sorted_pieces(self) -> tuple[list[bytes], Ids]:
        """The bytes of every id in alphabetical order, and the ids in that order: equal beginnings are side by side."""
        pieces = self.tokenizer.pieces()
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        return [pieces[i] for i in order], np.array(order, dtype=np.int32)

    def beginning_with(self, condition: str, spanning_token: int) -> Ids:
        """Returns the ids of all tokens that begin with the prompt's part of a spanning token, ascending."""
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
