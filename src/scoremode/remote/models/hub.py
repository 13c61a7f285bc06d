"""GGUF files on the Hugging Face hub.

org/repo:Q4_K_M       the file, or the parts of a split one, of that quantization
org/repo/file.gguf    that file; for a split one, its first part
org/repo:*            every quantization but the baseline (candidates of ``compare``), the smallest first

A file is fetched into the cache of the hub's own client and compared with the hash that the hub states. Without a
network, what is in the cache is used.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from scoremode.core.cache.units import size_words
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.hub import explain_hub_error, offline_if_unreachable, quiet
from scoremode.core.models.gguf import SPLIT, SUFFIX
from scoremode.core.models.names import reader_of
from scoremode.errors import ModelError, RunError, few, print_line
from scoremode.remote.models.fetching import SILENCE, fetch_blob

BY_TYPE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<type>[\w.*-]+)")
BY_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[^*?\x00-\x1f]+\.gguf)", re.IGNORECASE)
LOCAL = (".", "/", "~")  # how names of files and folders of this machine begin
TYPE = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32))(?=[-._/]|$)",
    re.IGNORECASE,
)
HASH = re.compile("[0-9a-f]{64}")
BESIDE = re.compile("mmproj|^imatrix|imatrix[.]gguf$")  # in names of files that are no language models
EVERY = "*"

File = tuple[str, int | None, str | None]  # its name, bytes and sha256, as far as they are stated


@dataclass(frozen=True, slots=True)
class HubModel:
    """A GGUF model of a repository: one file, or the parts of a split one."""

    type: str | None  # such as Q4_K_M, as the names of its files say; None if they do not
    files: tuple[str, ...]
    sizes: tuple[int | None, ...]  # bytes of each file; None if the hub does not say
    hashes: tuple[str | None, ...]  # sha256 of each file, as the hub states them; None if it was not asked

    @property
    def size(self) -> int:
        """Bytes of all files, as far as they are known."""
        return sum(size or 0 for size in self.sizes)

    def words(self, name: str) -> str:
        return f"{name} ({size_words(self.size)})"


@dataclass(frozen=True, slots=True)
class Listing:
    """The GGUF models of a repository at one commit, the smallest first."""

    commit: str
    models: tuple[HubModel, ...]

    def named(self) -> list[tuple[str, HubModel]]:
        """The models, each with its type, or with its first file if the type is not known or not its own."""
        types = Counter(str(model.type).lower() for model in self.models)
        return [
            (model.type if model.type and types[model.type.lower()] == 1 else model.files[0], model)
            for model in self.models
        ]


@dataclass
class HubNames:
    fetched: dict[str, list[tuple[str, Path]]] = field(default_factory=dict)  # by name: new files in a repository

    def claims(self, name: str) -> bool:
        if name.startswith(LOCAL):
            return False
        by_file = BY_FILE.fullmatch(name)  # in a folder of this machine, it is a file that is missing there
        return bool(BY_TYPE.fullmatch(name)) or (by_file is not None and not Path(name).parents[-2].exists())

    def expand(self, name: str, baseline: str) -> list[str]:
        if not name.endswith(f":{EVERY}"):
            return [name]
        repo = name.removesuffix(f":{EVERY}")
        is_beside = baseline.startswith((f"{repo}:", f"{repo}/")) and reader_of(baseline) is self
        first = _chosen(baseline)[0] if is_beside else None
        names = [full for full, model in _named(repo) if model is not first]
        if not names:
            other = f" but {baseline}" if first else ""
            raise ModelError(f"{repo} has no GGUF model{other}", fix="give a repository with GGUF files")
        return names

    def models_in(self, repo: str) -> list[str]:
        return [model.words(full) for full, model in _named(repo)]

    def find(self, name: str) -> Path:
        model, repo, commit = _chosen(name)
        files = zip(model.files, model.sizes, model.hashes, strict=True)
        paths: list[Path] = _ask(name, lambda: [self._fetch(name, repo, commit, file) for file in files])
        return paths[0]

    def _fetch(self, name: str, repo: str, commit: str, stated: File) -> Path:
        from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache

        file, size, sha256 = stated
        blobs, here = _folder(repo) / "blobs", try_to_load_from_cache(repo, file, revision=commit)
        if not isinstance(here, str):
            before = {blob.resolve() for blob in blobs.glob("*")}  # with another commit, the content may be here
            if not (blobs / str(sha256)).exists():
                how_large = "" if size is None else f", {size_words(size)}"
                print_line(f"scoremode: fetching {file} of {repo} from the hub{how_large}")
            if sha256 and size:
                url = hf_hub_url(repo, file, revision=commit, endpoint=_endpoint())
                fetch_blob(url, blobs / sha256, size, f"{file} of {repo}")
            here = hf_hub_download(repo, file, revision=commit, endpoint=_endpoint())
            if Path(here).resolve() not in before:
                self.fetched.setdefault(name, []).append((repo, Path(here)))
        path = Path(here)
        if sha256 and remembered_sha256(path) != sha256:
            _remove(path, repo)
            (blobs / sha256).unlink(missing_ok=True)  # the hub may state another name for the same file meanwhile
            raise ModelError(
                f"{file} of {repo} does not have the hash that the hub states", fix="run it again to fetch it"
            )
        return path

    def release(self, name: str) -> None:
        for repo, path in self.fetched.pop(name, ()):
            _remove(path, repo)


HUB_NAMES = HubNames()


def _remove(path: Path, repo: str) -> None:
    """Removes a file from the hub's cache: its name in a snapshot, and its content, unless that lies elsewhere."""
    content, folder = path.resolve(), _folder(repo).resolve()
    if path.parent.resolve().is_relative_to(folder / "snapshots"):
        path.unlink(missing_ok=True)
    if content.parent == (_folder(repo) / "blobs").resolve():
        content.unlink(missing_ok=True)


