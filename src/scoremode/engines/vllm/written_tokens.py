"""The log-probabilities of every token that vLLM samples: in its workers, beside its own sampler.

Loaded only inside vLLM's processes. vLLM can return the log-probability of a sampled token itself, but it makes Python
objects of it for every text in every step, which takes as long as the step. So our wrapper around the sampler keeps the
log-probabilities of a step together: a few numbers per text are copied to the host, and nothing waits for them. When
texts have ended, our writer fetches theirs by a call to the worker (``WritingWorker``).

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

from scoremode.engines.vllm.replayed_texts import HostCopy

Places = tuple[list[str], list[int]]
"""The request of each row, and the number of the token that the row samples."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One step: the requests and tokens of its rows, and lines of float32: drawn, own, and the bits of the id."""

    requests: list[str]
    places: list[int]
    lines: HostCopy


class WritingWorker:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), so that our writer can call them."""

    def scoremode_write(self, own: bool) -> None:
        """Begins to keep log-probabilities. ``own``: tokens are drawn from the model's own distribution, or greedily.

        There is nothing to keep on ranks that do not sample.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        sampler = runner.sampler
        if isinstance(sampler, torch.nn.Module):
            self._scoremode_sampled = kept = KeptSteps(own, first_wins=False)

            def places() -> Places:
                batch = runner.input_batch
                count = batch.num_reqs
                return list(batch.req_ids[:count]), [len(ids) for ids in batch.req_output_token_ids[:count]]

            sampler.forward = kept.wrap_v1(sampler.forward, places)
        elif sampler is not None:  # V2 runner
            self._scoremode_sampled = kept = KeptSteps(own, first_wins=True)
            runner.sampler = WrappedSampler(sampler, kept)

    def scoremode_take(self, names: list[str], first: list[int], counts: list[int]) -> list[bytes]:
        """Returns the lines of finished texts; nothing on ranks that do not sample.

        ``first`` is the length of each prompt, and ``counts`` the number of tokens that were written after it.
        """
        kept: KeptSteps | None = getattr(self, "_scoremode_sampled", None)
        return [] if kept is None else kept.take(names, first, counts)


class WrappedSampler:
    """Takes the place of the V2 runner's sampler, which is called as an object and leaves the logits unchanged."""

    def __init__(self, stock: Any, kept: KeptSteps) -> None:
        self._stock, self._kept = stock, kept

    def __call__(self, logits: Tensor, batch: Any, *rest: Any, **named: Any) -> Any:
        output = self._stock(logits, batch, *rest, **named)
        lengths = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].tolist()
        self._kept.keep((list(batch.req_ids[: batch.num_reqs]), lengths), logits, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class KeptSteps:
    """The log-probabilities of sampled tokens, until they are fetched."""

    def __init__(self, own: bool, *, first_wins: bool) -> None:
        self.own, self.first_wins = own, first_wins
        self._steps: list[SampledStep] = []
        self._lines: dict[str, dict[int, tuple[float, ...]]] = {}  # of each text, by place

    def wrap_v1(self, stock: Any, places: Callable[[], Places]) -> Any:
        """Wraps a function from logits to SamplerOutput. It writes into the logits if temperature and filters do."""

        def sample(logits: Tensor, *rest: Any, **named: Any) -> Any:
            own = logits if self.own else logits.clone()
            output = stock(logits, *rest, **named)
            self.keep(places(), own, output)
            return output

        return sample

    def keep(self, places: Places, logits: Tensor, output: Any) -> None:
        """Keeps what a step sampled. What vLLM found itself goes no further than this."""
        ids = output.sampled_token_ids[: len(places[0]), 0]
        own = own_logprob(logits[: len(ids)], ids)
        drawn = own if self.own else output.logprobs_tensors.logprobs[: len(ids), 0]
        output.logprobs_tensors = None
        lines = torch.stack([drawn.float(), own, ids.to(torch.int32).view(torch.float32)], 1)
        self._steps.append(SampledStep(*places, HostCopy(lines)))

    def take(self, names: Sequence[str], first: Sequence[int], counts: Sequence[int]) -> list[bytes]:
        """Returns the lines of texts by name, one line of float32 per token, and forgets them."""
        self._read()
        found = []
        for name, begin, count in zip(names, first, counts, strict=True):
            lines, start = self._lines.pop(name, {}), begin if self.first_wins else 0
            found.append(np.array([lines[start + place] for place in range(count)], np.float32).tobytes())
        return found

    def _read(self) -> None:
        """Puts the lines of all steps under the names of their texts."""
        steps, self._steps = self._steps, []
        for step in steps:
            for request, place, line in zip(step.requests, step.places, step.lines.read().tolist(), strict=True):
                own = self._lines.setdefault(text_name(request), {})
                if not (self.first_wins and place in own):
                    own[place] = line


def text_name(request: str) -> str:
    """The name that our writer gave to a request, to which vLLM may have added something.

    >>> text_name("scoremode-12-9c1f02ab")
    'scoremode-12'
    """
    return "-".join(request.split("-")[:2])


def own_logprob(logits: Tensor, chosen: Tensor) -> Tensor:
    """The log-probability (n,) of one token in each row of logits, in the model's own distribution."""
    x = logits.float()
    return x.gather(1, chosen.long()[:, None])[:, 0] - x.logsumexp(1)
