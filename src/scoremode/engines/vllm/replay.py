"""The decode path in vLLM's workers: a logits processor that scores each step's rows and forces the next token.

Loaded only inside vLLM's processes. vLLM computes a step as it always does: its scheduler, its attention over its own
K/V cache, its CUDA graphs. Between the step's logits and the sampler it calls the logits processors, its official
plug-in interface. Ours does this there, for all rows of the batch together:

1. It scores the rows of replayed texts, by the code of the prefill path (``ScorePooler.score_rows``). With the exact
   head it keeps the hidden states that ``compute_logits`` received in this step, and scores those of several steps
   together: the head's matrix is read once for all of them. With ``as-served`` it scores, in each step, the logits
   that the sampler is about to see.
2. It starts a copy of the lines (a few words per row) to the host, and does not wait for it.
3. It raises the logit of each text's next token so far that greedy sampling must choose this token.

Rows of ordinary requests are neither read nor changed. When requests have finished, our engine fetches their lines by a
call to the worker (``ReplayWorker``): one wait for many steps.

Which step of a text a row belongs to is known on the host. vLLM's V1 runner gives the list of tokens sampled so far;
its V2 runner gives the length of the sequence. While a prompt is fed in chunks, every chunk but the last has a row too,
whose result vLLM discards. Such a row comes before the real row of its step (V1), or its step is below 0 (V2). If a
request is preempted, vLLM computes the K/V of all its tokens again, and continues with the step that comes next.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as V1Processor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from scoremode.engines.vllm.pooler import BatchKey, ScorePooler, Settings, to_device
from scoremode.engines.vllm.tap import Shard, Tap
from scoremode.engines.vllm.wire import Replay, Words
from scoremode.values import Bools, Ints

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2Processor
except ImportError:  # before 0.32, custom processors run on the V1 runner only

    class V2Processor:  # type: ignore[no-redef]
        """Takes the place of a class that this version of vLLM does not have."""


FORCED = 1e30  # above every logit, and finite, so that a softmax over the row has no NaN
HELD_BYTES, HELD_ROWS = 16 << 20, 4096  # of hidden states that wait to be scored together
WAITING_COPIES = 128  # of lines that are on their way to the host, or have arrived
_processors: weakref.WeakSet[ReplayProcessor] = weakref.WeakSet()


# ── the texts that are replayed, and the hidden states that wait to be scored ─────────────────────────────────────────
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

    When a text has been fetched, its line is used for another text.
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


# ── between the logits and the sampler ────────────────────────────────────────────────────────────────────────────────
class StepTap(Tap):
    """Gives the results of the current step: the hidden states of its rows, and the logits that the sampler sees."""

    def __init__(self, model: Any, exact: bool) -> None:
        super().__init__(model, exact)
        self._hidden: Tensor | None = None
        self._sampled: Tensor | None = None
        self._chosen: Tensor | None = None  # indices of the rows that are scored now
        self._compute_logits = model.compute_logits
        model.compute_logits = self._remember  # on the object: other models in this process are not affected

    def _remember(self, hidden: Tensor, *rest: Any, **kwargs: Any) -> Any:
        """Takes the place of the model's ``compute_logits``, and remembers the hidden states that vLLM passes to it."""
        if self._mode == "stock":
            self._hidden = hidden
        return self._compute_logits(hidden, *rest, **kwargs)

    def begin_step(self, logits: Tensor) -> Tensor:
        """Takes the logits of a step, and returns the hidden states that they were computed from."""
        hidden, self._hidden = self._hidden, None
        if hidden is None or len(hidden) != len(logits):
            raise RuntimeError("scoremode: this step's logits do not belong to the hidden states of compute_logits")
        self._sampled, self._chosen = logits, None
        return hidden

    def end_step(self) -> None:
        """Forgets the step, so that its memory can be used again."""
        self._hidden = self._sampled = self._chosen = None

    def rows(self, hidden: Tensor, index: Tensor) -> Tensor:
        self._chosen = index
        return hidden[index]

    def logits(self, hidden: Tensor, gather: bool) -> tuple[Tensor, Shard]:
        """Returns exact logits of these rows if there are any, else the chosen rows of the sampler's logits."""
        if self._exact:
            x, shard = super().logits(hidden, gather)
            if shard.exact:
                return x, shard
        assert self._sampled is not None, "no step has begun"
        x = self._sampled[: len(hidden)] if self._chosen is None else self._sampled[self._chosen]
        return x.float(), Shard(0, x.shape[1], x.shape[1], 1, exact=False)


