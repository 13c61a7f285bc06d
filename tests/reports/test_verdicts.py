"""The sentence about a candidate: KL and first choices against the noise floor, and perplexity for the direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode.core.statistics.comparison import Comparison, comparison_statistics
from scoremode.reports.verdicts import Verdict, rule_words, scale_words, verdicts
from tests.core.statistics.test_comparison import compared
from tests.reports.demo import with_statistics

GROUPS, EACH = 40, 25


def shifted(mean: float, *, kl: float = 0.1, floor: float | None = 0.001, name: str = "q4") -> Comparison:
    """A candidate whose tokens are less likely by ``mean``, give or take 0.01, in groups of one target."""
    base = np.full(GROUPS, -2.0)
    moved = base - mean - 0.01 * np.linspace(-1.7, 1.7, GROUPS)
    measured: dict[str, Any] = {"kl": np.full(GROUPS, kl), "noise_kl": None if floor is None else np.full(4, floor)}
    return compared(base, moved, groups=np.arange(GROUPS), name=name, **measured)


def judged(comparisons: Sequence[Comparison]) -> list[str]:
    return [v.level for v in verdicts(comparisons)]


def spread(mean: float, stderr: float, groups: int) -> Any:
    """Values of groups that have this mean and this standard error."""
    z = np.linspace(-1, 1, groups) if groups > 1 else np.zeros(1)
    return mean + stderr * math.sqrt(groups) * z / (z.std(ddof=1) if groups > 1 else 1)


def made(
    *,
    kl: tuple[float, float] | None,
    differs: float | None,
    ppl: tuple[float, float],
    floor: float | None = None,
    groups: int = 20,
    spiky: bool = False,
) -> Comparison:
    """A comparison with this KL, share of other first choices and change of perplexity, each with its error.

    If it is ``spiky``, KL is 0 on most targets, and large on a few.
    """
    n = groups * EACH
    added = np.repeat(spread(math.log1p(ppl[0]), ppl[1] / (1 + ppl[0]), groups), EACH)
    apart = None if kl is None else np.repeat(spread(*kl, groups), EACH)
    if apart is not None and spiky:
        apart = np.where(np.arange(n) % EACH < 5, apart * EACH / 5, 0.0)
    tops: Any = (None, None)
    if differs:
        wobble = np.array([round(EACH * differs) + (g % 2) * (groups > 1) for g in range(groups)])
        tops = (np.zeros(n, np.int32), np.array([i < w for w in wobble for i in range(EACH)], np.int32))
    noise = None if floor is None else np.full(64, floor)
    of_groups = np.repeat(np.arange(groups), EACH)
    c = compared(np.full(n, -2.0), -2.0 - added, kl=apart, groups=of_groups, tops=tops, noise_kl=noise)
    if differs is None:  # as from a server that gives no first choices
        scores = replace(c.candidate.scores, top=None)
        c = replace(c, candidate=replace(c.candidate, scores=scores))
    return c


JUDGED_BY_A_PERSON = """
4 bits on 5 documents | 0.65 ± 0.03 | 0.44 | 0.12 ± 0.15 | 8e-12 | 5
    changed | changed: KL 0.650, first choice differs in 4 & +12% ± 15% cannot tell better from worse on | noise & same
Q4_0, no floor | 0.436 ± 0.02 | 0.4 | 0.38 ± 0.05 | - | 20
    changed, worse | changed: KL 0.436 & : worse | noise
a usual 4-bit loss | 0.012 ± 0.001 | 0.04 | 0.012 ± 0.003 | 1e-11 | 20
    changed, worse | changed: KL 0.0120 & perplexity +1.20% ± 0.30%: worse | noise & cannot tell
8 bits, perplexity does not see it | 0.001225 ± 4.3e-05 | 0.02 | 0.0015 ± 0.00098 | 2.4e-12 | 20
    changed | changed: KL 0.001225 & cannot tell better from worse on 20 documents | noise & same
