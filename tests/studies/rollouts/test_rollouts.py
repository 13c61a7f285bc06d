"""Rollouts of tables: their folder, resuming, what is refused, and rollouts as a corpus."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import scoremode as sm
from scoremode.studies.rollouts.engines.writers import TableWriter
from scoremode.studies.rollouts.prompts import read_prompts
from scoremode.studies.rollouts.texts import Rollouts

ROWS: list[Any] = ["ab", {"prompt": "xyz", "answer": "abc"}, "q", "long prompt", "é"]
DRAWN: dict[str, Any] = {"samples": 3, "temperature": 1, "max_tokens": 7}


def test_a_successor_counts_and_a_uniform_table_draws(tmp_path: Path) -> None:
    counted = sm.rollouts("table:successor", ["ab"], max_tokens=3)
    assert counted.text == ["cde"]
    assert counted.finish == ["length"]
    found = sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    assert found.logprob[0] == pytest.approx([-math.log(256)] * 7)
    assert found.prompt.tolist() == [i // 3 for i in range(15)]
    assert found.sample.tolist() == [0, 1, 2] * 5
    assert found.answer[2:7] == [None, "abc", "abc", "abc", None]
    assert repr(found) == "Rollouts(15 texts of 5 prompts, 105 tokens written)"
    cooled = sm.rollouts("table:uniform", ROWS, samples=2, temperature=0.5, top_k=300, max_tokens=2)
    assert cooled.raw_logprob[0] == pytest.approx([-math.log(256)] * 2)


def test_the_folder_is_as_it_is_documented(tmp_path: Path) -> None:
    sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["rollouts.json", "texts.parquet"]
    types = {field.name: str(field.type) for field in pq.read_schema(tmp_path / "w" / "texts.parquet")}
    assert types == {
        "prompt": "int64",
        "sample": "int64",
        "prompt_text": "string",
        "prompt_ids": "list<element: int32>",
        "ids": "list<element: int32>",
        "logprob": "list<element: double>",
        "raw_logprob": "list<element: double>",
        "finish": "string",
        "text": "string",
        "answer": "string",
    }
    manifest = json.loads((tmp_path / "w" / "rollouts.json").read_text())
    for name in ("model", "engine", "sampling", "seed", "prompts_file", "prompts_sha256", "tokenizer", "scoremode"):
        assert manifest[name] not in (None, "")
    assert manifest["notes"] == [
        "15 of 15 texts were cut at --max-tokens 7",
        "the model has no end token, so no text ends by itself",
    ]


def test_interrupted_rollouts_resume_to_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sm.rollouts("table:uniform", ROWS, **DRAWN)
    write, asked = TableWriter.write, []

    def stopping(self: TableWriter, requests: Any, done: Any, tell: Any) -> Any:
        asked.append(int((~done).sum()))
        for count, found in enumerate(write(self, requests, done, tell)):
            if count == 6:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(TableWriter, "write", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    assert not (tmp_path / "w" / "rollouts.json").exists()
    with pytest.raises(sm.ScoremodeError, match="run the scoremode rollouts command again"):
        Rollouts.open(tmp_path / "w")
    with pytest.raises(sm.ScoremodeError, match=r"differ in: seed"):
        sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", seed=1, **DRAWN)
    with (tmp_path / "w" / "partial.rollouts").open("ab") as file:
        file.write(b"scm2 cut")  # as a kill leaves it
    monkeypatch.setattr(TableWriter, "write", write)
    found = sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    assert asked == [15, 9]
    assert [ids.tolist() for ids in found.written] == [ids.tolist() for ids in whole.written]
    assert not (tmp_path / "w" / "partial.rollouts").exists()
    monkeypatch.setattr(TableWriter, "write", None)  # finished texts are read
    again = sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    assert again.text == found.text


def test_fresh_replaces_and_other_settings_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "w"
    first = sm.rollouts("table:uniform", ROWS, out=out, **DRAWN)
    for other in ({"seed": 2}, {"max_tokens": 8}, {"samples": 2}, {"temperature": 0.5}):
        with pytest.raises(sm.ScoremodeError, match="contains other rollouts"):
            sm.rollouts("table:uniform", ROWS, out=out, **DRAWN | other)
    with pytest.raises(sm.ScoremodeError, match="differ in: prompts"):
        sm.rollouts("table:uniform", ROWS[:-1], out=out, **DRAWN)
    assert Rollouts.open(out).text == first.text
    fresh = sm.rollouts("table:uniform", ROWS, out=out, seed=2, fresh=True, **DRAWN)
    assert fresh.text != first.text
    (out / "rollouts.json").unlink()
    with pytest.raises(sm.ScoremodeError, match="without its manifest"):
        sm.rollouts("table:uniform", ROWS, out=out, seed=2, **DRAWN)


def test_an_engine_that_gives_an_impossible_text_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    write = TableWriter.write
    changes: list[dict[str, Any]] = [
        {"ids": np.array([256, 1], np.int32)},
        {"raw_logprob": np.array([0.1, -1.0])},
        {"logprob": np.array([-1.0])},
        {"ids": np.array([1], np.int32), "logprob": np.zeros(1), "raw_logprob": np.zeros(1)},
    ]
    for change in changes:
        monkeypatch.setattr(
            TableWriter, "write", lambda *given, c=change: ((i, replace(w, **c)) for i, w in write(*given))
        )
        with pytest.raises(sm.ScoremodeError, match="cannot be"):
            sm.rollouts("table:uniform", ["ab"], max_tokens=2, out=tmp_path / "w")


# ── as a corpus ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_written_tokens_are_the_targets_and_prompts_the_groups(tmp_path: Path) -> None:
    found = sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    run = sm.ppl("table:uniform", corpus=f"rollouts:{tmp_path / 'w'}")
    assert run.perplexity.value == pytest.approx(256)
    assert run.facts.id.tolist() == np.concatenate(found.written).tolist()
    assert run.facts.group.tolist() == np.repeat(found.prompt, 7).tolist()
    assert (run.manifest["windows"], run.manifest["documents"]) == (15, 15)
    assert run.manifest["corpus"] == "rollouts:w"
    assert run.perplexity.groups == 5
    few = sm.ppl("table:uniform", corpus=f"rollouts:{tmp_path / 'w'}", num_samples=4)
    assert few.facts.group.tolist() == [0] * 21 + [1] * 7
    assert few.manifest["corpus_sha256"] != run.manifest["corpus_sha256"]


def test_texts_without_a_token_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scoremode.core.verbs.model import LazyModel

    monkeypatch.setattr(LazyModel, "longest_window", 9)
    found = sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    assert [len(ids) for ids in found.written][::3] == [7, 6, 7, 0, 7]
    assert found.finish[::3] == ["length", "context", "length", "context", "length"]
    run = sm.ppl("table:uniform", corpus=found)
    assert "3 of 15 texts have no written token, and so no target" in run.manifest["notes"]
    assert run.perplexity.groups == 4


def test_long_texts_may_be_scored_in_windows_that_overlap() -> None:
    found = sm.rollouts("table:uniform", ROWS, **DRAWN)
    run = sm.ppl("table:uniform", corpus=found, context_length=6)
    assert run.manifest["targets"] == found.tokens
    assert run.manifest["windows"] > 15
    with pytest.raises(sm.ScoremodeError, match="--method sliding-once"):
        sm.ppl("table:uniform", corpus=found, method="gptq")


def test_every_verb_of_a_corpus_takes_rollouts(tmp_path: Path) -> None:
    found = sm.rollouts("table:uniform", ROWS, out=tmp_path / "w", **DRAWN)
    corpus = f"rollouts:{tmp_path / 'w'}"
    assert sm.plan("table:uniform", corpus=corpus)["targets"] == found.tokens
    sm.reference("table:uniform", tmp_path / "reference", corpus=corpus)
    (compared,) = sm.compare(str(tmp_path / "reference"), "table:uniform")
    assert compared.statistics()["groups"] == 5
    assert sm.noise("table:uniform", corpus=corpus) is not None
    (paths,) = sm.paths("table:uniform", corpus=corpus)
    assert paths.statistics()["kl_mean"] == pytest.approx(0, abs=1e-9)


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_prompts_of_files(tmp_path: Path) -> None:
    plain = tmp_path / "p.txt"
    plain.write_text("one\r\n\ntwo\n")
    found = read_prompts(plain)
    assert [row.content for row in found.rows] == ["one", "two"]
    assert found.notes == ("1 blank line of p.txt left out",)
    rows = tmp_path / "p.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    rows.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n" + json.dumps({"messages": chat, "id": 5}) + "\n")
    read = read_prompts(rows).rows
    assert [(row.content, row.answer) for row in read] == [("a", "b"), (chat, None)]
    written = sm.rollouts("table:successor", rows, max_tokens=2)
    assert written.prompt_text == ["a", "user: hi\nassistant: "]
    assert written.manifest["prompts_file"] == "p.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "messages": chat}) + "\n")
    with pytest.raises(sm.ScoremodeError, match="line 1 has both"):
        read_prompts(rows)
