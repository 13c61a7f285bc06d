"""The report as one HTML page: no network, nothing to install, every word on it escaped.

The page is text that Python wrote, charts that Python drew (charts.py), and one script (assets/report.js) that shows
the scored text. Its numbers travel as base64 of typed arrays: a hundred thousand tokens are some megabytes, and the
browser holds spans for one page of them at a time.

Texts, names and paths come from anybody's files. They pass through ``escaped`` into HTML, through ``_script_json`` into
data, and the script writes them with textContent only; the page's policy allows our own script by its hash and nothing
else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scoremode import __version__
from scoremode.display import charts
from scoremode.display.charts import Series, SizedPoint, escaped, visible
from scoremode.display.text import noise_words
from scoremode.errors import RunError
from scoremode.gate import too_few
from scoremode.outputs import check_report
from scoremode.ranking import closest
from scoremode.types import Comparison, Estimate, Floats, Ints, Run

Statistics = Mapping[str, Any]
TEXT_TARGETS = 250_000  # of one text; more would make a page that a phone cannot open
SENSITIVITY_QUANTILE = 0.99
FIRST_STEP = 0.1  # nats: the palest colour of Δ logprob and KL begins here, as report.js draws it


def render(
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
) -> str:
    """The page. ``statistics[i]`` belongs to ``comparisons[i]``; plain ``runs`` are shown beside them or alone."""
    assert len(comparisons) == len(statistics), "one record of statistics a comparison"
    alone = [run for run in runs if not any(_same(run, c.baseline) or _same(run, c.candidate) for c in comparisons)]
    style, script = asset("report.css"), asset("report.js")
    assert not any(end in script for end in ("</", "<!--")), "the script would end itself"
    data = _script_json(page_data(comparisons, alone, text_targets))
    title, lead = _headline(comparisons, statistics, alone)
    body = "".join(
        (
            _summary(comparisons, statistics, alone),
            _charts(comparisons, statistics, alone),
            _text_section(comparisons, alone, text_targets),
            _provenance(comparisons, alone),
        )
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="scoremode {escaped(__version__)}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy(script))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<title>{escaped(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        f"{_header(title, lead)}<main>{body}</main>\n{_footer()}"
        f'<script type="application/json" id="scoremode-data">{data}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def write(
    path: str | Path,
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    flag: str = "-o",
) -> Path:
    """The page as a file: the whole of it or nothing. An older report is replaced, any other file is refused.

    ``flag`` is what the file was named with, for error messages.
    """
    output = check_report(path, flag)
    output.write(render(comparisons, statistics, runs=runs, text_targets=text_targets).encode())
    return Path(path)


def report(path: str | Path, *found: Comparison | Run) -> Path:
    """Comparisons, or runs, as one HTML page.

    >>> import scoremode as sm
    >>> sm.report("report.html", *sm.compare("ref/", "candidate"))     # doctest: +SKIP
    """
    comparisons = [f for f in found if isinstance(f, Comparison)]
    runs = [f for f in found if isinstance(f, Run)]
    return write(path, comparisons, [c.statistics() for c in comparisons], runs=runs)


def asset(name: str) -> str:
    """A file of the page that is kept beside this module, with the line ends that a browser hashes."""
    return files("scoremode.display").joinpath("assets", name).read_text("utf-8").replace("\r\n", "\n")


def policy(script: str) -> str:
    """What the page may do: its own style, this one script, pictures inside itself. Nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _script_json(value: Any) -> str:
    """JSON that nothing in it can end or turn into markup: ASCII, and no <, > or & anywhere."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _same(one: Run, other: Run) -> bool:
    return one is other or (one.path is not None and one.path == other.path)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def usable(value: Any) -> float | None:
    """A number, or None for what is missing or not a number; infinity stays."""
    if value is None or isinstance(value, str | bool):
        return None
    number = float(value)
    return None if math.isnan(number) else number


def written(value: Any, stderr: Any = None, *, percent: bool = False) -> tuple[str, str]:
    """A number to the digits that its error allows, and the error; '' where there is none.

    >>> written(12.7412, 0.3149)
    ('12.74', '± 0.31')
    >>> written(None)
    ('–', '')
    """
    number, error = usable(value), usable(stderr)
    if number is None:
        return "–", ""
    if math.isinf(number):
        return ("∞" if number > 0 else "−∞"), ""
    factor, unit = (100.0, "%") if percent else (1.0, "")
    number *= factor
    if error is None or math.isinf(error):
        return f"{_rounded(number, percent)}{unit}", ""
    error *= factor
    if error <= 1e-9 * abs(number):  # what is left of rounding is no error
        return f"{_rounded(number, percent)}{unit}", f"± 0{unit}"
    # numbers of one column are read against each other: below a thousandth they share a power of ten with their error
    power = math.floor(math.log10(abs(number))) if 0 < abs(number) < 1e-3 else 0
    number, error, shown = number / 10.0**power, error / 10.0**power, f"e{power}" if power else ""
    digits = min(8, max(0, 1 - math.floor(math.log10(error))))
    tail = f"{shown}{unit}".replace("-", "−")
    return f"{number:,.{digits}f}{tail}".replace("-", "−"), f"± {error:,.{digits}f}{tail}"


def _rounded(number: float, percent: bool) -> str:
    """To three or four digits, for numbers without an error."""
    size = abs(number)
    if size == 0:
        text = "0"
    elif percent and size >= 0.01:
        text = f"{number:,.2f}"
    elif 1e-3 <= size < 1e6:
        text = f"{number:,.{max(0, 3 - math.floor(math.log10(size)))}f}" if size >= 1 else f"{number:#.3g}"
    else:
        mantissa, power = f"{number:.2e}".split("e")
        text = f"{mantissa}e{int(power)}"
    return text.replace("-", "−")


def with_error(value: Any, stderr: Any = None, *, percent: bool = False) -> str:
    """The number and its error as HTML."""
    number, error = written(value, stderr, percent=percent)
    return escaped(number) + (f' <span class="error">{escaped(error)}</span>' if error else "")


def file_size(count: Any) -> str:
    number = usable(count)
    if number is None or not math.isfinite(number):
        return "–"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"


# ── headline ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _header(title: str, lead: str) -> str:
    links = "".join(
        f'<a href="#{name}">{label}</a>'
        for name, label in (
            ("summary", "Summary"),
            ("charts", "Charts"),
            ("text", "Text"),
            ("provenance", "Provenance"),
        )
    )
    themes = "".join(
        f'<button type="button" data-theme-choice="{name}" aria-pressed="{pressed}">{label}</button>'
        for name, label, pressed in (("auto", "Auto", "true"), ("light", "Light", "false"), ("dark", "Dark", "false"))
    )
    return (
        '<a class="skip" href="#text">Skip to the text</a>\n<header><div class="bar">'
        f'<nav aria-label="Sections"><span class="mark-name">scoremode</span>{links}</nav>'
        f'<div class="choice themes" role="group" aria-label="Colours">{themes}</div></div>'
        f'<h1>{escaped(title)}</h1><p class="lead">{lead}</p></header>\n'
    )


def _footer() -> str:
    said = f"Written by scoremode {__version__}. Nothing on this page was loaded from a network."
    return f"<footer><p>{escaped(said)}</p></footer>\n"


def _headline(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]
) -> tuple[str, str]:
    if not comparisons:
        names = list(dict.fromkeys(str(run.manifest.get("model", "a model")) for run in alone))
        title = f"{_listed(names)} on {_listed(_corpora(alone))}" if alone else "Nothing to report"
        return visible(title), escaped(_scored(alone)) if alone else ""
    baselines = _distinct([c.baseline for c in comparisons])
    against = _listed(list(dict.fromkeys(str(run.manifest.get("model", "the baseline")) for run in baselines)))
    title = f"{_listed([c.name for c in comparisons])} against {against}"
    return visible(title), f"{_verdict(comparisons, statistics)} {escaped(_scored(baselines))}".strip()


def _listed(names: Sequence[str]) -> str:
    if len(names) > 3:
        return f"{len(names)} candidates" if names else ""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _corpora(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(str(run.manifest.get("corpus", "a text")) for run in runs))


def _scored(runs: Sequence[Run]) -> str:
    first = runs[0]
    method = first.manifest.get("method")
    counted = f"{len(first.scores):,} tokens of {_listed(_corpora(runs))} scored"
    return counted + (f" by {method}." if method else ".")


def _verdict(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """The finding in a sentence: of one candidate its numbers, of several the one that moved least."""
    name, measure = ("kl_mean", "mean KL") if _all_known(statistics, "kl_mean") else ("ppl_ratio", "perplexity ratio")
    if len(comparisons) == 1:
        return _verdict_of_one(statistics[0])
    try:
        best, *tied = closest(comparisons)
    except (RunError, ValueError):  # baselines or texts differ, or no candidate has a value
        return ""
    number = with_error(statistics[best].get(name), statistics[best].get(f"{name}_stderr"))
    said = f"Closest to the baseline by {measure}: <strong>{escaped(comparisons[best].name)}</strong>, {number}."
    others = _listed([comparisons[i].name for i in tied])
    return said + (f" It cannot be told apart from {escaped(others)}." if tied else "")


def _all_known(statistics: Sequence[Statistics], name: str) -> bool:
    return all(usable(s.get(name)) is not None for s in statistics)


def _verdict_of_one(s: Statistics) -> str:
    said = []
    if usable(s.get("ppl_ratio")) is not None:
        numbers = f"{written(s.get('ppl_baseline'))[0]} → {written(s.get('ppl_candidate'))[0]}"
        said.append(
            f"Perplexity {escaped(numbers)}, a ratio of {with_error(s['ppl_ratio'], s.get('ppl_ratio_stderr'))}."
        )
    kl, floor = usable(s.get("kl_mean")), usable(s.get("noise_floor_kl_mean"))
    if kl is not None:
        times = f", {kl / floor:,.0f} times the noise floor" if floor and kl / floor >= 1.5 else ""
        said.append(f"Mean KL {with_error(kl, s.get('kl_mean_stderr'))} nats{times}.")
    if usable(s.get("same_top")) is not None:
        share = with_error(s["same_top"], s.get("same_top_stderr"), percent=True)
        said.append(f"The same first choice on {share} of tokens.")
    return " ".join(said)


# ── summary ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Measure:
    """A column of the summary table."""

    name: str  # in the statistics
    label: str
    about: str
    better: Literal["low", "high", "one", "none"] = "low"  # one: the nearer to 1, the better
    percent: bool = False

    def cell(self, statistics: Statistics) -> str:
        value = statistics.get(self.name)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return with_error(value, statistics.get(f"{self.name}_stderr"), percent=self.percent)


MEASURES = (
    Measure("ppl_candidate", "Perplexity", "exponential of the mean surprise", "none"),
    Measure("ppl_ratio", "PPL ratio", "perplexity divided by the baseline's", "one"),
    Measure("kl_mean", "KL mean", "mean KL(baseline‖candidate), nats a token"),
    Measure("kl_median", "KL median", "half of the tokens moved less"),
    Measure("kl_p99", "KL 99%", "99% of the tokens moved less"),
    Measure("kl_p999", "KL 99.9%", "99.9% of the tokens moved less"),
    Measure("kl_max", "KL max", "the token that moved most"),
    Measure(
        "delta_p_rms", "Δp RMS", "root mean square of the change of the text's own token's probability", percent=True
    ),
    Measure("same_top", "Same top", "share of tokens with the same first choice", "high", percent=True),
    Measure("worse", "Worse", "share of the text's tokens that became less likely", "none", percent=True),
    Measure("bits_per_byte_candidate", "Bits/byte", "bits a byte of the text", "none"),
)
RUN_MEASURES = (
    ("perplexity", "Perplexity", False),
    ("bits_per_byte", "Bits/byte", False),
    ("word_perplexity", "Word PPL", False),
    ("top1_accuracy", "Top-1", True),
    ("mean_rank", "Mean rank", False),
    ("mean_entropy", "Entropy, nats", False),
)


def _summary(comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]) -> str:
    tables = ""
    if comparisons:
        tables += comparisons_table(comparisons, statistics)
    if alone:
        tables += runs_table(alone)
    return (
        f'<section id="summary" aria-labelledby="summary-title"><h2 id="summary-title">Summary</h2>{tables}</section>\n'
    )


def comparisons_table(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """A row a candidate, under the baseline and the noise of the baseline itself."""
    shown = [m for m in MEASURES if any(s.get(m.name) is not None for s in statistics)]
    marks = {m.name: _best_and_worst(m, statistics) for m in shown}
    sized = [size_of(c) for c in comparisons]
    with_size = any(sized)
    head = "".join(f'<th scope="col"><abbr title="{escaped(m.about)}">{escaped(m.label)}</abbr></th>' for m in shown)
    head = f'<th scope="col">Model</th>{"<th scope=col>Size</th>" if with_size else ""}{head}'
    rows = [_reference_rows(c, s, shown, with_size) for c, s in _distinct_baselines(comparisons, statistics)]
    for i, (c, s) in enumerate(zip(comparisons, statistics, strict=True)):
        cells = f'<td data-label="Size">{sized[i] or "–"}</td>' if with_size else ""
        cells += "".join(_marked_cell(m, s, marks[m.name].get(i)) for m in shown)
        rows.append(f'<tr><th scope="row">{charts.swatch(i)} {escaped(c.name)}</th>{cells}</tr>')
    marked = any(marks[m.name] for m in shown)
    legend = '<span class="best key">best</span> <span class="worst key">worst</span> of a column. ' if marked else ""
    floors = dict.fromkeys(noise_words(c, s) for c, s in _distinct_baselines(comparisons, statistics))
    said = "".join(f" {escaped(floor[:1].upper() + floor[1:])}." for floor in floors if floor)
    rests_on = escaped(_rests_on(comparisons, statistics))
    note = f"{legend}± is one standard error over {rests_on}. KL is in nats per token.{said}"
    return _table(head, rows, f'<p class="note">{note}</p>')


def _rests_on(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """The groups behind the errors of a table, in words."""
    found = []
    for c, s in _distinct_baselines(comparisons, statistics):
        kind = str(c.baseline.manifest.get("stderr_groups", "groups"))
        groups = int(usable(s.get("groups")) or 0)
        known = s.get("same_top_stderr") is not None
        found.append(f"{groups:,} {kind}" if known else f"nothing here: {too_few(groups, kind)}")
    return "; ".join(dict.fromkeys(found))


def _table(head: str, rows: Iterable[str], after: str = "") -> str:
    # the table scrolls sideways by itself where it is wider than the page: reachable by keyboard, so it has a tabindex
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Summary table">'
        f'<table class="summary"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{after}'
    )


def _distinct_baselines(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics]
) -> list[tuple[Comparison, Statistics]]:
    found: list[tuple[Comparison, Statistics]] = []
    for c, s in zip(comparisons, statistics, strict=True):
        if not any(_same(c.baseline, other.baseline) for other, _ in found):
            found.append((c, s))
    return found


def _reference_rows(comparison: Comparison, s: Statistics, shown: Sequence[Measure], with_size: bool) -> str:
    """The baseline, and what its own noise looks like in the same columns."""
    model = escaped(comparison.baseline.manifest.get("model", "baseline"))
    baseline = {
        "ppl_candidate": with_error(s.get("ppl_baseline"), s.get("ppl_baseline_stderr")),
        "bits_per_byte_candidate": with_error(s.get("bits_per_byte_baseline")),
    }
    noise = {
        "kl_mean": with_error(s.get("noise_floor_kl_mean")),
        "kl_p99": with_error(s.get("noise_floor_kl_p99")),
    }
    size = size_cell(*(comparison.baseline.manifest.get(name) for name in ("bits_per_weight", "weight_bytes")))
    rows = _reference_row(f'{model} <span class="tag">baseline</span>', baseline, shown, size if with_size else None)
    if usable(s.get("noise_floor_kl_mean")) is not None or usable(s.get("noise_floor_kl_p99")) is not None:
        again = 'noise floor <span class="tag">baseline computed otherwise</span>'
        rows += _reference_row(again, noise, shown, "" if with_size else None)
    return rows


def _reference_row(name: str, cells: Mapping[str, str], shown: Sequence[Measure], size: str | None) -> str:
    """``size`` is None where the table has no such column."""
    own = ""
    if size is not None:
        own = f'<td data-label="Size">{size}</td>' if size else '<td class="none"></td>'
    rest = "".join(
        f'<td data-label="{escaped(m.label)}">{cells[m.name]}</td>' if m.name in cells else '<td class="none"></td>'
        for m in shown
    )
    return f'<tr class="reference"><th scope="row">{name}</th>{own}{rest}</tr>'


def _best_and_worst(measure: Measure, statistics: Sequence[Statistics]) -> dict[int, str]:
    """Which rows hold a column's best and worst value; none where all are equal."""
    known = [(float(v), i) for i, s in enumerate(statistics) if (v := usable(s.get(measure.name))) is not None]
    if measure.better == "one":
        known = [(abs(math.log(value)) if value > 0 else math.inf, i) for value, i in known]
    if measure.better == "none" or len({value for value, _ in known}) < 2:
        return {}
    low, high = min(known)[0], max(known)[0]
    best, worst = (high, low) if measure.better == "high" else (low, high)
    return {i: "best" if value == best else "worst" for value, i in known if value in (best, worst)}


