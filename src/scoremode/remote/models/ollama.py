"""Models that Ollama keeps on this machine: ollama:llama3.2:3b. Nothing is started and nothing is fetched.

A manifest lists the layers of a model by their hashes; the layer with the weights is a GGUF file among the blobs:

    manifests/registry.ollama.ai/library/llama3.2/3b ──digest of the layer "…image.model"──▶ blobs/sha256-…
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from scoremode.core.arguments import user_path
from scoremode.core.cache.units import size_words
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.strict_json import Size, read_object
from scoremode.errors import ModelError, few

PREFIX = "ollama:"
REGISTRY, LIBRARY, LATEST = "registry.ollama.ai", "library", "latest"
DIGEST = re.compile("sha256:[0-9a-f]{64}")
WEIGHTS = "application/vnd.ollama.image.model"
SERVICE = Path("/usr/share/ollama/.ollama/models")  # where Ollama keeps them if it runs as a service


class Layer(msgspec.Struct):
    mediaType: str  # noqa: N815 - as in the manifest
    digest: str
    size: Size = 0


class Manifest(msgspec.Struct):
    layers: list[Layer]


class OllamaNames:
    def claims(self, name: str) -> bool:
        return name.startswith(PREFIX)

    def expand(self, name: str, baseline: str) -> list[str]:
        return [name]

    def models_in(self, repo: str) -> list[str]:
        return []

    def release(self, name: str) -> None:
        """Nothing was fetched."""

    def find(self, name: str) -> Path:
        root = next((folder for folder in folders() if (folder / "manifests").is_dir()), None)
        if root is None:
            raise ModelError(
                "Ollama keeps no models on this machine", fix="set OLLAMA_MODELS to the folder that has them"
            )
        manifest = root / "manifests" / manifest_of(name.removeprefix(PREFIX))
        if not manifest.is_file():
            there = few(sorted(_known(root))) or "none"
            raise ModelError(
                f"Ollama has no {name.removeprefix(PREFIX)}", fix=f"ollama pull it, or choose one of: {there}"
            )
        path = root / "blobs" / _weights(manifest).digest.replace(":", "-")
        if not path.is_file():
            raise ModelError(f"{manifest} names a file that is not there: {path}", fix="ollama pull it again")
        if remembered_sha256(path) != path.name.removeprefix("sha256-"):
            raise ModelError(f"{path} does not have the hash in its name", fix="ollama pull it again")
        return path


OLLAMA_NAMES = OllamaNames()


def folders() -> list[Path]:
    """Where Ollama keeps models: OLLAMA_MODELS alone if it is set."""
    folder = os.environ.get("OLLAMA_MODELS")
    return [user_path(folder)] if folder else [user_path("~/.ollama/models"), SERVICE]


def manifest_of(model: str) -> str:
    """The place of a model's manifest, from ``name[:tag]``, ``owner/name[:tag]`` or ``host/owner/name[:tag]``.

    >>> manifest_of("llama3.2:3b"), manifest_of("hf.co/org/repo:Q4_K_M")
    ('registry.ollama.ai/library/llama3.2/3b', 'hf.co/org/repo/Q4_K_M')
    """
    name, _, tag = model.partition(":")
    parts = name.split("/")
    if not 1 <= len(parts) <= 3 or not all(parts) or ".." in parts or "/" in tag or tag == "..":
        raise ModelError(f"{PREFIX}{model} is not a name of Ollama", fix=f"give a name such as {PREFIX}llama3.2:3b")
    return "/".join([*[REGISTRY, LIBRARY][: 3 - len(parts)], *parts, tag or LATEST])


def _weights(path: Path) -> Layer:
    """The layer with the weights; ModelError if the manifest has none."""
    try:
        manifest = msgspec.convert(read_object(path), Manifest)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})", fix="ollama pull it again") from None
    layer = next((layer for layer in manifest.layers if layer.mediaType == WEIGHTS), None)
    if layer is None or not DIGEST.fullmatch(layer.digest):
        raise ModelError(f"{path} has no GGUF file", fix="choose a model that Ollama runs by llama.cpp")
    return layer


def _known(root: Path) -> Iterator[str]:
    """The names of all models with their sizes, as Ollama lists them."""
    for path in sorted(root.glob("manifests/*/*/*/*")):
        host, owner, name, tag = path.parts[-4:]
        shown: list[Any] = [part for part in (host, owner) if part not in (REGISTRY, LIBRARY)]
        try:
            size = f" ({size_words(_weights(path).size)})"
        except ModelError:
            size = ""
        yield f"{PREFIX}{'/'.join([*shown, name])}:{tag}{size}"
