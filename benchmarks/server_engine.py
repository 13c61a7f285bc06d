"""The server engine against a plain loop of the same requests to the same running server, in one process.

plain   asyncio and httpx, as a load test does it: send the request, read the answer, parse its JSON, look at nothing
ours    the engine: bounded threads, every position checked, the server compared with what it was

The two take turns, and change places in every repeat. The ratio is that of the median times; it must be at least 0.90.

    python benchmarks/server_engine.py --url http://localhost:8000 --model NAME [--context 2048] [--windows 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import httpx
import numpy as np
from common import own_windows, score_all

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.scores.answers import WindowList
from scoremode.engines.server.engine import ServerEngine

TARGET = 0.90


def ours(engine: ServerEngine, windows: WindowList) -> float:
    """Seconds of one pass."""
    began = time.perf_counter()
    score_all(engine, windows)
    return time.perf_counter() - began


def plain(engine: ServerEngine, windows: WindowList) -> float:
    """Seconds of one pass of the same requests."""
    subject, form = engine.subject, engine.form
    bodies = [json.dumps(form.body(subject.served.model, window.ids.tolist(), 0)).encode() for window in windows.items]
    return asyncio.run(_plain(f"{subject.root}{form.path}", bodies, engine.concurrency))


async def _plain(url: str, bodies: list[bytes], concurrency: int) -> float:
    room = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(timeout=3600, limits=limits) as client:

        async def one(body: bytes) -> int:
            async with room:
                answer = await client.post(url, content=body, headers={"Content-Type": "application/json"})
                answer.raise_for_status()
                return len(answer.json())

        began = time.perf_counter()
        await asyncio.gather(*map(one, bodies))
        return time.perf_counter() - began


def measure(given: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of both ways."""
    from scoremode.core.text.corpus import load

    context, windows = given.context, given.windows
    chosen = choose(given.model, given.url, {"concurrency": given.concurrency}, given.tokenizer)
    text = "\n\n".join(load("python-docs").texts())[: 8 * context * windows]
    ids = chosen.subject.tokenizer.encode(text, special=False).ids
    made = own_windows(np.resize(ids, (windows, context)))  # a short text repeats
    engine = open_engine(chosen, Work(longest=context))
    assert isinstance(engine, ServerEngine)
    ways: dict[str, Callable[[ServerEngine, WindowList], float]] = {"plain": plain, "ours": ours}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    plain(engine, WindowList(made.items[: max(1, windows // 8)]))  # the server's first prompts may be slower
    try:
        for number in range(given.repeat):
            for name in sorted(ways, reverse=number % 2 == 0):
                seconds[name].append(ways[name](engine, made))
    finally:
        engine.close()
    return {name: context * windows / statistics.median(times) for name, times in seconds.items()}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args(words)
    speeds = measure(given)
    for name, speed in speeds.items():
        print(f"{name:<6} {speed:>12,.1f} tokens/s")
    ratio = speeds["ours"] / speeds["plain"]
    print(f"ratio  {ratio:>12.3f}   (at least {TARGET:.2f})")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
