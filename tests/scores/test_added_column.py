"""A column that an engine declares itself arrives everywhere, and no file of scoremode names it.

After a kill, in Parquet, in JSON, in ``show``, through two replicas, through the service, and in the docs table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import scoremode as sm
from scoremode.engines.messages import Asked
from scoremode.errors import EngineError
from scoremode.plan.windows import WindowList
from scoremode.scores.answers import Answers
from scoremode.scores.schema import BUILT_IN, DIVERGENCE, FACTS, Column
from scoremode.store.runs import JOURNAL, MANIFEST, SCORES
from tests import forked
from tests.cluster.conftest import ROOT, plugged  # noqa: F401  # a fixture
from tests.engines.server.small_server import NAMES
from tests.scores.margins import DIES_AFTER, MARGIN, MarginEngine

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 32, "stride": 16}
pytestmark = pytest.mark.usefixtures("plugged")


@pytest.fixture(scope="module")
def expected() -> sm.Run:
    """What the engine gives in this process."""
    return sm.ppl("table:uniform", engine=MarginEngine((MARGIN,)), **QUESTION)


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-m", "scoremode", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def same(run: sm.Run, expected: sm.Run) -> None:
    assert run.scores.more.keys() == {"margin"}
    np.testing.assert_array_equal(run.scores.more["margin"], expected.scores.more["margin"])
    assert run.manifest["metrics"] == expected.manifest["metrics"]


def test_it_is_what_the_engine_computed(expected: sm.Run) -> None:
    margin = expected.scores.more["margin"]
    np.testing.assert_array_equal(margin, expected.scores.top_logprob - expected.scores.logprob)  # type: ignore[operator]
    assert expected.manifest["metrics"]["mean_margin"]["value"] == pytest.approx(margin.mean(), rel=1e-12)
    assert expected.scores.margin is margin  # type: ignore[attr-defined]  # as any other column
    assert np.concatenate([part for (part,) in expected.scores.blocks("margin")]).tolist() == margin.tolist()


def test_after_a_kill_in_parquet_in_json_and_in_show(expected: sm.Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "run"
    asked = ["ppl", "margins:a", "--corpus", str(tmp_path / "text.txt"), "--context-length", "32", "--stride", "16"]
    killed = command(*asked, "--out", str(out), **{DIES_AFTER: "3"})
    assert killed.returncode == -9
    assert b'"top_logprob", "margin"]' in (out / JOURNAL).read_bytes()
    done = command(*asked, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mean_margin"] == expected.manifest["metrics"]["mean_margin"]["value"]
    same(sm.load(out), expected)
    table = pq.read_table(out / SCORES)
    assert table["margin"].to_pylist() == expected.scores.more["margin"].tolist()
    assert sm.load(out).to_arrow().column_names == table.column_names
    line = next(line for line in command("show", str(out)).stdout.splitlines() if "margin" in line)
    assert line.split()[:3] == ["mean", "margin", "(nats)"]


def test_the_run_is_read_without_the_engine(expected: sm.Run, tmp_path: Path) -> None:
    """Its manifest says what the column is."""
    sm.ppl("margins:a", out=tmp_path / "run", **QUESTION)
    code = f"import scoremode as sm; print(sm.load({str(tmp_path / 'run')!r}).scores.more['margin'].sum())"
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**alone, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.strip() == str(expected.scores.more["margin"].sum()), found.stderr
    described = json.loads((tmp_path / "run" / MANIFEST).read_text())["columns"]
    assert [(column["name"], column["unit"]) for column in described] == [("margin", "nats")]


def test_where_the_engine_does_not_give_it_it_is_not_measured(tmp_path: Path) -> None:
    class Without(MarginEngine):
        def score(self, *given: Any) -> Iterator[tuple[int, Answers]]:
            for index, answers in super().score(*given):
                yield index, Answers(answers.logprob, answers.rank)

    run = sm.ppl("table:uniform", engine=Without((MARGIN,)), out=tmp_path / "run", **QUESTION)
    assert run.manifest["not_measured"] == ["entropy", "top", "top_logprob", "margin"]
    assert (run.scores.has("margin"), run.scores.has("rank"), run.scores.more) == (False, True, {})
    assert pq.read_table(tmp_path / "run" / SCORES)["margin"].null_count == len(run.scores)
    shown = command("show", str(tmp_path / "run")).stdout
    assert "not measured" in next(line for line in shown.splitlines() if "mean margin" in line)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"margin": -1.0}, "margin is -1"),
        ({"margin": np.nan}, "gives NaN"),
        ({"margin": 1.0, "other": 1.0}, "other was not declared"),
    ],
)
def test_its_values_are_checked_like_all_others(value: dict[str, float], said: str) -> None:
    class Wrong(MarginEngine):
        def score(self, *given: Any) -> Iterator[tuple[int, Answers]]:
            for index, answers in super().score(*given):
                more = {name: np.full(answers.logprob.shape, number) for name, number in value.items()}
                yield index, Answers(answers.logprob, more=more)

    with pytest.raises(EngineError, match=said):
        sm.ppl("table:uniform", engine=Wrong((MARGIN,)), **QUESTION)


@pytest.mark.parametrize("name", ["rank", "kl", "window", "Margin", "", "nll"])
def test_a_name_that_is_taken_or_impossible_is_refused(name: str) -> None:
    with pytest.raises(EngineError, match="declares the column"):
        BUILT_IN.extended([Column("float64", "what it means", name=name)])


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_through_two_replicas(expected: sm.Run) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    run = sm.ppl("margins:a", replicas=2, fresh=True, **QUESTION)
    assert run.manifest["replicas"]["wanted"] == 2
    same(run, expected)


# ── the service ──────────────────────────────────────────────────────────────────────────────────────────────────────
class StubScorer:
    """In place of vLLM, which computes only the built-in columns."""

    def __init__(self) -> None:
        from scoremode.service.requests import Limits

        self.engine = MarginEngine((MARGIN,))
        self.facts = replace(self.engine.facts, context_length=4096)
        self.limits, self.batch_tokens, self.probe = Limits(), 1024, [-1.0]
        self.client = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        )

    async def score(self, asked: Asked) -> list[Answers]:
        found = dict(self.engine.score(WindowList(asked.windows), np.zeros(len(asked.windows), np.bool_)))
        return [found[i] for i in range(len(found))]


@pytest.fixture
def service() -> Iterator[str]:
    """The service's own routes on a real port, and those of vLLM that a client needs."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs vLLM")
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    from scoremode.service.endpoint import ScoreService
    from scoremode.service.requests import Bodies

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "margins", "max_model_len": 4096}]})

    async def tokenize(request: Request) -> JSONResponse:
        ids = list((await request.json())["prompt"].encode())
        return JSONResponse({"tokens": ids, "count": len(ids), "token_strs": [NAMES[i] for i in ids]})

    app, made = Starlette(), ScoreService()
    made._scorer = StubScorer()  # type: ignore[assignment]
    made.bodies = Bodies(1 << 24, 1 << 24)
    made.prober = SimpleNamespace(token_texts=[chr(i) for i in range(256)])  # type: ignore[assignment]
    made.attach(app)
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/tokenize", tokenize, methods=["POST"])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    running = threading.Thread(target=server.run, daemon=True)
    running.start()
    until = time.monotonic() + 30
    while not server.started and time.monotonic() < until:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    running.join(10)


