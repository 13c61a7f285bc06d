"""What people of this field type without reading, and what they are answered: done, or the one thing to type."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from scoremode.cli import other_tools
from scoremode.cli.commands import COMMANDS, build_parser, verb_of
from tests.command_line import Command, Refused

CHAT = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'
M = "table:uniform"


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "wiki.test.raw": "one two three four",
        "empty.txt": "",
        "zh.txt": "你好世界",
        "chat.jsonl": CHAT,
        "x.bin": "x",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    for name in ("q/a.gguf", "q/b.gguf", "bare/model.safetensors"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("")


REFUSED = {
    # flags of llama.cpp, lm-eval, ExLlamaV3, mlx-lm, vLLM
    f"ppl {M} -f t.raw -c 512 -ngl 99": f"type scoremode ppl {M} -f t.raw -c 512 --n-gpu-layers 99;",
    "ppl -m x.gguf": "-m is MODEL here; type scoremode ppl x.gguf;",
    "ppl x.gguf -fa on -ctk q8_0": "type scoremode ppl x.gguf --flash-attn on --cache-type-k q8_0;",
    f"ppl {M} --chunks=2": f"type scoremode ppl {M} --max-windows=2;",
    f"ppl {M} --ctx-size 512": f"type scoremode ppl {M} --context-length 512;",
    f"ppl {M} --batch_size 8": "--batch_size is --n-batch here;",
    "ppl --model x": "type scoremode ppl x;",
    f"ppl {M} --ctx 512 --limit 5 --tp 2": "--context-length 512 --num-samples 5 --tensor-parallel-size 2;",
    f"ppl {M} -r 20 -l 1024": f"type scoremode ppl {M} --max-windows 20 --context-length 1024;",
    "ppl -m x -f t --kl-divergence --kl-divergence-base b.kld": "scoremode compare FILE MODEL gives the divergence",
    "ppl --model hf --model_args pretrained=x --tasks wikitext": "tasks are run by scoremode lm-eval",
    "rollouts x -f prompts.jsonl -m y": "-m is MODEL here",
    f"ppl {M} -n 5": "there is no flag -n; see",
    "serve x -q awq -tp 2": "there is no model or folder 'x'",  # both go to vLLM
    "compare a b -o page.html": "page.html is the name of a page",
    f"ppl {M} -of": "there is no flag -of;",
    # verbs
    "perplexity -m x.gguf -f t.raw": "'perplexity'; -m is MODEL here; type scoremode ppl x.gguf -f t.raw",
    "perplexity": "type scoremode ppl smollm2-135m",
    "kld a b": "there is no command 'kld'; type scoremode compare a b",
    "diff a b": "type scoremode compare a b",
    "bench": "did you mean ppl or compare?",
    "eval": "did you mean ppl or lm-eval?",
    # models
    "ppl gpt2": "names on the Hugging Face hub are OWNER/NAME, as in openai-community/gpt2",
    "ppl http://localhost:8080": "give the model's name there, and --engine http://localhost:8080",
    "ppl https://huggingface.co/openai-community/gpt2": "its name is openai-community/gpt2",
    "ppl a.gguf wiki.test.raw": "a text is given as --corpus wiki.test.raw",
    f"ppl {M} wikitext2": "a text is given as --corpus wikitext2",
    "ppl a b.gguf": "one model is scored; scoremode compare BASELINE CANDIDATE … takes several",
    "ppl q/a.gguf q/b.gguf": "one model is scored;",
    "ppl 'q/*.gguf'": "name one; scoremode compare BASELINE 'q/*.gguf' takes several",
    "ppl q": "name one: q/a.gguf",
    f"compare {M} wiki.test.raw": "a text is given with --corpus",
    f"prob {M} 'France is' ' Paris'": '--prompt "1 + 1 =" --target " 2"',
    "ppl bare": "the folder bare has no config.json",
    "ppl x.bin": "x.bin is a file",
    # values
    f"compare {M} {M} --text ab --fail-if 'kl > 0.02'": "did you mean 'kl_mean'?",
    "ppl q/a.gguf --text ab --dtype fp16": "--dtype does not apply to the llamacpp engine",
    f"ppl {M} --dataset wikitext2": "give --corpus wikitext2",
    f"ppl {M} --dataset wiki.test.raw": "give --corpus wiki.test.raw",
    f"ppl {M} -f empty.txt": "empty.txt is empty; give a file with text in it",
    f"ppl {M} --text a": "two tokens",
    f"ppl {M} --text ab --context-length 0": "--context-length 0",
}
DONE = {
    f"ppl {M} -f wiki.test.raw -c 8 -q -o kept": "wiki.test.raw",
    f"ppl {M} -f zh.txt -v": "zh.txt",
    f"compare {M} {M} --text 'one two' --json": '"verdict"',
    "help": "usage: scoremode [-h]",
    "help ppl": "-f, --corpus TEXT",
    "version": "scoremode ",
    "--version": "scoremode ",
    "ppl -h": "-c, --context-length N",
    # notes
    f"plan {M} -f chat.jsonl": "18 of 25 targets are the chat template's; --assistant-only scores",
    f"prob {M} --prompt 'France is' --target Paris": "reads 'isParis': after a word",
}
SILENT = {
    f"plan {M} -f chat.jsonl --assistant-only": "--assistant-only",
    f"prob {M} --prompt 'France is' --target ' Paris' --target ' 2'": "reads",
    f"prob {M} --prompt '法国首都是' --target '巴黎'": "reads",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_done_is_answered_with_what_to_type(refused: Refused, typed: str) -> None:
    answer = refused(*shlex.split(typed))
    assert REFUSED[typed] in answer
    assert len(re.findall(r"did you mean (.*)", answer)) <= 1
    assert answer.count("…") <= 1


@pytest.mark.parametrize("typed", DONE)
def test_what_is_understood_is_done(command: Command, typed: str) -> None:
    outcome = command(*shlex.split(typed))
    assert (outcome.code, DONE[typed] in " ".join(outcome.out.split())) == (0, True), outcome


@pytest.mark.parametrize("typed", SILENT)
def test_notes_are_for_those_who_need_them(command: Command, typed: str) -> None:
    outcome = command(*shlex.split(typed))
    assert (outcome.code, SILENT[typed] in outcome.out) == (0, False), outcome


def test_the_table_names_what_there_is_and_no_verb_of_ours() -> None:
    verbs = build_parser().verbs()
    everything = {"MODEL", *verbs}.union(*(verb.flags() for verb in verbs.values()))
    named = [word for ours in other_tools.FLAGS for word in other_tools.NAMED.findall(ours) or [ours]]
    assert [word for word in named if word not in everything and " " not in word] == []
    assert {verb for ours in other_tools.VERBS.values() for verb in ours.split()} <= COMMANDS.keys()
    assert not other_tools.VERBS.keys() & COMMANDS.keys()


def test_at_most_two_flags_are_guessed_for_any_prefix(refused: Refused) -> None:
    for prefix in ("--c", "--m", "--no", "--k", "--max", "--cache", "--t"):
        answer = refused("ppl", M, prefix)
        assert len(re.findall(r"--[\w-]+", answer.removesuffix("see scoremode ppl --help"))) <= 3, answer


@pytest.mark.parametrize("verb", [name for name in COMMANDS if not verb_of(name).passes_all_on])
def test_a_short_flag_means_the_same_everywhere(verb: str) -> None:
    meant = {"-f": {"corpus", "file", "prompts"}, "-c": {"context_length"}, "-o": {"out", "output"}}
    meant |= {"-q": {"quiet"}, "-v": {"verbose"}, "-h": {"help"}}
    actions: list[argparse.Action] = build_parser(verb).verbs()[verb]._actions
    short = {flag: action.dest for action in actions for flag in action.option_strings if len(flag) == 2}
    assert all(dest in meant[flag] for flag, dest in short.items())
    assert ({"-q", "-v"} <= short.keys()) == (verb != "serve")


# ── standard input ───────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def standard_input(kind: str) -> Iterator[None]:
    """Descriptor 0 is of a kind, with or without text in it."""
    reader, writer = (end.detach() for end in socket.socketpair()) if "socket" in kind else os.pipe()
    if "file" in kind or kind == "null":
        os.close(reader)
        reader = os.open("empty.txt" if "empty" in kind else os.devnull if kind == "null" else "zh.txt", os.O_RDONLY)
    if "read" in kind:
        os.lseek(reader, 0, os.SEEK_END)
    if "text" in kind:
        os.write(writer, b"a text")
    if "ended" in kind:
        os.close(writer)
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        for descriptor in (before, reader, *([] if "ended" in kind else [writer])):
            os.close(descriptor)


WITH_TEXT = ["pipe, text", "pipe, text, ended", "socket, text", "file"]


@pytest.mark.parametrize("kind", WITH_TEXT)
def test_a_text_that_waits_is_refused_where_none_is_named_and_never_ignored(
    command: Command, refused: Refused, kind: str
) -> None:
    with standard_input(kind):
        for verb in (f"ppl {M}", f"plan {M}", f"compare {M} {M}", f"paths {M}", f"reference {M} -o r"):
            assert "give --corpus - to score it, or add < /dev/null" in refused(*verb.split())
        for typed in (f"plan {M} --text ab", f"prob {M} --prompt x --target y", f"compare {M} {M} --text ab"):
            outcome = command(*typed.split())
            assert (outcome.code, outcome.err.count("\n")) == (0, 1)
            assert "nothing read the text on standard input" in outcome.err
        assert command("info", "methods").err == ""


@pytest.mark.parametrize(
    "kind", ["null", "pipe", "pipe, ended", "socket", "socket, ended", "file, empty", "file, read"]
)
def test_where_no_text_waits_nothing_is_said_and_nothing_is_waited_for(command: Command, kind: str) -> None:
    with standard_input(kind):
        outcome = command("plan", M)
    assert (outcome.code, outcome.err) == (0, "")
    assert "the default text" in outcome.out
