"""Command lines with mistakes in them: one clear line each, exit code 2, nothing printed, nothing written."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import scoremode
from scoremode.cli.commands import COMMANDS, build_parser
from scoremode.cli.parser import MAY_BE_EMPTY
from scoremode.console.flags import RefusedSecret
from tests.cli.test_help import WITHOUT_JSON
from tests.command_line import Command, Refused

PPL = ["ppl", "table:uniform", "--text", "one two"]

# (arguments, words expected)
MISTAKES: list[tuple[list[str], str]] = [
    # a flag that is mistyped, shortened, or another verb's
    ([*PPL, "--contxt-length", "5"], "no flag --contxt-length; did you mean --context-length?"),
    ([*PPL, "--context_length", "5"], "did you mean --context-length?"),
    ([*PPL, "--context", "5"], "no flag --context; did you mean --context-length?"),
    ([*PPL, "--max", "5"], "did you mean --max-windows or --max-num-batched-tokens?"),
    ([*PPL, "--jsn"], "did you mean --json?"),
    ([*PPL, "--prompt", "x"], "--prompt belongs to scoremode prob"),
    ([*PPL, "--fail-if", "x"], "--fail-if belongs to scoremode compare"),
    (["plan", "table:uniform", "--out", "x"], "--out belongs to scoremode ppl, scoremode prob, … and 6 more"),
    (["report", "run", "--corpus", "x"], "--corpus belongs to scoremode ppl"),
    ([*PPL, "--zzzzzz"], "there is no flag --zzzzzz"),
    (["--context-length", "5", "ppl"], "a command comes first"),
    (["--zzzzzz"], "a command comes first"),
    ([*PPL, "one", "more"], "nothing takes the argument 'one'"),
    # what is missing
    (["ppl"], "MODEL is missing; as in scoremode ppl MODEL --corpus FILE"),
    (["ppl", "--corpus", "wikitext2"], "MODEL is missing"),
    (["compare", "--corpus", "wikitext2"], "BASELINE is missing; as in scoremode compare BASELINE CANDIDATE"),
    (["report"], "RUN is missing"),
    ([*PPL, "--stride"], "--stride needs a value"),
    (["ppl", "table:uniform", "--text", "-hello"], "given as --text=VALUE"),
    # twice
    ([*PPL, "--text", "three"], "--text is given twice"),
    ([*PPL, "--method", "gptq", "--method=gptq"], "--method gptq is given twice"),
    (["ppl", "table:uniform", "--corpus", "a.txt", "--corpus", "a.txt"], "--corpus a.txt is given twice"),
    (["ppl", "table:uniform", "--corpus", "a.txt", "b.txt"], "nothing takes the argument 'b.txt'; several files"),
    (["compare", "m", "n", "--corpus", "a.txt", "--corpus", "b.txt"], "compare asks one question"),
    # numbers
    ([*PPL, "--context-length", "0"], "--context-length 0 leaves no room for a target"),
    ([*PPL, "--context-length", "1" + "0" * 30], "is too large"),
    ([*PPL, "--stride", "0"], "--stride 0 never advances"),
    ([*PPL, "--max-windows", "-1"], "--max-windows -1 is negative"),
    *[
        ([*PPL, "--stride", n], f"'{n}' is not a whole number")
        for n in ("1e3", " 5", "5 ", "1_000", "٥", "0x10", "2.0")
    ],
    ([*PPL, "--worst", "-1"], "-1 is negative"),
    (["report", "run", "other", "--worst", "3"], "--worst is about one run"),
    *[
        ([*PPL, "--gpu-memory-utilization", n], f"'{n}' is not a number above 0 and up to 1")
        for n in ("nan", "inf", "0", "2", "90%")
    ],
    # nothing where something should be
    (["ppl", "table:uniform", "--text", ""], "--text is empty"),
    (["ppl", "", "--text", "one two"], "MODEL is empty"),
    (["ppl", "table:uniform", "--corpus", "python-docs", "--corpus", ""], "--corpus is empty"),
    (["info", "methods", ""], "METHOD is empty"),
    (["report", ""], "RUN is empty"),
    (["report", "run", "-o", ""], "--output is empty"),
    (["compare", "a", ""], "CANDIDATE is empty"),
    # values that do not exist
    ([*PPL, "--method", "gpqt"], "did you mean 'gptq'?"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(a)[:80] for a, _ in MISTAKES])
def test_a_mistake_is_named(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", sorted(COMMANDS.keys() - WITHOUT_JSON))
def test_no_verb_takes_a_shortened_flag(refused: Refused, verb: str) -> None:
    assert "did you mean --json?" in refused(verb, *["x"] * (verb != "info"), "--jso")


def test_an_argument_as_long_as_a_book_is_cut(refused: Refused) -> None:
    assert len(refused(*PPL, "x" * 100_000)) < 600


# ── --corpus and the model ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        Path(f"{name}.txt").write_text(f"text {name}")


MODEL = "table:uniform"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([MODEL, "--corpus", "a.txt"], "a.txt"),
        (["--corpus", "a.txt", MODEL], "a.txt"),
        (["--corpus=a.txt", MODEL], "a.txt"),
        (["--corpus", "[ab].txt", MODEL, "--stride", "9"], "[ab].txt"),
        (["--corpus", "a.txt", "--", MODEL], "a.txt"),
        (["--context-length", "9", MODEL, "--corpus", "a.txt"], "a.txt"),
        (["--corpus", "python-docs", MODEL], "python-docs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("texts")
def test_the_model_is_found_wherever_it_stands(command: Command, arguments: list[str], names: str) -> None:
    made = command("plan", "--json", *arguments).json
    assert (made["model"], made["corpus"]) == (MODEL, names)


def test_every_flag_that_takes_a_string_refuses_nothing(refused: Refused) -> None:
    """Found in the parser itself, so that a new flag is here from its first day."""
    checked = set()
    verbs = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    for verb, parser in verbs.items():
        positionals = ["x"] * sum(action.nargs != "?" for action in parser._get_positional_actions())
        for action in parser._actions:
            takes_a_string = action.nargs is None and action.type is None and action.choices is None
            if isinstance(action, RefusedSecret):
                continue  # no value is taken
            if action.option_strings and takes_a_string and action.dest not in MAY_BE_EMPTY:
                flag = action.option_strings[-1]
                assert f"{flag} is empty" in refused(verb, *positionals, f"{flag}=")
                checked.add(flag)
    assert {"--out", "--report", "--output", "--file", "--baseline-engine"} <= checked


OTHERS_FLAGS = {
    *("--no-deps", "--force-reinstall"),  # of pip
    *("--model", "--gen_kwargs", "--use_cache", "--model_args", "--apply_chat_template"),  # of lm-eval
    *("--logprobs-mode", "--hf-overrides", "--data-parallel-size", "--port"),  # of vllm serve
    "--kl-divergence-base",  # of llama-perplexity
}


def test_hints_name_flags_that_exist() -> None:
    """Every text of a refusal in the source: a flag in it is one of ours, and in a verb's own file one of that verb."""
    verbs = build_parser().verbs()
    known = {flag for verb in verbs.values() for flag in verb.flags()} | OTHERS_FLAGS
    wrong = []
    for path in sorted(Path(scoremode.__file__).parent.rglob("*.py")):
        verb = verbs.get(path.stem.replace("_", "-")) if path.parent.name == "cli" else None
        for text in refusals_in(path):
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z](?![a-z_-])", text))
            allowed = known if verb is None or verb.verb.passes_on or "scoremode " in text else verb.flags()
            wrong += [f"{path.name}: {flag} in {text!r}" for flag in flags - allowed]
    assert wrong == []


def refusals_in(path: Path) -> Iterator[str]:
    """The fixed texts of every ``fix=``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "fix":
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
