"""Prompts for texts that a model writes: from a file, or given one by one.

.jsonl  a row for each: {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, and perhaps an "answer"
.txt    a prompt in each line; blank lines are left out, and counted

Files are not trusted: what cannot be a prompt is refused with its line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scoremode.core import strict_json
from scoremode.core.arguments import path_text
from scoremode.core.disk.files import file_sha256
from scoremode.core.text.files import check_readable, checked_row, is_text, lines_of, text_in_file
from scoremode.core.text.prompts import Prompt, Prompts
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.errors import CorpusError, InputError, harmless
from scoremode.values import Ids

ROWS_LIKE = 'use rows like {"prompt": "…"} or {"messages": […]}'


GivenPrompts = str | os.PathLike[str] | Sequence["str | Mapping[str, Any]"] | Prompts
"""The name of a file; prompts themselves, each a text, or a row as a file has it; or prompts that were read."""


def read_prompts(given: GivenPrompts) -> Prompts:
    """Reads prompts from a file, or takes those that were given.

    >>> read_prompts(["One plus one is", {"prompt": "Two plus two is", "answer": " four"}]).rows[1]
    Prompt(content='Two plus two is', answer=' four')
    """
    if isinstance(given, Prompts):
        return given
    if isinstance(given, str | os.PathLike):
        return _in_file(local_file(path_text("prompts", given)))
    if not isinstance(given, Sequence):
        raise InputError(f"prompts are a {type(given).__name__}", fix="give the name of a file, or a list of texts")
    rows = [_prompt({"prompt": one} if isinstance(one, str) else one, f"prompt {i}") for i, one in enumerate(given)]
    if not rows:
        raise InputError("there are no prompts", fix="give --prompts FILE, or --prompt TEXT")
    listed = json.dumps([[row.content, row.answer] for row in rows], sort_keys=True)
    return Prompts(tuple(rows), "given", hashlib.sha256(listed.encode()).hexdigest())


def local_file(name: str) -> Path:
    """The path of a file of prompts. CorpusError for a URI, which a path would garble."""
    if "://" in name:
        raise CorpusError(f"{harmless(name)}: prompts are read from files of this machine", fix="copy the file first")
    return Path(name)


def _in_file(path: Path) -> Prompts:
    ending = path.suffix.lower()
    check_readable(path)
    if ending not in (".jsonl", ".ndjson", ".txt"):
        raise CorpusError(f"{path} is neither .jsonl nor .txt", fix=f"{ROWS_LIKE}, or one prompt per line of a .txt")
    blank, rows = 0, list[Prompt]()
    content = text_in_file(path)
    sha256 = file_sha256(path)  # before the text is read, which raises an error if the file has changed meanwhile
    for number, line in enumerate(lines_of(content.pieces()), 1):
        text = line.removesuffix("\n").removesuffix("\r")
        if not text.strip():
            blank += 1
        elif ending == ".txt":
            rows.append(Prompt(text))
        else:
            where = f"{path} line {number}"
            try:
                row = strict_json.parse(text, constants=True)
            except ValueError as error:
                raise CorpusError(f"{where} is not JSON ({error})", fix="fix or remove the line") from None
            rows.append(_prompt(row, where))
    if not rows:
        raise CorpusError(f"{path} has no prompts", fix=ROWS_LIKE)
    notes = (f"{blank:,} blank line{'s' * (blank > 1)} of {path.name} left out",) if blank else ()
    return Prompts(tuple(rows), path.name, sha256, notes)


def _prompt(row: Any, where: str) -> Prompt:
    """Returns the prompt in a row; CorpusError if there is none, or two."""
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where} is not a row", fix=ROWS_LIKE)
    named = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(named) != 1:
        what = "has both a prompt and messages" if named else "has neither a prompt nor messages"
        raise CorpusError(f"{where} {what}", fix=ROWS_LIKE)
    content, answer = checked_row(dict(row), named[0], where), row.get("answer")
    if named[0] == "prompt" and not isinstance(content, str):
        raise CorpusError(f"{where}: the prompt is a list", fix="name a list of messages 'messages'")
    if answer is not None and not (isinstance(answer, str) and is_text(answer)):
        raise CorpusError(f"{where} has an answer that is not text", fix='use rows like {"prompt": "…", "answer": "…"}')
    return Prompt(content, answer)


def encoded(prompts: Prompts, tokenizer: TextTokenizer) -> list[tuple[str, Ids]]:
    """The text and the ids of every prompt, as the model sees them: conversations through its chat template."""
    found = []
    for number, prompt in enumerate(prompts.rows):
        if isinstance(prompt.content, str):
            text, special = prompt.content, True
        else:
            text, special = tokenizer.render_chat(prompt.content, open_turn=True), False
        ids = tokenizer.encode(text, special=special).ids
        if not len(ids):
            raise InputError(f"prompt {number} has no token", fix="give a text, or remove it")
        found.append((text, ids))
    return found
