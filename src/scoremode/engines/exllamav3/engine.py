"""The ExLlamaV3 engine: float16 logits of its own kernels, reduced by scoremode's head code on the same GPU.

One window is one forward pass without a cache, as ExLlamaV3's own perplexity script feeds it. Where only the last rows
of a window are asked for, the head is applied to those alone. On the decode path, windows are fed token by token, side
by side, with ExLlamaV3's paged cache of keys and values:

pages          0 1 2 │ 3 4 5 │ 6 7 8        each sequence has its own pages, of 256 tokens each
sequence       0     │ 1     │ 2

A step is what ExLlamaV3's ``Generator`` computes for its active jobs: one token per sequence, with a table of their
pages and the number of tokens that each has in the cache.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import SCORES, EngineFacts, Wanted
from scoremode.core.engine.distributions import IndexedWindow
from scoremode.core.engine.logits import LogitsReducer, Reduced, judge_probe
from scoremode.core.engine.steps import Feed, StepEngine, StepRow, feeds, score_side_by_side
from scoremode.core.models.facts import ModelFacts
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.head.precision import full_float32
from scoremode.values import Bools

PAGE = 256  # tokens; the library's PAGE_SIZE
TABLE_STEP = 16  # pages; the Generator's tables have a multiple of this many columns
CHUNK = 2048  # most tokens in a pass of the prefill, as in the Generator
PROBE_TOKENS = 160  # more than ExLlamaV3's border between its kernels for few and for many rows
STEPPED = (40, 24)  # tokens of the windows that are decoded side by side for the self-test
SLACK = 0.05  # of the largest logit, between two ways to compute the same row in float16


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
        self._pages = torch.zeros(sequences, columns, dtype=torch.int32)  # kernels read only columns that have a page
        self._pages[:, :each] = torch.arange(sequences * each, dtype=torch.int32).view(sequences, each)

    @contextlib.contextmanager
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


class ExllamaEngine(StepEngine):
    def __init__(
        self,
        facts: ModelFacts,
        device: str | None,
        tensor_parallel: bool,
        kernel_switches: dict[str, str],
        *,
        path: DecodePath | None = None,
        longest: int = 0,
        bits: Bits | None = None,
    ) -> None:
        self.path = path
        self.cache: PagedCache | None = None
        with contextlib.redirect_stdout(sys.stderr):  # ExLlamaV3 prints while it compiles and loads
            self.config, self.model = _prepare(facts)
            if path is not None:  # a cache gets its memory while the model is loaded
                self.cache = PagedCache(self.model, path.sequences, max(longest, *STEPPED), bits)
                self.longest = self.cache.longest
            _load(self.model, facts, device, tensor_parallel, self.cache)
        self.vocabulary = int(facts.vocabulary or self.config.vocab_size)
        notes = self._self_test()
        if path is not None:
            self._require_steps()
        devices = sorted({str(device) for device in self.model.active_devices}) or [str(self.device)]
        self.facts = EngineFacts(
            engine="exllamav3",
            dtype="float16",
            device=", ".join([torch.cuda.get_device_name(self.device), *devices]),
            head="as-served",
            vocabulary=self.vocabulary,
            context_length=facts.context_length,
            versions={"exllamav3": version("exllamav3")},
            settings={
                "attention": "flash_attn_nc" if path is None else "flash_attn",
                "tensor_parallel": tensor_parallel,
                "logits": "float16",
                **({} if path is None else dict(zip(("cache_bits_k", "cache_bits_v"), bits or (16, 16), strict=True))),
                **kernel_switches,
            },
            notes=(*facts.notes, *notes),
        )

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.output_device or "cuda:0")

    # ── logits ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _logits(self, ids: Any, last: int | None = None) -> Tensor:
        """Logits (rows, vocabulary) of a window, or of its last rows; padded columns are cut off."""
        parameters: dict[str, Any] = {"attn_mode": "flash_attn_nc"}
        if last is not None:
            parameters["last_tokens_only"] = last
        logits: Tensor = self.model.forward(torch.from_numpy(ids.astype(np.int64))[None], parameters)[0]
        return logits[:, : self.vocabulary]

    def logits(self, window: Window) -> Iterator[tuple[slice, Tensor]]:
        """Yields the logits of all rows of a window at once."""
        with self._within_memory(window):
            rows = self._rows(window)
        yield slice(0, len(window.rows)), rows

    def _rows(self, window: Window) -> Tensor:
        """The logits of the rows that a window asks for, in float16 as the kernels give them."""
        last = len(window.ids) - int(window.rows[0])
        logits = self._logits(window.ids, last)
        if len(window.rows) == last:
            return logits
        return logits[torch.from_numpy(window.rows - window.rows[0]).long().to(logits.device)]

    def _self_test(self) -> tuple[str, ...]:
        """Check that the last rows alone get the same logits as with all rows, and that no row sees later tokens."""
        ids = (np.arange(PROBE_TOKENS) * 7 + 3) % self.vocabulary
        whole = self._logits(ids).float()
        if whole.shape != (PROBE_TOKENS, self.vocabulary):
            raise EngineError(f"ExLlamaV3 gives logits of shape {tuple(whole.shape)}", fix="report this model")
        if not bool(whole.isfinite().all()):
            raise EngineError("the model gives NaN", fix="its activations do not fit into float16, or it is damaged")
        size = whole.abs().max().clamp_min(1.0)
        some = PROBE_TOKENS // 4
        tail = self._logits(ids, some).float() - whole[-some:]
        if float(tail.abs().max() / size) > SLACK:
            raise EngineError("ExLlamaV3 gives other logits if it computes only the last rows", fix="report this model")
        ids[-1] = (ids[-1] + 1) % self.vocabulary
        return judge_probe(whole, self._logits(ids).float()[:-1], SLACK)

    # ── the decode path ──────────────────────────────────────────────────────────────────────────────────────────────
    def steps(self, windows: Sequence[Window]) -> Iterator[tuple[list[StepRow], Tensor]]:
        assert self.path is not None, "an engine that was opened for the decode path"
        assert self.cache is not None, "the decode path has one"
        with self.cache.emptied(len(windows)) as states:
            for feed in feeds(windows, self.path.prefill_tokens, CHUNK):
                with self._within_memory(windows[0]):
                    logits = self.cache.compute(feed, states)
                if logits is not None:
                    yield feed.rows, logits[:, : self.vocabulary]

    def _require_steps(self) -> None:
        """Refuse a model whose logits differ if it is fed token by token; with a quantized cache, they may."""
        assert self.cache is not None, "the decode path has one"
        lengths = STEPPED[: self.cache.sequences]
        ids = [(np.arange(length, dtype=np.int32) * 7 + 3) % self.vocabulary for length in lengths]
        windows = [Window(x, np.arange(len(x), dtype=np.int32), x[:, None]) for x in ids]
        whole = [self._logits(x).float() for x in ids]
        size = torch.stack([expected.abs().max() for expected in whole]).max().clamp_min(1.0)
        for rows, logits in self.steps(windows):
            stepped = logits.float()
            if not bool(stepped.isfinite().all()):
                raise EngineError("the model gives NaN if it is fed token by token", fix="leave --path out")
            far = (stepped - torch.stack([whole[place][row] for place, row in rows])).abs().max() / size
            if self.cache.bits is None and float(far) > SLACK:
                message = f"the logits of {self.config.architecture} are other ones if it is fed token by token"
                raise EngineError(message, fix="leave --path out, and report this model")

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if want.states:
            raise EngineError(
                "ExLlamaV3's head is quantized, so no reference can be kept",
                fix="use an unquantized checkpoint for a reference, with --engine transformers",
            )
        reducer = LogitsReducer(source, want, self.device, self.vocabulary)
        if self.path is not None:
            yield from score_side_by_side(self, source, done, reducer)
            return
        waiting: tuple[IndexedWindow, list[Reduced]] | None = None
        for index in np.flatnonzero(~done).tolist():
            indexed = index, source.window(index)
            with self._within_memory(indexed[1]):
                parts = reducer.reduce(indexed, slice(0, len(indexed[1].rows)), self._rows(indexed[1]))
            if waiting is not None:  # read one window late: the GPU already has the next one to work on
                yield _answered(waiting, reducer)
            waiting = indexed, parts
        if waiting is not None:
            yield _answered(waiting, reducer)

    @contextlib.contextmanager
    def _within_memory(self, window: Window) -> Iterator[None]:
        """Computes without gradients and TF32; says in one line which window does not fit on the GPU."""
        try:
            with full_float32(), torch.inference_mode():
                yield
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise EngineError(
                f"a window of {len(window.ids)} tokens does not fit in this device's memory",
                fix="give a smaller --context-length" + ("" if self.path is None else ", or fewer --sequences"),
            ) from None

    def close(self) -> None:
        self.model.unload()
        torch.cuda.empty_cache()


def _answered(waiting: tuple[IndexedWindow, list[Reduced]], reducer: LogitsReducer) -> tuple[int, Answers]:
    (index, window), parts = waiting
    return index, reducer.answers(parts, window.targets.shape[1])


def _prepare(facts: ModelFacts) -> tuple[Any, Any]:
    """Reads the config of a model, and makes the model without its weights."""
    import exllamav3

    with _explained(facts):
        config = exllamav3.Config.from_directory(str(facts.path))
        return config, exllamav3.Model.from_config(config)


def _load(model: Any, facts: ModelFacts, device: str | None, tensor_parallel: bool, cache: PagedCache | None) -> None:
    """Loads the weights, and allocates the cache beside them."""
    if tensor_parallel and device is not None:
        raise OptionError("--tensor-p uses all visible GPUs", fix="leave --device out; set CUDA_VISIBLE_DEVICES")
    if device is None and not tensor_parallel and torch.cuda.device_count() == 1:
        device = "cuda:0"
    # a pass of this many tokens measures the memory of each of several GPUs, and must fit into the cache
    chunk = {} if device is not None or cache is None else {"max_chunk_size": min(CHUNK, cache.tokens)}
    with _explained(facts, cache):
        model.load(**({"tensor_p": True} if tensor_parallel else {"device": device}), **chunk)


@contextlib.contextmanager
def _explained(facts: ModelFacts, cache: PagedCache | None = None) -> Iterator[None]:
    """Turns what ExLlamaV3 raises while it opens a model into one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        fix = "use more GPUs, or a smaller version"
        if cache is not None:
            fix = f"{fix}; fewer --sequences make the cache of {cache.tokens} tokens smaller"
        raise EngineError(f"the weights of {facts.name} do not fit on the GPU", fix=fix) from None
    except (AssertionError, ValueError, KeyError, RuntimeError, OSError) as error:
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise ModelError(
            f"ExLlamaV3 cannot load {facts.name}: {reason}", fix="check the model, or its version"
        ) from None
