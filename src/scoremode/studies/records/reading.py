"""Reads records, puts together those that are comparable by proof, says why others are apart, and shows them.

Two records are comparable if they have the same plan (so the same ids of the same text), the same baseline by its
fingerprint, served with the same settings, and the same vocabulary. Nothing is ordered across groups. Records may come
from anybody: what does not fit the form is refused in one line.

Records of mlx-kld (github.com/asher/mlx-kld, schema 1) have neither a seal nor fingerprints, and groups of their own.
"""

from __future__ import annotations

import ntpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from scoremode.core.disk.manifests import Count, Sha256, is_sealed, unusable_field
from scoremode.core.statistics.comparison import BY_NAME
from scoremode.core.strict_json import read_object
from scoremode.errors import InputError, harmless, readable, shortened
from scoremode.reports.comparisons import size_and_bits
from scoremode.reports.numbers import shown_statistic
from scoremode.reports.public_text import HUB_NAME
from scoremode.reports.publish import RECORD, about_record
from scoremode.reports.served import ServedModel, pairs, served_manifest
from scoremode.reports.table import NOTHING, Block, Cell, Column, Note, Row, Table, words
from scoremode.reports.text import counted, method_words
from scoremode.values import usable

FIX = "give records as scoremode compare --records DIR writes them"
OF_BASELINE = "baseline's "
SHOWN = ("kl_mean", "ppl_ratio", "same_top")
LARGEST = 4 << 20  # bytes of a record
COMPARED = 32  # groups that a later one is compared with
MOST_SHOWN = 50  # groups in a terminal
CHANGED = "changed after they were written: their seals do not fit, so they are neither compared nor drawn"

Name = Annotated[str, Meta(min_length=1, max_length=1000)]  # a terminal lays out much longer cells for minutes
Line = Annotated[str, Meta(max_length=100_000)]  # not in a cell
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]  # a share is shown times 100
Bits = Annotated[float, Meta(ge=1e-3, le=1024)]
Word = Annotated[str, Meta(max_length=1000)]
Settings = Annotated[dict[Name, bool | int | Number | Word | None], Meta(max_length=100)]
Versions = Annotated[dict[Name, Word], Meta(max_length=100)]
Statistics = Annotated[dict[Name, bool | int | Number | None], Meta(max_length=1000)]


class Served(msgspec.Struct):
    """A model as it was served."""

    engine: Name | None
    kv_cache: Name | None = None


class RecordForm(msgspec.Struct):
    """The fields of a record that are used; the others must be printable JSON."""

    scoremode: Name
    written: Name
    name: Name
    model_sha256: Name | None
    baseline: Name
    baseline_sha256: Name
    baseline_served: Served
    baseline_dtype: Name | None
    baseline_device: Name | None
    baseline_settings: Settings
    baseline_versions: Versions
    corpus: Line
    corpus_sha256: Sha256
    method: Name
    method_settings: Settings
    plan_digest: Sha256
    vocabulary: Name
    dtype: Name | None
    device: Name | None
    settings: Settings
    versions: Versions
    format: Name | None
    engine: Name | None
    bits_per_weight: Bits | None
    weight_bytes: Count | None
    emulated_bytes: Count | None
    command: Line
    sentence: Line
    kl_missing: Line | None
    notes: list[Line]
    statistics: Statistics
    tool: Name = "scoremode"  # that measured it
    limits: Line = ""  # what the tool cannot see

    @property
    def by(self) -> str:
        return f"{self.tool} {self.scoremode}"


class Record(NamedTuple):
    """A record as tables and charts need it."""

    file: str  # as the user named it, in UTF-8
    its: RecordForm
    served: ServedModel
    must_agree: Mapping[str, str]  # what must be equal for two records to be comparable, by what it is
    changed: bool  # after it was written
    path: str  # the same file, whose name may not be UTF-8
    about: object  # the candidate and the question

    @property
    def line(self) -> str:
        """How it was served: the format of its file, the engine, and the dtype that was computed in."""
        return ", ".join(filter(None, [self.served.line, self.its.dtype and f"dtype {self.its.dtype}"]))

    @property
    def baseline_versions(self) -> Mapping[str, str]:
        return {**self.its.baseline_versions, "device": self.its.baseline_device or "unknown"}


