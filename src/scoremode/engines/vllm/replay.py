"""The decode path in vLLM's workers: a logits processor that scores each step's rows and forces the next token.

Loaded only inside vLLM's processes. vLLM computes a step as it always does: its scheduler, its attention over its own
K/V cache, its CUDA graphs. Between the step's logits and the sampler it calls the logits processors, its official
plug-in interface. Ours does this there, for all rows of the batch together:

1. It scores the rows of replayed texts, by the code of the prefill path (``ScorePooler.score_rows``). With the exact
   head it uses the hidden states that ``compute_logits`` received in this step, with ``as-served`` the logits that the
   sampler is about to see.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as V1Processor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from scoremode.engines.vllm.pooler import Kind, ScorePooler, Settings, to_device
from scoremode.engines.vllm.tap import Shard, Tap
from scoremode.engines.vllm.wire import Replay
from scoremode.scores.packing import Words
from scoremode.values import Ints

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2Processor
except ImportError:  # before 0.32, custom processors run on the V1 runner only

    class V2Processor:  # type: ignore[no-redef]
        """Takes the place of a class that this version of vLLM does not have."""


FORCED = 1e30  # above every logit, and finite, so that a softmax over the row has no NaN
_processors: weakref.WeakSet[ReplayProcessor] = weakref.WeakSet()


class StepTap(Tap):
    """Gives the results of the current step: the hidden states of its rows, and the logits that the sampler sees."""

    def __init__(self, model: Any, exact: bool) -> None:
        super().__init__(model, exact)
        self._hidden: Tensor | None = None
        self._sampled: Tensor | None = None
        self._chosen: Tensor | None = None  # indices of the rows that are scored now
        self._compute_logits = model.compute_logits
        model.compute_logits = self._remember  # on the object: other models in this process are not affected

    def _remember(self, hidden: Tensor, *rest: Any, **named: Any) -> Any:
        """Takes the place of the model's ``compute_logits``, and remembers the hidden states that vLLM passes to it."""
        if self._mode == "stock":
            self._hidden = hidden
        return self._compute_logits(hidden, *rest, **named)

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


class HostCopy:
    """Lines on their way to the host. ``read`` waits for them, but creating the copy does not."""

    def __init__(self, lines: Tensor) -> None:
        self._event: Any = None
        self._lines = lines
        if lines.device.type != "cpu":
            self._lines = torch.empty(lines.shape, dtype=lines.dtype, pin_memory=True)
            self._lines.copy_(lines, non_blocking=True)
            self._event = torch.cuda.current_stream(lines.device).record_event()

    def read(self) -> Words:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        found: Words = self._lines.numpy()
        return found


@dataclass(slots=True, eq=False)
class Sequence:
    """A text that is being replayed. It outlives its row in the batch: it may be preempted, or wait to be fetched."""

    replay: Replay
    kind: Kind
    row_of_step: list[int]
    forced: list[int]
    lines: list[tuple[HostCopy, int] | None]  # for each requested row, a step's lines and the number of its own line
    sampled: list[int] = field(default_factory=list)  # V1 runner: vLLM's own list of the tokens sampled so far
    returns: int = -1  # how often the request came back into the batch after it had left
    head: HostCopy | None = None  # rows of the head's matrix, if these were requested

    @staticmethod
    def of(replay: Replay) -> Sequence:
        rows = len(replay.request.rows)
        return Sequence(
            replay, Kind.of(replay.request), replay.row_of_step().tolist(), replay.forced.tolist(), [None] * rows
        )

    def words(self) -> Words:
        """Returns the lines of all requested rows; waits for the copies of the last steps."""
        if self.head is not None:
            return self.head.read()
        missing = sum(line is None for line in self.lines)
        if missing:
            raise RuntimeError(f"scoremode: {missing} of {len(self.lines)} rows of a replayed text were not computed")
        return np.stack([line[0].read()[line[1]] for line in self.lines if line is not None])


Place = tuple[int, Sequence, int]  # a row of the batch, its text, and the text's step


