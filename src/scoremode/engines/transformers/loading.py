"""Loads a checkpoint with Transformers, and lists the tensors of the checkpoint that the model does not use."""

from __future__ import annotations

import re
from typing import Any

import torch

from scoremode.engines.registry import known_engines
from scoremode.engines.transformers.transformers_options import TransformersOptions
from scoremode.errors import EngineError, ModelError
from scoremode.models.facts import ModelFacts, unused_note
from scoremode.models.safetensors import read_header

DROPPED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # in every class these are computed, not loaded


def load_model(facts: ModelFacts, device: str, dtype: Any, options: TransformersOptions) -> tuple[Any, list[str]]:
    """The model, and notes on tensors left out. A missing tensor, which would be filled at random, is an error."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _require_known_quantization(facts)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(facts.path),
            dtype=dtype,
            device_map=device,
            trust_remote_code=bool(options.trust_remote_code),
            **({"attn_implementation": options.attn_implementation} if options.attn_implementation else {}),
            use_safetensors=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise EngineError(
            f"the weights of {facts.name} ({facts.weight_bytes / 2**30:.1f} GiB) do not fit on {device}",
            fix="use --device auto or --device cpu",
        ) from None
    except Exception as error:
        if "ignore_mismatched_sizes" in str(error):  # its message names an argument that our user did not give
            raise ModelError(
                f"the weights of {facts.name} have different shapes than its config says",
                fix="config and weights do not belong together: download the model again",
            ) from None
        reason = str(error).strip().split("\n")[0][:300]
        needs_code = "trust_remote_code" in str(error)
        fix = "add --trust-remote-code if you trust its code" if needs_code else "check the model folder"
        raise ModelError(f"{facts.name} could not be loaded ({type(error).__name__}: {reason})", fix=fix) from None
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:  # Transformers would fill them with random numbers and continue
        raise ModelError(f"the checkpoint {facts.name} lacks {absent[0]}", fix="download the model again")
    model.config.return_dict = True  # answers have names, whatever the config says
    return model, unused_note([*map(str, info["unexpected_keys"]), *_dropped(model, facts)])


def _require_known_quantization(facts: ModelFacts) -> None:
    """Refuse a ``quantization_config`` that Transformers would ignore, loading packed weights as if they were plain."""
    from transformers.quantizers.auto import AutoHfQuantizer

    quantization = facts.config.get("quantization_config")
    if not quantization:
        return
    others = [name for name, plugin in known_engines().items() if plugin.opens_checkpoints and name != "transformers"]
    fix = f"give a checkpoint whose quantization Transformers knows, or use --engine {' or '.join(others)}"
    if not isinstance(quantization, dict):
        raise ModelError(f"the quantization_config of {facts.name} is not an object", fix=fix)
    method = quantization.get("quant_method")
    try:
        known = AutoHfQuantizer.supports_quant_method(quantization)
    except (ValueError, TypeError):  # it names no method, or something that is not a name
        known = False
    if not known:
        raise ModelError(f"the quantization method {method!r} of {facts.name} is not known", fix=fix)


def _dropped(model: Any, facts: ModelFacts) -> list[str]:
    """Stored tensors that Transformers drops silently: by rules of the model's class, or by rules for all classes."""
    own_rules = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(pattern) for pattern in (*own_rules, *DROPPED)]
    own = set(model.state_dict())
    names = [name for path in sorted(facts.path.glob("*.safetensors")) for name in read_header(path)]
    return [name for name in names if name not in own and any(pattern.search(name) for pattern in patterns)]
