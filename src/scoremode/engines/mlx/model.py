"""A model of mlx-lm whose head was replaced by a recorder, so that its logits are never in memory at once.

model(ids)     layers ─▶ norm ─▶ (scale) ─▶ recorder: keeps the states           ─▶ (scale, cap): of no logits
served(rows)                                 recorder: answers with these logits ─▶ (scale, cap)

So whatever a model does before and after its head is done by its own code, and any nesting of models works.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx import nn
from torch import Tensor

from scoremode.core.engine.distributions import to_raw
from scoremode.core.engine.states import agree
from scoremode.core.models.facts import ModelFacts
from scoremode.engines.mlx.mlx_options import MlxOptions
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.head.matrix import Head
from scoremode.values import Ids

PRODUCT_SLACK = 10.0  # × the rounding of a number: on a CPU, MLX adds the products of half precision in half precision
REPORT = "use --engine transformers, and report this model"
KIND = ("mode", "bits", "group_size")  # of a quantized module
NESTED = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}  # of Gemma 3, and mlx-lm's names


def device_of(wanted: str | None) -> tuple[Any, str]:
    """The device that a user chose, or MLX's own choice, and its name for people; OptionError if there is none."""
    if wanted not in (None, "cpu", "gpu"):
        raise OptionError(f"--device {wanted} is not known to MLX", fix="give cpu or gpu")
    if wanted == "gpu" and not mx.is_available(mx.gpu):
        raise OptionError("--device gpu: MLX finds no GPU here", fix="use --device cpu")
    device = mx.default_device() if wanted is None else mx.Device(getattr(mx, wanted))
    kind = "gpu" if device == mx.gpu else "cpu"
    name = mx.device_info(device).get("device_name") if kind == "gpu" else None
    return device, f"gpu ({name})" if name else kind


