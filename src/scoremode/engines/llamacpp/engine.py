"""The llama.cpp engine: the logits of llama.cpp's own kernels for a GGUF file, reduced by scoremode's head code.

A window is decoded as ``llama-perplexity`` decodes it: from an empty cache, at most ``n_batch`` tokens at a time, with
logits switched on for the rows that are asked for. Each decode's logits are reduced before the next one overwrites
them, so there is never more than one batch of logits in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import SCORES, EngineFacts, Wanted
from scoremode.core.engine.batching import common_prefix, prompt_groups
from scoremode.core.engine.distributions import IndexedWindow
from scoremode.core.engine.logits import LogitsReducer, judge_probe
from scoremode.core.engine.steps import StepEngine, feeds, score_side_by_side
from scoremode.core.models.gguf import GgufFacts, gguf_constants
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.engines.llamacpp.library import Batch, Library, freed_with, library
from scoremode.engines.llamacpp.llamacpp_options import (
    FLASH_ATTENTION,
    MOST_THREADS,
    LlamaCppOptions,
    LlamaCppParameters,
)
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.values import Bools, Ids

PROBE_TOKENS = 12
SLACK = 0.01  # of the largest logit: rows of equal batches are equal on a CPU, and nearly so elsewhere
CELLS = 256  # llama.cpp computes attention to its cache in steps of so many tokens
MODE_ERRORS = {1: "its cache is too small for the window", 2: "it was interrupted", -1: "it refused the batch"}


class LlamaCppEngine(StepEngine):
    def __init__(
        self, facts: GgufFacts, vocabulary: int, options: LlamaCppOptions, longest: int, path: DecodePath | None = None
    ) -> None:
        self._llama: Library = library()
        self._held = freed_with(self)
        self._model = self._context = None
        self.choices, self.vocabulary = LlamaCppParameters.of(options), vocabulary
        self.path, self.threads = path, options.threads or min(cores(), MOST_THREADS)
        if path is not None and path.sequences > self.choices.n_batch:
            few = f"--n-batch {self.choices.n_batch} has no room for a step of {path.sequences} sequences"
            raise OptionError(few, fix=f"give --n-batch {path.sequences}, or fewer --sequences")
        _require_whole_blocks(facts, self.choices)
        self._load(facts)
        self.longest = max(longest, PROBE_TOKENS)
        self._context = self._open_context(self.longest)
        self.at_once: int = self._llama.call.llama_n_batch(self._context)  # not more than fit into the context
        call = self._llama.call
        self._rewinds = not (call.llama_model_is_recurrent(self._model) or call.llama_model_is_hybrid(self._model))
        only_cpu = call.ggml_backend_reg_count() == 1  # no GPU, and no BLAS
        self._cuts = only_cpu and self._rewinds and self.choices.flash_attn == "off"
        self._cuts &= self.choices.n_ubatch % CELLS == 0
        on_gpu = call.llama_supports_gpu_offload() and self.choices.n_gpu_layers != 0
        notes = (*self._self_test(), *(() if on_gpu else self._llama.slowness()))
        self.facts = EngineFacts(
            engine="llamacpp",
            dtype=facts.quantization,
            device="gpu" if on_gpu else "cpu",
            head="as-served",
            vocabulary=vocabulary,
            context_length=facts.number("context_length"),
            versions={"llamacpp": f"{self._llama.package} {self._llama.version}"},
            settings={
                **self.choices.settings(),
                "threads": self.threads,
                "kernels": self._llama.kernels,
                "types": facts.types,
            },
            notes=notes,
        )

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _load(self, facts: GgufFacts) -> None:
        call = self._llama.call
        parameters = call.llama_model_default_params()
        parameters.check_tensors = True  # a damaged file is refused, not scored
        if self.choices.n_gpu_layers is not None:
            parameters.n_gpu_layers = self.choices.n_gpu_layers
        self._model = model = self._llama.load(facts.files[0], parameters)
        self._held.callback(call.llama_model_free, model)
        if call.llama_model_has_encoder(model):
            raise ModelError(f"{facts.files[0]} has an encoder", fix="choose a causal language model")
        count = call.llama_vocab_n_tokens(call.llama_model_get_vocab(model))
        if count != self.vocabulary:
            raise ModelError(f"{facts.files[0]} has {count} ids, not {self.vocabulary}", fix="download it again")

    def _open_context(self, longest: int) -> Any:
        call, choices, types = self._llama.call, self.choices, gguf_constants().GGMLQuantizationType
        parameters = call.llama_context_default_params()
        parameters.n_seq_max = sequences = 1 if self.path is None else self.path.sequences
        parameters.n_ctx = longest * sequences  # each sequence has its own part of the cache
        parameters.n_batch, parameters.n_ubatch = choices.n_batch, choices.n_ubatch
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.flash_attn_type = FLASH_ATTENTION[choices.flash_attn]
        parameters.type_k = int(types[choices.cache_type_k.upper()])
        parameters.type_v = int(types[choices.cache_type_v.upper()])
        parameters.no_perf = True
        self._observe(parameters)
        self._llama.complaints.clear()
        context = call.llama_init_from_model(self._model, parameters)
        if not context:
            raise EngineError(
                f"llama.cpp cannot open a context of {longest * sequences} tokens: "
                f"{self._llama.complaint() or 'no reason given'}",
                fix="give a smaller --context-length or --n-batch, or another --cache-type-k and --cache-type-v"
                + (", or fewer --sequences" if sequences > 1 else ""),
            )
        self._held.callback(call.llama_free, context)
        return context

    def _observe(self, parameters: Any) -> None:
        """Sets callbacks of a context that is about to be opened."""

    def _self_test(self) -> tuple[str, ...]:
        """Check that logits read together equal those read row by row, and that no row depends on later tokens."""
        count = min(PROBE_TOKENS, self.at_once)  # more tokens in one decode would end the process
        ids = (np.arange(count, dtype=np.int32) * 7 + 3) % self.vocabulary
        rows = np.arange(count, dtype=np.int32)
        together = self._decode(ids, 0, rows).clone()
        pointers = [self._llama.call.llama_get_logits_ith(self._context, i) for i in range(count)]
        each = torch.from_numpy(np.stack([np.ctypeslib.as_array(pointer, (self.vocabulary,)) for pointer in pointers]))
        if not bool(together.isfinite().all()):
            raise EngineError("the model gives NaN", fix="the file is damaged, or its type is not supported here")
        if not torch.equal(together, each):
            raise EngineError("llama.cpp gives its logits in another order than expected", fix="report this model")
        ids[-1] = (ids[-1] + 1) % self.vocabulary
        return judge_probe(together, self._decode(ids, 0, rows)[:-1], SLACK)

    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a text, as llama.cpp knows them."""
        call, vocab = self._llama.call, self._llama.call.llama_model_get_vocab(self._model)
        return frozenset(token for token in range(self.vocabulary) if call.llama_vocab_is_eog(vocab, token))

    # ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _decode(self, ids: Ids, at: int, rows: Ids) -> Tensor:
        """Feed tokens from position ``at`` on; return logits (rows, vocabulary), valid until the next decode."""
        if at == 0:
            self.clear()
        return self.feed(ids, np.arange(at, at + len(ids)), np.zeros(len(ids)), rows)

    def clear(self) -> None:
        """Removes all tokens of all sequences from the cache."""
        if not self._context:
            raise EngineError("this engine is closed", fix="open it again")
        self._llama.call.llama_memory_clear(self._llama.call.llama_get_memory(self._context), False)

    def feed(self, ids: Any, positions: Any, sequences: Any, rows: Any) -> Tensor:
        """Feed tokens in one decode, each at its position of its sequence; return logits as ``_decode`` does."""
        call, count = self._llama.call, len(ids)
        if not self._context:
            raise EngineError("this engine is closed", fix="open it again")
        token, position, sequence = (np.ascontiguousarray(x, np.int32) for x in (ids, positions, sequences))
        per_token = np.ones(count, np.int32)  # every token belongs to one sequence
        pointers = sequence.ctypes.data + sequence.itemsize * np.arange(count, dtype=np.uint64)
        output = np.zeros(count, np.int8)
        output[rows] = 1
        arrays = (token, None, position, per_token, pointers, output)
        batch = Batch(count, *(None if x is None else int(x.ctypes.data) for x in arrays))
        self._llama.complaints.clear()
        failed = call.llama_decode(self._context, batch)
        if failed:
            reason = MODE_ERRORS.get(failed) or self._llama.complaint() or f"error {failed}"
            raise EngineError(
                f"llama.cpp could not decode {count} tokens: {reason}",
                fix="give a smaller --context-length or --n-batch",
            )
        if not len(rows):
            return torch.empty(0, self.vocabulary)
        return torch.from_numpy(
            np.ctypeslib.as_array(call.llama_get_logits(self._context), (len(rows), self.vocabulary))
        )

    def logits(self, window: Window, begin: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yields the logits of a window's rows, decode by decode; the cache already has the tokens before ``begin``."""
        quiet = 0 if begin else self._quiet(window)
        for first in (*range(0, quiet, CELLS), *range(quiet or begin, len(window.ids), self.at_once)):
            part = window.ids[first : first + (CELLS if first < quiet else self.at_once)]
            inside = slice(*np.searchsorted(window.rows, [first, first + len(part)]).tolist())
            logits = self._decode(part, first, window.rows[inside] - first)
            if inside.start < inside.stop:
                yield inside, logits

    def _quiet(self, window: Window) -> int:
        """The number of first tokens, none of whose rows are requested, that are decoded CELLS at a time.

        In a decode of 512 tokens, the first 256 also compute attention to the last 256, which they may not see: 6 % of
        the time for SmolLM2-135M. Scores have the bits of one decode, because kernels differ only in the last tokens of
        a batch (up to 15 are computed apart), for odd lengths, and between back ends; a cut here changes none of these.
        """
        count, ubatch = len(window.ids), self.choices.n_ubatch
        if not self._cuts or count > self.at_once or count % 2 or not len(window.rows):
            return 0
        quiet = min(int(window.rows[0]), count - CELLS) // CELLS * CELLS
        return max(0, quiet if count <= ubatch else quiet // ubatch * ubatch)

    def steps(self, windows: Sequence[Window]) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
        assert self.path is not None, "an engine that was opened for the decode path"
        self.clear()
        for feed in feeds(windows, self.path.prefill_tokens, self.at_once):
            count, length = feed.ids.shape
            positions = np.tile(np.arange(feed.begin, feed.begin + length), count)
            # logits of every sequence, as a server computes them: with fewer rows, the last layer has other kernels
            lines = np.arange(count) if feed.is_step else feed.lines
            logits = self.feed(feed.ids.reshape(-1), positions, np.repeat(feed.places, length), lines)
            if feed.rows:
                yield feed.rows, logits if len(feed.rows) == len(lines) else logits[feed.lines]

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if want.states:
            raise EngineError(
                "llama.cpp does not give hidden states with the head that belongs to them",
                fix="use an unquantized Hugging Face checkpoint for a reference",
            )
        reducer = LogitsReducer(source, want, torch.device("cpu"), self.vocabulary)
        if self.path is not None:
            yield from score_side_by_side(self, source, done, reducer)
            return
        for group in prompt_groups(source):
            if done[group].all():
                continue
            windows = [(int(i), source.window(int(i))) for i in group]
            shared = self._feed_shared(windows)
            for index, window in windows:
                if not done[index]:
                    yield index, self._answers((index, window), shared, reducer)

    def _feed_shared(self, windows: list[IndexedWindow]) -> int:
        """Feed once the tokens that all windows begin with, up to the first requested row; return how many were fed."""
        if len(windows) == 1 or not self._rewinds:
            return 0
        most = min(int(w.rows[0]) for _, w in windows)
        equal = common_prefix([w.ids[:most] for _, w in windows])
        shared = self._never_alone(equal, min(len(w.ids) for _, w in windows))
        prompt, none = windows[0][1].ids[:shared], np.zeros(0, np.int32)
        for begin in range(0, shared, self.at_once):
            self._decode(prompt[begin : begin + self.at_once], begin, none)
        return shared

    def _never_alone(self, shared: int, shortest: int) -> int:
        """The number of tokens to share: slightly fewer where otherwise a single token would be computed alone.

        llama.cpp has other kernels for one token than for two or more, and a score must not depend on the windows
        beside it: with a cache in float16, the difference was up to 0.07 nats. So on x86, shared prompts give the bits
        of windows that are fed alone. ggml's ARM kernels depend on the length of every batch: there, 2e-6 nats remain.
        """
        shared = max(0, min(shared, shortest - 2))
        return shared - (shared % self.at_once % self.choices.n_ubatch == 1)

    def _answers(self, indexed: IndexedWindow, shared: int, reducer: LogitsReducer) -> Answers:
        call, window = self._llama.call, indexed[1]
        if shared and not call.llama_memory_seq_rm(call.llama_get_memory(self._context), 0, shared, -1):
            raise EngineError("llama.cpp could not go back to the end of the prompt", fix="report this model")
        parts = [part for rows, x in self.logits(window, shared) for part in reducer.reduce(indexed, rows, x)]
        return reducer.answers(parts, window.targets.shape[1])

    def close(self) -> None:
        self._context = self._model = None
        self._held.close()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _require_whole_blocks(facts: GgufFacts, choices: LlamaCppParameters) -> None:
    """Refuse a quantized cache whose blocks do not divide a head: llama.cpp would end the process."""
    constants = gguf_constants()
    width, heads = facts.number("embedding_length"), facts.number("attention.head_count")
    size = width // heads if width and heads else None
    for flag, key, kind in (("k", "key", choices.cache_type_k), ("v", "value", choices.cache_type_v)):
        length = facts.number(f"attention.{key}_length") or size
        block = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType[kind.upper()]][0]
        if length is not None and length % block:
            raise OptionError(
                f"--cache-type-{flag} {kind} stores blocks of {block}, and a head of this model has {length}",
                fix=f"use --cache-type-{flag} f16",
            )
