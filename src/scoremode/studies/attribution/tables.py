"""What ``scoremode attribute`` shows: the units that do most of the damage, the account, layers and routes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scoremode.core.statistics.groups import FEWEST
from scoremode.reports.table import NOTHING, Block, Cell, Column, Facts, Note, Row, Table, estimate, numbers, words
from scoremode.reports.text import counted
from scoremode.studies.attribution.depth_profile import COMPARED, DepthProfile
from scoremode.studies.attribution.routing import Routing
from scoremode.values import rounded

MOST = 12  # units in a terminal; the page and JSON have all

Fields = Mapping[str, Any]


def attribution_blocks(facts: Fields) -> list[Block]:
    """The tables of all candidates, from ``Attribution.as_json()``."""
    found: list[Block] = []
    for candidate in facts["candidates"]:
        title = f"{candidate['name']} in {facts['baseline']}, by {facts['by']} ({candidate_bits(candidate)})"
        found += [units_table(candidate, title, MOST), *_unnamed(candidate), "", account_facts(candidate), ""]
    if "recipe" in facts:
        found += [*recipe_blocks(facts["recipe"]), ""]
    return [*found, *(Note(note, "dim") for note in attribution_notes(facts))]


def units_table(candidate: Fields, title: str = "", most: int | None = None) -> Table:
    """The units of a candidate in ``Attribution.as_json()``, the most damage first; ``most``: those that changed."""
    rows = [{**row, "kl": math.inf if row["kl"] is None else row["kl"]} for row in candidate["units"]]  # in JSON: null
    rows.sort(key=lambda row: (-row["kl"], not row["changed"]))
    if most is not None:
        rows = [row for row in rows if row["changed"]][:most]
    shares = [NOTHING if row["share"] is None else f"{100 * row['share']:.1f}%" for row in rows]
    columns = [
        numbers("KL", rows, "kl", about="KL(baseline‖swapped), nats per token"),
        Column("share", list(map(Cell, shares)), about="of the sum of parts"),
        numbers("Δ logprob", rows, "delta_logprob", about="change of the tokens' log-probability, nats"),
        numbers("same top", rows, "same_top", percent=True, about="tokens whose first choice is the same"),
    ]
    if saves_bits(candidate):
        columns += [
            Column("bits", [Cell(f"{row['bits']:.2f}") for row in rows], about="stored bits per weight"),
            numbers(
                "KL per Gbit",
                rows,
                "kl_per_gigabit",
                leaves=1,
                about="for each 10⁹ bits that the unit saves",
                page=None,
            ),
            words("format", [row["format"] for row in rows], leaves=2),
        ]
    names = [Row(row["unit"], "" if row["changed"] else "equal weights") for row in rows]
    return Table(names, columns, title, corner="unit")


def _unnamed(candidate: Fields) -> list[Note]:
    """The units that the table of a terminal leaves out."""
    said, units = [], candidate["units"]
    shares = sorted((row["share"] or 0.0 for row in units if row["changed"]), reverse=True)
    if rest := shares[MOST:]:
        said.append(f"{counted(len(rest), 'more units')} have {100 * sum(rest):.1f}% of the sum")
    if equal := [row["unit"] for row in units if not row["changed"]]:
        names = ", ".join(equal[:4]) + (", …" if len(equal) > 4 else "")
        said.append(f"{counted(len(equal), 'units')} with the baseline's own weights: {names}")
    return [Note(line, "dim") for line in said]


def account_facts(candidate: Fields) -> Facts:
    """From units that are swapped alone to the whole, and to the model as it is served."""
    account, served, facts = candidate["account"], candidate["served_by"], Facts()
    ratio = account["parts_over_whole"]
    lines = [
        ("sum of parts", "parts", "" if ratio is None else f"{ratio:.3f} of all weights together"),
        ("interaction", "interaction", "what units do to each other's damage"),
        ("all weights", "whole", "swapped together"),
    ]
    if served is not None:
        lines.append(("rest", "rest", "activations, K/V cache and kernels: not in the weights"))
        lines.append(("served", "served", f"by {served}"))
    for name, key, about in lines:
        facts.line(name, " ".join(rounded(account[key], account[f"{key}_stderr"])).rstrip(), about)
    return facts


def recipe_blocks(recipe: Fields) -> list[Block]:
    mixture = {
        "name": "mixture",
        "bits_per_weight": recipe["bits_per_weight"],
        **{name.replace("measured_", ""): value for name, value in recipe.items() if name.startswith("measured_kl")},
        **dict.fromkeys(("difference", "difference_stderr")),
    }
    rows = sorted([mixture, *recipe["uniform"]], key=lambda row: row["bits_per_weight"])
    columns = [
        Column("bits per weight", [Cell(f"{row['bits_per_weight']:.3f}") for row in rows]),
        numbers("KL, held out", rows, "kl", about="on windows that the mixture was not chosen on"),
        numbers(
            "mixture minus this", rows, "difference", about="paired difference of KL; below 0, the mixture is better"
        ),
    ]
    taken, facts = list(recipe["chosen"].values()), Facts()
    predicted = "the sum of its units, on the windows that it was chosen on"
    facts.line("predicted", f"KL {rounded(recipe['predicted_kl'])[0]}", predicted)
    facts.line("units", ", ".join(f"{taken.count(name):,} of {name}" for name in dict.fromkeys(taken)))
    table = Table([Row(row["name"]) for row in rows], columns, f"a mixture for {recipe['budget']}")
    return [table, "", facts, Note(recipe["verdict"])]


def attribution_notes(facts: Fields) -> list[str]:
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


def saves_bits(candidate: Fields) -> bool:
    """Does a candidate store some unit in fewer bits than the baseline? Else its bits say nothing."""
    return any(row["bits_saved"] > 0 for row in candidate["units"])


def candidate_bits(candidate: Fields) -> str:
    """The bits per weight of a candidate of an attribution, or why they say nothing.

    >>> candidate_bits({"bits_per_weight": 32.0, "units": [{"bits_saved": 0.0}]})
    'emulated, or not quantized: no weights are stored in fewer bits than in the baseline'
    """
    if saves_bits(candidate):
        return f"{candidate['bits_per_weight']:.2f} bits per weight"
    return "emulated, or not quantized: no weights are stored in fewer bits than in the baseline"


# ── profiles by layer and routes of experts ──────────────────────────────────────────────────────────────────────────
def depth_profile_blocks(found: DepthProfile) -> list[Block]:
    out = {place.name for place in found.out_of_line}
    table = Table(
        [Row(place.name + (" ◀" if place.name in out else "")) for place in found.places],
        [
            Column("error", [estimate(place.error) for place in found.places]),
            Column("own error", [estimate(place.own_error) for place in found.places]),
            Column("cosine", [estimate(place.cosine) for place in found.places]),
        ],
        "profile by layer",
    )
    text = f"{counted(found.tokens, 'tokens')} of {counted(found.windows, 'windows')}"
    return [
        table,
        Note(found.verdict, "red" if found.out_of_line else ""),
        Note(f"{found.names[1]} ({found.engines[1]}) against {found.names[0]} ({found.engines[0]})", "dim"),
        Note(f"{COMPARED}: {text}, errors over {found.groups}", "dim"),
        *(Note(note, "yellow") for note in found.notes),
    ]


def routing_blocks(found: Routing) -> list[Block]:
    shares = [estimate(share, percent=True) for _, share in found.changed]
    table = Table([Row(name) for name, _ in found.changed], [Column("other experts", shares)], "routes of experts")
    kinds = {"a changed route": found.kl_changed, "no changed route": found.kl_same, "all tokens": found.kl}
    split = [
        Column("tokens", [Cell(f"{e.n:,}") for e in kinds.values()]),
        Column("KL", [estimate(e) for e in kinds.values()]),
    ]
    share, of_kl = (estimate(e, percent=True).words for e in (found.any_changed, found.share_of_kl))
    return [
        table,
        "",
        Table(list(map(Row, kinds)), split),
        Note(f"{share} of the tokens have other experts in at least one layer; they hold {of_kl} of the KL"),
        Note(f"{found.names[1]} against {found.names[0]}, {found.experts} of {found.of_experts} experts", "dim"),
        *(Note(note, "yellow") for note in found.notes),
    ]
