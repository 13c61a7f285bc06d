"""A question: a text, and the method that scores it. One field is a flag, a Python argument and a stored fact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from scoremode.core.options import KnownOption, chosen_of, option, options_of
from scoremode.core.plan.path import DecodePath, read_path
from scoremode.core.text.corpus import Corpus, CorpusSource, TextSelection, default
from scoremode.errors import MethodError, OptionError, UnknownArgumentError, did_you_mean

if TYPE_CHECKING:  # ``--help`` reads the fields, and must not wait for NumPy
    from scoremode.core.plan.recipes import Method
    from scoremode.core.text.slices import SliceRule

DEFAULT_METHOD = "sliding-once"


@dataclass(frozen=True, kw_only=True)
class Question(TextSelection):
    """A text and how to score it, for any model. It is checked when it is made, so code that gets one can trust it.

    None leaves the choice to the method, or to a reference that brings its own question.
    """

    document_tokens: int | None = option("only the first N tokens of each document", metavar="N", group="text")
    assistant_only: bool | None = option("of chat rows, score the assistant's tokens alone", group="text")
    slice: str | Sequence[str] | None = option(
        "show the text between two markers apart; may be given again (chats: roles always)",
        metavar="NAME=START..END",
        group="text",
        repeated=True,
    )
    method: str | None = option(
        f"see scoremode info methods (default: {DEFAULT_METHOD})", metavar="METHOD", group="method", repeated=True
    )
    context_length: int | None = option("tokens per window (default: the method's)", metavar="N", group="method")
    stride: int | None = option("tokens between windows (default: the method's)", metavar="N", group="method")
    max_windows: int | None = option("0 for all (default: the method's own limit)", metavar="N", group="method")
    path: str | None = option(
        "prefill (default), or decode: one token per step, as text is generated", metavar="PATH", group="method"
    )
    sequences: int | Sequence[int] | None = option(
        "windows that are decoded side by side (default: 16)", metavar="N", group="method"
    )
    prefill_tokens: int | None = option(
        "tokens of each window that are fed at once before decoding starts (default: 1)", metavar="N", group="method"
    )

    def __post_init__(self) -> None:
        _ = self.rule, self.decode_path, self.slices  # each refuses what it cannot read
        self._check_numbers()
        super().__post_init__()

    def _check_numbers(self) -> None:
        """Refuses numbers that no plan can have."""
        context, stride, most, length = self.context_length, self.stride, self.max_windows, self.document_tokens
        if context is not None and context < 2:
            raise MethodError(f"--context-length {context} leaves no room for a target", fix="give 2 or more")
        if stride is not None and self.rule.stride is None:
            fix = f"leave --stride out, or use --method {DEFAULT_METHOD}"
            raise MethodError(f"{self.rule.name} has no stride to choose", fix=fix)
        if stride is not None and stride < 1:
            raise MethodError(f"--stride {stride} never advances", fix="give 1 or more")
        if most is not None and most < 0:
            raise MethodError(f"--max-windows {most} is negative", fix="give 0 for all windows")
        if length is not None and length < 1:
            raise OptionError(f"--document-tokens {length} leaves no text", fix="give 2 or more")

    @classmethod
    def options(cls) -> dict[str, KnownOption]:
        """Every field by its name, as flags, docs and types need it."""
        return options_of(cls)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The question in arguments by name; an unknown name is refused, and the error suggests the nearest one."""
        for name in arguments:
            if name not in cls.options():
                raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, cls.options()))
        return cls(**arguments)

    @property
    def rule(self) -> Method:
        from scoremode.core.plan.recipes import find_method

        return find_method(self.method or DEFAULT_METHOD)

    @property
    def decode_path(self) -> DecodePath | None:
        """The path by which windows are fed; None means the prefill path."""
        return read_path(self.path, sequences=self.sequences, prefill_tokens=self.prefill_tokens)

    @property
    def slices(self) -> tuple[SliceRule, ...]:
        from scoremode.core.text.slices import read_rules

        return read_rules(self.slice)

    def chosen(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return chosen_of(self)

    def with_text(self) -> Self:
        """The same question; of the default text, if none is named."""
        return self if self.names_text else replace(self, corpus=default())

    def repeatable(self) -> dict[str, Any] | None:
        """The arguments that ask it again, as a reference keeps them; None for a text that has no name."""
        if isinstance(self.corpus, Corpus | CorpusSource) or "-" in self.names:
            return None
        lists = {"corpus": self.names or None, "slice": [self.slice] if isinstance(self.slice, str) else self.slice}
        return {name: value for name, value in {**self.chosen(), **lists}.items() if value is not None}
