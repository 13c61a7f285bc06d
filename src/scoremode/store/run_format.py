"""The format of a finished run's manifest and columns, and the checks when they are read; files are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from scoremode.disk.files import file_sha256
from scoremode.disk.folders import JOURNAL, MANIFEST
from scoremode.disk.manifests import (
    anything,
    both,
    each,
    either,
    flag,
    having,
    is_sealed,
    line,
    mapping,
    number,
    one_of,
    optional,
    record,
    sha256,
    text,
    unusable_field,
    whole,
)
from scoremode.errors import EngineError, RunError, harmless
from scoremode.scores.parquet import columns_problem
from scoremode.scores.schema import BUILT_IN, Column, Schema
from scoremode.strict_json import read_object

FORMAT = 2

count = whole()
estimate = record(
    {
        "value": optional(number()),
        "stderr": optional(number(0)),
        "n": count,
        "groups": count,
        "freedom": optional(number(0)),
        "low": optional(number()),
        "high": optional(number()),
    }
)
percent = optional(number(-1e9, 1e9))
share = record({"value": number(0, 1), "stderr": percent, "low": percent, "high": percent})
identity = record(
    {"model": text, "tokenizer": text, "corpus": text, "plan": text, "engine": text, "settings": mapping()},
    {"versions": mapping(text), "numerics": count},
)
declared_column = record(
    {"name": text, "dtype": one_of("float64", "int64", "int32"), "meaning": line},
    {
        "per": one_of("target", "row"),
        "unit": line,
        "least": number(),
        "most": either(number(), one_of("ids", "last id", "log ids")),
        "finite": flag,
        "together": line,
        "metrics": each(record({"name": text, "label": line}, {"share_of": whole(-(1 << 62))})),
    },
    closed=True,
)
part_size = record({"bytes": count, "weights": whole(1)})
QUESTION = {  # the options of ``ppl`` that define the plan; a reference repeats them for its candidates
    "corpus": either(text, each(text)),
    "text": line,
    "method": text,
    "context_length": whole(-(1 << 62)),
    "stride": whole(-(1 << 62)),
    "max_windows": whole(-(1 << 62)),
    "num_samples": whole(-(1 << 62)),
    "document_tokens": whole(-(1 << 62)),
    "field": line,
    "dataset": text,
    "dataset_config": text,
    "split": text,
    "assistant_only": flag,
    "tokenizer": text,
}
FIELDS = {  # in every manifest
    "format": whole(FORMAT, FORMAT),
    "identity": identity,
    "metrics": both(having(("perplexity", "mean_nll"), estimate), record({}, {"top1_accuracy": share})),
    "plan_digest": sha256,
    "scores_sha256": sha256,
    "targets": whole(1),
    "windows": whole(1),
    "forward_tokens": count,
    "tokens": count,
    "coverage": number(0, 1),
    "method": text,
    "method_settings": mapping(optional(either(flag, whole(-(1 << 62)), text))),
    "notes": each(line),
    "stderr_groups": text,
    "corpus": line,
    "corpus_bytes": count,
    "corpus_sha256": sha256,
    "tokenizer": text,
    "model": text,
    "model_fingerprint": text,
    "engine": text,
    "dtype": line,
    "device": line,
    "head": line,
    "seconds": number(0),
    "tokens_per_second": optional(number(0)),
}
MORE = {  # in some manifests
    "perplexity_stderr_llamacpp": optional(number(0)),
    "corpus_rows": optional(count),
    "documents": count,
    "model_revision": optional(text),
    "model_files": mapping(sha256),
    "weight_bytes": optional(count),
    "bits_per_weight": optional(number(0, 1024)),
    "model_format": optional(text),  # such as "GGUF Q4_K_M"; ``format`` is that of the manifest
    "sizes": optional(record({}, {name: optional(part_size) for name in ("body", "embedding", "head")})),
    "engine_settings": mapping(),
    "versions": mapping(text),
    "hardware": mapping(line),
    "against": optional(record({"model": text, "fingerprint": text})),
    "not_measured": each(text),  # columns that the engine did not give; only if there are any
    "columns": each(declared_column),  # columns that the engine declared itself; only if there are any
    "noise_kl": optional(each(number(0))),
    "noise_perturbed": optional(line),
    "model_notes": each(line),
    "question": optional(record({}, QUESTION, closed=True)),
    "command": optional(either(line, each(either(line, each(line))))),
    "created": optional(line),
    "finished": optional(line),
    "seal": anything,
}


def read_run_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest of a finished run; RunError if it is missing, changed or invalid."""
    path = folder / MANIFEST
    if not path.exists():
        if (folder / JOURNAL).exists():
            raise RunError(f"{folder} contains an unfinished run", fix="run the same command again to resume")
        raise RunError(f"{folder} is not a run", fix="give a folder that was written with --out")
    try:
        manifest = read_object(path)
    except ValueError as error:
        raise RunError(f"{path} is damaged ({harmless(str(error))})", fix="score again with --fresh") from None
    known = manifest.get("format")
    if type(known) is not int:
        raise RunError(f"{path} is damaged (it has no format)", fix="score again with --fresh")
    if known != FORMAT:
        raise RunError(
            f"{folder} was written in format {known}, this scoremode reads {FORMAT}", fix="score again with --fresh"
        )
    if not is_sealed(manifest):
        raise RunError(f"{path} was changed after the run", fix="score again with --fresh")
    wrong = unusable_field(manifest, FIELDS, MORE) or _unusable_columns(manifest)
    if wrong is not None:
        raise RunError(f"{path} is damaged (no usable {harmless(wrong)})", fix="score again with --fresh")
    return manifest


def require_columns(path: Path, manifest: dict[str, Any]) -> None:
    """Raise RunError if the file's hash is not the one in the manifest, or if its columns are not a run's."""
    if not path.is_file() or file_sha256(path) != manifest["scores_sha256"]:
        raise RunError(f"{path} is missing or was changed after the run", fix="score again with --fresh")
    wrong = columns_problem(path, schema_of(manifest))
    if wrong is not None:
        raise RunError(f"{path} is damaged ({wrong})", fix="score again with --fresh")


def _unusable_columns(manifest: Mapping[str, Any]) -> str | None:
    """The name of the field, if the columns that it declares cannot be."""
    try:
        schema_of(manifest)
    except (EngineError, msgspec.ValidationError):
        return "columns"
    return None


def schema_of(manifest: Mapping[str, Any]) -> Schema:
    """The columns of the run that a manifest belongs to."""
    return BUILT_IN.extended(msgspec.convert(manifest.get("columns", ()), tuple[Column, ...]))


def described(schema: Schema) -> dict[str, Any]:
    """What a manifest says of columns that the engine declared itself."""
    return {"columns": msgspec.to_builtins(schema.declared)} if schema.declared else {}