def read(files: Sequence[str]) -> list[Record]:
    """Reads records. InputError names the first that is not one."""
    return [_read(file) for file in files]


def _read(file: str) -> Record:
    try:
        fields = read_object(Path(file), constants=True, most=LARGEST)
    except ValueError as error:
        raise InputError(f"{file} is not a record ({harmless(str(error))})", fix=FIX) from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})", fix=FIX) from None
    if "schema_version" in fields and "teacher" in fields:
        return _of_mlx_kld(file, fields)
    if fields.get("record") != RECORD:
        fix = FIX if fields.get("record") is None else "give records of this version's, or install a newer scoremode"
        raise InputError(f"{file} is not a record of version {RECORD}", fix=fix)
    if wrong := unusable_field(fields, RecordForm):
        raise InputError(f"{file} is not a record (no usable {harmless(wrong)})", fix=FIX)
    return _record(file, msgspec.convert(fields, RecordForm), changed=not is_sealed(fields), about=about_record(fields))


def _record(file: str, form: RecordForm, *, changed: bool, about: object) -> Record:
    by = form.baseline_served
    how = {"engine": by.engine, "dtype": form.baseline_dtype, "K/V cache": by.kv_cache, **form.baseline_settings}
    must_agree = {
        "tool": form.tool,
        "text": form.corpus_sha256,
        "plan": form.plan_digest,
        "baseline": form.baseline_sha256,
        "vocabulary": form.vocabulary,
        **{f"{OF_BASELINE}{name}": str(value) for name, value in how.items() if value is not None},
    }
    served = served_manifest({**msgspec.structs.asdict(form), "model_format": form.format})
    return Record(readable(file), form, served, must_agree, changed, file, about)


# ── mlx-kld ──────────────────────────────────────────────────────────────────────────────────────────────────────────
SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([^/\\]+)$")  # in the cache of the hub's client


class MlxKldTeacher(msgspec.Struct):
    path: Name
    precision: Name
    tokenizer_hash: Name
    revision: Name | None = None


class MlxKldStudent(msgspec.Struct):
    path: Name
    format: Name
    size_bytes: Count | None = None
    effective_bpw: Bits | None = None


class MlxKldText(msgspec.Struct):
    corpus: Name
    num_samples: Count
    max_seq_len: Count
    seed: int
    top_k: Count
    score_window: list[Count] | None = None
    corpus_tokens_hash: Name | None = None


class MlxKldForm(msgspec.Struct):
    """The fields of mlx-kld's schema 1 that are used."""

    teacher: MlxKldTeacher
    student: MlxKldStudent
    calibration: MlxKldText
    kld: Statistics
    agreement: Statistics
    tokens_scored: Count
    scorer_version: Name


def _of_mlx_kld(file: str, fields: dict[str, Any]) -> Record:
    fields.pop("kld_histogram", None)  # its last edge may be Infinity, and it is not used
    wrong = "schema_version" if fields["schema_version"] != 1 else unusable_field(fields, MlxKldForm)
    if wrong:
        raise InputError(f"{file} is not a record of mlx-kld's schema 1 (no usable {harmless(wrong)})", fix=FIX)
    form = msgspec.convert(fields, MlxKldForm)
    c, floor = form.calibration, usable(form.kld.get("floor_mean"))
    limit, window = "not said" if floor is None else f"{floor:.2g} nats", c.score_window or "not said"
    recipe = f"{c.num_samples} sequences of {c.max_seq_len} tokens, seed {c.seed}, window {window}"
    (teacher, commit), tool, _, version = _named(form.teacher.path), *form.scorer_version.partition(" ")
    made = RecordForm(
        tool=tool,
        scoremode=version,
        written="",
        name=_named(form.student.path)[0],
        model_sha256=None,
        baseline=teacher,
        baseline_sha256=teacher,
        baseline_served=Served("mlx"),
        baseline_dtype=form.teacher.precision,
        baseline_device=None,
        baseline_settings={"revision": form.teacher.revision or commit},
        baseline_versions={},
        corpus=c.corpus,
        corpus_sha256=c.corpus_tokens_hash or f"{c.corpus}, no hash",
        method=recipe,
        method_settings={},
        plan_digest=f"{recipe}, top {c.top_k}",
        vocabulary=form.teacher.tokenizer_hash,
        dtype=None,
        device=None,
        settings={},
        versions={},
        format=form.student.format,
        engine=None,
        bits_per_weight=form.student.effective_bpw,
        weight_bytes=form.student.size_bytes,
        emulated_bytes=None,
        command="",
        sentence=f"the floor of its KL: {limit}",
        kl_missing=None,
        notes=[],
        statistics={
            "kl_mean": form.kld.get("mean"),
            "kl_mean_stderr": form.kld.get("se"),
            "same_top": form.agreement.get("top1"),
            "targets": form.tokens_scored,
        },
        limits=f"measured by mlx-kld: KL over the {c.top_k:,} likeliest ids of the baseline and an even rest, whose "
        f"floor ({limit}) hides smaller differences; baselines are equal by name, not by proof, and nothing is sealed",
    )
    return _record(file, made, changed=False, about=[tool, form.student.path, teacher, recipe])


