"""The texts that vLLM replays: what is known of them on the host, and the hidden states that wait to be scored.

Loaded only inside vLLM's processes; ``replay.py`` uses it in each step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.vllm.pooler import BatchKey
from scoremode.engines.vllm.wire import Replay, Words
from scoremode.values import Bools, Ints

HELD_BYTES, HELD_ROWS = 16 << 20, 4096  # of hidden states that wait to be scored together
WAITING_COPIES = 128  # of lines that are on their way to the host, or have arrived


class HostCopy:
    """Lines on their way to the host. ``read`` waits for them, but creating the copy does not."""

    def __init__(self, lines: Tensor) -> None:
        self._event: Any = None
        self._lines, self.width = lines, lines.shape[1]
        if lines.device.type != "cpu":
            self._lines = torch.empty(lines.shape, dtype=lines.dtype, pin_memory=True)
            self._lines.copy_(lines, non_blocking=True)
            self._event = torch.cuda.current_stream(lines.device).record_event()

    def read(self) -> Words:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        lines: Words = self._lines.numpy()
        return lines


@dataclass(slots=True, eq=False)
class Sequence:
    """A text that is being replayed. It outlives its row in the batch: it may be preempted, or wait to be fetched."""

    replay: Replay
    kind: BatchKey
    slot: int  # its place in the tables of ``Texts``
    sampled: list[int] = field(default_factory=list)  # V1 runner: vLLM's own list of the tokens sampled so far
    returns: int = -1  # how often the request came back into the batch after it had left
    head: HostCopy | None = None  # rows of the head's matrix, if these were requested


class Texts:
    """The texts that are being replayed, as tables with a line per text, so that a step looks all its rows up at once.

    A text's line is used again when the text was fetched.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence | None] = []
        self.forced = np.zeros((0, 0), np.int32)  # by step: the token to sample, or -1 after the text's last token
        self.row_of_step = np.zeros((0, 0), np.int32)  # number of the requested row, or -1
        self.targets = np.zeros((0, 0, 1), np.int32)  # by requested row
        self.lines = np.zeros((0, 0, 1), np.int32)  # by requested row
        self.line_width = np.zeros((0, 0), np.int32)  # by requested row; 0: not computed yet
        self._computed: deque[tuple[HostCopy, Ints, Ints]] = deque()  # copies, and the slot and requested row of lines
        self.steps, self.prompt, self.first, self.reached = (np.zeros(0, np.int64) for _ in range(4))

    def add(self, replay: Replay) -> Sequence:
        slot = self.sequences.index(None) if None in self.sequences else len(self.sequences)
        sequence = Sequence(replay, BatchKey.of(replay.request), slot)
        self.sequences[slot : slot + 1] = [sequence]
        rows, steps = replay.request.rows, len(replay.forced) + 1
        self._make_room(slot + 1, max(steps, len(rows)), sequence.kind.k)
        self.forced[slot, : steps - 1], self.forced[slot, steps - 1 :] = replay.forced, -1
        self.row_of_step[slot, :steps] = replay.row_of_step()
        self.targets[slot, : len(rows), : sequence.kind.k] = replay.request.targets
        self.line_width[slot] = 0
        self.steps[slot], self.prompt[slot], self.reached[slot] = steps, replay.prompt, 0
        self.first[slot] = replay.request.first
        return sequence

    def _make_room(self, slots: int, width: int, k: int) -> None:
        have = (*self.forced.shape, self.targets.shape[2])
        if slots <= have[0] and width <= have[1] and k <= have[2]:
            return
        slots, width, k = (2 * n if n > old else old for n, old in zip((slots, width, k), have, strict=True))
        for name in ("forced", "row_of_step", "targets", "line_width", "steps", "prompt", "first", "reached"):
            self._enlarge(name, (slots, width, k))
        self._enlarge("lines", (slots, width, self.lines.shape[2]))

    def _enlarge(self, name: str, shape: tuple[int, int, int]) -> None:
        old = getattr(self, name)
        new = np.zeros(shape[: old.ndim], old.dtype)
        new[tuple(map(slice, old.shape))] = old
        setattr(self, name, new)

    def give(self, copy: HostCopy, slots: Ints, indices: Ints) -> None:
        """Receives computed lines, one per requested row of a text, to be read later."""
        self._computed.append((copy, slots, indices))
        if (
            len(self._computed) > WAITING_COPIES
        ):  # the older half has arrived long ago, and its memory can be used again
            self._read(WAITING_COPIES // 2)

    def _read(self, count: int) -> None:
        """Reads the oldest copies, in the order of the steps: if a row was computed again, its last line counts."""
        for _ in range(count):
            copy, slots, indices = self._computed.popleft()
            lines = copy.read()
            if copy.width > self.lines.shape[2]:
                self._enlarge("lines", (*self.forced.shape, copy.width))
            self.lines[slots, indices, : copy.width] = lines
            self.line_width[slots, indices] = copy.width

    def take(self, sequence: Sequence) -> Words:
        """Forgets a text, and returns the lines of all its requested rows; waits for the copies of the last steps."""
        self._read(len(self._computed))
        slot, count = sequence.slot, len(sequence.replay.request.rows)
        self.sequences[slot] = None
        if sequence.head is not None:
            return sequence.head.read()
        missing = int((self.line_width[slot, :count] == 0).sum())
        if missing:
            raise RuntimeError(f"scoremode: {missing} of {count} rows of a replayed text were not computed")
        lines: Words = self.lines[slot, :count, : self.line_width[slot, :count].max(initial=0)].copy()
        return lines


@dataclass(frozen=True, slots=True)
class Members:
    """The replayed texts of a batch; computed again only when the batch changes."""

    rows: Ints  # of the batch (V1), or slots of vLLM's (V2)
    slots: Ints
    sampled: list[list[int]]
    kinds: list[tuple[BatchKey, Bools]]  # which members are of a kind

    @staticmethod
    def of(batch: dict[int, Sequence]) -> Members:
        sequences = list(batch.values())
        kinds = [sequence.kind for sequence in sequences]
        return Members(
            np.array(list(batch), np.int64),
            np.array([sequence.slot for sequence in sequences], np.int64),
            [sequence.sampled for sequence in sequences],
            [(kind, np.array([kind == other for other in kinds])) for kind in dict.fromkeys(kinds)],
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step that are scored together: rows of a tensor, the slots of their texts, requested rows."""

    rows: Ints
    slots: Ints
    asked: Ints


class Held:
    """Hidden states of several steps that wait to be scored together, all of one kind."""

    def __init__(self, like: Tensor, kind: BatchKey, least: int) -> None:
        room = min(HELD_ROWS, HELD_BYTES // (like.shape[1] * like.element_size()))
        self.states = like.new_empty(max(least, room), like.shape[1])
        self.kind, self.used = kind, 0
        self.steps: list[Step] = []

    def has_room_for(self, kind: BatchKey, rows: int) -> bool:
        return kind == self.kind and self.used + rows <= len(self.states)

    def keep(self, hidden: Tensor, index: Tensor, step: Step) -> None:
        end = self.used + len(step.rows)
        torch.index_select(hidden, 0, index, out=self.states[self.used : end])
        self.steps.append(replace(step, rows=np.arange(self.used, end)))
        self.used = end
