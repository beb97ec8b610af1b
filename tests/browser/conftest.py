"""A real Chromium for every test here: one process for all, a fresh context for each. No browser is a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from browser.chromium import ARGUMENTS, chromium, environment
from browser.seen import Seen
from debian_packages import ToolMissing

START_MILLISECONDS = 60_000
ACTION_MILLISECONDS = 20_000


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A running Chromium with an empty profile."""
    try:
        program = chromium()
    except ToolMissing as error:
        pytest.fail(f"the browser is missing: {error}", pytrace=False)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=program,
            args=ARGUMENTS,
            env={**environment(program, tmp_path_factory.mktemp("browser"))},
            timeout=START_MILLISECONDS,
        )
        yield started
        started.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A context of its own, without cookies, storage or cache of another test."""
    fresh = browser.new_context()
    fresh.set_default_timeout(ACTION_MILLISECONDS)
    yield fresh
    fresh.close()


@pytest.fixture
def seen(context: BrowserContext) -> Seen:
    """What the test's pages did, from the first one on."""
    return Seen(context)


@pytest.fixture
def page(context: BrowserContext, seen: Seen) -> Page:
    """An empty page; `seen` records it whether or not the test looks."""
    return context.new_page()
