"""The page in a real browser."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scoremode.reports.html.page import render
from tests.browser import CHROMIUM, Browser
from tests.reports.demo import FORMATS, make_baseline, make_demo, make_formats, write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "report.html", render(make_demo(5000)))


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    """The page at the beginning of its text, where it does not open by itself."""
    browser.screen(1280)
    browser.open(page)
    browser.ask("{const s = document.getElementById('page'); s.value = '1'; s.dispatchEvent(new Event('input'))}")
    return browser


def selected(browser: Browser) -> int:
    chosen = browser.ask("document.querySelector('.t[aria-selected=true]')?.id ?? 't-1'")
    return int(chosen[1:])


def test_the_page_opens_without_a_word_on_the_console(opened: Browser) -> None:
    assert opened.problems() == []
    assert opened.ask("document.querySelectorAll('.summary tbody tr:not(.how)').length") == 5
    seen = "[...document.querySelectorAll('figure.chart svg')].filter((e) => e.checkVisibility()).length"
    assert opened.ask(seen) == 4 + 1  # of quality against size, one measure and one width are shown
    assert opened.ask("document.querySelectorAll('.t').length") == 1200
    assert opened.ask("document.querySelectorAll('.t.w1, .t.w2, .t.w3, .t.w4').length") > 0


def test_the_page_opens_on_the_worst_candidate_and_its_worst_token(browser: Browser, page: Path) -> None:
    comparisons = make_demo(5000)
    delta = comparisons[2].candidate.scores.logprob - comparisons[2].baseline.scores.logprob
    browser.screen(1280)
    browser.open(page)
    assert browser.ask("document.getElementById('view').selectedOptions[0].textContent") == comparisons[2].name
    assert selected(browser) == int(delta.argmin())
    assert browser.ask("scrollY") == 0
    browser.screen(400)
    browser.open(page)
    assert selected(browser) == -1, "on a phone its details would cover the page"


def test_n_and_p_walk_through_the_worst(opened: Browser) -> None:
    opened.press("n")
    first = selected(opened)
    assert first >= 0
    assert "worst 1 of 5,000 by Δ logprob" in opened.ask("document.getElementById('said').textContent")
    opened.press("n")
    second = selected(opened)
    assert second != first
    opened.press("p")
    assert selected(opened) == first
    inside = "(() => { const r = document.querySelector('.t[aria-selected=true]').getBoundingClientRect();"
    assert opened.ask(inside + "return r.top >= 0 && r.bottom <= innerHeight; })()")
    assert opened.problems() == []


def test_arrows_move_from_token_to_token(opened: Browser) -> None:
    opened.ask("document.getElementById('tokens').focus()")
    opened.press("ArrowRight")
    assert selected(opened) == 0
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    opened.press("ArrowLeft")
    assert selected(opened) == 1
    assert opened.ask("document.getElementById('tokens').getAttribute('aria-activedescendant')") == "t1"
    opened.press("End")
    opened.press("ArrowRight")
    assert selected(opened) == 1200
    assert opened.ask("document.getElementById('page-number').textContent") == "page 2 of 5"
    opened.press("Escape")
    assert selected(opened) == -1


def test_pointing_shows_a_token_and_leaving_forgets_it(opened: Browser) -> None:
    opened.ask("document.getElementById('tokens').scrollIntoView()")
    opened.hover("#t5")
    assert opened.ask("document.querySelectorAll('#details tbody tr').length") == 7
    assert selected(opened) == -1
    opened.hover("#text-title") if opened.ask(
        "document.querySelector('#text-title').getBoundingClientRect().y > 0"
    ) else None
    opened.ask("document.getElementById('tokens').dispatchEvent(new PointerEvent('pointerleave'))")
    assert "press n" in opened.ask("document.getElementById('details').textContent")


def test_a_position_and_a_word_can_be_found(opened: Browser) -> None:
    opened.ask("document.getElementById('position').value = '2500'")
    opened.ask("document.getElementById('go').requestSubmit()")
    assert selected(opened) == 2499  # the first target is at position 1
    assert "position 2,500" in opened.ask("document.getElementById('details').textContent")
    opened.ask("document.getElementById('needle').value = 'ASSERT'")
    opened.ask("document.getElementById('search').requestSubmit()")
    found = selected(opened)
    around = f"[{found}, {found + 1}].map((i) => document.getElementById('t' + i).textContent).join('')"
    assert "assert" in opened.ask(around).lower()
    opened.ask("document.getElementById('needle').value = 'no such words at all'")
    opened.ask("document.getElementById('search').requestSubmit()")
    assert opened.ask("document.getElementById('said').textContent") == "not in the scored text"
    assert opened.problems() == []


def test_candidates_measures_and_sensitivity_recolour_the_text(opened: Browser) -> None:
    coloured = "document.querySelectorAll('.t[class*=\" \"]').length"
    view = "const v = document.getElementById('view'); v.value = '{}'; v.dispatchEvent(new Event('change'))"
    counts = []
    for number in range(3):
        opened.ask("{" + view.format(number) + "}")
        counts.append(opened.ask(coloured))
    assert counts[0] < counts[1] < counts[2]  # Q8_0 moved least, Q2_K most
    opened.click("[data-measure=kl]")
    assert opened.ask("document.querySelectorAll('.t.v1, .t.v2').length") > 0
    before = opened.ask(coloured)
    opened.ask("{const s = document.getElementById('scale'); s.value = '100'; s.dispatchEvent(new Event('change'))}")
    assert opened.ask(coloured) > before
    opened.click("[data-measure=surprise]")
    assert opened.ask("document.getElementById('scale-label').hidden")
    assert opened.problems() == []


def test_pages_turn_by_button_slider_and_overview(opened: Browser) -> None:
    number = "document.getElementById('page-number').textContent"
    opened.click("#next-page")
    assert opened.ask(number) == "page 2 of 5"
    opened.ask("{const s = document.getElementById('page'); s.value = '4'; s.dispatchEvent(new Event('input'))}")
    assert opened.ask(number) == "page 4 of 5"
    opened.click("#map")
    assert opened.ask(number) == "page 3 of 5"


def test_the_theme_can_be_chosen(opened: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = opened.ask(ground)
    opened.click("[data-theme-choice=dark]")
    assert opened.ask(ground) != light
    opened.screen(1280, dark=True)
    opened.click("[data-theme-choice=light]")
    assert opened.ask(ground) == light


def test_every_control_has_a_name_and_is_reached_by_tab(opened: Browser) -> None:
    names = opened.ask(
        "[...document.querySelectorAll('button, input, select, [tabindex=\"0\"]')].filter((e) => e.checkVisibility())"
        ".filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length))"
        ".map((e) => e.outerHTML)"
    )
    assert names == []
    opened.ask("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        opened.call("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", windowsVirtualKeyCode=9)
        reached.append(opened.ask("document.activeElement.id"))
    in_order = ["view", "scale", "worst", "previous-worst", "next-worst", "position", "needle", "page", "tokens"]
    assert [name for name in reached if name in in_order] == in_order
    assert opened.ask("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") > 0


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_sticks_out_sideways(browser: Browser, page: Path, width: int) -> None:
    browser.screen(width)
    browser.open(page)
    assert browser.ask("document.documentElement.scrollWidth") <= width


def test_the_policy_refuses_a_script_that_got_in(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Even if an escape were forgotten, the browser would not run injected code."""
    text = page.read_text().replace("</main>", "<script>document.title='taken'</script></main>")
    broken = tmp_path / "broken.html"
    broken.write_text(text)
    browser.open(broken)
    assert browser.ask("document.title") != "taken"
    assert any("Content Security Policy" in problem for problem in browser.problems())


