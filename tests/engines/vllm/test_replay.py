"""The logits processor of the decode path, driven as vLLM's two model runners drive it. Starts no engine.

The stand-in for a model gives every position of every text logits of its own, so a line from any other position shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import measured
from scoremode.engines.vllm import support
from scoremode.engines.vllm.replay import ReplayProcessor
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.engines.vllm.wire import KEY, Replay, Request, read_lines
from scoremode.errors import OptionError
from scoremode.head.columns import define_columns

VOCABULARY = 11


@dataclass(eq=False)
class Text:
    """A request as vLLM's scheduler knows it: the tokens so far, and how many of them are computed."""

    name: str
    ids: Any
    prompt: int
    rows: Any
    sampled: list[int] = field(default_factory=list)
    computed: int = 0
    is_ordinary: bool = False

    @property
    def total(self) -> int:
        return self.prompt + len(self.sampled)

    @property
    def has_finished(self) -> bool:
        return len(self.sampled) == len(self.ids) - self.prompt + 1

    def targets(self) -> Any:
        return np.append(self.ids[1:], 3)[self.rows][:, None].astype(np.int32)

    def params(self) -> Any:
        if self.is_ordinary:
            return SimpleNamespace(extra_args=None)
        request = Request(self.rows.astype(np.int32), self.targets())
        replay = Replay(self.name, self.prompt, self.ids[self.prompt :].astype(np.int32), request)
        return SimpleNamespace(extra_args=replay.to_kwargs())

    def logits(self, position: int) -> Any:
        return np.random.default_rng([int(self.name), position]).normal(size=VOCABULARY).astype(np.float32)


class Model(torch.nn.Module):
    """Its hidden states are its logits."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


def processor_of() -> tuple[ReplayProcessor, Model]:
    config = SimpleNamespace(additional_config={KEY: {"exact": False}})
    model, made = Model(), ReplayProcessor(config, None, False)
    made.attach(model)
    return made, model


def texts(rng: Any) -> list[Text]:
    found = []
    for number in range(12):
        ids = rng.integers(0, VOCABULARY, rng.integers(2, 20))
        prompt = int(rng.integers(1, len(ids)))
        rows = np.flatnonzero(rng.random(len(ids)) < 0.6)
        rows = rows[rows >= prompt - 1] if number % 4 else np.arange(prompt - 1, len(ids))
        rows = rows if len(rows) else np.array([len(ids) - 1])
        found.append(Text(str(number), ids, prompt, rows, is_ordinary=number % 5 == 3))
    return found


class Scheduler:
    """Admits, feeds in chunks, preempts and finishes requests at random."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.waiting = texts(self.rng)
        self.preempted = self.returned = 0  # replayed texts only

    def leaving(self, running: list[Text]) -> list[Text]:
        """The requests that are not in the next step: finished ones, and some that are preempted."""
        found = [text for text in running if text.has_finished or self.rng.random() < 0.08]
        preempted = [text for text in found if not text.has_finished]
        for text in preempted:
            text.computed = 0
        self.waiting = preempted + self.waiting
        self.preempted += sum(not text.is_ordinary for text in preempted)
        return found

    def entering(self, running: int) -> list[Text]:
        """The requests that are new in the next step; at most four requests run."""
        count = min(4 - running, len(self.waiting), int(self.rng.integers(0, 3)))
        found, self.waiting = self.waiting[:count], self.waiting[count:]
        return found

    def feed(self, batch: list[Text]) -> None:
        """Computes one token of each request that decodes, and a chunk of any size of each that is being prefilled."""
        for text in batch:
            text.computed += int(self.rng.integers(1, text.total - text.computed + 1))

    def sample(self, batch: list[Text], processor: ReplayProcessor, model: Model, context: Any = None) -> None:
        """Gives the rows of a step to the processor, samples, and checks the texts that end with this step."""
        rows = np.stack([text.logits(text.computed - 1) for text in batch])
        logits = model.compute_logits(torch.from_numpy(rows))
        after = processor.apply(logits) if context is None else processor.apply(logits, context)
        for text, own, before in zip(batch, after.numpy(), rows, strict=True):
            if text.is_ordinary:
                assert np.array_equal(own, before)
            if text.computed == text.total:  # vLLM discards what other rows gave
                text.sampled.append(int(own.argmax()))
            if text.has_finished and not text.is_ordinary:
                self.returned += check(processor, text)


def check(processor: ReplayProcessor, text: Text) -> int:
    """Compares the lines of a finished text with those of its positions; returns how often it came back."""
    assert np.array_equal(text.sampled[:-1], text.ids[text.prompt :])
    ((words, width, returns),) = processor.take([text.name])
    found = read_lines(np.frombuffer(words, np.int32).reshape(-1, width), 1)
    logits = torch.from_numpy(np.stack([text.logits(int(row)) for row in text.rows]))
    wanted = define_columns(logits, torch.from_numpy(text.targets().astype(np.int64)))
    assert np.abs(found.logprob - wanted.logprob.numpy()).max() < 1e-5
    assert np.array_equal(measured(found.top), wanted.top.numpy())
    return returns


