"""The sentence about a candidate: KL and first choices against the noise floor, and perplexity for the direction."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from typing import Any

import numpy as np
import pytest

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.paired import PairedMeans, chance_of_no_change
from scoremode.reports.comparisons import comparison_json, comparison_notes, summary
from scoremode.reports.html.page import render
from scoremode.reports.model_card import markdown
from scoremode.reports.publish import record_files
from scoremode.reports.ranking import closest_first
from scoremode.reports.verdicts import Verdict, largest_of_noise, rule_words, scale_words, verdicts
from tests.core.statistics.test_comparison import compared
from tests.reports.demo import make_baseline, make_comparison, with_statistics

GROUPS, EACH = 40, 25
ROUTES = -1.0  # instead of a floor: one target in 256 has another expert when it is computed again


def shifted(mean: float, *, kl: float = 0.1, floor: float | None = 0.001, name: str = "q4") -> Comparison:
    """A candidate whose tokens are less likely by ``mean``, give or take 0.01, in groups of one target."""
    base = np.full(GROUPS, -2.0)
    moved = base - mean - 0.01 * np.linspace(-1.7, 1.7, GROUPS)
    measured: dict[str, Any] = {"kl": np.full(GROUPS, kl), "noise_kl": None if floor is None else np.full(4, floor)}
    return compared(base, moved, groups=np.arange(GROUPS), name=name, **measured)


def judged(comparisons: Sequence[Comparison]) -> list[str]:
    return [", ".join(filter(None, (v.level, v.direction.removeprefix("text ")))) for v in verdicts(comparisons)]


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
    more: str = "",
) -> Comparison:
    """A comparison with this KL, share of other first choices and change of perplexity, each with its error.

    If it is ``spiky``, KL is 0 on most targets, and large on a few. ``more``: "2 targets by 4" of document 3 are that
    many nats apart; "1 and 2 impossible" are of probability zero under baseline and candidate; "blocks" of one text.
    """
    n = groups * EACH
    added = np.repeat(spread(math.log1p(ppl[0]), ppl[1] / (1 + ppl[0]), groups), EACH)
    base, candidate = np.full(n, -2.0), -2.0 - added
    apart = None if kl is None else np.repeat(spread(*kl, groups), EACH)
    if apart is not None and spiky:
        apart = np.where(np.arange(n) % EACH < 5, apart * EACH / 5, 0.0)
    tops: Any = (None, None)
    if differs:
        wobble = np.array([round(EACH * differs) + (g % 2) * (groups > 1) for g in range(groups)])
        tops = (np.zeros(n, np.int32), np.array([i < w for w in wobble for i in range(EACH)], np.int32))
    noise = None if floor is None else np.full(64, floor)
    numbers = [float(word) for word in more.split() if word[0].isdecimal()]
    if "targets by" in more and apart is not None:
        apart[2 * EACH : 2 * EACH + int(numbers[0])] = numbers[1]
    if "impossible" in more and apart is not None:
        for run, count in zip((base, candidate), numbers, strict=True):
            run[: int(count)] = -math.inf
        apart[int(numbers[0]) : int(numbers[1])] = math.inf
    if floor == ROUTES:
        noise = np.where(np.arange(4096) % 256, 1e-13, 0.01)
    kind = "blocks of 1,024 tokens of this one text" if more == "blocks" else "document" + "s" * (groups > 1)
    manifest: dict[str, Any] = {"stderr_groups": kind, "dtype": "bfloat16" if "bfloat16" in more else "float32"}
    of = np.repeat(np.arange(groups), EACH)
    c = compared(base, candidate, kl=apart, groups=of, document=of, tops=tops, noise_kl=noise, **manifest)
    if differs is None:  # as from a server that gives no first choices
        scores = replace(c.candidate.scores, top=None)
        c = replace(c, candidate=replace(c.candidate, scores=scores))
    return c


JUDGED_BY_A_PERSON = """
4 bits on 5 documents | 0.65 ± 0.03 | 0.44 | 0.12 ± 0.15 | 8e-12 | 5
    changed | changed: KL 0.650, first choice differs in 4 & every target & +12% ± 15%, which may be | noise & text
