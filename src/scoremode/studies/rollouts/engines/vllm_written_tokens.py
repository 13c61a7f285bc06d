"""The log-probabilities of every token that vLLM samples: in its workers, beside its own sampler.

Loaded only inside vLLM's processes. vLLM can return the log-probability of a sampled token itself, but it normalizes
the whole vocabulary in memory and makes Python objects for every text in every step, which takes as long as the step.
So our wrapper around the sampler reads the logits once, before and after temperature and filters, and keeps the numbers
of a step together on the device; between steps, nothing is copied or waited for until their memory is full. When texts
have ended, our writer fetches theirs by a call to the worker (``WritingWorker``).

Which token of a text a row belongs to is known on the host. vLLM's V1 runner gives the list of tokens sampled so far;
its V2 runner gives the length of the sequence. While a prompt is fed in chunks, every chunk but the last has a row too,
whose token vLLM discards. Such a row comes before the real row of the same token (V1), or after it (V2: only a request
that was preempted has one, for a token that it sampled before).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.values import Ids

Places = tuple[list[str], list[int]]
"""The request of each row, and the number of the token that the row samples."""

ROOM = 1 << 18  # lines of 12 bytes on the device; when they are full, they are copied to the host


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of many steps, in the order in which they were sampled."""

    texts: Ids  # (n,) numbers of the texts
    places: Ids  # (n,)
    lines: Any  # (n, 3) float32: the log-probabilities as drawn and in the model's own distribution, bits of the id

    def where(self, chosen: Any) -> SampledRows:
        return SampledRows(self.texts[chosen], self.places[chosen], self.lines[chosen])


class WritingWorker:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), so that our writer can call them."""

    def scoremode_write(self, draws_own: bool) -> None:
        """Begins to keep log-probabilities. ``draws_own``: draws are from the model's own distribution, or greedy.

        Ranks that do not sample never have anything to keep.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        sampler: Any = runner.sampler
        if isinstance(sampler, torch.nn.Module):
            self._scoremode_sampled = steps = KeptSteps(draws_own, first_wins=False)
            if not draws_own:  # it returns logits after filters, instead of normalizing them all
                filters: Any = sampler.topk_topp_sampler
                filters.logprobs_mode = "processed_logits"

            def places() -> Places:
                batch = runner.input_batch
                count = batch.num_reqs
                return batch.req_ids[:count], list(map(len, batch.req_output_token_ids[:count]))

            steps.watch(sampler)
            sampler.forward = steps.wrap(sampler.forward, lambda *_: places())
        elif sampler is not None:  # V2 runner
            self._scoremode_sampled = steps = KeptSteps(draws_own, first_wins=True)
            runner.sampler = WrappedSampler(sampler, steps)

    def scoremode_take(self, texts: list[int], first: list[int], counts: list[int]) -> list[bytes]:
        """Returns the lines of finished texts, given by number; no lines on ranks that do not sample.

        ``first`` is the length of each prompt, and ``counts`` the number of tokens that were written after it.
        """
        steps: KeptSteps | None = getattr(self, "_scoremode_sampled", None)
        return [] if steps is None else steps.take(texts, first, counts)


