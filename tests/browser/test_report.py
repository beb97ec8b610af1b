"""The page of a run in a real browser: quiet, readable on a phone, in the dark, on paper and without its script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from browser.seen import Seen, assert_quiet
from tokenstream_loadtest.report.page import write_report
from unit.invented_runs import paper_run

PHONE = {"width": 390, "height": 844}
SCROLLED = "new Promise((done) => element.addEventListener('scroll', () => done(), {once: true}))"
# Relative luminance by WCAG 2, of a colour as the browser computes it.
CONTRAST = """([selector, behind]) => {
    const light = (text) => {
        const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [ink, paper] = [
        light(getComputedStyle(document.querySelector(selector)).color),
        light(getComputedStyle(document.querySelector(behind)).backgroundColor),
    ];
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}"""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(paper_run(rates=(2, 16), repeats=2, seconds=8.0), path)
    return path


@pytest.fixture
def shown(page: Page, file: Path) -> Page:
    page.goto(file.as_uri())
    return page


@pytest.fixture
def without_script(browser: Browser, file: Path) -> Iterator[Page]:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(file.as_uri())
        yield page


def test_it_asks_for_nothing_else_and_breaks_none_of_its_own_rules(shown: Page, seen: Seen):
    assert shown.locator("svg").count() >= 11
    assert_quiet(shown, seen, "file://")
    assert seen.requests == [shown.url]


def test_its_policy_stops_what_is_not_its_own(shown: Page, seen: Seen):
    shown.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert shown.evaluate("window.ran") is None
    assert any("Content Security Policy" in error for error in seen.console_errors)


def test_a_pointer_is_told_what_it_points_at(shown: Page):
    point = shown.locator("svg .pt:not(.light)").first
    point.scroll_into_view_if_needed()
    point.hover()
    tip = shown.locator(".tip")
    assert tip.is_visible()
    assert tip.inner_text() == point.get_attribute("data-tip")
    assert "tokens/s" in tip.inner_text()
    shown.mouse.move(1, 1)
    assert tip.is_hidden()


def test_without_its_script_everything_is_there_but_the_button(without_script: Page):
    assert without_script.locator("svg .pt title").count() > 20
    assert without_script.get_by_role("button").count() == 0
    assert without_script.get_by_role("heading", name="Terms").is_visible()


def test_the_command_is_copied(shown: Page):
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="Copy").click()
    shown.get_by_role("button", name="Copied").wait_for()
    assert shown.evaluate("navigator.clipboard.readText()") == "tokenstream load ladder --seed 7"


def test_on_a_phone_only_tables_scroll_sideways_and_they_do(shown: Page):
    shown.set_viewport_size(PHONE)
    assert shown.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    table = shown.get_by_role("region", name="Latency at each load, ms")
    assert table.evaluate("element => element.scrollWidth > element.clientWidth")
    table.focus()
    table.evaluate(f"element => {{ window.scrolled = {SCROLLED} }}")
    table.press("ArrowRight")
    shown.evaluate("window.scrolled")
    assert table.evaluate("element => element.scrollLeft") > 0
    size = shown.locator("svg text").first.evaluate("text => text.getBoundingClientRect().height")
    assert size >= 9


def test_on_a_small_laptop_no_table_is_cut_off(shown: Page):
    shown.set_viewport_size({"width": 1200, "height": 800})
    cut = "tables => tables.filter(one => one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"
    assert shown.locator(".scroll").evaluate_all(cut) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_by_day_and_by_night(shown: Page, scheme: str):
    shown.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    pairs = [("h1", "body"), (".facts", "body"), ("td small", ".scroll"), (".missed", ".scroll"), (".met", ".scroll")]
    for pair in [*pairs, (".card.no b", ".card.no"), (".key li", "figure"), ("thead th", ".scroll")]:
        assert shown.evaluate(CONTRAST, list(pair)) >= 4.5, pair


def test_day_and_night_are_different(shown: Page):
    papers = []
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        papers.append(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]


def test_on_paper_nothing_is_cut_off_and_folded_charts_are_shown(shown: Page):
    shown.set_viewport_size({"width": 703, "height": 1000})  # A4 between its margins
    shown.emulate_media(media="print", color_scheme="dark")
    assert shown.evaluate("document.documentElement.scrollWidth") <= 703
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.get_by_role("button").count() == 0
    assert shown.locator("details svg").first.evaluate("chart => chart.getBoundingClientRect().height") > 50
    assert len(shown.pdf(prefer_css_page_size=True)) > 20_000


def test_a_screen_reader_finds_headings_tables_and_charts(shown: Page):
    assert shown.get_by_role("heading", level=1).count() == 1
    assert shown.get_by_role("img", name="Throughput against TTFT p95").count() == 1
    table = shown.get_by_role("table", name="Throughput at each load")
    assert table.get_by_role("rowheader").count() == 2
    assert table.get_by_role("columnheader", name="goodput").count() == 1