def test_through_the_service(service: str, expected: sm.Run) -> None:
    pytest.importorskip("httpx", reason="needs httpx")
    run = sm.ppl("margins", engine=service, fresh=True, **QUESTION)
    assert run.manifest["engine"] == "server"
    np.testing.assert_array_equal(run.scores.more["margin"], expected.scores.more["margin"])
    assert run.manifest["metrics"]["mean_margin"] == expected.manifest["metrics"]["mean_margin"]


def test_in_the_services_json(service: str) -> None:
    import urllib.request

    body = json.dumps({"windows": [{"ids": [1, 2, 3]}]}).encode()
    asked = urllib.request.Request(f"{service}/v1/scoremode/score", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as reply:
        (window,) = json.load(reply)["windows"]
    assert list(window) == [*BUILT_IN.names, "margin"]
    assert np.shape(window["margin"]) == np.shape(window["logprob"]) == (2, 1)


# ── the documentation ────────────────────────────────────────────────────────────────────────────────────────────────
def as_table(columns: Sequence[Column]) -> str:
    """Columns as a table, as docs/scores.md and docs/runs.md have it."""
    lines = [f"| `{column.name}` | {column.meaning} |" for column in columns]
    return "\n".join(["| column | meaning |", "|---|---|", *lines])


def test_the_tables_of_the_docs_are_those_of_the_schema() -> None:
    assert as_table(BUILT_IN.scores) in (ROOT / "docs" / "scores.md").read_text()
    assert as_table((*FACTS, *DIVERGENCE)) in (ROOT / "docs" / "runs.md").read_text()


def test_the_table_of_an_extended_schema_has_the_new_column() -> None:
    table = as_table(BUILT_IN.extended([MARGIN]).scores)
    assert table.splitlines()[-1] == "| `margin` | logprob of the first choice minus that of the target |"
