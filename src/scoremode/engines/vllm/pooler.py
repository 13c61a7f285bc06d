"""The pooler that vLLM's workers call after each forward pass: hidden states in, a few numbers per row out.

This file is loaded only inside vLLM's processes. Rows of several requests are scored together. If a prompt is fed in
chunks, the lines of its finished chunks (never hidden states) are stored until the last chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.layers.pooler.common import PoolingParamsUpdate

from scoremode.core.extensions import load
from scoremode.core.scores.answers import own_tokens
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE
from scoremode.engines.vllm.states import WorkerReference
from scoremode.engines.vllm.tap import Shard, Tap, across_ranks, any_rank, every_rank, largest_of_ranks, slices_of_ranks
from scoremode.engines.vllm.wire import DIVERGENCE_WORDS, KERNEL_WORDS, KEY, Request, line_words, pack_words
from scoremode.head.budget import rows_within
from scoremode.head.chunked import Share, keep_own
from scoremode.head.columns import Columns, combine, define_columns, finish, partials, target_logits
from scoremode.head.divergence import Divergence, combine_divergence, divergence_partials, finish_divergence, gather_own
from scoremode.head.kernels import ChosenKernel, choose, describe_kernel
from scoremode.head.matrix import Head
from scoremode.head.precision import product_precision

logger = logging.getLogger("vllm.scoremode")  # a child of vLLM's own logger, because vLLM's workers print that logger
TASK = "token_classify"  # the pooling task of vLLM that gives one answer per token


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that our engine passes to its workers through vLLM's ``additional_config``."""

    exact: bool = True
    head_bytes: int = 0  # bytes of float32 logits in memory at once; 0: depends on the device
    head_kernel: str | None = None  # one of head.budget.KERNELS; None: the fastest kernel that passes its self-test
    whole_divergence: bool = False  # every column of a divergence, not KL alone
    step_keeper: str = ""  # address of a StepKeeper's class: it keeps more of a step than its final hidden states

    @staticmethod
    def read(vllm_config: Any) -> Settings:
        settings = (getattr(vllm_config, "additional_config", None) or {}).get(KEY) or {}
        return Settings(**settings)


class BatchKey(NamedTuple):
    """The properties of a request that must be equal for rows to be scored together."""

    k: int
    vocabulary: int
    gather: bool
    self_test: bool
    extra: str
    reference: str

    @staticmethod
    def of(q: Request) -> BatchKey:
        return BatchKey(q.targets.shape[1], q.vocabulary, q.gather, q.self_test, q.extra, q.reference)


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one request that are in this forward pass, and the targets to score in them."""

    request: Request
    first: int  # index, in the request, of the first of these rows
    index: np.ndarray[Any, np.dtype[np.int64]]  # (m,) rows in the batch's hidden states
    targets: np.ndarray[Any, np.dtype[np.int32]]  # (m, k)
    finished: bool

    @property
    def kind(self) -> BatchKey:
        """The kind of this part; parts of one kind are scored together."""
        return BatchKey.of(self.request)

    @property
    def baseline_rows(self) -> np.ndarray[Any, Any]:
        """The numbers (m,) of these rows in the reference."""
        return self.request.first + self.first + np.arange(len(self.index), dtype=np.int64)


class IdsWhenNeeded(PoolingParamsUpdate):  # type: ignore[misc]  # vLLM is untyped here
    """Makes vLLM copy a prompt's ids at every step only if they are needed: if the prompt carries no ``Request``."""

    def apply(self, params: Any) -> None:
        params.requires_token_ids = not (params.extra_kwargs or {}).get(KEY)


class StepKeeper(Protocol):
    """What a study lets the pooler keep of every step, for requests whose ``extra`` is "kept"."""

    def begin_step(self, hidden_states: Tensor) -> None:
        """Takes what was kept of the step whose final hidden states these are."""

    def rows(self, index: Tensor) -> Tensor:
        """Returns int32 words (rows, words) of some rows of the step."""


