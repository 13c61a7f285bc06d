"""Comparisons as a table for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from scoremode.report.text import NOT_MEASURED, counted, model_notes, noise_words, shown, top_words
from scoremode.statistics.comparison import Comparison
from scoremode.statistics.gate import too_few
from scoremode.statistics.llamacpp import llamacpp_statistics, llamacpp_text
from scoremode.statistics.ranking import rank

NARROW = NOT_MEASURED.replace(" ", "\n")  # no wider than its column's title, to leave room for the other columns


def comparison_json(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ``--json`` prints."""
    baseline = found[0].baseline
    return {
        "baseline": baseline.manifest["model"],
        "method": baseline.manifest["method"],
        "plan_digest": baseline.plan_digest,
        "baseline_notes": model_notes(baseline),
        "candidates": [
            {**s, "noise_floor_perturbed": c.noise_perturbed if c.noise_kl is not None else None, **_missing(c)}
            for c, s in zip(found, statistics, strict=True)
        ],
    }


def llamacpp_layout(found: Sequence[Comparison]) -> str:
    """What ``--llamacpp`` prints: for each candidate the lines of llama.cpp's own tool."""
    texts = [llamacpp_text(llamacpp_statistics(c)).rstrip("\n") for c in found]
    if len(found) == 1:
        return texts[0]
    return "\n\n".join(f"{shown(c.name)}\n\n{text}" for c, text in zip(found, texts, strict=True))


def _missing(comparison: Comparison) -> dict[str, str]:
    """Why there is no KL, if there is none."""
    why = comparison.manifest.get("kl_missing")
    return {"kl_missing": why} if why else {}


def comparison_table(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> list[Any]:
    """The table, the noise floor, and which candidates cannot be told apart."""
    baseline, m = found[0].baseline, found[0].baseline.manifest
    table = Table(box=None, pad_edge=False, header_style="bold")
    longest = max(len(shown(name)) for name in (m["model"], *(s["name"] for s in statistics)))
    table.add_column("", no_wrap=True, min_width=min(longest, 28))
    for name in ("ppl", "ratio", "KL mean", "median", "99%", "max", "same top", "over"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(Text(shown(m["model"])), f"{_number(statistics[0]['ppl_baseline'], 4)}", *["-"] * 7)
    for s in statistics:
        table.add_row(
            Text(shown(s["name"])),
            _number(s["ppl_candidate"], 4),
            _fixed_with_error(s["ppl_ratio"], s["ppl_ratio_stderr"], 4),
            _fixed_with_error(s["kl_mean"], s["kl_mean_stderr"], 5),
            *(_number(s[name], digits) for name, digits in (("kl_median", 5), ("kl_p99", 4), ("kl_max", 2))),
            NARROW if s["same_top"] is None else f"{100 * s['same_top']:.2f}%",
            f"{s['groups']:,}",
        )
    return [table, "", *_notes(found, statistics), _method_line(baseline.manifest, statistics[0])]


def _method_line(m: Any, s: dict[str, Any]) -> Text:
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in m["method_settings"].items())
    kind = m["stderr_groups"]
    rests_on = f"± over {s['groups']:,} {kind}" if s["worse_stderr"] is not None else too_few(s["groups"], kind)
    return Text(shown(f"{m['method']} ({settings}), {counted(s['targets'], 'targets')}, {rests_on}"), "dim")


def _notes(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> list[Text]:
    said = noise_words(found[0], statistics[0])
    notes = [Text(shown(said))] if said else []
    for run in dict.fromkeys([found[0].baseline, *(c.candidate for c in found)]):
        notes += [Text(shown(f"{run.manifest['model']}: {note}"), "yellow") for note in model_notes(run)]
    missing = {str(why): None for c in found if (why := c.manifest.get("kl_missing"))}
    notes += [Text(shown(why)) for why in missing]
    notes += [Text(shown(why)) for why in dict.fromkeys(map(top_words, found)) if why]
    if not any(c.kl is None for c in found) and len(found) > 1:
        for entry in rank(list(found)):
            if entry.tied_with:
                others = ", ".join(entry.tied_with)
                notes.append(Text(shown(f"{entry.name} cannot be told apart from {others}"), "yellow"))
    return notes


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _fixed_with_error(value: float | None, error: float | None, digits: int) -> str:
    return _number(value, digits) + ("" if error is None or value is None else f" ± {error:.{digits}f}")
