"""The types of a plug-in's data: each field of a dataclass holds what it declares. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def require_field_types(value: object) -> None:
    """Raises TypeError that names each field of the dataclass *value* of another type."""
    wrong = list(_wrong_fields(value, ""))
    if wrong:
        raise TypeError(f"{type(value).__name__}: {'; '.join(wrong)}")


def _wrong_fields(value: object, at: str) -> Iterator[str]:
    hints = get_type_hints(type(value))
    for one in fields(value):  # type: ignore[arg-type]
        yield from _wrong(getattr(value, one.name), hints[one.name], f"{at}{one.name}")


def _wrong(value: object, hint: Any, at: str) -> Iterator[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if all(any(_wrong(value, one, at)) for one in arguments):
            yield f"{at} is {value!r}"
    elif origin in (tuple, frozenset):
        yield from _wrong_items(value, origin, arguments, at)
    elif type(value) is not hint:  # exact: True is no integer, a subclass is another thing
        yield f"{at} is {value!r}, not {hint.__name__}"
    elif is_dataclass(hint):
        yield from _wrong_fields(value, f"{at}.")


def _wrong_items(value: object, origin: type, arguments: tuple[Any, ...], at: str) -> Iterator[str]:
    if type(value) is not origin:
        yield f"{at} is {value!r}, not a {origin.__name__}"
        return
    items = tuple(value)  # type: ignore[var-annotated,arg-type]
    if origin is frozenset or arguments[-1] is Ellipsis:
        kinds = (arguments[0],) * len(items)
    else:
        kinds = arguments
    if len(kinds) != len(items):
        yield f"{at} is {value!r}, not {len(kinds)} items"
        return
    for position, (item, kind) in enumerate(zip(items, kinds, strict=True)):
        yield from _wrong(item, kind, f"{at}[{position}]")
