"""A scoring service that lies: a table whose every column is known, and what is done to it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from scoremode.core.scores.answers import Answers, Window, WindowList, check_answers, own_tokens
from scoremode.core.scores.messages import answer_message
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.engines.server.engine import ServiceEngine
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import SERVICE as ROOT
from scoremode.engines.server.served import ServerFacts, find_service
from scoremode.engines.server.server_options import ServerOptions
from scoremode.engines.server.subject import ComparedTokenizer, ServedSubject
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError
from scoremode.values import Floats
from tests.engines.judging import random_windows, scored
from tests.engines.server.small_server import SmallServer, sharp_logits
from tests.engines.server.test_hostile_server import SERVICE

Change = Callable[[Window, Any], Answers]
TABLE, OTHER = (TableEngine(sharp_logits(seed)).logprobs for seed in (0, 1))
NUMBER = count()


def answer(window: Window, table: Floats = TABLE) -> Answers:
    rows = table[window.ids[window.rows]]
    own = np.take_along_axis(rows, window.targets.astype(int), -1)
    return Answers(
        logprob=own,
        rank=1 + (rows[:, None] > own[:, :, None]).sum(-1),
        entropy=-(np.exp(rows) * rows).sum(-1),
        top=rows.argmax(-1).astype(np.int32),
        top_logprob=rows.max(-1),
    )


def scaled(found: Answers, x: float) -> Answers:
    assert found.top_logprob is not None
    return replace(found, logprob=found.logprob * x, top_logprob=found.top_logprob * x)


def wrong_top(window: Window, found: Answers) -> Answers:
    assert found.top is not None
    return replace(found, top=(found.top + 1) % 256)


LIES: dict[str, tuple[Change, str]] = {
    "rank 1 for every target": (lambda w, a: replace(a, rank=np.ones_like(a.rank)), "has rank 1, and the first choice"),
    "a wrong first choice": (wrong_top, "and the first choice is"),
    "×2": (lambda w, a: replace(a, logprob=a.logprob * 2), "an entropy of"),
    "×1.1, the first choice too": (lambda w, a: scaled(a, 1.1), "an entropy of"),
    "×0.9, the first choice too": (lambda w, a: scaled(a, 0.9), "an entropy of"),
    "shifted": (lambda w, a: replace(a, logprob=np.roll(a.logprob, 1, 0)), "with the last token|tokens that follow"),
    "-1e300": (lambda w, a: replace(a, logprob=a.logprob * 0 - 1e300), "an entropy of"),
    "half of the entropy": (lambda w, a: replace(a, entropy=a.entropy / 2), "an entropy of"),
    "ranks of others": (lambda w, a: replace(a, rank=np.maximum(2, 258 - a.rank)), "and the first choice|ranks"),
    "another table in long windows": (lambda w, a: answer(w, OTHER) if len(w.ids) > 50 else a, "tokens that follow"),
    "another table in each fifth answer": (
        lambda w, a: answer(w, OTHER) if next(NUMBER) % 5 == 0 else a,
        "tokens that follow|when it is sent|last token",
    ),
}


@pytest.fixture
def served() -> Iterator[SmallServer]:
    with SmallServer(more={ROOT: {**SERVICE, "settings": {}}}) as server:
        yield server


def score(server: SmallServer, change: Change) -> tuple[ServiceEngine, list[tuple[int, Answers]]]:
    server.answers_of = lambda windows: answer_message("a", [change(window, answer(window)) for window in windows])
    facts = find_service(Link(server.address, None, timeout=5, patience=1))
    assert facts is not None
    tokenizer: Any = ComparedTokenizer(ByteTokenizer(), Namespace(exists=False))  # type: ignore[arg-type]
    subject = ServedSubject(
        name="m", tokenizer=tokenizer, fingerprint="f", root=server.address, options=ServerOptions(), form=None,
        served=ServerFacts("m", None, 600, None, None), service=facts,
    )  # fmt: skip
    source = random_windows(*[60] * 20, vocabulary=256)
    engine = ServiceEngine(subject, facts, 2)
    try:
        answers = list(scored(engine, source).items())
        check_answers(source, answers, 256)
        return engine, answers
    finally:
        engine.close()


def test_an_honest_service_is_believed(served: SmallServer) -> None:
    engine, answers = score(served, lambda window, honest: honest)
    assert len(answers) == 20
    assert not [note for note in engine.account()["notes"] if "proven" in note]


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused(served: SmallServer, name: str) -> None:
    change, says = LIES[name]
    with pytest.raises(EngineError, match=says):
        score(served, change)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"logprob": -3.0, "rank": 1}, "logprob is -3 at rank 1, and top logprob -1"),
        ({"logprob": -1e300, "rank": 4}, r"logprob is -1e\+300"),
        ({"logprob": -np.inf, "rank": 4}, ""),
        ({"logprob": -1.0, "rank": 1}, ""),
    ],
)
def test_columns_that_contradict_each_other(columns: dict[str, float], says: str) -> None:
    window = own_tokens(np.array([1, 2], np.int32))
    found = {"entropy": 2.0, "top": 2, "top_logprob": -1.0, **columns}
    made = Answers(**{n: np.array([[x]]) if n in ("logprob", "rank") else np.array([x]) for n, x in found.items()})
    if not says:
        check_answers(WindowList((window,)), [(0, made)], 10)
        return
    with pytest.raises(EngineError, match=says):
        check_answers(WindowList((window,)), [(0, made)], 10)
