"""docs/api.md: every public name with its arguments and its docstring, as plain Markdown; ``make format`` writes it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import scoremode
from scoremode.core.plan.question import Question
from scoremode.core.verbs.replicas import Spread
from scoremode.core.verbs.shared_flags import SHARED

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MARK = "<!-- below: made from the declarations by make format -->\n"
GROUPS = {
    "Of most functions": SHARED,
    "Of a text": tuple(name for name, option in Question.options().items() if option.details.group == "text"),
    "Of a method": tuple(name for name, option in Question.options().items() if option.details.group == "method"),
    "Of replicas": tuple(Spread.options()),
}


def page(texts: Mapping[str, str]) -> str:
    """The page: what stands above the mark, and all public names below it. ``texts`` say what each argument does."""
    public = {name: getattr(scoremode, name) for name in scoremode.__all__ if name != "__version__"}
    functions = [_function(name, each) for name, each in public.items() if inspect.isfunction(each)]
    classes = [_class(name, each) for name, each in public.items() if inspect.isclass(each)]
    groups = [
        f"### {title}\n\n" + "\n".join(f"- `{name}`: {texts[name]}" for name in names)
        for title, names in GROUPS.items()
    ]
    parts = [["## Functions", *functions], ["## Arguments", *groups], ["## Classes", *classes]]
    return PAGE.read_text().partition(MARK)[0] + MARK + "".join("\n" + "\n\n".join(part) + "\n" for part in parts)


def _function(name: str, function: Any) -> str:
    written = inspect.signature(inspect.unwrap(function))
    return f"### scoremode.{name}\n\n```text\n{name}{_signature(written)}\n```\n\n{_text(inspect.unwrap(function))}"


def _signature(signature: inspect.Signature) -> str:
    """Names and defaults; types are in ``help()`` and in editors."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values() if p.name != "self"]
    returned = signature.return_annotation
    arrow = "" if returned in (inspect.Signature.empty, "None", None) else f" -> {returned}"
    return f"{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}{arrow}"


def _text(documented: Any) -> str:
    """A docstring as Markdown: code in single backticks, and examples in blocks."""
    text = inspect.cleandoc(documented.__doc__ or "").replace("``", "`")
    text = re.sub(r":(?:func|class|mod|meth):| *# doctest: .*", "", text)
    text = re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)
    return re.sub(r"^>>> .*(?:\n\S.*)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)


def _class(name: str, documented: Any) -> str:
    """A class with the names of its own methods and properties; ``help()`` says more of each."""
    members = [_member(key, each) for key, each in vars(documented).items() if not key.startswith("_")]
    listed = ", ".join(member for member in members if member)
    text = _text(documented).partition("\n```")[0].rstrip()
    return "\n\n".join([f"### scoremode.{name}", text, *([f"Has {listed}."] if listed else [])])


def _member(name: str, value: Any) -> str:
    """A method or a property; '' for data and statistics."""
    is_property = isinstance(value, property | cached_property)
    return f"`{name}()`" if inspect.isfunction(value) else f"`{name}`" if is_property else ""