class ReplayProcessor(V1Processor, V2Processor):  # type: ignore[misc]
    """Replays the texts that requests carry. Implements the interfaces of both of vLLM's model runners."""

    def __init__(self, vllm_config: Any, *_place: Any) -> None:
        self.config = vllm_config
        self._batch: dict[int, Sequence] = {}  # by row (V1) or by slot of vLLM's (V2)
        self._members: Members | None = None
        self._sequences: dict[str, Sequence] = {}  # all that were not fetched yet
        self._texts = Texts()
        self._held: Held | None = None
        self._index: tuple[Ints, Tensor] | None = None  # rows of the last step, here and on the device
        self._high: Tensor | None = None
        self._pooler: ScorePooler | None = None
        self._tap: StepTap | None = None
        _processors.add(self)

    def attach(self, model: Any) -> None:
        """Connects the processor with its model, which vLLM loads after it creates its processors."""
        settings = Settings.read(self.config)
        self._tap = StepTap(model, settings.exact)
        self._pooler = ScorePooler(model, settings, self._tap)

    def _sequence(self, params: Any) -> Sequence | None:
        """Returns the text that a request replays when it enters the batch; None for an ordinary request."""
        replay = Replay.from_kwargs(params.extra_args)
        if replay is None:
            return None
        sequence = self._sequences.get(replay.name)
        if sequence is None:
            sequence = self._sequences[replay.name] = self._texts.add(replay)
        sequence.returns += 1
        return sequence

    # ── V1 runner ────────────────────────────────────────────────────────────────────────────────────────────────────
    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        self._members = None

        def enter(params: Any, _prompt: list[int] | None, sampled: list[int]) -> Sequence | None:
            sequence = self._sequence(params)
            if sequence is not None:
                sequence.sampled = sampled
            return sequence

        process_dict_updates(self._batch, batch_update, enter)

    def _steps_v1(self, members: Members) -> tuple[Ints, Ints, Bools]:
        """Returns the rows of the members in the batch, their steps, and which of them are to be scored."""
        steps = np.fromiter(map(len, members.sampled), np.int64, len(members.sampled))
        return members.rows, steps, steps < self._texts.steps[members.slots]

    # ── V2 runner ────────────────────────────────────────────────────────────────────────────────────────────────────
    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        sequence = self._sequence(sampling_params)
        self._batch.pop(req_idx, None)
        self._members = None
        if sequence is not None:
            self._batch[req_idx] = sequence
        return sequence is not None

    def _steps_v2(self, members: Members, context: Any) -> tuple[Ints, Ints, Bools]:
        """Like ``_steps_v1``. A step below the last one scored belongs to a preempted request that is prefilled again.

        vLLM orders the rows anew in each step, and keeps slots of requests that have left.
        """
        order = np.asarray(context.idx_mapping_np)
        row_of = np.full(max(order.max(initial=-1), members.rows.max(initial=-1)) + 1, -1)
        row_of[order] = np.arange(len(order))
        rows, slots = row_of[members.rows], members.slots
        steps = np.asarray(context.seq_lens_upper_bound_np)[rows] - self._texts.prompt[slots]
        scored = (rows >= 0) & (steps >= self._texts.reached[slots]) & (steps < self._texts.steps[slots])
        self._texts.reached[slots[scored]] = steps[scored] + 1
        return rows, steps, scored

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply(self, logits: Tensor, context: Any = None) -> Tensor:
        if not self._batch:
            return logits
        members = self._members = self._members or Members.of(self._batch)
        if context is None:
            rows, steps, scored = self._steps_v1(members)
        else:
            rows, steps, scored = self._steps_v2(members, context)
        if scored.any():
            steps = np.where(scored, steps, 0)
            indices = np.where(scored, self._texts.row_of_step[members.slots, steps], -1)
            self._score(logits, members, rows, indices)
            self._force(logits, rows, np.where(scored, self._texts.forced[members.slots, steps], -1))
        return logits

    def _score(self, logits: Tensor, members: Members, rows: Ints, indices: Ints) -> None:
        assert self._tap is not None and self._pooler is not None, "attached before the first request"  # noqa: PT018
        hidden = self._tap.begin_step(logits)
        for kind, mask in members.kinds:
            which = mask & (indices >= 0)
            if not which.any():
                continue
            step = Step(rows[which], members.slots[which], indices[which])
            if kind.extra == "head":
                for sequence in map(self._texts.sequences.__getitem__, step.slots):
                    assert sequence is not None, "a text of the batch was not fetched yet"
                    sequence.head = HostCopy(self._pooler.head_rows(hidden[:1], sequence.replay.request))
            elif self._pooler.can_wait(kind, hidden):
                self._hold(hidden, kind, step)
            else:
                self._reduce(hidden, kind, [step])
        self._tap.end_step()

    def _hold(self, hidden: Tensor, kind: BatchKey, step: Step) -> None:
        """Keeps the hidden states of a step, to be scored with those of other steps."""
        if self._held is None or not self._held.has_room_for(kind, len(step.rows)):
            self.flush()
        if self._held is None or not self._held.has_room_for(kind, len(step.rows)):
            self._held = None  # the old memory is freed first
            self._held = Held(hidden, kind, len(step.rows))
        if self._index is None or not np.array_equal(self._index[0], step.rows):
            self._index = step.rows, to_device(step.rows, hidden.device)
        self._held.keep(hidden, self._index[1], step)

    def flush(self) -> None:
        """Scores the hidden states that wait."""
        if self._held is not None and self._held.steps:
            self._reduce(self._held.states, self._held.kind, self._held.steps)
            self._held.steps, self._held.used = [], 0

    def _reduce(self, hidden: Tensor, kind: BatchKey, steps: list[Step]) -> None:
        """Scores rows of the hidden states, and gives the lines to their texts.

        The rows of a text are put together, because a reference has them together.
        """
        assert self._pooler is not None
        slots = np.concatenate([step.slots for step in steps])
        order = np.argsort(slots, kind="stable")
        slots, rows = slots[order], np.concatenate([step.rows for step in steps])[order]
        indices = np.concatenate([step.asked for step in steps])[order]
        targets, stored = self._texts.targets[slots, indices, : kind.k], self._texts.first[slots] + indices
        self._texts.give(HostCopy(self._pooler.score_rows(hidden, kind, rows, targets, stored)), slots, indices)

    def _force(self, logits: Tensor, rows: Ints, forced: Ints) -> None:
        """Makes greedy sampling choose the next token of each text. After a text's last token there is none."""
        which = forced >= 0
        if which.any():
            if self._high is None:
                self._high = logits.new_tensor(FORCED)
            at = to_device(np.stack([rows[which], forced[which].astype(np.int64)]), logits.device)
            logits.index_put_((at[0], at[1]), self._high)

    # ── between steps ────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self, names: list[str]) -> list[tuple[bytes, int, int]]:
        """Returns of each finished request its lines, the words per line, and how often it came back."""
        self.flush()
        sequences = [self._sequences.pop(name) for name in names]
        lines = [self._texts.take(sequence) for sequence in sequences]
        return [(w.tobytes(), w.shape[1], s.returns) for w, s in zip(lines, sequences, strict=True)]

    def forget(self) -> None:
        """Forgets the texts of requests that were aborted."""
        self._sequences.clear()
        self._batch.clear()
        self._texts, self._held, self._members = Texts(), None, None


class ReplayWorker:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), so that our engine can call them."""

    def _scoremode_processor(self) -> ReplayProcessor:
        config = self.vllm_config  # type: ignore[attr-defined]
        return next(processor for processor in _processors if processor.config is config)

    def scoremode_attach(self) -> None:
        self._scoremode_processor().attach(self.get_model())  # type: ignore[attr-defined]
        batch: Any = getattr(self.model_runner, "input_batch", None)  # type: ignore[attr-defined]
        if hasattr(batch, "logitsprocs_need_output_token_ids"):
            # vLLM's V1 runner would wait in every step for the tokens of the step before. We only need their number,
            # which it knows without waiting. Requests with penalties still get the tokens that they need.
            batch.logitsprocs_need_output_token_ids = False

    def scoremode_take(self, names: list[str]) -> list[tuple[bytes, int, int]]:
        return self._scoremode_processor().take(names)

    def scoremode_forget(self) -> None:
        self._scoremode_processor().forget()