def to_torch(x: Any) -> Tensor:
    """An array of MLX as a tensor with the same bits, on the CPU. It is computed here, and its graph is freed."""
    if x.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(x.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def to_mlx(x: Tensor) -> Any:
    """A tensor as an array of MLX with the same bits."""
    raw = mx.array(to_raw(x))
    return raw.view(mx.bfloat16) if x.dtype == torch.bfloat16 else raw


@contextlib.contextmanager
def keeping_limits() -> Iterator[None]:
    """When it is imported, mlx-lm lowers the number of files that this process may open; and it prints. Not in here."""
    import resource

    usual = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        with contextlib.redirect_stdout(None):
            yield
    finally:
        resource.setrlimit = usual


def load_model(facts: ModelFacts, options: MlxOptions, device: Any) -> tuple[Any, int]:
    """Loads a checkpoint as mlx-lm does, and calls it once for the size of its vocabulary; ModelError if it cannot."""
    declared = facts.config.get("quantization")  # MLX would divide by 0, and end the process
    every = (declared, *declared.values()) if isinstance(declared, Mapping) else ()
    sizes = [size for scheme in every if isinstance(scheme, Mapping) for size in map(scheme.get, KIND[1:], (1, 1))]
    if wrong := [size for size in sizes if type(size) is not int or size < 1]:
        raise ModelError(f"{facts.name} declares {str(wrong[0])[:20]} as bits or group_size", fix="download it again")
    with keeping_limits():
        from mlx_lm.utils import load_model as load
    try:
        model, _ = load(facts.path, trust_remote_code=bool(options.trust_remote_code))
        if options.dtype not in (None, "auto"):
            model.set_dtype(getattr(mx, str(options.dtype)))
            mx.eval(model.parameters())
        with mx.stream(device):
            return model, int(model(mx.zeros((1, 1), mx.int32)).shape[-1])
    except Exception as error:  # it raises whatever its model files raise
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        needs_code = "trust_remote_code" in str(error)
        fix = "add --trust-remote-code if you trust its code" if needs_code else "use --engine transformers"
        raise ModelError(f"mlx-lm cannot run {facts.name}: {reason}", fix=fix) from None


class Recorder(nn.Module):  # type: ignore[misc]
    """Stands in for a head: keeps what the model hands it, or answers with given logits."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.__dict__.update(inner=inner, seen=None, answer=None)  # not among the parameters

    def __call__(self, x: Any) -> Any:
        return self.inner(x) if hasattr(self.inner, "as_linear") else self.as_linear(x)  # a tied matrix also embeds

    def as_linear(self, x: Any) -> Any:
        if self.answer is not None:
            return self.answer
        self.__dict__["seen"] = x
        return x[..., :1]


class RecordedModel:
    """A model of mlx-lm with a recorder in the place of its head."""

    def __init__(self, model: Any, vocabulary: int, name: str, device: Any) -> None:
        self.model, self.vocabulary, self.name, self.device = model, vocabulary, name, device
        self._owner, self._attribute, self.head = self._find_head()
        self._recorder = Recorder(self.head)
        self._own = getattr(self.head, "as_linear", self.head)
        self._finishes = False  # does the model change what its head gives?

    def _called(self, ids: Ids, cache: Any = None) -> Any:
        """Calls the model, lazily: what nobody reads is never computed."""
        bad = ids[(ids < 0) | (ids >= self.vocabulary)]
        if bad.size:  # MLX would read foreign memory, or end the process
            message = f"the text has the id {bad[0]}, and {self.name} has the ids 0 to {self.vocabulary - 1}"
            raise EngineError(message, fix="use the model's own tokenizer")
        return self.model(mx.array(ids), cache=cache) if cache is not None else self.model(mx.array(ids))

    def _find_head(self) -> tuple[Any, str, Any]:
        """The projection with a row for each token that lies outermost; an untied one wins over the embedding."""
        candidates = [
            (path.count(".") + bool(path), owner, name, child)
            for path, owner in self.model.named_modules()
            for name, child in owner.children().items()
            if isinstance(child, nn.Module) and "weight" in child
            if child.weight.ndim == 2 and child.weight.shape[0] == self.vocabulary
        ]
        if not candidates:
            raise EngineError(f"{self.name} has no matrix with a row for each token", fix=REPORT)
        return min(candidates, key=lambda candidate: (candidate[0], hasattr(candidate[3], "as_linear")))[1:]

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def probe(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Puts the recorder in its place; returns what the head receives (n, d), and the model's own logits.

        EngineError unless the model's logits come from what the recorder sees, bit for bit.
        """
        with mx.stream(self.device):
            expected = self._called(ids[None])[0]
            mx.eval(expected)
        setattr(self._owner, self._attribute, self._recorder)
        try:
            states = self.states(ids[None])[0]
            with mx.stream(self.device):
                raw = self._own(states[None])
                self._finishes = not bool(mx.array_equal(raw[0], expected))
                is_same = bool(mx.array_equal(self._finish(raw), expected)) if self._finishes else True
        except AttributeError:  # it reads the numbers of the matrix, instead of calling it
            is_same = False
        if not is_same and bool(mx.isfinite(expected.astype(mx.float32)).all()):
            raise EngineError(f"the head found in {self.name} does not give its logits", fix=REPORT)
        return to_torch(states), to_torch(expected.astype(mx.float32))

    def states(self, ids: Ids, cache: Any = None) -> Any:
        """What the head receives (n, m, d) for tokens (n, m), after those in a cache."""
        with mx.stream(self.device):
            self._called(ids, cache)
            seen = self._recorder.seen
            if seen is None or seen.ndim != 3 or seen.shape[:2] != ids.shape:
                raise EngineError(f"{self.name} does not call its head as other models do", fix=REPORT)
            self._recorder.__dict__["seen"] = None
            mx.eval(seen, [layer.state for layer in cache or ()])
        return seen

    # ── logits ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def served(self, hidden: Tensor) -> Tensor:
        """The model's own logits (n, vocabulary) of a few states (n, d), in float32 as the model rounded them."""
        with mx.stream(self.device):
            raw = self._own(to_mlx(hidden)[None])
            return to_torch((self._finish(raw) if self._finishes else raw[0]).astype(mx.float32))

    def _finish(self, raw: Any) -> Any:
        """What the model makes of given logits (1, n, vocabulary) after its head: its body is never computed."""
        self._recorder.__dict__["answer"] = raw
        try:
            return self._called(np.zeros((1, 1), np.int32))[0]
        finally:
            self._recorder.__dict__["answer"] = None

    def exact_head(self, hidden: Tensor, expected: Tensor) -> Head | None:
        """The head in float32 with its known scale and cap; None if these do not give the model's logits."""
        with mx.stream(self.device):
            weight = to_torch(_dequantized(self.head))
            bias = to_torch(self.head.bias.astype(mx.float32)) if "bias" in self.head else None
            raw = to_torch(self._own(to_mlx(hidden)[None])[0].astype(mx.float32))
        plain = Head(weight, self.vocabulary, bias)
        if not agree(plain.logits(hidden), raw, hidden.dtype, PRODUCT_SLACK):
            return None
        for scale, cap in self._shapes():
            if agree(Head(weight, self.vocabulary, None, scale, cap).shaped(raw.clone()), expected, hidden.dtype):
                return replace(plain, scale=scale, softcap=cap)
        return None

    def _shapes(self) -> Iterator[tuple[float, float | None]]:
        """Yields the scales and caps that this model may have, as it was made from its config."""
        if not self._finishes:
            yield 1.0, None
        elif (factor := argument(self.model, "logit_scale")) is not None:  # Cohere
            yield float(factor), None
        elif (divisor := argument(self.model, "logits_scaling")) is not None:  # Granite
            yield 1 / float(divisor), None
        elif (cap := argument(self.model, "final_logit_softcapping")) is not None:  # Gemma 2
            yield 1.0, float(cap)
        elif (factor := argument(self.model, "lm_head_multiplier")) is not None:  # Falcon-H1, tied
            yield float(factor) / float(argument(self.model, "embedding_multiplier")), None


def _dequantized(head: Any) -> Any:
    """The matrix of a head in float32, nothing rounded: scales in half precision would round every product."""
    if "scales" not in head:
        return head.weight.astype(mx.float32)
    floats = {name: head[name] for name in ("scales", "biases") if head.get(name) is not None}
    wide = {name: x if x.dtype == mx.uint8 else x.astype(mx.float32) for name, x in floats.items()}
    kind = {"group_size": head.group_size, "bits": head.bits, "mode": head.mode, "dtype": mx.float32}
    return mx.dequantize(head.weight, **wide, **kind)


def argument(model: Any, name: str) -> Any:
    """A value that a model, or the language model in it, was made with; None if it knows none of that name."""
    outer = (getattr(model, "language_model", None), model)
    owners = (part for owner in outer for part in (owner, getattr(owner, "model", None)))
    values = (getattr(getattr(owner, "args", None), name, None) for owner in owners)
    return next((value for value in values if value is not None), None)


# ── what the checkpoint says, and mlx-lm does not compute ────────────────────────────────────────────────────────────
def config_notes(model: Any, config: Mapping[str, Any], cache: Any) -> list[str]:
    """Notes on values of a config that mlx-lm does not use. The numbers stay those of mlx-lm."""
    text: Mapping[str, Any] = config.get("text_config") or config
    notes = _rope_notes(model, text.get("rope_parameters"))
    window = text.get("sliding_window") if text.get("use_sliding_window") is not False else None
    context = text.get("max_position_embeddings")
    kinds = {type(part).__name__ for layer in cache for part in getattr(layer, "caches", (layer,))}
    reaches = isinstance(window, int) and not (isinstance(context, int) and window >= context)
    if reaches and not kinds & {"RotatingKVCache", "ChunkedKVCache"}:
        notes.append(f"mlx-lm does not use sliding_window: it computes without the window of {window} tokens")
    if text.get("model_type") == "falcon_h1" and (factor := text.get("key_multiplier")) not in (None, 1):
        notes.append(f"mlx-lm does not use key_multiplier: it computes without the factor {factor}")
    return notes


def _rope_notes(model: Any, rope: object) -> list[str]:
    """Transformers 5 writes all about rotary embeddings as ``rope_parameters``, which most models do not read."""
    if not isinstance(rope, Mapping):
        return []
    changes = []
    for name, part in [(NESTED[kind], rope[kind]) for kind in NESTED if kind in rope] or [("rope_theta", rope)]:
        parameters: Mapping[str, Any] = part if isinstance(part, Mapping) else {}
        used, wanted = argument(model, name), parameters.get("rope_theta")
        if isinstance(wanted, int | float) and isinstance(used, int | float) and used != wanted:
            changes.append(f"{name} {used:g} instead of {wanted:g}")
        kind = parameters.get("rope_type", "default")
        if kind != "default" and not argument(model, "rope_scaling") and not argument(model, "rope_parameters"):
            changes.append(f"no {str(kind)[:20]} scaling")
    return [f"mlx-lm does not read rope_parameters: it computes with {' and '.join(changes)}"] if changes else []


def stored_types(model: Any, quantization: Mapping[str, Any] | None) -> tuple[dict[str, int], list[str]]:
    """How many layers of a model have which type, and notes on those that are not quantized as declared."""
    types = Counter[str]()
    declared, wrong = quantization or {}, dict[str, list[str]]()
    for path, module in model.named_modules():
        scheme = declared.get(path, declared)
        if "scales" in module and hasattr(module, "bits"):
            mode, bits, group = (getattr(module, name, "affine") for name in KIND)
            types[f"{mode} {bits} bit, groups of {group}"] += 1
            wanted = scheme if isinstance(scheme, Mapping) else declared
            if [*map(wanted.get, KIND, ("affine", bits, group))] != [mode, bits, group]:
                wrong.setdefault("quantized otherwise", []).append(path)
        elif hasattr(module, "to_quantized") and "weight" in module:
            types[str(module.weight.dtype).removeprefix("mlx.core.")] += 1
            if scheme:  # neither False nor undeclared
                wrong.setdefault("not quantized", []).append(path)
    clause = f"though the config declares {declared.get('bits')} bits: "
    return dict(types), [
        f"{len(paths)} of {types.total()} layers are {how}, {clause}" + ", ".join(paths[:3] + ["…"] * (len(paths) > 3))
        for how, paths in wrong.items()
    ]
