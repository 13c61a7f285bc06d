"""What the verbs that score show: runs, plans, and probabilities of targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.store.run import NEEDS, Run
from scoremode.core.text.token_text import joined
from scoremode.reports.table import NOTHING, Block, Cell, Column, Facts, Note, Row, Table, count, estimate, words
from scoremode.reports.text import NOT_MEASURED, counted, method_words, middle_cut, model_notes, shown, too_few
from scoremode.values import Estimate, rounded

if TYPE_CHECKING:
    from scoremode.core.verbs.prob.sequence import SequenceScore, TokenScore

LONGEST = 200  # characters of a prompt or a target
SHOWN = 28  # characters of a target with the text before it, and of a first choice
CACHE_TYPES = ("kv_cache_dtype", "cache_type_k", "cache_type_v", "cache_bits_k", "cache_bits_v")  # engines' settings
USUAL_CACHES: tuple[list[str], ...] = ([], ["auto"], ["f16"], ["16"])  # the types that engines choose themselves


@dataclass(frozen=True)
class RunMeasure:
    """A metric of a run, as a column or a line of tables."""

    name: str  # in the manifest
    label: str  # on the page and in notebooks
    terminal: str  # the label in a terminal
    percent: bool = False


METRICS = sorted((metric for _, metric in BUILT_IN.metrics), key=lambda metric: metric.share_of is None)
"""The metrics of columns that tables show: shares first."""

RUN_MEASURES = (
    RunMeasure("perplexity", "Perplexity", "perplexity"),
    RunMeasure("bits_per_byte", "Bits/byte", "bits per byte"),
    RunMeasure("word_perplexity", "Word PPL", "word perplexity"),
    *(RunMeasure(m.name, m.title or m.label, m.label, percent=m.share_of is not None) for m in METRICS),
)


def with_error(estimate: Estimate, percent: bool = False) -> str:
    """The value and its error in one text, or in words why there is no value.

    >>> with_error(Estimate(12.7412, 0.3149, 100, 10))
    '12.74 ± 0.31'
    """
    if math.isnan(estimate.value):
        return "none (no whole word or byte was scored)"
    if math.isinf(estimate.value):
        return "unbounded (a target has probability zero)"
    return " ".join(rounded(estimate.value, estimate.stderr, percent=percent)).rstrip()


def basis(estimate: Estimate, kind: str, percent: bool = False) -> str:
    """The 95 % bounds of a number, after the groups that its error is based on unless ``kind`` is ''.

    >>> basis(Estimate(12.7412, 0.3149, 100, 10, 9.0, 12.0288, 13.4536), "documents")
    '10 documents, 95%: 12.03 to 13.45'
    """
    if not math.isfinite(estimate.value) or estimate.low is None or estimate.high is None:
        return ""
    low, high = (
        rounded(bound, supports=estimate.stderr, percent=percent)[0] for bound in (estimate.low, estimate.high)
    )
    return f"{f'{estimate.groups:,} {kind}, ' if kind else ''}95%: {low} to {high}"


def run_blocks(run: Run, worst: int = 0) -> list[Block]:
    """What ``scoremode ppl`` and ``scoremode report`` print."""
    blocks: list[Block] = [run_facts(run), *run_slices(run)]
    return [*blocks, "", worst_table(run, worst)] if worst else blocks


def run_facts(run: Run) -> Facts:
    """The numbers of a run, and where they come from."""
    m, facts = run.manifest, Facts()
    groups, metrics = run.group_kind, _metrics(run)
    first = metrics.get(RUN_MEASURES[0].name)
    for measure in RUN_MEASURES:
        if (number := metrics.get(measure.name)) is not None:
            kind = "" if first is not None and number.groups == first.groups else groups
            rests_on = basis(number, kind, percent=measure.percent) if number.stderr is not None else ""
            style = "bold" if measure.name == "perplexity" else ""
            facts.line(measure.terminal, with_error(number, percent=measure.percent), rests_on, style)
        elif measure.name in {metric.name for metric in METRICS}:
            facts.line(measure.terminal, NOT_MEASURED, style="dim")
    if first is not None and math.isfinite(first.value):
        few = first.stderr is None
        facts.line("" if few else "±", errors_over(first, groups), style="yellow" if few else "dim")
    facts.line("", "")
    covered = f"{100 * m['coverage']:.1f}% of the {m['tokens']:,} tokens covered"
    facts.line("tokens scored", f"{m['targets']:,} in {counted(m['windows'], 'windows')}, {covered}")
    facts.line("method", method_words(m, brief=True))
    of_model = [note for note in model_notes(run) if note in m["notes"]]
    for note in (note for note in m["notes"] if note not in of_model):
        facts.line("", note, style="yellow")
    facts.line("text", f"{m['corpus']} ({m['corpus_bytes']:,} bytes, sha256 {m['corpus_sha256'][:12]}…)")
    facts.line("model", model_line(m))
    for note in of_model:
        facts.line("", note, style="yellow")
    if (speed := m["tokens_per_second"]) is not None:
        facts.line("speed", f"{speed:,.0f} tokens/s ({m['forward_tokens']:,} tokens fed in {m['seconds']:.1f} s)")
    facts.line("plan", m["plan_digest"][:16] + "…")
    return facts


def _metrics(run: Run) -> dict[str, Estimate]:
    stored = run.manifest.get("metrics", {})
    return {name: Estimate.from_json(value) for name, value in stored.items() if value is not None}


def model_line(m: Mapping[str, Any]) -> str:
    """Returns the model of a manifest and how it was computed, with the types of its K/V cache if they were chosen.

    >>> m = {"model": "m", "engine": "transformers", "dtype": "float32", "head": "exact-fp32", "device": "cpu"}
    >>> model_line({**m, "engine_settings": {"kv_cache_dtype": "int4"}})
    'm on transformers, float32, head exact-fp32, cpu, K/V cache int4'
    """
    settings = m.get("engine_settings") or {}
    types = list(dict.fromkeys(str(settings[name]) for name in CACHE_TYPES if name in settings))
    cache = [] if types in USUAL_CACHES else [f"K/V cache {'/'.join(types)}"]
    return ", ".join([f"{m['model']} on {m['engine']}", str(m["dtype"]), f"head {m['head']}", m["device"], *cache])


def run_slices(run: Run) -> list[Block]:
    """The perplexity of each slice of a run's text; nothing if there are less than two."""
    metrics = run.by_slice()
    perplexities = [slice_metrics["perplexity"] for slice_metrics in metrics.values()]
    columns = [
        Column("targets", [count(perplexity.n) for perplexity in perplexities]),
        Column("perplexity", [estimate(perplexity) for perplexity in perplexities]),
    ]
    return ["", Table(list(map(Row, metrics)), columns, "by slice of the text")] if len(metrics) > 1 else []


