"""How to reproduce the numbers of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.reports.html.templating import fill
from scoremode.reports.served import known, pairs, run_key, run_name, served_facts
from scoremode.values import usable


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
    commands = distinct_commands(comparisons)
    first = ("Same for all runs", shared) if shared else None
    return fill("provenance.html", commands=commands, first=first, runs=runs)


def run_facts(run: Run) -> dict[str, str]:
    """Facts that another person needs to reproduce the numbers; those that the manifest lacks are left out."""
    m = run.manifest
    speed, seconds = usable(m.get("tokens_per_second")), usable(m.get("seconds"))
    return known(
        {
            "model": m.get("model"),
            "model revision": m.get("model_revision"),
            "model sha256": m.get("model_fingerprint"),
            **served_facts(m),
            "hardware": pairs(m.get("hardware")),
            "method": m.get("method"),
            "method settings": pairs(m.get("method_settings")),
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


def distinct_commands(found: Iterable[Any]) -> list[str]:
    """The commands that made comparisons, as typed, as far as they are known."""
    return list(dict.fromkeys(command for c in found if (command := c.manifest.get("command"))))
