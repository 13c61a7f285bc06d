"""A model's name ─▶ its folder, and the facts in its files; weights are not loaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoremode.core.arguments import user_path
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.extensions import NamesOffer, offered
from scoremode.core.models.names import EMBEDDED
from scoremode.core.models.safetensors import read_header, sizes_of, stored_bytes
from scoremode.core.models.sizes import ModelSizes
from scoremode.core.reading import require_plain_files
from scoremode.core.strict_json import read_object
from scoremode.errors import ModelError, OptionError, did_you_mean, few

FINGERPRINTED = (".json", ".jinja", ".model", ".txt", ".py")  # besides the weights

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names in a config
LAYER = re.compile(r"^((?:.*?\.)?(?:layers|h|blocks))\.(\d+)\.")  # the outermost list of layers in a tensor's name
BESIDE = re.compile(r"visi|visual|image|audio|speech|encoder|mtp|draft|eagle|resampler|perceiver|projector|adapter")
NAMED = 3  # most tensors that a note names

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a checkpoint's files; weights are not read."""

    name: str  # as the user gave it
    path: Path
    revision: str | None  # the commit on the hub, if the folder comes from there
    files: dict[str, str]  # file name -> sha256; with a revision, only of code files
    fingerprint: str
    vocabulary: int | None
    context_length: int | None
    hidden_size: int | None
    weight_bytes: int
    bits_per_weight: float | None  # stored bits / weights; None if the format is not understood
    config: dict[str, Any]
    emulated_bytes: int | None = None  # the size that an emulated quantization would have; None if it is real
    sizes: ModelSizes | None = None  # of the stored tensors; None if the format is not understood or only emulated
    left_out: tuple[str, ...] = ()  # safetensors files in the folder that are not counted as weights
    notes: tuple[str, ...] = ()  # which parts of the checkpoint are not used, in words


def resolve(name: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of a model: the embedded one by name, a local folder, or a repository on the Hugging Face hub."""
    path = user_path(name)
    if name == EMBEDDED or path.is_dir():
        if revision is not None:
            raise OptionError(
                f"--revision does not apply to {name}, which is not on the hub", fix="leave --revision out"
            )
        if name == EMBEDDED:
            from scoremode.core.models.embedded import embedded_model

            return embedded_model()
        require_plain_files(path)
        return path
    if path.is_file():
        fix = "give the folder of a Hugging Face checkpoint; a text is given with --corpus"
        raise ModelError(f"{name} is a file", fix=fix)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        built_in_names = (EMBEDDED, "table:uniform", "table:successor")
        if name in built_in_names:
            raise ModelError(f"{name} is a model of the table engine and has no weights", fix="give a checkpoint")
        on_hub = "names on the Hugging Face hub are OWNER/NAME, as in openai-community/gpt2"
        fix = did_you_mean(name, built_in_names, on_hub) if "/" not in name else "check the path"
        raise ModelError(f"there is no model or folder '{name}'", fix=fix)
    return hub_config(name, revision, token, ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"))


def hub_config(name: str, revision: str | None = None, token: str | None = None, more: Sequence[str] = ()) -> Path:
    """Fetches config.json of a repository on the hub, and the files of the patterns ``more``; returns their folder.

    ModelError if it cannot be fetched: the hub's client raises many kinds of errors, and all of them mean "no model".
    """
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    from scoremode.core.hub import explain_hub_error, offline_if_unreachable, quiet

    options: dict[str, Any] = {"revision": revision, "token": token}
    try:  # the client tries again for minutes if the hub cannot be reached
        with offline_if_unreachable(), quiet():
            config = Path(hf_hub_download(name, "config.json", **options))
            return Path(snapshot_download(name, allow_patterns=[*more], **options)) if more else config.parent
    except errors.RemoteEntryNotFoundError:
        models = [model for reader in offered(NamesOffer) for model in reader.load().models_in(name)]
        fix = f"give a checkpoint{' or a GGUF model: ' if models else ''}{few(models)}"
        raise ModelError(f"{name} on the Hugging Face hub has no config.json", fix=fix) from None
    except Exception as error:
        reason, fix = explain_hub_error(error)
        message = f"model {name} could not be fetched from the Hugging Face hub: {reason}"
        raise ModelError(message, fix=fix) from None


def inspect(name: str, *, revision: str | None = None, token: str | None = None) -> ModelFacts:
    """Reads the facts in a model's files; ModelError if they are incomplete."""
    path = resolve(name, revision=revision, token=token)
    config = read_config(path)
    weights, left_out = weight_files(path)
    headers = [read_header(p) for p in weights]
    declared = config.get("quantization_config", config.get("quantization"))
    stored = sizes_of({name: t for tensors in headers for name, t in tensors.items()}, declared)
    emulated = _emulated_bits(config)  # the sizes of the stored tensors then say nothing
    sizes = stored if emulated is None else None
    text_config = config.get("text_config") or config
    if not isinstance(text_config, dict):
        raise ModelError(f"the text_config of {name} is not an object", fix="download the model again")
    notes = check_layers(name, text_config, (tensor for tensors in headers for tensor in tensors))
    revision = path.name if path.parent.name == "snapshots" else None
    files, identity = _fingerprint(path, revision, [*weights, *(p for p in left_out if _in_mistrals_format(p))])
    return ModelFacts(
        name=name,
        path=path,
        revision=revision,
        files=files,
        fingerprint=identity,
        vocabulary=_first_int(text_config, "vocab_size"),
        context_length=_first_int(
            text_config, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"
        ),
        hidden_size=_first_int(text_config, "hidden_size", "n_embd", "d_model"),
        weight_bytes=sum(stored_bytes(tensors.values()) for tensors in headers),
        bits_per_weight=emulated or (sizes.bits_per_weight if sizes else None),
        emulated_bytes=round(emulated * stored.weights / 8) if emulated and stored else None,
        sizes=sizes,
        config=config,
        left_out=tuple(p.name for p in left_out),
        notes=tuple(notes),
    )


def weight_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files that contain a checkpoint's weights, and the other safetensors files in the folder.

    If there is an index, the weights are in the files that it names, because loaders read those. Mistral's repositories
    contain the same weights again as consolidated*.safetensors, which must not be counted twice.
    """
    present = sorted(path.glob("*.safetensors"))
    if not present:
        pickled = any(path.glob("*.bin"))
        content = "only pickled weights (.bin), which scoremode does not open" if pickled else "no weights"
        raise ModelError(f"the model folder {path} contains {content}", fix="give a folder with .safetensors files")
    names = {p.name for p in present}
    index_names = _names_in_index(path / INDEX) if (path / INDEX).is_file() else None
    if index_names is None:
        twice = SINGLE in names
        weights = [p for p in present if not (twice and _in_mistrals_format(p))]
    else:
        if missing := sorted(index_names - names):
            raise ModelError(f"{path} lacks {missing[0]}, which its index names", fix="download the model again")
        if SINGLE in names - index_names:  # some loaders would read it, others the files of the index
            raise ModelError(f"{path} contains {SINGLE} and an index of other files", fix="remove one of the two")
        weights = [p for p in present if p.name in index_names]
    return weights, [p for p in present if p not in weights]


def _in_mistrals_format(path: Path) -> bool:
    """Is this a file in Mistral's own format? Some engines prefer it; Transformers does not read it."""
    return path.name.startswith("consolidated")


def _names_in_index(path: Path) -> set[str]:
    try:
        names = read_object(path)["weight_map"].values()
        if names and all(isinstance(n, str) and n.endswith(".safetensors") and Path(n).name == n for n in names):
            return set(names)
    except (ValueError, KeyError, AttributeError):
        pass
    raise ModelError(f"{path} is damaged: it names no files", fix="download the model again") from None


def _fingerprint(path: Path, revision: str | None, weights: list[Path]) -> tuple[dict[str, str], str]:
    """The sha256 of every file that affects scores, and one digest of them all.

    A revision on the hub identifies its files. Code files are hashed anyway, because they may have been edited locally.
    """
    suffixes = (".py",) if revision else FINGERPRINTED
    paths = [p for p in path.iterdir() if p.is_file() and p.suffix in suffixes]
    files = {p.name: remembered_sha256(p) for p in sorted(paths + ([] if revision else weights))}
    content = json.dumps({k: v for k, v in files.items() if k != "scoremode.json"}, sort_keys=True)
    identity = content if revision is None else f"{revision}{content}" if files else revision
    return files, hashlib.sha256(identity.encode()).hexdigest()


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        raise ModelError(f"the folder {path} has no config.json", fix="give the folder of a Hugging Face checkpoint")
    try:
        return read_object(file, constants=True)
    except ValueError as error:
        raise ModelError(f"{file} is not a config in JSON ({error})", fix="download the model again") from None


def _first_int(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[n] for n in names if isinstance(config.get(n), int)), None)