# ── several runs ─────────────────────────────────────────────────────────────────────────────────────────────────────
def runs_table(runs: Sequence[Run], names: Sequence[str], corner: str) -> Table:
    """One row per run: its numbers. A terminal shows those that all methods have."""
    metrics = [_metrics(run) for run in runs]
    columns = [words("method", [method_words(run.manifest, brief=True) for run in runs], page="")]
    for measure in RUN_MEASURES:
        if measure.name in NEEDS or any(measure.name in numbers for numbers in metrics):
            title = measure.terminal if measure.name in ("perplexity", "bits_per_byte") else ""
            cells = [_measured(numbers.get(measure.name), measure) for numbers in metrics]
            columns.append(Column(title, cells, page=measure.label))
    columns.append(Column("targets", [count(len(run.scores)) for run in runs], page="Tokens"))
    return Table([Row(name, series=i) for i, name in enumerate(names)], columns, corner=corner)


def _measured(number: Estimate | None, measure: RunMeasure) -> Cell:
    if number is None:
        return Cell(NOT_MEASURED if measure.name in NEEDS else NOTHING)
    return estimate(number, percent=measure.percent) if math.isfinite(number.value) else Cell(with_error(number))


def runs_notes(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """What the errors of a table of runs are based on, and what was not measured."""
    lines, errors = list[str](), dict[str, list[str]]()
    for name, run in zip(names, runs, strict=True):
        kind, metrics = run.group_kind, _metrics(run)
        first = metrics.get("perplexity")
        if first is not None and math.isfinite(first.value):
            errors.setdefault(errors_over(first, kind), []).append(name)
        missing = [m.terminal.partition(" (")[0] for m in RUN_MEASURES if m.name in NEEDS.keys() - metrics.keys()]
        missing += [] if run.scores.has("top") else ["first choices"]
        lines += [f"{name}: {', '.join(missing)} {NOT_MEASURED}"] if missing else []
    return [*said_once(errors, len(runs)), *lines]


def errors_over(first: Estimate, kind: str) -> str:
    """What the errors of a run rest on, in words for all of its numbers."""
    if first.stderr is None:
        return too_few(first.groups, kind)
    return f"one standard error, over {counted(first.groups, kind)}"


def said_once(about: Mapping[str, Sequence[str]], of: int) -> list[str]:
    """Each note once, after the names that it is about, unless those are all."""
    return [note if len(names) == of else f"{', '.join(names)}: {note}" for note, names in about.items()]


def questions_blocks(runs: Sequence[Run]) -> list[Block]:
    """One row per question (a text and a method) to one model."""
    about: dict[str, list[str]] = {}  # each note once, with the questions that it is about
    for run in runs:
        for note in dict.fromkeys(run.manifest["notes"]):
            about.setdefault(note, []).append(f"{run.manifest['corpus']} by {run.manifest['method']}")
    notes = said_once(about, len(runs))
    table = runs_table(runs, [run.manifest["corpus"] for run in runs], "text")
    below: list[Block] = ["", *(Note(note, "yellow") for note in notes)] if notes else []
    return [Note(model_line(runs[0].manifest), "dim"), "", table, *below]


# ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def worst_table(run: Run, most: int) -> Table:
    """The targets with the lowest probability, each token of the text once, after the text before them."""
    facts, scores = run.facts, run.scores
    places: dict[int, int] = {}  # token -> where its probability is lowest
    for at in scores.logprob.argsort(kind="stable").tolist():
        places.setdefault(int(facts.token[at]), at)
        if len(places) == most:
            break
    expected = [
        NOT_MEASURED
        if facts.top_text is None or scores.top_logprob is None
        else middle_cut(f"{shown(str(facts.top_text[at]))!r} p={math.exp(scores.top_logprob[at]):.2f}", SHOWN)
        for at in places.values()
    ]
    columns = [
        Column("logprob", [Cell(f"{scores.logprob[at]:.2f}") for at in places.values()]),
        Column(
            "rank",
            [Cell(NOT_MEASURED) if scores.rank is None else count(int(scores.rank[at])) for at in places.values()],
        ),
        words("the model expected", expected),
    ]
    return Table([Row(_in_context(run, at)) for at in places.values()], columns, "worst-predicted tokens", "in context")


def _in_context(run: Run, at: int) -> str:
    """A target in quotes, after the scored text before it in the same document."""
    facts, pieces, before = run.facts, list[str](), at - 1
    while before >= 0 and sum(map(len, pieces)) < SHOWN and facts.token[before] + 1 == facts.token[before + 1]:
        if facts.document[before] != facts.document[at]:
            break
        pieces.append(str(facts.text[before]))
        before -= 1
    token = middle_cut(shown(str(facts.text[at])), SHOWN)
    context = shown(joined(pieces[::-1]))
    return f"{context[max(len(context) + len(token) - SHOWN, 0) :]}«{token}»"


def sequence_blocks(results: Sequence[SequenceScore]) -> list[Block]:
    """Targets and their probabilities, below their prompt if there are several, and what to know of them."""
    ranked = any(t.rank is not None for r in results for t in r.tokens)
    prompts = list(dict.fromkeys(r.prompt for r in results))
    lines: list[tuple[str, SequenceScore | None]] = []
    for prompt in prompts:
        lines += [(middle_cut(prompt, LONGEST), None)] if len(prompts) > 1 else []
        lines += [(repr(middle_cut(shown(r.target), LONGEST)), r) for r in results if r.prompt == prompt]
    rows = [r for _, r in lines]
    columns = [
        Column("log prob", [Cell("" if r is None else f"{r.log_prob:.5f}") for r in rows]),
        Column("prob", [Cell("" if r is None else f"{r.prob:.4g}") for r in rows]),
        Column("perplexity", [Cell("" if r is None else f"{r.perplexity:,.4g}") for r in rows]),
        words(
            "tokens (logprob, rank)" if ranked else "tokens (logprob; rank not measured)",
            ["" if r is None else "\n".join(map(_token, r.tokens)) for r in rows],
            flows=True,
        ),
    ]
    return [Table([Row(name) for name, _ in lines], columns, corner="target"), *_boundary_notes(results)]


def _token(token: TokenScore) -> str:
    return f"{shown(token.text)!r} {token.logprob:.3f}" + ("" if token.rank is None else f" #{token.rank}")


def _boundary_notes(results: Iterable[SequenceScore]) -> list[Note]:
    spanning = list(dict.fromkeys(r.condition for r in results if r.boundary == "spanning"))
    added = any(r.leading_space == "add" for r in results)
    notes = [
        Note(f"a token spans the end of the prompt: scored given that it begins with {shown(part)!r}", "yellow")
        for part in spanning
    ]
    for r in results:  # letters that have a case are of scripts with spaces between words
        if r.boundary == "clean" and all(letter != letter.swapcase() for letter in (r.prompt[-1:], r.target[:1])):
            joined = middle_cut(shown(r.prompt.split()[-1] + r.target), SHOWN)
            return [*notes, Note(f"reads {joined!r}: after a word give ' …', or --leading-space add", "yellow")]
    return notes + [Note("a leading space was added to targets without one (--leading-space add)", "yellow")] * added


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def plan_blocks(plan: Mapping[str, Any]) -> list[Block]:
    facts = Facts()
    facts.line("method", method_words(plan, brief=True))
    for note in plan["notes"]:
        facts.line("", note, style="yellow")
    size = f"{counted(plan['documents'], 'documents')}, {counted(plan['tokens'], 'tokens')}"
    facts.line("text", f"{plan['corpus']}, {size}")
    facts.line("windows", f"{plan['windows']:,}")
    facts.line("targets", f"{plan['targets']:,} ({100 * plan['coverage']:.1f}% of the tokens covered)")
    facts.line("forward tokens", f"{plan['forward_tokens']:,}")
    for w in plan["first_windows"]:
        lead = f"[{w['lead']}] + " if w["lead"] >= 0 else ""
        line = f"feeds {lead}{w['feeds_from']}…{w['feeds_to'] - 1}, scores {w['scores_from']}…{w['scores_to'] - 1}"
        facts.line("", line, style="dim")
    memory, reference = plan["memory"], plan["reference"]
    if any(memory[name] for name in ("weights", "activations", "logits")):  # else the model is on a server, or a table
        names = [name for name in ("weights", "activations", "logits", "kv_cache") if name in memory]
        parts = ", ".join(f"{name.replace('kv_', 'K/V ')} {in_bytes(memory[name])}" for name in names)
        whole = in_bytes(memory["logits_if_whole"])
        facts.line("memory, about", f"{parts} (all logits at once would take {whole})")
    if reference:
        logits = in_bytes(reference["logits_fp16"])
        facts.line("as a reference", f"{in_bytes(reference['total'])} on disk (float16 logits would take {logits})")
    facts.line("plan digest", plan["plan_digest"])
    return [facts]


def in_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
