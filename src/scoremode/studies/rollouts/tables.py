"""What is shown of texts that a model wrote: the texts, partings, changes, mismatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scoremode.reports.runs import model_line
from scoremode.reports.table import Block, Cell, Column, Facts, Note, Row, Table, counts, number, numbers
from scoremode.reports.text import counted, shown
from scoremode.studies.rollouts.readings import Reading
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import rounded

Fields = Mapping[str, Any]
FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # of draws, and what leaves nothing out


def _stretch(row: Fields) -> Row:
    return Row(f"{row['first']:,} to {row['last']:,}")


# ── texts that candidates read ───────────────────────────────────────────────────────────────────────────────────────
def readings_blocks(found: Sequence[Reading]) -> list[Block]:
    """What texts that a model wrote say about candidates: partings, ratios, examples."""
    parted = [(i, one.reader, one.partings.statistics()) for i, one in enumerate(found) if one.partings is not None]
    read = [(i, one.writer, one.reader, one.read.statistics()) for i, one in enumerate(found) if one.read is not None]
    blocks = [*parting_blocks(parted)] if parted else []
    blocks += text_ratios_blocks(read) if read else []
    for one in (one for one in found if one.examples):
        blocks += ["", Note(f"where {one.reader} would most clearly have written something else", "bold")]
        for before, sentence in example_words(one):
            blocks += [Note(f"after “{before}”", "dim"), Note(f"  {sentence}")]
    return blocks


def parting_blocks(found: Sequence[tuple[int, str, Fields]]) -> list[Block]:
    """Where candidates part from greedy texts: each name with ``Partings.statistics()`` of the same texts."""
    rows = [s for *_, s in found]
    without, ties = "no other choice is beyond the noise", "the candidate has the same first choice at every token"
    columns = [
        counts("texts", rows, "texts"),
        numbers("without a parting", rows, "without_parting", percent=True, about=f"share of texts at which {without}"),
        numbers("near-ties too", rows, "without_other_choice", percent=True, about=f"share of texts at which {ties}"),
        counts("half part by token", rows, "median_parting", about="the length that at most half of the texts reach"),
        counts("other choices", rows, "other_choices", about="tokens at which it has another first choice"),
        counts("near-ties", rows, "near_ties", about="those of them that are within the noise"),
    ]
    summary = Table([Row(name, series=i) for i, name, _ in found], columns, "partings", "candidate")
    lines = [row["survival"] for row in rows]
    if not lines[0]:
        return ["", summary]
    lengths = [Row(counted(row["length"], "tokens")) for row in lines[0]]
    curves = [
        Column(name, [_bounded(r) for r in own], page=name) for (_, name, _), own in zip(found, lines, strict=True)
    ]
    title = "texts that go on without a parting, with 95 % bounds (Kaplan-Meier)"
    noise = rows[0]["noise"]
    floor = f"at most {noise:.3g} nats likelier than the text's token" if noise else "exactly as likely"
    words = f"a near-tie is another first choice that is {floor}"
    return [
        "",
        summary,
        "",
        Table(lengths, [counts("texts left", lines[0], "texts"), *curves], title),
        Note(f"{words}; errors are over {counted(rows[0]['groups'], 'prompts')}", "dim"),
    ]


def _bounded(row: Fields) -> Cell:
    names = ("no_parting", "no_parting_low", "no_parting_high")
    value, low, high = ("–" if row[name] is None else f"{100 * row[name]:.1f}%" for name in names)
    return Cell(value, f"{low} to {high}" if row["no_parting_low"] is not None else "")


def text_ratios_blocks(found: Sequence[tuple[int, str, str, Fields]]) -> list[Block]:
    """What readers think of a writer's sampled texts: ``TextRatios.statistics()``."""
    rows = [s for *_, s in found]
    ratio = "its perplexity on the texts, divided by the writer's own"
    columns = [
        counts("texts", rows, "texts"),
        counts("tokens", rows, "tokens"),
        numbers("log-ratio per text", rows, "log_ratio", sign="+", about="mean of Σ (ln reader − ln writer), nats"),
        numbers("perplexity ratio", rows, "ppl_ratio", about=ratio),
    ]
    names = [Row(f"texts of {writer}, read by {reader}", series=i) for i, writer, reader, _ in found]
    impossible = sum(row["impossible"] for row in rows)
    note = f"{counted(impossible, 'tokens')} of the texts have probability zero for their reader"
    return ["", Table(names, columns), *([Note(note, "yellow")] if impossible else [])]


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


