"""Comparisons for a model card: Markdown tables that say how they were made, and the hub's ``model-index``.

Names come from untrusted files. In Markdown, every character with a special meaning is written as an entity. In YAML,
every string is quoted as JSON, which YAML can read.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scoremode.errors import RunError, harmless
from scoremode.harness.results import TasksComparison
from scoremode.report.numbers import SHOWN, with_error
from scoremode.report.served import ServedModel, engine_version, in_groups, served, served_manifest
from scoremode.report.terminal.comparison_tables import other_metrics, shown_rows
from scoremode.report.text import model_notes, noise_words, top_words
from scoremode.statistics.comparison import Comparison
from scoremode.values import Estimate

NOTHING = "–"
# an entity never opens or closes anything in Markdown, but its character may; `_` stays legible in names like Q4_K_M
ENTITIES = str.maketrans({c: f"&#{ord(c)};" for c in "\\`|<>&*[]~$@"} | {"_": "\\_"})
LINK_STARTS = re.compile(r"(?i):(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):")  # GFM turns bare addresses into links
TASK_HEADER = ("task", "metric", "few-shot", "documents", "baseline", "candidate", "recovery", "lost", "gained", "p")
SETTINGS = (("context_length", "context"), ("stride", "stride"))


def markdown(comparisons: Sequence[Comparison], statistics: Sequence[Mapping[str, Any]]) -> str:
    """A table with one row per candidate, and below it how to reproduce the numbers.

    >>> print(markdown([comparison], [comparison_statistics(comparison)]))   # doctest: +SKIP
    | model | bits per weight | perplexity | ratio | KL mean (nats) | KL 99 % | same top |
    """
    if not comparisons:
        raise RunError("there is no comparison to publish", fix="compare at least one candidate")
    first = comparisons[0]
    for c in comparisons:
        if c.baseline.plan_digest != first.baseline.plan_digest:
            raise RunError(f"{first.name} and {c.name} were scored by different plans", fix="publish them separately")
    facts = [served(c) for c in comparisons]
    measures = [m for m in SHOWN if m.card]
    kinds = _kinds([served_manifest(first.baseline.manifest), *facts])
    own = [f"{escaped_markdown(first.baseline.manifest['model'])} (baseline)", *(cells[0] for _, cells in kinds)]
    rows = [[*own, cell(statistics[0], "ppl_baseline"), *[NOTHING] * (len(measures) - 1)]]
    for i in (i for members in in_groups(facts).values() for i in members):
        named = [escaped_markdown(comparisons[i].name), *(cells[1 + i] for _, cells in kinds)]
        rows.append([*named, *(cell(statistics[i], m.name, percent=m.percent) for m in measures)])
    header = ["model", *(title for title, _ in kinds), *(m.card for m in measures)]
    return f"{_table(header, rows, ('model', 'format', 'engine'))}\n\n{_method(comparisons, statistics)}\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    """A Markdown table; columns that are not ``words`` are numbers."""
    sides = ["---" if title in words else "---:" for title in header]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, sides, *rows))


def escaped_markdown(text: str) -> str:
    """Text that Markdown shows literally, on one line.

    >>> escaped_markdown("a|b <i> Q4_K_M")
    'a&#124;b &#60;i&#62; Q4\\\\_K\\\\_M'
    """
    plain = harmless(str(text)).translate(ENTITIES)
    return LINK_STARTS.sub(lambda found: f"&#{ord(found[0])};", plain)


def code(text: str) -> str:
    """Text as inline code; it may contain backticks."""
    plain = harmless(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{space}{plain}{space}{fence}"


def cell(statistics: Mapping[str, Any], name: str, percent: bool = False) -> str:
    """``12.74 ± 0.31``; four digits if there is no error; a dash if there is no value."""
    value, error = statistics.get(name), statistics.get(f"{name}_stderr")
    if value is None:
        return NOTHING
    if error is not None:
        return with_error(Estimate(value, error, 0, 0), percent=percent)
    return f"{100 * value:.4g}%" if percent else f"{value:.4g}"


def _kinds(facts: Sequence[ServedModel]) -> list[tuple[str, list[str]]]:
    """Columns that say how each row was served: a title, and the baseline's and the candidates' cells.

    Format and engine, if a format is known or engines differ; bits per weight if any candidate has them, else size.
    """
    found = []
    formats, engines = [f.format for f in facts], [f.engine for f in facts]
    if any(formats):
        found.append(("format", [escaped_markdown(text) or NOTHING for text in formats]))
    if any(formats) or len(set(engines)) > 1:
        found.append(("engine", [escaped_markdown(text) or NOTHING for text in engines]))
    if any(f.bits_per_weight is not None for f in facts[1:]):
        bits = [NOTHING if f.bits_per_weight is None else f"{f.bits_per_weight:.2f}" for f in facts]
        found.append(("bits per weight", bits))
    elif any(f.stored_bytes is not None for f in facts[1:]):
        found.append(("size", [_size(f.stored_bytes) for f in facts]))
    return found


def _size(stored: int | None) -> str:
    if stored is None:
        return NOTHING
    return f"{stored / 2**30:.2f} GiB" if stored >= 2**30 else f"{stored / 2**20:.1f} MiB"


def _method(comparisons: Sequence[Comparison], statistics: Sequence[Mapping[str, Any]]) -> str:
    """One paragraph on one line: method, text, plan, engines, what ± means, commands."""
    m, s = comparisons[0].baseline.manifest, statistics[0]
    plan = escaped_markdown(comparisons[0].baseline.plan_digest[:12])
    text = f"{escaped_markdown(m['corpus'])} (sha256 {escaped_markdown(m['corpus_sha256'][:12])})"
    parts = [
        f"Method: {escaped_markdown(_rule(m))} on {text}, plan {plan}, "
        f"{s['targets']:,} targets in {s['groups']:,} {escaped_markdown(m.get('stderr_groups', 'groups'))}.",
        _engines({"baseline": m} | {f"candidate {c.name}": c.candidate.manifest for c in comparisons}),
        "± is one standard error over those groups; the error of the ratio is paired. KL is KL(baseline‖candidate).",
    ]
    if said := noise_words(comparisons[0], s):
        parts.append(escaped_markdown(said[:1].upper() + said[1:]) + ".")
    parts += [f"Baseline: {escaped_markdown(note)}." for note in model_notes(comparisons[0].baseline)]
    for why in dict.fromkeys(map(top_words, comparisons)):
        parts += [escaped_markdown(why[:1].upper() + why[1:]) + "."] if why else []
    return " ".join([*parts, *_commands(comparisons)])


def _rule(manifest: Mapping[str, Any]) -> str:
    settings = manifest.get("method_settings", {})
    labels = dict(SETTINGS)
    ordered = [name for name, _ in SETTINGS if name in settings] + sorted(settings.keys() - labels.keys())
    given = ", ".join(f"{labels.get(name, name)} {settings[name]}" for name in ordered)
    return f"{manifest['method']} ({given})" if given else str(manifest["method"])


def _engines(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """The engine of every side; once, if it is the same for all."""
    engines = {side: _engine(m) for side, m in manifests.items()}
    if len(set(engines.values())) == 1:
        return f"Engine: {escaped_markdown(next(iter(engines.values())))}."
    said = [f"{escaped_markdown(side)}: {escaped_markdown(engine)}" for side, engine in engines.items()]
    return f"Engines: {'; '.join(said)}."


def _engine(m: Mapping[str, Any]) -> str:
    """The engine of a manifest, its version, and how it computed."""
    versions, version = m.get("versions", {}), engine_version(m)
    named = m["engine"] + (f" {version}" if version else "")
    ours = f", scoremode {versions['scoremode']}" if "scoremode" in versions else ""
    how = [str(m["dtype"]), f"head {m['head']}"] if "dtype" in m and "head" in m else []
    return ", ".join([named, *how]) + ours


def _commands(found: Sequence[Comparison] | Sequence[TasksComparison]) -> list[str]:
    """The commands that made these comparisons, in one sentence; none if they are not known."""
    given = [c.manifest.get("command") or "" for c in found]
    distinct = dict.fromkeys(command if isinstance(command, str) else shlex.join(command) for command in given)
    known = [code(command) for command in distinct if command]
    return [f"Command: {', '.join(known)}"] if known else []


def model_index(comparison: Comparison, statistics: Mapping[str, Any]) -> str:
    """The ``model-index`` block of a model card's metadata, to paste between its two ``---`` lines.

    Only metrics that have a value are written: the hub accepts no empty metric.
    """
    m = comparison.baseline.manifest
    corpus, rule = str(m["corpus"]), _rule(m)
    named, baseline = f"{corpus}, sha256 {m['corpus_sha256'][:12]}", str(m["model"])
    metrics = (
        ("perplexity", f"perplexity, {rule}", "ppl_candidate"),
        ("perplexity_ratio", f"perplexity ratio to {baseline}, {rule}", "ppl_ratio"),
        ("kl_divergence", f"mean KL divergence from {baseline} in nats, {rule}", "kl_mean"),
    )
    known = [(kind, label, statistics[name]) for kind, label, name in metrics if statistics.get(name) is not None]
    if not known:
        raise RunError(f"{comparison.name} has no metric that the hub could show", fix="compare on a longer text")
    return _model_index(comparison.name, [(corpus, named, known)])


def _model_index(name: str, results: Sequence[tuple[str, str, Sequence[tuple[str, str, float]]]]) -> str:
    """The block of a model; a result has the type and the name of a dataset, and metrics: type, name and value."""
    lines = ["model-index:", f"  - name: {quoted(name)}", "    results:"]
    for dataset, dataset_name, metrics in results:
        lines += [
            "      - task:",
            "          type: text-generation",
            "        dataset:",
            f"          type: {quoted(dataset)}",
            f"          name: {quoted(dataset_name)}",
            "        metrics:",
        ]
        for kind, label, value in metrics:
            lines += [
                f"          - type: {kind}",
                f"            name: {quoted(label)}",
                f"            value: {plain_number(value)}",
            ]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A JSON string; not in ASCII, because YAML readers do not join the two halves of an escaped surrogate pair."""
    return json.dumps(harmless(text), ensure_ascii=False)


