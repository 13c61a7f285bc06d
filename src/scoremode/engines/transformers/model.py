"""A causal language model of Transformers in its two parts: a body that gives hidden states, and a head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from scoremode.core.engine.base import UNIFORM
from scoremode.core.engine.states import agree
from scoremode.engines.transformers.caches import CacheKind
from scoremode.engines.transformers.loading import find_head
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.head.kernels import ChosenKernel, choose
from scoremode.head.matrix import Head
from scoremode.head.precision import full_float32

PROBE_TOKENS = 12
STEPS_SLACK = 10.0  # × the tolerance of one product: steps go through all layers


class CausalModel:
    head: Head | None  # its matrix, if that reproduces the model's logits on a test input; None: use ``served_logits``
    choice: ChosenKernel | None = None  # the kernel for that matrix
    vocabulary: int

    def __init__(self, model: Any, wanted_head: str, kernel: str | None) -> None:
        self.whole = model.eval()
        self.name = type(model).__name__
        self.body: Any = getattr(model, model.base_model_prefix, None)
        if self.body is None or self.body is model:
            raise ModelError(f"{self.name} has no body separate from its head", fix="choose a causal language model")
        self._output_type: Any = None  # type that the body returns, set on the first pass
        self.notes = self._choose_head(wanted_head, kernel)

    # ── hidden states ────────────────────────────────────────────────────────────────────────────────────────────────
    def hidden(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Final hidden states (batch, tokens, d). No mask is needed: padding is on the right, where no row looks."""
        if cache is None:
            output = self.body(input_ids=ids, use_cache=False)
        else:
            output = self.body(input_ids=ids, past_key_values=cache, use_cache=True)
        self._output_type = type(output)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def stepped(self, ids: Tensor, first: int, cache: Any, watch: Callable[[int], object] | None = None) -> Tensor:
        """The same states, token by token after the ``first``; ``watch`` is told how many tokens were fed.

        All windows begin at position 0 and advance together, so no mask is needed here either: what is fed after the
        end of a shorter window is seen by none of its rows.
        """
        states = [self.hidden(ids[:, :first], cache)]
        for at in range(first, ids.shape[1]):
            states.append(self.hidden(ids[:, at : at + 1], cache))
            if watch is not None:
                watch(len(ids) * at)
        return torch.cat(states, 1)

    # ── logits ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def served_logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits for given hidden states: its forward pass, with the body replaced by these states."""
        output = self._output_type(last_hidden_state=hidden[None])
        with replaced(self.body, "forward", lambda *_, **__: output):
            ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            logits: Tensor = self.whole(input_ids=ids, use_cache=False).logits[0]
        return logits

    @full_float32()
    @torch.inference_mode()
    def _choose_head(self, wanted: str, kernel: str | None) -> tuple[str, ...]:
        """Sets the head, its kernel and the vocabulary. Returns notes."""
        if wanted not in ("exact", "as-served"):
            raise OptionError(f"--head {wanted} is not known", fix="give exact or as-served")
        ids = torch.arange(PROBE_TOKENS, device=self.whole.device)[None] % self._embedding_rows()
        # the whole model first: a compressed checkpoint is unpacked when the whole model is called, not only its body
        expected = self.whole(input_ids=ids, use_cache=False).logits[0].float()
        hidden = self.hidden(ids)[0]
        if bool(expected.isnan().any()):
            raise EngineError(
                "the model gives NaN", fix="try --dtype float32; if that does not help, the weights are damaged"
            )
        notes = (UNIFORM,) if bool((expected == expected[:, :1]).all()) else ()
        self._require_causal(ids, hidden)
        head = find_head(self.whole)
        if wanted == "exact" and head is not None and agree(head.logits(hidden), expected, self.whole.dtype):
            self.head, self.vocabulary, self.choice = head, head.vocabulary, choose(head, kernel, divergence=False)
            return notes
        if not agree(self.served_logits(hidden).float(), expected, self.whole.dtype):
            raise EngineError(f"{self.name} gives different logits when called row by row", fix="report this model")
        if kernel is not None:
            raise OptionError(f"--head-kernel {kernel}: the model's own logits are used", fix="leave --head-kernel out")
        self.head, self.vocabulary = None, expected.shape[1]
        return notes

    def _require_causal(self, ids: Tensor, hidden: Tensor) -> None:
        """Refuse a model whose earlier rows change with the last token: it would see its targets."""
        other = ids.clone()
        other[0, -1] = (other[0, -1] + 1) % self._embedding_rows()
        if not agree(self.hidden(other)[0, :-1].float(), hidden[:-1].float(), self.whole.dtype):
            raise ModelError(f"{self.name} looks at tokens to the right", fix="choose a causal language model")

    @full_float32()
    @torch.inference_mode()
    def require_steps(self, cache: CacheKind) -> None:
        """Refuse a model that computes something else if it is fed token by token.

        Ids come from the whole vocabulary: on the special tokens at its start, rounding moves states by 0.2 of their
        size (SmolLM2 in bfloat16), on these by 0.02. Without a cache, it would be 0.6.
        """
        rows = self._embedding_rows()
        ids = torch.linspace(1, rows - 1, PROBE_TOKENS, device=self.whole.device).long()[None] % rows
        if getattr(self.whole, "_is_stateful", False):
            raise ModelError(f"{self.name} has no cache of keys and values", fix="use prefill (no --path)")
        stepped = self.stepped(ids, 1, cache.empty_unquantized())
        if not agree(stepped.float(), self.hidden(ids).float(), self.whole.dtype, STEPS_SLACK):
            message = f"{self.name} gives other states if it is fed token by token"
            raise ModelError(message, fix="use another --engine, or prefill (no --path)")
        if cache.name is not None and not bool(self.stepped(ids, 1, cache.empty()).isfinite().all()):
            raise ModelError(f"{self.name} gives NaN with an {cache.name} cache", fix="leave --kv-cache-dtype out")

    def _embedding_rows(self) -> int:
        return int(self.whole.get_input_embeddings().weight.shape[0])


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