class WrappedSampler:
    """Takes the place of the V2 runner's sampler, which is called as an object."""

    def __init__(self, stock: Any, steps: KeptSteps) -> None:
        if not steps.own:  # FlashInfer draws without showing its filters; draws with seeds are never its own
            stock.use_flashinfer = False
        steps.watch(stock)
        self._stock, self._sample = stock, steps.wrap(stock, self._places)

    def __call__(self, logits: Tensor, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        return self._sample(logits, batch, *rest, **kwargs)

    def _places(self, batch: Any, *_: Any) -> Places:
        return batch.req_ids[: batch.num_reqs], batch.seq_lens_cpu_upper_bound[: batch.num_reqs].tolist()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class KeptSteps:
    """The log-probabilities of sampled tokens, until they are fetched."""

    def __init__(self, draws_own: bool, *, first_wins: bool) -> None:
        self.own, self.first_wins = draws_own, first_wins
        self._processed: Tensor | None = None  # logits of this step, after temperature and filters
        self._steps: list[Places] = []
        self._lines, self._used = torch.empty(0, 3), 0  # those of the steps; on the device from the first one on
        self._waiting = SampledRows(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 3), np.float32))

    def watch(self, sampler: Any) -> None:
        """Keeps the logits that a sampler draws from, which its method ``sample`` returns beside what it drew."""
        if self.own:
            return
        stock = sampler.sample

        def sample(*args: Any, **kwargs: Any) -> Any:
            sampled, self._processed = stock(*args, **kwargs)
            return sampled, self._processed

        sampler.sample = sample

    def wrap(self, stock: Any, places: Callable[..., Places]) -> Any:
        """Wraps a function from logits to SamplerOutput.

        Temperature and filters write into logits of float32. Others are copied to float32 first.
        """

        def sample(logits: Tensor, *rest: Any, **kwargs: Any) -> Any:
            raw_logits = logits if self.own or logits.dtype != torch.float32 else logits.clone()
            output = stock(logits, *rest, **kwargs)
            self.keep(places(*rest), raw_logits, output.sampled_token_ids)
            return output

        return sample

    def keep(self, places: Places, logits: Tensor, sampled: Tensor) -> None:
        n = len(places[0])
        if self._processed is None and not self.own:
            raise RuntimeError("vLLM's sampler did not show the logits that it draws from")
        if self._used + n > len(self._lines):
            self._read()
            if n > len(self._lines):
                self._lines = torch.empty(max(ROOM, n), 3, dtype=torch.float32, device=logits.device)
        write_lines(logits, self._processed, sampled, self._lines, range(self._used, self._used + n))
        self._used += n
        self._steps.append(places)
        self._processed = None

    def take(self, texts: Sequence[int], first: Sequence[int], counts: Sequence[int]) -> list[bytes]:
        """Returns the lines of texts, one line of float32 per token, and forgets them."""
        self._read()
        waiting = self._waiting
        is_taken = np.isin(waiting.texts, np.array(texts, np.int32))
        taken = np.flatnonzero(is_taken)
        order = taken[np.lexsort((waiting.places[taken], waiting.texts[taken]))]  # rows of one token keep their order
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (np.diff(waiting.texts[order]) != 0) | (np.diff(waiting.places[order]) != 0)
        rows = waiting.where(order[is_new if self.first_wins else np.append(is_new[1:], True)[: len(order)]])
        self._waiting = waiting.where(~is_taken)
        begins, ends = (np.searchsorted(rows.texts, np.array(texts, np.int32), side) for side in ("left", "right"))
        parts = []
        for begin, end, prompt, count in zip(begins, ends, first, counts, strict=True):
            skipped = np.searchsorted(rows.places[begin:end], prompt) if self.first_wins else 0
            parts.append(rows.lines[begin + skipped : min(begin + skipped + count, end)].tobytes())
        return parts

    def _read(self) -> None:
        """Appends the rows of all steps to those that are not fetched yet."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        before: list[str] = []
        texts, numbers = [self._waiting.texts], np.zeros(0, np.int32)
        for requests, _ in steps:
            if requests != before:  # from step to step, they rarely change
                before = requests
                numbers = np.array(list(map(text_number, requests)), np.int32)
            texts.append(numbers)
        places = [self._waiting.places, *(np.array(token_numbers, np.int32) for _, token_numbers in steps)]
        lines = [self._waiting.lines, self._lines[: self._used].cpu().numpy()]
        self._waiting = SampledRows(*map(np.concatenate, (texts, places, lines)))
        self._used = 0


def text_number(request: str) -> int:
    """The number of a text in the name of its request, to which vLLM may have added something.

    >>> text_number("scoremode-12-9c1f02ab")
    12
    """
    return int(request.split("-")[1])


def write_lines(logits: Tensor, drawn: Tensor | None, sampled: Tensor, lines: Tensor, at: range) -> None:
    """Writes the lines ``at`` for as many rows of a step, whose tokens are ``sampled`` (n or more, 1).

    ``drawn`` are the logits after temperature and filters; None: tokens are drawn from the model's own, or greedily.
    """
    if logits.is_cuda:
        from scoremode.head.rows_triton import write_logprobs

        write_logprobs(logits, drawn, sampled, lines, at)
        return
    n = len(at)
    chosen = sampled[:n, 0]
    raw = logprob_of(logits[:n], chosen)
    bits = chosen.to(torch.int32).view(torch.float32)
    both = [raw if drawn is None else logprob_of(drawn[:n], chosen), raw, bits]
    lines[at.start : at.stop] = torch.stack(both, 1)


def logprob_of(logits: Tensor, chosen: Tensor) -> Tensor:
    """The log-probability (n,) of one token in each row of logits."""
    x = logits.float()
    return x.gather(1, chosen.long()[:, None])[:, 0] - x.logsumexp(1)
