"""For requests that failed as non_finite: where it began, in a warning and in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedctl.cli.session import Session
from pagedctl.engine.request import Completion
from pagedctl.errors import CapacityError
from pagedctl.manifest.writer import ManifestBuilder

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine

MOST_LOCATED = 3
"""Each costs a forward pass over the whole sequence, and they tend to have one cause."""


def note_faults(
    session: Session, builder: ManifestBuilder, engine: Engine, failed: Sequence[Completion]
) -> None:
    """Rerun the first few of *failed*, once everything else has been answered."""
    for one in failed[:MOST_LOCATED]:
        where = f"request {one.id}, sample {one.sample}"
        text = _text(engine, [*one.prompt_token_ids.tolist(), *one.token_ids.tolist()])
        builder.warn("fault_location", where=where, text=text)
        session.warn(f"{text} ({where})")


def _text(engine: Engine, token_ids: list[int]) -> str:
    try:
        found = engine.locate_fault(token_ids)
    except CapacityError as error:
        return f"where it began is not known: {error.what}"
    if found is None:
        return "a rerun of the failed sequence gave finite values only"
    return f"the first value that is not finite is an output of {found}"
