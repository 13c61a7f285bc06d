"""What ``scoremode doctor`` found, as lines for a terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from scoremode.report.terminal.console import Facts
from scoremode.report.text import shown


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