class ScorePooler(Pooler):  # type: ignore[misc]
    """Answers the ``Request`` that a prompt carries; scores the prompt's own tokens if it carries none."""

    def __init__(self, model: Any, settings: Settings, tap: Tap | None = None) -> None:
        super().__init__()
        # a tap is not a Module, so that the model does not become its own submodule
        self._tap = tap or Tap(model, settings.exact)
        self._settings = settings
        self._shard: Shard | None = None
        self._rows = 0  # rows per step, reduced after running out of memory; 0: as in the settings
        self._choice: ChosenKernel | None = None
        self._asks_for_logits = not settings.exact
        self._baseline: WorkerReference | None = None  # the baseline that KL is measured against
        self._keeper: StepKeeper | None = load(settings.step_keeper)(model) if settings.step_keeper else None

    def get_supported_tasks(self) -> Set[Any]:
        return {TASK}

    def get_pooling_updates(self, task: Any) -> PoolingParamsUpdate:
        return IdsWhenNeeded(requires_token_ids=True)

    def forward(self, hidden_states: Tensor, pooling_metadata: Any) -> list[Tensor | None]:
        parts = list(read_parts(pooling_metadata))
        lines: list[Tensor] = [hidden_states.new_empty(0)] * len(parts)
        for kind in dict.fromkeys(p.kind for p in parts):
            members = [i for i, p in enumerate(parts) if p.kind == kind]
            if kind.extra == "head":
                for i in members:
                    lines[i] = self.head_rows(hidden_states[:1], parts[i].request)
                continue
            if kind.extra == "kept":
                if self._keeper is None:
                    raise RuntimeError("scoremode: this engine was not started to keep more of a step")
                self._keeper.begin_step(hidden_states)
                for i in members:
                    lines[i] = self._keeper.rows(to_device(parts[i].index, hidden_states.device))
                continue
            together = self._score(hidden_states, [parts[i] for i in members])
            sizes = [len(parts[i].index) for i in members]
            for i, block in zip(members, torch.split(together, sizes), strict=True):
                lines[i] = block
        states = pooling_metadata.pooling_states
        return [keep(s.hidden_states_cache, p, block) for s, p, block in zip(states, parts, lines, strict=True)]

    def _score(self, hidden_states: Tensor, parts: list[Part]) -> Tensor:
        """Scores parts of one kind: returns the lines of their rows, concatenated, int32 (rows, words)."""
        rows, target_ids = np.concatenate([p.index for p in parts]), np.concatenate([p.targets for p in parts])
        return self.score_rows(
            hidden_states, parts[0].kind, rows, target_ids, np.concatenate([p.baseline_rows for p in parts])
        )

    def score_rows(self, hidden_states: Tensor, kind: BatchKey, rows: Any, target_ids: Any, stored: Any) -> Tensor:
        """Returns the lines of some rows of the hidden states, int32 (rows, words).

        ``target_ids`` are the targets of each row. ``stored`` are the numbers of the rows in the reference.
        """
        index = to_device(rows, hidden_states.device)
        targets = to_device(target_ids.astype(np.int64), hidden_states.device)
        if len(rows) == 0:
            return torch.empty(0, self._words(kind, hidden_states), dtype=torch.int32, device=hidden_states.device)
        if self._kernel_of(hidden_states) is not None and not kind.gather:
            step = self._rows or len(rows)  # a kernel splits its rows itself
        else:
            columns, device = self._shard_of(hidden_states).columns, hidden_states.device.type
            step = self._rows or rows_within(self._settings.head_bytes, columns, device)
        while True:
            try:
                blocks = [slice(i, i + step) for i in range(0, len(rows), step)]
                rows_of = self._tap.rows
                return torch.cat(
                    [self._lines(rows_of(hidden_states, index[b]), targets[b], kind, stored[b]) for b in blocks]
                )
            except torch.OutOfMemoryError:
                # ranks that disagree on the blocks would wait for each other forever: only a single rank may retry
                if step == 1 or self._shard_of(hidden_states).ranks > 1:
                    raise
                step = self._rows = (min(step, len(rows)) + 1) // 2
                logger.warning("scoremode: out of memory; the head now takes %d rows at a time", step)
                torch.accelerator.empty_cache()

    def can_wait(self, kind: BatchKey, hidden_states: Tensor) -> bool:
        """Are these rows scored from their hidden states alone, so that this can be done after the step as well?"""
        return not (kind.gather or kind.self_test) and self._kernel_of(hidden_states) is not None

    def _words(self, kind: BatchKey, hidden_states: Tensor) -> int:
        """Returns the number of words per line of this kind, which is needed even if a step has no requested rows."""
        if kind.self_test:
            return 2 * line_words(kind.k) + 3 + KERNEL_WORDS
        if kind.extra == "states":
            return line_words(kind.k) + as_words(self._matrix_of(hidden_states[:1])[0]).shape[1]
        return line_words(kind.k) + (DIVERGENCE_WORDS if kind.extra == "kl" else 0)

    def _lines(self, hidden: Tensor, targets: Tensor, kind: BatchKey, stored: Any) -> Tensor:
        if kind.self_test:
            return self._self_test(hidden, targets, kind.gather, kind.vocabulary)
        if kind.extra == "kl":
            return self._answer_with_kl(hidden, targets, kind, stored)
        line = self._answer(hidden, targets, kind.gather, kind.vocabulary)
        return line if kind.extra != "states" else torch.cat([line, as_words(self._matrix_of(hidden)[0])], dim=1)

    def _matrix_of(self, hidden: Tensor) -> tuple[Tensor, Head, Shard]:
        matrix = self._tap.matrix(hidden)
        if matrix is None:
            raise RuntimeError("scoremode: the head of this model is not a plain matrix, so its states cannot be kept")
        return matrix

    def _shard_of(self, hidden_states: Tensor) -> Shard:
        if self._shard is None:
            self._shard = self._tap.logits(hidden_states[:1], gather=False)[1]
        return self._shard

    def _kernel_of(self, like: Tensor) -> ChosenKernel | None:
        """Returns the kernel for this head; None if it is not a plain matrix, so that the model computes the logits."""
        if self._choice is None and not self._asks_for_logits:
            random = torch.Generator().manual_seed(0)  # a few rows of random numbers, the same on every rank
            probe = torch.randn(4, like.shape[1], generator=random).to(like.device, like.dtype)
            matrix = self._tap.matrix(probe)
            if every_rank(matrix is not None and self._is_all(*matrix[:2], probe)) and matrix is not None:
                self._choice = self._same_everywhere(matrix[1])
            else:
                if self._settings.head_kernel:
                    logger.warning("scoremode: this model's head is not a plain matrix, so its own logits are used")
                self._asks_for_logits = True
        return self._choice

    def _is_all(self, rows: Tensor, head: Head, probe: Tensor) -> bool:
        """Does the model compute its logits with nothing but this matrix, its scale and its cap?"""
        x, _ = self._tap.logits(probe, gather=False)
        ours = head.logits(rows)
        return x.shape == ours.shape and bool(((ours - x).abs() <= 1e-3 * (1 + x.abs())).all())

    def _same_everywhere(self, head: Head) -> ChosenKernel:
        """Chooses the same kernel on every rank, because the exchanges between ranks must match."""
        choice = choose(head, self._settings.head_kernel)
        if every_rank(choice.kernel.name == "fused") or not any_rank(choice.kernel.name == "fused"):
            return choice
        return ChosenKernel(choose(head, "plain").kernel, "ranks disagreed on the fused kernel")

    def _answer(self, hidden: Tensor, targets: Tensor, gather: bool, vocabulary: int) -> Tensor:
        return to_words(self._columns_of(hidden, targets, gather, vocabulary))

    def _columns_of(self, hidden: Tensor, targets: Tensor, gather: bool, vocabulary: int) -> Columns:
        x, head, shard, share = self._projected(hidden, gather, vocabulary)
        if head is not None and self._choice is not None:
            part, at_target = self._choice.kernel.reduce(x, head, targets, share)
        else:
            at_target = share(target_logits(x, targets, shard.first_id))
            part = partials(x, targets, at_target, shard.first_id)
        whole = part if shard.ranks == 1 else combine(slices_of_ranks(part))
        return finish(whole, at_target)

    def _projected(self, hidden: Tensor, gather: bool, vocabulary: int) -> tuple[Tensor, Head | None, Shard, Share]:
        """Returns the rows and the head to multiply them with in a kernel; if the head is None, the model's own logits.

        ``vocabulary`` is the size of the tokenizer's vocabulary, if the ids after it are padding. The ``Share`` gives
        the targets' logits to all ranks.
        """
        matrix = None if gather or self._kernel_of(hidden) is None else self._tap.matrix(hidden)
        if matrix is not None:
            x, head, shard = matrix[0], matrix[1].within(vocabulary) if vocabulary else matrix[1], matrix[2]
        else:
            x, shard = self._tap.logits(hidden, gather)
            x, head = x[:, : max(0, vocabulary - shard.first_id)] if vocabulary else x, None
        return x, head, shard, largest_of_ranks if shard.ranks > 1 else keep_own

    def _head_facts(self, hidden: Tensor) -> dict[str, str]:
        """Returns dtype, rows, width, scale, cap and bias of a head to be stored; empty if it is not a plain matrix."""
        matrix = self._tap.matrix(hidden[:1])
        if matrix is None:
            return {}
        head = matrix[1]
        rows = head.weight.shape[0] if matrix[2].ranks == 1 else matrix[2].vocabulary
        facts = (str(head.weight.dtype), rows, head.weight.shape[1], head.scale, head.softcap, head.bias is not None)
        return {"stored_head": " ".join(map(str, facts))}

    def _answer_with_kl(self, hidden: Tensor, targets: Tensor, kind: BatchKey, stored: Any) -> Tensor:
        """Returns one line of scores per row, each followed by the divergence from the baseline in float64."""
        baseline = self._baseline_of(kind)
        x, head, shard, share = self._projected(hidden, kind.gather, kind.vocabulary)
        head_p = baseline.head(hidden.device, shard.first_id, x.shape[1] if head is None else head.vocabulary)
        states, gather = baseline.rows(stored, hidden.device), None
        if self._settings.whole_divergence:
            gather = across_ranks if shard.ranks > 1 else gather_own
        if head is not None and self._choice is not None:
            part, at_q = self._choice.kernel.diverge(states, head_p, x, head, targets, share, gather)
        else:
            at_q = share(target_logits(x, targets, shard.first_id))
            part = divergence_partials(head_p.logits(states), x, targets, at_q, shard.first_id, gather=gather)
        if shard.ranks > 1:
            part = combine_divergence(slices_of_ranks(part.in_float64()))
        made = finish_divergence(part, at_q)
        return with_divergence(made.q, made)

    def _baseline_of(self, kind: BatchKey) -> WorkerReference:
        if self._baseline is None or self._baseline.folder != kind.reference:
            self._baseline = None  # the old head is freed before another one is loaded
            self._baseline = WorkerReference(kind.reference)
        return self._baseline

    def head_rows(self, hidden: Tensor, request: Request) -> Tensor:
        """Returns rows of the whole head's matrix as words, each followed by its bias in float32."""
        _, head, shard = self._matrix_of(hidden)
        ids = torch.arange(request.first, request.first + request.count, device=hidden.device) - head.first_id
        mask = (ids >= 0) & (ids < head.weight.shape[0] if shard.ranks == 1 else ids < head.vocabulary)
        local = torch.where(mask, ids, 0)
        bias = torch.zeros(len(ids), device=hidden.device) if head.bias is None else head.bias[local].float()
        rows = torch.cat([as_words(head.weight[local]), bits(bias[:, None])], dim=1)
        if shard.ranks == 1:
            return rows
        held = torch.cat([rows, mask[:, None].to(torch.int32)], dim=1)
        whole = rows
        for gathered in across_ranks(held.view(torch.float32)):
            theirs = gathered.contiguous().view(torch.int32)
            whole = torch.where(theirs[:, -1:] != 0, theirs[:, :-1], whole)
        return whole

    def _self_test(self, hidden: Tensor, targets: Tensor, gather: bool, vocabulary: int) -> Tensor:
        """Returns per row: our line, ``compute_logits``' line in float64, max |logit|, exact?, vocabulary, kernel."""
        ours = self._answer(hidden, targets, gather, vocabulary)
        served = self._tap.served_logits(hidden)
        if served is None:  # only one rank gets the gathered logits, and only its answer is read
            blank = 2 * ours.shape[1] + 3 + KERNEL_WORDS
            return torch.zeros(len(hidden), blank, dtype=torch.int32, device=hidden.device)
        # on the CPU: vLLM's batch-invariant mode replaces a GPU's softmax by one that has no float64
        theirs = to_words(define_columns(served.cpu(), targets.cpu())).to(served.device)
        size = served.float().nan_to_num(neginf=0.0).abs().amax(1, keepdim=True)
        shard = self._shard_of(hidden)
        products = {"float32_products": product_precision(hidden.device.type)}  # precision of products in the layers
        used = describe_kernel(None if gather else self._kernel_of(hidden))
        kernel = pack_words(used | products | self._head_facts(hidden))
        facts = torch.tensor([[shard.exact, shard.vocabulary, *kernel]], dtype=torch.int32, device=hidden.device)
        return torch.cat([ours, theirs, bits(size), facts.expand(len(hidden), -1)], dim=1)


