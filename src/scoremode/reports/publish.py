"""Comparisons in the dialects that people publish. None of them contains a folder of this machine.

dialect       what it is                                                       written by --write, --out
markdown      the table, a sentence per candidate, how to reproduce it          a part of a README
compact       a table of five columns and one line                             a part of a README
exl3          bits per weight, KL divergence, top-1 agreement, perplexity       a part of a README
model-index   the hub's metadata                                               a part of a README
eval-results  the hub's .eval_results/NAME.yaml                                one file per candidate
json          the record: everything, unrounded and rounded, with a seal       one file per candidate
of wings      the lines of another tool, such as llama.cpp's, in a code block   a part of a README
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from scoremode.core import extensions
from scoremode.core.disk.manifests import sealed
from scoremode.core.statistics.comparison import BY_NAME, Comparison
from scoremode.errors import InputError, RunError, readable
from scoremode.head.budget import FIRST
from scoremode.reports.comparisons import bits_cell, card_table
from scoremode.reports.model_card import (
    code,
    escaped_markdown,
    fill_card,
    markdown,
    markdown_table,
    model_index,
    public_commands,
)
from scoremode.reports.numbers import file_size, statistics_for_people
from scoremode.reports.public_text import is_public_name, public_name, public_words
from scoremode.reports.served import served, served_manifest
from scoremode.reports.table import NOTHING, Cell
from scoremode.reports.text import method_words, middle_cut, model_notes
from scoremode.reports.verdicts import verdicts
from scoremode.version import __version__

DATASET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
RECORD = 1  # the version of the schema of records
LONGEST_NAME, LONGEST_TEXT, LARGEST = 300, 2000, 1e300  # characters of names and of sentences, and numbers, in records
NAMES = ("name", "baseline", "corpus")  # the fields of records that may be too long for a name
NOT_COMPARED = {"against", "device", "dtype", "instance", "keeps", "threads"}
"""Settings of a run's identity that records do not repeat, or that two machines may differ in, as in versions."""
EVAL_METRICS = ("ppl_candidate", "ppl_ratio", "kl_mean", "same_top")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where the hub lists a number: a dataset that is registered as a benchmark, one of its tasks, our statistic."""

    dataset: str
    task: str
    metric: str = "ppl_candidate"

    def __post_init__(self) -> None:
        if not DATASET.fullmatch(self.dataset):
            raise InputError(f"'{self.dataset}' is not a dataset of the hub", fix="write it as in org/name")
        if self.metric not in EVAL_METRICS:
            raise InputError(f"'{self.metric}' cannot be published", fix=f"use one of {', '.join(EVAL_METRICS)}")


# ── parts of a README ────────────────────────────────────────────────────────────────────────────────────────────────
def _how(comparisons: Sequence[Comparison]) -> str:
    m, s = comparisons[0].baseline.manifest, comparisons[0].statistics()
    text = f"{public_name(str(m['corpus']))} (sha256 {m['corpus_sha256'][:12]})"
    counted = f"{s['targets']:,} tokens, ± over {s['groups']:,} {m.get('stderr_groups', 'groups')}"
    return escaped_markdown(f"{method_words(m)} on {text}, {counted}; scoremode {__version__}.")


def compact(comparisons: Sequence[Comparison]) -> str:
    """A table of five columns, and one line that says how it was made."""
    columns = {"ppl_candidate": "perplexity", "kl_mean": "KL", "same_top": "same top"}
    table = card_table(comparisons, ("size", lambda its: Cell(file_size(its.size)) if its else None), columns)
    return f"{markdown_table(table)}\n\n{_how(comparisons)}\n"


def exl3(comparisons: Sequence[Comparison]) -> str:
    """The measures of ExLlamaV3's comparisons: KL both ways, and agreement on the first 1 to 5 choices."""
    tops = {"same_top": 1, **{f"top{count}_same": count for count in range(2, FIRST + 1)}}
    columns = {
        "kl_mean": "KL divergence (original, quantized)",
        "kl_reverse_mean": "KL divergence (quantized, original)",
    }
    columns |= {name: f"top-{count} agreement" for name, count in tops.items()} | {"ppl_candidate": "perplexity"}
    table = card_table(comparisons, ("bpw", bits_cell), columns)
    table = replace(table, rows=[replace(row, tag=row.tag.replace("baseline", "original")) for row in table.rows])
    every = [c.statistics() for c in comparisons]
    is_whole = all(s["kl_reverse_mean"] is not None and s["top5_same"] is not None for s in every)
    missing = "" if is_whole else f" {NOTHING} in a row of a model: not measured, or infinite."
    return f"{markdown_table(table)}\n\n{_how(comparisons)}{missing}\n"


class ComparisonLayout(Protocol):
    """Lines as another tool prints them: a flag of ``compare``, and a dialect of ``card``.

    Wings offer such values as "comparison-layout".
    """

    name: str  # of the dialect; with -- before it, of the flag
    about: str  # what the flag does
    by: str  # whose formulas these are, in words

    def text(self, comparison: Comparison) -> str:
        """The lines for one candidate."""


def layouts() -> dict[str, ComparisonLayout]:
    return {layout.name: layout for layout in extensions.offered("comparison-layout")}


def in_code_blocks(layout: ComparisonLayout, comparisons: Sequence[Comparison]) -> str:
    """The lines of another tool for every candidate."""
    blocks = [f"{code(c.name)}\n\n```\n{layout.text(c).strip()}\n```\n" for c in comparisons]
    return "\n".join([*blocks, f"{layout.by}. {_how(comparisons)}\n"])


