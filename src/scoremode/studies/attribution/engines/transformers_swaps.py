"""A loaded model with some of its weights replaced, computed from the first layer that the replacement can change.

record      one forward pass per batch of windows; what the layers before each start give is kept, if there is room
keep        the baseline's logits, computed by the first swap, if there is room for them
swapped     new weights in place of the model's own, which come back bit for bit
diverge     the same forward pass: layers before the start are skipped, and the last of them gives what was kept

The model's own code runs in between: embeddings, masks, positions and the last norm are never rebuilt here, so that
every architecture of Transformers works. A model whose layers use more than the output of the layer before is found by
a probe; its swaps compute all layers, and so do all swaps if the states do not fit into half of the free memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.cache.units import size_words
from scoremode.core.engine.base import Wanted
from scoremode.core.engine.baseline import states_in
from scoremode.core.engine.distributions import IndexedWindow, from_raw
from scoremode.core.engine.plugin import Work
from scoremode.core.free_memory import available
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.engines.transformers import TransformersPlugin
from scoremode.engines.transformers.batches import rows_needed
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.engines.transformers.loading import find_head
from scoremode.engines.transformers.model import PROBE_TOKENS, replaced
from scoremode.errors import EngineError, ModelError, print_line
from scoremode.head.budget import free_on
from scoremode.head.divergence import Kept
from scoremode.head.kernels import can_keep
from scoremode.head.matrix import Head
from scoremode.head.precision import full_float32
from scoremode.studies.attribution.engines.layer_hooks import decoder_layers

SHARE = 0.5  # the most of the free memory that states may take; a swap needs the rest
SHARE_OF_LOGITS = 0.125  # the most of the free memory of its device that the baseline's logits may take
ALL_LAYERS = "a swap computes all layers: they use more than the output of the layer before them"
NO_ROOM = "a swap computes all layers: there is no room for the states between them"


@contextlib.contextmanager
def open_swaps(
    plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work
) -> Iterator[SwappableModel]:
    """Opens a model whose weights can be replaced, and closes it."""
    with contextlib.closing(plugin.open(subject, options, work)) as engine, SwappableModel(engine) as swaps:
        yield swaps


class SwappableModel:
    """An open engine whose model is computed with other weights. Use it inside a ``with`` block."""

    def __init__(self, engine: TransformersEngine) -> None:
        if engine.head is None:
            raise ModelError(
                "the head of the baseline is not a plain matrix of floats", fix="give an unquantized baseline"
            )
        self.engine, self.model, self.device = engine, engine.model, engine.model.device
        self.head: Head = engine.head  # of the baseline
        _, self.layers = decoder_layers(engine.body)
        first = next(name for name, module in engine.model.named_modules() if module is self.layers[0])
        self.layers_name = first.rpartition(".")[0]  # as in ``model.layers``
        self.parameters: dict[str, torch.nn.Parameter] = dict(engine.model.named_parameters())
        are_floats = all(p.is_floating_point() and p.element_size() > 1 for p in self.parameters.values())
        if not are_floats or getattr(engine.model.config, "quantization_config", None):
            raise ModelError("the weights of the baseline are quantized", fix="give the model before it was quantized")
        self.notes: list[str] = []
        self._opened = ExitStack()
        self._kept: dict[tuple[bytes, int], Tensor] | None = None  # what enters a layer, by tokens and layer
        self._place = torch.device("cpu")  # where it is kept
        self._final: dict[int, Tensor] = {}  # of the baseline, for the rows of each window
        self._logits: dict[tuple[int, ...], Kept] | None = None  # of the baseline, by windows
        self._wanted: frozenset[int] = frozenset()  # starts whose states are kept by this pass
        self._start = 0  # the first layer that is computed by this pass
        self._key: bytes | None = None  # the tokens of this pass; None: it is computed whole
        self._skips = True

    def own_weight(self, name: str) -> Tensor:
        """What a parameter is now: its own numbers, or those that are swapped in."""
        return self.parameters[name].data

    # ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def __enter__(self) -> SwappableModel:
        with ExitStack() as opened:  # an error here leaves no hook behind
            for index, layer in enumerate(self.layers):
                opened.enter_context(replaced(layer, "forward", self._watched(index, layer.forward)))
            hook = self.engine.body.register_forward_pre_hook(self._begin, with_kwargs=True)
            opened.callback(hook.remove)
            self._probe()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def untie_head(self) -> None:
        """Gives the head a copy of the embedding, which was both. The model has its own head again after the block."""
        layer = self.model.get_output_embeddings()
        self._opened.callback(setattr, layer, "weight", layer.weight)
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        self.parameters = dict(self.model.named_parameters())
        head = find_head(self.model)
        assert head is not None, "only its memory is another"
        self.head = self.engine.head = head

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes which tokens a forward pass is about. One that follows a cache of keys and values is left alone."""
        ids = kwargs.get("input_ids")
        alone = kwargs.get("past_key_values") is None and isinstance(ids, Tensor) and not args
        self._key = ids.cpu().numpy().tobytes() + bytes(str(ids.shape), "ascii") if ids is not None and alone else None

    def _watched(self, index: int, layer_forward: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            states, key = self._kept, self._key
            if states is None or key is None:
                return layer_forward(*args, **kwargs)
            if self._start > index and (key, self._start) in states:
                if index == self._start - 1:  # a copy, as below: a layer may write into what it is given
                    return states[key, self._start].to(self.device, copy=True)
                return args[0] if args else kwargs["hidden_states"]
            made = layer_forward(*args, **kwargs)
            if index + 1 in self._wanted:
                states[key, index + 1] = made.detach().to(self._place, copy=True)
            return made

        return forward

    @full_float32()
    @torch.inference_mode()
    def _probe(self) -> None:
        """Finds out whether layers can be skipped: final states must have the bits of a whole pass, for every start."""
        rows = self.model.get_input_embeddings().weight.shape[0]
        texts = [(torch.arange(PROBE_TOKENS, device=self.device)[None] + i) % rows for i in (0, 1)]
        self._kept = {}
        starts = range(1, len(self.layers) + 1)
        try:
            whole = [self._pass(text, wanted=starts) for text in texts]
            for start in starts:
                # Two texts take turns, so that nothing is right by chance that a skipped layer remembers: layer i was
                # last computed for start i, and so for another text than start i + 1.
                turn = (start + 1) % 2
                final = self._pass(texts[turn], start=start)
                self._skips = self._skips and torch.equal(final, whole[turn])
        except (
            RuntimeError,
            TypeError,
            AttributeError,
            KeyError,
        ):  # layers give more than their states
            self._skips = False
        finally:
            self._kept = None
        if not self._skips:
            self.notes.append(ALL_LAYERS)

    def _pass(self, ids: Tensor, start: int = 0, wanted: Collection[int] = ()) -> Tensor:
        self._start, self._wanted = start, frozenset(wanted)
        try:
            final: Tensor = self.engine.body(input_ids=ids, use_cache=False).last_hidden_state
            return final
        finally:
            self._start, self._wanted = 0, frozenset()

    def start_of(self, names: Collection[str]) -> int:
        """The first layer that other weights under these names change; the number of layers if only the head does."""
        return min((self._start_of(name) for name in names), default=len(self.layers))

    def _start_of(self, name: str) -> int:
        if not self._skips:
            return 0
        if name.startswith(f"{self.layers_name}."):
            return int(name[len(self.layers_name) + 1 :].split(".", maxsplit=1)[0])
        return len(self.layers) if self.is_head(name) and not self.is_embedding(name) else 0

    def is_head(self, name: str) -> bool:
        return any(self.parameters[name] is parameter for parameter in self.model.get_output_embeddings().parameters())

    def is_embedding(self, name: str) -> bool:
        return any(self.parameters[name] is parameter for parameter in self.model.get_input_embeddings().parameters())

    # ── the baseline ─────────────────────────────────────────────────────────────────────────────────────────────────
    def record(self, source: WindowSource, starts: Collection[int]) -> Iterator[tuple[int, Answers]]:
        """Scores all windows with its own weights; keeps the states before each of ``starts``, if there is room."""
        wanted, rows = frozenset(starts) - {0}, sum(len(source.window(index).rows) for index in range(len(source)))
        size, room, on_gpu = self._size(source, len(wanted)), available(), self.device.type == "cuda"
        if on_gpu and size <= SHARE * free_on(self.device):
            self._place = self.device
        elif wanted and room is not None and size > SHARE * room:
            self._skips, wanted = False, frozenset()
            self.notes.append(NO_ROOM)
        if wanted:
            where = "in memory" if self._place.type == "cpu" else "on the GPU"
            print_line(f"scoremode: states between layers take about {size_words(size)}, kept {where}")
        room = free_on(self.device) - size * (self._place == self.device) if on_gpu else room or 0
        self._logits = {} if 4 * rows * self.engine.vocabulary <= SHARE_OF_LOGITS * room else None
        self._kept, self._wanted = {}, wanted
        try:
            done = np.zeros(len(source), np.bool_)
            for index, answers in self.engine.score(source, done, Wanted(states=True)):
                self._final[index] = from_raw(states_in(answers), self.engine.facts.dtype)
                yield index, answers
        finally:
            self._wanted = frozenset()

    def _size(self, source: WindowSource, starts: int) -> int:
        """The bytes of the states of all windows before so many layers."""
        tokens = 0
        for batch in self.engine.batches(source):
            tokens += len(batch) * max(rows_needed(source.window(int(index))) for index in batch)
        width: int = self.model.config.get_text_config().hidden_size
        return starts * tokens * width * int(self.model.dtype.itemsize)

    def rows(self, windows: list[IndexedWindow]) -> Tensor:
        """The baseline's final states for the rows of these windows, concatenated: see StatesOnDevice."""
        return torch.cat([self._final[index] for index, _ in windows]).to(self.device)

    def kept(self, windows: list[IndexedWindow]) -> Kept | None:
        """Keeps the baseline's logits for the rows of these windows, if there is room for them."""
        choice = self.engine.choice
        if self._logits is None or choice is None or not can_keep(choice.kernel, self.head):
            return None
        return self._logits.setdefault(tuple(index for index, _ in windows), {})

    # ── swaps ────────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def swapped(self, names: Collection[str], read: Callable[[str], Tensor]) -> Iterator[list[str]]:
        """Puts the weights that ``read`` gives into the model inside this block; its own come back, bit for bit.

        Yields the names of those that differ from the model's own. One tensor is read at a time.
        """
        originals: dict[str, Tensor] = {}
        size = sum(self.parameters[name].nbytes for name in names)
        aside = self.device.type == "cuda" and 1.25 * size > free_on(self.device)
        try:
            for name in names:
                parameter, new = self.parameters[name], read(name)
                if new.shape != parameter.shape:
                    raise EngineError(
                        f"{name} has the shape {tuple(new.shape)}", fix="this is a fault of the candidate"
                    )
                new = new.to(parameter.device, parameter.dtype)
                if not torch.equal(new, parameter.data):
                    originals[name] = parameter.data.cpu() if aside else parameter.data
                    parameter.data = new
            head = find_head(self.model) if any(map(self.is_head, originals)) else self.head
            assert head is not None, "only its numbers are others"
            self.engine.head = head
            yield list(originals)
        finally:
            for name, old in originals.items():
                self.parameters[name].data = old.to(self.parameters[name].device if aside else old.device)
            self.engine.head = self.head

    def diverge(self, source: WindowSource, start: int) -> Iterator[tuple[int, Answers]]:
        """Answers of all windows with the weights that are in the model now, which differ from layer ``start`` on."""
        self._start = start
        try:
            yield from self.engine.diverge(source, self)
        finally:
            self._start = 0