def read_parts(metadata: Any) -> Iterator[Part]:
    """Yields the rows of each request that are in this batch, in the order of the hidden states."""
    cursor = metadata.get_pooling_cursor()
    counts, ends = cursor.num_scheduled_tokens_cpu.tolist(), cursor.seq_lens_cpu.tolist()
    lengths = cursor.prompt_lens_cpu.tolist()
    offset = 0
    for i, (count, end, length, params) in enumerate(zip(counts, ends, lengths, metadata.pooling_params, strict=True)):
        request = Request.from_kwargs(params.extra_kwargs)
        if request is None:  # vLLM's memory profiling calls this with fewer ids than the prompt has
            window = own_tokens(metadata.prompt_token_ids_cpu[i, :length].numpy().astype(np.int32))
            request = Request(window.rows, window.targets)
        begin = end - count
        low, high = np.searchsorted(request.rows, (begin, end)).tolist()
        index = request.rows[low:high].astype(np.int64) + (offset - begin)
        yield Part(request, low, index, request.targets[low:high], finished=end == length)
        offset += count


def keep(chunks: list[Any], part: Part, lines: Tensor) -> Tensor | None:
    """Stores a chunk's lines with those of its request; returns all of them when the whole prompt has been fed.

    A preempted request is fed again from an earlier token, perhaps in different chunks: repeated lines replace the
    stored ones. If the request restarts after the end of the stored lines (its prefix was found in the cache), there is
    a gap. Only the lines after the gap are returned, and the engine requests the missing rows again.
    """
    pieces: list[tuple[int, Tensor]] = [(a, old[: part.first - a]) for a, old in chunks if a < part.first]
    pieces.append((part.first, lines))
    if not part.finished:
        chunks[:] = pieces
        return None
    chunks.clear()
    run = [pieces[-1]]
    for first, old in reversed(pieces[:-1]):
        if first + len(old) != run[-1][0]:
            break
        run.append((first, old))
    return torch.cat([piece for _, piece in reversed(run)]) if len(run) > 1 else lines


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # pinned memory, so that the host does not wait


