"""The ExLlamaV3 engine: float16 logits of its own kernels, reduced by scoremode's head code on the same GPU.

One window is one forward pass without a cache, as ExLlamaV3's own perplexity script feeds it. Where only the last rows
of a window are asked for, the head is applied to those alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.base import SCORES, Engine, EngineFacts, Want
from scoremode.engines.distributions import IndexedWindow
from scoremode.engines.logits import LogitsReducer, Reduced, judge_probe
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.head.precision import full_float32
from scoremode.models.facts import ModelFacts
from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.values import Bools

PROBE_TOKENS = 160  # more than ExLlamaV3's border between its kernels for few and for many rows
SLACK = 0.05  # of the largest logit, between two ways to compute the same row in float16


class ExllamaEngine(Engine):
    """Scores windows with ExLlamaV3."""

    def __init__(
        self, facts: ModelFacts, device: str | None, tensor_parallel: bool, kernel_switches: dict[str, str]
    ) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # it prints while it compiles and loads
            self.config, self.model = _load(facts, device, tensor_parallel)
        self.vocabulary = int(facts.vocabulary or self.config.vocab_size)
        notes = self._self_test()
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
                "attention": "flash_attn_nc",
                "tensor_parallel": tensor_parallel,
                "logits": "float16",
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
            raise EngineError("ExLlamaV3 gives other logits for the last rows alone", fix="report this model")
        ids[-1] = (ids[-1] + 1) % self.vocabulary
        return judge_probe(whole, self._logits(ids).float()[:-1], SLACK)

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if want.states:
            raise EngineError(
                "ExLlamaV3's head is quantized, so no reference can be kept",
                fix="use an unquantized checkpoint for a reference, with --engine transformers",
            )
        reducer = LogitsReducer(source, want, self.device, self.vocabulary)
        waiting: tuple[IndexedWindow, list[Reduced]] | None = None
        for index in np.flatnonzero(~done).tolist():
            indexed = index, source.window(index)
            parts = self._reduced(indexed, reducer)
            if waiting is not None:  # read one window late: the GPU already has the next one to work on
                yield _answered(waiting, reducer)
            waiting = indexed, parts
        if waiting is not None:
            yield _answered(waiting, reducer)

    def _reduced(self, indexed: IndexedWindow, reducer: LogitsReducer) -> list[Reduced]:
        window = indexed[1]
        with self._within_memory(window):
            return reducer.reduce(indexed, slice(0, len(window.rows)), self._rows(window))

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
                fix="give a smaller --context-length",
            ) from None

    def close(self) -> None:
        self.model.unload()
        torch.cuda.empty_cache()


def _answered(waiting: tuple[IndexedWindow, list[Reduced]], reducer: LogitsReducer) -> tuple[int, Answers]:
    (index, window), parts = waiting
    return index, reducer.answers(parts, window.targets.shape[1])


def _load(facts: ModelFacts, device: str | None, tensor_parallel: bool) -> tuple[Any, Any]:
    import exllamav3

    if tensor_parallel and device is not None:
        raise OptionError("--tensor-p uses all visible GPUs", fix="leave --device out; set CUDA_VISIBLE_DEVICES")
    try:
        config = exllamav3.Config.from_directory(str(facts.path))
        model = exllamav3.Model.from_config(config)
        if tensor_parallel:
            model.load(tensor_p=True)
        else:
            model.load(device=device or ("cuda:0" if torch.cuda.device_count() == 1 else None))
    except torch.OutOfMemoryError:
        raise EngineError(
            f"the weights of {facts.name} do not fit on the GPU", fix="use more GPUs, or a smaller version"
        ) from None
    except (AssertionError, ValueError, KeyError, RuntimeError, OSError) as error:
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise ModelError(
            f"ExLlamaV3 cannot load {facts.name}: {reason}", fix="check the model, or its version"
        ) from None
    return config, model
