"""The runs of a page: how they are named, and how to reproduce their numbers."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.reports.html.templating import fill
from scoremode.reports.numbers import Statistics, file_size
from scoremode.reports.served import ServedModel, served_manifest
from scoremode.values import usable


def run_key(run: Run) -> object:
    """A key that is equal for two objects of the same run: the run's folder, if it has one."""
    return id(run) if run.path is None else run.path


def distinct_baselines(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics]
) -> list[tuple[Comparison, Statistics]]:
    """The first comparison with each baseline."""
    found: dict[object, tuple[Comparison, Statistics]] = {}
    for c, s in zip(comparisons, statistics, strict=True):
        found.setdefault(run_key(c.baseline), (c, s))
    return list(found.values())


def run_name(run: Run, among: Sequence[Run] = ()) -> str:
    """The model's name, with the text, engine or folder added if the model alone would not tell the runs apart."""
    m = run.manifest
    parts = [str(m.get("model", "run"))]
    for name in ("corpus", "engine", "dtype", "method"):
        if len({str(other.manifest.get(name)) for other in among}) > 1:
            parts.append(str(m.get(name)))
    named = " · ".join(parts)
    twins = [other for other in among if [str(other.manifest.get("model", "run"))] == parts[:1]]
    return f"{named} · {run.path}" if len(parts) == 1 and len(twins) > 1 and run.path else named


def provenance_section(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> Markup:
    named: list[tuple[str, Run]] = []
    for c in comparisons:
        if run_key(c.baseline) not in {run_key(run) for _, run in named}:
            named.append(("baseline", c.baseline))
        named.append((c.name, c.candidate))
    named += [(run_name(run, alone), run) for run in alone]
    if not named:
        return Markup()
    facts = [run_facts(run) for _, run in named]
    shared = {k: v for k, v in facts[0].items() if len(facts) > 1 and all(f.get(k) == v for f in facts)}
    runs = []
    for (name, run), own in zip(named, facts, strict=True):
        number = next((i for i, c in enumerate(comparisons) if c.candidate is run), None)  # the table links to it
        runs.append((name, number, {k: v for k, v in own.items() if k not in shared}))
    commands = distinct_commands([*(c.manifest for c in comparisons), *(run.manifest for run in alone)])
    first = ("Same for all runs", shared) if shared else None
    return fill("provenance.html", commands=commands, first=first, runs=runs)


def run_facts(run: Run) -> dict[str, str]:
    """Facts that another person needs to reproduce the numbers; those that the manifest lacks are left out."""
    m = run.manifest
    speed, seconds = usable(m.get("tokens_per_second")), usable(m.get("seconds"))
    return _known(
        {
            "model": m.get("model"),
            "model revision": m.get("model_revision"),
            "model sha256": m.get("model_fingerprint"),
            **served_facts(m),
            "hardware": _pairs(m.get("hardware")),
            "method": m.get("method"),
            "method settings": _pairs(m.get("method_settings")),
            "corpus": m.get("corpus"),
            "corpus sha256": m.get("corpus_sha256"),
            "corpus bytes": f"{m['corpus_bytes']:,}" if usable(m.get("corpus_bytes")) is not None else None,
            "tokenizer": m.get("tokenizer"),
            "plan digest": run.plan_digest,
            "targets": f"{len(run.scores):,}",
            "windows": f"{m['windows']:,}" if usable(m.get("windows")) is not None else None,
            "notes": "; ".join(map(str, m.get("notes") or [])),
            "scored at": m.get("created") or m.get("finished"),
            "seconds": f"{seconds:,.1f}" if seconds is not None else None,
            "tokens/s": f"{speed:,.0f}" if speed is not None else None,
            "folder": run.path,
        }
    )


def served_facts(m: Mapping[str, Any], its: ServedModel | None = None) -> dict[str, str]:
    """How a model was served: its format and sizes, the engine, its versions, kernels and settings.

    ``its`` are the sizes to show, if they are not those of the manifest.
    """
    settings, its = m.get("engine_settings") or {}, its or served_manifest(m)
    bits = its.bits_per_weight
    stored_as = "size of the file that emulates it" if its.is_emulated else "size of the weights"
    sizes = (("size that it would have", its.emulated_bytes), (stored_as, its.stored_bytes))
    parts = {
        f"size of the {part.name}": f"{part.bits_per_weight:,.3f} bits per weight, {file_size(part.stored_bytes)}, "
        f"{part.weights:,} weights"
        for part in its.parts
    }
    return _known(
        {
            "format": m.get("model_format"),
            "bits per weight": None if bits is None else f"{bits:.3f}, all weights together",
            **{label: None if count is None else f"{file_size(count)} ({count:,} bytes)" for label, count in sizes},
            **parts,
            "engine": m.get("engine"),
            "versions": _pairs(m.get("versions")),
            "dtype": m.get("dtype"),
            "device": m.get("device"),
            "head": m.get("head"),
            "head kernel": settings.get("head_kernel"),
            "engine settings": _pairs({k: v for k, v in settings.items() if k != "head_kernel"}),
        }
    )


def _known(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _pairs(values: Any) -> str:
    if not isinstance(values, Mapping):
        return "" if values is None else str(values)
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None and v != "")


def commands_of(manifest: Mapping[str, Any]) -> list[str]:
    """The commands in a manifest as typed. It stores one line, a list of lines, or the words of one command."""
    given = manifest.get("command") or []
    if isinstance(given, str):
        return [given]
    if len(given) > 1 and isinstance(given[0], str) and not any(c.isspace() for c in given[0]):
        return [shlex.join(map(str, given))]  # the first item is only a program name: sys.argv, not lines
    return [line if isinstance(line, str) else shlex.join(map(str, line)) for line in given]


def distinct_commands(manifests: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line for manifest in manifests for line in commands_of(manifest)))
