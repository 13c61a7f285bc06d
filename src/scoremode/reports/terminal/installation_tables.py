"""Terminal tables about the installation: engines, the findings of ``scoremode doctor``, and the cache folder."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from rich.text import Text

from scoremode.core.cache.units import age_words, counts_in_words, size_words
from scoremode.errors import columns_of
from scoremode.reports.terminal.console import Facts, longest_word
from scoremode.reports.text import shown

MISSING = {
    "rank": "ranks",
    "entropy": "entropy",
    "top": "first choices",
    "hidden_states": "references",
    "divergence": "KL",
}
"""Capabilities that an engine may lack, in words."""

HEADER = ("entry", "size", "last use", "")


def engines_table(found: Sequence[dict[str, Any]]) -> list[Any]:
    table = Facts()
    for engine in found:
        name = Text(shown(engine["name"]), "bold")
        if engine["summary"] is None:
            table.line(name, Text(shown(f"cannot be used: {engine['problem']}"), "yellow"))
            continue
        table.line(name, shown(engine["summary"]))
        if engine["problem"]:
            table.line("", Text(shown(engine["problem"]), "yellow"))
        missing = [words for key, words in MISSING.items() if not engine["capabilities"][key]]
        if missing:
            table.line("", Text(f"without {', '.join(missing)}", "dim"))
    return [table]


def doctor_table(found: dict[str, Any]) -> list[Any]:
    table = Facts()
    for name, number in found["versions"].items():
        table.line(name, number)
    table.line("", "")
    for device in found["devices"]:
        table.line(device["device"], shown(_device(device)))
    for kind, kernel in found["head_kernels"].items():
        table.line(f"head kernel, {kind}", shown(kernel))
    for engine in found["engines"]:
        if engine["problem"] and engine["name"] not in found["not_tested"]:
            table.line(f"engine {shown(engine['name'])}", Text(shown(engine["problem"]), "yellow"))
        for fact in engine["about"] if not engine["problem"] else ():
            table.line(shown(fact["label"]), Text(shown(fact["value"]), "" if fact["good"] else "yellow"))
    cache, embedded = found["cache"], found["embedded_model"]
    table.line("cache folder", shown(cache["folder"]) + ("" if cache["writable"] else " (cannot be written)"))
    there = "made" if embedded["made"] else "installed, made on first use"
    table.line(embedded["name"], there if embedded["installed"] else f"not installed: {embedded['fix']}")
    table.line("", "")
    for check in found["self_tests"]:
        verdict = Text("good  ", "bold green") if check["good"] else Text("FAILED  ", "bold red")
        detail = shown(f"{check['detail']} ({check['seconds']:.1f} s)")
        table.line(f"self-test: {check['name']}", verdict.append(Text(detail, "default")))
    for name, reason in found["not_tested"].items():
        table.line(
            f"self-test: engine {shown(name)}", Text("not tested  ", "yellow").append(Text(shown(reason), "default"))
        )
    return [table]


def _device(device: dict[str, Any]) -> str:
    if device["device"] == "cpu":
        return f"{device['name']}, {device['cores']} cores, {device['threads']} threads"
    free, total = device["free_bytes"] / 2**30, device["total_bytes"] / 2**30
    return f"{device['name']}, {free:.1f} of {total:.1f} GiB free"


def cache_lines(found: dict[str, Any]) -> list[str]:
    rows = [HEADER, *(_row(entry) for entry in found["entries"])] if found["entries"] else []
    limit = "no limit" if found["limit"] is None else f"limit {size_words(found['limit'])}"
    total = [
        f"{counts_in_words({kind: total['entries']})}, {size_words(total['size'])}"
        for kind, total in found["totals"].items()
    ]
    where = f"{shown(found['folder'])}: {size_words(found['size'])}, {limit} for runs, references and texts"
    return [*_aligned(rows), *([""] if rows else []), *total, *_wrapped(where)]


def prune_lines(found: dict[str, Any]) -> list[str]:
    kinds = Counter(entry["kind"] for entry in found["removed"])
    verb = "would remove" if found["dry_run"] else "removed"
    freed = f" ({size_words(found['freed'])})" if kinds else ""
    skipped = [f"skipped {shown(entry['path'])}: {shown(entry['reason'])}" for entry in found["skipped"]]
    done = f"{verb} {counts_in_words(dict(kinds))}{freed}; {size_words(found['left'])} left"
    told = [line for words in (*skipped, done) for line in _wrapped(words)]
    return [*_aligned([_row(entry) for entry in found["removed"]]), *told]


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    used = f"{age_words(entry['age_seconds'])} ago"
    return shown(entry["path"]), size_words(entry["size"]), used, shown(entry["contents"])


def _wrapped(line: str, indent: int = 0) -> list[str]:
    room = max(1, _width() - indent)
    return [line] if 0 < len(line) <= room else wrap(line, room, break_long_words=False, break_on_hyphens=False)


def _width() -> int:
    """The width of the terminal; in a file every entry has one line, for ``grep``."""
    return columns_of(sys.stdout) or sys.maxsize


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table. The contents of an entry stand on lines of their own if they do not fit."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    indent, lines = sum(widths) + 6, list[str]()
    if max(indent + longest_word(row[3]) for row in rows) > _width():
        indent = 4
    for row in rows:
        left = f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}"
        what = [" " * indent + line for line in _wrapped(row[3], indent)]
        if what and indent == len(left) + 2:
            what[0] = f"{left}  {what[0].lstrip()}"
        lines += what if what and what[0].startswith(left) else [left.rstrip(), *what]
    return lines
