"""A log-log plot of how time grows, as SVG, written without a plotting library: three panels with two lines each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

PANELS = (("rows", "rows"), ("vocabulary", "vocabulary V"), ("width", "width D"))
SERIES = (("matmul_ms", "matmul", "#8a8f98"), ("scoremode_ms", "scoremode", "#c2410c"))
INK, GRAY, FAINT, PAPER = "#1f2328", "#57606a", "#dfe3e8", "#ffffff"
WIDTH, HEIGHT = 1080, 400
LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT, GAP = 72, 78, 300, 220, 38
BOTTOM = TOP + PANEL_HEIGHT

Point = dict[str, Any]
Scale = Callable[[float], float]


def draw(points: Sequence[Point], caption: str) -> str:
    """``points`` have an axis, the numbers of rows, vocabulary and width, and the milliseconds of each series."""
    times = [p[key] for p in points for key, _, _ in SERIES]
    ticks = _time_ticks(min(times), max(times))
    y = _log_scale(ticks[0], ticks[-1], BOTTOM, TOP)
    parts = [
        _text(LEFT, 30, "Milliseconds of the head, one number changed at a time", size=17, bold=True),
        _text(LEFT, 52, caption, size=12, color=GRAY),
        *_legend(),
    ]
    parts += [_text(LEFT - 8, y(tick) + 4, f"{tick:g}", size=12, anchor="end") for tick in ticks]
    parts.append(_text(LEFT - 8, BOTTOM + 42, "× matmul", size=11, anchor="end", color=GRAY))
    for place, (axis, title) in enumerate(PANELS):
        chosen = sorted((p for p in points if p["axis"] == axis), key=lambda p: float(p[axis]))
        left = LEFT + place * (PANEL_WIDTH + GAP)
        if chosen:
            inner = 16  # so that the first and last marks are not on the frame
            x = _log_scale(chosen[0][axis], chosen[-1][axis], left + inner, left + PANEL_WIDTH - inner)
            parts += [_line(left, y(tick), left + PANEL_WIDTH, y(tick), color=FAINT) for tick in ticks]
            parts += _panel(chosen, axis, x, y)
            words = f"{title}   ({_fixed(chosen[0], axis)})"
            parts.append(_text(left + PANEL_WIDTH / 2, BOTTOM + 72, words, size=13, anchor="middle"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def _fixed(point: Point, axis: str) -> str:
    """The values that are constant in a panel."""
    texts = {
        "rows": f"{_short(point['rows'])} rows",
        "vocabulary": f"V {_short(point['vocabulary'])}",
        "width": f"D {_short(point['width'])}",
    }
    return ", ".join(text for name, text in texts.items() if name != axis)


def _panel(points: list[Point], axis: str, x: Scale, y: Scale) -> list[str]:
    """Marks and lines of both series; below them the tick labels and the ratio of the two."""
    parts = []
    for p in points:
        ratio = p["scoremode_ms"] / p["matmul_ms"]
        parts += [
            _line(x(p[axis]), TOP, x(p[axis]), BOTTOM, color=FAINT),
            _text(x(p[axis]), BOTTOM + 20, _short(p[axis]), size=12, anchor="middle"),
            _text(x(p[axis]), BOTTOM + 42, f"{ratio:.2f}", size=11, anchor="middle", color=SERIES[1][2]),
        ]
    for key, _, color in SERIES:
        places = [(x(p[axis]), y(p[key])) for p in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>' for a, b in places]
    return parts


def _legend() -> list[str]:
    parts = []
    for place, (_, name, color) in enumerate(SERIES):
        left = WIDTH - 240 + 110 * place
        parts.append(_line(left, 26, left + 22, 26, color=color, thickness=2))
        parts.append(f'<circle cx="{left + 11}" cy="26" r="3.5" fill="{color}"/>')
        parts.append(_text(left + 30, 30, name, size=13))
    return parts


def _time_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … around all times; only powers of ten if that would be too many."""
    for steps in ((1.0, 2.0, 5.0), (1.0,)):
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        candidates = [step * 10.0**decade for decade in decades for step in steps]
        first = max(i for i, c in enumerate(candidates) if c <= low)
        last = min(i for i, c in enumerate(candidates) if c >= high and i > first)
        if last - first < 10:
            break
    return candidates[first : last + 1]


def _log_scale(low: float, high: float, begin: float, end: float) -> Scale:
    if low == high:
        return lambda _: (begin + end) / 2
    length = math.log(high / low)
    return lambda value: begin + (end - begin) * math.log(value / low) / length


def _short(number: int) -> str:
    """8192 as 8k, 128256 as 125k: binary if it is even, otherwise rounded."""
    if number < 1024:
        return str(number)
    return f"{number // 1024}k" if number % 1024 == 0 else f"{number / 1024:.3g}k"


def _line(x1: float, y1: float, x2: float, y2: float, *, color: str, thickness: float = 1) -> str:
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{color}" stroke-width="{thickness}"/>'


def _text(
    x: float, y: float, words: str, *, size: int, anchor: str = "start", color: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