def _emulated_bits(config: dict[str, Any]) -> float | None:
    """The config's ``bits_per_weight``, if it has one: an emulated quantization states the bits it stands for."""
    bits = config.get("bits_per_weight")
    if isinstance(bits, int | float) and not isinstance(bits, bool) and 0 < bits <= 64:
        return float(bits)
    return None


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_layers(name: str, config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Raise ModelError if config and weights have different numbers of layers; return notes on unused layers.

    A config with fewer layers than the weights loads without an error, but scores a smaller model than intended.
    """
    layers = _first_int(config, *LAYERS)
    if layers is None:
        return []
    if layers < 1:
        raise ModelError(f"the config of {name} gives {layers} as the number of layers", fix="download the model again")
    stored = layers_of_text(tensors)
    predicting = config.get("num_nextn_predict_layers")  # stored after the other layers; predict several tokens ahead
    most = layers + (predicting if isinstance(predicting, int) and predicting > 0 else 0)
    if stored is None or stored == layers:
        return []
    if layers < stored <= most:
        return [f"layers {layers} to {stored - 1} of the checkpoint predict further tokens and are not used"]
    raise ModelError(
        f"{name} has weights for {stored} layers and a config for {layers}",
        fix="config and weights do not belong together: download the model again",
    )


def layers_of_text(tensors: Iterable[str]) -> int | None:
    """Number of layers of the language model that have weights; None if the names do not show it."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        match = LAYER.match(tensor)
        if match and not BESIDE.search(match[1].lower()):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return max(counts.values(), default=None)


def unused_note(unused: Iterable[str]) -> list[str]:
    """A note on tensors that the model does not use."""
    names = sorted(set(unused))
    if not names:
        return []
    listed = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    count = "1 tensor of the checkpoint is" if len(names) == 1 else f"{len(names)} tensors of the checkpoint are"
    return [f"{count} not used: {listed}"]