far below the floor | 7e-12 ± 1e-13 | 0 | 1e-09 ± 1e-09 | 8e-12 | 20
    within the noise floor | no change beyond the noise floor: KL 7.00e-12 & floor 8.00e-12 | changed: & worse
on the floor | 0.001 ± 0 | 0 | 0 ± 0.0001 | 0.001 | 20
    within the noise floor | no change beyond | worse
bfloat16 against itself | 0.0009 ± 0.0001 | 0.02 | 0.0001 ± 0.0005 | 0.001 | 20
    within the noise floor | no change beyond the noise floor & first choice differs in | changed:
below the floor, perplexity lower by chance | 0.0005 ± 1e-05 | 0 | -0.1 ± 0.001 | 0.001 | 20
    within the noise floor | no change beyond | better
a hair above the floor | 0.00102 ± 4e-05 on few targets | 0 | 0.0001 ± 0.0005 | 0.001 | 20
    not known | not clearly above the noise floor: KL 0.001020 ± 0.000040, floor 0.00100 | changed & no change
just clearly above the floor | 0.0012 ± 4e-05 | 0 | 0.0001 ± 0.0005 | 0.001 | 20
    changed | changed: KL 0.00120 | noise
one wild document | 0.2 ± 0.15 on few targets | 0 | 0.01 ± 0.02 | 0.001 | 20
    not known | not clearly above the noise floor: KL 0.20 ± 0.15 & cannot tell | changed:
one wild document, and clearly worse | 0.2 ± 0.15 on few targets | 0 | 0.1 ± 0.002 | 0.001 | 20
    changed, worse | KL 0.20 ± 0.15, floor 0.00100 & : worse | -
every target moved, in wild amounts | 0.2 ± 0.12 | 0.2 | 0.01 ± 0.02 | 1e-12 | 20
    changed | half of the targets moved more than 99 % do by noise | same
the floor is 0 | 1e-06 ± 1e-08 | 0 | 1e-06 ± 1e-05 | 0 | 20
    changed | changed: KL 1.000e-6 | noise
no floor, KL above 0 | 3e-09 ± 1e-10 | 0 | 1e-08 ± 1e-07 | - | 20
    changed | KL 3.00e-9 & no noise floor was measured | same
no floor, KL not above 0 | 0.01 ± 0.02 on few targets | 0 | 0.001 ± 0.01 | - | 20
    not known | not clearly above 0: KL 0.010 ± 0.020 | changed & no change
no floor, other first choices | 0.01 ± 0.02 on few targets | 0.2 | 0.001 ± 0.01 | - | 20
    changed | changed: KL 0.010 ± 0.020 & first choice differs in 22 | same
no KL, other first choices | - | 0.08 | 0.01 ± 0.02 | - | 20
    changed | changed: first choice differs in & KL was not measured | noise & same
no KL, other first choices, worse | - | 0.08 | 0.05 ± 0.01 | - | 20
    changed, worse | KL was not measured & : worse | noise & same
no KL, the same first choices | - | 0 | 0.0001 ± 0.001 | - | 20
    not known | no change shown: first choice differs in 0% & KL was not measured & cannot tell | noise & the same
no KL, equal log-probabilities | - | 0 | 0 ± 0 | - | 20
    not known | no change shown & KL was not measured | noise & the same
perplexity alone, worse | - | - | 0.02 ± 0.001 | - | 20
    changed, worse | differ by 0.02 & KL and first choices were not measured & +2.00% ± 0.10%: worse | noise & same
perplexity alone, not clear | - | - | 0.02 ± 0.03 | - | 20
    not known | no change shown & KL and first choices were not measured & cannot tell | noise & same
itself | 0 ± 0 | 0 | 0 ± 0 | 1e-11 | 20
    same | the same on every target | noise & changed
itself, no floor | 0 ± 0 | 0 | 0 ± 0 | - | 20
    same | the same on every target | noise & changed
