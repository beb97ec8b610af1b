"""The live charts on Locust's page in a real browser: drawn, quiet, and inside a tab of Locust's own page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Page, expect

from browser.seen import Seen, assert_quiet
from unit.locust_runs import free_port, introduced, locust
from unit.scripted_triton import ScriptedCall, ScriptedTriton, answer
from waiting import eventually

PATIENCE = 60_000  # milliseconds: a line needs two points, each of three seconds
WORDS = ("one", "two", "three", "four")
TWO_POINTS = re.compile(r"^\S+,\S+ \S+,\S+")


def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
    for response in answer(*WORDS)(request, call):
        if call.over.wait(0.05):
            return
        yield response


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a Locust that measures something."""
    folder: Path = tmp_path_factory.mktemp("locust")
    server, port = ScriptedTriton(introduced(script)), free_port()
    options = ("--web-host", "127.0.0.1", "--web-port", str(port), "--autostart", "-u", "2", "--slo", "ttft_p95=9s")
    with locust(folder, server.url, *options, headless=False):
        eventually(lambda: len(server.requests) > 4)
        yield f"http://127.0.0.1:{port}"
    server.close()


def test_every_chart_draws_what_is_measured_and_asks_for_nothing_else(page: Page, seen: Seen, origin: str) -> None:
    page.goto(f"{origin}/tokenstream/")
    expect(page.locator("figure")).to_have_count(4)
    for title in ("TTFT, ms", "ITL, ms", "tokens per second, of ended requests"):
        figure = page.locator("figure", has_text=title)
        expect(figure.locator("polyline").first).to_have_attribute("points", TWO_POINTS, timeout=PATIENCE)
    expect(page.locator("tbody tr")).to_have_count(6)
    expect(page.get_by_role("status")).to_contain_text("requests ended, 0 of them in errors")
    expect(page.locator("li.met")).to_have_text("ttft_p95=9s")
    assert_quiet(page, seen, origin)


def test_a_tab_of_locusts_page_has_the_exact_percentiles_and_the_charts(page: Page, seen: Seen, origin: str) -> None:
    page.goto(origin)
    charts = page.frame_locator("iframe[title='Token charts']")
    expect(page.get_by_role("tab", name="Tokens")).to_be_visible()
    expect(page.locator("iframe")).to_be_hidden()
    page.get_by_role("tab", name="Tokens").click()
    expect(page.locator("td", has_text="TTFT").first).to_be_visible()
    expect(charts.locator("figure")).to_have_count(4)
    drawn = charts.locator("figure", has_text="TTFT, ms").locator("polyline").first
    expect(drawn).to_have_attribute("points", TWO_POINTS, timeout=PATIENCE)
    expect(charts.locator("figure").first).to_be_in_viewport()
    page.get_by_role("tab", name="Statistics").click()
    expect(page.locator("iframe")).to_be_hidden()
    page.get_by_role("tab", name="Tokens").click()
    expect(charts.locator("figure").first).to_be_in_viewport()
    assert_quiet(page, seen, origin)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tab_is_readable_whatever_theme_locust_has(
    page: Page, origin: str, scheme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(origin)
    page.get_by_role("tab", name="Tokens").click()
    charts = page.frame_locator("iframe[title='Token charts']")
    expect(charts.locator("figure")).to_have_count(4)  # drawn, so its style is there
    colours = "of => ['color', 'backgroundColor'].map(name => getComputedStyle(of)[name])"
    text, background = (brightness(colour) for colour in charts.locator("html").evaluate(colours))
    assert abs(text - background) > 150
    assert (background < text) is (scheme == "dark")


def test_a_page_without_numbers_has_no_axes_and_judges_nothing(page: Page, seen: Seen, origin: str) -> None:
    show(page, state="running", objectives=[{"name": "ttft_p95=1s", "value": None, "met": None}])
    page.goto(f"{origin}/tokenstream/")
    expect(page.get_by_role("status")).to_have_text("0 requests ended, 0 of them in errors")
    expect(page.locator("svg line")).to_have_count(4 * 3)
    expect(page.locator("svg text")).to_have_count(0)
    expect(page.locator("li.open")).to_have_text("ttft_p95=1s")
    assert_quiet(page, seen, origin)


def test_a_chart_of_nothing_but_zeros_has_an_axis_of_plain_numbers(page: Page, origin: str) -> None:
    show(page, state="running", samples=[[0, 0, 0], [1, 0, 0]])
    page.goto(f"{origin}/tokenstream/")
    figure = page.locator("figure", has_text="requests in the server")
    expect(figure.locator("svg text")).to_have_text(["0.0", "0.50", "1.0", "1 s"])


@pytest.mark.parametrize(
    ("standing", "line"),
    [
        ({"state": "none"}, "waiting for a test"),
        ({"state": "refused", "why": "unknown model: '<b>'"}, "the test cannot begin: unknown model: '<b>'"),
        (
            {"state": "over", "flaws": ["late", "not quiet"], "report": "a/report.html"},
            "0 requests ended, 0 of them in errors. NOT VALID: late; not quiet. report: a/report.html",
        ),
        ({"state": "over"}, "0 requests ended, 0 of them in errors. valid"),
    ],
)
def test_the_status_line_says_how_it_stands_in_locusts_tab_too(
    page: Page, origin: str, standing: dict[str, Any], line: str
) -> None:
    show(page, **standing)
    page.goto(f"{origin}/tokenstream/")
    expect(page.get_by_role("status")).to_have_text(line)
    page.goto(origin)
    page.get_by_role("tab", name="Tokens").click()
    status = page.frame_locator("iframe[title='Token charts']").get_by_role("status")
    expect(status).to_have_text(line)
    expect(status).to_be_visible()


def show(page: Page, **told: Any) -> None:
    """The page will show this in place of what is measured."""
    standing = {"why": "", "flaws": [], "report": ""} | told
    lists = {name: told.get(name, []) for name in ("points", "tokens", "samples", "rows", "objectives")}
    page.route("**/tokenstream/points", lambda route: route.fulfill(json={"standing": standing, **lists}))


def brightness(colour: str) -> float:
    """Of "rgb(0, 0, 0)", 0 to 255; one that is transparent has none."""
    parts = [float(part) for part in re.findall(r"[\d.]+", colour)]
    assert len(parts) == 3, f"{colour} is transparent"
    return sum(parts) / 3
