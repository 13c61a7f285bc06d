"""A real service against the engine in one process: the same bits; many clients; and what it must refuse."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.base import Wanted
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose
from scoremode.core.scores.answers import Answers, Window, WindowList, WindowSource
from scoremode.core.scores.messages import CONTENT_TYPE, Asked
from scoremode.core.scores.schema import BUILT_IN
from scoremode.engines.server.engine import ServiceEngine
from scoremode.engines.server.subject import ServedSubject
from scoremode.engines.vllm.engine import VllmEngine
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.errors import EngineError, OptionError
from tests import rounding
from tests.remote.service.conftest import KEY, ServedModel

TEXT = "the cat sat on the mat and the dog ran to the park with the cat " * 30
SCORE = "/v1/scoremode/score"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", KEY)


@pytest.fixture(scope="module")
def in_process(small_llama: Path) -> Iterator[VllmEngine]:
    """The same model in this process, one window at a time: then no window shares a batch."""
    with VllmEngine(str(small_llama), LaunchArguments(max_model_len=256, prefix_caching=True)) as engine:
        engine._one_by_one = True
        yield engine


def subject_of(served: ServedModel, tokenizer: Path | None = None) -> ServedSubject:
    chosen = choose("llama", served.address, {"api_key_env": "SERVICE_KEY"}, str(tokenizer) if tokenizer else None)
    assert isinstance(chosen.subject, ServedSubject)
    return chosen.subject


def engine_of(served: ServedModel, *, alone: bool = False) -> ServiceEngine:
    """The client's engine; ``alone``: one window a request, one request at a time."""
    subject = subject_of(served)
    assert subject.service is not None
    return (
        ServiceEngine(subject, replace(subject.service, limits=replace(subject.service.limits, windows=1)), 1)
        if alone
        else ServiceEngine(subject, subject.service, None)
    )


def scored(engine: Any, source: WindowSource, want: Wanted | None = None) -> list[Answers]:
    done = np.zeros(len(source), np.bool_)
    found = dict(engine.score(source, done, want) if want else engine.score(source, done))
    assert sorted(found) == list(range(len(source))), "each window exactly once"
    return [found[i] for i in range(len(source))]


def windows() -> tuple[Window, ...]:
    random = np.random.default_rng(0)
    made = []
    for length in (256, 33, 7, 2, 200):
        ids = random.integers(3, 300, length).astype(np.int32)
        made.append(Window(ids, np.arange(length - 1, dtype=np.int32), ids[1:, None]))
    ids = random.integers(3, 300, 60).astype(np.int32)
    some = np.array([0, 9, 59], np.int32)
    made.append(Window(ids, some, random.integers(0, 1003, (3, 4)).astype(np.int32)))
    made.append(Window(ids, np.zeros(0, np.int32), np.zeros((0, 1), np.int32)))
    return tuple(made)


def assert_same_bits(found: list[Answers], wanted: list[Answers]) -> None:
    for a, b in zip(found, wanted, strict=True):
        for name in BUILT_IN.names:
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None)
            if x is not None:
                np.testing.assert_array_equal(x, y, err_msg=name)


# ── the same bits ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_scores_have_the_same_bits_as_in_one_process(served: ServedModel, in_process: VllmEngine) -> None:
    for vocabulary in (None, 311):
        source = WindowList(windows(), vocabulary=vocabulary)
        assert_same_bits(scored(engine_of(served, alone=True), source), scored(in_process, source))


