"""A name is the noun of what it holds: few functions have locals or parameters that could be called anything."""

from __future__ import annotations

import ast

from tests.house import files, name_of

VAGUE = {"found", "given", "asked", "own", "one", "its", "said", "kept", "known", "what", "words", "named"}
MOST = 0.05  # of all functions


def names_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    parameters = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return parameters | {node.id for node in stored}


def test_names_are_nouns() -> None:
    functions = [
        (path, node)
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    vague = [f"{path.name}: {node.name}: {sorted(names_of(node) & VAGUE)}" for path, node in functions]
    vague = [line for line in vague if not line.endswith("[]")]
    assert len(functions) > 1000
    assert len(vague) <= MOST * len(functions), "\n".join(vague)


def test_no_class_name_has_two_meanings() -> None:
    places: dict[str, list[str]] = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