def test_a_hundred_thousand_tokens_stay_quick(browser: Browser, tmp_path: Path) -> None:
    path = write(tmp_path / "large.html", render(make_demo(100_000, ["Q4_K_M"])))
    browser.screen(1280)
    begun = time.monotonic()
    browser.open(path)
    assert browser.ask("document.querySelectorAll('.t').length") == 1200
    opened_after = time.monotonic() - begun
    assert browser.ask("document.querySelectorAll('*').length") < 3000
    begun = time.monotonic()
    browser.press("n")
    assert selected(browser) >= 0
    jumped_after = time.monotonic() - begun
    print(f"100,000 tokens: opened in {opened_after:.2f} s, first jump in {jumped_after:.2f} s")
    assert opened_after < 15
    assert jumped_after < 5
    assert browser.problems() == []


def test_a_page_of_runs_alone(browser: Browser, tmp_path: Path) -> None:
    path = write(tmp_path / "runs.html", render([], runs=[make_baseline(3000)]))
    browser.screen(1280)
    browser.open(path)
    assert browser.ask("document.querySelectorAll('[data-measure]').length") == 0
    assert browser.ask("document.querySelectorAll('.t.v1, .t.v2, .t.v3, .t.v4').length") > 10
    browser.press("n")
    assert browser.ask("document.querySelectorAll('#details thead th').length") == 2
    assert browser.problems() == []


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("formats") / "report.html", render(make_formats(1500)))


