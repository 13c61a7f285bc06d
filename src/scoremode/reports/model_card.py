"""Comparisons for a model card: Markdown tables that say how they were made, and the hub's ``model-index``.

The words are in templates: model_card.md and model_index.yaml. Names come from untrusted files. In
Markdown, every character with a special meaning is written as an entity. In YAML, every string is quoted as JSON, which
YAML can read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from scoremode.core.statistics.comparison import BY_NAME, Comparison
from scoremode.core.statistics.statistic import Statistic
from scoremode.errors import RunError, harmless
from scoremode.reports.jinja import environment
from scoremode.reports.numbers import SHOWN, baseline_perplexity, file_size, shown_statistic
from scoremode.reports.public_text import command_of_question, public_command, public_name, public_words
from scoremode.reports.served import (
    ServedModel,
    are_variants,
    baseline_name,
    engine_version,
    in_order,
    served,
    served_manifest,
)
from scoremode.reports.text import model_notes, noise_words, notes_on_candidates, top_words
from scoremode.reports.verdicts import rule_words, verdicts
from scoremode.values import rounded, usable

if TYPE_CHECKING:
    import jinja2

NOTHING = "–"
ServedCell = Callable[[ServedModel], str]
# an entity never opens or closes anything in Markdown, but its character may; `_` stays legible in names like Q4_K_M
ENTITIES = str.maketrans({c: f"&#{ord(c)};" for c in "\\`|<>&*[]~$@"} | {"_": "\\_"})
LINK_STARTS = re.compile(r"(?i):(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):")  # GFM turns bare addresses into links
# settings of a method: those that are shown first, and what they are called
SETTINGS = {"context_length": "context", "stride": "stride", "path": "path"}


@cache
def _environment() -> jinja2.Environment:
    made = environment(lambda value: value if isinstance(value, Markup) else Markup(escaped_markdown(value)))
    made.filters["one_line"] = lambda text: Markup(" ".join(line for line in text.split("\n") if line))
    made.globals.update(cell=cell, code=code, plain_number=plain_number, quoted=quoted)
    made.globals.update(NOTHING=NOTHING)
    return made


def fill_card(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values).rstrip("\n") + "\n"


def escaped_markdown(text: object) -> str:
    """Text that Markdown shows literally, on one line.

    >>> escaped_markdown("a|b <i> Q4_K_M")
    'a&#124;b &#60;i&#62; Q4\\\\_K\\\\_M'
    """
    plain = harmless(str(text)).translate(ENTITIES)
    return LINK_STARTS.sub(lambda found: f"&#{ord(found[0])};", plain)


def code(text: str) -> Markup:
    """Text as inline code; it may contain backticks."""
    plain = harmless(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return Markup(f"{fence}{space}{plain}{space}{fence}")


def cell(statistics: Mapping[str, Any], name: str, percent: bool = False) -> str:
    """A number of tasks as in ``12.74 ± 0.31``; a dash if there is no value."""
    return " ".join(rounded(statistics.get(name), statistics.get(f"{name}_stderr"), percent=percent)).rstrip()


def shown_cell(measure: Statistic, statistics: Mapping[str, Any]) -> str:
    """A statistic of a comparison; a dash if there is no value."""
    return " ".join(shown_statistic(measure, statistics)).rstrip()


def quoted(text: str) -> Markup:
    """Text as a JSON string, not escaped to ASCII: YAML readers do not join the halves of an escaped surrogate pair."""
    return Markup(json.dumps(harmless(text), ensure_ascii=False))


def plain_number(value: float) -> str:
    """A number with six digits and no exponent: YAML 1.1 would read an exponent as a string."""
    return np.format_float_positional(value, precision=6, unique=False, fractional=False, trim="0")


# ── comparisons on texts ─────────────────────────────────────────────────────────────────────────────────────────────
def markdown(comparisons: Sequence[Comparison], statistics: Sequence[Mapping[str, Any]]) -> str:
    """A table with one row per candidate, and below it how to reproduce the numbers.

    >>> print(markdown([comparison], [comparison_statistics(comparison)]))   # doctest: +SKIP
    | model | bits per weight | perplexity | ratio | KL mean (nats) | KL 99 % | same top |
    """
    if not comparisons:
        raise RunError("there is no comparison to publish", fix="compare at least one candidate")
    first, m = comparisons[0], comparisons[0].baseline.manifest
    for c in comparisons:
        if c.baseline.plan_digest != first.baseline.plan_digest:
            raise RunError(f"{first.name} and {c.name} were scored by different plans", fix="publish them separately")
    facts = [served(c) for c in comparisons]
    columns = {measure.name: measure.card for measure in SHOWN if measure.card}
    judged = verdicts(comparisons, statistics)
    notes = [noise_words(first, statistics[0]), *(f"Baseline: {note}" for note in model_notes(first.baseline))]
    notes += notes_on_candidates(comparisons)
    return fill_card(
        "model_card.md",
        table=Markup(card_table(comparisons, statistics, _kinds([served_manifest(m), *facts]), columns)),
        verdicts=[(comparisons[i].name, public_words(judged[i].sentence), judged[i].scale) for i in in_order(facts)],
        verdict_rule=rule_words(comparisons),
        m=m,
        corpus=public_name(str(m["corpus"])),
        s=statistics[0],
        rule=method_words(m),
        plan=first.baseline.plan_digest,
        served_by=engine_words({"baseline": m} | {f"candidate {c.name}": c.candidate.manifest for c in comparisons}),
        notes=[public_words(note) for note in (*notes, *dict.fromkeys(map(top_words, comparisons))) if note],
        commands=public_commands(comparisons) or _asked_again(comparisons),
    )


def card_table(
    comparisons: Sequence[Comparison],
    statistics: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, ServedCell],
    columns: Mapping[str, str],
    *,
    role: str = "baseline",
) -> str:
    """The table of every card: the baseline, then the candidates in groups of one format and engine.

    ``kinds`` are columns that say how a model was served, ``columns`` titles of statistics by name.
    """
    manifest, facts = comparisons[0].baseline.manifest, [served(c) for c in comparisons]
    named = f"{baseline_name(comparisons, public_name(str(manifest['model'])))} ({role})"
    own = {"ppl_candidate": baseline_perplexity(statistics)}
    header = ["model", *kinds, *columns.values()]
    base = served_manifest(manifest)
    rows = [[named, *(cell(base) for cell in kinds.values()), *(own.get(name, NOTHING) for name in columns)]]
    for i in in_order(facts):
        numbers = [shown_cell(BY_NAME[name], statistics[i]) for name in columns]
        rows.append([comparisons[i].name, *(cell(facts[i]) for cell in kinds.values()), *numbers])
    ruled = ["---" if title in ("model", "format", "engine") else "---:" for title in header]
    lines = [header, ruled, *(map(escaped_markdown, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bits_cell(its: ServedModel) -> str:
    return NOTHING if its.bits_per_weight is None else f"{its.bits_per_weight:.2f}"


def size_cell(its: ServedModel) -> str:
    return file_size(its.size)


def _kinds(facts: Sequence[ServedModel]) -> dict[str, ServedCell]:
    """Columns that say how each row was served; the first of the facts are the baseline's.

    Format and engine, if a format is known or engines differ; bits per weight if any candidate has them, else size.
    """
    found: dict[str, ServedCell] = {}
    formats = [f.format_and_body for f in facts]
    if any(formats):
        found["format"] = lambda its: its.format_and_body or NOTHING
    if any(formats) or len({f.engine for f in facts}) > 1:
        found["engine"] = lambda its: its.engine or NOTHING
    if any(f.bits_per_weight is not None for f in facts[1:]):
        found["bits overall" if any("-bit body" in text for text in formats) else "bits per weight"] = bits_cell
    elif any(f.size is not None for f in facts[1:]):
        found["size"] = size_cell
    return found


def method_words(manifest: Mapping[str, Any]) -> str:
    settings = manifest.get("method_settings", {})
    ordered = [name for name in SETTINGS if name in settings] + sorted(settings.keys() - SETTINGS.keys())
    given = ", ".join(f"{SETTINGS.get(name, name)} {settings[name]}" for name in ordered)
    return f"{manifest['method']} ({given})" if given else str(manifest["method"])


def engine_words(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The engine of every side, its version, and how it computed."""
    found = {}
    for side, m in manifests.items():
        versions, version = m.get("versions", {}), engine_version(m)
        named = m["engine"] + (f" {version}" if version else "")
        how = [str(m["dtype"]), f"head {m['head']}"] if "dtype" in m and "head" in m else []
        ours = [f"scoremode {versions['scoremode']}"] if "scoremode" in versions else []
        found[side] = ", ".join([named, *how, *ours])
    return found


