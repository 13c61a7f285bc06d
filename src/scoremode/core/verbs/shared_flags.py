"""Flags that several verbs share, each declared once, under the names that people of this field know.

``--help``, the docstrings of the Python functions, the types that editors read and docs/api.md are made from them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

from scoremode.core.engine.registry import all_options, known_engines
from scoremode.core.extensions import Flags as Flags  # noqa: PLC0414
from scoremode.core.extensions import ReplicasOffer, TextOffer, offered
from scoremode.core.verbs import engine_options
from scoremode.errors import in_python, listed

MODEL: Flags = {"model MODEL": "a checkpoint folder, a name on the Hugging Face hub, smollm2-135m"}
TEXT: Flags = {
    "--corpus TEXT …": "wikitext2, wikitext2:FILE, python-docs, a file (.txt .md .jsonl .parquet), folder, pattern, "
    f"{''.join(f'{text.prefix}{text.value}, ' for text in offered(TextOffer))}- for stdin",
    "--text TEXT": "a text given here (without any: python-docs-short)",
    "--dataset NAME": "a dataset on the Hugging Face hub",
    "--dataset-config CONFIG": "of the dataset",
    "--split SPLIT": "of the dataset (default: test)",
    "--field FIELD": "of .jsonl or .parquet rows (default: text, or messages)",
    "--num-samples N": "only the first N rows (of one plain text: lines)",
    "--document-tokens N": "only the first N tokens of each document",
    "--assistant-only": "of chat rows, score the assistant's tokens alone",
    "--slice NAME=START..END …": "show the text between two markers apart; may be given again (chats: roles always)",
}
METHOD: Flags = {
    "--method METHOD …": "see scoremode info methods (default: sliding-once)",
    "--context-length N": "tokens per window (default: the method's)",
    "--stride N": "tokens between windows (default: the method's)",
    "--max-windows N": "0 for all (default: the method's own limit)",
    "--path PATH": "prefill (default), or decode: one token per step, as text is generated",
    "--sequences N": "windows that are decoded side by side (default: 16)",
    "--prefill-tokens N": "tokens of each window that are fed at once before decoding starts (default: 1)",
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
_FLAGS = {**MODEL, **ENGINE, **RUN, **TEXT, **METHOD}
for _spread in offered(ReplicasOffer):
    _FLAGS |= {**_spread.flags, **_spread.shares}


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
"""Arguments that functions declare one by one; all others belong to a group of ``core.verbs.arguments``."""


def argument_texts() -> dict[str, str]:
    """What the arguments that several functions share do, by their names in Python."""
    options = {name: option.details.help for name, (_, option) in sorted(all_options().items())}
    texts = {name_of(flag): about for flag, about in _FLAGS.items()} | options
    return {name: _in_python(about) for name, about in texts.items()} | _OTHERS


@cache
def _option_texts() -> dict[str, str]:
    """The texts below the options of engines, as ``make format`` wrote them: no engine is loaded for ``help()``."""
    try:
        source = inspect.getsource(engine_options)
    except OSError:  # there is bytecode alone
        return {}
    (group,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(group.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def with_arguments(docstring: str, names: Iterable[str]) -> str:
    """A docstring with what these arguments do, above its examples, for ``help()``."""
    texts = {name_of(flag): _in_python(about) for flag, about in _FLAGS.items()} | _option_texts() | _OTHERS
    lines = [f"    {name}: {texts[name]}" for name in names if name in texts]
    about, prompt, examples = inspect.cleandoc(docstring).partition("\n>>> ")
    return "\n".join([about.rstrip(), "", "Arguments:", *lines, prompt + examples])