def next_batch(
    batch: list[Text], leaving: list[Text], entering: list[Text], swap: bool
) -> tuple[list[Text], BatchUpdate | None]:
    """The next batch of the V1 runner, and what it tells its processors.

    New requests take the places of those that left; the remaining holes are filled from the end of the batch.
    """
    places: list[Text | None] = [None if text in leaving else text for text in batch]
    added, moved = [], []
    for text in entering:
        index = places.index(None) if None in places else len(places)
        places[index : index + 1] = [text]
        added.append((index, text.params(), None, text.sampled))
    removed = [index for index, text in enumerate(places) if text is None]
    while None in places:
        last = places.pop()
        if last is not None:
            hole = places.index(None)
            places[hole] = last
            moved.append((len(places), hole, MoveDirectionality.UNIDIRECTIONAL))
    if swap and len(places) > 1:
        moved.append((0, len(places) - 1, MoveDirectionality.SWAP))
        places[0], places[-1] = places[-1], places[0]
    found = [text for text in places if text is not None]
    if not (removed or added or moved):
        return found, None
    return found, BatchUpdate(len(found), removed[::-1], added, moved)


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_found_on_the_v1_runner(seed: int) -> None:
    scheduler, (processor, model) = Scheduler(seed), processor_of()
    batch: list[Text] = []
    while scheduler.waiting or batch:
        leaving = scheduler.leaving(batch)
        entering = scheduler.entering(len(batch) - len(leaving))
        batch, update = next_batch(batch, leaving, entering, swap=scheduler.rng.random() < 0.3)
        processor.update_state(update)
        if batch:
            scheduler.feed(batch)
            scheduler.sample(batch, processor, model)
    assert scheduler.returned == scheduler.preempted
    assert not processor._sequences


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_found_on_the_v2_runner(seed: int) -> None:
    """It keeps a slot per request, orders rows anew in each step, and tells how many tokens each sequence has."""
    scheduler, (processor, model) = Scheduler(seed), processor_of()
    slots: dict[int, Text] = {}
    while scheduler.waiting or slots:
        for text in scheduler.leaving(list(slots.values())):
            slots = {slot: other for slot, other in slots.items() if other is not text}
        for text in scheduler.entering(len(slots)):
            free = next(slot for slot in range(4) if slot not in slots)
            slots[free] = text
            assert processor.add_request(free, text.params()) is not text.is_ordinary
        if slots:
            order = scheduler.rng.permutation(list(slots))
            batch = [slots[int(slot)] for slot in order]
            scheduler.feed(batch)
            lengths = np.array([text.computed for text in batch])
            context = SimpleNamespace(idx_mapping_np=order, seq_lens_upper_bound_np=lengths)
            scheduler.sample(batch, processor, model, context)
    assert scheduler.returned == scheduler.preempted
    assert not processor._sequences


def test_a_step_of_other_hidden_states_and_a_text_that_did_not_end_are_errors() -> None:
    processor, model = processor_of()
    text = Text("0", np.array([1, 2, 3]), 1, np.array([0, 1, 2]))
    processor.update_state(BatchUpdate(1, [], [(0, text.params(), None, text.sampled)], []))
    processor.apply(model.compute_logits(torch.zeros(1, VOCABULARY)))
    with pytest.raises(RuntimeError, match="2 of 3 rows"):
        processor.take(["0"])
    processor.update_state(BatchUpdate(1, [], [(0, text.params(), None, text.sampled)], []))
    model.compute_logits(torch.zeros(2, VOCABULARY))
    with pytest.raises(RuntimeError, match="do not belong to the hidden states"):
        processor.apply(torch.zeros(1, VOCABULARY))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 2}, "one device, and tensor_parallel_size is 2; use --path prefill"),
        ({"pipeline_parallel_size": 2}, "one device, and pipeline_parallel_size is 2"),
        ({"max_num_seqs": 8}, "use --sequences"),
        ({"speculative_config": {"method": "ngram"}}, "speculative decoding guesses tokens"),
        ({"enable_lora": True}, "adapters are not applied"),
        ({"worker_extension_cls": "mine"}, "an extension of its own"),
        ({"kv_transfer_config": {"kv_connector": "x"}}, "leave kv_transfer_config out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_right_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        LaunchArguments.named(given, path=DecodePath()).arguments()
    LaunchArguments.named(given).arguments()  # the prefill path takes them, or vLLM refuses them


def test_a_runner_without_logits_processors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(support.SECOND_RUNNER, "1")
    LaunchArguments(path=DecodePath()).arguments()
    monkeypatch.setattr(support, "installed_version", lambda: "0.24.0")
    with pytest.raises(OptionError, match="takes no logits processors, which --path decode needs; unset VLLM_USE"):
        LaunchArguments(path=DecodePath()).arguments()
