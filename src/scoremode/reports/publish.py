"""Comparisons as one file per candidate: records, and the hub's evaluation results (.eval_results/NAME.yaml).

A record is everything in JSON, unrounded and rounded. Both have a seal, and say what they are about: see
core/verbs/outputs.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any

from scoremode.core.disk.manifests import digest_of, is_sealed, sealed, sealed_text
from scoremode.core.reading import LARGEST
from scoremode.core.statistics.comparison import BY_NAME, Comparison
from scoremode.core.store.run import Run
from scoremode.core.strict_json import parse
from scoremode.core.verbs.outputs import About, FileKind
from scoremode.errors import InputError, RunError, harmless, readable
from scoremode.reports.model_card import fill_card, public_commands
from scoremode.reports.numbers import statistics_for_people
from scoremode.reports.public_text import is_public_name, public_name, public_words
from scoremode.reports.served import served, served_manifest
from scoremode.reports.text import method_words, model_notes
from scoremode.reports.verdicts import verdicts
from scoremode.version import __version__

DATASET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
EVAL_METRICS = ("ppl_candidate", "ppl_ratio", "kl_mean", "same_top")
RECORD = 1  # the version of the schema of records
NOT_COMPARED = {"against", "device", "dtype", "instance", "keeps", "threads"}
"""Settings of a run's identity that records do not repeat, or that two machines may differ in, as in versions."""
SAME_IN = (
    *("name", "model_sha256", "engine", "dtype", "kv_cache", "settings"),
    *("baseline", "baseline_sha256", "baseline_served", "baseline_dtype", "baseline_settings"),
    *("corpus_sha256", "method", "method_settings", "plan_digest", "vocabulary"),
)
"""Fields that are equal in all records of one candidate and one question."""


def about_record(record: Mapping[str, Any]) -> str:
    """A digest of the candidate and the question."""
    return digest_of({name: record.get(name) for name in SAME_IN})


def _about(file: IO[bytes]) -> About | None:
    try:
        record = parse(file.read(LARGEST + 1))
    except ValueError:
        return None
    is_ours = isinstance(record, dict) and record.get("record") == RECORD and is_sealed(record)
    return frozenset({about_record(record)}) if is_ours and record.keys() >= set(SAME_IN) else None


RECORD_FILE = FileKind("a record of scoremode", _about)