Q4_0, no floor | 0.436 ± 0.02 | 0.4 | 0.38 ± 0.05 | - | 20
    changed, less likely | changed: KL 0.436 & text less likely (perplexity +38.0% ± 5.0%) | noise & chance
a usual 4-bit loss | 0.012 ± 0.001 | 0.04 | 0.012 ± 0.003 | 1e-11 | 20
    changed, less likely | changed: KL 0.0120 & on every target & text less likely (perplexity +1.20% ± 0.30%) | chance
8 bits, perplexity does not see it | 0.001225 ± 4.3e-05 | 0.02 | 0.0015 ± 0.00098 | 2.4e-12 | 20
    changed | changed: KL 0.001225 & +0.150% ± 0.098%, which may be chance on 20 documents | likely
far below the floor | 7e-12 ± 1e-13 | 0 | 1e-09 ± 1e-09 | 8e-12 | 20
    a difference within the noise | a difference within the noise: KL 7.00e-12 & floor 8.00e-12 | changed & likely
on the floor | 0.001 ± 0 | 0 | 0 ± 0.0001 | 0.001 | 20
    a difference within the noise | within the noise: KL 0.00100 | likely & changed
bfloat16 against itself | 0.0009 ± 0.0001 | 0.02 | 0.0001 ± 0.0005 | 0.001 | 20
    a difference within the noise | first choice differs in & may be chance | changed
within the floor, and perplexity surely higher | 0.0009 ± 0.0001 | 0.02 | 0.005 ± 0.0005 | 0.001 | 20
    a difference within the noise, less likely | within the noise & less likely (perplexity +0.500% ± 0.050%) | changed