def metadata(comparisons: Sequence[Comparison]) -> str:
    """``model-index`` of all candidates; YAML allows the key once."""
    return "model-index:\n" + "".join(model_index(c).partition("\n")[2] for c in comparisons)


ReadmePart = Callable[[Sequence[Comparison]], str]
FILES = ("eval-results", "json")


def readme_parts() -> dict[str, ReadmePart]:
    """The dialects that are parts of a README, those of wings too."""
    own: dict[str, ReadmePart] = {"markdown": markdown, "compact": compact, "exl3": exl3, "model-index": metadata}
    return own | {name: partial(in_code_blocks, layout) for name, layout in layouts().items()}


def dialects() -> list[str]:
    return [*readme_parts(), *FILES]


# ── one file per candidate ───────────────────────────────────────────────────────────────────────────────────────────
def published_files(dialect: str, comparisons: Sequence[Comparison], benchmark: Benchmark | None) -> dict[str, str]:
    """The text of each file, by its name relative to a repository's root."""
    if dialect == "json":
        found = comparison_records(comparisons)
        texts = [json.dumps(one, indent=1, ensure_ascii=False, allow_nan=False) + "\n" for one in found]
        form = "{}.json"
    else:
        if benchmark is None:
            raise InputError(
                "the hub lists evaluation results only below a dataset that is registered as a benchmark",
                fix="name it and its task: --benchmark org/dataset --task-id ID; --dialect model-index needs neither",
            )
        texts = [_eval_results(c, benchmark) for c in comparisons]
        form = ".eval_results/{}.yaml"
    short = [re.sub(r"[^\w.-]+", "_", public_name(c.name)).lstrip(".")[:200] for c in comparisons]
    names = [form.format(name or "candidate") for name in short]
    if len(set(names)) < len(names):
        raise RunError("two candidates would be written to one file", fix="publish them one by one")
    return dict(zip(names, texts, strict=True))


def _eval_results(c: Comparison, benchmark: Benchmark) -> str:
    """An entry of the hub's evaluation results: dataset, task and value are required, date and notes are not."""
    m, s = c.baseline.manifest, c.statistics()
    if (value := s.get(benchmark.metric)) is None:
        raise RunError(f"{c.name} has no {benchmark.metric}", fix="publish another --metric, or use a longer text")
    about = f"{benchmark.metric} {statistics_for_people(s, [s])[benchmark.metric]}, {BY_NAME[benchmark.metric].about}"
    text = f"{public_name(str(m['corpus']))}, sha256 {m['corpus_sha256'][:12]}"
    notes = f"{about}; baseline {public_name(str(m['model']))}; {method_words(m)} on {text}; scoremode {__version__}"
    date = str(c.candidate.manifest.get("finished") or c.candidate.manifest.get("created") or "")[:10]
    is_date = re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    return fill_card("eval_results.yaml", its=benchmark, value=value, date=date if is_date else "", notes=notes)


def comparison_records(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The record of each candidate: numbers unrounded and rounded for people, and what makes them reproducible.

    docs/records.md has its schema; ``RECORD`` is the version. A seal shows whether it was changed since.
    """
    found = []
    for c, verdict in zip(comparisons, verdicts(comparisons), strict=True):
        m, its, s = c.baseline.manifest, c.candidate.manifest, c.statistics()
        told = {
            "record": RECORD,
            "scoremode": __version__,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": its.get("seconds"),
            "command": (public_commands([c]) or [""])[0],
            "name": public_name(c.name),
            "model_sha256": its.get("model_fingerprint"),
            "verdict": verdict.level,
            "sentence": public_words(verdict.sentence),
            "scale": verdict.scale,
            "notes": list(map(public_words, model_notes(c.candidate))),
            "for_people": statistics_for_people(s, [s]),
            **served(c).as_json(),
            **_computed(its),
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
        bounded = {
            name: _bounded(value, LONGEST_NAME if name in NAMES else LONGEST_TEXT) for name, value in told.items()
        }
        found.append(sealed(json.loads(readable(json.dumps(bounded, ensure_ascii=False, allow_nan=False)))))
    return found


def _computed(m: Mapping[str, Any]) -> dict[str, Any]:
    """How an engine computed: its dtype, device, versions, and the settings that may change a score."""
    chosen = m.get("identity", {}).get("settings", {})
    versions = dict(m.get("versions", {}))
    settings = {
        name: value if isinstance(value, bool | int | float) else public_words(str(value))[:LONGEST_NAME]
        for name, value in (chosen | {"head": m.get("head")}).items()
        if name not in NOT_COMPARED and value not in (None, "", *versions.values())
    }
    known = {name: m.get(name) or None for name in ("dtype", "device")}
    return {**known, "settings": settings, "versions": versions}


def _bounded(value: Any, longest: int) -> Any:
    """A value as a record may have it: long texts are cut, and a number that is too large to be shown is None."""
    if isinstance(value, dict):
        return {name: _bounded(inner, longest) for name, inner in value.items()}
    if isinstance(value, list):
        return [_bounded(inner, longest) for inner in value]
    if isinstance(value, float) and abs(value) > LARGEST:
        return None
    return middle_cut(value, longest) if isinstance(value, str) else value


def _without_folder(manifest: Mapping[str, Any]) -> str:
    """The name of a model. One without a revision is not from the hub, so what stands before a / is a folder."""
    name = public_name(str(manifest["model"]))
    is_elsewhere = manifest.get("model_revision") or "://" in name or is_public_name(name)
    return name if is_elsewhere else name.rpartition("/")[2]
