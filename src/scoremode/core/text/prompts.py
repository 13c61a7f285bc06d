"""Prompts: texts and conversations that a model continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scoremode.core.text.files import Message


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


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts by a name with a prefix, as in ``--prompts task:NAME``: a value of the kind "prompts" of wings."""

    prefix: str
    about: str  # what a name with the prefix means
    subject: str  # what its flags are about
    flags: Mapping[str, str]  # as in reports/command/flags.py; arguments of ``read`` have the same names
    former: Mapping[str, str]  # flags that went away, and what to do instead
    read: Callable[..., Prompts]  # read(name, progress=…, …)
