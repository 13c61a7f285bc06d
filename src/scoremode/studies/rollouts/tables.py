"""What is shown of texts that a model wrote: the texts, partings, changes, mismatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scoremode.reports.runs import model_line
from scoremode.reports.table import Block, Cell, Column, Facts, Fields, Note, Row, Table, counts, number, numbers
from scoremode.reports.text import counted, shown
from scoremode.studies.rollouts.mismatch import Mismatch
from scoremode.studies.rollouts.readings import Reading
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import rounded

FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # of draws, and what leaves nothing out


# ── texts that candidates read ───────────────────────────────────────────────────────────────────────────────────────
def readings_blocks(readings: Sequence[Reading]) -> list[Block]:
    """What texts that a model wrote say about candidates: partings, ratios, examples."""
    parted = [(i, r.reader, r.partings.statistics()) for i, r in enumerate(readings) if r.partings is not None]
    read = [(i, r.writer, r.reader, r.read.statistics()) for i, r in enumerate(readings) if r.read is not None]
    blocks = [*parting_blocks(parted)] if parted else []
    blocks += text_ratios_blocks(read) if read else []
    for reading in (reading for reading in readings if reading.examples):
        blocks += ["", Note(f"where {reading.reader} would most clearly have written something else", "bold")]
        for before, sentence in example_words(reading):
            blocks += [Note(f"after “{before}”", "dim"), Note(f"  {sentence}")]
    return blocks


def parting_blocks(readers: Sequence[tuple[int, str, Fields]]) -> list[Block]:
    """Where candidates part from greedy texts: each name with ``Partings.statistics()`` of the same texts."""
    rows = [s for *_, s in readers]
    without, ties = "no other choice is beyond the noise", "the candidate has the same first choice at every token"
    columns = [
        counts("texts", rows, "texts"),
        numbers("without a parting", rows, "without_parting", percent=True, about=f"share of texts at which {without}"),
        numbers("near-ties too", rows, "without_other_choice", percent=True, about=f"share of texts at which {ties}"),
        counts("half part by token", rows, "median_parting", about="the length that at most half of the texts reach"),
        counts("other choices", rows, "other_choices", about="tokens at which it has another first choice"),
        counts("near-ties", rows, "near_ties", about="those of them that are within the noise"),
    ]
    summary = Table([Row(name, series=i) for i, name, _ in readers], columns, "partings", "candidate")
    lines = [row["survival"] for row in rows]
    if not lines[0]:
        return ["", summary]
    lengths = [Row(counted(row["length"], "tokens")) for row in lines[0]]
    curves = [
        Column(name, [_bounded(r) for r in line], page=name) for (_, name, _), line in zip(readers, lines, strict=True)
    ]
    title = "texts that go on without a parting, with 95 % bounds (Kaplan-Meier)"
    noise = rows[0]["noise"]
    floor = f"at most {noise:.3g} nats likelier than the text's token" if noise else "exactly as likely"
    definition = f"a near-tie is another first choice that is {floor}"
    return [
        "",
        summary,
        "",
        Table(lengths, [counts("texts left", lines[0], "texts"), *curves], title),
        Note(f"{definition}; errors are over {counted(rows[0]['groups'], 'prompts')}", "dim"),
    ]


def _bounded(row: Fields) -> Cell:
    names = ("no_parting", "no_parting_low", "no_parting_high")
    value, low, high = ("–" if row[name] is None else f"{100 * row[name]:.1f}%" for name in names)
    return Cell(value, f"{low} to {high}" if row["no_parting_low"] is not None else "")


def text_ratios_blocks(readers: Sequence[tuple[int, str, str, Fields]]) -> list[Block]:
    """What readers think of a writer's sampled texts: ``TextRatios.statistics()``."""
    rows = [s for *_, s in readers]
    ratio = "its perplexity on the texts, divided by the writer's own"
    columns = [
        counts("texts", rows, "texts"),
        counts("tokens", rows, "tokens"),
        numbers("log-ratio per text", rows, "log_ratio", sign="+", about="mean of Σ (ln reader − ln writer), nats"),
        numbers("perplexity ratio", rows, "ppl_ratio", about=ratio),
    ]
    names = [Row(f"texts of {writer}, read by {reader}", series=i) for i, writer, reader, _ in readers]
    impossible = sum(row["impossible"] for row in rows)
    note = f"{counted(impossible, 'tokens')} of the texts have probability zero for their reader"
    return ["", Table(names, columns), *([Note(note, "yellow")] if impossible else [])]


