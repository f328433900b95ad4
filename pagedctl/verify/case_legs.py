"""The runs of the cases that change who shares a step: packed, repeat, chunks, pools, preemption.

Whatever a leg takes of the requests, and how it mixes them, follows from its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.block_pool import blocks_for
from pagedctl.engine.request import Request
from pagedctl.verify.invariance_requests import RequestMaker
from pagedctl.verify.legs import Leg, Probe
from pagedctl.verify.reference import Reference

ROWS = (7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
"""Resident rows on both sides of the sizes at which engines change kernels."""

MOST_ROWS = ROWS[-1]
ENOUGH_ROWS = 48
"""Differences in real engines began at about 44 resident rows."""

CROWD_ROWS, CROWD_LEAST, CROWD_TOKENS = 256, 129, 12
"""The largest batch: its rows, so many that at least have to be resident, and their outputs."""

REPEATS = 5
FEW = 8
CUT_TOKENS = 32
"""Output tokens where many runs look for the same thing; the default is twice as many."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What legs are made of: the requests, what they give alone, and the engine's options.

    ``config`` has every derived value filled in; a block of the pool takes ``block_bytes``, and
    tokens are drawn from ``vocab_size``.
    """

    config: EngineConfig
    block_bytes: int
    vocab_size: int
    maker: RequestMaker
    requests: tuple[Request, ...]
    reference: Reference

    def chosen(self, name: str, number: int) -> list[Request]:
        """*number* of the requests, at most all, drawn by *name*."""
        return self.maker.random(name).sample(self.requests, min(number, len(self.requests)))

    def short(self, name: str, number: int) -> list[Request]:
        """The *number* shortest prompts of some, for legs that take a step for each token."""
        chosen = self.chosen(name, 4 * number)
        return sorted(chosen, key=lambda one: len(one.prompt_token_ids))[:number]

    def growing(self, name: str, number: int) -> list[Request]:
        """Short prompts whose outputs cross the border of a block, twice where there is room."""
        found = []
        for request in self.short(name, number):
            room = self.maker.max_prompt + self.maker.max_tokens - len(request.prompt_token_ids)
            tokens = max(self.maker.max_tokens, min(2 * self.maker.block_size, room))
            params = replace(request.params, max_tokens=tokens)
            found.append(replace(request, params=params))
        return found

    def rows(self, number: int = MOST_ROWS) -> int:
        """*number* rows, or as many as the configuration allows."""
        return min(number, self.config.max_num_seqs)

    def mates(self, name: str, num_probes: int, rows: int) -> tuple[Request, ...]:
        """A random number of fillers, at least so many that *rows* can be resident."""
        number = self.maker.random(f"mates {name}").randint(3, 3 + rows // 4)
        return tuple(self.maker.fillers(name, max(number, rows + 4 - num_probes)))

    @property
    def arrivals(self) -> int:
        """Steps over which requests arrive, so few that all of them meet."""
        return min(3, self.maker.max_tokens // 8)


def plain(requests: Iterable[Request]) -> tuple[Probe, ...]:
    """Requests that must give what they give alone."""
    return tuple(map(Probe.plain, requests))


def cut(request: Request, most: int = CUT_TOKENS) -> Probe:
    """The request for its first *most* tokens alone."""
    tokens = request.params.max_tokens
    assert tokens is not None
    if tokens <= most:
        return Probe.plain(request)
    params = replace(request.params, max_tokens=most)
    return Probe(request=replace(request, params=params), of=request, end=most)


def packed_leg(subject: Subject, name: str, rows: int, **options: object) -> Leg:
    """Requests and fillers in *rows* rows; only where most of them are, requests are whole."""
    requests = subject.chosen(name, rows + rows // 2)
    whole = rows >= subject.rows(MOST_ROWS - 1)
    probes = plain(requests) if whole else tuple(map(cut, requests))
    return Leg(
        name=name,
        probes=probes,
        fillers=subject.mates(name, len(probes), rows),
        options={"max_num_seqs": rows, **options},
        arrivals=subject.arrivals,
        rows=rows,
    )


def packed_legs(subject: Subject) -> Iterator[Leg]:
    """Every number of rows that the configuration allows, at lag 0 and 1 in turn; then a crowd
    beyond them, and stops."""
    for place, rows in enumerate(ROWS):
        if rows <= subject.config.max_num_seqs:
            yield packed_leg(subject, f"{rows} rows", rows, lag=place % 2)
    if subject.config.max_num_seqs > MOST_ROWS:
        yield _crowd_leg(subject)
    if subject.config.max_num_seqs > 1 and subject.maker.max_tokens > 2:
        yield _stopped_leg(subject)


def repeat_legs(subject: Subject) -> Iterator[Leg]:
    """The same batch again and again, on one engine that finds no prefix."""
    first = packed_leg(subject, "repeat 1", subject.rows(), prefix_cache=False)
    first = replace(first, probes=tuple(cut(probe.of) for probe in first.probes))
    for number in range(1, REPEATS + 1):
        name = f"repeat {number}"
        yield replace(first, name=name, order="repeat", continues=number > 1)


def chunk_legs(subject: Subject) -> Iterator[Leg]:
    """Chunk sizes and budgets, from single tokens to those on either side of a key split."""
    rows, all_of_them = subject.rows(), len(subject.requests)
    sizes: Sequence[tuple[int, Mapping[str, object]]] = (
        (FEW, {"chunk_size": 1}),
        (FEW, {"chunk_size": 8192, "max_num_batched_tokens": 5}),
        (2 * FEW, {"chunk_size": 3, "max_num_batched_tokens": 16}),
        (all_of_them, {"chunk_size": 7, "lag": 1}),
        (4 * FEW, {"chunk_size": 64, "max_num_batched_tokens": 96, "prefix_cache": False}),
        (4 * FEW, {"chunk_size": 255, "max_num_batched_tokens": 300}),
    )
    for number, options in sizes:
        budget = options.get("max_num_batched_tokens", "default")
        name = f"chunk {options['chunk_size']}, budget {budget}"
        single = number == FEW
        requests = subject.short(name, number) if single else subject.chosen(name, number)
        long = [] if single else [subject.maker.long_filler(name)]
        yield Leg(
            name=name,
            probes=tuple(map(cut, requests)),
            fillers=(*subject.maker.fillers(name, 4), *long),
            options={"max_num_seqs": rows, **options},
            arrivals=subject.arrivals,
            needs=("chunk_splits",) if single else (),
        )


def pool_legs(subject: Subject) -> Iterator[Leg]:
    """Pools for half of the tokens at once, a quarter, and hardly more than the longest request.

    The last has fillers that outgrow it, so that requests are preempted.
    """
    size = subject.maker.block_size
    requests = subject.chosen("pools", 3 * FEW)
    needed = sum(blocks_for(_length(one), size) for one in requests)
    for share in (2, 4):
        yield _pool_leg(subject, f"1/{share} of the blocks", needed // share, requests)
    name = "tight pool"
    tokens = 2 * max(subject.maker.max_tokens, 2 * size)
    fillers = tuple(subject.maker.fillers(name, 3 * FEW, max_tokens=tokens))
    growing = subject.growing(name, 3 * FEW)
    outgrown = len(fillers) * blocks_for(tokens // 2, size)
    leg = replace(
        _pool_leg(subject, name, outgrown, growing, fillers),
        arrivals=tokens // 2,
        fillers_first=True,
    )
    yield leg
    yield replace(leg, name=f"{name}, lag 1", options={**leg.options, "lag": 1})


def preemption_legs(subject: Subject) -> Iterator[Leg]:
    """Forced preemptions: anywhere, and during prefill alone."""
    forced: Sequence[tuple[int, Mapping[str, object]]] = (
        (1, {}),
        (3, {"lag": 1}),
        (-1, {"chunk_size": 5}),
        (-3, {"chunk_size": 6, "lag": 1, "prefix_cache": False}),
    )
    for interval, options in forced:
        where = "" if interval > 0 else " of a prefill"
        name = f"every {abs(interval)} steps{where}"
        yield Leg(
            name=name,
            probes=plain(subject.short(name, 2 * FEW)),
            fillers=tuple(subject.maker.fillers(name, 4)),
            options={
                "max_num_seqs": subject.rows(),
                "debug_force_preemption_interval": interval,
                **options,
            },
            arrivals=subject.arrivals,
            needs=("preemptions",) if abs(interval) == 1 else (),
        )


def _crowd_leg(subject: Subject) -> Leg:
    """As many rows as the configuration allows, up to a point; short, so that all are resident."""
    name, rows = "crowd", subject.rows(CROWD_ROWS)
    probes = [cut(one, CROWD_TOKENS) for one in subject.short(name, 2 * FEW)]
    number = rows + FEW - len(probes)
    return Leg(
        name=name,
        probes=tuple(probes),
        fillers=tuple(subject.maker.fillers(name, number, max_tokens=CROWD_TOKENS)),
        options={"max_num_seqs": rows, "lag": 1},
        rows=min(rows, CROWD_LEAST),
    )


def _stopped_leg(subject: Subject) -> Leg:
    """Requests that stop at a token they are known to draw, with a row computed behind it."""
    name, rows = "stops at lag 1", subject.rows(64)
    random = subject.maker.random(name)
    probes = []
    for request in subject.chosen(name, 4 * FEW):
        (answer,) = subject.reference.answers(request)
        ids = answer.token_ids.tolist()
        stop = ids[random.randrange(len(ids) - 1)]
        params = replace(request.params, stop_token_ids=(stop,))
        stopped = replace(request, params=params)
        probes.append(Probe(request=stopped, of=request, end=ids.index(stop) + 1))
    return Leg(
        name=name,
        probes=tuple(probes),
        fillers=subject.mates(name, len(probes), rows),
        options={"max_num_seqs": rows, "lag": 1},
        needs=("overshoots",),
    )


def _pool_leg(
    subject: Subject,
    name: str,
    num_blocks: int,
    requests: Sequence[Request],
    fillers: tuple[Request, ...] = (),
) -> Leg:
    """A pool of *num_blocks*, but enough for the longest request, and no more than was given."""
    longest = max(map(_length, (*requests, *fillers)))
    pool = max(num_blocks, blocks_for(longest, subject.maker.block_size)) * subject.block_bytes
    given = subject.config.kv_cache_memory_bytes
    assert given is not None
    return Leg(
        name=name,
        probes=plain(requests),
        fillers=fillers,
        options={
            "max_num_seqs": subject.rows(),
            "kv_cache_memory_bytes": min(pool, given),
            "max_model_len": longest,
        },
        arrivals=subject.arrivals,
    )


def _length(request: Request) -> int:
    assert request.params.max_tokens is not None
    return len(request.prompt_token_ids) + request.params.max_tokens
