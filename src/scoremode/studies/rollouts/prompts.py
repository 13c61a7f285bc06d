"""Prompts for texts that a model writes, from a file or given one by one, and answers to them as a corpus.

.jsonl  a row for each: {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, and perhaps an "answer"
.txt    a prompt in each line; blank lines are left out, and counted

Files are not trusted: what cannot be a prompt is refused with its line.

Answers that are known to be right are a corpus, answers:FILE.jsonl: prompts are context, and answers are the targets.
Which tokens an answer has depends on the tokenizer. So they are cut when the model is known.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scoremode.core import strict_json
from scoremode.core.text.corpus import Corpus
from scoremode.core.text.documents import RereadDocuments, as_template_takes
from scoremode.core.text.files import Message, check_readable, checked_row, is_text, lines_of, text_in_file
from scoremode.core.text.slices import SliceRule
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.core.text.tokens import Tokens
from scoremode.errors import CorpusError, InputError, harmless
from scoremode.studies.rollouts.texts import ROLLOUTS, tokens_of_texts
from scoremode.values import Ids

ROWS_LIKE = 'use rows like {"prompt": "…"} or {"messages": […]}'
ANSWERS_LIKE = 'use rows like {"prompt": "…", "answer": "…"}'
ANSWERS = "answers:"  # before the file or folder, where a corpus is named


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a conversation that a model continues."""

    content: str | list[Message]
    answer: str | None = None  # a text that is known to be right


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts, where they are from, and the sha256 of that."""

    rows: tuple[Prompt, ...]
    name: str
    sha256: str  # of the file; of prompts that were given one by one, of their JSON
    notes: tuple[str, ...] = ()


GivenPrompts = str | os.PathLike[str] | Sequence[str | Mapping[str, Any]]
"""The name of a file; or prompts themselves, each a text, or a row as a file has it."""


def read_prompts(prompts: GivenPrompts) -> Prompts:
    """Reads prompts from a file, or takes those that were given.

    >>> read_prompts(["One plus one is", {"prompt": "Two plus two is", "answer": " four"}]).rows[1]
    Prompt(content='Two plus two is', answer=' four')
    """
    if isinstance(prompts, str | os.PathLike):
        return _in_file(local_file(os.fspath(prompts)))
    rows = [_prompt({"prompt": row} if isinstance(row, str) else row, f"prompt {i}") for i, row in enumerate(prompts)]
    if not rows:
        raise InputError("there are no prompts", fix="give --prompts FILE, or --prompt TEXT")
    listed = json.dumps([[row.content, row.answer] for row in rows], sort_keys=True)
    return Prompts(tuple(rows), "given", hashlib.sha256(listed.encode()).hexdigest())


def local_file(name: str) -> Path:
    """The path of a file of prompts; CorpusError for a URI, which a path would garble."""
    if "://" in name:
        raise CorpusError(f"{harmless(name)}: prompts are read from files of this machine", fix="copy the file first")
    return Path(name)


def _in_file(path: Path) -> Prompts:
    ending = path.suffix.lower()
    check_readable(path)
    if ending not in (".jsonl", ".ndjson", ".txt"):
        raise CorpusError(f"{path} is neither .jsonl nor .txt", fix=f"{ROWS_LIKE}, or one prompt per line of a .txt")
    (content,) = text_in_file(path)()
    sha256 = hashlib.sha256(content.encode()).hexdigest()  # of the file's bytes: a text is decoded verbatim
    lines = [line.removesuffix("\n").removesuffix("\r") for line in lines_of(content)]
    rows = [
        Prompt(line) if ending == ".txt" else _prompt_in_json(line, f"{path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise CorpusError(f"{path} has no prompts", fix=ROWS_LIKE)
    blank = len(lines) - len(rows)
    notes = (f"{blank:,} blank line{'s' * (blank > 1)} of {path.name} left out",) if blank else ()
    return Prompts(tuple(rows), path.name, sha256, notes)


def _prompt_in_json(line: str, where: str) -> Prompt:
    try:
        return _prompt(strict_json.parse(line, constants=True), where)
    except ValueError as error:
        raise CorpusError(f"{where} is not JSON ({error})", fix="fix or remove the line") from None


def _prompt(row: Any, where: str) -> Prompt:
    """Returns the prompt in a row; CorpusError if there is none, or two."""
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where} is not a row", fix=ROWS_LIKE)
    names = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(names) != 1:
        problem = "has both a prompt and messages" if names else "has neither a prompt nor messages"
        raise CorpusError(f"{where} {problem}", fix=ROWS_LIKE)
    content, answer = checked_row(dict(row), names[0], where), row.get("answer")
    if names[0] == "prompt" and not isinstance(content, str):
        raise CorpusError(f"{where}: the prompt is a list", fix="name a list of messages 'messages'")
    if answer is not None and not (isinstance(answer, str) and is_text(answer)):
        raise CorpusError(f"{where} has an answer that is not text", fix=ANSWERS_LIKE)
    return Prompt(content, answer)


def encoded(prompts: Prompts, tokenizer: TextTokenizer) -> list[tuple[str, Ids]]:
    """The text and the ids of every prompt, as the model sees them: conversations through its chat template."""
    encodings = []
    for number, prompt in enumerate(prompts.rows):
        if isinstance(prompt.content, str):
            text, special = prompt.content, True
        else:
            messages = as_template_takes(prompt.content, tokenizer, open_turn=True)
            text, special = tokenizer.render_chat(messages, open_turn=True), False
        ids = tokenizer.encode(text, special=special).ids
        if not len(ids):
            raise InputError(f"prompt {number} has no token", fix="give a text, or remove it")
        encodings.append((text, ids))
    return encodings


# ── answers that are known to be right ────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class KnownAnswers:
    """Prompts that have answers, each with its number in the file."""

    prompts: Prompts
    numbers: Sequence[int]
    prefix: ClassVar[str] = ANSWERS

    def as_corpus(self, count: int | None = None) -> Corpus:
        """The answers as a corpus. ``count``: only the first of them."""
        sha256 = hashlib.sha256(f"answers of {self.prompts.sha256}, the first {count}".encode()).hexdigest()
        prompts = replace(self.prompts, rows=self.prompts.rows[:count])
        texts = [row.answer or "" for row in prompts.rows]
        return Corpus(
            name=ANSWERS + prompts.name,
            layout="documents",
            rows=lambda: iter(texts),
            sha256=sha256,
            row_count=len(texts),
            byte_count=sum(len(text.encode()) for text in texts),
            notes=prompts.notes,
            own_tokens=KnownAnswers(prompts, self.numbers[:count])._tokens,
        )

    def _tokens(self, tokenizer: TextTokenizer, rules: Sequence[SliceRule]) -> tuple[RereadDocuments, Tokens]:
        """Makes the tokens of prompts and answers.

        A model writes after the prompt's own tokens. An answer has the tokens that it has after its prompt, unless the
        two meet inside of a token: then it is cut into tokens by itself.
        """
        encodings = encoded(self.prompts, tokenizer)
        alone, written = 0, list[Ids]()
        for (text, _), row in zip(encodings, self.prompts.rows, strict=True):
            together = tokenizer.encode(text + str(row.answer), special=False).ids
            bare = tokenizer.encode(text, special=False).ids
            if len(together) > len(bare) and np.array_equal(together[: len(bare)], bare):
                written.append(together[len(bare) :])
            else:
                alone += 1
                written.append(tokenizer.encode(str(row.answer), special=False).ids)
        sentence = f"{alone:,} {'answers meet' if alone > 1 else 'answer meets'} the prompt inside of a token"
        notes = [f"{sentence}, and so was cut into tokens by itself"] if alone else []
        prompt_ids = [ids for _, ids in encodings]
        return tokens_of_texts(np.array(self.numbers), prompt_ids, written, tokenizer, rules=rules, notes=notes)


def check_answers(name: str) -> None:
    """Refuses a name that is not a file that can be read."""
    path = local_file(name)
    if (path / ROLLOUTS).exists():
        fix = "give the file of its prompts, as in answers:prompts.jsonl"
        raise CorpusError(f"{name} is a folder of rollouts, not a file with answers", fix=fix)
    check_readable(path)


def read_answers(name: str) -> KnownAnswers:
    prompts = read_prompts(name)
    rows = {number: row for number, row in enumerate(prompts.rows) if row.answer}
    if not rows:
        raise CorpusError(f"no prompt of {name} has an answer", fix=ANSWERS_LIKE)
    left, total = len(prompts.rows) - len(rows), len(prompts.rows)
    notes = [f"{left:,} of {total:,} prompts have no answer, and are left out"] if left else []
    return KnownAnswers(replace(prompts, rows=tuple(rows.values()), notes=(*prompts.notes, *notes)), [*rows])


class AnswersReader:
    """Reads ``--corpus answers:FILE``."""

    check = staticmethod(check_answers)
    open = staticmethod(read_answers)


READER = AnswersReader()
