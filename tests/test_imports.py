"""The shape of the house, held by a test: imports go one way, and help answers without the heavy libraries.

errors, types, json_files, sealed, numerics, redaction, locks, records, arguments, memory
              <- cache, text_files, hub, corpus, tokens, methods, arrange, groups, metrics, columns, journal,
                 run_format, runs, comparable, reference_format, references, head, models, checkpoints,
                 weight_files, outputs
              <- engines
              <- scoring, sequence, sequence_files, perplexity, drift, baselines, comparing, statistics, gate, ranking,
                 doctor, vllm
              <- display <- cli
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import scoremode

HOUSE = Path(scoremode.__file__).parent
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "types",
        "json_files",
        "sealed",
        "numerics",
        "redaction",
        "locks",
        "records",
        "arguments",
        "memory",
    ),
    (
        "cache",
        "text_files",
        "hub",
        "corpus",
        "tokens",
        "methods",
        "arrange",
        "groups",
        "metrics",
        "columns",
        "journal",
        "run_format",
        "runs",
        "comparable",
        "reference_format",
        "references",
        "head",
        "models",
        "checkpoints",
        "weight_files",
        "outputs",
    ),
    ("engines",),
    (
        "scoring",
        "sequence",
        "sequence_files",
        "perplexity",
        "drift",
        "baselines",
        "comparing",
        "statistics",
        "gate",
        "ranking",
        "doctor",
        "vllm",
    ),
    ("display",),
    ("cli", "__main__"),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
HEAVY = ("torch", "numpy", "transformers", "pyarrow", "rich", "huggingface_hub", "datasets")
# Run.to_arrow(), Run.summary() and how values show themselves in a notebook are looked up when they are called
LOOKED_UP_LATER = {("types", "columns"), ("types", "runs"), ("types", "display"), ("types", "statistics")}


def modules() -> list[Path]:
    return sorted(p for p in HOUSE.rglob("*.py") if p != HOUSE / "__init__.py")


def room(path: Path) -> str:
    """The part of the house that a file belongs to: its folder, or its own name."""
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of everything that a piece of code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports here are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(tree: ast.AST) -> set[str]:
    """Parts of the house that a piece of code imports; ``scoremode.__version__`` is not one."""
    parts = [name.split(".") for name in imported(tree)]
    return {p[1] for p in parts if p[0] == "scoremode" and len(p) > 1 and p[1] in FLOOR}


def at_module_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run on import; what stands under ``if TYPE_CHECKING`` or in a function does not."""
    found: list[ast.stmt] = []
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            waiting += node.body + node.orelse
        elif isinstance(node, ast.Try):
            waiting += node.body + node.orelse + node.finalbody
    return found


def test_every_file_has_its_floor() -> None:
    assert {room(path) for path in modules()} - FLOOR.keys() == set()


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(HOUSE)))
def test_no_file_imports_from_a_floor_above_it(path: Path) -> None:
    own = room(path)
    above = {name for name in rooms_imported(ast.parse(path.read_text())) if FLOOR[name] > FLOOR[own]}
    assert {name for name in above if (own, name) not in LOOKED_UP_LATER} == set()


def test_what_may_be_looked_up_later_is_never_imported_at_module_level() -> None:
    early = {
        (room(path), name)
        for path in modules()
        for node in at_module_level(ast.parse(path.read_text()))
        for name in rooms_imported(node)
    }
    assert early & LOOKED_UP_LATER == set()


@pytest.mark.parametrize(
    "path", [p for p in modules() if room(p) not in ("head", "engines")], ids=lambda p: str(p.relative_to(HOUSE))
)
def test_only_head_and_engines_import_torch_at_module_level(path: Path) -> None:
    tops = {n.split(".")[0] for node in at_module_level(ast.parse(path.read_text())) for n in imported(node)}
    assert not tops & {"torch", "transformers"}


def test_types_knows_numpy_only() -> None:
    nodes = at_module_level(ast.parse((HOUSE / "types.py").read_text()))
    tops = {n.split(".")[0] for node in nodes for n in imported(node)}
    assert tops - set(sys.stdlib_module_names) == {"numpy", "scoremode"}


def loaded_after(code: str) -> set[str]:
    """Which heavy libraries a fresh Python holds after running the code."""
    probe = f"{code}\nimport sys\nprint('\\nloaded:', *[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stderr.strip().split("\n")[-1].removeprefix("loaded:").split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["ppl", "--help"], ["prob", "--help"], ["plan", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "from scoremode.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as ended:\n    assert not ended.code"
    )
    assert loaded_after(code) == set()


def test_importing_scoremode_loads_nothing_heavy() -> None:
    assert loaded_after("import scoremode") == set()


def test_a_mistyped_command_is_answered_without_anything_heavy() -> None:
    assert loaded_after("from scoremode.cli.main import main\nassert main(['pll']) == 2") == set()


def test_every_public_name_can_be_loaded() -> None:
    assert [name for name in scoremode.__all__ if not hasattr(scoremode, name)] == []


def test_a_name_that_scoremode_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = scoremode.nothing_of_this_name