def record_files(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """The text of each candidate's record, by the name of its file."""
    records = comparison_records(comparisons)
    texts = [json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    return _files("{}.json", comparisons, texts, list(map(about_record, records)))


def evaluation_files(
    comparisons: Sequence[Comparison], benchmark: str | None, task_id: str | None, metric: str | None
) -> dict[str, str]:
    """The hub's evaluation results of each candidate, by the names of their files in a repository."""
    name = metric or "ppl_candidate"
    if not benchmark or not task_id or not DATASET.fullmatch(benchmark):
        raise InputError(
            "the hub lists evaluation results only below a dataset that is registered as a benchmark",
            fix="name it and its task: --benchmark org/dataset --task-id ID; --dialect model-index needs neither",
        )
    if name not in EVAL_METRICS:
        raise InputError(f"'{harmless(name)}' cannot be published", fix=f"use one of {', '.join(EVAL_METRICS)}")
    about = [digest_of([about_record(record), benchmark, task_id, name]) for record in comparison_records(comparisons)]
    texts = [_evaluation(c, benchmark, task_id, name) for c in comparisons]
    sealed_texts = [sealed_text(text, [digest], ("# ", "")) for text, digest in zip(texts, about, strict=True)]
    return _files(".eval_results/{}.yaml", comparisons, sealed_texts, about)


def _evaluation(c: Comparison, benchmark: str, task_id: str, metric: str) -> str:
    """An entry of the hub's evaluation results: dataset, task and value are required, date and notes are not."""
    m, s = c.baseline.manifest, c.statistics()
    if (value := s.get(metric)) is None:
        raise RunError(f"{c.name} has no {metric}", fix="publish another --metric, or use a longer text")
    about = f"{metric} {statistics_for_people(s, [s])[metric]}, {BY_NAME[metric].about}"
    text = f"{public_name(str(m['corpus']))}, sha256 {m['corpus_sha256'][:12]}"
    notes = f"{about}; baseline {public_name(str(m['model']))}; {method_words(m)} on {text}; scoremode {__version__}"
    date = str(c.candidate.manifest.get("finished") or c.candidate.manifest.get("created") or "")[:10]
    fields = {"dataset": benchmark, "task": task_id, "value": value, "notes": notes}
    return fill_card("eval_results.yaml", **fields, date=date if re.fullmatch(r"\d{4}-\d\d-\d\d", date) else "")


def _files(form: str, comparisons: Sequence[Comparison], texts: Sequence[str], about: Sequence[str]) -> dict[str, str]:
    stems = file_stems(c.name for c in comparisons)
    count = Counter(stems)
    stems = [stem if count[stem] == 1 else f"{stem}-{digest[:8]}" for stem, digest in zip(stems, about, strict=True)]
    return {form.format(stem): text for stem, text in zip(stems, texts, strict=True)}


def file_stems(names: Iterable[str]) -> list[str]:
    """The names of candidates' files, without an ending; two may be equal."""
    plain = [re.sub(r"[^\w.-]+", "_", public_name(name)).lstrip(".") for name in names]
    return [name.encode()[:200].decode(errors="ignore") or "candidate" for name in plain]


def comparison_records(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The record of each candidate: numbers unrounded and rounded for people, and what makes them reproducible.

    docs/records.md has its schema; ``RECORD`` is the version. A seal shows whether it was changed since.
    """
    records = []
    for c, verdict in zip(comparisons, verdicts(comparisons), strict=True):
        m, candidate, s = c.baseline.manifest, c.candidate.manifest, c.statistics()
        told = {
            "record": RECORD,
            "scoremode": __version__,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": candidate.get("seconds"),
            "command": (public_commands([c]) or [""])[0],
            "name": public_name(c.name),
            "model_sha256": candidate.get("model_fingerprint"),
            "verdict": verdict.level,
            "direction": verdict.direction or None,
            "sentence": public_words(verdict.sentence),
            "scale": verdict.scale,
            "notes": list(map(public_words, model_notes(c.candidate))),
            "for_people": statistics_for_people(s, [s]),
            **served(c).as_json(),
            **_computed(candidate),
            "statistics": {name: value for name, value in s.items() if name != "name"},
            "kl_missing": public_words(c.manifest.get("kl_missing") or "") or None,
            "noise_floor_perturbed": c.noise_perturbed,
            "baseline": _without_folder(m),
            "baseline_sha256": m.get("model_fingerprint"),
            "baseline_served": served_manifest(m).as_json(),
            **{f"baseline_{name}": value for name, value in _computed(m).items()},
            "baseline_notes": list(map(public_words, model_notes(c.baseline))),
            "corpus": public_name(str(m["corpus"])),
            "corpus_sha256": m["corpus_sha256"],
            "method": m["method"],
            "method_settings": dict(m.get("method_settings", {})),
            "plan_digest": c.baseline.plan_digest,
            "vocabulary": m.get("tokenizer"),
            "stderr_groups": m.get("stderr_groups"),
        }
        records.append(sealed(json.loads(readable(json.dumps(told, ensure_ascii=False, allow_nan=False)))))
    return records


def _computed(m: Mapping[str, Any]) -> dict[str, Any]:
    """How an engine computed: its dtype, device, versions, and the settings that may change a score."""
    chosen = m.get("identity", {}).get("settings", {})
    versions = dict(m.get("versions", {}))
    settings = {
        name: value if isinstance(value, bool | int | float) else public_words(str(value))
        for name, value in (chosen | {"head": m.get("head")}).items()
        if name not in NOT_COMPARED and value not in (None, "", *versions.values())
    }
    facts = {name: m.get(name) or None for name in ("dtype", "device")}
    return {**facts, "settings": settings, "versions": versions}


def about_run(run: Run) -> list[object]:
    """What a run is about: its model, its question, and the settings that may change a score."""
    m = run.manifest
    return [m.get("model_fingerprint") or m.get("model"), run.plan_digest, m.get("engine"), _computed(m)["settings"]]


def _without_folder(manifest: Mapping[str, Any]) -> str:
    """The name of a model. One without a revision is not from the hub, so what stands before a / is a folder."""
    name = public_name(str(manifest["model"]))
    is_elsewhere = manifest.get("model_revision") or "://" in name or is_public_name(name)
    return name if is_elsewhere else name.rpartition("/")[2]
