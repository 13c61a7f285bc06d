"""Answers that are known to be right, as a corpus: prompts are context, and the answers are the targets.

answers:FILE.jsonl   rows of prompts that have an "answer"
answers:DIR          the answers that a folder of rollouts keeps beside its texts

Which tokens an answer has depends on the tokenizer. So they are cut when the model is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.disk.folders import ROLLOUTS
from scoremode.core.text.files import check_readable
from scoremode.core.text.prompts import Prompts
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.errors import CorpusError
from scoremode.studies.rollouts.prompts import encoded, local_file, read_prompts
from scoremode.studies.rollouts.texts import Rollouts, require_folder, tokens_digest
from scoremode.values import Ids

ROWS_LIKE = 'use rows like {"prompt": "…", "answer": "…"}'


@dataclass(frozen=True, slots=True, eq=False)
class KnownAnswers:
    """Prompts with answers, from a file or from rollouts. Exactly one of the two is not None."""

    name: str
    sha256: str
    answers: Mapping[int, str]  # by the number of the prompt
    prompts: Prompts | None = None
    rollouts: Rollouts | None = None
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        return list(self.answers.values())

    def first(self, count: int) -> KnownAnswers:
        """The first ``count`` answers."""
        return replace(self, answers=dict(list(self.answers.items())[:count]))

    def _asked(self, tokenizer: TextTokenizer) -> Mapping[int, tuple[str, Ids]]:
        """The text and the ids of each prompt that has an answer."""
        if self.prompts is not None:
            numbers = list(self.answers)
            rows = replace(self.prompts, rows=tuple(self.prompts.rows[number] for number in numbers))
            return dict(zip(numbers, encoded(rows, tokenizer), strict=True))
        assert self.rollouts is not None
        each = zip(self.rollouts.prompt.tolist(), self.rollouts.prompt_text, self.rollouts.prompt_ids, strict=True)
        return {number: (text, ids) for number, text, ids in each}

    def as_written(self, tokenizer: TextTokenizer) -> tuple[Rollouts, list[str]]:
        """The answers in the form of texts that somebody wrote after the prompts, and notes on their tokens.

        A model writes after the prompt's own tokens. An answer has the tokens that it has behind its prompt, unless the
        two meet inside of a token: then it is cut into tokens by itself.
        """
        asked, apart, written = self._asked(tokenizer), 0, list[Ids]()
        for number, answer in self.answers.items():
            text = asked[number][0]
            together = tokenizer.encode(text + answer, special=False).ids
            bare = tokenizer.encode(text, special=False).ids
            if len(together) > len(bare) and np.array_equal(together[: len(bare)], bare):
                written.append(together[len(bare) :])
            else:
                apart += 1
                written.append(tokenizer.encode(answer, special=False).ids)
        pairs = [asked[number] for number in self.answers]
        return self._in_form(pairs, written, tokenizer), _met(apart)

    def _in_form(self, asked: list[tuple[str, Ids]], written: list[Ids], tokenizer: TextTokenizer) -> Rollouts:
        unknown = [np.zeros(len(ids)) for ids in written]
        digest = tokens_digest(tokenizer.pieces(), [*(ids for _, ids in asked), *written])
        known = {"model": self.name, "texts_sha256": self.sha256, "tokens_sha256": digest}
        manifest: dict[str, Any] = {**known, "tokenizer": tokenizer.facts.fingerprint, "notes": [], "sampling": {}}
        return Rollouts(
            prompt=np.array(list(self.answers), np.int64),
            sample=np.zeros(len(written), np.int64),
            prompt_text=[text for text, _ in asked],
            prompt_ids=[ids for _, ids in asked],
            written=written,
            logprob=unknown,
            raw_logprob=unknown,
            finish=["stop"] * len(written),
            text=self.texts,
            answer=list(self.texts),
            manifest=manifest,
        )


def _met(apart: int) -> list[str]:
    said = "answers meet" if apart > 1 else "answer meets"
    return [f"{apart:,} {said} the prompt inside of a token, and so was cut into tokens by itself"] if apart else []


def check_answers(name: str) -> None:
    """Refuses a name that is neither a folder of rollouts nor a file that can be read."""
    path = local_file(name)
    if path.is_dir():
        require_folder(path)
    else:
        check_readable(path)


def read_answers(name: str) -> KnownAnswers:
    """Reads the answers of a file of prompts, or of a folder of rollouts."""
    path = Path(name)
    if (path / ROLLOUTS).exists():
        rollouts = Rollouts.open(path)
        known = dict(zip(rollouts.prompt.tolist(), rollouts.answer, strict=True))  # the texts of a prompt share it
        found = KnownAnswers(path.resolve().name, str(rollouts.manifest["texts_sha256"]), {}, rollouts=rollouts)
    else:
        prompts = read_prompts(path)
        known = {number: row.answer for number, row in enumerate(prompts.rows)}
        found = KnownAnswers(prompts.name, prompts.sha256, {}, prompts=prompts, notes=prompts.notes)
    answers = {number: answer for number, answer in known.items() if answer}
    if not answers:
        raise CorpusError(f"no prompt of {name} has an answer", fix=ROWS_LIKE)
    left = len(known) - len(answers)
    notes = (*found.notes, *([f"{left:,} of {len(known):,} prompts have no answer, and are left out"] if left else []))
    return replace(found, answers=answers, notes=notes)
