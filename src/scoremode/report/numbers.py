"""Numbers for people. The label and the format of every statistic are declared here, once for every table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scoremode.statistics.groups import FEWEST
from scoremode.values import Estimate

Statistics = Mapping[str, Any]

DUST = 1e-9  # relative to the value: a smaller error is rounding noise


@dataclass(frozen=True)
class Measure:
    """A statistic of a comparison, or a metric of a run, as a column or a line of tables."""

    name: str  # in the statistics
    label: str  # on the page and in notebooks
    about: str = ""
    better: Literal["low", "high", "one", "none"] = "low"  # one: closer to 1 is better
    percent: bool = False
    terminal: str = ""  # the label in a terminal; '' if it is not shown there
    digits: int = 0  # after the point, in a terminal
    card: str = ""  # the label in a model card; '' if it is not shown there
    choice: str = ""  # on the switch of the chart against size; '' if it is not drawn there
    axis: str = ""  # the label of that chart's axis

    @property
    def factor(self) -> float:
        return 100.0 if self.percent else 1.0

    def cost(self, value: float) -> float:
        """The value as a number of which less is better."""
        if self.better == "one":
            return abs(math.log(value)) if value > 0 else math.inf
        return -value if self.better == "high" else value


MEASURES = (
    Measure("ppl_candidate", "Perplexity", "exponential of the mean surprise", "none", False, "ppl", 4, "perplexity"),
    Measure(
        "ppl_ratio",
        "PPL ratio",
        "perplexity divided by the baseline's",
        "one",
        terminal="ratio",
        digits=4,
        card="ratio",
        choice="Perplexity ratio",
        axis="perplexity ratio",
    ),
    Measure(
        "kl_mean",
        "KL mean",
        "mean KL(baseline‖candidate), nats per token",
        terminal="KL mean",
        digits=5,
        card="KL mean (nats)",
        choice="KL",
        axis="mean KL, nats per token",
    ),
    Measure("kl_median", "KL median", "half of the tokens moved less", terminal="median", digits=5),
    Measure("kl_p99", "KL 99%", "99% of the tokens moved less", terminal="99%", digits=4, card="KL 99 %"),
    Measure("kl_p999", "KL 99.9%", "99.9% of the tokens moved less"),
    Measure("kl_max", "KL max", "the token that moved most", terminal="max", digits=2),
    Measure(
        "delta_p_rms", "Δp RMS", "root mean square change in the probability of the text's own token", percent=True
    ),
    Measure(
        "same_top",
        "Same top",
        "share of tokens with the same first choice",
        "high",
        percent=True,
        terminal="same top",
        digits=2,
        card="same top",
        choice="Same top",
        axis="same first choice, % of tokens",
    ),
    Measure("worse", "Worse", "share of the text's tokens that became less likely", "none", percent=True),
    Measure("bits_per_byte_candidate", "Bits/byte", "bits per byte of the text", "none"),
)

RUN_MEASURES = (
    Measure("perplexity", "Perplexity", terminal="perplexity"),
    Measure("bits_per_byte", "Bits/byte", terminal="bits per byte"),
    Measure("word_perplexity", "Word PPL", terminal="word perplexity"),
    Measure("top1_accuracy", "Top-1", percent=True, terminal="top-1 accuracy"),
    Measure("mean_rank", "Mean rank", terminal="mean rank"),
    Measure("mean_entropy", "Entropy, nats", terminal="entropy (nats)"),
)


def usable(value: Any) -> float | None:
    """The number; None if it is missing, NaN or not a number. Infinity is kept."""
    if value is None or isinstance(value, str | bool):
        return None
    number = float(value)
    return None if math.isnan(number) else number


def digits_of(error: float) -> int:
    """The decimals that an error justifies: two digits of it."""
    return min(8, max(0, 1 - math.floor(math.log10(error))))


def written(value: Any, stderr: Any = None, *, percent: bool = False) -> tuple[str, str]:
    """On the page: a number to the digits that its error justifies, and the error; '' if there is none.

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
    if error <= DUST * abs(number):
        return f"{_rounded(number, percent)}{unit}", f"± 0{unit}"
    # numbers in a column are compared: below a thousandth, a number and its error share a power of ten
    power = math.floor(math.log10(abs(number))) if 0 < abs(number) < 1e-3 else 0
    number, error, shown = number / 10.0**power, error / 10.0**power, f"e{power}" if power else ""
    digits = digits_of(error)
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


def with_error(estimate: Estimate, percent: bool = False) -> str:
    """In a terminal and in Markdown: the value to the digits that its error justifies, and the error.

    >>> with_error(Estimate(12.7412, 0.3149, 100, 10))
    '12.74 ± 0.31'
    """
    factor, unit = (100.0, "%") if percent else (1.0, "")
    value = estimate.value * factor
    if math.isnan(value):
        return "none (no whole word or byte was scored)"
    if math.isinf(value):
        return "unbounded (a target has probability zero)"
    if estimate.stderr is None:
        return f"{value:,.4f}{unit}"
    error = estimate.stderr * factor
    if error <= DUST * abs(value):
        return f"{value:,.4f}{unit} ± 0"
    digits = digits_of(error)
    return f"{value:,.{digits}f}{unit} ± {error:,.{digits}f}{unit}"


def basis(estimate: Estimate, kind: str, percent: bool = False) -> str:
    """The groups that an error is based on, and the bounds that follow.

    >>> basis(Estimate(12.7412, 0.3149, 100, 10, 9.0, 12.0288, 13.4536), "documents")
    '10 documents, 95%: 12.03 to 13.45'
    >>> basis(Estimate(12.7412, None, 100, 3), "documents")
    'too few groups for an error: 3 documents, 5 are needed'
    """
    counted = f"{estimate.groups:,} {kind}"
    if not math.isfinite(estimate.value):
        return ""
    if estimate.stderr is None or estimate.low is None or estimate.high is None:
        return f"too few groups for an error: {counted}, {FEWEST} are needed"
    factor, unit = (100.0, "%") if percent else (1.0, "")
    some = estimate.stderr > DUST * abs(estimate.value)
    digits = digits_of(estimate.stderr * factor) if some else 4
    low, high = (f"{bound * factor:,.{digits}f}{unit}" for bound in (estimate.low, estimate.high))
    return f"{counted}, 95%: {low} to {high}"


def file_size(count: Any) -> str:
    number = usable(count)
    if number is None or not math.isfinite(number):
        return "–"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"
