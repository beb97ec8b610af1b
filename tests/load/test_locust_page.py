"""Our part of Locust's web page: it tells what is measured, what a test came to, and why one cannot begin."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections import Counter
from typing import Any

import pytest

from unit.locust_runs import WORDS, asked, free_port, locust, paced, result
from waiting import eventually


def test_the_web_page_has_a_tab_and_charts_of_what_is_measured(triton, tmp_path):
    server, port = triton(paced(*WORDS)), free_port()
    web = ("--web-host", "127.0.0.1", "--web-port", str(port), "--autostart", "-u", "2", "--slo", "ttft_p95=9s")
    base = f"http://127.0.0.1:{port}"
    with locust(tmp_path, server.url, *web, headless=False):
        eventually(lambda: points(base))
        page, script = fetch(f"{base}/tokenstream/"), fetch(f"{base}/tokenstream/charts.js")
        assert "Token charts" in page
        assert "innerHTML" not in script
        assert "http" not in page.replace("http-equiv", "")  # nothing from elsewhere
        told = json.loads(fetch(f"{base}/tokenstream/points"))
        assert sum(point["requests"] for point in told["points"]) > 0
        assert told["objectives"][0] == {"name": "ttft_p95=9s", "value": pytest.approx(0.1, abs=9), "met": True}
        assert Counter(row["metric"] for row in told["rows"])["TTFT"] == 1
        stats = json.loads(fetch(f"{base}/stats/requests"))
        assert stats["extended_stats"][0]["key"] == "tokenstream"
        assert '"title": "Tokens"' in fetch(f"{base}/")

        fetch(f"{base}/stop", post="")
        over = json.loads(fetch(f"{base}/tokenstream/points"))
        assert over["standing"]["state"] == "over"
        assert over["standing"]["report"] == str(tmp_path / "report.html")
        assert list(over["standing"]["flaws"]) == list(result(tmp_path).measurements[0].flaws)
        assert sum(point["requests"] for point in over["points"]) == len(asked(server))

        fetch(f"{base}/swarm", user_count="1", spawn_rate="1", host=server.url, workload="nothing")
        eventually(lambda: standing(base)["state"] == "refused")
        assert "no workload 'nothing'" in standing(base)["why"]
        assert points(base) == []
        eventually(lambda: json.loads(fetch(f"{base}/stats/requests"))["state"] == "stopped")

        before = len(asked(server))
        fetch(f"{base}/swarm", user_count="1", spawn_rate="1", host=server.url, workload="chat")
        eventually(lambda: len(asked(server)) > before)
        assert standing(base)["state"] == "running"


def points(base: str) -> list[Any]:
    try:
        return list(json.loads(fetch(f"{base}/tokenstream/points"))["points"])
    except OSError:
        return []


def standing(base: str) -> dict[str, Any]:
    return dict(json.loads(fetch(f"{base}/tokenstream/points"))["standing"])


def fetch(url: str, **form: str) -> str:
    """With a form: sent as one, by POST."""
    data = urllib.parse.urlencode(form).encode() if form else None
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, data, timeout=30) as response:
        return str(response.read().decode())
