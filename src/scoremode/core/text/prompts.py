"""Prompts that a model continues, wherever they are from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
class PromptsKind:
    """Prompts whose names have a prefix, as in ``task:gsm8k``. Wings offer these values as "prompts"."""

    prefix: str
    summary: str  # for help
    read: Callable[..., Prompts]  # of a name without the prefix, with ``progress`` and the values of ``flags``
    flags: Mapping[str, str] = field(default_factory=dict)  # of commands that take prompts
    gone: Mapping[str, str] = field(default_factory=dict)  # flags of before, and what to type instead
