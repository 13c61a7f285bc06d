"""The section that draws quality against size: its switch, legend and notes."""

from __future__ import annotations

from collections.abc import Sequence

from scoremode.report.html.charts import escaped
from scoremode.report.html.numbers import Statistics, usable, written
from scoremode.report.html.plane import FRAMES, LARGEST, MEASURES, Measure, Plane, Point, mark_key
from scoremode.report.served import Served, in_groups, served
from scoremode.report.text import counted, without_common_start
from scoremode.statistics.comparison import Comparison

Missing = dict[str, list[str]]  # why candidates are not drawn, and their names
TITLE = "Quality against size"
CANNOT = "not a number that can be drawn"
HINT = "Point at a mark, or tap it, to read its figures here."
BEATS = {"low": "lower", "one": "closer to 1", "high": "higher"}
BETTER = {
    "low": "Lower and further to the left is better.",
    "one": "Closer to 1 and further to the left is better.",
    "high": "Higher and further to the left is better.",
}


def quality_section(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """The charts, one per measure; '' for fewer than two candidates."""
    if len(comparisons) < 2:
        return ""
    facts = [served(c) for c in comparisons]
    groups = list(in_groups(facts))
    views, inside = [], ""
    for measure in MEASURES:
        plane, missing = plane_of(measure, comparisons, statistics, facts)
        if len(plane.points) > 1:
            views.append(_View(plane, missing))
        else:
            words = f"No chart of {measure.choice}, which needs two candidates. {_not_drawn(missing)}"
            inside += f'<p class="note">{escaped(words)}</p>'
    inside = (_switched(views, groups) if views else "") + inside
    return (
        f'<section id="quality" aria-labelledby="quality-title"><h2 id="quality-title">{TITLE}</h2>{inside}</section>\n'
    )


def plane_of(
    measure: Measure, comparisons: Sequence[Comparison], statistics: Sequence[Statistics], facts: Sequence[Served]
) -> tuple[Plane, Missing]:
    """The chart of one measure; the candidates that are not in it, by the reason for that."""
    by_bits = any(f.bits_per_weight is not None for f in facts)
    label = "bits per weight" if by_bits else "size, GiB"
    groups = {name: number for number, name in enumerate(in_groups(facts))}
    labels = without_common_start([c.name for c in comparisons])
    points: list[Point] = []
    missing: Missing = {}
    for c, s, f, name in zip(comparisons, statistics, facts, labels, strict=True):
        size = f.bits_per_weight if by_bits else f.stored_bytes / 2**30 if f.stored_bytes else None
        value = usable(s.get(measure.name))
        if size is None:
            missing.setdefault(f"{'bits per weight' if by_bits else 'size'} not known", []).append(c.name)
        elif value is None or not measure.has_place(value):
            missing.setdefault(_why_missing(measure, c, s), []).append(c.name)
        else:
            error = usable(s.get(f"{measure.name}_stderr"))
            stderr = measure.factor * error if error is not None and 0 < error <= LARGEST else None
            said = _said(measure, c.name, f, s, by_bits)
            points.append(Point(c.name, name, said, groups[f.group], size, measure.factor * value, stderr))
    known = [usable(s.get("noise_floor_kl_mean")) for s in statistics] if measure.name == "kl_mean" else []
    floors = [floor for floor in known if floor is not None and 0 <= floor <= LARGEST]
    return Plane(points, measure, label, floors), missing


def _not_drawn(missing: Missing) -> str:
    reasons = [f"{', '.join(names)}: {why}" for why, names in missing.items()]
    return f"Not drawn: {'; '.join(reasons)}."


def _why_missing(measure: Measure, c: Comparison, s: Statistics) -> str:
    if measure.name == "same_top":
        return "no share of first choices was measured"
    if measure.name == "ppl_ratio":
        return f"its perplexity ratio is {CANNOT}"
    if c.kl is None:
        return str(c.manifest.get("kl_missing") or "no KL")
    infinite = int(usable(s.get("kl_infinite")) or 0)
    return f"KL is infinite on {counted(infinite, 'tokens')}" if infinite else f"its KL is {CANNOT}"


def _said(measure: Measure, name: str, f: Served, s: Statistics, by_bits: bool) -> str:
    number, error = written(s.get(measure.name), s.get(f"{measure.name}_stderr"), percent=measure.name == "same_top")
    size = f"{f.bits_per_weight:.2f} bits per weight" if by_bits else f"{(f.stored_bytes or 0) / 2**30:.2f} GiB"
    return f"{name}: {size}, {measure.choice} {number} {error}".strip() + (f" ({f.line})" if f.line else "")


class _View:
    """One chart, with what is written around it."""

    def __init__(self, plane: Plane, missing: Missing) -> None:
        self.plane, self.missing = plane, missing

    @property
    def key(self) -> str:
        return f"plane-{self.plane.measure.name}"

    def figure(self) -> str:
        measure, up = self.plane.measure, self.plane.up
        what = f"{measure.choice} against {self.plane.size_label.partition(',')[0]}"
        scale = " The vertical axis is logarithmic." if up.log else ""
        bars = " Bars are one standard error, as in the table." if any(p.stderr for p in self.plane.points) else ""
        front = f" Dashed, the Pareto front: no candidate of the same or a smaller size is {BEATS[measure.better]}."
        text = f"{BETTER[measure.better]}{bars}{scale}{front} It is drawn from the values, without their errors."
        drawn = "".join(self.plane.drawing(frame, f"{what}. {text}") for frame in FRAMES)
        return (
            f'<figure class="chart plane-view of-{measure.name}"><figcaption><strong>{escaped(what)}</strong> '
            f"<span>{escaped(text)}</span></figcaption>{drawn}{''.join(self._notes())}</figure>"
        )

    def _notes(self) -> list[str]:
        notes = []
        zero = [p.name for p in self.plane.points if self.plane.up.log and p.value <= 0]
        if zero:
            notes.append(f"On the lower edge, because a logarithmic axis has no 0: {', '.join(zero)}.")
        if self.missing:
            notes.append(_not_drawn(self.missing))
        found = [f'<p class="note">{escaped(note)}</p>' for note in notes]
        for frame in FRAMES:
            unnamed = sum(spot is None for spot in self.plane.names(frame))
            if unnamed:
                words = f"{counted(unnamed, 'names')} had no room beside the marks: point at them, or tap them."
                found.append(f'<p class="note {frame.kind}">{escaped(words)}</p>')
        return found


def _switched(views: Sequence[_View], groups: Sequence[str]) -> str:
    """Radio buttons that the style sheet obeys: the switch needs no script."""
    radio = '<input class="unseen" type="radio" name="plane" autocomplete="off"'
    inputs = "".join(f'{radio} id="{view.key}"{"" if i else " checked"}>' for i, view in enumerate(views))
    labels = "".join(f'<label for="{view.key}">{escaped(view.plane.measure.choice)}</label>' for view in views)
    keys = "".join(f"<li>{mark_key(i)} {escaped(name)}</li>" for i, name in enumerate(groups))
    line = '<svg class="swatch" viewBox="0 0 28 10" width="28" height="10" aria-hidden="true">'
    keys += f'<li>{line}<path class="front" d="M1 2H14V8H27"/></svg> Pareto front</li>'
    if any(view.plane.floor is not None for view in views):
        keys += '<li><span class="noise-key" aria-hidden="true"></span> noise floor: the baseline against itself</li>'
    switch = f'<div class="choice switch">{labels}</div>' if len(views) > 1 else ""
    return (
        f'<div class="plane">{inputs if len(views) > 1 else ""}{switch}<ul class="legend">{keys}</ul>'
        f"{''.join(view.figure() for view in views)}"
        f'<p class="said" id="plane-said" aria-live="polite" hidden>{HINT}</p></div>'
    )
