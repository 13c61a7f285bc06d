"""Answers that are known to be right, as a corpus: prompts are context, and the answers are the targets.

answers:FILE.jsonl   rows of prompts that have an "answer"
answers:DIR          the answers that a folder of rollouts keeps beside its texts

Which tokens an answer has depends on the tokenizer. So they are cut when the model is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from scoremode.core.disk.folders import ROLLOUTS
from scoremode.core.text.corpus import Corpus, CorpusKind
from scoremode.core.text.documents import RereadDocuments
from scoremode.core.text.files import check_readable
from scoremode.core.text.prompts import Prompts
from scoremode.core.text.slices import SliceRule
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.core.text.tokens import Tokens
from scoremode.errors import CorpusError
from scoremode.studies.rollouts.prompted_texts import tokens_of_texts
from scoremode.studies.rollouts.prompts import encoded, local_file, read_prompts
from scoremode.studies.rollouts.texts import Rollouts, require_folder
from scoremode.values import Ids

PREFIX = "answers:"  # before the file or folder, where a corpus is named
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

    def as_corpus(self, count: int | None = None) -> Corpus:
        """The answers as a corpus. ``count``: only the first of them."""
        sha256 = hashlib.sha256(f"answers of {self.sha256}, the first {count}".encode()).hexdigest()
        taken = replace(self, answers=dict(islice(self.answers.items(), count)))
        texts = list(taken.answers.values())
        size = sum(len(text.encode()) for text in texts)
        return Corpus(
            name=PREFIX + self.name,
            layout="documents",
            rows=lambda: iter(texts),
            sha256=sha256,
            row_count=len(texts),
            byte_count=size,
            notes=self.notes,
            own_tokens=taken._tokens,
        )

    def _asked(self, tokenizer: TextTokenizer) -> Mapping[int, tuple[str, Ids]]:
        """The text and the ids of each prompt that has an answer."""
        if self.prompts is not None:
            numbers = list(self.answers)
            rows = replace(self.prompts, rows=tuple(self.prompts.rows[number] for number in numbers))
            return dict(zip(numbers, encoded(rows, tokenizer), strict=True))
        assert self.rollouts is not None
        each = zip(self.rollouts.prompt.tolist(), self.rollouts.prompt_text, self.rollouts.prompt_ids, strict=True)
        return {number: (text, ids) for number, text, ids in each}

    def _tokens(self, tokenizer: TextTokenizer, rules: Sequence[SliceRule]) -> tuple[RereadDocuments, Tokens]:
        """Makes the tokens of prompts and answers.

        A model writes after the prompt's own tokens. An answer has the tokens that it has after its prompt, unless the
        two meet inside of a token: then it is cut into tokens by itself.
        """
        notes = self.rollouts.tokenizer_notes(tokenizer) if self.rollouts is not None else []
        asked, alone, written = self._asked(tokenizer), 0, list[Ids]()
        for number, answer in self.answers.items():
            text = asked[number][0]
            together = tokenizer.encode(text + answer, special=False).ids
            bare = tokenizer.encode(text, special=False).ids
            if len(together) > len(bare) and np.array_equal(together[: len(bare)], bare):
                written.append(together[len(bare) :])
            else:
                alone += 1
                written.append(tokenizer.encode(answer, special=False).ids)
        if alone:
            said = "answers meet" if alone > 1 else "answer meets"
            notes.append(f"{alone:,} {said} the prompt inside of a token, and so was cut into tokens by itself")
        prompt_ids = [asked[number][1] for number in self.answers]
        return tokens_of_texts(np.array(list(self.answers)), prompt_ids, written, tokenizer, rules=rules, notes=notes)


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


CORPUS = CorpusKind(PREFIX, KnownAnswers, check_answers, read_answers)
