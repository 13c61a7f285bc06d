"""Many candidates, a few slots: all are scored, each as soon as a slot is free, and one that fails stops no other."""

from __future__ import annotations

import threading
import time

import pytest

from scoremode.core.verbs.progress import Progress
from scoremode.errors import CandidatesError, EngineError
from scoremode.remote.ray.side_by_side import score_together, slots_and_shares

NAMES = [f"candidate-{i}" for i in range(40)]


@pytest.mark.parametrize(
    ("candidates", "replicas", "wanted"),
    [(40, 8, (8, 1)), (3, 8, (3, 2)), (1, 8, (1, 8)), (8, 8, (8, 1)), (5, 1, (1, 1)), (2, 3, (2, 1))],
)
def test_replicas_are_divided_among_candidates(candidates: int, replicas: int, wanted: tuple[int, int]) -> None:
    assert slots_and_shares(candidates, replicas) == wanted


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_results_come_in_the_order_of_the_names_and_never_more_than_the_slots_run(slots: int) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def score(name: str, _: Progress) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002 * (hash(name) % 5))
        with lock:
            running -= 1
        return name.upper()

    assert score_together(NAMES, score, slots) == [name.upper() for name in NAMES]
    assert most <= slots
    assert slots == 1 or most > 1


def test_a_free_slot_is_taken_at_once() -> None:
    """While the first candidate runs until all others are done, one other slot scores those."""
    others_done = threading.Event()
    scored: list[str] = []

    def score(name: str, _: Progress) -> None:
        if name == NAMES[0]:
            assert others_done.wait(20)
            return
        scored.append(name)
        if len(scored) == len(NAMES) - 1:
            others_done.set()

    score_together(NAMES, score, 2)
    assert scored == NAMES[1:]


def test_one_that_fails_stops_no_other_and_is_named_at_the_end() -> None:
    scored: list[str] = []

    def score(name: str, _: Progress) -> None:
        if name in NAMES[3:5]:
            raise EngineError("the model gives NaN", fix="try --dtype float32")
        scored.append(name)

    with pytest.raises(CandidatesError, match="2 of 40 candidates could not be scored: candidate-3: ") as error:
        score_together(NAMES, score, 4)
    assert len(scored) == len(error.value.found) == 38
    assert list(error.value.failed) == ["candidate-3", "candidate-4"]
    assert {str(one) for one in error.value.failed.values()} == {"the model gives NaN; try --dtype float32"}


def test_the_progress_of_all_is_one_sum_that_never_shrinks_its_end() -> None:
    told: list[tuple[int, int]] = []

    def score(name: str, progress: Progress) -> None:
        for done in (0, 50, 100):
            progress(done, 100)

    score_together(NAMES[:4], score, 2, lambda done, total: told.append((done, total)))
    assert told[-1] == (400, 400)
    assert {total for _, total in told} == {400}


def test_an_interruption_stops_those_that_run_and_starts_no_others() -> None:
    begun: list[str] = []
    ended = threading.Event()

    def score(name: str, progress: Progress) -> None:
        begun.append(name)
        try:
            while True:
                progress(1, 2)
                time.sleep(0.005)
        finally:
            ended.set()

    class Interrupting:
        """Ctrl-C arrives in the main thread, which waits: as signal handlers do, it raises there."""

        def __call__(self, done: int, total: int) -> None:
            pass

    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        import signal

        while not begun:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        score_together(NAMES, score, 2, Interrupting())
    assert ended.wait(5)
    time.sleep(0.05)
    assert len(begun) <= 2
