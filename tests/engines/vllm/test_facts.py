"""What is said of a vLLM that is running. Nothing is started here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scoremode.engines.vllm.self_test import unread_cache_note


def config(cache: str, *, mla: bool = False, sparse: bool = False) -> Any:
    text = SimpleNamespace(index_topk=2048) if sparse else SimpleNamespace()
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache),
        model_config=SimpleNamespace(use_mla=mla, hf_text_config=text),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
    )


@pytest.mark.parametrize(
    "given",
    [
        config("turboquant_k8v4"),
        config("turboquant_3bit_nc"),
        config("ultraquant_4bit"),
        config("fp8", mla=True),
        config("nvfp4_ds_mla", mla=True),
    ],
)
def test_a_cache_that_prefill_does_not_read_gets_its_line(given: Any) -> None:
    (line,) = unread_cache_note(given)
    assert "is hardly measured" in line
    assert "up to 2048 tokens" in line
    assert given.cache_config.cache_dtype in line
    assert line.endswith("measure it with --path decode")


@pytest.mark.parametrize(
    "given",
    [
        config("auto"),
        config("fp8"),
        config("nvfp4"),
        config("int8_per_token_head"),
        config("auto", mla=True),
        config("bfloat16", mla=True),
        config("fp8_ds_mla", mla=True, sparse=True),  # its prefill reads the cache
    ],
)
def test_other_caches_get_none(given: Any) -> None:
    assert unread_cache_note(given) == []
