"""The contract of engines: options are declared once, capabilities are known early, and no engine is known by name."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest

import scoremode as sm
from scoremode.cli.parser import Parser
from scoremode.console import flags
from scoremode.core.engine import registry
from scoremode.core.engine.options import CheckpointOptions, Options, option
from scoremode.core.engine.plugin import Capabilities, Work
from scoremode.core.engine.registry import all_options, can, choose, known_engines, open_for, read_options, require
from scoremode.core.entry_points import Plugins
from scoremode.core.verbs.argument_types import EngineOptionArguments, QuestionArguments
from scoremode.engines.table import TablePlugin
from scoremode.errors import EngineError, OptionError
from tests.engines import option_docs
from tests.house import HOUSE

ROOT = Path(__file__).resolve().parents[2]


# ── nobody knows an engine by name ───────────────────────────────────────────────────────────────────────────────────
def test_nothing_outside_its_folder_knows_the_word_vllm() -> None:
    """But for scoremode/vllm.py, which is nothing but the short name that people import it by, for the service, which
    is routes inside that server, for what studies need of it: files with its name, and lists of abilities; and for the
    options of all engines, which ``make format`` writes."""
    own, service = HOUSE / "engines" / "vllm", HOUSE / "remote" / "service"
    files = [path for path in HOUSE.rglob("*") if path.suffix in (".py", ".js", ".css", ".html") and path.is_file()]
    named = {path for path in files if path.name.startswith("vllm") or path.match("studies/*/wing.py")}
    named.add(HOUSE / "core" / "verbs" / "argument_types.py")
    outside = [path for path in files if not {own, service} & set(path.parents) and path not in named]
    found = [
        f"{path.relative_to(HOUSE)}:{number}"
        for path in outside
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "vllm" in line.lower()
    ]
    assert len(outside) > 100
    assert found == []


# ── one line makes an option ─────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class OneMore(Options):
    """The one line that is added is the field."""

    sharpness: int | None = option("how sharp", metavar="N", above=0)


class SharpTable(TablePlugin):
    name: ClassVar[str] = "table"
    options = OneMore


@pytest.fixture
def sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table engine with one more option."""
    changed = Plugins({**known_engines(), "table": SharpTable()}, ())
    monkeypatch.setattr(registry, "registry", lambda: changed)


@pytest.mark.usefixtures("sharp")
def test_one_line_gives_flag_help_argument_docs_and_identity() -> None:
    parser = Parser()
    flags.add_engine(parser)
    assert "--sharpness N" in parser.format_help()
    assert "how sharp" in parser.format_help()
    assert flags.engine_options(parser.parse_args(["--sharpness", "5"])) == {"sharpness": 5}
    run = sm.ppl("table:uniform", text="any text", sharpness=5, fresh=True)  # type: ignore[call-arg]
    assert run.manifest["identity"]["settings"] == {"sharpness": 5}
    assert "| `--sharpness N` | `sharpness` | how sharp |" in option_docs.docs_table("table")
    assert "sharpness: int | None" in option_docs.arguments_module()
    with pytest.raises(OptionError, match="--sharpness 0 is not above 0"):
        sm.ppl("table:uniform", text="any text", sharpness=0)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="sharpness is 'x', which is not a whole number"):
        sm.ppl("table:uniform", text="any text", sharpness="x")  # type: ignore[call-arg]


def test_the_type_of_all_arguments_and_the_tables_in_the_docs_are_up_to_date() -> None:
    """``make format`` writes them."""
    assert [path.name for path, text in option_docs.made_files().items() if path.read_text() != text] == []
    assert get_type_hints(EngineOptionArguments).keys() == all_options().keys()
    text = "".join(page.read_text() for page in option_docs.PAGES)
    with_options = {name for name, plugin in known_engines().items() if plugin.options.known()}
    assert sorted(re.findall(r"<!-- options of (\w+) -->", text)) == sorted(with_options)


def test_every_option_has_help_and_engines_that_share_it_agree_on_its_kind() -> None:
    for name, (engines, known) in all_options().items():
        assert known.details.help, name
        assert {known_engines()[engine].options.known()[name].kind for engine in engines} == {known.kind}


def test_switches_that_are_off_secrets_and_places_are_not_in_the_identity() -> None:
    """A switch that is off is as if it were not there: runs that were kept before it existed stay theirs."""
    plugin = known_engines()["transformers"]
    assert read_options(plugin, {"dtype": None, "trust_remote_code": False}).given() == {}
    given = CheckpointOptions.of({"token": "hf_x", "revision": "v2", "dtype": "float32"})
    assert given.identity() == {"dtype": "float32"}


def test_an_option_of_another_engine_says_whose_it_is() -> None:
    with pytest.raises(OptionError, match="--batch-tokens does not apply to the vllm engine") as caught:
        read_options(known_engines()["vllm"], {"batch_tokens": 5})
    assert "--engine transformers" in caught.value.fix