def plain_number(value: float) -> str:
    """A number with six digits and no exponent: YAML 1.1 would read an exponent as a string."""
    return np.format_float_positional(value, precision=6, unique=False, fractional=False, trim="0")


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def tasks_markdown(found: Sequence[TasksComparison]) -> str:
    """A table per candidate, with one row per task, and below it how to reproduce the numbers."""
    parts = []
    for c in found:
        if len(found) > 1:
            parts.append(f"**{escaped_markdown(c.name)}**\n")
        models = {"baseline": f"{escaped_markdown(c.baseline_name)} (baseline)", "candidate": escaped_markdown(c.name)}
        header = [models.get(title, title) for title in TASK_HEADER]
        parts += [_table(header, _task_rows(c), ("task", "metric")), ""]
    return "\n".join([*parts, _task_method(found)]) + "\n"


def _task_rows(c: TasksComparison) -> list[list[str]]:
    shots = {task.name: str(task.shots) for task in c.tasks}
    found = []
    for r in shown_rows(c):
        is_task, name = r["kind"] == "task", escaped_markdown(r["name"])
        cells = [
            name if is_task else f"**{name}**",
            escaped_markdown(r["metric"]),
            shots.get(r["name"], NOTHING) if is_task else NOTHING,
            f"{r['documents']:,}",
            *(cell(r, of, percent=True) for of in ("accuracy_baseline", "accuracy_candidate", "recovery")),
            *(NOTHING if r[of] is None else f"{r[of]:,}" for of in ("lost_documents", "gained_documents")),
            cell(r, "mcnemar"),
        ]
        found.append(cells)
    return found


