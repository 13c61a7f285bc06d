"""What ``scoremode attribute`` shows: the units that do most of the damage, the account, layers and routes."""

from __future__ import annotations

from collections.abc import Sequence

from scoremode.core.statistics.groups import FEWEST
from scoremode.reports.table import NOTHING, Block, Cell, Column, Facts, Note, Row, Table, estimate, words
from scoremode.reports.text import counted
from scoremode.studies.attribution.layer_profile import COMPARED, DepthProfile
from scoremode.studies.attribution.result import HELD_OUT, Attribution, CandidateDamage, Recipe, UnitDamage, ordered
from scoremode.studies.attribution.routing import Routing
from scoremode.values import Estimate, rounded

MOST = 12  # units in a terminal; the page and JSON have all


def _column(
    title: str, cells: Sequence[Estimate | None], about: str = "", *, percent: bool = False, leaves: int = 0
) -> Column:
    return Column(title, [estimate(cell, percent=percent) for cell in cells], about=about, leaves=leaves)


def attribution_blocks(attribution: Attribution) -> list[Block]:
    """The tables of all candidates."""
    blocks: list[Block] = []
    for candidate in attribution.candidates:
        title = (
            f"{candidate.name} in {attribution.baseline}, by {attribution.by} "
            f"({candidate.bits_per_weight:.2f} bits per weight)"
        )
        units = ordered(attribution, candidate.units)
        shown = [unit for unit in units if unit.damage.is_changed][:MOST]
        blocks.append(units_table(attribution, candidate, shown, title))
        if rest := [unit.name for unit in units[len(shown) :]]:
            names = ", ".join(rest[:4]) + (", …" if len(rest) > 4 else "")
            line = f"{counted(len(rest), 'units')} with less KL, or the baseline's own weights: {names}"
            blocks.append(Note(line, "dim"))
        blocks += ["", account_facts(attribution, candidate), ""]
    if attribution.recipe is not None:
        blocks += [*recipe_blocks(attribution, attribution.recipe), ""]
    return [*blocks, *(Note(note, "dim") for note in attribution_notes(attribution))]


def units_table(
    attribution: Attribution, candidate: CandidateDamage, units: Sequence[UnitDamage], title: str = ""
) -> Table:
    account = attribution.account(candidate)
    shares = [NOTHING if x is None else f"{100 * x:.1f}%" for x in (attribution.share(unit, account) for unit in units)]
    means = [attribution.cells.statistics(unit.damage) for unit in units]
    each = [attribution.kl_per_gigabit(unit) for unit in units]
    columns = [
        _column("KL", [row["kl"] for row in means], "KL(baseline‖swapped), nats per token"),
        Column("share", list(map(Cell, shares)), about="of the sum of parts"),
        _column("Δ logprob", [row["delta_logprob"] for row in means], "change of the tokens' log-probability, nats"),
        _column("same top", [row["same_top"] for row in means], "tokens whose first choice is the same", percent=True),
        Column("bits", [Cell(f"{unit.bits:.2f}") for unit in units], about="stored bits per weight"),
        _column("KL per Gbit", each, "for each 10⁹ bits that the unit saves", leaves=1),
        words("format", [unit.format for unit in units], leaves=2),
    ]
    names = [Row(unit.name, "" if unit.damage.is_changed else "equal weights") for unit in units]
    return Table(names, columns, title, corner="unit")


def account_facts(attribution: Attribution, candidate: CandidateDamage) -> Facts:
    """From units that are swapped alone to the whole, and to the model as it is served."""
    account, facts = attribution.account(candidate), Facts()
    ratio = "" if account.ratio is None else f"{account.ratio:.3f} of all weights together"
    lines: list[tuple[str, Estimate | None, str]] = [
        ("sum of parts", account.parts, ratio),
        ("interaction", account.interaction, "what units do to each other's damage"),
        ("all weights", account.whole, "swapped together"),
        ("rest", account.rest, "activations, K/V cache and kernels: not in the weights"),
        ("served", account.served, f"by {candidate.served_by}"),
    ]
    for name, kl, about in lines:
        if kl is not None:
            facts.line(name, estimate(kl).words, about)
    return facts


