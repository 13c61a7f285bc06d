"""How to reproduce the numbers of the page: facts about each run, and the commands."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from scoremode.report.html.charts import escaped, visible
from scoremode.report.html.numbers import file_size, usable
from scoremode.report.html.runs import run_name, same_run
from scoremode.report.served import Served, served_run
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run

# ── provenance ───────────────────────────────────────────────────────────────────────────────────────────────────────


def run_facts(run: Run) -> dict[str, str]:
    """What another person needs to reproduce the numbers; facts that the manifest lacks are left out."""
    m = run.manifest
    speed = usable(m.get("tokens_per_second"))
    seconds = usable(m.get("seconds"))
    facts = {
        "model": m.get("model"),
        "model revision": m.get("model_revision"),
        "model sha256": m.get("model_fingerprint"),
        **served_facts(run, served_run(run)),
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
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def served_facts(run: Run, served: Served) -> dict[str, str]:
    """How a model was served: its format and sizes, the engine, its versions, kernels and settings."""
    return manifest_facts(run.manifest, served)


def manifest_facts(m: Mapping[str, Any], served: Served) -> dict[str, str]:
    """As ``served_facts``, of a manifest."""
    settings = m.get("engine_settings") or {}
    facts = {
        "format": m.get("model_format"),
        **_size_facts(served),
        "engine": m.get("engine"),
        "versions": _pairs(m.get("versions")),
        "dtype": m.get("dtype"),
        "device": m.get("device"),
        "head": m.get("head"),
        "head kernel": settings.get("head_kernel"),
        "engine settings": _pairs({k: v for k, v in settings.items() if k != "head_kernel"}),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _size_facts(served: Served) -> dict[str, str | None]:
    """The size of a model, and of its parts, in words."""
    bits, stored = served.bits_per_weight, served.stored_bytes
    found = {
        "bits per weight": None if bits is None else f"{bits:.3f}, all weights together",
        "size of the weights": None if stored is None else f"{file_size(stored)} ({stored:,} bytes)",
    }
    for part in served.parts:
        each = f"{part.bits_per_weight:,.3f} bits per weight, {file_size(part.stored_bytes)}"
        found[f"size of the {part.name}"] = f"{each}, {part.weights:,} weights"
    return found


def _pairs(values: Any) -> str:
    if not isinstance(values, Mapping):
        return "" if values is None else str(values)
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None and v != "")


def provenance_section(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> str:
    named: list[tuple[str, Run]] = []
    for c in comparisons:
        if not any(same_run(c.baseline, run) for _, run in named):
            named.append(("baseline", c.baseline))
        named.append((c.name, c.candidate))
    named += [(run_name(run, alone), run) for run in alone]
    if not named:
        return ""
    facts = [run_facts(run) for _, run in named]
    shared = {k: v for k, v in facts[0].items() if len(facts) > 1 and all(f.get(k) == v for f in facts)}
    parts = [f"<h3>Same for all runs</h3>{facts_list(shared)}"] if shared else []
    for (name, run), own in zip(named, facts, strict=True):
        rest = {k: v for k, v in own.items() if k not in shared}
        number = next((i for i, c in enumerate(comparisons) if c.candidate is run), None)
        own_id = "" if number is None else f' id="run-{number}"'
        parts.append(f"<details{own_id}><summary>{escaped(name)}</summary>{facts_list(rest)}</details>")
    return (
        '<section id="provenance" aria-labelledby="provenance-title"><h2 id="provenance-title">Provenance</h2>'
        f"{_commands(comparisons, alone)}{''.join(parts)}</section>\n"
    )


def facts_list(facts: Mapping[str, str]) -> str:
    lines = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{lines}</dl>'


def commands_of(manifest: Mapping[str, Any]) -> list[str]:
    """Exact commands as typed, given as one line, a list of lines, or the words of one command."""
    given = manifest.get("command") or []
    if isinstance(given, str):
        return [given]
    if len(given) > 1 and isinstance(given[0], str) and not any(c.isspace() for c in given[0]):
        return [shlex.join(map(str, given))]  # the first item is only a program name: sys.argv, not lines
    return [line if isinstance(line, str) else shlex.join(map(str, line)) for line in given]


def _commands(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> str:
    return commands_block([*(c.manifest for c in comparisons), *(run.manifest for run in alone)])


def commands_block(manifests: Sequence[Mapping[str, Any]]) -> str:
    """The commands of these manifests, each once, with a button that copies them."""
    lines = list(dict.fromkeys(line for manifest in manifests for line in commands_of(manifest)))
    if not lines:
        return ""
    # the copied text is what was typed; only deceptive invisible characters are made visible
    text = html.escape("\n".join(visible(line) for line in lines), quote=True)
    return (
        '<h3 id="commands-title">Commands that reproduce these numbers</h3><div class="commands">'
        f'<pre id="commands" tabindex="0" aria-labelledby="commands-title">{text}</pre>'
        '<button type="button" id="copy" hidden>Copy</button></div>'
    )
