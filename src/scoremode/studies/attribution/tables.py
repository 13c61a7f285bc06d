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
    return Column(title, [estimate(one, percent=percent) for one in cells], about=about, leaves=leaves)


def attribution_blocks(found: Attribution) -> list[Block]:
    """The tables of all candidates."""
    blocks: list[Block] = []
    for one in found.candidates:
        title = f"{one.name} in {found.baseline}, by {found.by} ({one.bits_per_weight:.2f} bits per weight)"
        units = ordered(found, one.units)
        shown = [unit for unit in units if unit.damage.is_changed][:MOST]
        blocks.append(units_table(found, one, shown, title))
        if rest := [unit.name for unit in units[len(shown) :]]:
            names = ", ".join(rest[:4]) + (", …" if len(rest) > 4 else "")
            line = f"{counted(len(rest), 'units')} with less KL, or the baseline's own weights: {names}"
            blocks.append(Note(line, "dim"))
        blocks += ["", account_facts(found, one), ""]
    if found.recipe is not None:
        blocks += [*recipe_blocks(found, found.recipe), ""]
    return [*blocks, *(Note(note, "dim") for note in attribution_notes(found))]


def units_table(found: Attribution, candidate: CandidateDamage, units: Sequence[UnitDamage], title: str = "") -> Table:
    account = found.account(candidate)
    shares = [NOTHING if x is None else f"{100 * x:.1f}%" for x in (found.share(one, account) for one in units)]
    means = [found.cells.statistics(one.damage) for one in units]
    each = [found.kl_per_gigabit(one) for one in units]
    columns = [
        _column("KL", [one["kl"] for one in means], "KL(baseline‖swapped), nats per token"),
        Column("share", list(map(Cell, shares)), about="of the sum of parts"),
        _column("Δ logprob", [one["delta_logprob"] for one in means], "change of the tokens' log-probability, nats"),
        _column("same top", [one["same_top"] for one in means], "tokens whose first choice is the same", percent=True),
        Column("bits", [Cell(f"{one.bits:.2f}") for one in units], about="stored bits per weight"),
        _column("KL per Gbit", each, "for each 10⁹ bits that the unit saves", leaves=1),
        words("format", [one.format for one in units], leaves=2),
    ]
    names = [Row(one.name, "" if one.damage.is_changed else "equal weights") for one in units]
    return Table(names, columns, title, corner="unit")


def account_facts(found: Attribution, candidate: CandidateDamage) -> Facts:
    """From units that are swapped alone to the whole, and to the model as it is served."""
    account, facts = found.account(candidate), Facts()
    ratio = "" if account.ratio is None else f"{account.ratio:.3f} of all weights together"
    lines: list[tuple[str, Estimate | None, str]] = [
        ("sum of parts", account.parts, ratio),
        ("interaction", account.interaction, "what units do to each other's damage"),
        ("all weights", account.whole, "swapped together"),
        ("rest", account.rest, "activations, K/V cache and kernels: not in the weights"),
        ("served", account.served, f"by {candidate.served_by}"),
    ]
    for name, own, about in lines:
        if own is not None:
            facts.line(name, estimate(own).words, about)
    return facts


def recipe_blocks(found: Attribution, recipe: Recipe) -> list[Block]:
    cells = found.cells
    rows: list[tuple[str, float, Estimate, Estimate | None]] = [
        ("mixture", recipe.bits_per_weight, recipe.measured(cells), None)
    ]
    for one in recipe.uniform:
        kl = cells.mean(one.whole.kl, HELD_OUT, within="positive")
        rows.append((one.name, one.bits_per_weight, kl, recipe.difference(cells, one)))
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


def attribution_notes(found: Attribution) -> list[str]:
    groups = counted(found.cells.groups, "groups")
    errors = f"errors are over {groups} ({found.cells.kind})"
    if found.cells.groups < FEWEST:
        errors = f"no errors: the text has {groups}, and {FEWEST} are needed"
    floor = "no noise floor"
    if found.noise is not None:
        floor = f"noise floor: KL {rounded(found.noise)[0]} of the baseline to itself"
    of_candidates = [
        note if note.startswith(one.name) else f"{one.name}: {note}" for one in found.candidates for note in one.notes
    ]
    return [
        f"{found.cells.count:,} tokens of {found.facts['corpus']}; KL in nats per token; {errors}",
        f"{floor} ({found.noise_perturbed})",
        *found.notes,
        *of_candidates,
    ]


# ── profiles by layer and routes of experts ──────────────────────────────────────────────────────────────────────────
def depth_profile_blocks(found: DepthProfile) -> list[Block]:
    out = {place.name for place in found.out_of_line}
    table = Table(
        [Row(place.name + (" ◀" if place.name in out else "")) for place in found.places],
        [
            _column("error", [place.error for place in found.places]),
            _column("own error", [place.own_error for place in found.places]),
            _column("cosine", [place.cosine for place in found.places]),
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
    shares = [_column("other experts", [share for _, share in found.changed], percent=True)]
    table = Table([Row(name) for name, _ in found.changed], shares, "routes of experts")
    kinds = {"a changed route": found.kl_changed, "no changed route": found.kl_same, "all tokens": found.kl}
    split = [
        Column("tokens", [Cell(f"{e.n:,}") for e in kinds.values()]),
        _column("KL", list(kinds.values())),
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
