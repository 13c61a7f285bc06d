"""The shape of the house, held by tests: imports go down only, and help answers without the heavy libraries.

cli ▶ {studies, remote} ▶ console ▶ {engines, reports} ▶ core ▶ head ▶ errors, values, version
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import scoremode
from scoremode.core import extensions
from scoremode.core.models.facts import resolve
from tests.house import FLOOR, HOUSE, arrows, circles, files, imported, name_of, room_of, upward

HEAVY = ("torch", "numpy", "transformers", "pyarrow", "rich", "huggingface_hub", "datasets", "scipy")
LONGEST = 500  # lines
KERNELS = "head.fused_kernels"  # Triton compiles a kernel as one function
SHORT_NAMES = ("vllm", "harness")  # nothing but names that people import a file of a wing by


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {own: targets for own, targets in arrows().items() if own not in SHORT_NAMES}


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


def test_every_file_is_in_a_room(graph: dict[str, set[str]]) -> None:
    assert {room_of(own) for own in graph} - FLOOR.keys() == set()


def test_no_import_goes_up(graph: dict[str, set[str]]) -> None:
    """Imports inside of functions and under TYPE_CHECKING count as well."""
    assert upward(graph) == []


def test_no_files_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == []


def test_an_upward_arrow_and_a_circle_would_be_seen() -> None:
    """The two tests above can fail."""
    runs, ppl = "core.store.runs", "core.verbs.ppl"
    assert upward({runs: {ppl}, ppl: {runs}}) == [f"{runs} -> {ppl}"]
    assert upward({"head.fused": {"core.text.corpus"}, "core.text.corpus": {"head.fused"}}) == [
        "head.fused -> core.text.corpus"
    ]
    assert upward({"studies.a.page": {"studies.b.page", "studies.a.tables"}}) == ["studies.a.page -> studies.b.page"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_no_file_is_longer_than_a_reader_can_hold(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST or name_of(path) == KERNELS


@pytest.mark.parametrize(
    "path", [p for p in files() if not {"head", "engine", "engines"} & set(p.relative_to(HOUSE).parts)], ids=name_of
)
def test_only_head_and_engines_import_torch_at_module_level(path: Path) -> None:
    tops = {n.split(".")[0] for node in at_module_level(ast.parse(path.read_text())) for n in imported(node)}
    assert not tops & {"torch", "transformers"}


def test_values_know_numpy_only() -> None:
    nodes = at_module_level(ast.parse((HOUSE / "values.py").read_text()))
    tops = {n.split(".")[0] for node in nodes for n in imported(node)}
    assert tops - set(sys.stdlib_module_names) == {"numpy"}


def loaded_after(code: str) -> set[str]:
    """Which heavy libraries a fresh Python holds after running the code."""
    probe = f"{code}\nimport sys\nprint('\\nloaded:', *[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stderr.strip().split("\n")[-1].removeprefix("loaded:").split())


@pytest.mark.parametrize("arguments", ["--help", "--version", "ppl --help", "prob --help", "cache --help", "pll"])
def test_help_and_a_mistyped_command_load_nothing_heavy(arguments: str) -> None:
    code = (
        "from scoremode.cli.main import main\n"
        f"try:\n    assert main({arguments.split()!r}) == (2 if {arguments == 'pll'} else 0)\n"
        "except SystemExit as ended:\n    assert not ended.code"
    )
    assert loaded_after(code) == set()


def test_a_plan_for_the_embedded_model_does_not_load_torch() -> None:
    """Where torch is built for CPUs: otherwise it is asked for its devices."""
    resolve("smollm2-135m")  # makes it, if it is not in the cache yet
    found = loaded_after("import scoremode as sm\nsm.plan('smollm2-135m', text='any text')")
    assert found - {"torch"} == {"numpy", "transformers", "huggingface_hub"}
    assert "torch" not in found or not version("torch").endswith("+cpu")


def test_every_public_name_can_be_loaded() -> None:
    assert [name for name in scoremode.__all__ if not hasattr(scoremode, name)] == []


def test_type_checkers_know_the_same_names() -> None:
    """The stub is written by hand; the names come from the core and from each wing's list."""
    nodes = ast.parse((HOUSE / "__init__.pyi").read_text()).body
    typed = {alias.asname for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(scoremode.__all__)


def test_a_name_that_scoremode_does_not_have_is_an_attribute_error() -> None:
    name = "nothing_of_this_name"
    with pytest.raises(AttributeError, match=name):
        getattr(scoremode, name)


COUNT_FILES = """
import sys
from scoremode.cli.main import main
code = main(sys.argv[1:])
names = (name for name in list(sys.modules) if name.split(".")[0] == "scoremode")
print(code, *(sys.modules[name].__file__ for name in names), sep="\\n", file=sys.stderr)
"""


def test_one_line_of_text_runs_the_code_of_few_files(stories: Path, tmp_path: Path) -> None:
    """Of files with code; declarations of engines and wings are data. Of a study, nothing else runs."""
    words = ["ppl", str(stories), "--text", "one line of text", "--out", str(tmp_path / "run"), "--quiet"]
    ended = subprocess.run([sys.executable, "-c", COUNT_FILES, *words], capture_output=True, text=True, check=True)
    code, *paths = ended.stderr.splitlines()
    with_code = [Path(path) for path in paths if len(ast.parse(Path(path).read_text()).body) > 1]
    declarations = {*HOUSE.glob("*/*/wing.py"), *HOUSE.glob("engines/*/__init__.py")}
    counted = [path for path in with_code if path not in declarations]
    assert code == "0"
    assert len(counted) <= 102, sorted(map(name_of, counted))
    of_wings = [path for path in with_code if path.relative_to(HOUSE).parts[0] in ("studies", "remote")]
    assert {path.name for path in of_wings} == {"wing.py"}


# ── wings ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_two_wings_register_the_same_name() -> None:
    """Of two wings with one name, the house would take either, without a word."""
    wings = extensions.wings()
    for registered in (
        [name for wing in wings for name in wing.names],
        [verb for wing in wings for group in wing.verbs.values() for verb in group],
        [own for wing in wings for own in wing.abilities],
        [(type(offer), offer.code) for wing in wings for offer in wing.offers],
        [kind for wing in wings for kind in wing.cache],
    ):
        assert len(registered) == len(set(registered)), registered


def test_every_kind_is_offered_asked_for_and_documented() -> None:
    kinds = {kind.__name__ for kind in extensions.Offer.__subclasses__() if kind.__module__.startswith("scoremode.")}
    assert len(kinds) <= 8
    assert {type(offer).__name__ for wing in extensions.wings() for offer in wing.offers} == kinds
    documented = (HOUSE.parents[1] / "docs" / "design.md").read_text()
    assert [kind for kind in kinds if f"`{kind}`" not in documented] == []
    asked = re.findall(r"offered\((?:extensions\.)?(\w+)\)", "".join(path.read_text() for path in files()))
    assert {*asked} == kinds


def test_the_code_of_every_wing_is_where_it_says() -> None:
    for wing in extensions.wings():
        addresses = [command.code for group in wing.verbs.values() for command in group.values()]
        for address in (*addresses, *wing.abilities.values(), *(offer.code for offer in wing.offers)):
            assert extensions.load(address) is not None, address
