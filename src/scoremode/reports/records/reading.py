"""Reads records, which may come from anybody: what does not fit a form is refused in one line.

Two formats are read: scoremode's own, and schema 1 of mlx-kld (github.com/asher/mlx-kld), which has neither a seal nor
fingerprints of weights.
"""

from __future__ import annotations

import json
import ntpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from scoremode.core.disk.manifests import SEAL, Count, Sha256, is_sealed, unusable_field
from scoremode.core.statistics.comparison import BY_FIELD
from scoremode.core.strict_json import read_object
from scoremode.errors import InputError, harmless
from scoremode.reports.public_text import HUB_NAME
from scoremode.reports.publish import LONGEST_NAME, LONGEST_TEXT, RECORD
from scoremode.reports.served import ServedModel, served_manifest
from scoremode.reports.text import method_words

LARGEST = 1 << 20  # bytes of a record; ours have less than 20,000
OWN = "scoremode"
OF_BASELINE = "baseline's "
FIX = "give records as scoremode compare --records DIR writes them"

Words = Annotated[str, Meta(max_length=LONGEST_TEXT)]
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Positive = Annotated[float, Meta(ge=0, le=1e300)]
Divergent = Annotated[float, Meta(ge=-0.01, le=1e300)]  # below 0 by the rounding of a .kld file's records
Share = Annotated[float, Meta(ge=0, le=1)]
Bits = Annotated[float, Meta(ge=0.001, le=1024)]
SIGNED = ("log_", "delta_", "answer_", "ppl_difference")  # how the names of statistics begin that may be negative
SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([^/\\]+)$")  # in the cache of the hub's client
TINY = 1e-300  # what is smaller is shown as 0


class Served(msgspec.Struct):
    """A model as it was served."""

    engine: Name | None
    format: Name | None = None
    kv_cache: Name | None = None


def _type_of(field: str) -> Any:
    """What a field of the statistics can be."""
    if field == "targets":
        return Count
    if field.endswith("_stderr"):
        return Positive
    if BY_FIELD[field].range == "share":
        return Share
    return Number if field.startswith(SIGNED) else Divergent if field.startswith("kl_") else Positive


Statistics: Any = msgspec.defstruct("Statistics", [(field, _type_of(field) | None, None) for field in BY_FIELD])


class OwnForm(msgspec.Struct):
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
    baseline_settings: dict[Name, bool | int | float | Name]
    baseline_versions: dict[Name, Name]
    corpus: Words
    corpus_sha256: Sha256
    method: Name
    method_settings: dict[Name, bool | int | Name | None]
    plan_digest: Sha256
    vocabulary: Name
    stderr_groups: Name | None
    engine: Name | None
    format: Name | None
    dtype: Name | None
    device: Name | None
    settings: dict[Name, bool | int | float | Name]
    versions: dict[Name, Name]
    bits_per_weight: Bits | None
    weight_bytes: Count | None
    emulated_bytes: Count | None
    command: Words
    sentence: Words
    kl_missing: Words | None
    notes: list[Words]
    statistics: Statistics
    for_people: dict[Name, Name]


class Teacher(msgspec.Struct):
    path: Name
    precision: Name
    tokenizer_hash: Name
    revision: Name | None = None


class Student(msgspec.Struct):
    path: Name
    format: Name
    size_bytes: Count | None = None
    effective_bpw: Bits | None = None


class Calibration(msgspec.Struct):
    corpus: Name
    num_samples: Count
    max_seq_len: Count
    seed: int
    top_k: Count
    score_window: list[Count] | None = None
    corpus_tokens_hash: Name | None = None


class Divergence(msgspec.Struct):
    mean: Divergent | None
    se: Positive | None = None
    floor_mean: Positive | None = None


class Agreement(msgspec.Struct):
    top1: Share | None = None


class MlxKldForm(msgspec.Struct):
    """The fields of mlx-kld's schema 1 that are used."""

    teacher: Teacher
    student: Student
    calibration: Calibration
    kld: Divergence
    agreement: Agreement
    tokens_scored: Count
    scorer_version: Name


@dataclass(frozen=True, slots=True)
class Record:
    """A record of either format, as tables and charts need it."""

    file: str  # as the user named it
    name: str
    baseline: str
    text: str
    method: str
    by: str  # the tool that measured, and its version
    baseline_by: str  # the engine and the dtype of the baseline
    seal: str  # equal for copies of one record
    must_agree: Mapping[str, str]  # what must be equal for two records to be comparable, by what it is
    served: ServedModel
    statistics: Mapping[str, Any]
    details: Mapping[str, str]
    changed: bool = False  # after it was written
    why_no_kl: str = "no KL"
    limits: str = ""  # what its tool cannot see
    baseline_versions: tuple[tuple[str, str], ...] = ()  # and its device


def read(files: Sequence[str]) -> list[Record]:
    """Reads records. InputError names the first that is not one."""
    return [_read(file) for file in files]


def _read(file: str) -> Record:
    try:
        found = read_object(Path(file), unique=True, largest=LARGEST)
    except ValueError as error:
        raise InputError(f"{file} is not a record ({harmless(str(error))})", fix=FIX) from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})", fix=FIX) from None
    if "record" in found:
        return _own(file, found)
    if "schema_version" in found and "teacher" in found:
        return _of_mlx_kld(file, found)
    raise InputError(f"{file} is not a record", fix=FIX)


