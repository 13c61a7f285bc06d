"""Flags that several verbs share and that are not options: the model, where results go. Each is declared once.

``--help``, the docstrings of the Python functions and docs/api.md are made from them, as from options.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

from scoremode.core.engine.registry import known_engines
from scoremode.core.extensions import Flags as Flags  # noqa: PLC0414
from scoremode.errors import in_python, listed

MODEL: Flags = {
    "model MODEL": "a checkpoint folder, a name on the Hugging Face hub, smollm2-135m",
}
ENGINE: Flags = {
    "--engine ENGINE": "see scoremode info engines (default: by the model)",
    "--tokenizer FOLDER": "another tokenizer than the model's own",
}
RUN: Flags = {
    "--out DIR": "keep the result there; an interrupted one resumes",
    "--fresh": "score again even if a run is there, and replace it",
}
_OTHERS = {"progress": "a function of the tokens done and the tokens in all"}  # in Python alone
_FLAGS = {**MODEL, **ENGINE, **RUN}


def model_flag() -> Flags:
    """``MODEL``, with what the engines take that are here."""
    names = [plugin.models for plugin in known_engines().values() if plugin.models]
    return {flag: listed([about, *names], "or") for flag, about in MODEL.items()}


def name_of(flag: str) -> str:
    """The argument that a flag of these tables is in Python.

    >>> name_of("--num-samples N")
    'num_samples'
    """
    return flag.split(maxsplit=1)[0].removeprefix("--").replace("-", "_")


_in_python = cache(in_python)  # of texts that many functions share
SHARED = (*map(name_of, (*MODEL, *ENGINE, *RUN)), "progress")
"""Arguments that functions declare one by one; all others belong to a group of argument_types.py."""


def shared_texts() -> dict[str, str]:
    """What the arguments that functions declare one by one do, by their names in Python."""
    return {name_of(flag): _in_python(about) for flag, about in _FLAGS.items()} | _OTHERS


@cache
def _declared_texts() -> dict[str, str]:
    """The texts below the arguments in argument_types.py, as ``make format`` wrote them: no engine is loaded for it."""
    from scoremode.core.verbs import argument_types

    try:
        source = inspect.getsource(argument_types)
    except OSError:  # there is bytecode alone
        return {}
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for group in ast.parse(source).body
        if isinstance(group, ast.ClassDef)
        for field, text in pairwise(group.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def with_arguments(docstring: str, names: Iterable[str]) -> str:
    """A docstring with what these arguments do, above its examples, for ``help()``."""
    texts = shared_texts() | _declared_texts()
    lines = [f"    {name}: {texts[name]}" for name in names if name in texts]
    about, prompt, examples = inspect.cleandoc(docstring).partition("\n>>> ")
    return "\n".join([about.rstrip(), "", "Arguments:", *lines, prompt + examples])
