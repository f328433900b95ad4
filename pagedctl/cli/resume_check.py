"""Whether the run asked for is the one that was interrupted: the rule of ``--resume``.

A resumed output is the one that an uninterrupted run would have written. So whatever decides a
line has to be what it was: every option of the command, the digests of the input and of the
model's files, the switches of the contract, the ``arithmetic_id`` and the version of pagedctl.
Options may differ where that changes no line:

* those of :data:`NAMES_AND_TALK`: names of files, whose digests decide, and what is said or
  checked along the way;
* under a bitwise contract those of :data:`BATCHING`, for which it promises equal bits;
* a switch that was left to the contract may be given with the value that the contract chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pagedctl.config.loader import DEFAULT, spell
from pagedctl.errors import ConfigError, Fault
from pagedctl.manifest import strict_json
from pagedctl.manifest.schema import Manifest
from pagedctl.numerics.switches import SWITCHES

NAMES_AND_TALK = frozenset(
    {
        *("input", "output", "model", "resume"),
        *("unverified", "explain_numerics", "verify", "collective_timeout"),
    }
)
"""Options that never decide a line. Input and model count by their digests."""

BATCHING = frozenset(
    {
        *("max_num_seqs", "max_num_batched_tokens", "chunk_size", "block_size", "prefix_cache"),
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "preemption", "swap_memory_bytes"),
        *("enforce_eager", "lag", "debug_force_preemption_interval"),
    }
)
"""Options that change no bit under a bitwise contract. ``max_model_len`` is none of them: it
decides where a completion ends, also where it was derived from the size of the pool."""

_SWITCHES = frozenset(one.name for one in SWITCHES)
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What decides the lines of a run: its options with their origins, and the rest by name."""

    config: Mapping[str, object]
    origins: Mapping[str, str]
    others: Mapping[str, object]


def facts_of_manifest(manifest: Manifest) -> RunFacts:
    """All facts of a run whose engine was built, or which needed none."""
    numerics, workload, model = manifest.numerics, manifest.workload, manifest.model
    settings = {} if numerics is None else numerics.switches
    others = other_facts(
        version=manifest.tool.version,
        input_sha256=None if workload is None else workload.sha256,
        model_digest=None if model is None else model.digest,
        switches={name: one.value for name, one in settings.items()},
    )
    others["arithmetic_id"] = None if numerics is None else numerics.arithmetic_id
    return RunFacts(config=manifest.config, origins=manifest.config_origin, others=others)


def other_facts(
    *,
    version: str,
    input_sha256: str | None,
    model_digest: str | None,
    switches: Mapping[str, object],
) -> dict[str, object]:
    """The facts beside the options that are known before any weights are loaded."""
    return {
        "pagedctl version": version,
        "input digest": input_sha256,
        "model digest": model_digest,
        **{f"switch {name}": value for name, value in switches.items()},
    }


def require_same_run(before: RunFacts, now: RunFacts, *, bitwise: bool, where: str) -> None:
    """Refuse what is another run than *before*, all differences at once.

    Only those of the other facts that *now* has are compared. *where* names the file that
    holds *before*.
    """
    faults = [
        Fault(
            what=f"{name} is {_spelled(new)}, and was {_spelled(old)}",
            where=place,
            rule=f"a run is resumed as it was begun: {where} tells how",
            remedy="give what it was, or write a new output",
        )
        for name, old, new, place in (*_options(before, now, bitwise), *_others(before, now))
    ]
    if faults:
        raise ConfigError.of(faults)


_Difference = tuple[str, object, object, str]
"""(name, value before, value now, place now)."""


def _options(before: RunFacts, now: RunFacts, bitwise: bool) -> Iterator[_Difference]:
    """A value that was derived and is not given now is compared once it is derived again."""
    free = NAMES_AND_TALK | _SWITCHES | (BATCHING if bitwise else frozenset())
    had, has = _as_read_back(before.config), _as_read_back(now.config)
    for name in dict.fromkeys((*has, *had)):
        old, new = had.get(name, _ABSENT), has.get(name, _ABSENT)
        origin = now.origins.get(name, DEFAULT)
        open_yet = origin == DEFAULT and before.origins.get(name, "").startswith("derived: ")
        if old != new and name not in free and not open_yet:
            yield name, old, new, f"option {name}, set by {origin}"


def _others(before: RunFacts, now: RunFacts) -> Iterator[_Difference]:
    for name, new in now.others.items():
        old = before.others.get(name, _ABSENT)
        if old != new:
            yield name, old, new, name


def _as_read_back(config: Mapping[str, object]) -> Mapping[str, object]:
    """*config* as a manifest holds it: tuples are lists."""
    read = strict_json.loads(strict_json.dumps({**config}), where="config")
    assert isinstance(read, dict)
    return read


def _spelled(value: object) -> str:
    if value is _ABSENT:
        return "not recorded"
    return "not given" if value is None else spell(value)