class ReplayProcessor(V1Processor, V2Processor):  # type: ignore[misc]
    """Replays the texts that requests carry. Implements the interfaces of both of vLLM's model runners."""

    def __init__(self, vllm_config: Any, *_place: Any) -> None:
        self.config = vllm_config
        self._batch: dict[int, Sequence] = {}  # by row (V1) or by slot (V2)
        self._sequences: dict[str, Sequence] = {}  # all that were not fetched yet
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
        found = self._sequences.get(replay.name)
        if found is None:
            found = self._sequences[replay.name] = Sequence.of(replay)
        found.returns += 1
        return found

    # ── V1 runner ────────────────────────────────────────────────────────────────────────────────────────────────────
    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        def enter(params: Any, _prompt: list[int] | None, sampled: list[int]) -> Sequence | None:
            found = self._sequence(params)
            if found is not None:
                found.sampled = sampled
            return found

        process_dict_updates(self._batch, batch_update, enter)

    def _places_v1(self) -> Iterator[Place]:
        for row, sequence in self._batch.items():
            step = len(sequence.sampled)
            if step < len(sequence.row_of_step):
                yield row, sequence, step

    # ── V2 runner ────────────────────────────────────────────────────────────────────────────────────────────────────
    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        found = self._sequence(sampling_params)
        if found is None:
            self._batch.pop(req_idx, None)
            return False
        self._batch[req_idx] = found
        return True

    def _places_v2(self, context: Any) -> Iterator[Place]:
        lengths = context.seq_lens_upper_bound_np.tolist()
        for row, slot in enumerate(context.idx_mapping_np.tolist()):
            sequence = self._batch.get(slot)
            if sequence is None:
                continue
            step = lengths[row] - sequence.replay.prompt
            if 0 <= step < len(sequence.row_of_step) and not _is_scored(sequence, step):
                yield row, sequence, step

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply(self, logits: Tensor, context: Any = None) -> Tensor:
        places = list(self._places_v1() if context is None else self._places_v2(context))
        if places:
            self._score(logits, places)
            self._force(logits, places)
        return logits

    def _score(self, logits: Tensor, places: list[Place]) -> None:
        assert self._tap is not None and self._pooler is not None, "attached before the first request"  # noqa: PT018
        wanted: dict[Kind, list[Place]] = {}
        for row, sequence, step in places:
            if sequence.row_of_step[step] >= 0:
                wanted.setdefault(sequence.kind, []).append((row, sequence, sequence.row_of_step[step]))
        hidden = self._tap.begin_step(logits)
        for kind, members in wanted.items():
            if kind.extra == "head":
                for _, sequence, _ in members:
                    sequence.head = HostCopy(self._pooler.head_rows(hidden[:1], sequence.replay.request))
                continue
            requests = [sequence.replay.request for _, sequence, _ in members]
            rows = np.array([row for row, _, _ in members], np.int64)
            index = [i for _, _, i in members]
            targets = np.stack([request.targets[i] for request, i in zip(requests, index, strict=True)])
            stored: Ints = np.array([q.first + i for q, i in zip(requests, index, strict=True)], np.int64)
            copy = HostCopy(self._pooler.score_rows(hidden, kind, rows, targets, stored))
            for line, (_, sequence, i) in enumerate(members):
                sequence.lines[i] = (copy, line)
        self._tap.end_step()

    def _force(self, logits: Tensor, places: list[Place]) -> None:
        """Makes greedy sampling choose the next token of each text. After a text's last token there is none."""
        chosen = [(row, sequence.forced[step]) for row, sequence, step in places if step < len(sequence.forced)]
        if chosen:
            at = to_device(np.array(chosen, np.int64), logits.device)
            logits[at[:, 0], at[:, 1]] = FORCED

    # ── between steps ────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self, names: list[str]) -> list[tuple[bytes, int, int]]:
        """Returns of each finished request its lines, the words per line, and how often it came back."""
        found = [self._sequences.pop(name) for name in names]
        words = [sequence.words() for sequence in found]
        return [(w.tobytes(), w.shape[1], s.returns) for w, s in zip(words, found, strict=True)]

    def forget(self) -> None:
        """Forgets the texts of requests that were aborted."""
        self._sequences.clear()


def _is_scored(sequence: Sequence, step: int) -> bool:
    """Has this step of a text a result already? If so, a preempted request is being prefilled again past the step."""
    row = sequence.row_of_step[step]
    return row >= 0 and sequence.lines[row] is not None


class ReplayWorker:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), so that our engine can call them."""

    def _scoremode_processor(self) -> ReplayProcessor:
        config = self.vllm_config  # type: ignore[attr-defined]
        return next(processor for processor in _processors if processor.config is config)

    def scoremode_attach(self) -> None:
        self._scoremode_processor().attach(self.get_model())  # type: ignore[attr-defined]

    def scoremode_take(self, names: list[str]) -> list[tuple[bytes, int, int]]:
        return self._scoremode_processor().take(names)

    def scoremode_forget(self) -> None:
        self._scoremode_processor().forget()
