"""Progress on stderr: a live display on a terminal, one plain line every 10 s elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from pagedctl.cli.session import Session, talk_console

REFRESH_S = 0.5
"""Seconds between two paints of the live display. It has no thread of its own, so that it
takes no time from a step; a paint costs about 2 ms."""

PLAIN_LINE_S = 10.0
"""Seconds between two plain lines."""


class _Display(Protocol):
    """Where progress is shown; told at most once per ``interval_s``."""

    interval_s: float

    def start(self) -> None: ...

    def show(self, done: int, total: int, text: str, elapsed_s: float) -> None: ...

    def stop(self) -> None: ...


class Progress:
    """How far a run is, as a context manager.

    ``update`` may be called after every step: between two due lines it only reads the clock.
    Without a display (``--quiet``, ``--no-progress``) it does nothing.

    Example::

        with open_progress(session, "bench", unit="tokens") as progress:
            progress.update(512, 32_768, "repeat 1 of 3")
    """

    def __init__(
        self, display: _Display | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._display = display
        self._clock = clock
        self._started_s = self._shown_s = clock()

    def update(self, done: int, total: int, text: str) -> None:
        """Show *done* of *total* and *text* if a line is due."""
        if self._display is None:
            return
        now = self._clock()
        if now - self._shown_s >= self._display.interval_s:
            self._shown_s = now
            self._display.show(done, total, text, now - self._started_s)

    def __enter__(self) -> Progress:
        self._started_s = self._shown_s = self._clock()
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.stop()


def open_progress(
    session: Session, title: str, *, unit: str, shares_terminal: bool = False
) -> Progress:
    """The progress of *session*'s run; *unit* is what is counted, e.g. ``tokens``.

    *shares_terminal*: the result comes out on a terminal meanwhile, which a bar would garble.
    """
    if session.quiet or not session["progress"]:
        return Progress(None)
    console = talk_console(session.environ)
    dumb = session.environ.get("TERM") == "dumb"
    live = console.is_terminal and not dumb and not shares_terminal
    return Progress((LiveDisplay if live else PlainLines)(console, title, unit))


class PlainLines:
    """``bench: 12,345 of 32,768 tokens · repeat 1 of 3 · 20 s``, one line at a time."""

    interval_s = PLAIN_LINE_S

    def __init__(self, console: Console, title: str, unit: str) -> None:
        self._console = console
        self._title = title
        self._unit = unit

    def start(self) -> None:
        """Nothing to prepare."""

    def show(self, done: int, total: int, text: str, elapsed_s: float) -> None:
        count = f"{self._title}: {done:,} of {total:,} {self._unit}"
        self._console.print(f"{count} · {text} · {elapsed_s:,.0f} s", markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Nothing to clear."""


class LiveDisplay:
    """A bar that is repainted in place and disappears at the end."""

    interval_s = REFRESH_S

    def __init__(self, console: Console, title: str, unit: str) -> None:
        self._unit = unit
        self._bar = RichProgress(
            TextColumn(title),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task: TaskID | None = None

    def start(self) -> None:
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def show(self, done: int, total: int, text: str, elapsed_s: float) -> None:
        assert self._task is not None
        description = f"{done:,} of {total:,} {self._unit} · {text}"
        self._bar.update(self._task, completed=done, total=total, description=description)
        self._bar.refresh()

    def stop(self) -> None:
        self._bar.stop()
