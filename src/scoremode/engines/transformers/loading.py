"""Loads a checkpoint with Transformers and its PEFT adapter, lists the tensors that it does not use, finds its head."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from scoremode.core.arguments import user_path
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.engine.options import DTYPES
from scoremode.core.engine.registry import known_engines
from scoremode.core.installation import pip_install
from scoremode.core.models.facts import ModelFacts, unused_note
from scoremode.core.models.safetensors import read_header
from scoremode.core.models.subject import Subject
from scoremode.core.reading import require_plain_files
from scoremode.core.strict_json import read_object
from scoremode.engines.transformers.choices import TransformersOptions, choose_device, choose_dtype
from scoremode.errors import EngineError, ModelError
from scoremode.head.matrix import Head

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
DROPPED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # in every class these are computed, not loaded


def load_model(facts: ModelFacts, options: TransformersOptions, **more: Any) -> tuple[Any, list[str]]:
    """Loads the model onto its device, with its adapter; also returns notes on tensors that were left out.

    ``more`` are further arguments of ``from_pretrained``.
    A missing tensor, which would be filled at random, is an error.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _require_known_quantization(facts)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, facts)
    capped = (facts.config.get("text_config") or facts.config).get("attn_logit_softcapping") is not None
    attention = options.attn_implementation or ("eager" if capped else None)  # sdpa would leave the cap out
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(facts.path),
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device,
            trust_remote_code=bool(options.trust_remote_code),
            **({"attn_implementation": attention} if attention else {}),
            use_safetensors=True,
            output_loading_info=True,
            **more,
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
    notes = unused_note([*map(str, info["unexpected_keys"]), *_dropped(model, facts)])
    return (model if options.adapter is None else _with_layers_of(options.adapter, model)), notes


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
        is_known = AutoHfQuantizer.supports_quant_method(quantization)
    except (ValueError, TypeError):  # it names no method, or something that is not a name
        is_known = False
    if not is_known:
        raise ModelError(f"the quantization method {method!r} of {facts.name} is not known", fix=fix)


def _dropped(model: Any, facts: ModelFacts) -> list[str]:
    """Stored tensors that Transformers drops silently: by rules of the model's class, or by rules for all classes."""
    own_rules = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(pattern) for pattern in (*own_rules, *DROPPED)]
    model_tensors = set(model.state_dict())
    names = [name for path in sorted(facts.path.glob("*.safetensors")) for name in read_header(path)]
    return [name for name in names if name not in model_tensors and any(pattern.search(name) for pattern in patterns)]


# ── PEFT adapters: small sets of weights in their own folder, added to a model after it is loaded ─────────────────────
def with_adapter(subject: Subject, folder: str) -> Subject:
    """The subject with an adapter added: another model, with another fingerprint. No weights are loaded."""
    path = user_path(folder)
    if find_spec("peft") is None:
        raise ModelError("--adapter needs the package 'peft'", fix=pip_install("peft"))
    for name in ADAPTER_FILES:
        if not (path / name).is_file():
            raise ModelError(f"the adapter folder {folder} has no {name}", fix="give a folder that PEFT saved")
    require_plain_files(path)
    read_header(path / ADAPTER_FILES[1])
    files = {f"{path.name}/{name}": remembered_sha256(path / name) for name in ADAPTER_FILES}
    whole = "\n".join([subject.fingerprint, *(files[name] for name in sorted(files))])
    return replace(
        subject,
        name=f"{subject.name}+{path.name}",
        fingerprint=hashlib.sha256(whole.encode()).hexdigest(),
        files={**subject.files, **files},
        notes=(*subject.notes, f"with the PEFT adapter {path.name}"),
    )


def _with_layers_of(folder: str, model: Any) -> Any:
    """Adds the layers of an adapter to a model. They are not merged: merging would round the weights."""
    from peft import PeftModel

    try:
        if read_object(user_path(folder) / ADAPTER_FILES[0]).get("adapters"):  # PEFT would load them from there
            raise ValueError("it names other adapters, by their paths")
        wrapped = PeftModel.from_pretrained(model, str(user_path(folder)))
        if wrapped.active_peft_config.is_prompt_learning:
            raise ValueError("it adds tokens before every prompt")
        return wrapped.base_model.model
    except Exception as error:  # PEFT raises many kinds of errors; all mean that the two do not fit
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelError(
            f"the adapter {folder} does not fit the model ({type(error).__name__}: {reason})",
            fix="give the adapter's own base model",
        ) from None


def find_head(model: Any) -> Head | None:
    """The last matrix of a model with its scale and cap, or None if it is not a plain matrix."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        return None
    weight, bias = layer.weight.detach(), layer.bias
    if str(weight.dtype).removeprefix("torch.") not in DTYPES or weight.device.type == "meta":
        return None
    config = model.config.get_text_config()
    scale = 1.0
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite divides
        scale /= float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere multiplies
        scale *= float(factor)
    if weight.device.type == "cpu" and weight.dtype in (torch.float16, torch.bfloat16):
        weight = weight.float()  # exact, and only once: on a CPU, half-precision products are slow and rounded
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight=weight,
        vocabulary=weight.shape[0],
        bias=None if bias is None else bias.detach(),
        scale=scale,
        softcap=None if cap is None else float(cap),
    )
