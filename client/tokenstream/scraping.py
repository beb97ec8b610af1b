"""Looks at a metrics page again and again, and tells what happened between one look and the next.

Whatever keeps a page from being read is an exception of `errors`; the look after it begins anew, for the server may be
another one. It does not know how what happened is shown, nor when it is asked for.
"""

from __future__ import annotations

import re
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit

from .errors import ConnectionFailed, ConnectTimeout, ServerError
from .exposition import parse_page
from .intervals import InstanceInterval, Page, between

_SECONDS = 2.0  # within which a page must come
_MOST_BYTES = 1 << 26
_URL = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Interval:
    """What every instance did in the `seconds` before `at` (seconds of the epoch)."""

    at: float
    seconds: float
    instances: list[InstanceInterval]


class Scraper:
    """The page at `url`, which must be http or https (ValueError); without a path it is `/metrics`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or not _URL.fullmatch(url):
            raise ValueError(f"the metrics page is like http://127.0.0.1:8002/metrics, got {url!r}")
        self.url = urlunsplit(parts if parts.path.strip("/") else parts._replace(path="/metrics"))
        # What is watched is asked itself, whatever proxy the environment names for the world outside.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._last: tuple[float, Page] | None = None

    def look(self) -> Interval | None:
        """What happened since the last look; None at the first one, and at the first behind a failure.

        ConnectionFailed or ConnectTimeout if nobody answers, ServerError for what is no page of our models.
        """
        last, self._last = self._last, None
        page = self.page()
        now = time.monotonic()
        self._last = now, page
        if last is None:
            return None
        seconds = now - last[0]
        return Interval(time.time(), seconds, between(last[1], page, seconds))

    def page(self) -> Page:
        """The page as it is now, which has an instance of a model at least; errors as those of `look`."""
        try:
            page = Page(parse_page(self._text()))
        except ValueError as error:
            raise self._no_page(f"holds {error}") from None
        if not page.instances:
            cure = "wait until one is loaded, and see that its config.pbtxt leaves `metrics` on"
            raise ServerError(f"no model shows its numbers at {self.url}: {cure}")
        return page

    def _text(self) -> str:
        try:
            with self._opener.open(self.url, timeout=_SECONDS) as response:
                return str(response.read(_MOST_BYTES).decode())
        except HTTPError as error:
            error.close()
            raise self._no_page(f"answered {error.code} {error.reason}") from None
        except OSError as error:
            raise self._not_reached(error.reason if isinstance(error, URLError) else error) from None
        except HTTPException:
            raise self._no_page("gave no answer of HTTP") from None

    def _no_page(self, what: str) -> ServerError:
        return ServerError(f"{self.url} {what}: name Triton's metrics page with --metrics-url")

    def _not_reached(self, cause: object) -> ConnectionFailed | ConnectTimeout:
        if isinstance(cause, TimeoutError):
            return ConnectTimeout(f"{self.url} did not answer within {_SECONDS:g} s")
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
        return ConnectionFailed(f"cannot read {self.url}: {reason.lower()}")