# ── trainer against rollout ──────────────────────────────────────────────────────────────────────────────────────────
def mismatch_blocks(s: Fields, by_position: Sequence[Fields], by_slice: Sequence[Fields]) -> list[Block]:
    """A trainer against rollouts: ``Mismatch.statistics()``, ``by_position()`` and ``by_slice()``."""

    def said(name: str, *, percent: bool = False) -> str:
        return number(s[name], s.get(f"{name}_stderr"), percent=percent).words

    def spread(prefix: str) -> str:
        return " · ".join(rounded(s[f"{prefix}_{name}"])[0] for name in ("min", "p01", "median", "p99", "max"))

    (low, high), facts = s["clip"], Facts()
    samples, prompts = counted(s["samples"], "samples"), counted(s["prompts"], "prompts")
    facts.line("texts", f"{s['tokens']:,} tokens of {samples}, {prompts}")
    if s["kl_infinite"] is not None:
        facts.line("KL(rollout‖trainer), exact", said("kl"))
    for name in ("k1", "k2", "k3"):
        facts.line(name, said(name))
    for prefix, of in (("", ""), ("sequence_", " of sequences")):
        what = of or ": min, 1 %, median, 99 %, max"
        facts.line(f"ratios{what}", spread(f"{prefix}ratio"))
        facts.line(f"{of[4:]} outside {low:g} to {high:g}".lstrip(), said(f"{prefix}outside_clip", percent=True))
        facts.line(f"effective sample size{of}", said(f"{prefix}effective_sample_size", percent=True))
    facts.line("impossible for the trainer", counted(s["zero_probability"], "tokens"))
    title = Note(f"{s['name']} against the rollouts of {s['rollout']}", "bold")
    found: list[Block] = [title, facts]
    stretches = by_position if len(by_position) > 1 else []  # a single one would repeat the mean
    for heading, rows, names in (
        ("by position in the text", stretches, list(map(_stretch, stretches))),
        ("by slice", by_slice, [Row(str(row["slice"])) for row in by_slice]),
    ):
        if rows:
            columns = [
                counts("tokens", rows, "tokens"),
                numbers("k3", rows, "k3", page="k3", about="mean of r − 1 − ln r, nats per token"),
                numbers("KL", rows, "kl", about="exact KL(rollout‖trainer)"),
                numbers("outside clip", rows, "outside_clip", percent=True, about="share of ratios outside the range"),
            ]
            found += ["", Table(names, [one for one in columns if any(one.cells)], heading)]
    return [*found, *(Note(note, "yellow") for note in s["notes"])]


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def rollouts_blocks(found: Rollouts, folder: str) -> list[Block]:
    m, facts = found.manifest, Facts()
    lengths = [len(ids) for ids in found.written]
    facts.line("texts", f"{len(found):,} of {found.prompts:,} prompts")
    facts.line("tokens", f"{found.tokens:,} written, {np.mean(lengths):,.1f} per text")
    facts.line("ended by", ", ".join(f"{name} {count:,}" for name, count in m["finish"].items() if count))
    facts.line("drawn", drawn_line(m))
    if found.tokens:
        raw = np.concatenate(found.raw_logprob)
        facts.line("logprob", f"{raw.mean():.4f} per token in the model's own distribution")
    for note in m["notes"]:
        facts.line("", note, style="yellow")
    facts.line("model", model_line(m))
    return [facts, "", Note(f"kept in {folder}; scoremode ppl MODEL --corpus rollouts:{folder}")]


def drawn_line(manifest: Mapping[str, Any]) -> str:
    sampling = manifest["sampling"]
    if not sampling["temperature"]:
        return "greedily"
    filters = [
        f"{name.replace('_', '-')} {sampling[name]:g}" for name, none in FILTERS.items() if sampling[name] != none
    ]
    return ", ".join([f"temperature {sampling['temperature']:g}", *filters, f"seed {manifest['seed']}"])
