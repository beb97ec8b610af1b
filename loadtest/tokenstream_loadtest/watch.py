"""What the server's own metrics page says while it is measured: a sample each second, and exact counts of the whole.

The page is brought up to date once a second, so counts are taken once it stands still. A page that cannot be read gives
no samples and no counts, which is no fault of a measurement. It does not know how requests are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tokenstream import ConnectionFailed, ConnectTimeout, ServerError
from tokenstream.intervals import OUTCOMES, InstanceInterval, Key, Page, between, increase
from tokenstream.scraping import Scraper

from .results import Sample, ServerCounts
from .tally import Group

PERIOD = 1.0  # seconds between samples
_STILL = 1.3  # seconds without a change after which a page that is renewed once a second is taken as up to date
_LOOK = 0.1  # seconds between looks while that is awaited
_COUNTERS = ("steps_total", "prompt_tokens_total", "generation_tokens_total")
_PATIENCE = 6.0  # seconds for which it is awaited


class Watch:
    """The page at `url`, of http or https (ValueError); the instances of `model`, or all if it shows none of it."""

    def __init__(self, url: str, model: str) -> None:
        self._scraper = Scraper(url)
        self._model = model
        self._samples: list[Sample] = []
        self._restarted = False

    @property
    def restarted(self) -> bool:
        """Whether counters went back while it sampled, or since the page that the last counts began with."""
        return self._restarted

    async def settled(self) -> Page | None:
        """The page once it stands still; None if it cannot be read."""
        return await self._settle(lambda _: False, patient=False)

    async def counts(self, before: Page, expected: Group) -> ServerCounts | None:
        """What happened since `before`, as soon as it is what the caller counted, or once the page stands still.

        None if it could not be read within some seconds.
        """

        def complete(page: Page) -> bool:
            told = self._between(before, page)
            return (told.requests, told.output_tokens) == (expected.requests, expected.output_tokens)

        after = await self._settle(complete, patient=True)
        self._restarted = self._restarted or (after is not None and self._fell(before, after))
        return None if after is None else self._between(before, after)

    async def sample(self) -> None:
        """Look once a second until cancelled."""
        began = time.perf_counter()
        self._samples, self._restarted = [], False
        last, page = began, await self._page()
        seen = page
        while True:
            await asyncio.sleep(max(0.0, last + PERIOD - time.perf_counter()))
            now, following = time.perf_counter(), await self._page()
            if page is not None and following is not None:
                intervals = between(page, following, now - last)
                self._samples.append(_sample(now - began, self._chosen(intervals)))
            if following is not None:
                self._restarted = self._restarted or (seen is not None and self._fell(seen, following))
                seen = following
            last, page = now, following

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Those of the task that runs `sample`, or ran it last, so far."""
        return tuple(self._samples)

    async def _settle(self, complete: Callable[[Page], bool], *, patient: bool) -> Page | None:
        """`patient`: look again for one that cannot be read."""
        end = time.perf_counter() + _PATIENCE
        page = await self._page()
        changed = time.perf_counter()
        while patient if page is None else not complete(page):
            now = time.perf_counter()
            if now > end or (page is not None and now - changed > _STILL):
                break
            await asyncio.sleep(_LOOK)
            following = await self._page()
            if page is None or following is None or self._state(following) != self._state(page):
                page, changed = following, time.perf_counter()
        return page

    async def _page(self) -> Page | None:
        """The page, read in a thread; None if it cannot be."""
        try:
            return await asyncio.to_thread(self._scraper.page)
        except (ConnectionFailed, ConnectTimeout, ServerError):
            return None

    def _fell(self, before: Page, after: Page) -> bool:
        """Whether a counter is less than it was: the server that counts is another one."""
        return any(after.value(key, name) < before.value(key, name) for key in self._keys(before) for name in _COUNTERS)

    def _keys(self, page: Page) -> list[Key]:
        own = [key for key in page.instances if key[0] == self._model]
        return own or page.instances

    def _chosen(self, intervals: Sequence[InstanceInterval]) -> list[InstanceInterval]:
        own = [interval for interval in intervals if interval.model == self._model]
        return own or list(intervals)

    def _state(self, page: Page) -> tuple[float, ...]:
        """Numbers of which one changes whenever something happens."""
        names = ("steps_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting")
        keys = self._keys(page)
        ended = [page.value(key, "requests_total", outcome) for key in keys for outcome in OUTCOMES]
        return (*ended, *(page.value(key, name) for key in keys for name in names))

    def _between(self, before: Page, after: Page) -> ServerCounts:
        keys = self._keys(after)

        def grown(name: str, detail: str = "") -> float:
            return sum(increase(before.value(key, name, detail), after.value(key, name, detail)) for key in keys)

        def mean(name: str) -> float | None:
            return _ratio(grown(f"{name}_sum"), grown(f"{name}_count"))

        def counted_by_triton(name: str) -> float:
            models = {key[:2]: key for key in keys}.values()
            return sum(increase(before.triton(key, name), after.triton(key, name)) for key in models)

        ttft = mean("time_to_first_token_seconds")
        waited = _ratio(counted_by_triton("queue_duration_us"), counted_by_triton("exec_count"))
        return ServerCounts(
            requests=round(sum(grown("requests_total", outcome) for outcome in OUTCOMES)),
            input_tokens=round(grown("prompt_tokens_total")),
            output_tokens=round(grown("generation_tokens_total")),
            ttft=None if ttft is None else ttft + (waited or 0.0) / 1e6,
            itl=mean("inter_token_latency_seconds"),
            queue=mean("request_queue_time_seconds"),
            preemptions=round(grown("num_preemptions_total")),
            prefix_hits=_ratio(grown("prefix_cache_hits_total"), grown("prefix_cache_queries_total")),
        )


def _sample(at: float, instances: Sequence[InstanceInterval]) -> Sample:
    """All instances as one: sums; of shares and means, the mean of those that have them."""
    rows = [one.rows_per_step for one in instances if one.rows_per_step is not None]
    return Sample(
        at=at,
        running=sum(one.running for one in instances),
        waiting=sum(one.waiting for one in instances),
        kv_usage=sum(one.kv_usage for one in instances) / len(instances),
        generation_tokens_per_second=sum(one.generation_tokens_per_second for one in instances),
        prompt_tokens_per_second=sum(one.prompt_tokens_per_second for one in instances),
        rows_per_step=sum(rows) / len(rows) if rows else None,
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
