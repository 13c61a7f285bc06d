"""The Transformers engine: any causal language model that Transformers loads, in this process.

The body of the model gives the final hidden states; scoremode's own head computes logits from them in float32, a few
rows at a time. If the head is more than one matrix (or is quantized), the model computes its logits itself, also a few
rows at a time, and the result says so: ``head: as-served``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import UNIFORM, Baseline, EngineFacts, NoiseFloor, StoredHead, Wanted
from scoremode.core.engine.batching import batches_by_length, batches_side_by_side, common_prefix
from scoremode.core.engine.distributions import IndexedWindow, store_head
from scoremode.core.engine.states import Finish, StatesEngine, agree
from scoremode.core.models.facts import ModelFacts
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, WindowSource, prescribed_batches
from scoremode.engines.transformers import batches
from scoremode.engines.transformers.batches import PADDING, OtherBatches, fed, other_threads, rows_needed
from scoremode.engines.transformers.caches import CacheKind, require_quantizable
from scoremode.engines.transformers.choices import TransformersOptions, choose_batch_tokens
from scoremode.engines.transformers.loading import find_head, load_model
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.head.kernels import choose, describe_kernel
from scoremode.head.matrix import Head
from scoremode.head.precision import EXACT, full_float32, require_float32
from scoremode.values import Bools, Ids, Ints

RowsOf = Callable[[list[IndexedWindow]], Iterator[tuple[list[IndexedWindow], Tensor]]]
"""Windows -> the hidden states of their requested rows, perhaps in several parts."""

PROBE_TOKENS = 12
STEPS_SLACK = 10.0  # × the tolerance of one product: steps go through all layers


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
        self.model, self.device = model.eval(), model.device
        device = self.device
        self.body: Any = getattr(model, model.base_model_prefix, None)
        if self.body is None or self.body is model:
            raise ModelError(
                f"{type(model).__name__} has no body separate from its head", fix="choose a causal language model"
            )
        self.batch_tokens = choose_batch_tokens(options.batch_tokens, model.device.type)
        self.pass_cost = batches.cost_of_a_pass(sum(p.numel() for p in model.parameters()), model.device.type)
        # small windows fill batches until a pass is worth its cost, unless the user bounded them
        self.small_batch = max(self.batch_tokens, 0 if options.batch_tokens else batches.FILLED * self.pass_cost)
        self._output_type: Any = None  # type that the body returns, set on the first pass
        self._other_batches: OtherBatches | None = None  # how windows are batched while the noise floor is measured
        if model.dtype == torch.float32:
            require_float32(model.device)
        self.head, self.vocabulary = self._choose_head(options.head or "exact", options.head_kernel)
        self.cache = CacheKind.of(model.config, options)  # of the decode path
        if path is not None:
            self._require_steps()
        self.shares_prefixes = not getattr(model, "_is_stateful", False)
        config = model.config.get_text_config()
        self.facts = EngineFacts(
            engine="transformers",
            dtype=str(model.dtype).removeprefix("torch."),
            device=f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type,
            head="exact-fp32" if self.head else "as-served",
            vocabulary=self.vocabulary,
            context_length=facts.context_length if facts else getattr(config, "max_position_embeddings", None),
            versions={"torch": str(torch.__version__), "transformers": str(transformers.__version__)},
            settings={
                "batch_tokens": self.batch_tokens,
                "attention": str(getattr(config, "_attn_implementation", None)),
                "threads": torch.get_num_threads() if model.device.type == "cpu" else None,
                "float32_products": EXACT,
                **self.cache.settings(),
                **describe_kernel(self.choice),
            },
            notes=(*(facts.notes if facts else ()), *self._notes),
        )

    @staticmethod
    def load(
        facts: ModelFacts, options: TransformersOptions | None = None, path: DecodePath | None = None
    ) -> TransformersEngine:
        options = options or TransformersOptions()
        require_quantizable(facts, options)
        model, notes = load_model(facts, options)
        return TransformersEngine(model, replace(facts, notes=(*facts.notes, *notes)), options, path)

    # ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @full_float32()
    @torch.inference_mode()
    def _choose_head(self, wanted: str, kernel: str | None) -> tuple[Head | None, int]:
        """The head if its matrix reproduces the model's logits on a test input, else None; and the vocabulary size."""
        if wanted not in ("exact", "as-served"):
            raise OptionError(f"--head {wanted} is not known", fix="give exact or as-served")
        served = self._served_logits
        ids = torch.arange(PROBE_TOKENS, device=self.model.device)[None] % self._embedding_rows()
        # the whole model first: a compressed checkpoint is unpacked when the whole model is called, not only its body
        expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = self._hidden(ids)[0]
        if bool(expected.isnan().any()):
            raise EngineError(
                "the model gives NaN", fix="try --dtype float32; if that does not help, the weights are damaged"
            )
        self._notes = (UNIFORM,) if bool((expected == expected[:, :1]).all()) else ()
        self._require_causal(ids, hidden)
        head = find_head(self.model)
        if wanted == "exact" and head is not None and agree(head.logits(hidden), expected, self.model.dtype):
            self.choice = choose(head, kernel, divergence=False)
            return head, head.vocabulary
        if not agree(served(hidden).float(), expected, self.model.dtype):
            raise EngineError(
                f"{type(self.model).__name__} gives different logits when called row by row", fix="report this model"
            )
        if kernel is not None:
            raise OptionError(f"--head-kernel {kernel}: the model's own logits are used", fix="leave --head-kernel out")
        return None, expected.shape[1]

    def _require_causal(self, ids: Tensor, hidden: Tensor) -> None:
        """Refuse a model whose earlier rows change with the last token: it would see its targets."""
        other = ids.clone()
        other[0, -1] = (other[0, -1] + 1) % self._embedding_rows()
        if not agree(self._hidden(other)[0, :-1].float(), hidden[:-1].float(), self.model.dtype):
            raise ModelError(
                f"{type(self.model).__name__} looks at tokens to the right", fix="choose a causal language model"
            )

    def _embedding_rows(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def _served_logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits for given hidden states: its forward pass, with the body replaced by these states."""
        output = self._output_type(last_hidden_state=hidden[None])
        with replaced(self.body, "forward", lambda *_, **__: output):
            ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    # ── the body ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _hidden(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Final hidden states (batch, tokens, d). No mask is needed: padding is on the right, where no row looks."""
        if cache is None:
            output = self.body(input_ids=ids, use_cache=False)
        else:
            output = self.body(input_ids=ids, past_key_values=cache, use_cache=True)
        self._output_type = type(output)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _hidden_of(self, ids: Tensor) -> Tensor:
        """Final hidden states (batch, tokens, d) of whole windows, computed by the path of this engine.

        On the decode path all windows of a batch begin at position 0 and advance together, so no mask is needed there
        either: what is fed after the end of a shorter window is seen by none of its rows.
        """
        if self.path is None:
            return self._hidden(ids)
        self._longest = max(self._longest, ids.shape[1])
        return self._stepped(ids, self.path.prefill_tokens, self.cache.empty())

    @full_float32()
    @torch.inference_mode()
    def fed(self, ids: Ids, cache: Any) -> Tensor:
        """Feeds the next tokens (n, m) of n texts to a cache; final hidden states (n, d) of the last token of each."""
        return self._hidden(torch.from_numpy(ids.astype(np.int64)).to(self.model.device), cache)[:, -1]

    def _stepped(self, ids: Tensor, first: int, cache: Any) -> Tensor:
        states = [self._hidden(ids[:, :first], cache)]
        for at in range(first, ids.shape[1]):
            states.append(self._hidden(ids[:, at : at + 1], cache))
            if self.watch is not None:
                self.watch(len(ids) * at)
        return torch.cat(states, 1)

    @full_float32()
    @torch.inference_mode()
    def _require_steps(self) -> None:
        """Refuse a model that computes something else if it is fed token by token.

        Ids come from the whole vocabulary: on the special tokens at its start, rounding moves states by 0.2 of their
        size (SmolLM2 in bfloat16), on these by 0.02. Without a cache, it would be 0.6.
        """
        rows, name = self._embedding_rows(), type(self.model).__name__
        ids = torch.linspace(1, rows - 1, PROBE_TOKENS, device=self.model.device).long()[None] % rows
        if getattr(self.model, "_is_stateful", False):
            raise ModelError(f"{name} has no cache of keys and values", fix="use prefill (no --path)")
        stepped = self._stepped(ids, 1, self.cache.empty_unquantized())
        if not agree(stepped.float(), self._hidden(ids).float(), self.model.dtype, STEPS_SLACK):
            message = f"{name} gives other states if it is fed token by token"
            raise ModelError(message, fix="use another --engine, or prefill (no --path)")
        if self.cache.name is not None and not bool(self._stepped(ids, 1, self.cache.empty()).isfinite().all()):
            raise ModelError(f"{name} gives NaN with an {self.cache.name} cache", fix="leave --kv-cache-dtype out")

    def account(self) -> dict[str, Any]:
        longest, self._longest = self._longest, 0
        note = None if self.path is None else self.cache.note(longest, self.path.prefill_tokens)
        return {} if note is None else {"notes": [note]}

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
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

    def stored_head(self) -> StoredHead:
        if self.head is None:
            raise ModelError(
                "the head of this model is not a plain matrix of floats, so no reference can be kept",
                fix="use an unquantized baseline, and leave --head out",
            )
        layer = self.model.get_output_embeddings()  # on a CPU the head in use is a float32 copy
        return store_head(replace(self.head, weight=layer.weight.detach()))

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
        prefix = self._hidden(self._padded([tokens[0][:common] for tokens in members.values()]), cache)
        place = {group: i for i, group in enumerate(members)}
        rest = [fed(w)[common:] for _, w in windows]
        longest = max(rows_needed(w) for _, w in windows)
        for part in batches.passes([len(ids) for ids in rest], max(1, 4 * self.small_batch // longest), self.pass_cost):
            chosen = [windows[i] for i in part]
            places = np.array([place[int(groups[index])] for index, _ in chosen])
            following: Tensor | None = None  # the hidden states of what follows each window's prefix, if anything does
            if max(len(rest[i]) for i in part):
                copied = batches.selected(cache, torch.from_numpy(places).to(self.model.device))
                following = self._hidden(self._padded([rest[i] for i in part]), copied)
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


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object inside this block; restore the object's own value afterwards."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # the attribute of the class is visible again
