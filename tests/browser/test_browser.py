"""The browser is real, draws and computes; what a page does wrong is seen, so that a page found quiet was quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from browser.seen import Seen, assert_quiet

OUTSIDE = "http://outside.invalid"
QUIET = """<!doctype html><meta charset="utf-8"><title>Quiet</title><p id="answer"></p>
<img id="dot" alt="" src="data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='7' height='5'/>">
<script>
  document.getElementById("answer").textContent = [1, 2, 3].map((number) => number * number).join(" ") + " é 🙂";
  console.log("said");
</script>"""
REQUESTS = {
    "an image": "document.body.append(Object.assign(new Image(), {src: '%s/it'}))",
    "a script": "document.body.append(Object.assign(document.createElement('script'), {src: '%s/it'}))",
    "a fetch": "fetch('%s/it', {mode: 'no-cors'}).catch(() => {})",
    "a beacon": "navigator.sendBeacon('%s/it', 'told')",
    "a frame": "document.body.append(Object.assign(document.createElement('iframe'), {src: '%s/it'}))",
    "a worker's fetch": "new Worker(URL.createObjectURL(new Blob([\"fetch('%s/it', {mode: 'no-cors'})\"])))",
}


@pytest.fixture
def quiet_page(page: Page, tmp_path: Path) -> Page:
    """A page from a file, which asks for nothing else."""
    file = tmp_path / "quiet.html"
    file.write_text(QUIET)
    page.goto(file.as_uri())
    return page


def test_the_browser_is_chromium_without_a_window(browser: Browser) -> None:
    assert browser.browser_type.name == "chromium"
    assert int(browser.version.split(".")[0]) >= 130
    assert browser.is_connected()


def test_a_file_is_shown_and_its_script_runs(quiet_page: Page, seen: Seen) -> None:
    assert quiet_page.title() == "Quiet"
    assert quiet_page.inner_text("#answer") == "1 4 9 é 🙂"
    assert quiet_page.evaluate("document.getElementById('dot').naturalWidth") == 7
    assert seen.requests[0] == quiet_page.url
    assert_quiet(quiet_page, seen, "file://")


def test_text_is_drawn_in_fonts_that_came_with_the_browser(quiet_page: Page) -> None:
    width = """([font, text]) => {
        const pen = document.createElement("canvas").getContext("2d");
        pen.font = "100px " + font;
        return pen.measureText(text).width;
    }"""
    assert quiet_page.evaluate(width, ["monospace", "iii"]) == quiet_page.evaluate(width, ["monospace", "mmm"]) > 0
    for generic, family in (
        ("serif", "DejaVu Serif"),
        ("sans-serif", "DejaVu Sans"),
        ("monospace", "DejaVu Sans Mono"),
    ):
        drawn, expected = (quiet_page.evaluate(width, [font, "Qmij"]) for font in (generic, f"'{family}'"))
        assert drawn == expected
    assert quiet_page.evaluate(width, ["serif", "Qmij"]) != quiet_page.evaluate(width, ["sans-serif", "Qmij"])


def test_nothing_is_left_for_the_next_test(browser: Browser, quiet_page: Page) -> None:
    quiet_page.evaluate("localStorage.setItem('left', 'something')")
    with browser.new_context() as next_one:
        other = next_one.new_page()
        other.goto(quiet_page.url)
        assert other.evaluate("localStorage.getItem('left')") is None


@pytest.mark.parametrize("way", REQUESTS)
def test_a_request_to_elsewhere_is_seen(quiet_page: Page, context: BrowserContext, seen: Seen, way: str) -> None:
    context.route(f"{OUTSIDE}/**", lambda route: route.fulfill(body="", content_type="text/plain"))
    with context.expect_event("request"):
        quiet_page.evaluate(f"() => {{ {REQUESTS[way] % OUTSIDE} }}")
    quiet_page.wait_for_load_state("networkidle")
    assert f"{OUTSIDE}/it" in seen.foreign("file://")
    assert seen.foreign("file://", OUTSIDE) == []
    with pytest.raises(AssertionError, match=f"asked for {OUTSIDE}/it"):
        assert_quiet(quiet_page, seen, "file://")


def test_a_socket_to_elsewhere_is_seen(quiet_page: Page, seen: Seen) -> None:
    with quiet_page.expect_websocket():
        quiet_page.evaluate("() => { new WebSocket('ws://outside.invalid/it') }")
    assert seen.foreign("file://") == ["ws://outside.invalid/it"]


@pytest.mark.parametrize("near", ["http://127.0.0.1:80800", "https://127.0.0.1:8080", "http://127.0.0.1:8080.invalid"])
def test_an_address_that_only_begins_like_an_allowed_one_is_foreign(seen: Seen, near: str) -> None:
    seen.requests += [f"{near}/it", "http://127.0.0.1:8080/it", "data:,it", "blob:null/it"]
    assert seen.foreign("http://127.0.0.1:8080") == [f"{near}/it"]


def test_an_error_told_to_the_console_is_seen(quiet_page: Page, seen: Seen) -> None:
    quiet_page.evaluate("console.error('it broke', 7)")
    with pytest.raises(AssertionError, match="told the console it broke 7"):
        assert_quiet(quiet_page, seen, "file://")
    assert seen.console_errors == ["it broke 7"]


def test_an_error_that_nobody_catches_is_seen(quiet_page: Page, context: BrowserContext, seen: Seen) -> None:
    with context.expect_event("weberror"):
        quiet_page.evaluate("() => { setTimeout(() => { throw new Error('nobody heard') }) }")
    with pytest.raises(AssertionError, match="threw nobody heard"):
        assert_quiet(quiet_page, seen, "file://")


def test_a_missing_file_is_an_error_on_the_console(quiet_page: Page, seen: Seen) -> None:
    with quiet_page.expect_event("requestfailed"):
        quiet_page.evaluate("() => { document.body.append(Object.assign(new Image(), {src: 'missing.png'})) }")
    with pytest.raises(AssertionError, match="ERR_FILE_NOT_FOUND"):
        assert_quiet(quiet_page, seen, "file://")
