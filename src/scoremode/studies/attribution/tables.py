"""The tables of ``scoremode attribute``: the units that do most of the damage, the account, layers and routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from scoremode.core.statistics.groups import FEWEST
from scoremode.reports.terminal.console import BlockTable, Facts, TableColumn
from scoremode.reports.text import counted, shown
from scoremode.studies.attribution.depth_profile import DepthProfile
from scoremode.studies.attribution.routing import Routing
from scoremode.values import Estimate, rounded

MOST = 12  # units in a table; the page and JSON have all

Row = Mapping[str, Any]

COMPARED = "hidden states after each decoder layer, before the final norm"
PREDICTED = "the sum of its units, on the windows that it was chosen on"


def attribution_tables(facts: Row) -> list[Any]:
    """The tables of all candidates, from ``Attribution.as_json()``."""
    parts: list[Any] = []
    for candidate in facts["candidates"]:
        parts += [*_candidate(facts, candidate), ""]
    if "recipe" in facts:
        parts += [*_recipe(facts["recipe"]), ""]
    return [*parts, *(Text(shown(note), "dim") for note in attribution_notes(facts))]


def _recipe(recipe: Row) -> list[Any]:
    """The mixture, predicted and measured, beside uniform candidates."""
    mixture = {
        "name": "mixture",
        "bits_per_weight": recipe["bits_per_weight"],
        **{name.replace("measured_", ""): value for name, value in recipe.items() if name.startswith("measured_kl")},
        **dict.fromkeys(("difference", "difference_stderr")),
    }
    rows = sorted([mixture, *recipe["uniform"]], key=lambda row: row["bits_per_weight"])
    table = BlockTable(
        [shown(row["name"]) for row in rows],
        [
            TableColumn("bits per weight", [f"{row['bits_per_weight']:.3f}" for row in rows]),
            _column("KL, held out", rows, "kl"),
            _column("mixture minus this", rows, "difference"),
        ],
    )
    facts = Facts()
    facts.line("predicted", f"KL {rounded(recipe['predicted_kl'])[0]}  {PREDICTED}")
    facts.line("units", shown(chosen_words(recipe)))
    return [
        Text(f"a mixture for {recipe['budget']}", "bold"),
        table,
        "",
        facts,
        Text(shown(recipe["verdict"])),
        *(Text(shown(f"{one['tool']}: {note}"), "dim") for one in recipe["tools"] for note in one["notes"]),
    ]


def _candidate(facts: Row, candidate: Row) -> list[Any]:
    title = f"{candidate['name']} in {facts['baseline']}, by {facts['by']}"
    changed = [row for row in unit_rows(candidate) if row["changed"]]
    named, rest = changed[:MOST], changed[MOST:]
    found: list[Any] = [Text(f"{shown(title)} ({candidate_bits(candidate)})", "bold")]
    if named:
        found.append(_units(named, with_bits=saves_bits(candidate)))
    said = []
    if rest:
        share = sum(row["share"] or 0.0 for row in rest)
        said.append(f"{counted(len(rest), 'more units')} have {100 * share:.1f}% of the sum")
    if equal := [row["unit"] for row in candidate["units"] if not row["changed"]]:
        names = ", ".join(equal[:4]) + (", …" if len(equal) > 4 else "")
        said.append(f"{counted(len(equal), 'units')} with the baseline's own weights: {names}")
    found += [Text(shown(line), "dim") for line in said]
    account = Facts()
    for name, value, error, about in account_lines(candidate):
        account.line(name, f"{value} {error}".strip() + (f"  {about}" if about else ""))
    return [*found, "", account]


def _units(rows: Sequence[Row], *, with_bits: bool) -> BlockTable:
    sizes = [
        TableColumn("bits", [f"{row['bits']:.2f}" for row in rows]),
        _column("KL per Gbit", rows, "kl_per_gigabit", leaves=1),
        TableColumn("format", [shown(row["format"]) for row in rows], number=False, leaves=2),
    ]
    return BlockTable(
        [shown(row["unit"]) for row in rows],
        [
            _column("KL", rows, "kl"),
            TableColumn("share", ["–" if row["share"] is None else f"{100 * row['share']:.1f}%" for row in rows]),
            _column("Δ logprob", rows, "delta_logprob"),
            _column("same top", rows, "same_top", percent=True),
            *(sizes if with_bits else []),
        ],
    )


def _column(title: str, rows: Sequence[Row], name: str, *, percent: bool = False, leaves: int = 0) -> TableColumn:
    cells = [" ".join(rounded(row[name], row[f"{name}_stderr"], percent=percent)).strip() for row in rows]
    return TableColumn(title, cells, leaves=leaves)


# ── words that terminal and page share ───────────────────────────────────────────────────────────────────────────────
def account_lines(candidate: Row) -> list[tuple[str, str, str, str]]:
    """The account of a candidate in ``Attribution.as_json()``: name, KL, its error, and what it is."""
    account, served = candidate["account"], candidate["served_by"]
    ratio = account["parts_over_whole"]
    lines = [
        ("sum of parts", "parts", "" if ratio is None else f"{ratio:.3f} of all weights together"),
        ("interaction", "interaction", "what units do to each other's damage"),
        ("all weights", "whole", "swapped together"),
    ]
    if served is not None:
        lines += [
            ("rest", "rest", "activations, K/V cache and kernels: not in the weights"),
            ("served", "served", f"by {served}"),
        ]
    return [(name, *rounded(account[key], account[f"{key}_stderr"]), about) for name, key, about in lines]


def attribution_notes(facts: Row) -> list[str]:
    """What a reader of an attribution must know, in sentences."""
    groups = facts["groups"]
    errors = f"errors are over {counted(groups, 'groups')} ({facts['stderr_groups']})"
    too_few = f"no errors: the text has {counted(groups, 'groups')}, and {FEWEST} are needed"
    tokens = f"{facts['targets']:,} tokens of {facts['corpus']}; KL in nats per token"
    noise = facts["noise_kl_mean"]
    if noise is None:
        floor = f"no noise floor: {facts['noise_perturbed']}"
    else:
        floor = f"noise floor: KL {rounded(noise)[0]} of the baseline to itself ({facts['noise_perturbed']})"
    of_candidates = [
        note if note.startswith(c["name"]) else f"{c['name']}: {note}"
        for c in facts["candidates"]
        for note in c["notes"]
    ]
    return [f"{tokens}; {errors if groups >= FEWEST else too_few}", floor, *facts["notes"], *of_candidates]


def chosen_words(recipe: Row) -> str:
    """How many units a mixture takes from each candidate."""
    names = list(recipe["chosen"].values())
    return ", ".join(f"{names.count(name):,} of {name}" for name in dict.fromkeys(names))


def saves_bits(candidate: Row) -> bool:
    """Does a candidate store some unit in fewer bits than the baseline? Else its bits say nothing."""
    return any(row["bits_saved"] > 0 for row in candidate["units"])


def candidate_bits(candidate: Row) -> str:
    """The bits per weight of a candidate of an attribution, or why they say nothing.

    >>> candidate_bits({"bits_per_weight": 32.0, "units": [{"bits_saved": 0.0}]})
    'emulated, or not quantized: no weights are stored in fewer bits than in the baseline'
    """
    if saves_bits(candidate):
        return f"{candidate['bits_per_weight']:.2f} bits per weight"
    return "emulated, or not quantized: no weights are stored in fewer bits than in the baseline"


def unit_rows(candidate: Row) -> list[dict[str, Any]]:
    """The units of a candidate in ``Attribution.as_json()``, the most damage first; JSON has no infinite KL."""
    rows = [{**row, "kl": math.inf if row["kl"] is None else row["kl"]} for row in candidate["units"]]
    return sorted(rows, key=lambda row: (-row["kl"], not row["changed"]))


# ── profiles by layer and routes of experts ──────────────────────────────────────────────────────────────────────────
def depth_profile_table(found: DepthProfile) -> list[Any]:
    """One row per layer: its error, its cosine, what it adds itself, and the noise floor."""
    out = {place.name for place in found.out_of_line}
    rows = found.places
    table = BlockTable(
        [place.name + (" ◀" if place.name in out else "") for place in rows],
        [
            TableColumn("error", [_cell(place.error) for place in rows]),
            TableColumn("own error", [_cell(place.own_error) for place in rows]),
            TableColumn("cosine", [_cell(place.cosine) for place in rows]),
            TableColumn("noise floor", [_cell(place.noise) for place in rows], leaves=1),
        ],
    )
    first = found.first_above_noise
    above = (
        "no error is above the noise floor" if first is None else f"the noise floor is exceeded from {first.name} on"
    )
    text = f"{counted(found.tokens, 'tokens')} of {counted(found.windows, 'windows')}"
    lines = [
        f"{found.names[1]} ({found.engines[1]}) against {found.names[0]} ({found.engines[0]})",
        f"{COMPARED}: {text}, errors over {found.groups}",
    ]
    return [
        Text("profile by layer", "bold"),
        *(Text(shown(line), "dim") for line in lines),
        table,
        Text(shown(found.verdict), "red" if out else ""),
        Text(above),
        Text(f"noise floor: the baseline against itself, {found.unusual_way}", "dim"),
        *(Text(shown(note), "yellow") for note in found.notes),
    ]


def routing_table(found: Routing) -> list[Any]:
    """The share of tokens whose experts changed, layer by layer, and KL with and without a changed route."""
    table = BlockTable(
        [name for name, _ in found.changed],
        [TableColumn("other experts", [_cell(share, percent=True) for _, share in found.changed])],
    )
    split = BlockTable(
        ["a changed route", "no changed route", "all tokens"],
        [
            TableColumn("tokens", [f"{e.n:,}" for e in (found.kl_changed, found.kl_same, found.kl)]),
            TableColumn("KL", [_cell(e) for e in (found.kl_changed, found.kl_same, found.kl)]),
        ],
    )
    share = " ".join(rounded(found.any_changed.value, found.any_changed.stderr, percent=True)).rstrip()
    of_kl = " ".join(rounded(found.share_of_kl.value, found.share_of_kl.stderr, percent=True)).rstrip()
    words = f"{share} of the tokens have other experts in at least one layer; they hold {of_kl} of the KL"
    return [
        Text("routes of experts", "bold"),
        Text(shown(f"{found.names[1]} against {found.names[0]}, {found.experts} of {found.of_experts} experts"), "dim"),
        table,
        "",
        split,
        Text(words),
        *(Text(shown(note), "yellow") for note in found.notes),
    ]


def _cell(estimate: Estimate | None, *, percent: bool = False) -> str:
    if estimate is None:
        return "-"
    return " ".join(rounded(estimate.value, estimate.stderr, percent=percent)).rstrip()
