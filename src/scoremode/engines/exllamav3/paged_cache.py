"""ExLlamaV3's paged cache of keys and values, for several sequences that are decoded side by side.

pages          0 1 2 │ 3 4 5 │ 6 7 8        each sequence has its own pages, of 256 tokens each
sequence       0     │ 1     │ 2

A step is what ExLlamaV3's ``Generator`` computes for its active jobs: one token per sequence, with a table of their
pages and the number of tokens that each has in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.steps import Feed
from scoremode.errors import EngineError

PAGE = 256  # tokens; the library's PAGE_SIZE
TABLE_STEP = 16  # pages; the Generator's tables have a multiple of this many columns
CHUNK = 2048  # most tokens in a pass of the prefill, as in the Generator

Bits = tuple[int, int]
"""Bits per element of the cached keys and of the cached values."""


class PagedCache:
    """A cache for ``sequences`` windows of at most ``longest`` tokens. It belongs to a model that is not loaded yet."""

    def __init__(self, model: Any, sequences: int, longest: int, bits: Bits | None) -> None:
        import exllamav3
        from exllamav3.cache import CacheLayer_fp16, CacheLayer_quant

        self.model, self.sequences, self.bits = model, sequences, bits
        each = -(-longest // PAGE)
        self.longest, self.tokens = each * PAGE, sequences * each * PAGE
        kind: dict[str, Any] = {"layer_type": CacheLayer_fp16}
        if bits is not None:
            kind = {"layer_type": CacheLayer_quant, "k_bits": bits[0], "v_bits": bits[1]}
        self._cache = exllamav3.Cache(model, max_num_tokens=self.tokens, max_batch_size=sequences, **kind)
        columns = -(-each // TABLE_STEP) * TABLE_STEP
        self._pages = torch.zeros(sequences, columns, dtype=torch.int32)  # no kernel reads the columns after its pages
        self._pages[:, :each] = torch.arange(sequences * each, dtype=torch.int32).view(sequences, each)

    @contextmanager
    def emptied(self, sequences: int) -> Iterator[list[Any] | None]:
        """Begins new sequences. Yields the states of layers that keep more than pages, if the model has such layers."""
        states: list[Any] = []
        try:
            if self.model.caps.get("recurrent_states"):  # sliding windows, linear attention
                while len(states) < sequences:
                    states.append(self._cache.get_new_state())
            yield states or None
        finally:
            for state in states:
                self._cache.release_state(state)

    def compute(self, feed: Feed, states: Sequence[Any] | None) -> Tensor | None:
        """Feeds tokens after those in the cache; returns logits (rows, padded vocabulary) of the requested rows."""
        count, length = feed.ids.shape
        filled = -(-(feed.begin + length) // PAGE)
        parameters: dict[str, Any] = {
            "attn_mode": "flash_attn",
            "cache": self._cache,
            "block_table": self._pages[feed.places, : -(-filled // TABLE_STEP) * TABLE_STEP].contiguous(),
            "cache_seqlens": torch.full((count,), feed.begin, dtype=torch.int32),
            "recurrent_states": None if states is None else [states[place] for place in feed.places],
        }
        ids = torch.from_numpy(feed.ids.astype(np.int64))
        if not feed.rows and not feed.is_step:
            self.model.prefill(ids, parameters)  # fills the cache, and leaves the head out
            return None
        skipped = 0 if feed.is_step else int(feed.lines[0])
        if skipped:
            parameters["last_tokens_only"] = length - skipped
        logits: Tensor = self.model.forward(ids, parameters)
        if logits.shape[:2] != (count, length - skipped):
            raise EngineError(f"ExLlamaV3 gives logits of shape {tuple(logits.shape)}", fix="report this model")
        if not feed.rows:
            return None
        logits = logits.flatten(0, 1)
        if len(feed.rows) == len(logits):
            return logits
        return logits[torch.from_numpy(feed.lines - skipped).to(logits.device)]
