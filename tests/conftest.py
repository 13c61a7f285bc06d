"""Models and texts that tests share. What lies beside the checkout is used where it is, and skipped with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.makers import make_successor_model, make_tiny_model
from tests.s3 import bucket, elsewhere, s3_server  # noqa: F401  # fixtures

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs and hashes of the tests stay out of the user's cache; the embedded model, slow to make, comes from it."""
    from scoremode.store.cache import cache_folder

    models = cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").symlink_to(models)
    before = os.environ.get("SCOREMODE_CACHE")
    os.environ["SCOREMODE_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["SCOREMODE_CACHE"]
    else:
        os.environ["SCOREMODE_CACHE"] = before


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the shared file {name} is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def stories() -> Path:
    """stories260K: a real, trained Llama of 1 MB whose tokenizer adds a BOS."""
    return _shared("stories260K")


@pytest.fixture(scope="session")
def wikitext_file() -> Path:
    return _shared("wikitext2/wiki.test.raw")


@pytest.fixture(scope="session")
def pages_file() -> Path:
    return _shared("tasks/wikitext2_test_pages.jsonl")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Llama of random weights: vocabulary 311, context 128, a tokenizer that adds no BOS."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), adds_bos=False)


@pytest.fixture(scope="session")
def tiny_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer that puts a BOS in front."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_bos"), adds_bos=True)


@pytest.fixture(scope="session")
def successor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama built by hand that always predicts the previous id + 1."""
    return make_successor_model(tmp_path_factory.mktemp("successor"))
