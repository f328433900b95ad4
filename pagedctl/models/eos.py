"""The end tokens of a model: the union of what its three files say, each id with its sources."""

from __future__ import annotations

from collections.abc import Iterable

from pagedctl.models.reader import ConfigReader

EosSources = tuple[tuple[int, tuple[str, ...]], ...]


def ids_of(reader: ConfigReader, key: str = "eos_token_id") -> tuple[int, ...]:
    """The ids under *key*: absent, one integer, or a list; duplicates count once."""
    value = reader.get(key)
    if not isinstance(value, list | tuple):
        single = reader.integer(key, low=0)
        return () if single is None else (single,)
    entries = reader.child({f"{key}[{place}]": item for place, item in enumerate(value)}, "")
    found = [_entry(entries, name) for name in entries.values]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _entry(entries: ConfigReader, name: str) -> int | None:
    if not entries.has(name):
        rule, remedy = "every entry is an integer", "remove the entry"
        entries.fault(name, f"{name} is null", rule, remedy)
        return None
    return entries.integer(name, low=0)


def unite(found: Iterable[tuple[str, Iterable[int]]]) -> EosSources:
    """Join (file name, ids) pairs: ids in the order first seen, each with all its files."""
    sources: dict[int, tuple[str, ...]] = {}
    for file_name, ids in found:
        for token in ids:
            sources[token] = (*sources.get(token, ()), file_name)
    return tuple(sources.items())
