"""Every sequence that is not answered yet, by key and by request. No torch."""

from __future__ import annotations

from collections import deque

from pagedctl.engine.request import RequestId
from pagedctl.engine.scheduler import Scheduler, SequenceKey, key_of
from pagedctl.engine.sequence import Sequence


class LiveRequests:
    """Sequences between submission and answer.

    A held one is kept from the scheduler until :meth:`release_held`. Requests are named by
    their ids as text: 5 and "5" are one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.sequences: dict[SequenceKey, Sequence] = {}
        self._scheduler = scheduler
        self._by_name: dict[str, list[Sequence]] = {}
        self._held: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, request_id: RequestId) -> bool:
        return str(request_id) in self._by_name

    @property
    def num_held(self) -> int:
        return len(self._held)

    def ids(self) -> list[str]:
        """The live requests, in the order of submission."""
        return list(self._by_name)

    def of(self, request_id: RequestId) -> list[Sequence]:
        """The unfinished samples of a request; none if it is not live."""
        return list(self._by_name.get(str(request_id), ()))

    def add(self, sequence: Sequence, *, hold: bool) -> None:
        """Queue *sequence*, or hold it back."""
        self.sequences[key_of(sequence)] = sequence
        self._by_name.setdefault(str(sequence.request.id), []).append(sequence)
        if hold:
            self._held.append(sequence)
        else:
            self._scheduler.add(sequence)

    def release_held(self) -> None:
        """Queue what was held back, in its order."""
        while self._held:
            self._scheduler.add(self._held.popleft())

    def forget(self, sequence: Sequence) -> None:
        """*sequence* is answered or dropped: it gives back all that it holds."""
        if sequence in self._held:
            self._held.remove(sequence)
        else:
            self._scheduler.finish(sequence)
        del self.sequences[key_of(sequence)]
        name = str(sequence.request.id)
        self._by_name[name].remove(sequence)
        if not self._by_name[name]:
            del self._by_name[name]
