"""Progress: plain lines when they are due, a bar on a terminal, nothing when not wanted."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console

from pagedctl.cli.progress import LiveDisplay, PlainLines, Progress


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=100, no_color=True), stream


def clock(*times_s: float) -> Iterator[float]:
    return iter((times_s[0], *times_s))


def test_a_plain_line_is_written_when_ten_seconds_have_passed() -> None:
    talk, stream = console(terminal=False)
    times = clock(100.0, 105.0, 109.9, 110.0, 115.0, 121.5)
    with Progress(PlainLines(talk, "bench", "tokens"), clock=times.__next__) as progress:
        for done in (1_000, 2_000, 3_000, 4_000, 5_000):
            progress.update(done, 32_768, "repeat 1 of 3")
    assert stream.getvalue().splitlines() == [
        "bench: 3,000 of 32,768 tokens · repeat 1 of 3 · 10 s",
        "bench: 5,000 of 32,768 tokens · repeat 1 of 3 · 22 s",
    ]


def test_a_line_is_never_wrapped_nor_read_as_markup() -> None:
    talk, stream = console(terminal=False)
    with Progress(PlainLines(talk, "x" * 120, "[bold]"), clock=clock(0.0, 11.0).__next__) as shown:
        shown.update(1, 2, "[red]text[/]")
    assert stream.getvalue() == f"{'x' * 120}: 1 of 2 [bold] · [red]text[/] · 11 s\n"


def test_the_bar_is_painted_in_place_and_cleared() -> None:
    talk, stream = console(terminal=True)
    times = clock(0.0, 0.1, 0.6)
    with Progress(LiveDisplay(talk, "bench", "tokens"), clock=times.__next__) as progress:
        progress.update(10, 100, "too early")
        progress.update(50, 100, "repeat [1] of 3")
    painted = stream.getvalue()
    assert "50 of 100 tokens · repeat [1] of 3" in painted
    assert "too early" not in painted
    assert painted.endswith("\x1b[2K")


def test_without_a_display_the_clock_is_not_read() -> None:
    times = iter((0.0, 0.0))
    with Progress(None, clock=times.__next__) as progress:
        progress.update(1, 2, "text")