DRAWN = "[...document.querySelectorAll('#quality figure svg')].filter((e) => e.checkVisibility())"
POINTS = "[...document.querySelectorAll('#quality .point')].filter((e) => e.checkVisibility())"


@pytest.mark.parametrize("width", [1280, 390])
def test_quality_against_size_has_a_mark_for_every_candidate(browser: Browser, formats: Path, width: int) -> None:
    browser.screen(width)
    browser.open(formats)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(
        "document.querySelector('.large-chart').scrollWidth <= document.querySelector('.large-chart').clientWidth"
    )
    for measure in ("kl_mean", "ppl_ratio", "same_top"):
        browser.click(f"[for=size-{measure}]")
        assert browser.ask(f"{DRAWN}.length") == 1
        assert browser.ask(f"{POINTS}.length") == len(FORMATS)
        assert browser.ask(f"new Set({POINTS}.map((e) => e.querySelector('.dot').getAttribute('d'))).size") == 3
        said = browser.ask(f"{POINTS}.map((e) => e.getAttribute('aria-label')).join(' ')")
        assert [name for name, *_ in FORMATS if name not in said] == []
    assert browser.problems() == []


def test_the_switch_works_with_the_keyboard_and_without_a_script(browser: Browser, formats: Path) -> None:
    browser.screen(1280)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(formats)
        shown = "document.querySelector('#quality .of-kl_mean svg').checkVisibility()"
        assert browser.ask(shown), "KL is there without a script"
        browser.click("[for=size-ppl_ratio]")
        assert not browser.ask(shown)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    browser.open(formats)
    browser.ask("document.getElementById('size-kl_mean').focus()")
    browser.call("Input.dispatchKeyEvent", type="rawKeyDown", key="ArrowRight", windowsVirtualKeyCode=39)
    assert browser.ask("document.querySelector('.of-ppl_ratio').checkVisibility()")
    assert not browser.ask("document.querySelector('.of-kl_mean').checkVisibility()")


def test_a_mark_tells_its_figures(browser: Browser, formats: Path) -> None:
    browser.screen(390)
    browser.open(formats)
    said = "document.getElementById('size-said').textContent"
    assert "tap it" in browser.ask(said)
    browser.click("#quality .of-kl_mean .point:last-child .hit")
    assert browser.ask(said).startswith(f"{FORMATS[-1][0]}: 5.66 bits per weight, KL 0.0")
    assert browser.ask(said).endswith("(compressed-tensors W4A16, vllm 0.32.0)")


def test_how_a_row_was_served_is_one_click_away(browser: Browser, formats: Path) -> None:
    browser.screen(1280)
    browser.open(formats)
    headings = "[...document.querySelectorAll('.summary .group')].map((e) => e.textContent.trim())"
    assert browser.ask(headings) == ["GGUF · llamacpp", "EXL3 · exllamav3", "compressed-tensors · vllm"]
    bits = browser.ask(
        "[...document.querySelectorAll('[data-label=\"Bits/weight\"]')].map((e) => parseFloat(e.textContent))"
    )
    assert bits == [16.0, 8.51, 6.57, 4.96, 4.52, 3.31, 6.35, 4.55, 3.66, 8.85, 5.66]
    facts = "document.querySelectorAll('.how')[1].querySelector('.facts')"
    assert not browser.ask(f"{facts}.checkVisibility()")
    browser.click(".described:not(.reference) + .how summary")
    assert browser.ask(f"{facts}.checkVisibility()")
    told = browser.ask(f"{facts}.textContent")
    for words in ("GGUF Q8_0", "llamacpp b6910", "size of the body8.310 bits per weight", "batch_tokens 8192"):
        assert words in told
    browser.click(".described:not(.reference) + .how a")
    assert browser.ask("document.querySelector('#run-0').getBoundingClientRect().top < innerHeight")


def test_print_and_pictures(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The results are printed on a few pages; screenshots go to $SCOREMODE_SCREENSHOTS, or to a temporary folder."""
    folder = Path(os.environ.get("SCOREMODE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, dark in (
        ("light", 1280, False),
        ("dark", 1280, True),
        ("phone", 320, False),
        ("phone-dark", 390, True),
    ):
        browser.screen(width, dark=dark)
        browser.open(page)
        browser.press("n")
        assert browser.picture(folder / f"{name}.png").stat().st_size > 20_000
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    (folder / "report.pdf").write_bytes(printed)
    assert 1 <= printed.count(b"/Type /Page\n") <= 6