def _named(path: str) -> tuple[str, str]:
    """The name of a model of mlx-kld, and the commit if its path says it; of a name on the hub, with its organization.

    >>> _named("/x/models--org--name/snapshots/abc/"), _named("org/name"), _named("/models/name/")
    (('org/name', 'abc'), ('org/name', ''), ('name', ''))
    """
    path = path.rstrip("/\\") or path
    if match := SNAPSHOT.search(path):
        return "/".join(match[1].split("--", 1)), match[2]
    return (path if HUB_NAME.fullmatch(path) else ntpath.basename(path)), ""


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Group(NamedTuple):
    """Records that are comparable with each other, the smallest KL first."""

    records: Sequence[Record]
    apart: str = ""  # why they are not in an earlier group

    @property
    def title(self) -> str:
        form = self.records[0].its
        by = " ".join(filter(None, (form.baseline_served.engine, form.baseline_dtype)))
        how = method_words({"method": form.method, "method_settings": form.method_settings}, brief=True)
        return f"{form.baseline} ({by}) on {shortened(form.corpus, 200)}, {how}"


class Grouped(NamedTuple):
    groups: Sequence[Group]
    changed: Sequence[Record]  # by hand


def grouped(records: Sequence[Record]) -> Grouped:
    """Groups records by what must agree; the group with the most records comes first."""
    together: dict[frozenset[tuple[str, str]], list[Record]] = {}
    for record in (record for record in records if not record.changed):
        together.setdefault(frozenset(record.must_agree.items()), []).append(record)
    groups, first = list[Group](), list[Record]()
    for members in sorted(together.values(), key=lambda members: -len(members)):
        members.sort(key=_by_kl)
        groups.append(Group(members, _why_apart(members[0], first)))
        first += members[:1] if len(first) < COMPARED else []
    return Grouped(groups, [record for record in records if record.changed])


def _by_kl(record: Record) -> tuple[bool, float]:
    kl = usable(record.its.statistics.get("kl_mean"))
    return kl is None, kl or 0.0


def _why_apart(record: Record, earlier: Sequence[Record]) -> str:
    """In what a record differs from the earlier group that it has most in common with; '' for the first group.

    ``earlier`` are the first records of the largest groups.
    """
    mine = record.must_agree
    differences = [
        (number, [name for name in {**other.must_agree, **mine} if mine.get(name) != other.must_agree.get(name)])
        for number, other in enumerate(earlier, start=1)
    ]
    if not differences:
        return ""
    number, differs = min(differences, key=lambda pair: len(pair[1]))
    differs = ["tool"] if "tool" in differs else differs  # which measures in another way, whatever else is equal
    if "text" in differs:  # a plan holds the ids of its text
        differs = [name for name in differs if name != "plan"]
    if (engine := f"{OF_BASELINE}engine") in differs:  # another engine has other settings
        differs = [name for name in differs if name == engine or not name.startswith(OF_BASELINE)]
    other = earlier[number - 1].must_agree
    reasons = [
        f"{name} ({mine.get(name, 'none')}, not {other.get(name, 'none')})" if name.startswith(OF_BASELINE) else name
        for name in differs
    ]
    return f"not comparable with group {number}: another {', another '.join(reasons)}"


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────
def distinct_names(records: Sequence[Record]) -> list[str]:
    """The names of records, with the file where two have one name."""
    names = Counter(r.its.name for r in records)
    return [f"{r.its.name} ({r.file})" if names[r.its.name] > 1 else r.its.name for r in records]


