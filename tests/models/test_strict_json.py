"""Files that others wrote: every departure from strict JSON is a typed refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedctl.errors import ModelError
from pagedctl.models.strict_json import parse_object, read_object


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1, "a": 2}', '"a" stands twice'),
        (b'{"b": {"a": 1, "a": 1}}', '"a" stands twice'),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": 1', "line 1"),
        (b'{"a": 1} x', "line 1"),
        (b'{\xef\xbb\xbf"a": 1}', "line 1"),
        (b"[1]", "a list"),
        (b"null", "null"),
        (b"", "line 1"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_what_is_not_strict_json_is_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_object(data, where="config.json")
    assert says in caught.value.what
    assert caught.value.where == "config.json"


def test_a_byte_order_mark_at_the_start_is_skipped() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}', where="x") == {"a": 1}


def test_a_file_that_cannot_be_read_is_a_typed_refusal(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_object(tmp_path / "config.json")