def _task_method(found: Sequence[TasksComparison]) -> str:
    """One paragraph on one line: tasks, engines, what ± means, notes, commands."""
    first = found[0]
    parts = [
        f"Tasks of lm-eval {escaped_markdown(first.settings['lm_eval'])}, log-likelihoods, few-shot seed "
        f"{first.settings['seeds']['fewshot']}.",
        _engines({f"{first.baseline_name} (baseline)": first.baseline, **{c.name: c.candidate for c in found}}),
        "± is one standard error over documents; recovery is candidate / baseline, with a paired error. Lost: right in "
        "the baseline, wrong in the candidate. p: exact McNemar.",
        *(f"{escaped_markdown(words)}." for words in other_metrics(found)),
        *(f"Note: {escaped_markdown(note)}." for note in dict.fromkeys(n for c in found for n in c.notes)),
    ]
    return " ".join([*parts, *_commands(found)])


def tasks_model_index(c: TasksComparison) -> str:
    """The ``model-index`` block of a model card's metadata, to paste between its two ``---`` lines."""
    results = []
    for task in c.tasks:
        row = c.row(task.name)
        metrics = (
            ("acc", "accuracy", row["acc_candidate"]),
            ("acc_norm", "accuracy, normalised by length", row["acc_norm_candidate"]),
            ("recovery", f"{row['metric']} divided by that of {c.baseline_name}", row["recovery"]),
        )
        known = [metric for metric in metrics if metric[2] is not None]
        if known:
            results.append((task.name, f"{task.name}, {task.shots}-shot, {task.paired.documents:,} documents", known))
    if not results:
        raise RunError(f"{c.name} has no metric that the hub could show", fix="ask more documents")
    return _model_index(c.name, results)
