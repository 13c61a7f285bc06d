"""What is said of a vLLM that is running. Nothing is started here."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import scoremode as sm
from scoremode.core.store import runs
from scoremode.engines.table import TablePlugin
from scoremode.engines.vllm.self_test import unread_cache_note
from scoremode.reports.comparisons import comparison_json, summary
from scoremode.reports.html.page import render
from scoremode.reports.model_card import markdown
from scoremode.reports.publish import published_json


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


def test_the_line_is_stored_and_shown_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table takes the place of vLLM: the line is in the manifest, the table, JSON, the page and cards."""
    (line,) = unread_cache_note(config("turboquant_k8v4"))
    opened = TablePlugin.open

    def open_with_note(self: Any, subject: Any, options: Any, work: Any) -> Any:
        engine = opened(self, subject, options, work)
        if "successor" in subject.name:
            engine.facts = replace(engine.facts, notes=(line,))
        return engine

    monkeypatch.setattr(TablePlugin, "open", open_with_note)
    found = sm.compare("table:uniform", "table:successor", text="any text", out=tmp_path / "out")
    stored = runs.load(tmp_path / "out" / "table:successor").manifest
    assert line in stored["notes"]
    assert line in stored["model_notes"]
    statistics = [one.statistics() for one in found]
    words = f"andidate table:successor: {line}."
    assert words in html.unescape(render(found, statistics))
    assert words in html.unescape(markdown(found, statistics)).replace("\\", "")
    assert comparison_json(found, statistics)["candidates"][0]["notes"] == [line]
    assert published_json(found, statistics)[0]["notes"] == [line]
    table = "".join(str(part) for part in summary(found, statistics).blocks())
    assert f"table:successor: {line}" in table
