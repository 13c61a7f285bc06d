"""Tables of the verbs that score, for a terminal: runs, plans, and probabilities of targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from scoremode.core.store.run import Run
from scoremode.reports.numbers import METRICS, RUN_MEASURES, basis, with_error
from scoremode.reports.terminal.console import GAP, BlockTable, Facts, Fitted, TableColumn, longest_word
from scoremode.reports.terminal.part_tables import run_slices_table
from scoremode.reports.text import NOT_MEASURED, context_before, counted, middle_cut, shown, worst_targets
from scoremode.values import Estimate

if TYPE_CHECKING:
    from scoremode.core.verbs.prob.sequence import SequenceScore, TokenScore

WIDEST = 28  # characters; longer numbers do not widen the column
LONGEST_CONTEXT = 56  # characters of a target and the text before it
CACHE_TYPES = ("kv_cache_dtype", "cache_type_k", "cache_type_v", "cache_bits_k", "cache_bits_v")  # engines' settings
USUAL_CACHES: tuple[list[str], ...] = ([], ["auto"], ["f16"], ["16"])  # the types that engines choose themselves


def run_table(run: Run, worst: int = 8) -> list[Any]:
    """Makes the tables that ``scoremode ppl`` and ``scoremode show`` print."""
    m = run.manifest
    stored = {one: m["metrics"].get(one.name) for one in RUN_MEASURES}
    metrics = {one: Estimate.from_json(value) for one, value in stored.items() if value is not None}
    numbers = {one: with_error(known, percent=one.percent) for one, known in metrics.items()}
    wide = max((len(number) for number in numbers.values() if len(number) <= WIDEST), default=0)
    table = Facts()
    for one in RUN_MEASURES:
        if one in metrics:
            number = Text(numbers[one].ljust(wide), "bold" * (one.name == "perplexity"))
            known = metrics[one].stderr is not None
            rests_on = basis(metrics[one], m["stderr_groups"], percent=one.percent) if known else ""
            table.line(one.terminal, Text.assemble(number, (f"   {rests_on}", "dim")))
        elif one.name in {metric.name for metric in METRICS}:
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


def questions_table(found: Sequence[Run]) -> list[Any]:
    """Makes a table with one row per question (a text and a method) to one model."""
    first = found[0].manifest
    known = [run.manifest["metrics"] for run in found]
    table = BlockTable(
        [shown(run.manifest["corpus"]) for run in found],
        [
            TableColumn("method", [method_line(run.manifest) for run in found], number=False),
            *(
                TableColumn(title, [with_error(Estimate.from_json(own[name])) if name in own else "–" for own in known])
                for title, name in (("perplexity", "perplexity"), ("bits per byte", "bits_per_byte"))
            ),
            TableColumn("targets", [f"{run.manifest['targets']:,}" for run in found]),
        ],
        title="text",
    )
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


def worst_table(run: Run, count: int) -> Fitted:
    """Makes a table of targets in their context, which is cut to what the other columns leave."""
    found, ranked = worst_targets(run, count), run.scores.has("rank")
    numbers = [
        (
            f"{run.scores.value('logprob', index):.2f}",
            f"{run.scores.value('rank', index):,}" if ranked else NOT_MEASURED,
            middle_cut(_expected(run, index), LONGEST_CONTEXT // 2, cell_len),
        )
        for index in found
    ]
    titles = ("logprob", "rank", "the model expected")
    wide = sum(max(map(cell_len, column)) + GAP for column in zip(titles, *numbers, strict=True))

    def made(width: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
        for title in ("in context", *titles):
            table.add_column(title, justify="left" if title == titles[-1] else "right", no_wrap=True)
        room = max(len("in context"), min(LONGEST_CONTEXT, width - wide) - len("«»"))
        for index, row in zip(found, numbers, strict=True):
            token = middle_cut(shown(str(run.facts.value("text", index))), room, cell_len)
            before = shown(context_before(run, index, LONGEST_CONTEXT))
            while cell_len(before) > room - cell_len(token):
                before = before.partition(" ")[2] if " " in before else before[1:]
            context = Text.assemble((before, "dim"), ("«", "dim"), (token, "bold red"), ("»", "dim"))
            table.add_row(context, *map(Text, row))
        return table

    return Fitted(made)


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
    return [Fitted(lambda width: _sequences(results, width)), *_boundary_notes(results)]


def _sequences(results: Sequence[SequenceScore], width: int) -> Table:
    """Makes a table in which targets break between words, and tokens between each other."""
    ranked = any(t.rank is not None for r in results for t in r.tokens)
    rows = [(f"{r.log_prob:.5f}", f"{r.prob:.4g}", f"{r.perplexity:,.4g}") for r in results]
    titles = ("log prob", "prob", "perplexity")
    numbers = [max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]
    targets = [repr(shown(r.target)) for r in results]
    widest = max(cell_len(_token(token)) for r in results for token in r.tokens)
    room = width - sum(numbers) - 4 * GAP
    prompts = list(dict.fromkeys(r.prompt for r in results))
    named = targets + [shown(prompt) for prompt in prompts if len(prompts) > 1]
    first = min(max(map(cell_len, named)), max(room - widest, room // 2, *map(longest_word, named)))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("target", overflow="fold", width=max(first, len("target")))
    for title, number in zip(titles, numbers, strict=True):
        table.add_column(title, justify="right", no_wrap=True, width=number)
    table.add_column("tokens (logprob, rank)" if ranked else "tokens (logprob; rank not measured)")
    for prompt in prompts:
        if len(prompts) > 1:
            table.add_row(Text(shown(prompt), "dim"), "", "", "", "")
        for r, target, row in zip(results, targets, rows, strict=True):
            if r.prompt == prompt:
                table.add_row(Text(target), *row, Text(_filled([_token(t) for t in r.tokens], room - first)))
    return table


def _filled(words: Sequence[str], width: int) -> str:
    """Joins words that may contain spaces into lines of at most this width.

    >>> _filled(["' a' -1.2", "'b' -3.4", "'c' -5.6"], 20)
    "' a' -1.2  'b' -3.4\\n'c' -5.6"
    """
    lines = list[str]()
    for word in words:
        if lines and cell_len(lines[-1]) + GAP + cell_len(word) <= width:
            lines[-1] += " " * GAP + word
        else:
            lines.append(word)
    return "\n".join(lines)


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