def public_commands(found: Sequence[Any]) -> list[str]:
    """The distinct commands that made these comparisons, as far as they are known."""
    distinct = dict.fromkeys(public_command(c.manifest.get("command") or "") for c in found)
    return [command for command in distinct if command]


def _asked_again(comparisons: Sequence[Comparison]) -> list[str]:
    """A command for stored runs, which do not keep the command that made them; none for variants of a model."""
    if are_variants(comparisons):
        return []
    first, candidates = comparisons[0].baseline.manifest, [str(c.candidate.manifest["model"]) for c in comparisons]
    command = command_of_question(first, str(first["model"]), candidates)
    return [command] if command else []


def model_index(comparison: Comparison, statistics: Mapping[str, Any]) -> str:
    """The ``model-index`` block of a model card's metadata, to paste between its two ``---`` lines.

    Only metrics that have a value are written: the hub accepts no empty metric.
    """
    m = comparison.baseline.manifest
    corpus, rule = public_name(str(m["corpus"])), method_words(m)
    named, baseline = f"{corpus}, sha256 {m['corpus_sha256'][:12]}", public_name(str(m["model"]))
    metrics = (
        ("perplexity", f"perplexity, {rule}", "ppl_candidate"),
        ("perplexity_ratio", f"perplexity ratio to {baseline}, {rule}", "ppl_ratio"),
        ("kl_divergence", f"mean KL divergence from {baseline} in nats, {rule}", "kl_mean"),
    )
    known = [
        (kind, label, float(shown_statistic(BY_NAME[name], statistics)[0].replace(",", "")))
        for kind, label, name in metrics
        if (value := usable(statistics.get(name))) is not None and math.isfinite(value)
    ]
    if not known:
        raise RunError(f"{comparison.name} has no metric that the hub could show", fix="compare on a longer text")
    return fill_card("model_index.yaml", name=comparison.name, results=[(corpus, named, known)])
