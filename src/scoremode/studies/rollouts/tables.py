"""Texts that a model wrote, as tables for a terminal: what was written, partings, changes, mismatch, drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from scoremode.reports.terminal.comparison_tables import above_error
from scoremode.reports.terminal.console import BlockTable, Facts, TableColumn
from scoremode.reports.terminal.run_tables import model_line
from scoremode.reports.text import counted, shown
from scoremode.studies.rollouts.readings import Reading
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import rounded

Row = Mapping[str, Any]
FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # of draws, and what leaves nothing out


def _column(title: str, rows: Sequence[Row], name: str, **how: Any) -> TableColumn:
    return TableColumn(title, [above_error(row, name, **how) for row in rows])


def _counts(title: str, rows: Sequence[Row], name: str) -> TableColumn:
    return TableColumn(title, ["-" if row[name] is None else f"{row[name]:,}" for row in rows])


def _stretch(row: Row) -> str:
    return f"{row['first']:,} to {row['last']:,}"


# ── partings and texts of their own ──────────────────────────────────────────────────────────────────────────────────
def parting_table(found: Sequence[tuple[str, Row]]) -> list[Any]:
    """Where candidates part from greedy texts: each name with ``Partings.statistics()`` of the same texts."""
    rows = [s for _, s in found]
    summary = BlockTable(
        [shown(name) for name, _ in found],
        [
            _counts("texts", rows, "texts"),
            _column("without a parting", rows, "without_parting", percent=True),
            _column("near-ties too", rows, "without_other_choice", percent=True),
            _counts("half part by token", rows, "median_parting"),
            _counts("other choices", rows, "other_choices"),
            _counts("near-ties", rows, "near_ties"),
        ],
    )
    lines = [row["survival"] for row in rows]
    if not lines[0]:
        return [summary]
    lengths = [counted(row["length"], "tokens") for row in lines[0]]
    curves = [_bounded(shown(name), own) for (name, _), own in zip(found, lines, strict=True)]
    noise = rows[0]["noise"]
    floor = f"at most {noise:.3g} nats likelier than the text's token" if noise else "exactly as likely"
    words = f"a near-tie is another first choice that is {floor}"
    return [
        summary,
        "",
        Text("texts that go on without a parting, with 95 % bounds (Kaplan-Meier)", "bold"),
        BlockTable(lengths, [_counts("texts left", lines[0], "texts"), *curves]),
        Text(f"{words}; errors are over {counted(rows[0]['groups'], 'prompts')}", "dim"),
    ]


def _bounded(title: str, rows: Sequence[Row]) -> TableColumn:
    cells = []
    for row in rows:
        value, low, high = (
            "-" if row[name] is None else f"{100 * row[name]:.1f}%"
            for name in ("no_parting", "no_parting_low", "no_parting_high")
        )
        cells.append(f"{value}\n{low} to {high}" if low != "-" else value)
    return TableColumn(title, cells)


def text_ratios_table(found: Sequence[tuple[str, str, Row]]) -> list[Any]:
    """What a reader thinks of a writer's sampled texts: writer, reader, and ``TextRatios.statistics()``."""
    rows = [s for *_, s in found]
    table = BlockTable(
        [shown(f"texts of {writer}, read by {reader}") for writer, reader, _ in found],
        [
            _counts("texts", rows, "texts"),
            _counts("tokens", rows, "tokens"),
            _column("log-ratio per text", rows, "log_ratio", sign="+"),
            _column("perplexity ratio", rows, "ppl_ratio"),
        ],
    )
    impossible = sum(row["impossible"] for row in rows)
    notes = (
        [f"{counted(impossible, 'tokens')} of the texts have probability zero for their reader"] if impossible else []
    )
    return [table, *(Text(note, "yellow") for note in notes)]


EXAMPLES = "where {reader} would most clearly have written something else"


def example_words(words: Reading) -> list[tuple[str, str]]:
    """For each example the text before it, and what was written there and what the reader prefers."""
    found = []
    for one in words.examples:
        written, prefers = repr(one.written), repr(one.prefers)
        gap = "" if one.gap is None else f", a gap of {rounded(one.gap)[0]} nats"
        sentence = (
            f"{words.writer} wrote {written} ({_chance(one.p_writer)}); {words.reader} prefers {prefers} "
            f"({_chance(one.p_prefers)}) and gives {written} {_chance(one.p_reader)}{gap}"
        )
        found.append((shown(one.before), shown(sentence)))
    return found


def _chance(p: float) -> str:
    return f"{100 * p:.1f}%" if p == 0 or p >= 0.001 else "below 0.1%"


def readings_tables(found: Sequence[Reading]) -> list[Any]:
    """What texts that a model wrote say about candidates."""
    parted = [(one.reader, one.partings.statistics()) for one in found if one.partings is not None]
    read = [(one.writer, one.reader, one.read.statistics()) for one in found if one.read is not None]
    parts = ["", *parting_table(parted)] if parted else []
    parts += ["", *text_ratios_table(read)] if read else []
    for one in (one for one in found if one.examples):
        parts += ["", Text(shown(EXAMPLES.format(reader=one.reader)), "bold")]
        for before, sentence in example_words(one):
            parts += [Text(f"after “{before}”", "dim"), Text(f"  {sentence}")]
    for one in found:
        parts += ["", *speculation_table(one.reader, one.drafts.statistics())] if one.drafts is not None else []
    return parts


