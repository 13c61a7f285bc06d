"""Profiles by layer and routes of experts as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from scoremode.reports.terminal.console import BlockTable, TableColumn
from scoremode.reports.text import counted, shown
from scoremode.studies.attribution.depth_profile import DepthProfile
from scoremode.studies.attribution.routing_statistics import Routing
from scoremode.values import Estimate, rounded

COMPARED = "hidden states after each decoder layer, before the final norm"


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
