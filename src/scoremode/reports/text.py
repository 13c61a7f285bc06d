"""Words that several reports share, and corpus text made safe and short: it may contain even escape sequences."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.groups import FEWEST
from scoremode.core.store.run import Run
from scoremode.core.text.corpus import DEFAULT_NOTE
from scoremode.core.text.token_text import joined
from scoremode.errors import harmless
from scoremode.reports.numbers import Statistics
from scoremode.values import rounded

if TYPE_CHECKING:
    from scoremode.studies.rollouts.candidates_on_texts import OwnWords
    from scoremode.studies.tasks.results import TasksComparison

NOT_MEASURED = "not measured"
VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def counted(number: int, plural: str) -> str:
    """A number and what it counts.

    >>> counted(1, "windows"), counted(1200, "windows")
    ('1 window', '1,200 windows')
    """
    return f"{number:,} {plural.removesuffix('s') if number == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    """Names for a title: ``a, b and c``; only their number if there are more than three."""
    if len(names) > 3:
        return f"{len(names)} candidates"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def shown(text: str) -> str:
    """Text on one line, without control characters that a terminal would interpret."""
    return harmless("".join(VISIBLE.get(c, c) for c in text))


def middle_cut(text: str, width: int, measure: Callable[[str], int] = len) -> str:
    """Shortens a text to ``width`` by cutting its middle: names mostly differ at their ends.

    >>> middle_cut("Qwen3-30B-A3B-Instruct-Q4_K_M.gguf", 21)
    'Qwen3-30B-…4_K_M.gguf'
    """
    if measure(text) <= width:
        return text
    for kept in range(len(text) - 1, -1, -1):
        shorter = f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
        if measure(shorter) <= width:
            return shorter
    return ""


def without_common_start(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with; unchanged if nothing would be left of one of them.

    >>> without_common_start(["Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q8_0.gguf", "Qwen3-4B-exl3"])
    ['Q4_K_M.gguf', 'Q8_0.gguf', 'exl3']
    """
    start = os.path.commonprefix(list(names)) if len(names) > 1 else ""  # noqa: RUF071 - characters are meant
    cut = max(start.rfind(sign) for sign in "-_/ :·") + 1
    return [name[cut:] for name in names] if all(len(name) > cut for name in names) else list(names)


def worst_targets(run: Run, count: int) -> list[int]:
    """Indices of the targets with the lowest probability, each token of the text once."""
    found: dict[int, tuple[float, int]] = {}  # token -> its lowest log-probability, and where
    begin = 0
    for (logprob,), (token,) in zip(run.scores.blocks("logprob"), run.facts.blocks("token"), strict=True):
        here: dict[int, tuple[float, int]] = {}
        for at in logprob.argsort(kind="stable").tolist():
            here.setdefault(int(token[at]), (float(logprob[at]), begin + at))
            if len(here) == count:
                break
        for known, worst in here.items():
            found[known] = min(worst, found.get(known, worst))
        found = dict(sorted(found.items(), key=lambda item: item[1])[:count])
        begin += len(logprob)
    return [index for _, index in found.values()]


def context_before(run: Run, index: int, width: int) -> str:
    """The scored text before a target, at most ``width`` characters, from the same document."""
    facts, pieces = run.facts, list[str]()
    at, size = index - 1, 0
    while at >= 0 and size < width and facts.value("token", at) + 1 == facts.value("token", at + 1):
        if facts.value("document", at) != facts.value("document", index):
            break
        pieces.append(str(facts.value("text", at)))
        size += len(pieces[-1])
        at -= 1
    return joined(pieces[::-1])[-width:]


def top_words(comparison: Comparison) -> str:
    """Why the share of equal first choices is missing, in one line; '' if it is not missing."""
    sides = (("the baseline", comparison.baseline), (comparison.name, comparison.candidate))
    names = [name for name, run in sides if not run.scores.has("top")]
    return f"same top: {NOT_MEASURED} (no first choices from {' and '.join(names)})" if names else ""