def _marked_cell(measure: Measure, statistics: Statistics, mark: str | None) -> str:
    said = f'<span class="unseen"> ({mark})</span>' if mark else ""
    kind = f' class="{mark}"' if mark else ""
    return f'<td{kind} data-label="{escaped(measure.label)}">{measure.cell(statistics)}{said}</td>'


def size_of(comparison: Comparison) -> str:
    """The candidate's."""
    return size_cell(*(comparison.manifest.get(name) for name in ("bits_per_weight", "bytes")))


def size_cell(bits_per_weight: object, stored_bytes: object) -> str:
    """Bits per weight over the size of the files, as HTML; '' where neither is known."""
    bits, count = usable(bits_per_weight), usable(stored_bytes)
    if bits is None:
        return escaped(file_size(count)) if count is not None else ""
    return f"{bits:.2f} bpw" + (f' <span class="error">{escaped(file_size(count))}</span>' if count is not None else "")


def runs_table(alone: Sequence[Run]) -> str:
    known = [m for m in RUN_MEASURES if any(m[0] in run.manifest.get("metrics", {}) for run in alone)]
    head = '<th scope="col">Run</th><th scope="col">Tokens</th>'
    head += "".join(f'<th scope="col">{escaped(label)}</th>' for _, label, _ in known)
    rows = []
    for i, run in enumerate(alone):
        metrics = run.manifest.get("metrics", {})
        cells = f'<td data-label="Tokens">{len(run.scores):,}</td>'
        for name, label, percent in known:
            stored = metrics.get(name)
            estimate = Estimate.from_json(stored) if stored else None
            cell = with_error(estimate.value, estimate.stderr, percent=percent) if estimate else "–"
            cell += _groups(estimate, run) if estimate else ""
            cells += f'<td data-label="{escaped(label)}">{cell}</td>'
        rows.append(f'<tr><th scope="row">{charts.swatch(i)} {escaped(run_name(run, alone))}</th>{cells}</tr>')
    return _table(head, rows, '<p class="note">± is one standard error, over the groups that stand behind it.</p>')


