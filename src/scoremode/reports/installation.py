"""What is shown of the installation: versions, methods, engines, findings of self-tests, and the cache folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scoremode.core.cache.units import age_words, counts_in_words, size_words
from scoremode.core.plan.recipes import methods
from scoremode.reports.table import Block, Fact, Facts, Note

MISSING = {
    "rank": "ranks",
    "entropy": "entropy",
    "top": "first choices",
    "hidden_states": "references",
    "divergence": "KL",
}
"""Capabilities that an engine may lack, in words."""


def info_blocks(about: str | None, found: Any) -> list[Block]:
    """What ``sm.info`` found: about methods, about engines, or about the whole installation."""
    if about == "methods":
        refused = [Fact(one.name, f"cannot be used: {one.problem}") for one in methods().refused]
        return [Facts([*(Fact(one["name"], one["summary"]) for one in found), *refused], bold=True)]
    if about == "engines":
        return [engines_facts(found)]
    tests: list[Block] = ["", tests_facts(found)] if "self_tests" in found else []
    return [installed_facts(found), "", engines_facts(found["engines"]), *tests]


def engines_facts(found: Sequence[Mapping[str, Any]]) -> Facts:
    facts = Facts(bold=True)
    for engine in found:
        if engine["summary"] is None:
            facts.line(engine["name"], f"cannot be used: {engine['problem']}", style="yellow")
            continue
        facts.line(engine["name"], engine["summary"])
        if engine["problem"]:
            facts.line("", engine["problem"], style="yellow")
        missing = [words for key, words in MISSING.items() if not engine["capabilities"][key]]
        if missing:
            facts.line("", f"without {', '.join(missing)}", style="dim")
        for fact in engine["about"]:
            facts.line("", f"{fact['label']}: {fact['value']}", style="" if fact["good"] else "yellow")
    return facts


def installed_facts(found: Mapping[str, Any]) -> Facts:
    facts = Facts()
    for name, number in found["versions"].items():
        facts.line(name, number)
    facts.line("", "")
    for device in found["devices"]:
        facts.line(device["device"], _device(device))
    for kind, kernel in found["head_kernels"].items():
        facts.line(f"head kernel, {kind}", kernel)
    cache, embedded = found["cache"], found["embedded_model"]
    facts.line("cache folder", cache["folder"] + ("" if cache["writable"] else " (cannot be written)"))
    there = "made" if embedded["made"] else "installed, made on first use"
    facts.line(embedded["name"], there if embedded["installed"] else f"not installed: {embedded['fix']}")
    return facts


def tests_facts(found: Mapping[str, Any]) -> Facts:
    facts = Facts()
    for check in found["self_tests"]:
        verdict, style = ("good", "bold green") if check["good"] else ("FAILED", "bold red")
        facts.line(f"self-test: {check['name']}", verdict, f"{check['detail']} ({check['seconds']:.1f} s)", style)
    for name, reason in found["not_tested"].items():
        facts.line(f"self-test: engine {name}", "not tested", reason, "yellow")
    return facts


def _device(device: Mapping[str, Any]) -> str:
    if device["device"] == "cpu":
        return f"{device['name']}, {device['cores']} cores, {device['threads']} threads"
    free, total = device["free_bytes"] / 2**30, device["total_bytes"] / 2**30
    return f"{device['name']}, {free:.1f} of {total:.1f} GiB free"


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────────
def cache_blocks(found: Mapping[str, Any]) -> list[Block]:
    limit = "no limit" if found["limit"] is None else f"limit {size_words(found['limit'])}"
    total = [
        Note(f"{counts_in_words({kind: total['entries']})}, {size_words(total['size'])}")
        for kind, total in found["totals"].items()
    ]
    where = f"{found['folder']}: {size_words(found['size'])}, {limit} for runs and references"
    entries: list[Block] = [_entries(found["entries"]), ""] if found["entries"] else []
    return [*entries, *total, Note(where)]


def prune_blocks(found: Mapping[str, Any]) -> list[Block]:
    kinds = Counter(entry["kind"] for entry in found["removed"])
    verb = "would remove" if found["dry_run"] else "removed"
    freed = f" ({size_words(found['freed'])})" if kinds else ""
    skipped = [Note(f"skipped {entry['path']}: {entry['reason']}") for entry in found["skipped"]]
    done = Note(f"{verb} {counts_in_words(dict(kinds))}{freed}; {size_words(found['left'])} left")
    return [*([_entries(found["removed"])] if kinds else []), *skipped, done]


def _entries(entries: Sequence[Mapping[str, Any]]) -> Facts:
    facts = Facts()
    for entry in entries:
        used = f"{age_words(entry['age_seconds'])} ago"
        facts.line(entry["path"], f"{size_words(entry['size']):>8}  {used:>9}", entry["contents"])
    return facts
