"""Tables of the verbs that score, for a terminal: runs, plans, probabilities of targets, and drift between settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from scoremode.report.numbers import RUN_MEASURES, RunMeasure, basis, with_error
from scoremode.report.terminal.console import Facts
from scoremode.report.terminal.part_tables import run_slices_table
from scoremode.report.text import NOT_MEASURED, context_before, counted, shown, worst_targets
from scoremode.scores.schema import Metric
from scoremode.store.run import Run
from scoremode.values import Estimate

if TYPE_CHECKING:
    from scoremode.verbs.noise import Noise
    from scoremode.verbs.prob.sequence import SequenceScore, TokenScore

WIDEST = 28  # characters; longer numbers do not widen the column
CACHE_TYPES = ("kv_cache_dtype", "cache_type_k", "cache_type_v", "cache_bits_k", "cache_bits_v")  # engines' settings
USUAL_CACHES: tuple[list[str], ...] = ([], ["auto"], ["f16"], ["16"])  # the types that engines choose themselves


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Returns an empty table with columns of words, then columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in words:
        table.add_column(Text(name), overflow="fold")
    for name in numbers:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def run_table(run: Run, worst: int = 8) -> list[Any]:
    """Makes the tables that ``scoremode ppl`` and ``scoremode show`` print."""
    m = run.manifest
    of_columns = [metric for _, metric in run.schema.metrics]
    measures = [*RUN_MEASURES, *_own_measures(of_columns)]
    stored = {one: m["metrics"].get(one.name) for one in measures}
    metrics = {one: Estimate.from_json(value) for one, value in stored.items() if value is not None}
    numbers = {one: with_error(known, percent=one.percent) for one, known in metrics.items()}
    wide = max((len(number) for number in numbers.values() if len(number) <= WIDEST), default=0)
    table = Facts()
    for one in measures:
        if one in metrics:
            number = Text(numbers[one].ljust(wide), "bold" * (one.name == "perplexity"))
            known = metrics[one].stderr is not None
            rests_on = basis(metrics[one], m["stderr_groups"], percent=one.percent) if known else ""
            table.line(one.terminal, Text.assemble(number, (f"   {rests_on}", "dim")))
        elif one.name in {metric.name for metric in of_columns}:
            table.line(one.terminal, Text(NOT_MEASURED, "dim"))
    first = metrics.get(RUN_MEASURES[0])
    if first is not None and first.stderr is None and math.isfinite(first.value):
        table.line("", Text(basis(first, m["stderr_groups"]), "yellow"))
    table.line("", "")
    covered = f"{100 * m['coverage']:.1f}% of the {m['tokens']:,} tokens covered"
    scored = f"{m['targets']:,} in {counted(m['windows'], 'windows')}, {covered}"
    table.line("tokens scored", scored)
    table.line("method", method_line(m))
    for note in m["notes"]:
        table.line("", Text(note, "yellow"))
    table.line("text", shown(f"{m['corpus']} ({m['corpus_bytes']:,} bytes, sha256 {m['corpus_sha256'][:12]}…)"))
    table.line("model", model_line(m))
    speed = m["tokens_per_second"]
    if speed is not None:
        table.line("speed", f"{speed:,.0f} tokens/s ({m['forward_tokens']:,} tokens fed in {m['seconds']:.1f} s)")
    table.line("plan", m["plan_digest"][:16] + "…")
    parts: list[Any] = [table, *run_slices_table(run)]
    if worst:
        parts += [Text(), Text("worst-predicted tokens", "bold"), worst_table(run, worst)]
    return parts


def model_line(m: Mapping[str, Any]) -> str:
    """Returns the model of a manifest and how it was computed, with the types of its K/V cache if they were chosen.

    >>> m = {"model": "m", "engine": "transformers", "dtype": "float32", "head": "exact-fp32", "device": "cpu"}
    >>> model_line({**m, "engine_settings": {"kv_cache_dtype": "int4"}})
    'm on transformers, float32, head exact-fp32, cpu, K/V cache int4'
    """
    settings = m.get("engine_settings") or {}
    types = list(dict.fromkeys(str(settings[name]) for name in CACHE_TYPES if name in settings))
    cache = [] if types in USUAL_CACHES else [f"K/V cache {'/'.join(types)}"]
    return shown(
        ", ".join([f"{m['model']} on {m['engine']}", str(m["dtype"]), f"head {m['head']}", m["device"], *cache])
    )


def _own_measures(of_columns: Sequence[Metric]) -> list[RunMeasure]:
    """Returns the means over columns that only an engine declares, as measures for tables."""
    known = {measure.name for measure in RUN_MEASURES}
    own = [metric for metric in of_columns if metric.name not in known]
    return [RunMeasure(m.name, m.label, shown(m.label), percent=m.share_of is not None) for m in own]


def questions_table(found: Sequence[Run]) -> list[Any]:
    """Makes a table with one row per question (a text and a method) to one model."""
    first = found[0].manifest
    table = _table(["text", "method"], ["perplexity", "bits per byte", "targets"])
    for run in found:
        numbers = [
            with_error(Estimate.from_json(run.manifest["metrics"][name])) if name in run.manifest["metrics"] else "–"
            for name in ("perplexity", "bits_per_byte")
        ]
        row = (shown(run.manifest["corpus"]), method_line(run.manifest), *numbers, f"{run.manifest['targets']:,}")
        table.add_row(*map(Text, row))
    notes = [Text(shown(line), "yellow") for line in _shared_notes(found)]
    return [Text(model_line(first), "dim"), Text(), table, *([Text(), *notes] if notes else [])]


def _shared_notes(found: Sequence[Run]) -> list[str]:
    """Returns each note once, with the questions that it is about unless it is about all questions."""
    about: dict[str, list[str]] = {}
    for run in found:
        for note in dict.fromkeys(run.manifest["notes"]):
            about.setdefault(note, []).append(f"{run.manifest['corpus']} by {run.manifest['method']}")
    return [note if len(named) == len(found) else f"{', '.join(named)}: {note}" for note, named in about.items()]


def method_line(manifest: dict[str, Any] | Any) -> str:
    settings = manifest["method_settings"]
    names = {"context_length": "context", "stride": "stride", "path": "path", "sequences": "sequences"}
    given = ", ".join(f"{label} {settings[name]}" for name, label in names.items() if name in settings)
    return shown(f"{manifest['method']} ({given})")


def worst_table(run: Run, count: int) -> Table:
    table = _table([], ["in context", "logprob", "rank"])
    table.columns[0].overflow, table.columns[0].max_width = "crop", 56
    table.add_column("the model expected", no_wrap=True, overflow="ellipsis")
    ranked = run.scores.has("rank")
    for index in worst_targets(run, count):
        token = shown(str(run.facts.value("text", index)))
        before = shown(context_before(run, index, max(8, 50 - len(token))))
        table.add_row(
            Text.assemble((before, "dim"), ("«", "dim"), (token, "bold red"), ("»", "dim")),
            f"{run.scores.value('logprob', index):.2f}",
            f"{run.scores.value('rank', index):,}" if ranked else NOT_MEASURED,
            Text(_expected(run, index)),
        )
    return table


def _expected(run: Run, index: int) -> str:
    """Returns the model's first choice and its probability."""
    if not (run.facts.has("top_text") and run.scores.has("top_logprob")):
        return NOT_MEASURED
    word, logprob = run.facts.value("top_text", index), run.scores.value("top_logprob", index)
    return f"{shown(str(word))!r} p={math.exp(logprob):.2f}"


