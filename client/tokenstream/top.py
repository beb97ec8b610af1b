"""The command `top` from within: looks at a metrics page at an even pace and shows each interval.

On a full screen that `q`, Ctrl-C or SIGTERM leaves and that is always taken down; once, as text; or as JSON lines. A
server that is gone is said so and looked for again. It does not know what the numbers mean, nor how a frame is drawn.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .display import write
from .errors import TokenstreamError
from .exits import complain, exit_code, explained, unwound_by_sigterm
from .scraping import Interval, Scraper

if TYPE_CHECKING:
    from .intervals import Key

_HISTORY = 60  # intervals


class Trends:
    """Generated tokens per second of the last intervals, by instance."""

    def __init__(self) -> None:
        self._rates: dict[Key, deque[float]] = {}

    def add(self, interval: Interval) -> None:
        """Remember an interval, and forget instances that it does not hold."""
        rates = {}
        for one in interval.instances:
            rates[one.key] = self._rates.get(one.key, deque(maxlen=_HISTORY))
            rates[one.key].append(one.generation_tokens_per_second)
        self._rates = rates

    def of(self, key: Key) -> list[float]:
        """The rates of an instance, oldest first."""
        return list(self._rates.get(key, ()))


class Keys:
    """Keys of the terminal behind standard input, one by one and without their echo; where there is none, none come."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before = None if self._file is None else termios.tcgetattr(self._file)

    def __enter__(self) -> Self:
        """Take them as they are pressed."""
        if self._file is not None:
            tty.setcbreak(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Have the terminal as it was."""
        if self._file is not None and self._before is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def quit_within(self, seconds: float) -> bool:
        """Wait so long for a `q`; whether it was pressed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._file is None:
                time.sleep(left)
            elif select.select([self._file], [], [], left)[0]:
                pressed = os.read(self._file, 64)
                if b"q" in pressed.lower():
                    return True
                if not pressed:
                    self._file = None
        return False


class Beat:
    """A pace of even intervals, from the first of which all are counted; one that was missed is not made up for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic()

    def left(self) -> float:
        """Seconds until the next one."""
        now = time.monotonic()
        self._next = max(self._next + self._seconds, now)
        return self._next - now


def watch(url: str, interval: float, *, once: bool, json_lines: bool) -> None:
    """Show the instances of the metrics page `url` every `interval` seconds.

    Raises ValueError for an url that is none, and for a full screen without a terminal; with `once` whatever
    `Scraper.look` raises.
    """
    scraper = Scraper(url)
    if once:
        _show_once(scraper, interval, json_lines=json_lines)
    elif json_lines:
        _show_json(scraper, interval)
    elif sys.stdout.isatty():
        with unwound_by_sigterm():  # the terminal is left as it was
            _show_screen(scraper, interval)
    else:
        raise ValueError("standard output is no terminal: give --once or --json")


def interval_json(interval: Interval) -> str:
    """An interval as one line of JSON: `at`, `seconds`, and `instances` by the names of `InstanceInterval`."""
    return json.dumps(asdict(interval), ensure_ascii=False)


def _show_once(scraper: Scraper, interval: float, *, json_lines: bool) -> None:
    from .top_screen import interval_text

    scraper.look()
    time.sleep(interval)
    if (told := scraper.look()) is not None:
        write(interval_json(told) + "\n" if json_lines else interval_text(told))


def _show_json(scraper: Scraper, interval: float) -> None:
    trouble, beat = "", Beat(interval)
    while True:
        try:
            told = scraper.look()
            trouble = ""
            if told is not None:
                write(interval_json(told) + "\n")
        except TokenstreamError as error:
            if error.message != trouble:  # once, and not at every look
                complain(explained(error), exit_code(error), json_lines=True)
            trouble = error.message
        time.sleep(beat.left())


def _show_screen(scraper: Scraper, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from .top_screen import screen

    trends, beat, shown = Trends(), Beat(interval), None
    live = Live(console=Console(), screen=True, auto_refresh=False, vertical_overflow="crop")
    with Keys() as keys, live:
        while True:
            trouble = None
            try:
                told = scraper.look()
                if told is not None:
                    trends.add(told)
                    shown = told
            except TokenstreamError as error:
                trouble = f"{error.message}. Trying again every {interval:g} s"
            live.update(screen(scraper.url, shown, trends.of, trouble), refresh=True)
            if keys.quit_within(beat.left()):
                return
