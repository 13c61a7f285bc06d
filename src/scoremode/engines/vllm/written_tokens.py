"""The second log-probability of every token that vLLM samples: in its workers, beside its own sampler.

Loaded only inside vLLM's processes. vLLM returns the log-probability of a sampled token in the distribution that it was
drawn from, and the token's rank, which rollouts do not need. The wrapper replaces the rank by the bits of the
log-probability in the model's own distribution. So vLLM itself brings it to the right request, with asynchronous
scheduling, preemption and chunked prompts, and nothing larger than it was leaves the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 64  # of logits that are reduced in float64 at a time


class WritingWorker:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), so that our writer can call them."""

    def scoremode_write(self) -> None:
        runner = self.model_runner  # type: ignore[attr-defined]
        sampler = runner.sampler
        if isinstance(sampler, torch.nn.Module):  # V1 runner
            sampler.forward = _with_own_logprob(sampler.forward, keeps_logits=False)
        elif sampler is not None:  # V2 runner; None on ranks that do not sample
            runner.sampler = WrappedSampler(sampler)


class WrappedSampler:
    """Takes the place of the V2 runner's sampler, which is called as an object and leaves the logits unchanged."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._sample = _with_own_logprob(stock, keeps_logits=True)

    def __call__(self, logits: Tensor, *rest: Any, **named: Any) -> Any:
        return self._sample(logits, *rest, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def _with_own_logprob(stock: Any, *, keeps_logits: bool) -> Any:
    """Wraps a function from logits to SamplerOutput. Without ``keeps_logits`` it may write into them."""

    def sample(logits: Tensor, *rest: Any, **named: Any) -> Any:
        own = logits if keeps_logits else logits.clone()
        output = stock(logits, *rest, **named)
        given = output.logprobs_tensors
        if given is None:  # no request of this step wants log-probabilities
            return output
        bits = own_logprob(own, output.sampled_token_ids[:, 0]).view(torch.int32)
        output.logprobs_tensors = given._replace(selected_token_ranks=bits.to(given.selected_token_ranks.dtype))
        return output

    return sample


def own_logprob(logits: Tensor, chosen: Tensor) -> Tensor:
    """The log-probability (n,) of one token in each row of logits: computed in float64, rounded to float32."""
    found = []
    for begin in range(0, len(logits), ROWS):
        wide, token = logits[begin : begin + ROWS].double(), chosen[begin : begin + ROWS].long()
        found.append(wide.gather(1, token[:, None])[:, 0] - wide.logsumexp(1))
    return torch.cat(found).float()