def test_the_same_batch_gives_the_same_bits_and_another_one_moves_the_last_digits(
    served: ServedModel, in_process: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with their defaults. One window is one batch; of several, vLLM's timing decides which share one."""
    monkeypatch.setattr(in_process, "_one_by_one", False)
    for window in windows()[:3]:
        source = WindowList((window,))
        assert_same_bits(scored(engine_of(served), source), scored(in_process, source))
    source = WindowList(windows())
    for found, wanted in zip(scored(engine_of(served), source), scored(in_process, source), strict=True):
        np.testing.assert_allclose(found.logprob, wanted.logprob, rtol=0, atol=rounding.of_checkpoint(served.model))


def test_shared_prompts_have_the_same_bits(served: ServedModel, in_process: VllmEngine) -> None:
    random = np.random.default_rng(5)
    prompt = random.integers(3, 300, 150).astype(np.int32)
    made = []
    for length in (3, 9, 40):
        ids = np.concatenate([prompt, random.integers(3, 300, length).astype(np.int32)])
        rows = np.arange(149, len(ids) - 1, dtype=np.int32)
        made.append(Window(ids, rows, ids[rows + 1][:, None]))
    source = WindowList(tuple(made), prefix_group=np.zeros(3, np.int64))
    ours = scored(engine_of(served, alone=True), source)
    theirs = scored(in_process, source)
    assert in_process.cached_tokens > 0, "the prompt was in the cache, and missing rows were asked for again"
    assert_same_bits(ours, theirs)


def test_perplexity_is_that_of_one_process_and_loads_nothing_heavy(served: ServedModel, in_process: VllmEngine) -> None:
    """Both with every window in any batch; and the client's process has no torch in it."""
    code = (
        "import sys, json, scoremode as sm\n"
        f"asked = dict(text={TEXT!r}, context_length=256, api_key_env='SERVICE_KEY')\n"
        f"run = sm.ppl('llama', engine={served.address!r}, **asked)\n"
        "heavy = [n for n in ('torch', 'transformers', 'vllm', 'pandas') if n in sys.modules]\n"
        "facts = [run.manifest['engine_settings']['form'], run.manifest['head']]\n"
        "print(json.dumps([heavy, run.scores.logprob.tolist(), *facts]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    heavy, logprob, form, head = json.loads(done.stdout)
    assert heavy == []
    assert (form, head) == ("service", "exact-fp32")
    local = sm.ppl(str(served.model), engine=in_process, text=TEXT, context_length=256)
    np.testing.assert_allclose(logprob, local.scores.logprob, rtol=0, atol=rounding.of_checkpoint(served.model))


# ── the routes ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_json_gives_the_numbers_of_the_binary_form(served: ServedModel) -> None:
    ids = [5, 9, 200, 17, 4]
    window = Window(np.array(ids, np.int32), np.arange(4, dtype=np.int32), np.array(ids[1:], np.int32)[:, None])
    (wanted,) = scored(engine_of(served, alone=True), WindowList((window,)))
    status, told = served.ask(SCORE, json.dumps({"windows": [{"ids": ids}]}).encode())
    assert status == 200
    (found,) = told["windows"]
    for name in BUILT_IN.names:
        np.testing.assert_array_equal(np.array(found[name]), getattr(wanted, name), err_msg=name)
    body = {"windows": [{"ids": ids, "rows": [1, 3], "targets": [[7, 8], [9, 10]]}], "vocabulary": 311}
    status, told = served.ask(SCORE, json.dumps(body).encode())
    assert (status, np.shape(told["windows"][0]["logprob"])) == (200, (2, 2))


def test_prob_is_that_of_a_client(served: ServedModel) -> None:
    for prompt, targets in (("the cat sat on", [" the mat", " the dog"]), ("the cat sat on the ma", ["t and the dog"])):
        status, told = served.ask("/v1/scoremode/prob", json.dumps({"prompt": prompt, "targets": targets}).encode())
        assert status == 200, told
        ours = sm.prob(
            "llama",
            engine=served.address,
            tokenizer=str(served.model),
            api_key_env="SERVICE_KEY",
            prompt=prompt,
            targets=targets,
        )
        for a, b in zip(told["results"], ours, strict=True):
            assert a["boundary"] == b.boundary
            assert a["log_prob"] == pytest.approx(b.log_prob, abs=1e-4)
            assert [t["rank"] for t in a["tokens"]] == [t.rank for t in b.tokens]


def test_every_token_has_the_text_that_its_tokenizer_gives(served: ServedModel) -> None:
    from scoremode.core.text.tokenizer import HuggingFaceTokenizer

    status, told = served.ask("/v1/scoremode/tokens")
    local = HuggingFaceTokenizer.load(served.model)
    assert (status, len(told["texts"])) == (200, 1003)
    assert told["texts"][: local.facts.size] == [local.token_text(i) for i in range(local.facts.size)]
    tokenizer = subject_of(served).tokenizer
    assert [tokenizer.token_text(i) for i in (5, 100, 1002)] == [told["texts"][i] for i in (5, 100, 1002)]


def test_the_key_is_wanted_and_shown_nowhere(served: ServedModel) -> None:
    assert served.ask("/health", Authorization="none")[0] == 200
    ours = ("/v1/scoremode", SCORE, "/v1/scoremode/prob")
    for path in (*ours, "/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/load", "/nothing"):
        assert served.ask(path, Authorization="Bearer wrong")[0] == 401
    for path in ("/pooling", "/tokenize", "/detokenize", "/classify", "/invocations"):
        assert served.ask(path, b"{}", Authorization="Bearer wrong")[0] == 401
        assert served.ask(path, b"{}")[0] != 401
    assert served.process is not None
    assert KEY not in Path(f"/proc/{served.process.pid}/cmdline").read_text()
    with pytest.raises(OptionError, match="wants a key"):
        sm.ppl("llama", engine=served.address, text=TEXT)
    assert "scoremode: starting" in served.said()
    assert "scoremode: the server is ready" in served.said()
    assert KEY not in served.said()


def message(*made: Window, **changes: Any) -> bytes:
    return msgspec.structs.replace(Asked(made), **changes).to_bytes()


def bad_window(ids: Any = (5, 6, 7), rows: Any = (0, 1), targets: Any = ((6,), (7,))) -> bytes:
    shaped = np.array(targets, np.int32).reshape(len(rows), -1) if len(rows) else np.zeros((0, 1), np.int32)
    return message(Window(np.array(ids, np.int32), np.array(rows, np.int32), shaped))


ONE = Window(np.array([5, 6], np.int32), np.array([0], np.int32), np.array([[6]], np.int32))
JSON = "application/json"
BAD: dict[str, tuple[str, bytes, str, int, str]] = {
    "no window": (SCORE, message(), CONTENT_TYPE, 400, "no window"),
    "JSON too large": (SCORE, b'{"windows": [' + b" " * (5 << 20) + b"]}", "application/json", 413, "bytes of JSON"),
    "too many windows": (SCORE, message(*[ONE] * 1025), CONTENT_TYPE, 413, "1025 windows"),
    "too long": (SCORE, bad_window(ids=[5] * 257), CONTENT_TYPE, 400, "257 tokens"),
    "id too large": (SCORE, bad_window(ids=[5, 1003, 7]), CONTENT_TYPE, 400, "ids of window 0"),
    "target too large": (SCORE, bad_window(targets=[[6], [1 << 30]]), CONTENT_TYPE, 400, "targets of window 0"),
    "rows not ascending": (SCORE, bad_window(rows=[1, 0]), CONTENT_TYPE, 400, "do not ascend"),
    "too many targets": (SCORE, bad_window(targets=np.zeros((2, 200_000))), CONTENT_TYPE, 413, "400000 targets"),
    "large vocabulary": (SCORE, message(ONE, vocabulary=2000), CONTENT_TYPE, 400, "vocabulary of 2000"),
    "not JSON": (SCORE, b"{", JSON, 400, "not JSON"),
    "a float": (SCORE, b'{"windows": [{"ids": [1.5]}]}', JSON, 400, "got `float` - at `$.windows[0].ids[0]`"),
    "an unknown field": (SCORE, b'{"windows": [], "file": "/etc/passwd"}', JSON, 400, "unknown field `file`"),
    "uneven targets": (SCORE, b'{"windows": [{"ids": [1, 2], "targets": [[1], [1, 2]]}]}', JSON, 400, "all as long"),
    "another type": (SCORE, b"x", "application/x-pickle", 415, "Content-Type"),
    "prob without targets": ("/v1/scoremode/prob", b'{"prompt": "a"}', JSON, 400, "missing required field `targets`"),
    "an empty target": ("/v1/scoremode/prob", b'{"prompt": "a", "targets": [""]}', JSON, 400, "a target is empty"),
    "unpaired": ("/v1/scoremode/prob", b'{"prompt": ["a", "b"], "targets": ["c"]}', JSON, 400, "do not pair up"),
    "long prompt": (
        "/v1/scoremode/prob", json.dumps({"prompt": TEXT, "targets": "b"}).encode(), JSON, 400, "more than the model",
    ),
    "an unknown rule": (
        "/v1/scoremode/prob", b'{"prompt": "a", "targets": "b", "spanning": "x"}', JSON, 400, "--spanning x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_harms_nobody(served: ServedModel, name: str) -> None:
    path, body, kind, wanted, words = BAD[name]
    status, told = served.ask(path, body, kind)
    assert status == wanted, told
    line = told["error"]["message"]
    assert words in line
    assert "\n" not in line
    status, _ = served.ask(SCORE, message(ONE), CONTENT_TYPE)
    assert status == 200, "it still answers"


def test_a_huge_body_is_refused_before_it_is_read(served: ServedModel) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as door:
        door.sendall(
            f"POST {SCORE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Length: {1 << 40}\r\n\r\n".encode()
        )
        assert b"413" in door.recv(100)


# ── several clients ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_two_clients_at_once(served: ServedModel) -> None:
    source = WindowList(windows() * 4)
    alone = scored(engine_of(served, alone=True), WindowList(windows()))
    found: dict[int, list[Answers]] = {}
    clients = [
        threading.Thread(target=lambda i=i: found.update({i: scored(engine_of(served), source)})) for i in range(2)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for i in range(2):
        for a, b in zip(found[i], alone * 4, strict=True):
            np.testing.assert_allclose(a.logprob, b.logprob, rtol=0, atol=rounding.of_checkpoint(served.model))
            assert a.entropy is not None


# ── what the client's engine refuses ─────────────────────────────────────────────────────────────────────────────────
def test_what_a_service_cannot_give(served: ServedModel, tmp_path: Path) -> None:
    engine = engine_of(served)
    with pytest.raises(EngineError, match="no hidden states, whole distributions or KL"):
        scored(engine, WindowList(windows()), Wanted(states=True))
    long = Window(np.full(257, 5, np.int32), np.zeros(1, np.int32), np.full((1, 1), 5, np.int32))
    with pytest.raises(sm.ScoremodeError, match="give --context-length 256"):
        scored(engine, WindowList((long,)))
    with pytest.raises(EngineError, match="cannot give the hidden states"):
        sm.reference("llama", tmp_path / "ref", engine=served.address, text=TEXT, api_key_env="SERVICE_KEY")
    sm.reference("table:uniform", tmp_path / "kept", text=TEXT)
    with pytest.raises(EngineError, match="cannot be compared with a baseline; use --engine transformers or"):
        sm.compare(str(tmp_path / "kept"), "llama", engine=served.address, api_key_env="SERVICE_KEY")


def test_the_engine_opens_without_asking_for_scores(served: ServedModel) -> None:
    chosen = choose("llama", served.address, {"api_key_env": "SERVICE_KEY"})
    assert chosen.plugin.able().entropy
    engine = chosen.plugin.open(chosen.subject, chosen.options, Work())
    assert engine.facts.vocabulary == 1003
    assert engine.facts.settings["head_kernel"]
    assert "verysecret" not in json.dumps(chosen.settings())


def test_weights_that_are_cut_are_one_line(small_llama: Path, tmp_path: Path) -> None:
    """vLLM sees that only when its engine loads them."""
    shutil.copytree(small_llama, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    server = ServedModel(tmp_path / "cut", tmp_path)
    with pytest.raises(AssertionError, match="did not start"):
        server.start()
    assert server.process is not None
    assert server.process.returncode == 2
    lines = server.said().splitlines()
    assert all(line.startswith("scoremode: ") for line in lines), lines
    assert "scoremode: the server ended (SafetensorError" in lines[-1]
    assert "its log is" in lines[-1]


def test_ctrl_c_ends_all_of_it(served: ServedModel) -> None:
    """The last test of this file: it stops the server."""
    group = served.process.pid if served.process else 0
    served.interrupt()
    ends = time.monotonic() + 120
    alive = True
    while alive and time.monotonic() < ends:
        alive = subprocess.run(["pgrep", "-g", str(group)], capture_output=True, check=False).returncode == 0
        time.sleep(0.1)
    assert not alive
