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


def info_blocks(about: str | None, info: Any) -> list[Block]:
    """What ``sm.info`` found: about methods, about engines, or about the whole installation."""
    if about == "methods":
        refused = [Fact(method.name, f"cannot be used: {method.problem}") for method in methods().refused]
        return [Facts([*(Fact(method["name"], method["summary"]) for method in info), *refused], bold=True)]
    if about == "engines":
        return [engines_facts(info)]
    tests: list[Block] = ["", tests_facts(info)] if "self_tests" in info else []
    return [installed_facts(info), "", engines_facts(info["engines"]), *tests]


def engines_facts(engines: Sequence[Mapping[str, Any]]) -> Facts:
    facts = Facts(bold=True)
    for engine in engines:
        if engine["summary"] is None:
            facts.line(engine["name"], f"cannot be used: {engine['problem']}", style="yellow")
            continue
        facts.line(engine["name"], engine["summary"])
        if engine["problem"]:
            facts.line("", engine["problem"], style="yellow")
        missing = [label for key, label in MISSING.items() if not engine["capabilities"][key]]
        if missing:
            facts.line("", f"without {', '.join(missing)}", style="dim")
        for fact in engine["about"]:
            facts.line("", f"{fact['label']}: {fact['value']}", style="" if fact["good"] else "yellow")
    return facts


def installed_facts(info: Mapping[str, Any]) -> Facts:
    facts = Facts()
    for name, number in info["versions"].items():
        facts.line(name, number)
    facts.line("", "")
    for device in info["devices"]:
        facts.line(device["device"], _device(device))
    for kind, kernel in info["head_kernels"].items():
        facts.line(f"head kernel, {kind}", kernel)
    cache, embedded = info["cache"], info["embedded_model"]
    facts.line("cache folder", cache["folder"] + ("" if cache["writable"] else " (cannot be written)"))
    there = "made" if embedded["made"] else "installed, made on first use"
    facts.line(embedded["name"], there if embedded["installed"] else f"not installed: {embedded['fix']}")
    return facts


def tests_facts(info: Mapping[str, Any]) -> Facts:
    facts = Facts()
    for check in info["self_tests"]:
        verdict, style = ("good", "bold green") if check["good"] else ("FAILED", "bold red")
        facts.line(f"self-test: {check['name']}", verdict, f"{check['detail']} ({check['seconds']:.1f} s)", style)
    for name, reason in info["not_tested"].items():
        facts.line(f"self-test: engine {name}", "not tested", reason, "yellow")
    return facts


def _device(device: Mapping[str, Any]) -> str:
    if device["device"] == "cpu":
        return f"{device['name']}, {device['cores']} cores, {device['threads']} threads"
    free, total = device["free_bytes"] / 2**30, device["total_bytes"] / 2**30
    return f"{device['name']}, {free:.1f} of {total:.1f} GiB free"


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────────
def cache_blocks(listing: Mapping[str, Any]) -> list[Block]:
    limit = "no limit" if listing["limit"] is None else f"limit {size_words(listing['limit'])}"
    total = [
        Note(f"{counts_in_words({kind: total['entries']})}, {size_words(total['size'])}")
        for kind, total in listing["totals"].items()
    ]
    where = f"{listing['folder']}: {size_words(listing['size'])}, {limit} for runs and references"
    entries: list[Block] = [_entries(listing["entries"]), ""] if listing["entries"] else []
    return [*entries, *total, Note(where)]


def prune_blocks(outcome: Mapping[str, Any]) -> list[Block]:
    kinds = Counter(entry["kind"] for entry in outcome["removed"])
    verb = "would remove" if outcome["dry_run"] else "removed"
    freed = f" ({size_words(outcome['freed'])})" if kinds else ""
    skipped = [Note(f"skipped {entry['path']}: {entry['reason']}") for entry in outcome["skipped"]]
    done = Note(f"{verb} {counts_in_words(dict(kinds))}{freed}; {size_words(outcome['left'])} left")
    return [*([_entries(outcome["removed"])] if kinds else []), *skipped, done]


def _entries(entries: Sequence[Mapping[str, Any]]) -> Facts:
    facts = Facts()
    for entry in entries:
        used = f"{age_words(entry['age_seconds'])} ago"
        facts.line(entry["path"], f"{size_words(entry['size']):>8}  {used:>9}", entry["contents"])
    return facts
