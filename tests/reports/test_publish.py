"""The dialects that people publish: each holds the numbers of the table, and none a path of a machine."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import yaml

from scoremode.core.statistics.comparison import Comparison
from scoremode.errors import InputError
from scoremode.reports.model_card import readme_parts
from scoremode.reports.public_text import public_command, public_name, public_words
from scoremode.reports.publish import evaluation_files, record_files
from scoremode.reports.served import served_manifest
from tests.core.statistics.test_comparison import random_comparison

PRIVATE = ("/home/", "me/secret", "bucket", "10.0.0.7", "s3:", "C:\\", "~")


def private_comparisons() -> list[Comparison]:
    """Two candidates whose manifests name folders, buckets and hosts wherever they can."""
    found = []
    for seed, name in enumerate(("q4", "q8")):
        command = f"scoremode compare /home/me/secret/base ~/secret/{name} --corpus s3://bucket/text --out /home/x"
        c = random_comparison(
            30,
            seed=0,
            name=name,
            noise_kl=[1e-9, 2e-9],
            model="/home/me/secret/base",
            corpus="/home/me/secret/notes.txt",
            manifest={"command": command, "bits_per_weight": 4.5 + seed},
        )
        notes = ["read from /home/me/secret/tokenizer.json", "served by http://10.0.0.7:8000/v1"]
        manifest = {**c.baseline.manifest, "model_notes": notes, "corpus_sha256": "ab" * 32}
        found.append(replace(c, baseline=replace(c.baseline, manifest=manifest, path="/home/me/secret/runs/base")))
    return found


def written(dialect: str, comparisons: list[Comparison]) -> dict[str, str]:
    if dialect == "json":
        return record_files(comparisons)
    if dialect == "eval-results":
        return evaluation_files(comparisons, "org/texts", "ppl", None)
    return {"README.md": readme_parts()[dialect](comparisons)}


@pytest.mark.parametrize("dialect", [*readme_parts(), "json", "eval-results"])
def test_no_dialect_contains_a_path_of_a_machine(dialect: str) -> None:
    for name, text in written(dialect, private_comparisons()).items():
        assert [part for part in PRIVATE if part in name + text] == []
        assert "q4" in name + text or "q8" in name + text


def test_a_name_on_the_hub_stays_and_a_folder_goes() -> None:
    assert public_name("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"
    assert public_name("C:\\models\\q4.gguf") == "q4.gguf"
    assert public_name("quants/q4.gguf") == "q4.gguf"
    for name in ("org/tiny:Q8_0", "org/tiny:*", "ollama:alice/mine:q4", "org/repo/file.gguf"):
        assert public_name(name) == name
        assert public_command(f"scoremode compare {name}") == f"scoremode compare {shlex.quote(name)}"
    assert public_words("KL and/or p, see ../x/y.txt") == "KL and/or p, see y.txt"
    assert public_command("scoremode compare a 'b") == "", "a quote that is not closed"
    assert (
        public_command("scoremode ppl m --engine=http://h:1/v1 --report x.html")
        == "scoremode ppl m --engine=http://HOST"
    )


@pytest.mark.parametrize(
    ("given", "public"),
    [
        ("s3://bucket/runs/q4?endpoint_override=http://minio.alice.local:9000", "q4"),
        ("s3://b/x.jsonl?access_key=AKIA&secret_key=S,S;S", "x.jsonl"),
        ("hf://alice:hf_secret@datasets/org/name/x", "hf://datasets/org/name/x"),
        ("hf://datasets/org/name@main/x", "hf://datasets/org/name@main/x"),
        ("10.0.0.1:8000", "HOST"),
        ("minio:9000", "HOST"),
        ("read from models/alice/x, by minio.alice.local:9000", "read from x, by HOST"),
        ("read from /home/alice smith/x.", "read from x."),
        ("(s3://bucket/x?key=y), then", "(x), then"),
    ],
)
def test_what_is_private_in_a_uri_or_a_sentence_goes(given: str, public: str) -> None:
    assert public_words(given) == public if " " in given else public_name(given) == public


def test_the_hubs_evaluation_results_have_its_fields() -> None:
    comparisons = private_comparisons()
    files = written("eval-results", comparisons)
    assert list(files) == [".eval_results/q4.yaml", ".eval_results/q8.yaml"]
    (entry,) = yaml.safe_load(files[".eval_results/q4.yaml"])
    assert entry["dataset"] == {"id": "org/texts", "task_id": "ppl"}
    assert entry["value"] == pytest.approx(comparisons[0].statistics()["ppl_candidate"], rel=1e-5)
    assert "base" in entry["notes"]
    assert entry.keys() <= {"dataset", "value", "date", "notes"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((None, None, None), "registered as a benchmark"),
        (("texts", "a", None), "registered as a benchmark"),
        (("org/texts", "a", "kl_max"), "cannot be published"),
    ],
)
def test_a_benchmark_that_the_hub_would_not_know_is_refused(given: tuple[str | None, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        evaluation_files([random_comparison(10)], *given)


def test_json_has_both_kinds_of_numbers() -> None:
    comparisons = private_comparisons()
    statistics = comparisons[0].statistics()
    found = json.loads(written("json", comparisons)["q4.json"])
    assert found["statistics"]["kl_mean"] == statistics["kl_mean"]
    value, error = found["for_people"]["kl_mean"].split(" ± ")
    assert abs(float(value) - statistics["kl_mean"]) <= 10.0 ** -len(value.partition(".")[2])
    assert len(error.replace(".", "").lstrip("0")) == 2, "two digits of the error"


def test_files_of_two_names_that_become_one_have_digests() -> None:
    a, b = (random_comparison(10, name=name) for name in ("q 4", "q?4"))
    assert [name[:4] for name in record_files([a, b])] == ["q_4-", "q_4-"]
    (name,) = record_files([random_comparison(10, name="鐵" * 80)])
    assert len(name.encode()) < 220, "longer names cannot be written"


def test_an_emulated_file_has_the_size_it_would_have() -> None:
    known = {"model_format": "emulated 8-bit layers", "bits_per_weight": 13.45, "weight_bytes": 538_060_032}
    assert served_manifest({**known, "emulated_bytes": 226_000_000}).size == 226_000_000
    assert served_manifest(known).size is None, "a run of an older version does not say it"
    assert served_manifest({**known, "model_format": "safetensors float32"}).size == 538_060_032
