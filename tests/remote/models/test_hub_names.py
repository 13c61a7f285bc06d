"""Names of GGUF files on the hub: the real client against a stand-in of the hub on the loopback."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

import scoremode as sm
from scoremode.core.models.names import reader_of
from scoremode.errors import ModelError
from scoremode.remote.models import hub as hub_names
from tests.gguf_files import gguf_of, require_llamacpp
from tests.hub import LARGE, Hub, Repo
from tests.makers import make_tiny_model

ASKED: Any = {"text": "The quick brown fox jumps over the lazy dog. " * 4, "context_length": 48}
REPO = "models/org/tiny-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The GGUF files of two types of one small model."""
    require_llamacpp()
    folder = tmp_path_factory.mktemp("files")
    model = make_tiny_model(folder / "tiny", adds_bos=False)
    return {f"tiny-{type}.gguf": gguf_of(model, folder / type, type).read_bytes() for type in ("F32", "F16")}


@pytest.fixture
def repo(hub: Hub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_names.listing.cache_clear()
    made = hub.repos[REPO] = Repo(files={**files, "README.md": b"# tiny", "mmproj-tiny-F16.gguf": b"GGUF" * LARGE})
    return made


def cached(tmp_path: Path) -> list[str]:
    """Files of the hub's client that hold weights."""
    return sorted(path.name for path in (tmp_path / "hub").rglob("*.gguf"))


@pytest.mark.parametrize("name", ["org/tiny-GGUF:F32", "org/tiny-GGUF:f32", "org/tiny-GGUF/tiny-F32.gguf"])
def test_a_name_is_scored_as_its_file_is(repo: Repo, tmp_path: Path, name: str) -> None:
    (tmp_path / "local.gguf").write_bytes(repo.files["tiny-F32.gguf"])
    run, local = sm.ppl(name, **ASKED), sm.ppl(str(tmp_path / "local.gguf"), **ASKED)
    assert run.manifest["model"] == name
    assert run.perplexity == local.perplexity
    assert run.manifest["model_files"] == {"tiny-F32.gguf": hashlib.sha256(repo.files["tiny-F32.gguf"]).hexdigest()}
    assert cached(tmp_path) == ["tiny-F32.gguf"]


def test_every_quantization_is_scored_the_smallest_first_and_removed(
    repo: Repo, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.files |= {f"tiny-F64.{beside}.gguf": b"GGUF" * LARGE for beside in ("imatrix", "mmproj")}
    repo.files["tiny@1 (a), [b]-f16.gguf"] = repo.files["tiny-F16.gguf"]
    found = sm.compare("org/tiny-GGUF:f32", "org/tiny-GGUF:*", **ASKED)
    assert [one.name for one in found] == ["org/tiny-GGUF/tiny-F16.gguf", "org/tiny-GGUF/tiny@1 (a), [b]-f16.gguf"]
    assert cached(tmp_path) == ["tiny-F32.gguf"], "the baseline was named, so it stays"
    assert "fetching tiny-F16.gguf of org/tiny-GGUF" in capsys.readouterr().err
    sm.compare("org/tiny-GGUF:F32", "org/tiny-GGUF:*", **ASKED, keep=True)
    assert cached(tmp_path) == ["tiny-F16.gguf", "tiny-F32.gguf", "tiny@1 (a), [b]-f16.gguf"]


def test_a_file_with_another_hash_is_refused_and_fetched_again(
    repo: Repo, hub: Hub, tmp_path: Path, files: dict[str, bytes]
) -> None:
    model = hub_names.listing("org/tiny-GGUF").models[0]
    repo.files["tiny-F16.gguf"] = files["tiny-F16.gguf"][::-1]
    with pytest.raises(ModelError, match="does not have the hash that the hub states"):
        sm.ppl("org/tiny-GGUF:F16", **ASKED)
    assert cached(tmp_path) == []
    repo.files["tiny-F16.gguf"] = files["tiny-F16.gguf"]
    assert sm.ppl("org/tiny-GGUF:F16", **ASKED).manifest["model_files"] == {"tiny-F16.gguf": model.hashes[0]}


def test_without_a_network_the_cache_is_used(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    wanted = sm.ppl("org/tiny-GGUF:F32", **ASKED).perplexity
    (tmp_path / "hub/models--org--tiny-GGUF/snapshots/of-another-kind-of-file").mkdir()
    hashes = hub_names.listing("org/tiny-GGUF").models[-1].hashes
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_names.listing.cache_clear()
    assert sm.ppl("org/tiny-GGUF:F32", **ASKED, fresh=True).perplexity == wanted
    assert [model.hashes for model in hub_names.listing("org/tiny-GGUF").models] == [hashes], "still verified"
    with pytest.raises(ModelError, match=r"has no F16; choose one of F32"):
        sm.ppl("org/tiny-GGUF:F16", **ASKED)


def test_paths_and_other_names_are_no_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    others = ("models/quants/x.gguf", "./a/b.gguf", "/a/b/c.gguf", "table:uniform", "org/name", "a.gguf", "s3://a/b:c")
    assert [name for name in others if reader_of(name) is not None] == []
