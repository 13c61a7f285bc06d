"""Hidden states between the layers of a GGUF file, by llama.cpp's evaluation callback.

llama.cpp computes a graph of named tensors, and asks for each of them whether somebody wants to read it. What leaves
layer N is called ``l_out-N``, and what enters layer 0 is the embedding. The states of a long window come in pieces, one
for each micro-batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_bool, c_void_p
from typing import Any

import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.models.gguf import GgufFacts, read_gguf
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Window
from scoremode.engines.llamacpp import LlamaCppPlugin, context_for
from scoremode.engines.llamacpp.engine import LlamaCppEngine
from scoremode.engines.llamacpp.llamacpp_options import LlamaCppOptions
from scoremode.errors import EngineError
from scoremode.studies.attribution.layer_profile import LayerStates, States, fed_tokens

CALLBACK = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
EMBEDDINGS = (b"inp_scaled", b"inp_embd", b"embd")  # what enters layer 0: the first of these that a model has
LAYER = b"l_out-"


def open_layers(plugin: LlamaCppPlugin, subject: Subject, options: LlamaCppOptions, work: Work) -> LlamaCppLayers:
    facts, vocabulary = read_gguf(subject.name), subject.vocabulary or 0
    return LlamaCppLayers(facts, vocabulary, options, context_for(subject, work))


class LlamaCppLayers(LlamaCppEngine, LayerStates):
    """An engine whose decodes are watched."""

    def __init__(self, facts: GgufFacts, vocabulary: int, options: LlamaCppOptions, longest: int) -> None:
        self._seen: dict[bytes, list[States]] = {}
        self._callback = CALLBACK(self._watch)  # must live as long as the context
        super().__init__(facts, vocabulary, options, longest)
        self.layers = int(self._llama.call.llama_model_n_layer(self._model))
        self.width = int(self._llama.call.llama_model_n_embd(self._model))

    def _observe(self, parameters: Any) -> None:
        kind = dict(parameters._fields_)["cb_eval"]  # a pointer here, a function in the structs of llama-cpp-python
        parameters.cb_eval = ctypes.cast(self._callback, kind)

    def _watch(self, tensor: int, asks: bool, _data: Any) -> bool:
        """Is called twice for each tensor: is it wanted; and if so, again when it has been computed."""
        call = self._llama.call
        name: bytes = call.ggml_get_name(tensor)
        if asks:
            return name.startswith(LAYER) or name in EMBEDDINGS
        size = int(call.ggml_nbytes(tensor))
        buffer = np.empty(size, np.uint8)
        call.ggml_backend_tensor_get(tensor, buffer.ctypes.data, 0, size)
        if size == 4 * call.ggml_nelements(tensor):  # float32, as states always are; checked where they are joined
            self._seen.setdefault(name, []).append(buffer.view(np.float32))
        return True

    def states(self, windows: Sequence[Window]) -> Iterator[States]:
        for window in windows:
            yield self._states_of(window)

    def _states_of(self, window: Window) -> States:
        tokens = fed_tokens(window)
        parts: list[list[States]] = [[] for _ in range(self.layers + 1)]
        for begin in range(0, tokens, self.at_once):
            ids = window.ids[begin : min(begin + self.at_once, tokens)]
            self._seen.clear()
            # logits of every row: the last layer computes the rows of outputs only
            self._decode(ids, begin, np.arange(len(ids), dtype=np.int32))
            for place, name in enumerate(self._names()):
                parts[place].append(self._joined(name, len(ids)))
        self._seen.clear()
        return np.stack([np.concatenate(pieces) for pieces in parts])

    def _names(self) -> list[bytes]:
        embedding = next((name for name in EMBEDDINGS if name in self._seen), EMBEDDINGS[-1])
        return [embedding, *(LAYER + str(layer).encode() for layer in range(self.layers))]

    def _joined(self, name: bytes, tokens: int) -> States:
        pieces = self._seen.get(name, [])
        if sum(map(len, pieces)) != tokens * self.width:
            raise EngineError(
                f"llama.cpp does not show the hidden states {name.decode()} of this model",
                fix="use a model whose layers llama.cpp names l_out",
            )
        return np.concatenate(pieces).reshape(tokens, self.width)
