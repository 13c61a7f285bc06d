"""The MLX engine: final hidden states from mlx-lm's own models and kernels, on the device that MLX has.

By default, scoremode's head computes logits from the states in float32. With ``--head as-served``, the model computes
its own logits, a few rows at a time. A window is one forward pass without a cache, as ``mlx_lm.perplexity`` feeds it.
On the decode path, windows are fed token by token, side by side from position 0 on, with the caches of
``mlx_lm.generate``: after each pass, a cache that has enough tokens is quantized for good.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import UNIFORM, EngineFacts, StoredHead
from scoremode.core.engine.batching import common_prefix, prompt_groups
from scoremode.core.engine.distributions import IndexedWindow, store_head
from scoremode.core.engine.states import Finish, StatesEngine, agree
from scoremode.core.engine.steps import StepEngine
from scoremode.core.models.facts import ModelFacts
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.engines.mlx.mlx_options import CACHE_BITS, GROUP, MlxOptions, quantization_of
from scoremode.engines.mlx.model import RecordedModel, config_notes, device_of, load_model, stored_types, to_torch
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.head.kernels import choose, describe_kernel
from scoremode.head.matrix import Head
from scoremode.head.precision import full_float32
from scoremode.values import Bools, Ids

STEPS_SLACK = 10.0  # × the tolerance of one product: steps go through all layers


class MlxEngine(StepEngine, StatesEngine):
    def __init__(self, facts: ModelFacts, options: MlxOptions, path: DecodePath | None = None) -> None:
        super().__init__(options)
        self.options, self.path, self.device, self._longest = options, path, torch.device("cpu"), 0
        device, device_name = device_of(options.device)
        loaded, self.vocabulary = load_model(facts, options, device)
        self.model = RecordedModel(loaded, self.vocabulary, facts.name, device)
        self.bits = CACHE_BITS.get(options.kv_cache_dtype or "")
        start = options.quantized_kv_start or 0
        self._quantizing = {"kv_group_size": options.kv_group_size or GROUP, "quantized_kv_start": start}
        types, unquantized = stored_types(loaded, quantization_of(facts.config))
        notes = [*config_notes(loaded, facts.config, self._cache()), *unquantized]
        self.head, dtype = self._choose_head(notes)
        if path is not None:
            self._require_steps()
        self.facts = EngineFacts(
            engine="mlx",
            dtype=dtype,
            device=device_name,
            head="exact-fp32" if self.head else "as-served",
            vocabulary=self.vocabulary,
            context_length=facts.context_length,
            versions={"mlx": version("mlx"), "mlx-lm": version("mlx-lm")},
            settings={
                "types": types,
                "prefill_step_size": options.prefill_step_size,
                **({} if self.bits is None else {"kv_cache_dtype": options.kv_cache_dtype, **self._quantizing}),
                **describe_kernel(self.choice),
            },
            notes=(*facts.notes, *notes),
        )

    # ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _probe_ids(self) -> Ids:
        return (np.arange(64, dtype=np.int32) * 7 + 3) % self.vocabulary

    @full_float32()
    @torch.inference_mode()
    def _choose_head(self, notes: list[str]) -> tuple[Head | None, str]:
        """The head if its matrix gives the model's logits on a test input, else None; and the dtype of the states."""
        ids, options = self._probe_ids(), self.options
        hidden, expected = self.model.probe(ids)
        if not bool(expected.isfinite().all()):
            raise EngineError("the model gives NaN", fix="try --dtype float32; if that does not help, it is damaged")
        if bool((expected == expected[:, :1]).all()):
            notes.append(UNIFORM)
        self._require_causal(ids, hidden)
        dtype = str(hidden.dtype).removeprefix("torch.")
        head = None if options.head == "as-served" else self.model.exact_head(hidden, expected)
        if head is not None:
            self.choice = choose(head, options.head_kernel, divergence=False)
            return head, dtype
        if options.head != "as-served":
            reason = f"{self.model.name} changes its logits after its head in a way that is not known"
            if options.head == "exact":
                raise OptionError(f"--head exact: {reason}", fix="use --head as-served")
            notes.append(f"{reason}: its own logits are used")
        if options.head_kernel is not None:
            raise OptionError("--head-kernel: the model's own logits are used", fix="leave --head-kernel out")
        return None, dtype

    def _require_causal(self, ids: Ids, hidden: Tensor) -> None:
        """Refuse a model whose earlier rows change with the last token: it would see its targets."""
        other = np.append(ids[:-1], (ids[-1] + 1) % self.vocabulary)
        if not agree(self._states(other[None])[0, :-1].float(), hidden[:-1].float(), hidden.dtype):
            raise ModelError(f"{self.model.name} looks at tokens to the right", fix="choose a causal language model")

    def _served_logits(self, hidden: Tensor) -> Tensor:
        return self.model.served(hidden)

    def stored_head(self) -> StoredHead:
        if self.head is None:
            raise ModelError("no reference can be kept of the model's own logits", fix="leave --head out")
        return store_head(self.head)

    # ── caches ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _cache(self) -> Any:
        """An empty cache, as ``mlx_lm.generate`` makes it."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model.model)

    def _fed(self, ids: Ids, cache: Any, bits: int | None) -> Tensor:
        """Feeds tokens (n, m) after those in a cache; final states (n, m, d). Then the cache is quantized, if ever."""
        from mlx_lm.generate import maybe_quantize_kv_cache

        states = to_torch(self.model.states(ids, cache))
        maybe_quantize_kv_cache(cache, **self._quantizing, kv_bits=bits)
        return states

    def _stepped(self, ids: Ids, first: int, bits: int | None) -> Tensor:
        cache = self._cache()
        states = [self._fed(ids[:, :first], cache, bits)]
        for at in range(first, ids.shape[1]):
            states.append(self._fed(ids[:, at : at + 1], cache, bits))
            if self.watch is not None:
                self.watch(len(ids) * at)
        return torch.cat(states, 1)

    def _require_steps(self) -> None:
        """Refuse a model that computes something else if it is fed token by token, or whose cache has no such type."""
        ids, name = self._probe_ids()[None, :12], self.model.name
        whole, stepped = self._states(ids), self._stepped(ids, 1, None)
        if not agree(stepped.float(), whole.float(), whole.dtype, STEPS_SLACK):
            raise ModelError(f"{name} gives other states if it is fed token by token", fix="leave --path out")
        if self.bits is None:
            return
        start, self._quantizing["quantized_kv_start"] = self._quantizing["quantized_kv_start"], 0
        reason = "it gives NaN"
        try:
            if bool(self._stepped(ids, 1, self.bits).isfinite().all()):
                return
        except Exception as error:  # whatever a model's own attention raises
            reason = str(error).strip().split("\n")[0][:160] or type(error).__name__
        finally:
            self._quantizing["quantized_kv_start"] = start
        setup = f"{name} with an {self.options.kv_cache_dtype} cache in groups of {self._quantizing['kv_group_size']}"
        raise ModelError(f"mlx-lm cannot score {setup} ({reason})", fix="leave --kv-cache-dtype out")

    def account(self) -> dict[str, Any]:
        longest, self._longest = self._longest, 0
        start = self._quantizing["quantized_kv_start"]
        if self.bits is None or longest > start:
            return {}
        return {"notes": [f"no window read a quantized token: the longest has {longest}; --quantized-kv-start {start}"]}

    # ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _states(self, ids: Ids) -> Tensor:
        """Final states (n, m, d) of whole windows by prefill: in one pass, or in several with a cache."""
        step = self.options.prefill_step_size
        if step is None or step >= ids.shape[1]:
            return to_torch(self.model.states(ids))
        cache = self._cache()
        return torch.cat([self._fed(ids[:, i : i + step], cache, None) for i in range(0, ids.shape[1], step)], 1)

    def _finished(self, source: WindowSource, done: Bools, finish: Finish) -> Iterator[tuple[int, Answers]]:
        for group in (group for group in self.batches(source) or prompt_groups(source) if not done[group].all()):
            windows = [(int(index), source.window(int(index))) for index in group]
            for (index, window), rows in self._rows(windows, done):
                with full_float32(), torch.inference_mode():
                    (answers,) = finish(rows, [(index, window)])
                yield index, answers

    def _rows(self, windows: list[IndexedWindow], done: Bools) -> Iterator[tuple[IndexedWindow, Tensor]]:
        """Yields the states of the rows that each window asks for, of windows that are not done."""
        if self.path is not None:
            tokens = [_needed(window) for _, window in windows]
            ids = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
            for line, sequence in zip(ids, tokens, strict=True):
                line[: len(sequence)] = sequence  # what follows the end of a window is seen by none of its rows
            self._longest = max(self._longest, ids.shape[1])
            hidden = self._stepped(ids, self.path.prefill_tokens, self.bits)
            yield from (
                (indexed, hidden[i, indexed[1].rows.tolist()])
                for i, indexed in enumerate(windows)
                if not done[indexed[0]]
            )
            return
        is_alone = len(windows) < 2 or self.options.prefill_step_size is not None
        shared = 0 if is_alone else common_prefix([_needed(window) for _, window in windows])
        shared, cache = shared if shared > 1 else 0, self._cache()
        prefix = [self._fed(windows[0][1].ids[None, :shared], cache, None)] if shared else []
        for indexed in (indexed for indexed in windows if not done[indexed[0]]):
            rest = _needed(indexed[1])[None, shared:]
            fed = partial(self._fed, cache=copy.deepcopy(cache), bits=None) if shared else self._states
            after = [fed(rest)] if rest.size else []  # as mlx_lm.server does
            yield indexed, torch.cat([*prefix, *after], 1)[0, indexed[1].rows.tolist()]


def _needed(window: Window) -> Ids:
    """The tokens of a window up to the last requested row: only these are fed."""
    return window.ids[: int(window.rows[-1]) + 1]