# ── trainer against rollout ──────────────────────────────────────────────────────────────────────────────────────────
def mismatch_facts(s: Row) -> list[tuple[str, str]]:
    """The main numbers of a trainer against rollouts, by label."""

    def said(name: str, *, percent: bool = False) -> str:
        return " ".join(rounded(s[name], s.get(f"{name}_stderr"), percent=percent)).rstrip()

    def spread(prefix: str) -> str:
        names = ("min", "p01", "median", "p99", "max")
        return " · ".join(rounded(s[f"{prefix}_{name}"])[0] for name in names)

    low, high = s["clip"]
    exact = [("KL(rollout‖trainer), exact", said("kl"))] if s["kl_infinite"] is not None else []
    return [
        ("texts", f"{s['tokens']:,} tokens of {counted(s['samples'], 'samples')}, {counted(s['prompts'], 'prompts')}"),
        *exact,
        *((f"k{i}", said(f"k{i}")) for i in (1, 2, 3)),
        ("ratios: min, 1 %, median, 99 %, max", spread("ratio")),
        (f"outside {low:g} to {high:g}", said("outside_clip", percent=True)),
        ("effective sample size", said("effective_sample_size", percent=True)),
        ("ratios of sequences", spread("sequence_ratio")),
        (f"sequences outside {low:g} to {high:g}", said("sequence_outside_clip", percent=True)),
        ("effective sample size of sequences", said("sequence_effective_sample_size", percent=True)),
        ("impossible for the trainer", counted(s["zero_probability"], "tokens")),
    ]


def mismatch_tables(s: Row, by_position: Sequence[Row], by_slice: Sequence[Row]) -> list[Any]:
    """A trainer against rollouts: ``Mismatch.statistics()``, ``by_position()`` and ``by_slice()``."""
    facts = Facts()
    for label, value in mismatch_facts(s):
        facts.line(label, shown(value))
    parts: list[Any] = [Text(shown(f"{s['name']} against the rollouts of {s['rollout']}"), "bold"), facts]
    for title, rows, names in (
        ("by position in the text", by_position, [_stretch(row) for row in by_position]),
        ("by slice", by_slice, [shown(str(row["slice"])) for row in by_slice]),
    ):
        if len(rows) > (rows is by_position):  # a single stretch would repeat the mean
            kl = [_column("KL", rows, "kl")] if rows[0].get("kl") is not None else []
            share = _column("outside clip", rows, "outside_clip", percent=True)
            parts += ["", Text(title, "bold")]
            parts.append(BlockTable(names, [_counts("tokens", rows, "tokens"), _column("k3", rows, "k3"), *kl, share]))
    return [*parts, *(Text(shown(note), "yellow") for note in s["notes"])]


# ── drafts ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def speculation_table(draft: str, s: Row) -> list[Any]:
    """What a draft model would give: its name and ``Speculation.statistics()``."""
    drafts = s["drafts"]
    rate = " ".join(rounded(s["acceptance"], s["acceptance_stderr"], percent=True)).rstrip()
    lengths = BlockTable(
        [f"{row['draft']} drafted" for row in drafts],
        [
            _column("tokens per step", drafts, "tokens_per_step"),
            TableColumn("last one accepted", [rounded(row["accepted_at"][-1], percent=True)[0] for row in drafts]),
            _column("Σ Π overlap", drafts, "by_overlap"),
            TableColumn("constant rate", [rounded(row["constant_rate"])[0] for row in drafts]),
        ],
    )
    parts = [Text(shown(f"{draft} as a draft model: {rate} of its tokens would be accepted"), "bold"), lengths]
    rows = s["by_position"]
    if len(rows) > 1:
        column = _column("accepted", rows, "acceptance", percent=True)
        table = BlockTable([_stretch(row) for row in rows], [_counts("tokens", rows, "targets"), column])
        parts += ["", Text("by position in the text", "bold"), table]
    return parts


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def rollouts_table(found: Rollouts, folder: str) -> list[Any]:
    """What was written, how it ended, and what to do with it."""
    m, table = found.manifest, Facts()
    lengths = [len(ids) for ids in found.written]
    table.line("texts", f"{len(found):,} of {found.prompts:,} prompts")
    table.line("tokens", f"{found.tokens:,} written, {np.mean(lengths):,.1f} per text")
    table.line("ended by", ", ".join(f"{name} {count:,}" for name, count in m["finish"].items() if count))
    table.line("drawn", drawn_line(m))
    if found.tokens:
        raw = np.concatenate(found.raw_logprob)
        table.line("logprob", f"{raw.mean():.4f} per token in the model's own distribution")
    for note in m["notes"]:
        table.line("", Text(shown(note), "yellow"))
    table.line("model", model_line(m))
    if m.get("tokens_per_second") is not None:
        table.line("speed", f"{m['tokens_per_second']:,.0f} tokens/s")
    name = shown(folder)
    return [table, Text(), Text(f"kept in {name}; scoremode ppl MODEL --corpus rollouts:{name}")]


def drawn_line(manifest: dict[str, Any]) -> str:
    """How tokens were drawn, in a few words."""
    sampling = manifest["sampling"]
    if not sampling["temperature"]:
        return "greedily"
    filters = [
        f"{name.replace('_', '-')} {sampling[name]:g}" for name, none in FILTERS.items() if sampling[name] != none
    ]
    return ", ".join([f"temperature {sampling['temperature']:g}", *filters, f"seed {manifest['seed']}"])
