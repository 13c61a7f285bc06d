"""The Transformers engine: any causal language model that Transformers loads, in this process.

The body of the model gives the final hidden states; scoremode's own head computes logits from them in float32, a few
rows at a time. If the head is more than one matrix (or is quantized), the model computes its logits itself, also a few
rows at a time, and the result says so: ``head: as-served``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import EngineFacts, FinalStates, NoiseFloor, StoredHead, Wanted
from scoremode.core.engine.batching import batches_by_length, batches_side_by_side, common_prefix
from scoremode.core.engine.distributions import IndexedWindow, store_head
from scoremode.core.engine.states import Finish, StatesEngine
from scoremode.core.models.facts import ModelFacts
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, WindowSource, prescribed_batches
from scoremode.engines.transformers import batches
from scoremode.engines.transformers.batches import PADDING, OtherBatches, fed, other_threads, rows_needed
from scoremode.engines.transformers.caches import CacheKind, require_quantizable
from scoremode.engines.transformers.choices import TransformersOptions, choose_batch_tokens
from scoremode.engines.transformers.loading import load_model
from scoremode.engines.transformers.model import CausalModel
from scoremode.errors import EngineError, ModelError
from scoremode.head.kernels import describe_kernel
from scoremode.head.precision import EXACT, full_float32, require_float32
from scoremode.values import Bools, Ids, Ints

RowsOf = Callable[[list[IndexedWindow]], Iterator[tuple[list[IndexedWindow], Tensor]]]
"""Windows -> the hidden states of their requested rows, perhaps in several parts."""


class TransformersEngine(StatesEngine):
    def __init__(
        self,
        model: Any,
        facts: ModelFacts | None = None,
        options: TransformersOptions | None = None,
        path: DecodePath | None = None,
    ) -> None:
        """Wrap a loaded causal LM. ``TransformersEngine.load`` is the usual way to make an engine."""
        import transformers

        options, self.path, self._longest = options or TransformersOptions(), path, 0
        super().__init__(options)
        if model.dtype == torch.float32:
            require_float32(model.device)
        self.parts = CausalModel(model, options.head or "exact", options.head_kernel)
        self.model, self.body, self.device, kind = model, self.parts.body, model.device, model.device.type
        self.batch_tokens = choose_batch_tokens(options.batch_tokens, kind)
        self.pass_cost = batches.cost_of_a_pass(sum(p.numel() for p in model.parameters()), kind)
        # small windows fill batches until a pass is worth its cost, unless the user bounded them
        self.small_batch = max(self.batch_tokens, 0 if options.batch_tokens else batches.FILLED * self.pass_cost)
        self._other_batches: OtherBatches | None = None  # how windows are batched while the noise floor is measured
        self.head, self.vocabulary, self.choice = self.parts.head, self.parts.vocabulary, self.parts.choice
        self.cache = CacheKind.of(model.config, options)  # of the decode path
        if path is not None:
            self.parts.require_steps(self.cache)
        self.shares_prefixes = not getattr(model, "_is_stateful", False)
        config = model.config.get_text_config()
        self.facts = EngineFacts(
            engine="transformers",
            dtype=str(model.dtype).removeprefix("torch."),
            device=f"cuda ({torch.cuda.get_device_name(model.device)})" if kind == "cuda" else kind,
            head="exact-fp32" if self.head else "as-served",
            vocabulary=self.vocabulary,
            context_length=facts.context_length if facts else getattr(config, "max_position_embeddings", None),
            versions={"torch": str(torch.__version__), "transformers": str(transformers.__version__)},
            settings={
                "batch_tokens": self.batch_tokens,
                "attention": str(getattr(config, "_attn_implementation", None)),
                "threads": torch.get_num_threads() if kind == "cpu" else None,
                "float32_products": EXACT,
                **self.cache.settings(),
                **describe_kernel(self.choice),
            },
            notes=(*(facts.notes if facts else ()), *self.parts.notes),
        )

    @staticmethod
    def load(
        facts: ModelFacts, options: TransformersOptions | None = None, path: DecodePath | None = None
    ) -> TransformersEngine:
        options = options or TransformersOptions()
        require_quantizable(facts, options)
        model, notes = load_model(facts, options)
        return TransformersEngine(model, replace(facts, notes=(*facts.notes, *notes)), options, path)

    # ── hidden states ────────────────────────────────────────────────────────────────────────────────────────────────
    def _served_logits(self, hidden: Tensor) -> Tensor:
        return self.parts.served_logits(hidden)

    def _hidden_of(self, ids: Tensor) -> Tensor:
        """Final hidden states (batch, tokens, d) of whole windows, computed by the path of this engine."""
        if self.path is None:
            return self.parts.hidden(ids)
        self._longest = max(self._longest, ids.shape[1])
        return self.parts.stepped(ids, self.path.prefill_tokens, self.cache.empty(), self.watch)

    @full_float32()
    @torch.inference_mode()
    def fed(self, ids: Ids, cache: Any) -> Tensor:
        """Feeds the next tokens (n, m) of n texts to a cache; final hidden states (n, d) of the last token of each."""
        return self.parts.hidden(torch.from_numpy(ids.astype(np.int64)).to(self.device), cache)[:, -1]

    def stored_head(self) -> StoredHead:
        if self.head is None:
            raise ModelError(
                "the head of this model is not a plain matrix of floats, so no reference can be kept",
                fix="use an unquantized baseline, and leave --head out",
            )
        layer = self.model.get_output_embeddings()  # on a CPU the head in use is a float32 copy
        return store_head(replace(self.head, weight=layer.weight.detach()))

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def account(self) -> dict[str, Any]:
        longest, self._longest = self._longest, 0
        note = None if self.path is None else self.cache.note(longest, self.path.prefill_tokens)
        return {} if note is None else {"notes": [note]}

    def noise_floor(self, baseline: FinalStates, source: WindowSource, done: Bools) -> NoiseFloor:
        """Score windows alone, or together with a copy of themselves if they usually have their own batch."""
        longest, context = int(source.lengths[~done].max()), self.facts.context_length
        room = context is None or longest + PADDING <= context
        padding = PADDING if room and self.path is None else 0  # tokens that are decoded later change nothing
        self._other_batches = OtherBatches.of(self._batches(source), padding)
        try:
            with other_threads(self.model.device) as threads:
                measured = {} if self.measured is None else self.measured
                is_measured = np.isin(np.arange(len(done)), [*measured])
                for index, answers in self.score(source, done | is_measured, Wanted(against=baseline)):
                    assert answers.kl is not None, "a divergence was asked for"
                    measured[index] = answers.kl
                return NoiseFloor(np.concatenate([*measured.values()]), self._other_batches.words(done, threads))
        except EngineError as error:  # two windows may not fit in memory even if one does
            return NoiseFloor(None, f"scoring in different batches failed: {error.message}")
        finally:
            self._other_batches = None

    def batches(self, source: WindowSource) -> list[Ints]:
        prescribed = prescribed_batches(source)
        if prescribed is not None:
            return prescribed
        if self.path is not None:
            return batches_side_by_side(source, self.path.sequences)
        grouped = source.prefix_group is not None
        usual = batches_by_length(source, self.small_batch if grouped else self.batch_tokens)
        if grouped and self.shares_prefixes:
            usual = batches.pack(source, usual, self.small_batch, self.pass_cost)
        return usual

    def _batches(self, source: WindowSource) -> list[Ints]:
        usual = self.batches(source)
        if self._other_batches is None:
            return usual
        return [np.array([index]) for batch in usual for index in batch]

    def _finished(self, source: WindowSource, done: Bools, finish: Finish) -> Iterator[tuple[int, Answers]]:
        for batch in self._batches(source):
            if done[batch].all():
                continue
            windows = [(int(index), source.window(int(index))) for index in batch]
            for index, made in self._within_memory(self._rows_of(source, batch), windows, finish):
                if not done[index]:
                    yield index, made

    def _rows_of(self, source: WindowSource, batch: Ints) -> RowsOf:
        """Chooses the method that computes the rows of a batch, by what its windows share."""
        if source.prefix_group is None or len(batch) == 1 or self.path is not None:
            return self._rows_together
        if not batches.is_group(source.prefix_group[batch]):
            return self._rows_perhaps_alike if self.shares_prefixes else self._rows_together
        return partial(self._rows_shared, source.prefix_group) if self.shares_prefixes else self._rows_in_parts

    def _within_memory(
        self, rows_of: RowsOf, windows: list[IndexedWindow], finish: Finish
    ) -> list[tuple[int, Answers]]:
        """Score the batch; if memory runs out, score its halves."""
        try:
            with full_float32(), torch.inference_mode():
                return [
                    (index, made)
                    for part, rows in rows_of(windows)
                    for (index, _), made in zip(part, finish(rows, part), strict=True)
                ]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        if len(windows) == 1:
            raise EngineError(
                f"a window of {len(windows[0][1].ids)} tokens does not fit in this device's memory",
                fix="give a smaller --context-length, another --dtype, or --device cpu",
            )
        if self.path is not None:
            raise EngineError(
                f"{len(windows)} windows side by side do not fit in this device's memory",
                fix=f"give --sequences {len(windows) // 2}, or a smaller --context-length",
            )
        half = len(windows) // 2
        halves = (windows[:half], windows[half:])
        return [answer for part in halves for answer in self._within_memory(rows_of, part, finish)]

    def _rows_together(self, windows: list[IndexedWindow]) -> Iterator[tuple[list[IndexedWindow], Tensor]]:
        """Compute windows in one forward pass, each cut after its last requested row."""
        tokens = [fed(w) for _, w in windows]
        if self._other_batches is not None:
            tokens = self._other_batches.batch(windows, tokens)
        hidden = self._hidden_of(self._padded(tokens))
        yield windows, torch.cat([hidden[i, _index(w.rows, hidden)] for i, (_, w) in enumerate(windows)])

    def _rows_in_parts(self, windows: list[IndexedWindow]) -> Iterator[tuple[list[IndexedWindow], Tensor]]:
        """Compute windows that cannot share a prefix, as many at a time as the batch budget allows."""
        longest = max(rows_needed(w) for _, w in windows)
        size = max(1, self.batch_tokens // longest)
        for begin in range(0, len(windows), size):
            yield from self._rows_together(windows[begin : begin + size])

    def _rows_perhaps_alike(self, windows: list[IndexedWindow]) -> Iterator[tuple[list[IndexedWindow], Tensor]]:
        """Compute windows of different questions; a long common beginning, such as the same examples, is fed once."""
        tokens = [fed(w) for _, w in windows]
        alike = common_prefix(tokens) >= max(2, batches.WORTH_SHARING * max(map(len, tokens)))
        one_group = np.zeros(1 + max(index for index, _ in windows), np.int64)
        yield from self._rows_shared(one_group, windows) if alike else self._rows_together(windows)

    def _rows_shared(self, groups: Ints, windows: list[IndexedWindow]) -> Iterator[tuple[list[IndexedWindow], Tensor]]:
        """Compute groups of windows: a group's prefix is fed once, and its keys and values serve all its windows."""
        from transformers import DynamicCache

        members: dict[int, list[Ids]] = {}
        for index, window in windows:
            members.setdefault(int(groups[index]), []).append(fed(window))
        common = min(common_prefix(tokens) for tokens in members.values())
        if common < 2:
            yield from self._rows_in_parts(windows)
            return
        cache = DynamicCache(config=self.model.config)
        prefix = self.parts.hidden(self._padded([tokens[0][:common] for tokens in members.values()]), cache)
        place = {group: i for i, group in enumerate(members)}
        rest = [fed(w)[common:] for _, w in windows]
        longest = max(rows_needed(w) for _, w in windows)
        for part in batches.passes([len(ids) for ids in rest], max(1, 4 * self.small_batch // longest), self.pass_cost):
            chosen = [windows[i] for i in part]
            places = np.array([place[int(groups[index])] for index, _ in chosen])
            following: Tensor | None = None  # the hidden states of what follows each window's prefix, if anything does
            if max(len(rest[i]) for i in part):
                copied = batches.selected(cache, torch.from_numpy(places).to(self.model.device))
                following = self.parts.hidden(self._padded([rest[i] for i in part]), copied)
            rows = []
            for i, (_, w) in enumerate(chosen):
                early, late = w.rows[w.rows < common], w.rows[w.rows >= common]
                rows.append(prefix[int(places[i]), _index(early, prefix)])
                if len(late):
                    assert following is not None
                    rows.append(following[i, _index(late - common, prefix)])
            yield chosen, torch.cat(rows)

    def _padded(self, sequences: list[Ids]) -> Tensor:
        ids = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence)] = sequence
        return torch.from_numpy(ids).to(self.model.device)


def _index(rows: Ids, like: Tensor) -> Tensor:
    return torch.from_numpy(rows.astype(np.int64)).to(like.device)
