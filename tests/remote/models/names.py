"""Names of GGUF models, good and bad, each with what is expected: the test reads them.

``NAMES`` has for each name the end of the path that it stands for, or, after ``!``, words of its refusal.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from scoremode.core.models.gguf import find_files
from scoremode.errors import ScoremodeError
from scoremode.remote.models.ollama import WEIGHTS, manifest_of
from tests.hub import LARGE, Hub, Repo

TINY = (
    *("tiny-IQ2_XXS.gguf", "tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny-Q8_0.gguf", "tiny-BF16.gguf", "tiny.f16.gguf"),
    *("tiny-MXFP4_MOE.gguf", "tiny-TQ1_0.gguf", "mmproj-tiny-F16.gguf", "README.md", "imatrix.dat"),
    *("UD-Q2_K_XL/tiny-UD-Q2_K_XL-00001-of-00002.gguf", "UD-Q2_K_XL/tiny-UD-Q2_K_XL-00002-of-00002.gguf"),
)
REPOS = {
    "org/tiny-GGUF": TINY,
    "org/twice": ("a-F16.gguf", "b-F16.gguf"),
    "org/plain": ("model.gguf",),
    "org/folders": ("Q4_K_M/m.gguf", "Q8_0/m.gguf", "more/deep/m-Q5_0.gguf"),
    "org/empty": ("config.json",),
    "org/images": ("mmproj-F16.gguf",),
    "A.b_c-1/Qwen2.5-0.5B_x": ("Qwen2.5-0.5B-Q4_0.gguf",),
    "me/secret": ("s-Q4_0.gguf",),
}
OLLAMA = ("llama3.2:3b", "qwen:latest", "me/mine:q4", "hf.co/org/repo:Q4_K_M")
ALL = "choose one of BF16 (10 kB), IQ2_XXS (10 kB), "
REFUSED = "could not be fetched from the Hugging Face hub"

NAMES = {
    # of the hub, by type
    "org/tiny-GGUF:Q4_K_M": "tiny-Q4_K_M.gguf",
    "org/tiny-GGUF:q4_k_m": "tiny-Q4_K_M.gguf",
    "org/tiny-GGUF:Q8_0": "tiny-Q8_0.gguf",
    "org/tiny-GGUF:F16": "tiny.f16.gguf",
    "org/tiny-GGUF:MXFP4_MOE": "tiny-MXFP4_MOE.gguf",
    "org/tiny-GGUF:UD-Q2_K_XL": "tiny-UD-Q2_K_XL-00001-of-00002.gguf",
    "org/folders:Q4_K_M": "Q4_K_M/m.gguf",
    "org/folders:Q5_0": "more/deep/m-Q5_0.gguf",
    "A.b_c-1/Qwen2.5-0.5B_x:Q4_0": "Qwen2.5-0.5B-Q4_0.gguf",
    "me/secret:Q4_0": "s-Q4_0.gguf",
    "org/tiny-GGUF:Q4": f"!org/tiny-GGUF has no Q4; {ALL}",
    "org/tiny-GGUF:Q2_K_XL": f"!has no Q2_K_XL; {ALL}",
    "org/tiny-GGUF:Q4_K_M.gguf": f"!has no Q4_K_M.gguf; {ALL}",
    "org/twice:F16": "!has 2 models of the type F16; choose one of org/twice/a-F16.gguf (10 kB), org/twice/b-F16.gguf",
    "org/twice:Q4_0": "!has no Q4_0; choose one of a-F16.gguf (10 kB), b-F16.gguf (10 kB)",
    "org/plain:Q4_0": "!has no Q4_0; choose one of model.gguf (10 kB)",
    "org/empty:Q4_0": "!has no Q4_0; give a repository with GGUF files",
    "org/nothing:Q4_0": f"!org/nothing {REFUSED}: there is no repository of that name",
    "-a/b:Q4_0": f"!{REFUSED}: this is not a valid name on the hub",
    # of the hub, by file
    "org/tiny-GGUF/tiny-Q4_K_M.gguf": "tiny-Q4_K_M.gguf",
    "org/tiny-GGUF/tiny.f16.gguf": "tiny.f16.gguf",
    "org/tiny-GGUF/UD-Q2_K_XL/tiny-UD-Q2_K_XL-00001-of-00002.gguf": "tiny-UD-Q2_K_XL-00001-of-00002.gguf",
    "org/folders/more/deep/m-Q5_0.gguf": "more/deep/m-Q5_0.gguf",
    "org/twice/b-F16.gguf": "b-F16.gguf",
    "org/tiny-GGUF/tiny-Q9.gguf": f"!has no tiny-Q9.gguf; {ALL}",
    "org/tiny-GGUF/TINY-Q4_K_M.gguf": f"!has no TINY-Q4_K_M.gguf; {ALL}",
    "org/tiny-GGUF/mmproj-tiny-F16.gguf": f"!has no mmproj-tiny-F16.gguf; {ALL}",
    "org/nothing/model.gguf": f"!{REFUSED}: there is no repository of that name",
    # of Ollama
    "ollama:llama3.2:3b": "blobs/sha256-",
    "ollama:qwen": "blobs/sha256-",
    "ollama:me/mine:q4": "blobs/sha256-",
    "ollama:hf.co/org/repo:Q4_K_M": "blobs/sha256-",
    "ollama:llama3.2": "!has no llama3.2; ollama pull it, or choose one of: ollama:changed:1b (10 kB), ollama:gone:1b",
    "ollama:llama3.2:70b": "!Ollama has no llama3.2:70b",
    "ollama:": "!is not a name of Ollama; give a name such as ollama:llama3.2:3b",
    "ollama:../../secret": "!is not a name of Ollama",
    "ollama:gone:1b": "!names a file that is not there",
    "ollama:changed:1b": "!does not have the hash in its name; ollama pull it again",
    # of this machine
    "here/one-Q4_0.gguf": "here/one-Q4_0.gguf",
    "here": "here/one-Q4_0.gguf",
    "./here/one-Q4_0.gguf": "here/one-Q4_0.gguf",
    "two": "!the folder two has 2 models (a.gguf, b.gguf); name one: two/a.gguf",
    "here/missing.gguf": "!there is no file 'here/missing.gguf'; check the path",
    "missing.gguf": "!there is no file 'missing.gguf'; check the path",
    "split/a-00001-of-00002.gguf": "!is a part of a model, and a-00002-of-00002.gguf is missing",
}


def furnish(hub: Hub, folder: Path) -> None:
    """Fills a hub, Ollama's folder ``ollama`` and the current folder with what the names are about."""
    for repo, files in REPOS.items():
        made = {name: name.encode().ljust(LARGE, b".") for name in files}
        hub.repos[f"models/{repo}"] = Repo(private=repo == "me/secret", files=made)
    for name in (*OLLAMA, "gone:1b", "changed:1b"):
        content = name.encode().ljust(LARGE, b".")
        digest = hashlib.sha256(content).hexdigest()
        _write(folder / "ollama/blobs" / f"sha256-{digest}", content)
        layer = {"mediaType": WEIGHTS, "digest": f"sha256:{digest}", "size": LARGE}
        _write(folder / "ollama/manifests" / manifest_of(name), json.dumps({"layers": [layer]}).encode())
        if name == "gone:1b":
            (folder / "ollama/blobs" / f"sha256-{digest}").unlink()
        if name == "changed:1b":
            _write(folder / "ollama/blobs" / f"sha256-{digest}", b"else")
    for name in ("here/one-Q4_0.gguf", "two/a.gguf", "two/b.gguf", "split/a-00001-of-00002.gguf"):
        _write(folder / name, b"GGUF")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def answer(name: str) -> str:
    """The path of a model's first file, or ``!`` and the line that refuses the name."""
    try:
        return str(find_files(name)[0])
    except ScoremodeError as error:
        return f"!{error}"


def is_expected(name: str, answered: str) -> bool:
    expected = NAMES[name]
    if expected.startswith("!"):
        return answered.startswith("!") and expected[1:] in answered
    return answered.endswith(expected) or (expected.endswith("-") and expected in answered and answered[0] != "!")