def model_notes(run: Run) -> list[str]:
    """What a reader must know about a model as it was loaded; runs of other versions may have no such notes."""
    notes = run.manifest.get("model_notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def default_text(run: Run) -> list[str]:
    """The note that says which text was taken where none was given."""
    return [note for note in run.manifest.get("notes") or [] if str(note).startswith(DEFAULT_NOTE)]


def notes_on_candidates(comparisons: Sequence[Comparison]) -> list[str]:
    """Notes on the candidates' models, by name, without those that are also true of the baseline's model."""
    return [
        f"candidate {c.name}: {note}"
        for c in comparisons
        if not c.is_of_paths  # see ``path_notes``
        for note in model_notes(c.candidate)
        if note not in model_notes(c.baseline)
    ]


def noise_words(comparison: Comparison, statistics: Mapping[str, Any]) -> str:
    """The noise floor in one line: its size and what was computed in a different way, or why it was not measured."""
    if comparison.kl is None:
        return ""  # two finished runs: there is no divergence to judge by it
    floor, words = statistics.get("noise_floor_kl_mean"), comparison.noise_perturbed
    if floor is None:
        return f"noise floor: not measured ({words or 'the run does not say why'})"
    return f"noise floor: KL mean {rounded(floor)[0]}" + (f" under: {words}" if words else "")


def path_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What to know of the paths of a model that is compared with itself, in lines; none about other comparisons."""
    lines = list[str]()
    for c in (c for c in comparisons if c.is_of_paths):
        lines = lines or ["Δ: logprob minus that of prefill, in nats"]
        settings = c.candidate.manifest["method_settings"]
        if settings.get("prefill_tokens", 1) > 1:
            lines.append(f"{c.name}: {settings['prefill_tokens']:,} tokens of each window prefilled")
        known = c.baseline.manifest["notes"]
        lines += [f"{c.name}: {note}" for note in c.candidate.manifest["notes"] if note not in known]
        lines += [f"{c.name}: {c.manifest['promise']}"] if c.manifest.get("promise") else []
    return lines


# ── texts that a model wrote ─────────────────────────────────────────────────────────────────────────────────────────
EXAMPLES = "where {reader} would most clearly have written something else"


def example_words(words: OwnWords) -> list[tuple[str, str]]:
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
    """A probability in percent."""
    return f"{100 * p:.1f}%" if p == 0 or p >= 0.001 else "below 0.1%"


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def shown_rows(comparison: TasksComparison) -> list[dict[str, Any]]:
    """The rows of a table; the row over all tasks is left out if it would repeat that of a single task or group."""
    return comparison.rows if len(comparison.top) > 1 or not comparison.rows[:-1] else comparison.rows[:-1]


def other_metrics(found: Sequence[TasksComparison]) -> list[str]:
    """lm-eval's metrics that are not means over documents, as in ``lambada_openai: perplexity 5.02, of q4 5.31``."""
    lines = []
    for task in found[0].tasks:
        for metric in task.paired.lm_eval.keys() - task.paired.metrics.keys():
            pairs = [next(t for t in c.tasks if t.name == task.name).paired.lm_eval[metric] for c in found]
            others = ", ".join(f"of {c.name} {cand:.4g}" for c, (_, cand) in zip(found, pairs, strict=True))
            lines.append(f"{task.name}: {metric} {pairs[0][0]:.4g}, {others}")
    return sorted(lines)


def mismatch_facts(s: Statistics) -> list[tuple[str, str]]:
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


PREDICTED = "the sum of its units, on the windows that it was chosen on"


# ── attributions ─────────────────────────────────────────────────────────────────────────────────────────────────────
def account_lines(candidate: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The account of a candidate in ``Attribution.as_json()``: name, KL, its error, and what it is."""
    account, served = candidate["account"], candidate["served_by"]
    ratio = account["parts_over_whole"]
    lines = [
        ("sum of parts", "parts", "" if ratio is None else f"{ratio:.3f} of all weights together"),
        ("interaction", "interaction", "what units do to each other's damage"),
        ("all weights", "whole", "swapped together"),
    ]
    if served is not None:
        lines += [
            ("rest", "rest", "activations, K/V cache and kernels: not in the weights"),
            ("served", "served", f"by {served}"),
        ]
    return [(name, *rounded(account[key], account[f"{key}_stderr"]), about) for name, key, about in lines]


def attribution_notes(facts: Mapping[str, Any]) -> list[str]:
    """What a reader of an attribution must know, in sentences."""
    groups = facts["groups"]
    errors = f"errors are over {counted(groups, 'groups')} ({facts['stderr_groups']})"
    too_few = f"no errors: the text has {counted(groups, 'groups')}, and {FEWEST} are needed"
    tokens = f"{facts['targets']:,} tokens of {facts['corpus']}; KL in nats per token"
    noise = facts["noise_kl_mean"]
    if noise is None:
        floor = f"no noise floor: {facts['noise_perturbed']}"
    else:
        floor = f"noise floor: KL {rounded(noise)[0]} of the baseline to itself ({facts['noise_perturbed']})"
    of_candidates = [
        note if note.startswith(c["name"]) else f"{c['name']}: {note}"
        for c in facts["candidates"]
        for note in c["notes"]
    ]
    return [f"{tokens}; {errors if groups >= FEWEST else too_few}", floor, *facts["notes"], *of_candidates]


def chosen_words(recipe: Mapping[str, Any]) -> str:
    """How many units a mixture takes from each candidate."""
    names = list(recipe["chosen"].values())
    return ", ".join(f"{names.count(name):,} of {name}" for name in dict.fromkeys(names))


def saves_bits(candidate: Mapping[str, Any]) -> bool:
    """Does a candidate store some unit in fewer bits than the baseline? Else its bits say nothing."""
    return any(row["bits_saved"] > 0 for row in candidate["units"])


def candidate_bits(candidate: Mapping[str, Any]) -> str:
    """The bits per weight of a candidate of an attribution, or why they say nothing.

    >>> candidate_bits({"bits_per_weight": 32.0, "units": [{"bits_saved": 0.0}]})
    'emulated, or not quantized: no weights are stored in fewer bits than in the baseline'
    """
    if saves_bits(candidate):
        return f"{candidate['bits_per_weight']:.2f} bits per weight"
    return "emulated, or not quantized: no weights are stored in fewer bits than in the baseline"


def unit_rows(candidate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The units of a candidate in ``Attribution.as_json()``, the most damage first; JSON has no infinite KL."""
    rows = [{**row, "kl": math.inf if row["kl"] is None else row["kl"]} for row in candidate["units"]]
    return sorted(rows, key=lambda row: (-row["kl"], not row["changed"]))