one document, a floor | 0.65 ± 0 | 0.44 | 0.12 ± 0 | 1e-11 | 1
    changed | changed: KL 0.650, floor 1.00e-11 & half of the targets moved & too few groups for an error | worse & ±
three documents, no floor | 0.65 ± 0 | 0.44 | 0.12 ± 0 | - | 3
    not known | not judged: KL 0.650 & perplexity +12.00% & too few groups for an error (3 doc | worse & same & ±
better | 0.3 ± 0.02 | 0.2 | -0.05 ± 0.01 | 1e-11 | 20
    changed, better | changed: KL 0.300 & perplexity -5.00% ± 1.00%: better | worse
changed, lower perplexity by chance | 0.3 ± 0.02 | 0.2 | -0.05 ± 0.04 | 1e-11 | 20
    changed | perplexity -5.0% ± 4.0% cannot tell | : better
no first choices, but KL | 0.03 ± 0.002 | - | 0.02 ± 0.001 | 1e-11 | 20
    changed, worse | changed: KL 0.0300; perplexity | first choice
"""
# First line: name, KL, share of other first choices, change of perplexity, noise floor, documents; "-": not measured.
# Second line: what a person judges from these numbers: the level, what a sentence must say, and what it must not say.
CASES = JUDGED_BY_A_PERSON.strip().splitlines()
NAMES = [line.split(" |")[0] for line in CASES[::2]]


@pytest.mark.parametrize(("numbers", "wanted"), list(zip(CASES[::2], CASES[1::2], strict=True)), ids=NAMES)
def test_the_rule_judges_as_a_person_did(numbers: str, wanted: str) -> None:
    _, kl, differs, ppl, floor, groups = (part.strip() for part in numbers.split("|"))
    level, said, unsaid = (part.strip() for part in wanted.split("|"))
    c = made(
        kl=with_error(kl),
        differs=None if differs == "-" else float(differs),
        ppl=with_error(ppl),
        floor=None if floor == "-" else float(floor),
        groups=int(groups),
        spiky="few targets" in kl,
    )
    (found,) = verdicts([c])
    assert found.level == level, found.sentence
    assert [words for words in said.split(" & ") if words not in found.sentence] == [], found.sentence
    assert [words for words in unsaid.split(" & ") if words in found.sentence and words != "-"] == [], found.sentence


def with_error(text: str) -> Any:
    """Two numbers from ``0.65 ± 0.03``; None if there are none."""
    return None if text == "-" else tuple(float(part.split()[0]) for part in text.split("±"))


def test_few_texts_do_not_make_a_clear_loss_the_same() -> None:
    """KL is above the floor everywhere, but varies so much that it is not, less its error."""
    kl = np.full(GROUPS, 0.002)
    kl[0] = 0.002 * (GROUPS + 1)  # its bounds are on a log scale: mean 0.004, and low 0.7 of 0.002
    base, spread = np.full(GROUPS, -2.0), 0.01 * np.linspace(-1.7, 1.7, GROUPS)
    c = compared(base, base - 0.1 - spread, groups=np.arange(GROUPS), kl=kl, noise_kl=np.full(4, 0.0018))
    statistics = comparison_statistics(c)
    assert statistics["kl_mean"] - 2 * statistics["kl_mean_stderr"] < statistics["noise_floor_kl_mean"]
    assert judged([c]) == ["changed, worse"]


def test_more_candidates_need_more_evidence_for_a_direction() -> None:
    """p is about 0.03 here: enough for one candidate, not for one of six. That it changed is as clear as before."""
    alone = shifted(0.0035)
    assert judged([alone]) == ["changed, worse"]
    others = [shifted(0.0, name=f"other-{i}") for i in range(5)]
    assert judged([alone, *others])[0] == "changed"
    assert "6 candidates" in rule_words([alone, *others])


@pytest.mark.parametrize(
    ("base", "cand", "kl", "level", "words"),
    [
        (-1.0, -math.inf, 0.1, "changed, worse", "probability zero for 1 more token of the text: worse"),
        (-math.inf, -1.0, 0.1, "changed, better", "probability zero for 1 fewer token of the text: better"),
        (-math.inf, -math.inf, 0.1, "changed", "perplexity is infinite under both"),
        (-1.0, -1.1, math.inf, "changed, worse", "changed: KL infinite|KL is infinite on 1 target: worse"),
    ],
)
def test_what_is_impossible(base: float, cand: float, kl: float, level: str, words: str) -> None:
    values = [np.full(GROUPS, value) for value in (-2.0, -2.1, 0.1)]
    for value, first in zip(values, (base, cand, kl), strict=True):
        value[0] = first
    c = compared(values[0], values[1], kl=values[2], noise_kl=np.full(4, 1e-9))
    (found,) = verdicts([c])
    assert found.level == level
    assert all(part in found.sentence for part in words.split("|")), found.sentence


def test_nothing_is_known_of_no_targets() -> None:
    c = compared([], [], kl=[])
    assert verdicts([c])[0] == Verdict("not known", "not known: there are no targets")


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (1e-6, "far below Q8_0 (0.0014) of LLaMA 3 8B"),
        (0.001, "below Q8_0 (0.0014) of LLaMA 3 8B"),
        (0.03, "about Q4_K_M of LLaMA 3 8B"),
        (0.06, "between Q4_K_M and Q3_K_M of LLaMA 3 8B"),
        (0.65, "beyond Q2_K (0.45) of LLaMA 3 8B"),
    ],
)
def test_the_scale_names_the_nearest_types(kl: float, words: str) -> None:
    assert scale_words(kl).startswith(f"for scale: {words}; ")
    assert scale_words(kl).endswith(" of SmolLM2-135M")


def test_no_scale_for_what_did_not_change() -> None:
    found = [made(kl=kl, differs=0.0, ppl=(0, 0.01), floor=1e-3) for kl in ((0.03, 0.001), (1e-4, 1e-5))]
    changed, noise = verdicts(found)
    assert changed.scale.startswith("for scale: about Q4_K_M")
    assert noise.scale == ""


@pytest.mark.parametrize(
    ("rerun", "floor", "level"),
    [
        (1e-9, 1e-12, "more than the noise"),
        (0.5, 1e-12, "no more than the noise"),
        (1e-9, 0.5, "no more than the noise"),
        (None, 1e-12, "more than the noise"),
        (None, None, "not known"),
    ],
)
def test_a_path_differs_if_it_exceeds_all_noise_that_was_measured(
    rerun: float | None, floor: float | None, level: str
) -> None:
    again = {"rms": rerun, "largest": rerun, "targets": 5, "words": "2 windows, one at a time"}
    c = shifted(0.1, kl=0.01, floor=floor)
    path = replace(c, manifest={**c.manifest, "rerun": again})
    assert judged([path]) == [level]
    (said,) = verdicts([path])
    assert ("; computing 2 windows again, one at a time, moves them by" in said.sentence) == (rerun is not None)
    assert ("Figures measured on one path hold for the other." in said.sentence) == (level == "no more than the noise")
    assert ("Publish with every figure which path it comes from." in said.sentence) == (level == "more than the noise")
    assert rule_words([path]).startswith("beyond the noise: the lower 95 % bounds")
    few = replace(path, groups=np.zeros_like(path.groups))
    if level == "more than the noise":  # without an error, nobody knows
        assert judged([few]) == ["not known"]


def test_a_small_difference_of_paths_is_told_without_exponents() -> None:
    c = shifted(1e-8, kl=3e-12, floor=1e-11)
    path = replace(c, manifest={**c.manifest, "rerun": {"rms": 0.0, "words": "2 windows, one at a time"}})
    (said,) = verdicts([with_statistics(path, delta_logprob_rms=1.12e-5)])
    assert said.sentence == (
        "no difference beyond the noise. Single log-probabilities differ from prefill's by 0.000011 nats (rms); "
        "computing 2 windows again, one at a time, gives the same bits. Figures measured on one path hold for the "
        "other."
    )
