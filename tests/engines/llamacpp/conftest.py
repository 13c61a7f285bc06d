"""A tiny Llama as GGUF files of several types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _llamacpp() -> None:
    require_llamacpp()


@pytest.fixture(scope="session")
def tiny_gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``tiny`` in float32."""
    return gguf_of(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like ``tiny``, with sizes that blocks of 32 weights divide."""
    sizes = {"hidden_size": 128, "intermediate_size": 96}
    return make_tiny_model(tmp_path_factory.mktemp("wider"), adds_bos=False, **sizes)
