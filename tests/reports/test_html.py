"""The page as text: its shape, its policy, its size, and that no text becomes markup."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core import extensions
from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.comparison import Comparison, Comparisons
from scoremode.core.statistics.depth import depths_of
from scoremode.core.store.run import Run
from scoremode.errors import InputError
from scoremode.reports.html import drawing
from scoremode.reports.html.page import RESULTS, ResultPage, render, report
from scoremode.reports.html.scored_text import page_data, reading_order
from scoremode.reports.html.templating import asset, escaped, visible
from tests.command_line import Command
from tests.house import HOUSE
from tests.reports.demo import (
    base_logprob,
    make_baseline,
    make_comparison,
    make_demo,
    make_facts,
    make_run,
    with_statistics,
)

VOID = {"meta", "link", "input", "br"}
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>]]>\u2028\u202e\0\ud800\"'&"


class Page(HTMLParser):
    """A page as a browser would parse it: tags, attributes, texts by tag; finds unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        shown = (parts for tag, parts in self.texts.items() if tag not in ("script", "style"))
        return "\n".join("".join(parts) for parts in shown)


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="scoremode-data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def numbers(stored: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(stored["data"]), dtype="<" + stored["type"])


@pytest.fixture(scope="module")
def demo() -> list[Comparison]:
    return make_demo(3000)


@pytest.fixture(scope="module")
def page(demo: list[Comparison]) -> str:
    return render(demo)


