"""A model's JSON files: what is not one strict object is a typed refusal with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedctl.errors import ModelError
from pagedctl.models.json_object import parse_object, read_object


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": 1} x', "not strict JSON"),
        (b"[1]", "a list"),
        (b"null", "null"),
        (b'"a"', "a string"),
    ],
)
def test_what_is_not_one_strict_object_is_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_object(data, where="config.json")
    assert says in caught.value.what
    assert caught.value.where.startswith("config.json")


def test_a_file_that_cannot_be_read_is_a_typed_refusal(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_object(tmp_path / "config.json")
