"""The runs of the case prefix: cold and warm give the same bits, at every place in a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from pagedctl.engine.request import Request
from pagedctl.verify.case_legs import Subject, plain
from pagedctl.verify.legs import Leg, Probe

OTHERS = 30
STEM_BLOCKS = 3
MOST_TOKENS = 16
"""Output tokens of a probe: the hit is in the prompt."""


def prefix_legs(subject: Subject) -> Iterator[Leg]:
    """Ask behind a cached stem, again, after thirty others, as the next turn; then cold.

    Each probe shares b - 1, b, b + 1, 2b - 1 or 2b tokens with the stem, b being the block size,
    alone or with a tail behind them. No probe shares more with another than with the stem.
    """
    stem, probes = _requests(subject)
    subject.reference.prepare(probes)
    warm = {"prefix_cache": True, "max_num_seqs": subject.rows()}
    yield Leg(name="stem", probes=(), fillers=(stem,), options=warm)
    yield _warm_leg("ask", [_expecting(subject, one, _shared(one, stem)) for one in probes], warm)
    again = [_expecting(subject, one, len(one.prompt_token_ids)) for one in probes]
    yield _warm_leg("ask again", again, warm)
    others = tuple(subject.maker.fillers("prefix", OTHERS))
    yield Leg(name=f"{OTHERS} others", probes=(), fillers=others, options=warm, continues=True)
    yield _warm_leg(f"ask after {OTHERS} others", plain(probes), warm)
    yield _warm_leg("next turn", [_next_turn(subject, one) for one in probes], warm)
    yield Leg(name="cold in a new engine", probes=plain(probes), options=warm)


def _warm_leg(name: str, probes: Sequence[Probe], options: Mapping[str, object]) -> Leg:
    """*probes* on the engine of the leg before, some of whose blocks they find."""
    needs = ("prefix_hit_tokens",)
    return Leg(name=name, probes=tuple(probes), options=options, continues=True, needs=needs)


def _expecting(subject: Subject, request: Request, shared: int) -> Probe:
    """A probe that finds the whole blocks among its first *shared* tokens; its last is computed."""
    size = subject.maker.block_size
    found = min(shared, len(request.prompt_token_ids) - 1) // size * size
    return Probe.plain(request, cached_tokens=found)


def room(subject: Subject) -> str | None:
    """Why the case has no room in this configuration, or None."""
    needed = STEM_BLOCKS * subject.maker.block_size + 2 * MOST_TOKENS
    have = subject.maker.max_prompt
    return f"prompts of {needed} tokens do not fit into {have}" if needed > have else None


def _requests(subject: Subject) -> tuple[Request, list[Request]]:
    """The stem of three blocks, and the probes."""
    maker = subject.maker
    random, size = maker.random("prefix"), maker.block_size
    ids = maker.prompt(random, STEM_BLOCKS * size)
    stem = Request(id="prefix stem", prompt_token_ids=ids, params=maker.params(0))
    probes = []
    lengths = dict.fromkeys((size - 1, size, size + 1, 2 * size - 1, 2 * size))
    for place, shared in enumerate(lengths):
        tail = _tail(maker.prompt(random, 4), ids[shared])
        name = f"prefix {shared}"
        probes += [_probe(subject, f"{name} whole", ids[:shared], place)] if shared else []
        probes += [_probe(subject, f"{name} and a tail", ids[:shared] + tail, place + 1)]
    own = maker.prompt(random, 2 * size + size // 2)
    return stem, [*probes, _probe(subject, "prefix of its own", _tail(own, ids[0]), 1)]


def _probe(subject: Subject, name: str, ids: tuple[int, ...], place: int) -> Request:
    params = subject.maker.params(place, max_tokens=min(MOST_TOKENS, subject.maker.max_tokens))
    return Request(id=name, prompt_token_ids=ids, params=params)


def _tail(ids: tuple[int, ...], unlike: int) -> tuple[int, ...]:
    """*ids*, the first of which is made another than *unlike*."""
    first = ids[0] if ids[0] != unlike else (ids[0] + 1 if ids[0] == 0 else ids[0] - 1)
    return (first, *ids[1:])


def _shared(request: Request, stem: Request) -> int:
    """Tokens at the start that both have."""
    pairs = zip(request.prompt_token_ids, stem.prompt_token_ids, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _next_turn(subject: Subject, request: Request) -> Probe:
    """The conversation so far and four tokens more: its answer's blocks are found too."""
    (answer,) = subject.reference.answers(request)
    more = subject.maker.prompt(subject.maker.random(f"turn {request.id}"), 4)
    ids = request.prompt_token_ids + tuple(answer.token_ids.tolist()) + more
    turn = replace(request, id=f"{request.id}, next turn", prompt_token_ids=ids)
    return Probe.plain(turn)
