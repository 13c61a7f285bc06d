"""Running out of memory: smaller batches, only missing windows are scored, and it stops. Starts no engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scoremode.core.scores.answers import Answers, Window, WindowList, WindowSource, measured
from scoremode.engines.table.engine import TableEngine
from scoremode.engines.vllm.engine import VllmEngine
from scoremode.engines.vllm.processes import VllmLog
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.engines.vllm.wire import ExtraResults, Request, Words
from scoremode.errors import EngineError
from scoremode.values import Bools

WORDS = "torch.OutOfMemoryError: CUDA out of memory."


class Starved(VllmEngine):
    """An engine that answers one window and dies, until its batches are small enough."""

    def __init__(self, log: Path, enough: int, words: str) -> None:
        self.options, self.llm = LaunchArguments(max_num_batched_tokens=2048), None
        self.written_to, self.enough, self.words = log, enough, words
        self.asked: list[int] = []
        self._has_answered = True
        self._begin()

    def _begin(self) -> None:
        self.log = VllmLog()
        self._batch_tokens = self.options.max_num_batched_tokens or 0

    def _stream(self, source: WindowSource, done: Bools, extra: ExtraResults) -> Iterator[tuple[int, Answers, Words]]:
        self.asked.append(int((~done).sum()))
        for index, answers in TableEngine(np.zeros((1, 9))).score(source, done):
            yield index, answers, np.zeros((len(measured(answers.entropy)), 0), np.int32)
            if self._batch_tokens > self.enough:
                self.written_to.write_text(self.words)
                raise EngineError("vLLM stopped")


def windows(count: int) -> WindowList:
    one = Window(np.array([1, 2], np.int32), np.array([0], np.int32), np.array([[2]], np.int32))
    return WindowList((one,) * count)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCOREMODE_VLLM_LOG", str(tmp_path / "v.log"))
    return tmp_path / "v.log"


def scores(engine: VllmEngine, source: WindowList) -> dict[int, Any]:
    return dict(engine.score(source, np.zeros(len(source), np.bool_)))


def test_batches_are_halved_and_only_what_is_missing_is_asked_again(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Starved(log, enough=512, words=WORDS)
    assert sorted(scores(engine, windows(5))) == [0, 1, 2, 3, 4]
    assert engine.asked == [5, 4, 3]
    assert engine.options.max_num_batched_tokens == 512
    assert capsys.readouterr().err.count("out of memory; restarting vLLM") == 2


@pytest.mark.parametrize(
    ("words", "asked", "smallest"), [(WORDS, [9, 8, 7, 6], 256), ("ValueError: something else", [9], 2048)]
)
def test_below_the_smallest_batch_it_gives_up_and_another_death_is_not_retried(
    log: Path, words: str, asked: list[int], smallest: int
) -> None:
    engine = Starved(log, enough=1, words=words)
    with pytest.raises(EngineError):
        scores(engine, windows(9))
    assert (engine.asked, engine.options.max_num_batched_tokens) == (asked, smallest)


def test_an_engine_that_is_found_dead_when_it_is_asked_is_one_line(log: Path) -> None:
    """The error may show up on the request or on the answer."""
    from vllm.v1.engine.exceptions import EngineDeadError

    def add_request(*_: Any) -> None:
        raise EngineDeadError

    engine = Starved(log, enough=1, words="")
    engine.llm, engine._asked = SimpleNamespace(llm_engine=SimpleNamespace(add_request=add_request)), 0
    with pytest.raises(EngineError, match=r"^vLLM stopped \(.+\); run the same command again to resume"):
        engine._submit(np.ones(2, np.int32), Request(np.zeros(1, np.int32), np.zeros((1, 1), np.int32)))