def require_form(text: str) -> None:
    """What is written must be what is read."""
    wrong = unusable_field(json.loads(text), OwnForm)
    assert wrong is None, f"an invalid record: no usable {wrong}"


def _require(file: str, found: Mapping[str, Any], version: object, known: int, form: type[msgspec.Struct]) -> Any:
    """The record as a value of its form."""
    if type(version) is not int or version != known:
        said = f"version {version}" if type(version) is int and abs(version) < 1000 else "an unknown version"
        fix = "install a newer scoremode" if type(version) is int and version > known else FIX
        raise InputError(f"{file} is a record of {said}, this scoremode reads {known}", fix=fix)
    if wrong := unusable_field(found, form):
        raise InputError(f"{file} is not a record (no usable {harmless(wrong)})", fix=FIX)
    return msgspec.convert(found, form)


def _own(file: str, found: dict[str, Any]) -> Record:
    its: OwnForm = _require(file, found, found["record"], RECORD, OwnForm)
    by = its.baseline_served.engine, its.baseline_dtype
    how = {"engine": by[0], "dtype": by[1], "K/V cache": its.baseline_served.kv_cache, **its.baseline_settings}
    return Record(
        file,
        its.name,
        its.baseline,
        its.corpus,
        method_words({"method": its.method, "method_settings": its.method_settings}, brief=True),
        f"scoremode {its.scoremode}",
        " ".join(filter(None, by)),
        str(found[SEAL]) if SEAL in found else file,
        {
            "tool": OWN,
            "text": its.corpus_sha256,
            "plan": its.plan_digest,
            "baseline": its.baseline_sha256,
            "vocabulary": its.vocabulary,
            **{f"{OF_BASELINE}{name}": str(value) for name, value in how.items() if value is not None},
        },
        served_manifest({**found, "model_format": found["format"]}),
        {name: 0.0 if value and abs(value) < TINY else value for name, value in found["statistics"].items()},
        {
            "result": its.sentence,
            "command": its.command,
            "model sha256": its.model_sha256 or "",
            "dtype": its.dtype or "",
            "device": its.device or "",
            "settings": ", ".join(f"{name} {value}" for name, value in its.settings.items()),
            "versions": ", ".join(f"{name} {version}" for name, version in its.versions.items()),
            "notes": "; ".join(its.notes),
            "written": its.written,
        },
        changed=not is_sealed(found),
        why_no_kl=its.kl_missing or "no KL",
        baseline_versions=tuple(sorted({**its.baseline_versions, "device": its.baseline_device or "unknown"}.items())),
    )


def _of_mlx_kld(file: str, found: dict[str, Any]) -> Record:
    found.pop("kld_histogram", None)  # its last edge may be Infinity, and it is not used
    its: MlxKldForm = _require(file, found, found["schema_version"], 1, MlxKldForm)
    c, kld = its.calibration, its.kld
    floor = "not said" if kld.floor_mean is None else f"{kld.floor_mean:.2g} nats"
    (teacher, commit), window = _named(its.teacher.path), c.score_window or "not said"
    recipe = f"{c.num_samples} sequences of {c.max_seq_len} tokens, seed {c.seed}, window {window}, top {c.top_k}"
    return Record(
        file,
        _named(its.student.path)[0],
        teacher,
        c.corpus,
        f"{c.num_samples:,} sequences of {c.max_seq_len:,} tokens",
        its.scorer_version,
        f"mlx {its.teacher.precision}",
        json.dumps(found, sort_keys=True),
        {
            "tool": "mlx-kld",
            "text": c.corpus_tokens_hash or f"{c.corpus}, no hash",
            "plan": recipe,
            "baseline": teacher,
            "vocabulary": its.teacher.tokenizer_hash,
            f"{OF_BASELINE}revision": its.teacher.revision or commit,
            f"{OF_BASELINE}dtype": its.teacher.precision,
        },
        served_manifest(
            {
                "model_format": its.student.format,
                "bits_per_weight": its.student.effective_bpw,
                "weight_bytes": its.student.size_bytes,
            }
        ),
        {
            "kl_mean": kld.mean,
            "kl_mean_stderr": kld.se,
            "same_top": its.agreement.top1,
            "targets": its.tokens_scored,
        },
        {"recipe": recipe, "floor of its KL": floor},
        limits=f"measured by mlx-kld: KL over the {c.top_k:,} likeliest ids of the baseline and an even rest, whose "
        f"floor ({floor}) hides smaller differences; baselines are equal by name, not by proof, and nothing is sealed",
    )


def _named(path: str) -> tuple[str, str]:
    """The name of a model of mlx-kld, and the commit if its path says it; of a name on the hub, with its organization.

    >>> _named("/x/models--org--name/snapshots/abc/"), _named("org/name"), _named("/models/name/")
    (('org/name', 'abc'), ('org/name', ''), ('name', ''))
    """
    path = path.rstrip("/\\") or path
    if found := SNAPSHOT.search(path):
        return "/".join(found[1].split("--", 1)), found[2]
    return (path if HUB_NAME.fullmatch(path) else ntpath.basename(path)), ""
