"""What the pages of a browser context did: the addresses they asked for and the errors they met, in order.

Sees everything that the browser fetches for a page, its frames, workers and WebSockets, and what a page tells the
console. It does not know which of it is allowed until asked, and it stops nothing.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Page

WITHIN_THE_PAGE = {"about", "blob", "data"}


class Seen:
    """The record of one context, from its making on."""

    def __init__(self, context: BrowserContext) -> None:
        self.requests: list[str] = []
        self.console_errors: list[str] = []
        self.page_errors: list[str] = []
        context.on("request", lambda request: self.requests.append(request.url))
        context.on("console", self._console)
        context.on("weberror", lambda error: self.page_errors.append(str(error.error)))
        context.on("page", self._page)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "assert"}:
            self.console_errors.append(message.text)

    def _page(self, page: Page) -> None:
        page.on("websocket", lambda socket: self.requests.append(socket.url))

    def foreign(self, *origins: str) -> list[str]:
        """The addresses asked for that are of none of the `origins`, such as `file://` or `http://127.0.0.1:8080`."""
        return [url for url in self.requests if not _is_of(url, origins)]


def assert_quiet(page: Page, seen: Seen, *origins: str) -> None:
    """Nothing was asked for outside `origins`, no error was thrown unheard, none was told to the console."""
    page.evaluate("0")  # what the browser reported before this answer has been recorded
    complaints = [f"asked for {url}" for url in seen.foreign(*origins)]
    complaints += [f"threw {error}" for error in seen.page_errors]
    complaints += [f"told the console {error}" for error in seen.console_errors]
    assert not complaints, f"{page.url} was not quiet:\n" + "\n".join(complaints)


def _is_of(url: str, origins: tuple[str, ...]) -> bool:
    parts = urlsplit(url)
    return parts.scheme in WITHIN_THE_PAGE or f"{parts.scheme}://{parts.netloc}" in origins
