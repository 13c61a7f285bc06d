"""Comparisons as parts of a README, in the dialects that people publish; none contains a folder of this machine.

markdown      the table, a sentence per candidate, how to reproduce it
compact       a table of five columns and one line
exl3          bits per weight, KL divergence, top-1 agreement, perplexity
model-index   the hub's metadata
of wings      the lines of another tool, such as llama.cpp's, in a code block

The words are in templates: model_card.md and model_index.yaml. Names come from untrusted files. In
Markdown, every character with a special meaning is written as an entity. In YAML, every string is quoted as JSON, which
YAML can read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from scoremode.core.extensions import FormatOffer, offered
from scoremode.core.statistics.comparison import BY_NAME, Comparison
from scoremode.errors import RunError, harmless
from scoremode.head.budget import FIRST
from scoremode.reports.comparisons import bits_cell, card_table, summary
from scoremode.reports.jinja import environment
from scoremode.reports.numbers import file_size, shown_statistic
from scoremode.reports.public_text import public_command, public_name, public_words
from scoremode.reports.served import engine_version
from scoremode.reports.table import NOTHING, Cell, Table
from scoremode.reports.text import method_words
from scoremode.values import usable
from scoremode.version import __version__

if TYPE_CHECKING:
    import jinja2

# an entity never opens or closes anything in Markdown, but its character may; `_` stays legible in names like Q4_K_M
ENTITIES = str.maketrans({c: f"&#{ord(c)};" for c in "\\`|<>&*[]~$@"} | {"_": "\\_"})
LINK_STARTS = re.compile(r"(?i):(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):")  # GFM turns bare addresses into links


@cache
def _environment() -> jinja2.Environment:
    made = environment(lambda value: value if isinstance(value, Markup) else Markup(escaped_markdown(value)))
    made.filters["one_line"] = lambda text: Markup(" ".join(line for line in text.split("\n") if line))
    made.globals.update(code=code, plain_number=plain_number, quoted=quoted)
    return made


def fill_card(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values).rstrip("\n") + "\n"


def escaped_markdown(text: object) -> str:
    """Text that Markdown shows literally, on one line.

    >>> escaped_markdown("a|b <i> Q4_K_M")
    'a&#124;b &#60;i&#62; Q4\\\\_K\\\\_M'
    """
    plain = harmless(str(text)).translate(ENTITIES)
    return LINK_STARTS.sub(lambda match: f"&#{ord(match[0])};", plain)


def code(text: str) -> Markup:
    """Text as inline code; it may contain backticks."""
    plain = harmless(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return Markup(f"{fence}{space}{plain}{space}{fence}")


def quoted(text: str) -> Markup:
    """Text as a JSON string, not escaped to ASCII: YAML readers do not join the halves of an escaped surrogate pair."""
    return Markup(json.dumps(harmless(text), ensure_ascii=False))


def plain_number(value: float) -> str:
    """A number with six digits and no exponent: YAML 1.1 would read an exponent as a string."""
    return np.format_float_positional(value, precision=6, unique=False, fractional=False, trim="0")


# ── comparisons on texts ─────────────────────────────────────────────────────────────────────────────────────────────
def markdown(comparisons: Sequence[Comparison]) -> str:
    """A table with one row per candidate, and below it how to reproduce the numbers.

    >>> print(markdown([comparison]))   # doctest: +SKIP
    | model | bits per weight | perplexity | ratio | KL mean (nats) | KL 99 % | same top |
    """
    first, m = comparisons[0], comparisons[0].baseline.manifest
    for c in comparisons:
        if c.baseline.plan_digest != first.baseline.plan_digest:
            raise RunError(f"{first.name} and {c.name} were scored by different plans", fix="publish them separately")
    shown = summary(comparisons)
    return fill_card(
        "model_card.md",
        table=Markup(markdown_table(shown.table)),
        verdicts=[(name, public_words(verdict.sentence), verdict.scale) for _, name, verdict in shown.verdicts],
        verdict_rules=shown.rules,
        m=m,
        corpus=public_name(str(m["corpus"])),
        s=first.statistics(),
        rule=method_words(m),
        plan=first.baseline.plan_digest,
        served_by=engine_words({"baseline": m} | {f"candidate {c.name}": c.candidate.manifest for c in comparisons}),
        notes=[public_words(note.text) for note in shown.notes],
        commands=public_commands(comparisons),
    )


def markdown_table(table: Table) -> str:
    """The columns of a table that have a title for cards."""
    columns = [column for column in table.columns if column.card]
    header = [table.corner or "model", *(escaped_markdown(column.card) for column in columns)]
    lines = [header, ["---", *("---:" if column.number else "---" for column in columns)]]
    for i, row in enumerate(table.rows):
        if row.page_only:
            continue
        name = escaped_markdown(f"{row.name} ({row.tag})" if row.tag else row.name)
        cells = [NOTHING if cell is None else cell.words for cell in (column.cells[i] for column in columns)]
        lines.append([f"**{name}**" if row.strong else name, *map(escaped_markdown, cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def engine_words(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The engine of every side, its version, and how it computed."""
    engines = {}
    for side, m in manifests.items():
        versions, version = m.get("versions", {}), engine_version(m)
        engine = m["engine"] + (f" {version}" if version else "")
        how = [str(m["dtype"]), f"head {m['head']}"] if "dtype" in m and "head" in m else []
        ours = [f"scoremode {versions['scoremode']}"] if "scoremode" in versions else []
        engines[side] = ", ".join([engine, *how, *ours])
    return engines