below the floor, and a likelier text | 0.0005 ± 1e-05 | 0 | -0.1 ± 0.001 | 0.001 | 20
    a difference within the noise, likelier | within the noise & text likelier (perplexity -10.0 | better & changed
a hair above the floor | 0.00102 ± 4e-05 on few targets | 0 | 0.0001 ± 0.0005 | 0.001 | 20
    a difference within the noise | noise: KL 0.001020 ± 0.000040, floor 0.00100 | changed & not known
just clearly above the floor | 0.0012 ± 4e-05 | 0 | 0.0001 ± 0.0005 | 0.001 | 20
    changed | changed: KL 0.00120 | noise
one wild document | 0.2 ± 0.15 on few targets | 0 | 0.01 ± 0.02 | 0.001 | 20
    changed | changed: KL 0.20 ± 0.15, floor 0.00100 & targets, by up to & in document & may be chance | not known
one wild document, and clearly less likely | 0.2 ± 0.15 on few targets | 0 | 0.1 ± 0.002 | 0.001 | 20
    changed, less likely | KL 0.20 ± 0.15, floor 0.00100 & text less likely | -
every target moved, in wild amounts | 0.2 ± 0.12 | 0.2 | 0.01 ± 0.02 | 1e-12 | 20
    changed | changed: KL 0.20 ± 0.12 & of 500 targets | noise
the floor is 0 | 1e-06 ± 1e-08 | 0 | 1e-06 ± 1e-05 | 0 | 20
    changed | changed: KL 1.000e-6 & on every target | noise
no floor, a KL that rounding gives | 3e-09 ± 1e-10 | 0 | 1e-08 ± 1e-07 | - | 20
    not known | not known: KL 3.00e-9 & no noise floor was measured | changed & more documents
no floor, 1 % other first choices | 0.0004 ± 0.0001 | 0.01 | 0.0001 ± 0.001 | - | 20
    not known | not known: KL 0.00040 & no noise floor was measured | changed
no floor, KL not above 0 | 0.01 ± 0.02 on few targets | 0 | 0.001 ± 0.01 | - | 20
    not known | not known: KL 0.010 ± 0.020 & no noise floor was measured | changed
no floor, a clear KL | 0.05 ± 0.004 | 0.2 | 0.001 ± 0.01 | - | 20
    changed | changed: KL 0.0500 & first choice differs in 22 | noise
four documents, a large KL, no floor | 0.4 ± 0.1 | 0.33 | 0.2 ± 0.1 | - | 4
    not known | not known: KL & 4 documents give no ± (5 are needed) & no noise floor | changed
no KL, other first choices | - | 0.12 | 0.01 ± 0.02 | - | 20
    changed | changed: first choice differs in & KL was not measured | noise
no KL, few other first choices | - | 0.02 | 0.001 ± 0.02 | - | 20
    not known | not known: first choice differs in & KL was not measured & may be chance | changed
no KL, other first choices, less likely | - | 0.12 | 0.05 ± 0.01 | - | 20
    changed, less likely | KL was not measured & text less likely | noise
no KL, the same first choices | - | 0 | 0.0001 ± 0.001 | - | 20
    not known | not known: first choice differs in 0% & KL was not measured & may be chance | the noise
no KL, equal log-probabilities | - | 0 | 0 ± 0 | - | 20
    not known | not known: & KL was not measured | the noise & likel
perplexity alone, less likely | - | - | 0.02 ± 0.001 | - | 20
    changed, less likely | differ by 0.02 & KL and first choices were not measured & (perplexity +2.00% ± 0.10%) | noise
perplexity alone, not clear | - | - | 0.02 ± 0.03 | - | 20
    not known | KL and first choices were not measured & may be chance on 20 documents | changed
itself | 0 ± 0 | 0 | 0 ± 0 | 1e-11 | 20
    no difference found | no difference found: every log-probability is equal | changed & noise
itself, no floor | 0 ± 0 | 0 | 0 ± 0 | - | 20
    no difference found | no difference found: every log-probability is equal | changed
one document, a floor | 0.65 ± 0 | 0.44 | 0.12 ± 0 | 1e-11 | 1
    changed | changed: KL 0.650, floor 1.00e-11 & on every target & perplexity +12.00% | likel & ±
three documents, no floor | 0.65 ± 0 | 0.44 | 0.12 ± 0 | - | 3
    not known | not known: KL 0.650 & 3 documents give no ± | likel & 650 ±
a likelier text | 0.3 ± 0.02 | 0.2 | -0.05 ± 0.01 | 1e-11 | 20
    changed, likelier | changed: KL 0.300 & text likelier (perplexity -5.00% ± 1.00%) | better & less
a likelier text, of six documents | 0.3 ± 0.02 | 0.2 | -0.05 ± 0.002 | 1e-11 | 6
    changed | but 6.0 effective documents are too few to call the text likelier | : text likelier & likelier (
a less likely text, of six documents | 0.3 ± 0.02 | 0.2 | 0.05 ± 0.002 | 1e-11 | 6
    changed | but 6.0 effective documents are too few to call the text less likely | : text less & less likely (
lower perplexity by chance | 0.3 ± 0.02 | 0.2 | -0.05 ± 0.04 | 1e-11 | 20
    changed | perplexity -5.0% ± 4.0%, which may be chance | likelier
no first choices, but KL | 0.03 ± 0.002 | - | 0.02 ± 0.001 | 1e-11 | 20
    changed, less likely | changed: KL 0.0300; on every | first choice
one broken row of an embedding | 1e-13 ± 0 | 0.02 | 0.02 ± 0.02 | 5e-13 | 6 | 4 targets by 7.5
    changed | changed: KL 0. & on 4 of 150 targets, by up to 7.500 nats ('a' in document 3) | not known
two targets of a thousand | 1e-13 ± 0 | 0 | 0 ± 0.001 | 1e-12 | 40 | 2 targets by 4
    changed | on 2 of 1,000 targets, by up to 4.000 nats | not known & less & likelier
one broken document of ten | 1e-4 ± 0 | 0.04 | 0.2 ± 0.2 | 0.001 | 10 | 25 targets by 3
    changed | on 25 of 250 targets, by up to 3.000 nats & perplexity +20% ± 20%, which may | not known & less
one wrong scale, felt a little everywhere | 1e-05 ± 1e-06 | 0 | 1e-05 ± 2e-05 | 1e-12 | 20
    changed | changed: KL 1.000e-5 & on every target & which may be chance | noise
a whole model broken | 9 ± 0.3 | 0.96 | 5000 ± 300 | 1e-11 | 20
    changed, less likely | changed: KL 9.00 & on every target & text less likely (perplexity +500,000% ± 30,000%) | e+
blocks of one text | 0.414 ± 0.028 | 0.4 | 0.38 ± 0.02 | 1e-11 | 5 | blocks
    changed | every target & tokens of this one text are too few to call the text less likely | text likelier
blocks of one text, no floor | 0.0056 ± 0.0004 | 0.04 | 0.001 ± 0.002 | - | 5 | blocks
    changed | changed: KL 0.00560 & may be chance on 5 blocks | likel & noise
blocks of one text, a hair above the floor | 0.0015 ± 0.0005 on few targets | 0 | 0.001 ± 0.002 | 0.001 | 5 | blocks
    not known | KL 0.00150 ± 0.00050, floor 0.00100 & give unrelated documents | changed & more
4 bits, and a likelier text | 0.05 ± 0.004 | 0.12 | -0.00499 ± 0.00084 | 1e-11 | 20
    changed, likelier | changed: KL 0.0500 & text likelier (perplexity -0.499% ± 0.084%) | better & less
the baseline in float32, the candidate in bfloat16 | 0.00095 ± 0.00027 | 0.02 | -0.001 ± 0.0011 | 1.4e-11 | 20
    changed | changed: KL 0.00095 & on 375 of 500 targets & which may be chance | noise & likel
bfloat16 against itself, by chance a little above its floor | 0.00097 ± 0.0001 | 0.02 | 0.0002 ± 0.001 | 0.00095 | 20
    a difference within the noise | noise: KL 0.00097 ± 0.00010, floor 0.00095 & may be | changed & not known
2 bits of a short text: perplexity cannot tell | 0.9 ± 0.1 | 0.52 | 0.3 ± 0.25 | 1e-11 | 10
    changed | changed: KL 0.90 & +30% ± 25%, which may be chance on 10 documents | noise & likel
losses and gains that cancel | 0.02 ± 0.001 | 0.04 | 0 ± 0.003 | 1e-11 | 20
    changed | changed: KL 0.0200 & perplexity +0.00% ± 0.30% | likel & -0
one first choice in ten flips by noise alone | 0.0009 ± 0.0001 | 0.1 | 0.0001 ± 0.0005 | 0.001 | 20
    a difference within the noise | within the noise: KL 0.00090 ± 0.00010, floor 0.00100 | changed & likel
four documents, a large KL, a floor | 0.4 ± 0.1 | 0.33 | 0.2 ± 0.1 | 1e-11 | 4
    changed | changed: KL 0.400 & on every target & perplexity +20 | noise & likel & ±
one document, a small KL, no floor | 0.0001 ± 0 | 0 | 0.0001 ± 0 | - | 1
    not known | not known: KL 0.00010 & 1 document gives no ± (5 are needed) & no noise floor | changed & likel
no floor, about as much as bfloat16 gives | 0.0012 ± 0.0003 | 0.02 | 0.0001 ± 0.001 | - | 20
    not known | not known: KL 0.00120 & no noise floor was measured | changed & more documents
no floor, three times what bfloat16 gives | 0.003 ± 0.0002 | 0.03 | 0.0001 ± 0.001 | - | 20
    changed | changed: KL 0.00300 & may be chance | noise & likel
4 bits above a coarse floor | 0.3 ± 0.02 | 0.2 | 0.08 ± 0.01 | 0.01 | 20
    changed, less likely | changed: KL 0.300 & text less likely (perplexity +8.00% ± 1.00%) | noise & floor
3 tokens impossible, 2 of them under the baseline | 0.1 ± 0.01 | 0.04 | 0.05 ± 0.01 | 1e-11 | 20 | 2 and 3 impossible
    changed, less likely | changed: KL infinite & text less likely: probability zero for 1 more token | likelier & noise
a token impossible under the baseline alone | 0.1 ± 0.01 | 0.04 | 0.05 ± 0.01 | 1e-11 | 20 | 1 and 0 impossible
    changed, likelier | text likelier: probability zero for 1 fewer token | less & better
KL from 16 bits, by rounding below 0 | -1e-05 ± 2e-05 | 0 | 0.0001 ± 0.0001 | - | 20
    not known | not known: KL -1.0e-5 ± 2.0e-5 & no noise floor was measured | changed & likel
perplexity of three documents alone | - | - | 0.02 ± 0 | - | 3
    not known | KL and first choices were not measured & 3 documents give no ± (5 are needed) | changed & likel
perplexity alone, not clear, and what would decide | - | - | 0.01 ± 0.02 | - | 20
    not known | KL and first choices were not measured & may be chance & give more documents | changed & likel
a mean of exactly the floor, whose error is as large | 0.0002 ± 0.0002 | 0 | 0.0001 ± 0.0005 | 0.0002 | 20
    a difference within the noise | KL 0.00020 ± 0.00020 | changed & targets
routes of experts flip as often as they flip again | 1e-13 ± 0 | 0 | 0.0001 ± 0.0005 | routes | 20 | 2 targets by 0.01
    not known | not known: KL 4.0e-5 ± 4.0e-5, floor 3.91e-5 & give more documents | changed & likel
one window in 35 rounds otherwise | 1e-13 ± 0 | 0 | 0.0001 ± 0.0005 | 0 | 20 | 9 targets by 0.0002 in bfloat16
    a difference within the noise | noise: KL 3.6e-6 ± 3.6e-6, floor 0, counted as 0.000010 | changed & targets
the same in 32 bits | 1e-13 ± 0 | 0 | 0.0001 ± 0.0005 | 0 | 20 | 9 targets by 0.0002
    changed | on 9 of 500 targets, by up to 0.000200 nats | noise
rounding far above its floor, which is smaller still | 3e-14 ± 1e-15 | 0 | 1e-9 ± 3e-9 | 1e-15 | 20
    a difference within the noise | KL 3.00e-14 & perplexity equal within 0.001% | changed & targets
perplexity alone, at 3 in 100 | - | - | 0.023 ± 0.01 | - | 20
    not known | perplexity +2.3% ± 1.0%, which may be chance on 20 documents; give more documents | changed & likel
routes of experts flip, and one target is lost | 1e-13 ± 0 | 0 | 0.0001 ± 0.0005 | routes | 20 | 1 targets by 6
    changed | on 1 of 500 targets, by up to 6.000 nats | within & likel
"""
# First line: name, KL, share of other first choices, change of perplexity, noise floor, documents, what else; "-": not
# measured.
# Second line: what a person judges from these numbers: the level, what a sentence must say, and what it must not say.
CASES = JUDGED_BY_A_PERSON.strip().splitlines()
NAMES = [line.split(" |")[0] for line in CASES[::2]]


@pytest.mark.parametrize(("numbers", "wanted"), list(zip(CASES[::2], CASES[1::2], strict=True)), ids=NAMES)
def test_the_rule_judges_as_a_person_did(numbers: str, wanted: str) -> None:
    c = made_of(numbers)
    level, said, unsaid = (part.strip() for part in wanted.split("|"))
    (found,) = verdicts([c])
    assert ", ".join(filter(None, (found.level, found.direction.removeprefix("text ")))) == level, found.sentence
    assert [words for words in said.split(" & ") if words not in found.sentence] == [], found.sentence
    assert [words for words in unsaid.split(" & ") if words in found.sentence and words != "-"] == [], found.sentence


def made_of(line: str) -> Comparison:
    _, kl, differs, ppl, floor, groups, *more = (part.strip() for part in line.split("|"))
    return made(
        kl=with_error(kl),
        differs=None if differs == "-" else float(differs),
        ppl=with_error(ppl),
        floor={"-": None, "routes": ROUTES}.get(floor) if floor in ("-", "routes") else float(floor),
        groups=int(groups),
        spiky="few targets" in kl,
        more="".join(more),
    )


def with_error(text: str) -> Any:
    """Two numbers from ``0.65 ± 0.03``; None if there are none."""
    return None if text == "-" else tuple(float(part.split()[0]) for part in text.split("±"))


Q8, Q4, LIKE_Q4 = (0.004, 0.0002), (0.06, 0.004), (0.0601, -0.004)  # the other way round in each text


@pytest.mark.parametrize(
    ("kl", "groups", "more", "sentence"),
    [
        ((Q8, Q4), 20, "", ""),  # the order of the table is sure
        ((Q4, LIKE_Q4), 20, "", "cannot be told apart: a from b"),
        ((Q8, Q4, LIKE_Q4), 20, "", "cannot be told apart: b from c"),
        ((Q8, Q4), 5, "blocks", "not ranked: ± is over 5 blocks of this one text; give at least ten"),
        ((Q8, Q4), 3, "", "not ranked: 3 documents give no ±; give at least ten"),
    ],
)
def test_candidates_are_ranked_as_a_person_did(kl: Any, groups: int, more: str, sentence: str) -> None:
    made_of_kl = [made(kl=one, differs=0.04, ppl=(0.01, 0.01), floor=1e-11, groups=groups, more=more) for one in kl]
    found = [replace(c, name=name) for c, name in zip(made_of_kl, "abc", strict=False)]
    said = [note.text for note in comparison_notes(found) if "not ranked" in note.text or "told apart" in note.text]
    assert [text.removesuffix(" documents") for text in said] == [sentence] * bool(sentence)
    assert {v.level for v in verdicts(found)} == {"changed"}  # not ranked is not equal


def test_few_texts_do_not_make_a_clear_loss_the_same() -> None:
    """KL is above the floor everywhere, but varies so much that it is not, less its error."""
    kl = np.full(GROUPS, 0.002)
    kl[0] = 0.002 * (GROUPS + 1)  # its bounds are on a log scale: mean 0.004, and low 0.7 of 0.002
    base, spread = np.full(GROUPS, -2.0), 0.01 * np.linspace(-1.7, 1.7, GROUPS)
    c = compared(base, base - 0.1 - spread, groups=np.arange(GROUPS), kl=kl, noise_kl=np.full(4, 0.0018))
    statistics = c.statistics()
    assert statistics["kl_mean"] - 2 * statistics["kl_mean_stderr"] < statistics["noise_floor_kl_mean"]
    assert judged([c]) == ["changed, less likely"]


def test_more_candidates_need_more_evidence_for_a_direction() -> None:
    """p is about 0.03 here: enough for one candidate, not for one of six. That it changed is as clear as before."""
    alone = shifted(0.0035)
    assert judged([alone]) == ["changed, less likely"]
    others = [shifted(0.0, name=f"other-{i}") for i in range(5)]
    assert judged([alone, *others])[0] == "changed"
    clear = [shifted(0.1), *others]
    assert [line.partition(":")[0] for line in rule_words(clear, verdicts(clear))] == [
        "changed",
        "likelier, less likely",
        "for scale",
    ]
    assert "6 candidates" in rule_words(clear, verdicts(clear))[1]


def test_only_words_that_were_printed_are_explained() -> None:
    same = shifted(0.0, kl=0.0, floor=1e-11)
    assert rule_words([same], verdicts([same])) == []
    within = shifted(0.0, kl=1e-12, floor=1e-11)
    assert rule_words([within], verdicts([within])) == []
    unclear = shifted(0.0, kl=3e-9, floor=None)
    assert [line.partition(":")[0] for line in rule_words([unclear], verdicts([unclear]))] == ["for scale"]


@pytest.mark.parametrize(
    ("base", "cand", "kl", "level", "words"),
    [
        (-1.0, -math.inf, 0.1, "changed, less likely", "text less likely: probability zero for 1 more token"),
        (-math.inf, -1.0, 0.1, "changed, likelier", "text likelier: probability zero for 1 fewer token"),
        (-math.inf, -math.inf, 0.1, "changed", "perplexity is infinite under both"),
        (-1.0, -1.1, math.inf, "changed", "changed: KL infinite|KL is infinite on 1 target"),
    ],
)
def test_what_is_impossible(base: float, cand: float, kl: float, level: str, words: str) -> None:
    values = [np.full(GROUPS, value) for value in (-2.0, -2.1, 0.1)]
    for value, first in zip(values, (base, cand, kl), strict=True):
        value[0] = first
    c = compared(values[0], values[1], kl=values[2], noise_kl=np.full(4, 1e-9))
    (found,) = verdicts([c])
    assert judged([c]) == [level]
    assert all(part in found.sentence for part in words.split("|")), found.sentence


def test_nothing_is_known_of_no_targets() -> None:
    c = compared([], [], kl=[])
    assert verdicts([c])[0] == Verdict("not known", "not known: there are no targets")


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (1e-6, "far below Q8_0 (KL 0.0014) of LLaMA 3 8B"),
        (0.001, "below Q8_0 (KL 0.0014) of LLaMA 3 8B"),
        (0.03, "about Q4_K_M of LLaMA 3 8B"),
        (0.06, "between Q4_K_M and Q3_K_M of LLaMA 3 8B"),
        (0.65, "beyond Q2_K (KL 0.45) of LLaMA 3 8B"),
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
        (1e-9, 1e-12, "changed"),
        (0.5, 1e-12, "a difference within the noise"),
        (1e-9, 0.5, "a difference within the noise"),
        (None, 1e-12, "changed"),
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
    assert ("Figures measured on one path hold for the other." in said.sentence) == (
        level == "a difference within the noise"
    )
    assert ("Publish with every figure which path it comes from." in said.sentence) == (level == "changed")
    rules = rule_words([path], [said])
    assert [rule.partition(" 95 %")[0] for rule in rules] == ["changed: the lower"] * (level == "changed")
    few = replace(path, groups=np.zeros_like(path.groups))
    if level == "changed":  # without an error, nobody knows
        assert judged([few]) == ["not known"]


@pytest.mark.parametrize(("high", "level"), [(0.002, "a difference within the noise"), (0.0021, "not known")])
def test_a_mean_above_the_floor_is_noise_if_its_upper_bound_is_at_most_twice_the_floor(high: float, level: str) -> None:
    c = with_statistics(shifted(1e-9, kl=0.0009), kl_mean=0.0015, kl_mean_low=0.0005, kl_mean_high=high)
    assert judged([c]) == [level]


def test_paths_have_the_same_bits_only_if_no_token_and_no_distribution_moved() -> None:
    c = shifted(1e-8, kl=3e-12, floor=1e-11)
    path = replace(c, manifest={**c.manifest, "rerun": {"rms": 0.0, "words": "2 windows, one at a time"}})
    moves = [(0.0, 0.0), (0.0, 1e-3), (1e-3, 0.0)]
    judged_paths = [with_statistics(path, delta_logprob_max=delta, kl_max=kl) for delta, kl in moves]
    same = ["the same bits as prefill" in said.sentence for c in judged_paths for said in verdicts([c])]
    assert same == [True, False, False]


def test_a_small_difference_of_paths_is_told_without_exponents() -> None:
    c = shifted(1e-8, kl=3e-12, floor=1e-11)
    path = replace(c, manifest={**c.manifest, "rerun": {"rms": 0.0, "words": "2 windows, one at a time"}})
    (said,) = verdicts([with_statistics(path, delta_logprob_rms=1.12e-5)])
    assert said.sentence == (
        "a difference within the noise. Single log-probabilities differ from prefill's by 0.000011 nats (rms); "
        "computing 2 windows again, one at a time, gives the same bits. Figures measured on one path hold for the "
        "other."
    )


@pytest.mark.parametrize(
    ("noise", "least", "most"),
    [
        (np.concatenate([np.full(4000, 1e-17), np.full(96, 1e-4)]), 1e-3, 1.0),  # rounding, and routes that flip
        (np.concatenate([np.zeros(4095), [1e-3]]), 1e-2, 1.0),
        (np.zeros(100), 1e-12, 1e-9),
    ],
)
def test_the_largest_noise_is_extrapolated_from_what_is_of_its_size(noise: Any, least: float, most: float) -> None:
    assert least < largest_of_noise(noise, 100_000) < most


def test_a_mean_of_texts_is_called_likelier_only_if_its_bounds_exclude_1() -> None:
    random = np.random.default_rng(4)
    for _ in range(60):
        change = 0.3 * random.normal(size=(28, 1)) + np.zeros((28, 5)) + 0.1
        group = np.repeat(np.arange(28), 5)
        base = np.full(140, -2.0)
        c = compared(base, base + change.ravel(), groups=group, document=group, method="mean-of-texts")
        ratio = c.ppl_ratio
        excludes = (ratio.high or 0) < 1 or (ratio.low or 0) > 1
        assert (chance_of_no_change(PairedMeans(c)) < 0.05) == excludes


@pytest.mark.parametrize("few_documents", [False, True])
def test_every_output_claims_the_same_of_few_documents(few_documents: bool) -> None:
    """A direction, and an order of candidates, only if it is asked for; then how often that is false stands beside."""
    base = make_baseline(3000)
    group = np.arange(3000) % 6
    found = []
    for seed, name in enumerate(("q4", "q3"), start=2):
        c = make_comparison(name, base, seed, moved=0.1 * seed)
        lost = replace(c.candidate.scores, logprob=base.scores.logprob - 0.05 - 0.001 * group)
        candidate = replace(c.candidate, scores=lost)
        found.append(replace(c, groups=group, candidate=candidate, few_documents=few_documents))
    rate = "with 6.0 effective documents such a claim is false in up to 8 % of skewed samples"
    said = verdicts(found)[0].sentence
    assert (f"text less likely (perplexity +5.390% ± 0.080%; {rate})" in said) == few_documents
    assert ("6.0 effective documents are too few to call the text less likely" in said) != few_documents
    shown, page, records = summary(found), unescape(render(found)), record_files(found)
    assert shown.verdicts[0][2].sentence == said
    assert comparison_json(found)["candidates"][0]["sentence"] == said
    assert said in page
    claim = said[said.index("perplexity +") :]
    assert claim in json.loads(records["q4.json"])["sentence"]
    assert claim in unescape(markdown(found))
    refused = (
        "ot ranked: 6.0 effective documents are too few; give at least 10 of about equal length, or --few-documents"
    )
    together = (
        "1 pair tested together (Holm's method), at most 5 % false differences in all; with 6.0 effective documents"
    )
    for text in ("\n".join(note.text for note in shown.notes), page):
        assert (refused in text) != few_documents
        assert (together in text) == few_documents
    assert (closest_first(found)[0][1] == []) == few_documents