def recipe_blocks(attribution: Attribution, recipe: Recipe) -> list[Block]:
    cells = attribution.cells
    rows: list[tuple[str, float, Estimate, Estimate | None]] = [
        ("mixture", recipe.bits_per_weight, recipe.measured(cells), None)
    ]
    for candidate in recipe.uniform:
        kl = cells.mean(candidate.whole.kl, HELD_OUT, within="positive")
        rows.append((candidate.name, candidate.bits_per_weight, kl, recipe.difference(cells, candidate)))
    rows.sort(key=lambda row: row[1])
    less = "paired difference of KL; below 0, the mixture is better"
    columns = [
        Column("bits per weight", [Cell(f"{bits:.3f}") for _, bits, _, _ in rows]),
        _column("KL, held out", [kl for _, _, kl, _ in rows], "on windows that the mixture was not chosen on"),
        _column("mixture minus this", [difference for *_, difference in rows], less),
    ]
    taken, facts = list(recipe.chosen.values()), Facts()
    predicted = "the sum of its units, on the windows that it was chosen on"
    facts.line("predicted", f"KL {rounded(recipe.predicted)[0]}", predicted)
    facts.line("units", ", ".join(f"{taken.count(name):,} of {name}" for name in dict.fromkeys(taken)))
    table = Table([Row(row[0]) for row in rows], columns, f"a mixture for {recipe.budget}")
    return [table, "", facts, Note(recipe.verdict(cells))]


def attribution_notes(attribution: Attribution) -> list[str]:
    groups = counted(attribution.cells.groups, "groups")
    errors = f"errors are over {groups} ({attribution.cells.kind})"
    if attribution.cells.groups < FEWEST:
        errors = f"no errors: the text has {groups}, and {FEWEST} are needed"
    floor = "no noise floor"
    if attribution.noise is not None:
        floor = f"noise floor: KL {rounded(attribution.noise)[0]} of the baseline to itself"
    of_candidates = [
        note if note.startswith(candidate.name) else f"{candidate.name}: {note}"
        for candidate in attribution.candidates
        for note in candidate.notes
    ]
    return [
        f"{attribution.cells.count:,} tokens of {attribution.facts['corpus']}; KL in nats per token; {errors}",
        f"{floor} ({attribution.noise_perturbed})",
        *attribution.notes,
        *of_candidates,
    ]


# ── profiles by layer and routes of experts ──────────────────────────────────────────────────────────────────────────
def depth_profile_blocks(profile: DepthProfile) -> list[Block]:
    out = {place.name for place in profile.out_of_line}
    table = Table(
        [Row(place.name + (" ◀" if place.name in out else "")) for place in profile.places],
        [
            _column("error", [place.error for place in profile.places]),
            _column("own error", [place.own_error for place in profile.places]),
            _column("cosine", [place.cosine for place in profile.places]),
        ],
        "profile by layer",
    )
    text = f"{counted(profile.tokens, 'tokens')} of {counted(profile.windows, 'windows')}"
    return [
        table,
        Note(profile.verdict, "red" if profile.out_of_line else ""),
        Note(f"{profile.names[1]} ({profile.engines[1]}) against {profile.names[0]} ({profile.engines[0]})", "dim"),
        Note(f"{COMPARED}: {text}, errors over {profile.groups}", "dim"),
        *(Note(note, "yellow") for note in profile.notes),
    ]


def routing_blocks(routes: Routing) -> list[Block]:
    shares = [_column("other experts", [share for _, share in routes.changed], percent=True)]
    table = Table([Row(name) for name, _ in routes.changed], shares, "routes of experts")
    kinds = {"a changed route": routes.kl_changed, "no changed route": routes.kl_same, "all tokens": routes.kl}
    split = [
        Column("tokens", [Cell(f"{e.n:,}") for e in kinds.values()]),
        _column("KL", list(kinds.values())),
    ]
    share, of_kl = (estimate(e, percent=True).words for e in (routes.any_changed, routes.share_of_kl))
    return [
        table,
        "",
        Table(list(map(Row, kinds)), split),
        Note(f"{share} of the tokens have other experts in at least one layer; they hold {of_kl} of the KL"),
        Note(f"{routes.names[1]} against {routes.names[0]}, {routes.experts} of {routes.of_experts} experts", "dim"),
        *(Note(note, "yellow") for note in routes.notes),
    ]