def public_commands(comparisons: Sequence[Any]) -> list[str]:
    """The distinct commands that made these comparisons, as far as they are known."""
    distinct = dict.fromkeys(public_command(c.manifest.get("command") or "") for c in comparisons)
    return [command for command in distinct if command]


def model_index(comparison: Comparison) -> str:
    """The ``model-index`` block of a model card's metadata, to paste between its two ``---`` lines.

    Only metrics that have a value are written: the hub accepts no empty metric.
    """
    m, statistics = comparison.baseline.manifest, comparison.statistics()
    corpus, rule = public_name(str(m["corpus"])), method_words(m)
    dataset, baseline = f"{corpus}, sha256 {m['corpus_sha256'][:12]}", public_name(str(m["model"]))
    metrics = (
        ("perplexity", f"perplexity, {rule}", "ppl_candidate"),
        ("perplexity_ratio", f"perplexity ratio to {baseline}, {rule}", "ppl_ratio"),
        ("kl_divergence", f"mean KL divergence from {baseline} in nats, {rule}", "kl_mean"),
    )
    figures = [
        (kind, label, float(shown_statistic(BY_NAME[name], statistics)[0].replace(",", "")))
        for kind, label, name in metrics
        if (value := usable(statistics.get(name))) is not None and math.isfinite(value)
    ]
    if not figures:
        raise RunError(f"{comparison.name} has no metric that the hub could show", fix="compare on a longer text")
    return fill_card("model_index.yaml", name=comparison.name, results=[(corpus, dataset, figures)])


# ── other dialects ───────────────────────────────────────────────────────────────────────────────────────────────────
def _how(comparisons: Sequence[Comparison]) -> str:
    m, s = comparisons[0].baseline.manifest, comparisons[0].statistics()
    text = f"{public_name(str(m['corpus']))} (sha256 {m['corpus_sha256'][:12]})"
    counted = f"{s['targets']:,} tokens, ± over {s['groups']:,} {comparisons[0].baseline.group_kind}"
    return escaped_markdown(f"{method_words(m)} on {text}, {counted}; scoremode {__version__}.")


def compact(comparisons: Sequence[Comparison]) -> str:
    """A table of five columns, and one line that says how it was made."""
    columns = {"ppl_candidate": "perplexity", "kl_mean": "KL", "same_top": "same top"}
    table = card_table(
        comparisons, ("size", lambda model: Cell(file_size(model.size)) if model and model.size else None), columns
    )
    return f"{markdown_table(table)}\n\n{_how(comparisons)}\n"


def exl3(comparisons: Sequence[Comparison]) -> str:
    """The measures of ExLlamaV3's comparisons: KL both ways, and agreement on the first 1 to 5 choices."""
    tops = {"same_top": 1, **{f"top{count}_same": count for count in range(2, FIRST + 1)}}
    columns = {
        "kl_mean": "KL divergence (original, quantized)",
        "kl_reverse_mean": "KL divergence (quantized, original)",
    }
    columns |= {name: f"top-{count} agreement" for name, count in tops.items()} | {"ppl_candidate": "perplexity"}
    table = card_table(comparisons, ("bpw", bits_cell), columns)
    table = replace(table, rows=[replace(row, tag=row.tag.replace("baseline", "original")) for row in table.rows])
    every = [c.statistics() for c in comparisons]
    is_whole = all(s["kl_reverse_mean"] is not None and s["top5_same"] is not None for s in every)
    missing = "" if is_whole else f" {NOTHING} in a row of a model: not measured, or infinite."
    return f"{markdown_table(table)}\n\n{_how(comparisons)}{missing}\n"


def in_code_blocks(layout: FormatOffer, comparisons: Sequence[Comparison]) -> str:
    """The lines of another tool for every candidate."""
    lines = layout.load()
    blocks = [f"{code(c.name)}\n\n```\n{lines.text(c).strip()}\n```\n" for c in comparisons]
    return "\n".join([*blocks, f"{layout.title}. {_how(comparisons)}\n"])


def metadata(comparisons: Sequence[Comparison]) -> str:
    """``model-index`` of all candidates; YAML allows the key once."""
    return "model-index:\n" + "".join(model_index(c).partition("\n")[2] for c in comparisons)


ReadmePart = Callable[[Sequence[Comparison]], str]


def readme_parts() -> dict[str, ReadmePart]:
    """The dialects that are parts of a README, those of wings too."""
    parts: dict[str, ReadmePart] = {"markdown": markdown, "compact": compact, "exl3": exl3, "model-index": metadata}
    return parts | {kind.name: partial(in_code_blocks, kind) for kind in offered(FormatOffer) if kind.layout}
