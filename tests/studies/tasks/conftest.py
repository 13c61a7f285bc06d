"""What tests of the harness adapter share. Everything is offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rows that the harness reads stay out of the user's cache, and nothing is asked of the hub."""
    try:
        import datasets
    except ImportError:
        yield
        return
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(params=["tiny", "tiny_bos", "stories"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Random models whose tokenizers add a BOS or not, and a trained one."""
    found: Path = request.getfixturevalue(request.param)
    return found