def _groups(estimate: Estimate, run: Run) -> str:
    kind = str(run.manifest.get("stderr_groups", "groups"))
    said = too_few(estimate.groups, kind) if estimate.stderr is None else f"{estimate.groups:,} {kind}"
    return f' <span class="error">({escaped(said)})</span>' if math.isfinite(estimate.value) else ""


def run_name(run: Run, among: Sequence[Run] = ()) -> str:
    """The model; with the text, the engine or the folder where the model alone would not tell runs apart."""
    m = run.manifest
    parts = [str(m.get("model", "run"))]
    for name in ("corpus", "engine", "dtype", "method"):
        if len({str(other.manifest.get(name)) for other in among}) > 1:
            parts.append(str(m.get(name)))
    named = " · ".join(parts)
    twins = [other for other in among if [str(other.manifest.get("model", "run"))] == parts[:1]]
    return f"{named} · {run.path}" if len(parts) == 1 and len(twins) > 1 and run.path else named


# ── charts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def positions(run: Run) -> Ints:
    """How many tokens of its window stand between each target and the first one that the window scores."""
    window, token = run.facts.window, run.facts.token
    if not len(window):
        return np.zeros(0, np.int64)
    first = np.full(int(window.max()) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, window, token)
    return np.asarray(token - first[window], dtype=np.int64)


