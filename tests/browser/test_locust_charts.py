"""The live charts on Locust's page in a real browser: drawn, quiet, and inside a tab of Locust's own page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser.seen import Seen, assert_quiet
from unit.locust_runs import free_port, locust
from unit.scripted_triton import ScriptedCall, ScriptedTriton, answer, failure
from waiting import eventually

PATIENCE = 60_000  # milliseconds: a line needs two points, each of three seconds
WORDS = ("one", "two", "three", "four")
TWO_POINTS = re.compile(r"^\S+,\S+ \S+,\S+")


def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
    if not request.id.startswith("locust-"):
        yield failure("it tells nothing of itself [request=x tokens=0 code=UNIMPLEMENTED]")
        return
    for response in answer(*WORDS)(request, call):
        if call.over.wait(0.05):
            return
        yield response


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a Locust that measures something."""
    folder: Path = tmp_path_factory.mktemp("locust")
    server, port = ScriptedTriton(script), free_port()
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