def details(form: RecordForm) -> dict[str, str]:
    """What the page says of a record behind a click."""
    fields = {
        "result": form.sentence,
        "command": form.command,
        "model sha256": form.model_sha256 or "",
        "dtype": form.dtype or "",
        "device": form.device or "",
        "settings": pairs(form.settings),
        "versions": pairs(form.versions),
        "notes": "; ".join(form.notes),
        "written": form.written,
        "measured by": form.by,
    }
    return {name: value for name, value in fields.items() if value}


def group_table(group: Group, links: Sequence[str] = ()) -> Table:
    """The records of a group, one row each; ``links`` lead to their files."""
    records, names = group.records, distinct_names(group.records)
    abouts = [(record.line or "how it was served", details(record.its)) for record in records]
    rows = [Row(names[i], link=links[i] if links else "", details=abouts[i]) for i in range(len(records))]
    columns = [
        words("format", [record.line or NOTHING for record in records], page="", leaves=1),
        Column("bits", [size_and_bits(record.served) for record in records], page="Bits/weight, size"),
    ]
    for statistic in (BY_NAME[name] for name in SHOWN):
        cells = [Cell(*shown_statistic(statistic, record.its.statistics)) for record in records]
        if any(usable(record.its.statistics.get(statistic.name)) is not None for record in records):
            title = statistic.column.title if statistic.column else statistic.label
            columns.append(Column(title, cells, page=statistic.label, about=statistic.about))
    return Table(rows, [*columns, words("record", [record.file for record in records], page="", leaves=2)])


def group_notes(group: Group) -> list[Note]:
    """What to know of a group: by what it was measured, and on how much."""
    records = group.records
    targets = sorted({int(usable(record.its.statistics.get("targets")) or 0) for record in records})
    tools = sorted({record.its.by for record in records})
    made_by = f"{counted(len(records), 'records')} by {', '.join(tools)}"
    if targets != [0]:
        made_by += f", {' or '.join(f'{count:,}' for count in targets)} targets"
    versions = {
        name: sorted({str(r.baseline_versions.get(name)) for r in records}) for name in records[0].baseline_versions
    }
    differ = [f"{name} {', '.join(values)}" for name, values in sorted(versions.items()) if len(values) > 1]
    caution = [f"the baseline was served with different versions or devices: {'; '.join(differ)}"] if differ else []
    return [Note(line) for line in (made_by, *caution, records[0].its.limits) if line]


def blocks(listing: Grouped) -> list[Block]:
    """The groups for a terminal."""
    shown = list[Block]()
    for number, group in enumerate(listing.groups[:MOST_SHOWN], start=1):
        shown += [*([""] if shown else []), Note(f"group {number}: {group.title}", "bold"), group_table(group)]
        shown += [Note(group.apart, "yellow")] if group.apart else []
        shown += [Note(note.text, "dim") for note in group_notes(group)]
    if len(listing.groups) > MOST_SHOWN:
        shown += ["", Note(f"{len(listing.groups) - MOST_SHOWN:,} smaller groups are only in a page (-o) or in --json")]
    if listing.changed:
        names = ", ".join(f"{record.file} ({record.its.name})" for record in listing.changed)
        shown += ["", Note(f"{names}: {CHANGED}", "red")]
    return shown


def facts(listing: Grouped) -> dict[str, Any]:
    """The groups for machines."""
    return {
        "groups": [
            {
                "baseline": group.records[0].its.baseline,
                "corpus": group.records[0].its.corpus,
                "apart": group.apart or None,
                "must_agree": dict(group.records[0].must_agree),
                "records": [
                    {
                        "file": record.file,
                        "name": record.its.name,
                        "by": record.its.by,
                        "statistics": record.its.statistics,
                    }
                    for record in group.records
                ],
            }
            for group in listing.groups
        ],
        "changed": [record.file for record in listing.changed],
    }
