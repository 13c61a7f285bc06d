"""The format of a finished run's manifest and columns, and the checks when they are read; files are not trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from scoremode.errors import RunError, harmless
from scoremode.plan.windows import COLUMNS
from scoremode.store.files import file_sha256
from scoremode.store.sealed import (
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
from scoremode.text.json_files import read_object

FORMAT = 2
MANIFEST, SCORES, JOURNAL = "manifest.json", "scores.parquet", "partial.journal"

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
    "not_measured": each(one_of(*COLUMNS[1:])),  # columns that the engine did not give; only if there are any
    "noise_kl": optional(each(number(0))),
    "noise_perturbed": optional(line),
    "model_notes": each(line),
    "question": optional(record({}, QUESTION, closed=True)),
    "command": optional(either(line, each(either(line, each(line))))),
    "created": optional(line),
    "finished": optional(line),
    "seal": anything,
}
COLUMN_TYPES = {
    "window": "int64",
    "document": "int64",
    "token": "int64",
    "id": "int32",
    "byte_len": "int32",
    "word_starts": "int32",
    "group": "int64",
    "weight": "double",
    "logprob": "double",
    "rank": "int64",
    "entropy": "double",
    "top": "int32",
    "top_logprob": "double",
    "kl": "double",
}
TEXT_COLUMNS = ("text", "top_text")


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
    wrong = unusable_field(manifest, FIELDS, MORE)
    if wrong is not None:
        raise RunError(f"{path} is damaged (no usable {harmless(wrong)})", fix="score again with --fresh")
    return manifest


def require_columns(path: Path, manifest: dict[str, Any]) -> None:
    """Raise RunError if the file's hash is not the one in the manifest, or if its columns are not a run's."""
    if not path.is_file() or file_sha256(path) != manifest["scores_sha256"]:
        raise RunError(f"{path} is missing or was changed after the run", fix="score again with --fresh")
    wrong = columns_problem(path)
    if wrong is not None:
        raise RunError(f"{path} is damaged ({wrong})", fix="score again with --fresh")


def columns_problem(path: Path) -> str | None:
    """Why a Parquet file cannot be the columns of a run, in words; None if it can."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pa.OSFile(os.fsencode(path)) as file:  # a name need not be UTF-8
            schema = pq.read_schema(file)
        types = {name: str(schema.field(name).type) for name in schema.names}
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        return f"it is not Parquet: {harmless(' '.join(str(error).split()))[:100]}"
    for name, kind in COLUMN_TYPES.items():
        if types.get(name, "absent") != kind and not (name == "kl" and name not in types):
            return f"its column {name} is {types.get(name, 'absent')}"
    for name in TEXT_COLUMNS:
        if "string" not in types.get(name, "absent"):
            return f"its column {name} is {types.get(name, 'absent')}"
    return None