def test_the_page_is_whole_and_has_every_part(page: str) -> None:
    parsed = Page(page)
    assert parsed.wrong == []
    assert parsed.open == []
    ids = [a["id"] for _, a in parsed.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {"summary", "charts", "text", "provenance", "scoremode-data", "commands", "publish"} <= set(ids)
    assert parsed.count("figure") == 4 + 3  # three of them behind the switch of quality against size
    assert parsed.count("h1") == 1
    for wanted in (
        "Q8_0",
        "Q4_K_M",
        "Q2_K",
        "smollm2-135m",
        "noise floor",
        "fused-triton",
        "31a44d4e" * 8,
        "9be2" * 16,
    ):
        assert wanted in parsed.text
    assert "scoremode compare smollm2-135m smollm2-135m-Q2_K" in parsed.text
    assert [a for a in parsed.attributes("svg") if a.get("role") == "img" and not a.get("aria-label")] == []


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    parsed = Page(page)
    for tag, attributes in parsed.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith(("#", "data:,")), attributes
        assert not [name for name in attributes if name.startswith("on")], attributes
    for forbidden in ("http://", "https://", "@import", "url("):
        assert forbidden not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_policy_allows_this_script_and_no_other(page: str) -> None:
    rules = next(a["content"] for a in Page(page).attributes("meta") if a.get("http-equiv")) or ""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in rules
    assert rules.startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert "img-src data:" in rules
    assert rules.count("unsafe") == 1


def test_the_script_never_writes_markup() -> None:
    script = asset("report.js")
    for forbidden in (
        *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("),
    ):
        assert forbidden not in script
    assert script.startswith('"use strict"')


def hostile() -> tuple[list[Comparison], list[Run]]:
    words = [EVIL, "plain", "\n", "", EVIL + "2"] * 30
    facts = make_facts(words, [0] * 75 + [1] * 75)
    names = (
        *("model", "engine", "dtype", "device", "head", "corpus", "corpus_sha256", "tokenizer", "method"),
        *("model_revision", "model_format"),
    )
    manifest: dict[str, Any] = dict.fromkeys(names, EVIL)
    manifest |= {"versions": {EVIL: EVIL}, "hardware": {EVIL: EVIL}, "notes": [EVIL], "method_settings": {EVIL: EVIL}}
    manifest |= {"engine_settings": {"head_kernel": EVIL, EVIL: EVIL}}
    baseline = dataclasses.replace(make_run(facts, base_logprob(150), 1, **manifest), path=EVIL, plan_digest=EVIL)
    comparison = make_comparison(EVIL, baseline, 2, None, manifest, command=EVIL)
    alone = dataclasses.replace(make_run(facts, base_logprob(150), 3, **manifest), path=EVIL + "3")
    other = dataclasses.replace(comparison, name=EVIL + "4")  # two are drawn by size
    return [with_statistics(comparison, name=EVIL, kl_max=EVIL, worse=EVIL), other], [alone]


def test_hostile_words_in_every_field_stay_words() -> None:
    comparisons, runs = hostile()
    page = render(comparisons, runs=runs)
    parsed = Page(page)
    assert parsed.wrong == []
    assert parsed.count("script") == 2
    assert parsed.count("img") == 0
    assert [a for _, a in parsed.tags if "onerror" in a] == []
    page.encode()  # half a surrogate pair would not pass
    outside_data = page.replace(json.dumps(data_of(page)), "")
    for character in ("\u2028", "\u202e", "\0"):
        assert character not in outside_data
    assert data_of(page)["words"][0] == visible(EVIL)
    stored = re.search(r'id="scoremode-data">(.*?)</script>', page, re.S)
    assert stored
    assert stored[1].isascii()
    assert not set("<>&") & set(stored[1]), "data cannot end its element"
    assert visible(EVIL) in parsed.text


def test_no_two_templates_have_one_name() -> None:
    """Templates of studies are found by their names, whichever folder has them."""
    names = [path.name for path in HOUSE.rglob("templates/*")]
    assert "tasks.html" in names
    assert len(set(names)) == len(names)


def test_notebook_tables_are_escaped() -> None:
    comparisons, runs = hostile()
    for value in (runs[0], comparisons[0], Comparisons(comparisons)):
        table = RESULTS.table(value)
        assert table is not None
        parsed = Page(table)
        assert parsed.wrong == []
        allowed = "table caption thead tbody tr th td span div small"
        assert {tag for tag, _ in parsed.tags} <= set(allowed.split())
        table.encode()
    assert "± 0.31" in Page(RESULTS.table(runs[0]) or "").text


def test_a_hundred_thousand_tokens_fit_into_eight_megabytes() -> None:
    size = len(render(make_demo(100_000, ["Q4_K_M"])).encode())
    print(f"100,000 tokens, one candidate: {size / 1e6:.2f} MB")
    assert size < 8_000_000


def test_columns_come_back_as_they_were(demo: list[Comparison]) -> None:
    data = data_of(render(demo))
    assert len(data["scores"]) == 4  # the baseline once, three candidates
    assert len(data["texts"]) == 1
    view = data["views"][1]
    stored = data["scores"][view["candidate"]]
    np.testing.assert_allclose(numbers(stored["logprob"]), demo[1].candidate.scores.logprob, rtol=1e-6)
    np.testing.assert_array_equal(numbers(stored["rank"]), demo[1].candidate.scores.rank)
    assert demo[1].kl is not None
    np.testing.assert_allclose(numbers(view["kl"]), demo[1].kl, rtol=1e-6)
    words = [data["words"][i] for i in numbers(data["texts"][0]["word"])]
    assert words == [visible(t) for t in demo[0].baseline.facts.text]


def test_a_token_that_is_scored_twice_is_read_once() -> None:
    run = make_baseline(6)
    token = np.array([1, 2, 3, 2, 3, 4])
    facts = dataclasses.replace(run.facts, token=token, window=np.array([0, 0, 0, 1, 1, 1]))
    overlapping = dataclasses.replace(run, facts=facts)
    assert reading_order(overlapping, 100).tolist() == [0, 1, 2, 5]
    assert depths_of(overlapping).tolist() == [0, 1, 2, 0, 1, 2]
    page = render([], runs=[overlapping])
    assert "2 targets score a token again" in page


def test_gaps_and_documents_begin_stretches() -> None:
    run = make_baseline(6)
    facts = dataclasses.replace(run.facts, token=np.array([1, 2, 5, 6, 7, 8]), document=np.array([0, 0, 0, 0, 1, 1]))
    texts: Any = page_data([], [dataclasses.replace(run, facts=facts)], 100)["texts"]
    text = texts[0]
    assert numbers(text["begin"]).tolist() == [0, 2, 4]
    assert numbers(text["beginToken"]).tolist() == [1, 5, 7]
    assert numbers(text["beginDocument"]).tolist() == [0, 0, 1]


def test_a_text_that_is_cut_says_so(demo: list[Comparison]) -> None:
    page = render(demo, text_targets=1000)
    assert "first 1,000 of 3,000 tokens" in page
    assert data_of(page)["texts"][0]["count"] == 1000


def test_one_candidate_has_no_chart_of_sizes(demo: list[Comparison]) -> None:
    page = render(demo[:1])
    assert 'id="quality"' not in page
    assert "times the noise floor" in page


def test_finished_runs_without_kl(demo: list[Comparison]) -> None:
    page = render([dataclasses.replace(demo[0], divergences=Divergences(), noise_kl=None, manifest={})])
    parsed = Page(page)
    assert parsed.wrong == []
    assert "no KL, because two finished runs were compared" in parsed.text
    assert 'data-label="KL mean"' not in page
    assert data_of(page)["views"][0]["kl"] is None


def test_zero_probabilities_are_counted_and_not_drawn(demo: list[Comparison]) -> None:
    c = demo[0]
    logprob = c.candidate.scores.logprob.copy()
    logprob[:3] = -np.inf
    candidate = dataclasses.replace(c.candidate, scores=dataclasses.replace(c.candidate.scores, logprob=logprob))
    page = render([with_statistics(dataclasses.replace(c, candidate=candidate), ppl_candidate=np.inf)])
    assert "3 tokens left out of the charts: probability zero" in page
    assert "∞" in page
    assert "nan" not in "".join(re.findall(r' d="[^"]*"', page))


def test_runs_alone_show_their_numbers_and_their_text() -> None:
    runs = [make_baseline(2000), make_baseline(2000, dtype="float32")]
    page = render([], runs=[runs[0], dataclasses.replace(runs[1], path="runs/other")])
    parsed = Page(page)
    assert parsed.wrong == []
    assert "smollm2-135m · float32" in parsed.text
    assert "± 0.31" in parsed.text
    assert [view["candidate"] for view in data_of(page)["views"]] == [None, None]


def test_the_page_shows_slices(command: Command, tmp_path: Path) -> None:
    text = "one <think>hm</think> two"
    typed = ("compare", "table:uniform", "table:uniform", "--text", text, "--slice", "thinking=<think>..</think>")
    assert command(*typed, "--report", tmp_path / "page.html").code == 0
    run = sm.ppl("table:uniform", text=text, slice="<b>&=<think>..</think>")
    for page in ((tmp_path / "page.html").read_text(), render([], runs=[run])):
        assert "By slice of the text" in page
        assert "<b>&" not in page


def test_runs_of_a_comparison_are_not_shown_again(demo: list[Comparison]) -> None:
    runs = [demo[0].baseline, *(c.candidate for c in demo)]
    assert render(demo, runs=runs) == render(demo)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_next_to_nothing_is_still_a_page(count: int) -> None:
    baseline = make_baseline(count) if count else make_run(make_facts([], []), np.zeros(0), 1)
    assert Page(render([make_comparison("tiny", baseline, 2)])).wrong == []
    assert Page(render([], runs=[baseline])).wrong == []
    assert "Nothing to report" in Page(render([])).text


def test_twenty_candidates_have_twenty_lines() -> None:
    baseline = make_baseline(400)
    made = [make_comparison(f"candidate {i}", baseline, 2 + i) for i in range(20)]
    page = render(made)
    keys = re.findall(r"<li>(<svg.*?</svg>)", page[page.index('id="charts"') :])
    assert len(set(keys)) == len(keys) == 20
    assert "20 candidates against" in page


def test_written_whole_or_not_at_all(tmp_path: Path, demo: list[Comparison]) -> None:
    path = report(tmp_path / "report.html", *demo)
    assert path.read_text() == render(demo)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InputError, match="there is no folder"):
        report(tmp_path / "missing" / "report.html", *demo)


def test_what_hides_is_made_visible_and_what_joins_is_kept() -> None:
    assert visible("a\0\x1b\u202e\ud800\ufeff") == "a␀␛⟨U+202E⟩⟨U+D800⟩⟨U+FEFF⟩"
    assert visible("👩\u200d🔬 नि\u200cष\t\n") == "👩\u200d🔬 नि\u200cष\t\n"
    assert escaped('<a b="c">&') == "&lt;a b=&#34;c&#34;&gt;&amp;"


@pytest.mark.parametrize(
    ("axis", "low", "high"),
    [(drawing.linear, *ends) for ends in ((0, 1), (0, 3e-7), (-0.02, 5), (1.0, 1.0), (0, 123_456), (1.0004, 1.0008))]
    + [(drawing.logarithmic, *ends) for ends in ((1e-12, 100), (1e-3, 1e-2), (0.03, 0.09), (1e-8, 1))],
)
def test_an_axis_has_a_few_different_labels(axis: Any, low: float, high: float) -> None:
    labels = [text for _, text in axis(low, high, "x").marks()]
    assert 2 <= len(labels) <= 12
    assert len(set(labels)) == len(labels)


class Words(str):
    """A result of a wing."""


class WordsOffer(extensions.PageOffer):
    def load(self) -> Any:
        return ResultPage(lambda results: f"a page of {len(results)}", ("words stand alone", "write several"), False)


def test_a_result_of_a_wing_has_its_own_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer = WordsOffer(shows=(f"{__name__}:Words",), code="of this file")
    monkeypatch.setattr(extensions, "wings", lambda: (extensions.Wing(offers=(offer,)),))
    report(tmp_path / "page.html", Words("a"))
    assert (tmp_path / "page.html").read_text().startswith("a page of 1")
    for results in ([Words("a"), Words("b")], [Words("a"), *hostile()[1]]):
        with pytest.raises(InputError, match="words stand alone"):
            report(tmp_path / "other.html", *results)
