"""Our part of Locust's web page: a tab of exact percentiles and live charts, which also are a page, `tokenstream/`.

The page polls one JSON route, needs nothing from elsewhere, and shows whatever comes from a server as text. It does not
know how the numbers are measured.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from flask import Blueprint, Response, request
from locust.web import WebUI

from .numbers import numbers, rows
from .session import Session
from .totals import Totals

_KEY = "tokenstream"
_COLUMNS = {
    "metric": "Metric",
    "p50": "p50 (ms)",
    "p95": "p95 (ms)",
    "p99": "p99 (ms)",
    "max": "max (ms)",
    "count": "#",
}
_SCRIPT = '<script src="tokenstream/tab.js" defer></script>'
_TYPES = {
    "charts.html": "text/html",
    "charts.js": "text/javascript",
    "tab.js": "text/javascript",
    "charts.css": "text/css",
}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


def add_charts(web_ui: WebUI, session: Session) -> None:
    """To Locust's page, before it is served."""
    app: Any = web_ui.app
    guarded: Any = web_ui.auth_required_if_enabled
    base = str(getattr(session.environment.parsed_options, "web_base_path", "") or "")
    pages = Blueprint(_KEY, __name__, url_prefix=f"{base}/{_KEY}")

    def page() -> Response:
        return _file("charts.html")

    def asset(name: str) -> Response:
        return _file(name)

    def points() -> Response:
        return Response(json.dumps(numbers(session.totals, session.standing)), mimetype="application/json")

    def extend(response: Response) -> Response:
        if response.status_code == 200 and request.path == f"{base}/stats/requests":
            _add_stats(response, session.totals)
        elif response.status_code == 200 and request.path == f"{base}/":
            response.set_data(response.get_data(as_text=True).replace("</body>", f"{_SCRIPT}</body>", 1))
        return response

    for rule, view in (("/", page), ("/<any('charts.js', 'tab.js', 'charts.css'):name>", asset), ("/points", points)):
        pages.add_url_rule(rule, view_func=guarded(view))
    app.register_blueprint(pages)
    app.after_request(extend)
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens", "key": _KEY}],
        "extended_tables": [
            {"key": _KEY, "structure": [{"key": key, "title": title} for key, title in _COLUMNS.items()]}
        ],
    }


def _add_stats(response: Response, totals: Totals | None) -> None:
    data = rows(totals.tally.all) if totals is not None else []
    told = json.loads(response.get_data(as_text=True))
    told["extended_stats"] = [*told.get("extended_stats", []), {"key": _KEY, "data": data}]
    response.set_data(json.dumps(told))


def _file(name: str) -> Response:
    text = (files(__package__) / name).read_text(encoding="utf-8")
    response = Response(text, mimetype=_TYPES[name])
    response.headers["Content-Security-Policy"] = _POLICY
    return response
