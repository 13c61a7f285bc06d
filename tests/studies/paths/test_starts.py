"""How often an engine that is slow to start starts: as rarely as its settings allow, and as often as was said."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scoremode.core.engine import registry
from scoremode.core.engine.options import Options, option
from scoremode.core.engine.plugin import Capabilities, Work
from scoremode.core.entry_points import Plugins
from scoremode.core.plan.path import CHUNKED, PATHS, DecodePath
from scoremode.engines.table import TablePlugin
from scoremode.engines.table.engine import TableEngine
from tests.command_line import Command, Outcome

TEXT = ("--text", "any text that is long enough for windows", "--context-length", "8", "--stride", "8")
UNIFORM, SUCCESSOR = "table:uniform", "table:successor"


@dataclass(frozen=True, slots=True)
class SlowOptions(Options):
    kv_cache_dtype: str | None = option("as vLLM has it", cache_part="kv")
    chunk: int | None = option("tokens")


class SlowEngine(TableEngine):
    plugin: SlowTable
    scored: list[DecodePath | None]

    def score(self, *given: Any) -> Any:
        self.scored.append(self.path)
        return super().score(*given)

    def close(self) -> None:
        self.plugin.is_open = False


class SlowTable(TablePlugin):
    """A table that is opened as vLLM is, and one at a time."""

    name: ClassVar[str] = "table"
    capabilities: ClassVar[Capabilities] = replace(TablePlugin.capabilities, paths=(*PATHS, CHUNKED))
    options = SlowOptions
    starts_slowly = True

    def __init__(self) -> None:
        self.opened, self.is_open = list[SlowEngine](), False

    def feeds_also(self, opened: DecodePath, other: DecodePath) -> bool:
        return other.sequences <= opened.sequences

    def chunked(self, options: SlowOptions, tokens: int) -> SlowOptions:
        return replace(options, chunk=tokens)

    def open(self, subject: Any, options: Any, work: Work) -> SlowEngine:
        assert not self.is_open, "two engines may not fit in memory"
        engine = SlowEngine(TableEngine.named(subject.name.removeprefix("table:")).logprobs)
        engine.plugin, engine.path, engine.scored, self.is_open = self, work.path, [], True
        self.opened.append(engine)
        return engine

    def starts(self, outcome: Outcome) -> int:
        """How many engines a command opened. It must have said so, if it was more than one."""
        assert outcome.code == 0, outcome.err
        said = re.findall(r"^scoremode: (\d+) starts of table: (.*)$", outcome.err, re.MULTILINE)
        number, self.opened = len(self.opened), []
        assert [int(n) for n, _ in said] == ([number] if number > 1 else [])
        self.names = said[0][1] if said else ""
        return number


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SlowTable:
    plugin = SlowTable()
    changed = Plugins({**registry.known_engines(), "table": plugin}, ())
    monkeypatch.setattr(registry, "registry", lambda: changed)
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    return plugin


def test_paths_starts_once_for_all_sequences_and_for_the_noise_beside_them(
    slow: SlowTable, command: Command, tmp_path: Path
) -> None:
    vary = ("--vary", "decode,chunked", "--sequences", "1,4,2", "--chunk-tokens", "4", "--out", str(tmp_path))
    made = command("paths", UNIFORM, *TEXT, *vary, "--json")
    _, decoding, _ = slow.opened
    assert list(dict.fromkeys(path and path.sequences for path in decoding.scored)) == [4, 2, 1]
    assert slow.starts(made) == 3
    assert slow.names == "prefill; decode 4, decode 2, decode 1; chunked 4"
    assert [one["name"] for one in made.json["candidates"]] == ["decode 1", "decode 4", "decode 2", "chunked 4"]
    assert slow.starts(command("paths", UNIFORM, *TEXT, *vary)) == 0
    shutil.rmtree(tmp_path / "decode-2")
    assert slow.starts(command("paths", UNIFORM, *TEXT, *vary)) == 1
    for name in ("decode-4", "decode-1", "chunked-4"):
        shutil.rmtree(tmp_path / name)
    assert slow.starts(command("paths", UNIFORM, *TEXT, *vary)) == 2
    assert slow.names == "decode 4, decode 1; chunked 4"
    assert slow.starts(command("paths", UNIFORM, *TEXT, *vary, "--fresh")) == 3


def test_noise_starts_once_for_each_setting(slow: SlowTable, command: Command) -> None:
    vary = ("--vary", "kv-cache-dtype=auto,fp8", "--repeat", "3")
    assert slow.starts(command("paths", UNIFORM, *TEXT, *vary)) == 2
    assert slow.names == "kv-cache-dtype auto; kv-cache-dtype fp8"
    assert slow.starts(command("paths", UNIFORM, *TEXT, "--vary", "noise")) == 1


@pytest.mark.parametrize("kept", [True, False], ids=["out", "cache"])
def test_compare_starts_once_for_each_model_that_has_no_run(
    slow: SlowTable, command: Command, tmp_path: Path, kept: bool
) -> None:
    types = (UNIFORM, *TEXT, "--kv-cache-dtype", "auto,fp8,int8", *(("--out", str(tmp_path / "runs")) if kept else ()))
    assert slow.starts(command("compare", *types)) == 3  # the noise floor is that of the baseline's engine
    assert slow.names == "baseline; kv fp8; kv int8"
    assert slow.starts(command("compare", *types)) == 0
    if kept:
        shutil.rmtree(tmp_path / "runs" / "kv-fp8")
        assert slow.starts(command("compare", *types)) == 1


def test_a_candidate_that_is_the_baseline_shares_its_engine(slow: SlowTable, command: Command) -> None:
    made = command("compare", UNIFORM, SUCCESSOR, UNIFORM, *TEXT, "--json")
    assert [one["name"] for one in made.json["candidates"]] == [SUCCESSOR, UNIFORM]
    assert slow.starts(made) == 2
    assert slow.names == f"baseline, {UNIFORM}; {SUCCESSOR}"


def test_candidates_of_a_reference_are_counted_too(slow: SlowTable, command: Command, tmp_path: Path) -> None:
    reference = str(tmp_path / "ref")
    assert slow.starts(command("reference", UNIFORM, *TEXT, "--out", reference)) == 1
    assert slow.starts(command("compare", reference, UNIFORM, SUCCESSOR)) == 2
    assert slow.starts(command("compare", reference, UNIFORM, SUCCESSOR)) == 0
    assert slow.starts(command("compare", reference, UNIFORM, SUCCESSOR, "--fresh")) == 2
