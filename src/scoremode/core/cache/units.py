"""Parses and formats sizes and ages as people write them: ``10GB``, ``30d``."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from scoremode.errors import listed, shortened

DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SECONDS = {"h": 3600, "d": 86_400, "w": 7 * 86_400}
NUMBER_AND_UNIT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Parses a size into bytes; raises ValueError with the reason if the text is not a size.

    >>> parse_size("10GB"), parse_size("1.5 MiB"), parse_size("0")
    (10000000000, 1572864, 0)
    """
    match = NUMBER_AND_UNIT.fullmatch(text)
    if match and float(match[1]) == 0 and not match[2]:
        return 0
    factor = {**DECIMAL, **BINARY}.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"'{shortened(text)}' is not a size, as in 500MB, 10GB or 1.5TB")
    return round(float(match[1]) * factor)


def parse_age(text: str) -> float:
    """Parses an age into seconds; raises ValueError with the reason if the text is not an age.

    >>> parse_age("12h"), parse_age("30d")
    (43200.0, 2592000.0)
    """
    match = NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2] not in SECONDS:
        raise ValueError(f"'{shortened(text)}' is not an age, as in 12h (hours), 30d (days) or 4w (weeks)")
    return float(match[1]) * SECONDS[match[2]]


def size_words(size: float) -> str:
    """Formats a size in decimal units, rounded to at least two digits.

    >>> size_words(999), size_words(4_230_000_000), size_words(50 * 10**9), size_words(999_999)
    ('999 B', '4.2 GB', '50 GB', '1 MB')
    """
    unit, factor = "B", 1
    for name, bytes_of in list(DECIMAL.items())[1:]:
        if size >= bytes_of * 0.9995:
            unit, factor = name, bytes_of
    value = size / factor
    number = f"{value:.0f}" if factor == 1 or value >= 99.95 else f"{value:.1f}".removesuffix(".0")
    return f"{number} {unit.replace('K', 'k')}"


def age_words(seconds: float) -> str:
    """Formats an age in the largest unit that fits.

    >>> age_words(5), age_words(600), age_words(7300), age_words(5 * 86_400)
    ('5 s', '10 min', '2 h', '5 d')
    """
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def moment(seconds: float) -> datetime:
    """Converts a file's time, which may be out of range, to a printable time in UTC.

    >>> moment(1e30).year > 2020, moment(-1e30).year
    (True, 1970)
    """
    return datetime.fromtimestamp(min(max(0.0, seconds), time.time() + 60), UTC)


def counts_in_words(counts: dict[str, int]) -> str:
    """Formats counts of things, given by their plural names, as text.

    >>> counts_in_words({"references": 1, "runs": 12}), counts_in_words({})
    ('1 reference and 12 runs', 'nothing')
    """
    phrases = [f"{n:,} {name.removesuffix('s') if n == 1 else name}" for name, n in counts.items() if n]
    return listed(phrases) or "nothing"