def bits(floats: Tensor) -> Tensor:
    return floats.float().contiguous().view(torch.int32)


def to_words(columns: Columns) -> Tensor:
    """Packs columns as lines of int32 words, which ``wire.read_lines`` reads."""
    parts = []
    for column in BUILT_IN.scores:
        values: Tensor = getattr(columns, column.name)
        values = values if column.per == "target" else values[:, None]
        parts.append(bits(values) if column.dtype == "float64" else values.to(torch.int32))
    return torch.cat(parts, dim=1)


def with_divergence(columns: Columns, divergence: Divergence) -> Tensor:
    """Packs columns and a divergence, which ``wire.read_divergences`` reads; NaN where it is not measured."""
    lines = to_words(columns)
    apart = torch.full((len(lines), len(DIVERGENCE)), torch.nan, dtype=torch.float64, device=lines.device)
    for place, column in enumerate(DIVERGENCE):
        if (values := getattr(divergence, column.name, None)) is not None:
            apart[:, place] = values
    return torch.cat([lines, apart.view(torch.int32)], dim=1)


def as_words(x: Tensor) -> Tensor:
    """Converts rows of floats to int32 words, bit for bit; an odd number of half-precision floats is padded."""
    x = x.contiguous()
    if x.shape[1] * x.element_size() % 4:
        x = torch.nn.functional.pad(x, (0, 1))
    return x.view(torch.int32)


def as_score_model(model_class: type) -> type:
    """Returns a subclass of a model's class with a scoring pooler and with the head, which vLLM's adapter removes."""
    if getattr(model_class, "scores_tokens", False):
        return model_class
    if getattr(model_class, "is_pooling_model", False):
        raise ValueError(f"{model_class.__name__} has its own pooler: it is not a causal language model")

    class ForScoring(model_class):  # type: ignore[misc]
        is_pooling_model = True
        scores_tokens = True

        def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
            self.pooler = ScorePooler(self, Settings.read(vllm_config))

    ForScoring.__name__ = ForScoring.__qualname__ = model_class.__name__ + "ForScoring"
    return ForScoring
