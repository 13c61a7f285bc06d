"""The top of the page: the result in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scoremode.errors import RunError
from scoremode.report.html.charts import escaped, visible
from scoremode.report.html.numbers import Statistics, cell_with_error, usable, written
from scoremode.report.html.runs import distinct
from scoremode.statistics.comparison import Comparison
from scoremode.statistics.ranking import closest, pairs_tested
from scoremode.store.run import Run


def headline(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]
) -> tuple[str, str]:
    if not comparisons:
        names = list(dict.fromkeys(str(run.manifest.get("model", "a model")) for run in alone))
        title = f"{_listed(names)} on {_listed(_corpora(alone))}" if alone else "Nothing to report"
        return visible(title), escaped(_scored(alone)) if alone else ""
    baselines = distinct([c.baseline for c in comparisons])
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
    return counted + (f" with {method}." if method else ".")


def _verdict(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """The result in a sentence: the numbers of one candidate, or which of several is closest to the baseline."""
    name, measure = ("kl_mean", "mean KL") if _all_known(statistics, "kl_mean") else ("ppl_ratio", "perplexity ratio")
    if len(comparisons) == 1:
        return _verdict_of_one(statistics[0])
    try:
        best, *tied = closest(comparisons)
    except (RunError, ValueError):  # baselines or texts differ, or no candidate has a value
        return ""
    number = cell_with_error(statistics[best].get(name), statistics[best].get(f"{name}_stderr"))
    said = f"Closest to the baseline by {measure}: <strong>{escaped(comparisons[best].name)}</strong>, {number}."
    others = _listed([comparisons[i].name for i in tied])
    said += f" It cannot be told apart from {escaped(others)}." if tied else ""
    words = pairs_tested(len(comparisons))
    return said + (f" <small>({words}.)</small>" if words else "")


def _all_known(statistics: Sequence[Statistics], name: str) -> bool:
    return all(usable(s.get(name)) is not None for s in statistics)


def _verdict_of_one(s: Statistics) -> str:
    said = []
    if usable(s.get("ppl_ratio")) is not None:
        numbers = f"{written(s.get('ppl_baseline'))[0]} → {written(s.get('ppl_candidate'))[0]}"
        said.append(
            f"Perplexity {escaped(numbers)}, a ratio of {cell_with_error(s['ppl_ratio'], s.get('ppl_ratio_stderr'))}."
        )
    kl, floor = usable(s.get("kl_mean")), usable(s.get("noise_floor_kl_mean"))
    if kl is not None:
        times = f", {kl / floor:,.0f} times the noise floor" if floor and kl / floor >= 1.5 else ""
        said.append(f"Mean KL {cell_with_error(kl, s.get('kl_mean_stderr'))} nats{times}.")
    if usable(s.get("same_top")) is not None:
        share = cell_with_error(s["same_top"], s.get("same_top_stderr"), percent=True)
        said.append(f"The same first choice on {share} of tokens.")
    return " ".join(said)