def plan_table(plan: dict[str, Any]) -> list[Any]:
    table = Facts()
    table.line("method", method_line(plan))
    for note in plan["notes"]:
        table.line("", Text(note, "yellow"))
    size = f"{counted(plan['documents'], 'documents')}, {counted(plan['tokens'], 'tokens')}"
    table.line("text", shown(f"{plan['corpus']}, {size}"))
    table.line("windows", f"{plan['windows']:,}")
    table.line("targets", f"{plan['targets']:,} ({100 * plan['coverage']:.1f}% of the tokens covered)")
    table.line("forward tokens", f"{plan['forward_tokens']:,}")
    for w in plan["first_windows"]:
        lead = f"[{w['lead']}] + " if w["lead"] >= 0 else ""
        line = f"feeds {lead}{w['feeds_from']}…{w['feeds_to'] - 1}, scores {w['scores_from']}…{w['scores_to'] - 1}"
        table.line("", Text(line, "dim"))
    memory = plan["memory"]
    line = ", ".join(
        f"{name.replace('_', ' ')} {in_bytes(memory[name])}" for name in ("weights", "activations", "logits")
    )
    line += f", K/V cache {in_bytes(memory['kv_cache'])}" if "kv_cache" in memory else ""
    whole = in_bytes(memory["logits_if_whole"])
    if any(memory[name] for name in ("weights", "activations", "logits")):  # else the model is on a server, or a table
        table.line("memory, about", f"{line} (all logits at once would take {whole})")
    if kept := plan["reference"]:
        logits = in_bytes(kept["logits_fp16"])
        table.line("as a reference", f"{in_bytes(kept['total'])} on disk (float16 logits would take {logits})")
    table.line("plan digest", plan["plan_digest"])
    return [table]