def _chosen(name: str) -> tuple[HubModel, str, str]:
    """The model that a name names, its repository and its commit; ModelError lists those that exist."""
    if by_file := BY_FILE.fullmatch(name):
        repo, wanted = by_file["repo"], by_file["file"]
        repo_listing = listing(repo)
        models = [model for model in repo_listing.models if wanted in model.files]
    else:
        repo, wanted = name.split(":")
        repo_listing = listing(repo)
        models = [model for model in repo_listing.models if (model.type or "").lower() == wanted.lower()]
    if len(models) == 1:
        return models[0], repo, repo_listing.commit
    there = few([model.words(short) for short, model in repo_listing.named()])
    if not models:
        fix = f"choose one of {there}" if there else "give a repository with GGUF files"
        raise ModelError(f"{repo} has no {wanted}", fix=fix)
    files = few([model.words(f"{repo}/{model.files[0]}") for model in models])
    raise ModelError(f"{repo} has {len(models)} models of the type {wanted}", fix=f"choose one of {files}")


def _named(repo: str) -> list[tuple[str, HubModel]]:
    """The models of a repository by their full names."""
    return [(f"{repo}{':' if short == model.type else '/'}{short}", model) for short, model in listing(repo).named()]


@cache
def listing(repo: str) -> Listing:
    """The GGUF models of a repository; from the client's cache if the hub cannot be reached."""
    from huggingface_hub import HfApi, constants

    with offline_if_unreachable() as reachable, quiet():
        if not reachable or constants.HF_HUB_OFFLINE:
            return _in_cache(repo, "offline mode is on" if reachable else "the hub cannot be reached")
        info = _ask(repo, lambda: HfApi(endpoint=_endpoint()).model_info(repo, files_metadata=True, timeout=SILENCE))
    if info.sha is None:
        raise ModelError(f"the hub states no commit of {repo}", fix="check HF_ENDPOINT, or give a local file")
    siblings: list[Any] = [file for file in info.siblings or () if file.rfilename.lower().endswith(SUFFIX)]
    return Listing(info.sha, _models([(file.rfilename, file.size, file.lfs and file.lfs.sha256) for file in siblings]))


def _in_cache(repo: str, reason: str) -> Listing:
    """The models of a repository that were fetched before, at the newest commit with any."""
    for newest in sorted((_folder(repo) / "snapshots").glob("*/"), key=lambda folder: -folder.stat().st_mtime):
        if paths := [path for path in newest.rglob(f"*{SUFFIX}") if path.exists()]:
            names = [(path, HASH.fullmatch(path.resolve().name)) for path in paths]  # the cache names files by hashes
            files = [(str(path.relative_to(newest)), path.stat().st_size, match and match[0]) for path, match in names]
            return Listing(newest.name, _models(files))
    raise ModelError(f"{repo} is not on this machine, and {reason}", fix="fetch it first, or give a local file")


def _folder(repo: str) -> Path:
    """Where the hub's client keeps a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")


def _endpoint() -> str | None:
    """Another address of the hub than the usual one; the client reads it only when it is imported."""
    return os.environ.get("HF_ENDPOINT") or None


def _ask(name: str, ask: Any) -> Any:
    try:
        return ask()
    except ModelError:
        raise
    except Exception as error:  # the hub's client raises many types; all of them mean "no file"
        locking = error.__context__ if isinstance(error, RunError) else None  # the cache cannot be written
        reason, fix = explain_hub_error(locking if isinstance(locking, OSError) else error)
        raise ModelError(f"{name} could not be fetched from the Hugging Face hub: {reason}", fix=fix) from None


def _models(files: Sequence[File]) -> tuple[HubModel, ...]:
    """Puts the parts of split models together, and leaves out what is no language model."""
    parts: dict[str, list[File]] = {}
    for file in sorted(files):
        split = SPLIT.match(file[0])
        if not BESIDE.search(file[0].rpartition("/")[2].lower()):
            parts.setdefault(file[0] if split is None else f"{split[1]}-of-{split[3]}", []).append(file)
    models = []
    for each in parts.values():
        names, sizes, hashes = zip(*each, strict=True)
        models.append(HubModel(_type_in(names[0]), names, sizes, hashes))
    return tuple(sorted(models, key=lambda model: (model.size, model.files)))


def _type_in(file: str) -> str | None:
    """The quantization in the name of a file, or in that of its folder.

    >>> [_type_in(name) for name in ("a-8B-Q4_K_M.gguf", "UD-Q2_K_XL/a-00001-of-00002.gguf", "a.f16.gguf", "a.gguf")]
    ['Q4_K_M', 'UD-Q2_K_XL', 'f16', None]
    """
    types = TYPE.findall(file.removesuffix(SUFFIX))
    return types[-1] if types else None
