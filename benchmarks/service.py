"""The scoring service with N client processes against the engine in one process: same model, windows and options.

engine    VllmEngine in one process, as ``scoremode ppl --engine vllm`` uses it
service   ``scoremode serve`` and N processes that score a share of the windows each, as ``--engine http://…`` does

Each runs after the other on the same device; the first pass of each is not timed. The clients are connected before the
clock starts, and the time is that of the last one. The ratio of tokens per second must be at least 0.95 on a GPU.

    python benchmarks/service.py --shape llama-8b [--clients 8] [--context 2048] [--windows 128] [--repeat 3]
    python benchmarks/service.py --model FOLDER --flag=--max-num-seqs=64
    python benchmarks/service.py --shape tiny --dtype float32 --context 256 --windows 64 --clients 2     # anywhere
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    child_environment,
    child_result,
    last_error,
    own_windows,
    parsed_with_child,
    say,
    score_all,
    temporary_folder,
    write_config,
)
from vllm_engine import SHAPES

from scoremode.core.scores.answers import WindowList

TARGET = 0.95
SECONDS = 1500


def make_windows(vocabulary: int, context: int, count: int) -> WindowList:
    """Windows of random ids; every token but the first is a target."""
    return own_windows(np.random.default_rng(0).integers(3, vocabulary, (count, context)))


def score(engine: Any, windows: WindowList) -> float:
    """The mean log-probability, to show that both ways agree."""
    return float(np.mean([answers.logprob.mean() for answers in score_all(engine, windows)]))


# ── the engine in one process ────────────────────────────────────────────────────────────────────────────────────────
def run_engine(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """In a process of its own, which writes its result into a file."""
    words = [str(Path(__file__).resolve()), *asked.words, "--child", "engine", "--folder", str(folder)]
    result, why = child_result(words, folder, SECONDS)
    if result is None:
        raise SystemExit(f"the engine failed: {why}")
    return dict(result)


def be_engine(asked: argparse.Namespace) -> None:
    from scoremode.engines.vllm.engine import VllmEngine
    from scoremode.engines.vllm.support import LaunchArguments

    extra: dict[str, Any] = {} if asked.model else {"load_format": "dummy"}
    extra |= {name.replace("-", "_"): _value(value) for name, value in _flags(asked)}
    arguments = LaunchArguments.named(extra, head=asked.head, dtype=asked.dtype, max_model_len=asked.context)
    with VllmEngine(asked.model or asked.folder, arguments) as engine:
        assert engine.facts.vocabulary is not None
        windows = make_windows(engine.facts.vocabulary, asked.context, asked.windows)
        mean, seconds = score(engine, windows), []
        for _ in range(asked.repeat):
            began = time.perf_counter()
            score(engine, windows)
            seconds.append(time.perf_counter() - began)
        facts = {**engine.facts.settings, **engine.facts.versions, "device": engine.facts.device}
    Path(asked.result).write_text(json.dumps({"seconds": seconds, "mean_logprob": mean, "facts": facts}))


def _flags(asked: argparse.Namespace) -> list[tuple[str, str]]:
    split = [flag.removeprefix("--").partition("=") for flag in asked.flag]
    return [(name, value) for name, _, value in split]


def _value(text: str) -> Any:
    try:
        return json.loads(text) if text else True
    except ValueError:
        return text


# ── the service ──────────────────────────────────────────────────────────────────────────────────────────────────────
def start_server(asked: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "scoremode", "serve", asked.model or str(folder), "--head", asked.head]
    words += ["--served-model-name", asked.served_name, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--max-model-len", str(asked.context), "--disable-uvicorn-access-log"]
    words += [] if asked.model else ["--load-format", "dummy"]
    words += [] if asked.dtype is None else ["--dtype", asked.dtype]
    words += asked.flag
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(words, env=child_environment(), stdout=output, stderr=output, start_new_session=True)
    address, ends = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
    while time.monotonic() < ends and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return server, address
        except OSError:
            time.sleep(0.2)
    stop(server)
    raise SystemExit(f"the server did not start: {last_error(log)}")


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextmanager
def running(asked: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The address of a service that is stopped at the end."""
    began = time.monotonic()
    server, address = start_server(asked, folder)
    say(f"the server answers after {time.monotonic() - began:.0f} s")
    try:
        yield address
    finally:
        stop(server)


