"""Whether an engine may be asked for something now: usable, paused, scoring. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedctl.engine.engine_checks import PauseMode


class Availability:
    """What stands against using an engine; its checks raise RuntimeError that says so.

    ``unusable`` is why it cannot run any more; ``paused`` is the mode of its pause; ``scoring``:
    an iterator of scores is open.
    """

    def __init__(self) -> None:
        self.unusable: str | None = None
        self.paused: PauseMode | None = None
        self.scoring = False

    def require_usable(self) -> None:
        if self.unusable is not None:
            raise RuntimeError(f"this engine cannot run: {self.unusable}")

    def require_free(self) -> None:
        """Usable, and no scores are being computed."""
        self.require_usable()
        if self.scoring:
            raise RuntimeError("the engine is scoring; end or close the iterator of scores first")

    def require_idle(self, what: str, remedy: str, *, busy: bool) -> None:
        """Free, not paused and not *busy*, for *what*; *remedy* helps a busy engine."""
        self.require_free()
        if self.paused is not None:
            raise RuntimeError(f"{what} needs an engine that is not paused; call resume first")
        if busy:
            raise RuntimeError(f"{what} needs an idle engine; {remedy}")

    @property
    def may_launch(self) -> bool:
        """Whether the pause, if any, lets requests go on."""
        return self.paused not in ("keep", "abort")

    @contextmanager
    def lost_if_cut_short(self) -> Iterator[None]:
        """An exception in the block leaves books that nothing may go on with."""
        self.unusable = "an exception ended a step halfway; build a new engine"
        yield
        self.unusable = None