def delta_logprob(comparison: Comparison) -> Floats:
    """Nats by which the text's own token became likelier; NaN where both models give it nothing."""
    with np.errstate(invalid="ignore"):
        return np.asarray(comparison.candidate.scores.logprob - comparison.baseline.scores.logprob)


def _charts(comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]) -> str:
    drawn: list[str | None] = []
    if comparisons:
        drawn += _comparison_charts(comparisons, statistics)
    else:
        series = [Series(run_name(r, alone), -r.scores.logprob, positions(r), r.facts.group) for r in alone]
        text = "Mean surprise along the window: context makes a text easier."
        drawn.append(charts.surprise_distribution(series))
        drawn.append(charts.along_the_window("What context is worth", text, series, "surprise, nats"))
    figures = [figure for figure in drawn if figure]
    if not figures:
        return ""
    names = [c.name for c in comparisons] or [run_name(run, alone) for run in alone]
    keys = "".join(f"<li>{charts.swatch(i)} {escaped(name)}</li>" for i, name in enumerate(names))
    if any(c.noise_kl is not None and len(c.noise_kl) for c in comparisons):
        keys += '<li><span class="noise-key" aria-hidden="true"></span> noise floor: the baseline against itself</li>'
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in _chart_notes(comparisons, alone))
    kind = "four" if len(figures) in (2, 4) else "six"
    return (
        '<section id="charts" aria-labelledby="charts-title"><h2 id="charts-title">Charts</h2>'
        f'<ul class="legend">{keys}</ul><div class="charts {kind}">{"".join(figures)}</div>{notes}</section>\n'
    )