def in_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def sequence_table(results: Sequence[SequenceScore]) -> list[Any]:
    table = _table(["target"], ["log prob", "prob", "perplexity"])
    ranked = any(t.rank is not None for r in results for t in r.tokens)
    table.add_column("tokens (logprob, rank)" if ranked else "tokens (logprob; rank not measured)")
    prompts = list(dict.fromkeys(r.prompt for r in results))
    for prompt in prompts:
        if len(prompts) > 1:
            table.add_row(Text(shown(prompt), "dim"), "", "", "", "")
        for r in (r for r in results if r.prompt == prompt):
            tokens = "  ".join(map(_token, r.tokens))
            row = (
                Text(repr(shown(r.target))),
                f"{r.log_prob:.5f}",
                f"{r.prob:.4g}",
                f"{r.perplexity:,.4g}",
                Text(tokens),
            )
            table.add_row(*row)
    return [table, *_boundary_notes(results)]


def _token(token: TokenScore) -> str:
    return f"{shown(token.text)!r} {token.logprob:.3f}" + ("" if token.rank is None else f" #{token.rank}")


def _boundary_notes(results: Iterable[SequenceScore]) -> list[Text]:
    spanning = list(dict.fromkeys(r.condition for r in results if r.boundary == "spanning"))
    added = any(r.leading_space == "add" for r in results)
    notes = [
        Text(f"a token spans the end of the prompt: scored given that it begins with {shown(part)!r}", "yellow")
        for part in spanning
    ]
    return notes + [Text("a leading space was added to targets without one (--leading-space add)", "yellow")] * added


def noise_table(noise: Noise) -> list[Any]:
    """Makes the tables of ``scoremode noise``: drift per target, then perplexity, whole sequences and repeats."""
    names = list(noise.settings[0].settings)
    header = ", ".join(name.replace("_", "-") for name in names) or "setting"
    first = _table([header, "head"], ["mean", "mean |d|", "rms", "99.9%", "max"])
    first.columns[1].no_wrap = True
    second = _table([header], ["perplexity", "ratio", "seq. rms", "seq. max", "repeat rms", "repeat max"])
    for s in noise.settings:
        d, r = s.drift, s.repeats
        values = ["default" if value is None else str(value) for value in s.settings.values()]
        label = Text(", ".join(values) or s.facts.engine, "bold")
        first.add_row(label, s.facts.head, _size(d.mean, "+"), *map(_size, (d.mean_abs, d.rms, d.p999, d.max)))
        again = ("–", "–") if r is None else (_size(r.rms), _size(r.max))
        ratio = f"{s.perplexity_ratio:.6f}" if math.isfinite(s.perplexity_ratio) else "–"
        numbers = (_size(d.sequence_rms), _size(d.sequence_max), *again)
        second.add_row(label, f"{s.perplexity:,.5f}", ratio, *numbers)
    plan = noise.plan
    scored = f"{counted(plan.targets, 'targets')} in {counted(len(plan), 'windows')} of {noise.corpus}"
    about = f"{scored}, {noise.model}; {noise.repeat} {'pass' if noise.repeat == 1 else 'passes'}"
    return [
        Text("drift of log-probabilities against the first setting, nats per target", "bold"),
        first,
        Text(),
        Text(f"perplexity; drift of whole {noise.sequences}; drift of the same setting when repeated", "bold"),
        second,
        Text(),
        *(Text(shown(s.promise), "red" if "finding:" in s.promise else "") for s in noise.settings if s.promise),
        *(Text(shown(note), "yellow") for note in plan.notes),
        Text(shown(about), "dim"),
    ]


def _size(value: float, sign: str = "") -> str:
    return "0" if value == 0 else "unbounded" if not math.isfinite(value) else f"{value:{sign}.2e}"