def example_words(reading: Reading) -> list[tuple[str, str]]:
    """For each example, the text before it, and a sentence on what was written there and what the reader prefers."""
    examples = []
    for example in reading.examples:
        written, prefers = repr(example.written), repr(example.prefers)
        gap = "" if example.gap is None else f", a gap of {rounded(example.gap)[0]} nats"
        sentence = (
            f"{reading.writer} wrote {written} ({_chance(example.p_writer)}); {reading.reader} prefers {prefers} "
            f"({_chance(example.p_prefers)}) and gives {written} {_chance(example.p_reader)}{gap}"
        )
        examples.append((shown(example.before), shown(sentence)))
    return examples


def _chance(p: float) -> str:
    return f"{100 * p:.1f}%" if p == 0 or p >= 0.001 else "below 0.1%"


# ── trainer against rollout ──────────────────────────────────────────────────────────────────────────────────────────
def mismatch_blocks(mismatch: Mismatch) -> list[Block]:
    s, by_position, by_slice = mismatch.statistics(), mismatch.by_position(), mismatch.by_slice()

    def estimate(name: str, *, percent: bool = False) -> str:
        return number(s[name], s.get(f"{name}_stderr"), percent=percent).words

    def spread(prefix: str) -> str:
        return " · ".join(rounded(s[f"{prefix}_{name}"])[0] for name in ("min", "p01", "median", "p99", "max"))

    (low, high), facts = s["clip"], Facts()
    samples, prompts = counted(s["samples"], "samples"), counted(s["prompts"], "prompts")
    facts.line("texts", f"{s['tokens']:,} tokens of {samples}, {prompts}")
    if s["kl_infinite"] is not None:
        facts.line("KL(rollout‖trainer), exact", estimate("kl"))
    for name in ("k1", "k2", "k3"):
        facts.line(name, estimate(name))
    for prefix, of in (("", ""), ("sequence_", " of sequences")):
        suffix = of or ": min, 1 %, median, 99 %, max"
        facts.line(f"ratios{suffix}", spread(f"{prefix}ratio"))
        facts.line(f"{of[4:]} outside {low:g} to {high:g}".lstrip(), estimate(f"{prefix}outside_clip", percent=True))
        facts.line(f"effective sample size{of}", estimate(f"{prefix}effective_sample_size", percent=True))
    facts.line("impossible for the trainer", counted(s["zero_probability"], "tokens"))
    title = Note(f"{s['name']} against the rollouts of {s['rollout']}", "bold")
    blocks: list[Block] = [title, facts]
    stretches = by_position if len(by_position) > 1 else []  # a single one would repeat the mean
    for heading, rows, names in (
        ("by position in the text", stretches, [Row(f"{row['first']:,} to {row['last']:,}") for row in stretches]),
        ("by slice", by_slice, [Row(str(row["slice"])) for row in by_slice]),
    ):
        if rows:
            columns = [
                counts("tokens", rows, "tokens"),
                numbers("k3", rows, "k3", page="k3", about="mean of r − 1 − ln r, nats per token"),
                numbers("KL", rows, "kl", about="exact KL(rollout‖trainer)"),
                numbers("outside clip", rows, "outside_clip", percent=True, about="share of ratios outside the range"),
            ]
            blocks += ["", Table(names, [column for column in columns if any(column.cells)], heading)]
    return [*blocks, *(Note(note, "yellow") for note in s["notes"])]


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def rollouts_blocks(rollouts: Rollouts, folder: str) -> list[Block]:
    m, facts = rollouts.manifest, Facts()
    lengths = [len(ids) for ids in rollouts.written]
    facts.line("texts", f"{len(rollouts):,} of {rollouts.prompts:,} prompts")
    facts.line("tokens", f"{rollouts.tokens:,} written, {np.mean(lengths):,.1f} per text")
    facts.line("ended by", ", ".join(f"{name} {count:,}" for name, count in m["finish"].items() if count))
    facts.line("drawn", drawn_line(m))
    if rollouts.tokens:
        raw = np.concatenate(rollouts.raw_logprob)
        facts.line("logprob", f"{raw.mean():.4f} per token in the model's own distribution")
    for note in m["notes"]:
        facts.line("", note, style="yellow")
    facts.line("model", model_line(m))
    return [facts, "", Note(f"kept in {folder}; scoremode ppl MODEL --corpus rollouts:{folder}")]


def drawn_line(manifest: Fields) -> str:
    sampling = manifest["sampling"]
    if not sampling["temperature"]:
        return "greedily"
    filters = [
        f"{name.replace('_', '-')} {sampling[name]:g}" for name, none in FILTERS.items() if sampling[name] != none
    ]
    return ", ".join([f"temperature {sampling['temperature']:g}", *filters, f"seed {manifest['seed']}"])