def _comparison_charts(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> list[str | None]:
    place = {id(c): positions(c.baseline) for c in comparisons}
    deltas = [Series(c.name, delta_logprob(c), place[id(c)], c.groups) for c in comparisons]
    # a candidate without KL keeps its place, so that every chart has its colour
    kls = [
        Series(c.name, c.kl if c.kl is not None else np.full(len(c.groups), np.nan), place[id(c)], c.groups)
        for c in comparisons
    ]
    drawn: list[str | None] = []
    if any(c.kl is not None for c in comparisons):
        noises = [c.noise_kl for c, _ in _distinct_baselines(comparisons, statistics) if c.noise_kl is not None]
        floor = next((s.get("noise_floor_kl_p99") for s in statistics if usable(s.get("noise_floor_kl_p99"))), None)
        noise = np.concatenate(noises) if noises else None
        drawn.append(charts.kl_distribution(kls, noise, [("noise 99%", usable(floor))]))
    drawn.append(charts.delta_distribution(deltas))
    if any(c.kl is not None for c in comparisons):
        text = "Mean KL along the window, with one standard error."
        drawn.append(charts.along_the_window("Does drift grow with context?", text, kls, "KL, nats"))
    text = "Mean Δ logprob along the window; below zero the text became less likely."
    drawn.append(charts.along_the_window("Where the text got worse", text, deltas, "Δ logprob, nats"))
    return drawn + _size_charts(comparisons, statistics)


def _size_charts(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> list[str | None]:
    """Quality against bits per weight, or against bytes where bits are not known of as many."""
    bits = [usable(c.manifest.get("bits_per_weight")) for c in comparisons]
    sizes = [usable(c.manifest.get("bytes")) for c in comparisons]
    by_bits = sum(b is not None for b in bits) >= sum(s is not None for s in sizes)
    unit, label = (1.0, "bits per weight") if by_bits else (float(2**30), "size, GiB")
    drawn: list[str | None] = []
    for name, title, value_label, log in (
        ("ppl_ratio", "What a bit buys: perplexity", "perplexity ratio", False),
        ("kl_mean", "What a bit buys: KL", "mean KL, nats", True),
    ):
        points = []
        for i, (size, s) in enumerate(zip(bits if by_bits else sizes, statistics, strict=True)):
            value = usable(s.get(name))
            if size is not None and value is not None:
                stderr = usable(s.get(f"{name}_stderr"))
                points.append(SizedPoint(comparisons[i].name, i, size / unit, value, stderr))
        text = f"{value_label[:1].upper()}{value_label[1:]} against {label}; lower and further left is better."
        drawn.append(charts.against_size(title, text, points, size_label=label, value_label=value_label, log=log))
    return drawn


def _chart_notes(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> list[str]:
    notes = []
    for c in comparisons:
        unbounded = int((~np.isfinite(delta_logprob(c))).sum())
        if unbounded:
            notes.append(f"{c.name}: {unbounded:,} tokens have probability zero in a model and are not in the charts.")
        if c.kl is None:
            why = "no KL, because two finished runs were compared and keep no whole distributions"
            notes.append(f"{c.name}: {c.manifest.get('kl_missing') or why}.")
    for run in () if comparisons else alone:
        unbounded = int((~np.isfinite(run.scores.logprob)).sum())
        if unbounded:
            notes.append(
                f"{run_name(run, alone)}: {unbounded:,} tokens have probability zero and are not in the charts."
            )
    return notes


# ── the text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _distinct(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for run in runs:
        if not any(_same(run, other) for other in found):
            found.append(run)
    return found


def reading_order(run: Run, limit: int) -> Ints:
    """Targets as a reader meets their tokens, each token once, at most ``limit`` of them.

    Where windows overlap and score a token again, its first score stays: the one with the most context.
    """
    return np.asarray(np.unique(run.facts.token, return_index=True)[1][:limit], dtype=np.int64)


class PageData:
    """What the script gets: columns as base64, words once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.words: dict[str, int] = {}
        self.texts: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self._orders: dict[str, tuple[int, Ints]] = {}
        self._known: list[tuple[Run, int]] = []

    def text_of(self, run: Run) -> tuple[int, Ints]:
        """The text that a run scored, and the order in which its targets are read; one a plan."""
        if run.plan_digest not in self._orders:
            order = reading_order(run, self.limit)
            facts = run.facts
            token, document, window = facts.token[order], facts.document[order], facts.window[order]
            begins = np.ones(len(order), dtype=np.bool_)
            begins[1:] = (np.diff(token) != 1) | (np.diff(document) != 0)
            enters = np.ones(len(order), dtype=np.bool_)
            enters[1:] = np.diff(window) != 0
            self.texts.append(
                {
                    "count": len(order),
                    "word": self._words(facts.text[order]),
                    # stretches without a gap: where each begins, its first position and its document
                    "begin": column(np.flatnonzero(begins)),
                    "beginToken": column(token[begins]),
                    "beginDocument": column(document[begins]),
                    "documents": len(np.unique(document)),
                    "enter": column(np.flatnonzero(enters)),
                    "enterWindow": column(window[enters]),
                }
            )
            self._orders[run.plan_digest] = (len(self.texts) - 1, order)
        return self._orders[run.plan_digest]

    def scores_of(self, run: Run) -> int:
        for known, index in self._known:
            if known is run:
                return index
        _, order = self.text_of(run)
        s = run.scores
        self.scores.append(
            {
                "logprob": column(s.logprob[order]),
                "rank": column(s.rank[order]),
                "topLogprob": column(s.top_logprob[order]),
                "topWord": self._words(run.facts.top_text[order]),
            }
        )
        self._known.append((run, len(self.scores) - 1))
        return len(self.scores) - 1

    def _words(self, texts: npt.NDArray[np.object_]) -> dict[str, str]:
        words = self.words
        return column(np.fromiter((words.setdefault(str(t), len(words)) for t in texts), np.int64, len(texts)))


def page_data(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> dict[str, Any]:
    """Everything that the script draws; texts are made visible here, so that the script shows them as they are."""
    made = PageData(limit)
    views: list[dict[str, Any]] = []
    for c in comparisons:
        text, order = made.text_of(c.baseline)
        baseline, candidate = made.scores_of(c.baseline), made.scores_of(c.candidate)
        kl = column(c.kl[order]) if c.kl is not None else None
        of = visible(c.baseline.manifest.get("model", "baseline"))
        views.append(
            {
                "name": visible(c.name),
                "baselineName": of,
                "text": text,
                "baseline": baseline,
                "candidate": candidate,
                "kl": kl,
            }
        )
    for run in alone:
        text, _ = made.text_of(run)
        name = visible(run_name(run, alone))
        views.append(
            {
                "name": name,
                "baselineName": name,
                "text": text,
                "baseline": made.scores_of(run),
                "candidate": None,
                "kl": None,
            }
        )
    return {
        "views": views,
        "texts": made.texts,
        "scores": made.scores,
        "words": [visible(word) for word in made.words],
        "sensitivity": {
            "delta": _sensitivity([delta_logprob(c) for c in comparisons]),
            "kl": _sensitivity([c.kl for c in comparisons if c.kl is not None]),
        },
    }


def _sensitivity(values: Sequence[Floats]) -> int:
    """1, 10 or 100: so that of the candidate that moved most about one token in a hundred has a colour."""
    sizes = [np.abs(v[np.isfinite(v)]) for v in values]
    high = max((float(np.quantile(s, SENSITIVITY_QUANTILE)) for s in sizes if len(s)), default=1.0)
    return 1 if high >= FIRST_STEP else 10 if high >= FIRST_STEP / 10 else 100


def column(values: npt.NDArray[Any]) -> dict[str, str]:
    """Numbers as base64 of the smallest little-endian type that holds them; float32 is enough to look at."""
    if values.dtype.kind == "f":
        kind = "f4"
    else:
        top = int(values.max()) if len(values) else 0
        kind = "u1" if top < 2**8 else "u2" if top < 2**16 else "u4"
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(values.astype(f"<{kind}")).tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode()}


def _text_section(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> str:
    if not comparisons and not alone:
        return ""
    names = [c.name for c in comparisons] + [run_name(run, alone) for run in alone]
    options = "".join(f'<option value="{i}">{escaped(name)}</option>' for i, name in enumerate(names))
    label = "Candidate" if comparisons else "Run"
    measures = [("delta", "Δ logprob", True), ("kl", "KL", any(c.kl is not None for c in comparisons))]
    buttons = "".join(
        f'<button type="button" data-measure="{name}" aria-pressed="false">{text}</button>'
        for name, text, known in [*measures, ("surprise", "Surprise", True)]
        if known
    )
    # runs alone have one measure: nothing to choose
    colour_by = f'<div class="choice" role="group" aria-label="Colour by">{buttons}</div>' if comparisons else ""
    scales = "".join(f'<option value="{n}">{text}</option>' for n, text in ((1, "normal"), (10, "×10"), (100, "×100")))
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in _text_notes(comparisons, alone, limit))
    return f"""<section id="text" aria-labelledby="text-title"><h2 id="text-title">The text</h2>
<noscript><p class="note">The text is drawn by a script, and scripts are switched off here.</p></noscript>{notes}
<div class="tools" hidden>
<label>{label} <select id="view">{options}</select></label>
{colour_by}
<label id="scale-label">Sensitivity <select id="scale">{scales}</select></label>
<div class="choice jump" role="group" aria-label="Jump to the worst tokens">
<button type="button" id="worst">Worst</button>
<button type="button" id="previous-worst" aria-keyshortcuts="p" title="key p">‹ Previous</button>
<button type="button" id="next-worst" aria-keyshortcuts="n" title="key n">Next worst ›</button></div>
<form id="go" class="find">
<label>Position <input id="position" type="number" min="0" step="1" inputmode="numeric"></label>
<button>Go</button></form>
<form id="search" class="find">
<label>Find <input id="needle" type="search" autocomplete="off" spellcheck="false"></label>
<button>Find</button></form>
</div>
<div id="legend" class="scale" hidden></div>
<p id="said" class="said" role="status" aria-live="polite"></p>
<div class="worst-list" hidden><h3 id="worst-title">Worst tokens</h3><ol id="worst-tokens"></ol></div>
<h3 class="reading-title" hidden>Every token</h3>
<div class="overview" hidden><svg id="map" viewBox="0 0 600 44" preserveAspectRatio="none" aria-hidden="true"></svg>
<input id="page" type="range" min="1" max="1" value="1" step="1" aria-label="Page of the text"></div>
<div class="reading" hidden>
<div><div id="tokens" class="tokens" role="listbox" aria-orientation="horizontal" tabindex="0" dir="auto"
 aria-label="Tokens of the text. Left and right move, n and p jump to the worst."></div>
<div class="pager"><button type="button" id="previous-page">‹ Previous page</button><span id="page-number"></span>
<button type="button" id="next-page">Next page ›</button></div></div>
<aside id="details" class="details" aria-label="The chosen token" aria-live="polite"></aside>
</div>
</section>
"""


def _text_notes(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> list[str]:
    notes: dict[str, None] = {}
    for run in [*(c.baseline for c in comparisons), *alone]:
        unique = len(np.unique(run.facts.token))
        if unique > limit:
            notes[f"The text shows its first {limit:,} of {unique:,} tokens; the numbers and charts count all."] = None
        if unique < len(run.scores):
            again = len(run.scores) - unique
            notes[f"{again:,} targets score a token again; the text shows each token with its first score."] = None
    return list(notes)


# ── provenance ───────────────────────────────────────────────────────────────────────────────────────────────────────


def run_facts(run: Run) -> dict[str, str]:
    """What another person needs to get the same numbers, in words; what a manifest does not say is left out."""
    m = run.manifest
    settings = m.get("engine_settings") or {}
    speed = usable(m.get("tokens_per_second"))
    seconds = usable(m.get("seconds"))
    facts = {
        "model": m.get("model"),
        "model revision": m.get("model_revision"),
        "model sha256": m.get("model_fingerprint"),
        "engine": m.get("engine"),
        "versions": _pairs(m.get("versions")),
        "dtype": m.get("dtype"),
        "device": m.get("device"),
        "head": m.get("head"),
        "head kernel": settings.get("head_kernel"),
        "engine settings": _pairs({k: v for k, v in settings.items() if k != "head_kernel"}),
        "hardware": _pairs(m.get("hardware")),
        "method": m.get("method"),
        "method settings": _pairs(m.get("method_settings")),
        "corpus": m.get("corpus"),
        "corpus sha256": m.get("corpus_sha256"),
        "corpus bytes": f"{m['corpus_bytes']:,}" if usable(m.get("corpus_bytes")) is not None else None,
        "tokenizer": m.get("tokenizer"),
        "plan digest": run.plan_digest,
        "targets": f"{len(run.scores):,}",
        "windows": f"{m['windows']:,}" if usable(m.get("windows")) is not None else None,
        "notes": "; ".join(map(str, m.get("notes") or [])),
        "scored at": m.get("created") or m.get("finished"),
        "seconds": f"{seconds:,.1f}" if seconds is not None else None,
        "tokens/s": f"{speed:,.0f}" if speed is not None else None,
        "folder": run.path,
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _pairs(values: Any) -> str:
    if not isinstance(values, Mapping):
        return "" if values is None else str(values)
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None and v != "")


def _provenance(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> str:
    named: list[tuple[str, Run]] = []
    for c in comparisons:
        if not any(_same(c.baseline, run) for _, run in named):
            named.append(("baseline", c.baseline))
        named.append((c.name, c.candidate))
    named += [(run_name(run, alone), run) for run in alone]
    if not named:
        return ""
    facts = [run_facts(run) for _, run in named]
    shared = {k: v for k, v in facts[0].items() if len(facts) > 1 and all(f.get(k) == v for f in facts)}
    parts = [f"<h3>The same for all</h3>{_facts_list(shared)}"] if shared else []
    for (name, _), own in zip(named, facts, strict=True):
        rest = {k: v for k, v in own.items() if k not in shared}
        parts.append(f"<details><summary>{escaped(name)}</summary>{_facts_list(rest)}</details>")
    return (
        '<section id="provenance" aria-labelledby="provenance-title"><h2 id="provenance-title">Provenance</h2>'
        f"{_commands(comparisons, alone)}{''.join(parts)}</section>\n"
    )


def _facts_list(facts: Mapping[str, str]) -> str:
    lines = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{lines}</dl>'


def commands_of(manifest: Mapping[str, Any]) -> list[str]:
    """Exact commands as they are typed, from one line, a list of lines, or the words of one command."""
    given = manifest.get("command") or []
    if isinstance(given, str):
        return [given]
    if len(given) > 1 and isinstance(given[0], str) and not any(c.isspace() for c in given[0]):
        return [shlex.join(map(str, given))]  # its first word is a program's name alone: sys.argv, not lines
    return [line if isinstance(line, str) else shlex.join(map(str, line)) for line in given]


def _commands(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> str:
    manifests = [*(c.manifest for c in comparisons), *(run.manifest for run in alone)]
    lines = list(dict.fromkeys(line for manifest in manifests for line in commands_of(manifest)))
    if not lines:
        return ""
    # what is copied is what was typed: only characters that would deceive the eye are made visible
    text = html.escape("\n".join(visible(line) for line in lines), quote=True)
    return (
        '<h3 id="commands-title">To get these numbers again</h3><div class="commands">'
        f'<pre id="commands" tabindex="0" aria-labelledby="commands-title">{text}</pre>'
        '<button type="button" id="copy" hidden>Copy</button></div>'
    )