def test_older_flags_are_still_understood() -> None:
    parser = argparse.ArgumentParser()
    flags.add_engine(parser)
    parsed = parser.parse_args(["--allow-untested-vllm"])
    given = read_options(known_engines()["vllm"], flags.engine_options(parsed))
    assert given.identity() == {"allow_untested_vllm": True}  # as runs that were kept earlier know it


@pytest.mark.parametrize("function", [sm.ppl, sm.plan, sm.reference, sm.compare, sm.noise, sm.prob, sm.open])
def test_signatures_name_their_arguments(function: Any) -> None:
    """Typed, and those of questions and engines through a TypedDict that type checkers unfold."""
    found = inspect.signature(function)
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in found.parameters.values())
    (rest,) = [p for p in found.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert str(rest.annotation).startswith("Unpack[")
    assert set(EngineOptionArguments.__annotations__) <= found.parameters.keys()
    for method in (sm.Model.ppl, sm.Model.reference, sm.Model.compare):
        assert QuestionArguments.__annotations__.keys() <= inspect.signature(method).parameters.keys()


@pytest.mark.parametrize("name", [n for n in sm.__all__ if inspect.isfunction(getattr(sm, n))])
def test_help_says_what_every_argument_does(name: str) -> None:
    """In the text of the docstring, or in the list that is made of the declarations; so do editors, from the source."""
    function = getattr(sm, name)
    text = inspect.getdoc(function) or ""
    silent = {p for p in inspect.signature(function).parameters if not re.search(rf"\b{p}\b", text)}
    assert silent <= {"words", "others", "details", "arguments", "options", "found", "candidates", "model"}
    for argument, about in (("context_length", "tokens per window"), ("n_ubatch", "most tokens that are computed")):
        shown = f"\n    {argument}: {about}" in text
        assert shown == (argument in inspect.signature(function).parameters)


# ── capabilities ─────────────────────────────────────────────────────────────────────────────────────────────────────
class Poor(TablePlugin):
    """A table that can do next to nothing, and must not be opened for anything else."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def open(self, *_: Any) -> Any:
        raise AssertionError("it was opened")


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Plugins({**known_engines(), "table": Poor()}, ())
    monkeypatch.setattr(registry, "registry", lambda: changed)


@pytest.mark.usefixtures("poor")
@pytest.mark.parametrize(
    "question",
    [
        lambda folder: sm.reference("table:uniform", folder / "ref", text="any text"),
        lambda folder: sm.compare("table:uniform", "table:successor", text="any text"),
        lambda folder: sm.compare(str(folder / "made"), "table:uniform"),
    ],
    ids=["reference", "baseline", "candidate"],
)
def test_what_an_engine_cannot_do_is_refused_before_it_is_opened(
    question: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as usual:
        able = Plugins({**known_engines(), "table": TablePlugin()}, ())
        usual.setattr(registry, "registry", lambda: able)
        sm.reference("table:uniform", tmp_path / "made", text="any text")
    with pytest.raises(EngineError, match="the table engine cannot") as caught:
        question(tmp_path)
    assert "transformers" in caught.value.fix.removeprefix("use --engine ").split(" or ")


class Elsewhere(TablePlugin):
    """An engine that no wing knows, with an ability of its own."""

    name: ClassVar[str] = "elsewhere"
    abilities: ClassVar[dict[str, Any]] = {
        "writes": lambda plugin, subject, options, work, rules: (subject.name, rules)
    }


def test_an_ability_is_given_by_a_wing_or_by_the_engine_itself() -> None:
    table, own = TablePlugin(), Elsewhere()
    assert [can(one, "writes") for one in (table, own)] == [True, True]
    assert [can(one, "swaps") for one in (table, own)] == [False, False]
    chosen = choose("table:uniform")
    assert open_for(replace(chosen, plugin=own), "writes", Work(), "rules") == ("table:uniform", "rules")


def test_an_ability_that_an_engine_lacks_is_refused_with_the_engines_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TablePlugin, "capabilities", replace(TablePlugin.capabilities, scores_only=True))
    with pytest.raises(EngineError, match="the table engine cannot write texts") as caught:
        sm.rollouts("table:uniform", ["any prompt"])
    assert caught.value.fix == "use --engine transformers or llamacpp or server or vllm"
    with pytest.raises(EngineError, match="the table engine cannot give hidden states between layers") as caught:
        require(TablePlugin(), "layer_states", "give hidden states between layers")
    assert caught.value.fix == "use --engine transformers or llamacpp or vllm"


def test_the_short_name_is_nothing_else() -> None:
    import scoremode.vllm as short
    from scoremode.engines.vllm import llm

    assert {name: getattr(short, name) for name in short.__all__} == {n: getattr(llm, n) for n in short.__all__}
    assert len((HOUSE / "vllm.py").read_text().splitlines()) < 20
