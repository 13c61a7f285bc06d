"""Other packages bring engines, methods and corpora; one that is broken is named, and the others still work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "engine_plugin"
LONG = "The quick brown fox jumps over the lazy dog. " * 12


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built and installed as a user would, into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(EXAMPLE)], check=True, capture_output=True)
    return target


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """The command line with the example, and with any other folder of packages."""
    (tmp_path / "seen.txt").write_text("the quick brown fox")
    (tmp_path / "text.txt").write_text(LONG)

    def command(*arguments: str, also: tuple[Path, ...] = ()) -> Outcome:
        path = os.pathsep.join(map(str, (installed, *also)))
        environment = {**os.environ, "PYTHONPATH": path, "SCOREMODE_CACHE": str(tmp_path / "cache")}
        done = forked.run(
            [sys.executable, "-m", "scoremode", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return command


def package(folder: Path, name: str, group: str, points: dict[str, str], code: str) -> Path:
    """A package as pip would leave it: a module, and what it declares."""
    module = name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    return folder


ENGINE = """
from scoremode_unigram import UnigramPlugin
class Other(UnigramPlugin):
    contract = {contract}
    name = "{name}"
    def claims(self, model):
        return model.startswith("{name}:")
"""


# ── the example ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_example_is_as_small_as_its_readme_says() -> None:
    lines = (EXAMPLE / "src" / "scoremode_unigram" / "__init__.py").read_text().splitlines()
    assert len(lines) <= 60


def test_it_is_listed_by_engines_and_doctor(run: Run) -> None:
    listed = {engine["name"]: engine for engine in run("info", "engines", "--json").json}
    assert listed["unigram"]["package"] == "scoremode_unigram"
    assert listed["unigram"]["capabilities"]["rank"] is False
    assert listed["unigram"]["options"] == ["--smoothing"]
    assert "unigram" in run("info", "engines").out
    found = run("info", "--test", "--engine", "table", "--json").json
    assert {one["name"]: one["problem"] for one in found["engines"]}["unigram"] is None


def test_its_scores_are_its_own_and_what_it_does_not_give_is_not_measured(run: Run) -> None:
    import numpy as np

    found = run("ppl", "unigram:seen.txt", "--corpus", "text.txt", "--json").json
    counts = np.bincount(np.frombuffer(b"the quick brown fox", np.uint8), minlength=256) + 1.0
    ids = np.frombuffer(LONG.encode(), np.uint8)[1:]
    assert found["mean_nll"] == pytest.approx(float(-np.log(counts / counts.sum())[ids].mean()), rel=1e-12)
    assert (found["engine"], found["targets"]) == ("unigram", len(LONG) - 1)
    assert (found["mean_rank"], found["top1_accuracy"], found["mean_entropy"]) == (None, None, None)


def test_its_option_is_a_flag_with_help_and_a_part_of_the_identity(run: Run, tmp_path: Path) -> None:
    assert "--smoothing COUNT" in run("ppl", "--help-all").out
    one, other = (
        run("ppl", "unigram:seen.txt", "--corpus", "text.txt", "--smoothing", value, "--out", f"run{value}", "--json")
        for value in ("1.0", "9")
    )
    assert one.json["perplexity"] != other.json["perplexity"]
    identity = json.loads((tmp_path / "run9" / "manifest.json").read_text())["identity"]
    assert identity["settings"] == {"smoothing": 9.0}
    assert "is not a number above 0" in run("ppl", "unigram:seen.txt", "--text", "x y", "--smoothing", "0").err
    refused = run("ppl", "table:uniform", "--text", "x y", "--smoothing", "2")
    assert "--smoothing does not apply to the table engine" in refused.err
    assert "--engine unigram" in refused.err


def test_every_verb_works_with_it_or_refuses_before_it_is_opened(run: Run, tmp_path: Path) -> None:
    """An engine that cannot be opened shows that nothing tried to."""
    asked = ("unigram:seen.txt", "--corpus", "text.txt")
    assert run("plan", *asked, "--json").json["engine"] == "unigram"
    assert run("ppl", *asked, "--method", "gptq", "--context-length", "64", "--json").code == 0
    assert run("paths", *asked, "--vary", "noise", "--json").json[0]["repeat_drift_max"] == 0.0
    probs = run("prob", "unigram:seen.txt", "--prompt", "a", "--target", "b", "--json").json
    assert probs[0]["tokens"][0]["rank"] is None
    candidate = ("compare", "table:uniform", *asked, "--out", "both")
    for verb in (("reference", *asked, "--out", "ref"), ("compare", "unigram:seen.txt", *asked), candidate):
        refused = run(*verb)
        assert refused.code == 2
        assert "the unigram engine cannot" in refused.err
        assert refused.err.count("\n") == 1
    assert not (tmp_path / "both").exists()  # the baseline was not scored for nothing


# ── plug-ins that cannot be used ─────────────────────────────────────────────────────────────────────────────────────
BROKEN: dict[str, tuple[dict[str, str], str, str]] = {
    "does not import": ({"bad": "bad_engine:Plugin"}, "import nothing_of_this_name", "it cannot be imported (Mod"),
    "raises": ({"bad": "bad_engine:Plugin"}, "raise RuntimeError('first\\nsecond')", "(RuntimeError: first second)"),
    "is not an engine": ({"bad": "bad_engine:Plugin"}, "Plugin = 5", "it is not a subclass of"),
    "was written for another contract": (
        {"bad": "bad_engine:Other"},
        ENGINE.format(contract=99, name="bad"),
        "it was written for version 99 of the engine contract, and this is version 1",
    ),
    "has two names": (
        {"bad": "bad_engine:Other"},
        ENGINE.format(contract=1, name="good"),
        "entry point is named 'bad'",
    ),
    "has a name of ours": (
        {"table": "bad_engine:Other"},
        ENGINE.format(contract=1, name="table"),
        "'table' is the name of a built-in",
    ),
}


@pytest.mark.parametrize(("points", "code", "says"), BROKEN.values(), ids=BROKEN)
def test_one_that_cannot_be_used_is_named_and_the_others_work(
    run: Run, tmp_path: Path, points: dict[str, str], code: str, says: str
) -> None:
    also = (package(tmp_path / "other", "bad-engine", "scoremode.engines", points, code),)
    (name,) = points
    listed = run("info", "engines", also=also)
    assert listed.code == 0
    assert f"cannot be used: {says}" in " ".join(listed.out.split()) or says in " ".join(listed.out.split())
    assert run("ppl", "table:uniform", "--text", "one two", also=also).code == 0
    assert run("ppl", "unigram:seen.txt", "--text", "one two", also=also).code == 0
    if name != "table":
        refused = run("ppl", "smollm2-135m", "--text", "one two", "--engine", name, also=also)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert f"the engine '{name}' cannot be used" in refused.err


def test_two_with_one_name_are_both_refused(run: Run, tmp_path: Path) -> None:
    also = tuple(
        package(
            tmp_path / name,
            name,
            "scoremode.engines",
            {"twin": f"{name}:Other"},
            ENGINE.format(contract=1, name="twin"),
        )
        for name in ("first", "second")
    )
    refused = run("ppl", "twin:seen.txt", "--engine", "twin", "--text", "one two", also=also)
    assert refused.code == 2
    assert "has the same name; uninstall one of the two" in refused.err
    assert run("info", "engines", "--json", also=also).code == 0
    assert run("ppl", "unigram:seen.txt", "--text", "one two", also=also).code == 0


# ── methods and corpora ──────────────────────────────────────────────────────────────────────────────────────────────
METHOD = '''
from scoremode.core.plan.recipes import Method, Span
def every_other(tokens, sizes):
    """Windows of ``context`` tokens, every other one left out."""
    for start in range(0, len(tokens) - sizes.context + 1, 2 * sizes.context):
        yield Span(start, start + sizes.context, start + 1, start + sizes.context)
METHOD = Method("every-other", "every other window", every_other, "join-rows", True, 64, None)
'''
CORPUS = """
from scoremode.core.text.corpus import NamedCorpus
CORPUS = NamedCorpus("documents", lambda: lambda: iter(["one text", "another text"]), "two texts")
"""


def test_a_method_of_another_package_is_a_method(run: Run, tmp_path: Path) -> None:
    points = {"every-other": "more_methods:METHOD"}
    also = (package(tmp_path / "other", "more-methods", "scoremode.methods", points, METHOD),)
    assert "every other window" in run("info", "methods", also=also).out
    asked = ("ppl", "table:uniform", "--corpus", "text.txt", "--method", "every-other", "--json")
    found = run(*asked, also=also).json
    assert found["windows"] == len(range(0, len(LONG) - 63, 128))
    assert found["perplexity"] == pytest.approx(256)
    assert "there is no method 'every-other'" in run(*asked).err


def test_a_corpus_of_another_package_is_a_corpus(run: Run, tmp_path: Path) -> None:
    points = {"two-texts": "more_corpora:CORPUS"}
    also = (package(tmp_path / "other", "more-corpora", "scoremode.corpora", points, CORPUS),)
    found = run("ppl", "table:uniform", "--corpus", "two-texts", "--json", also=also).json
    assert (found["corpus"], found["documents"]) == ("two-texts", 2)


@pytest.mark.parametrize("group", ["scoremode.methods", "scoremode.corpora"])
def test_a_method_or_corpus_that_cannot_be_used_is_named(run: Run, tmp_path: Path, group: str) -> None:
    also = (package(tmp_path / "other", "bad-one", group, {"bad": "bad_one:BAD"}, "BAD = 5"),)
    flag = "--method" if group == "scoremode.methods" else "--corpus"
    text = ("--corpus", "text.txt") if flag == "--method" else ()
    refused = run("ppl", "table:uniform", *text, flag, "bad", also=also)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "cannot be used" in refused.err
    assert (
        run(
            "ppl", "table:uniform", "--corpus", "text.txt", "--method", "gptq", "--context-length", "64", also=also
        ).code
        == 0
    )