def be_client(address: str, asked: argparse.Namespace, number: int, gate: Any, results: Any) -> None:
    """Score every N-th window again and again, each time when all clients are ready."""
    from scoremode.core.engine.plugin import Work
    from scoremode.core.engine.registry import choose, open_engine

    chosen = choose(asked.served_name, address)
    engine = open_engine(chosen, Work(longest=asked.context))
    windows = make_windows(engine.facts.known_vocabulary, asked.context, asked.windows).items[number :: asked.clients]
    for _ in range(asked.repeat + 1):
        gate.wait(SECONDS)
        began = time.monotonic()  # the same clock in all processes
        mean = score(engine, WindowList(windows))
        results.put((began, time.monotonic(), mean, len(windows)))
    engine.close()


def next_result(results: Any, clients: list[Any]) -> Any:
    """What the next client has to say; an end if one of them has died."""
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if any(client.exitcode for client in clients):
                raise SystemExit("a client failed: its error is above") from None


def run_service(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with running(asked, folder) as address:
        spawn = multiprocessing.get_context("spawn")
        gate, results = spawn.Barrier(asked.clients), spawn.Queue()
        clients = [
            spawn.Process(target=be_client, args=(address, asked, number, gate, results), daemon=True)
            for number in range(asked.clients)
        ]
        for client in clients:
            client.start()
        seconds, mean = [], 0.0
        for _ in range(asked.repeat + 1):
            found = [next_result(results, clients) for _ in range(asked.clients)]
            seconds.append(max(end for _, end, _, _ in found) - min(began for began, _, _, _ in found))
            mean = sum(own * count for _, _, own, count in found) / sum(count for _, _, _, count in found)
        for client in clients:
            client.join(30)
    return {"seconds": seconds[1:], "mean_logprob": mean}


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def write_model(asked: argparse.Namespace) -> Path:
    """A folder with the shape's config, and a tokenizer that is there because a server wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = temporary_folder("service")
    if not asked.model:
        write_config(folder, SHAPES[asked.shape])
        backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return folder


def main(words: Sequence[str] | None = None) -> int:
    asked = parse(words)
    if asked.child:
        be_engine(asked)
        return 0
    folder = write_model(asked)
    tokens = asked.windows * asked.context
    say(f"{asked.windows} windows of {asked.context} tokens, {asked.clients} clients")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    service = run_service(asked, folder)
    say(f"service   {tokens / statistics.median(service['seconds']):12,.0f} tokens/s   {service['seconds']}")
    engine = run_engine(asked, folder)
    say(f"engine    {tokens / statistics.median(engine['seconds']):12,.0f} tokens/s   {engine['seconds']}")
    ratio = statistics.median(engine["seconds"]) / statistics.median(service["seconds"])
    same = abs(engine["mean_logprob"] - service["mean_logprob"]) < 1e-4
    say(f"service / engine  {ratio:.3f}, at least {TARGET} wanted: {'yes' if ratio >= TARGET else 'NO'}")
    means = f"{engine['mean_logprob']:.6f} and {service['mean_logprob']:.6f}"
    say(f"mean log-probability {means}: {'same' if same else 'NO'}")
    return 0 if same else 1


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--model", help="a folder with real weights, in place of a shape")
    parser.add_argument("--served-name", default="served", help="of the model, in the service")
    parser.add_argument("--dtype")
    parser.add_argument("--head", default="exact")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--flag", action="append", default=[], help="--flag=--NAME=VALUE: for both")
    return parsed_with_child(parser, words)


if __name__ == "__main__":
    raise SystemExit(main())
