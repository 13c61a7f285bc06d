"""Numbers and sizes as the page shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scoremode.report.html.charts import escaped

Statistics = Mapping[str, Any]


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def usable(value: Any) -> float | None:
    """The number; None if it is missing, NaN or not a number. Infinity is kept."""
    if value is None or isinstance(value, str | bool):
        return None
    number = float(value)
    return None if math.isnan(number) else number


def written(value: Any, stderr: Any = None, *, percent: bool = False) -> tuple[str, str]:
    """A number to the digits that its error justifies, and the error; '' if there is none.

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
    if error <= 1e-9 * abs(number):  # rounding noise is not an error
        return f"{_rounded(number, percent)}{unit}", f"± 0{unit}"
    # numbers in a column are compared: below a thousandth, a number and its error share a power of ten
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


def cell_with_error(value: Any, stderr: Any = None, *, percent: bool = False) -> str:
    """The number and its error as HTML, for a table cell."""
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
