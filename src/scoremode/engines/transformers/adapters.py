"""PEFT adapters: small sets of weights in their own folder, added to a model after it is loaded."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scoremode.disk.files import remembered_sha256
from scoremode.errors import ModelError
from scoremode.models.subject import Subject

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def with_adapter(subject: Subject, folder: str) -> Subject:
    """The subject with an adapter: a different model, so it has a different fingerprint. No weights are loaded."""
    path = Path(folder).expanduser()
    if find_spec("peft") is None:
        raise ModelError("--adapter needs the package 'peft'", fix="pip install '.[peft]'")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise ModelError(f"the adapter folder {folder} has no {name}", fix="give a folder that PEFT saved")
    files = {f"{path.name}/{name}": remembered_sha256(path / name) for name in (CONFIG, WEIGHTS)}
    whole = "\n".join([subject.fingerprint, *(files[name] for name in sorted(files))])
    return replace(
        subject,
        name=f"{subject.name}+{path.name}",
        fingerprint=hashlib.sha256(whole.encode()).hexdigest(),
        files={**subject.files, **files},
        notes=(*subject.notes, f"with the PEFT adapter {path.name}"),
    )


def put_on(model: Any, folder: str) -> Any:
    """The model with the adapter's layers in it. They are not merged: merging would round the weights."""
    from peft import PeftModel

    try:
        wrapped = PeftModel.from_pretrained(model, str(Path(folder).expanduser()))
        if wrapped.active_peft_config.is_prompt_learning:
            raise ValueError("it adds tokens before every prompt")
        return wrapped.base_model.model
    except Exception as error:  # PEFT raises many kinds of errors; all mean that the two do not fit
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelError(
            f"the adapter {folder} does not fit the model ({type(error).__name__}: {reason})",
            fix="give the adapter's own base model",
        ) from None
