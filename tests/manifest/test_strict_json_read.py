"""Strict JSON, read: what is ambiguous or not JSON is refused with its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl.errors import ConfigError
from pagedctl.manifest import strict_json

BOM = b"\xef\xbb\xbf"


def refusal(data: bytes, first_line: int = 1) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        strict_json.loads(data, where="f.json", first_line=first_line)
    return caught.value


@pytest.mark.parametrize(
    ("data", "what", "place"),
    [
        (b'{"a": 1, "a": 1}', "'a' appears twice", "line 1, column 10"),
        (b'{"a": 1,\n "b": [{"c": 1},\n  {"c": 2, "c": 3}]}', "'c' appears", "line 3, column 12"),
        (b'{"a": {"x:{": "}\\"{"},\n "\\u0061": 2}', "'a' appears twice", "line 2, column 2"),
        (b'{"a": {"a": 1}, "b": [{"a": 1}], "b": 2}', "'b' appears", "line 1, column 34"),
        (b'{"a": NaN}', "NaN is not a JSON value", "line 1, column 7"),
        (b'{"a":\n -Infinity}', "-Infinity is not a JSON value", "line 2, column 2"),
        (b"[1, Infinity]", "Infinity is not a JSON value", "line 1, column 5"),
        (b"nan", "nan is not a JSON value", "line 1, column 1"),
        (b"[1] [2]", "after document", "line 1, column 5"),
        (b"{}\n{}", "after document", "line 2, column 1"),
        (b"", "zero-length", "line 1, column 1"),
        ('{"é": 1,\n "éé" 2}'.encode(), "not strict JSON", "line 2, column 7"),
        (b'["ab\xff"]', "byte 0xff is not UTF-8", "line 1, column 5"),
        (b'["\xc3\xa9",\n "\xe9"]', "byte 0xe9 is not UTF-8", "line 2, column 3"),
        (b'["\xc3\xa9\xff"]', "byte 0xff is not UTF-8", "line 1, column 4"),
        (b"[1e400]", "infinity", "line 1, column 2"),
        (b'["\\ud800"]', "surrogate", "line 1"),
        (b"[01]", "leading zero", "line 1"),
        (b"[1,]", "trailing comma", "line 1"),
        (b"[1, // no\n 2]", "not strict JSON", "line 1, column 5"),
        (b"['a']", "not strict JSON", "line 1, column 2"),
        (b'["a\nb"]', "control character", "line 1"),
    ],
)
def test_what_is_not_strict_json_is_refused_with_its_place(
    data: bytes, what: str, place: str
) -> None:
    error = refusal(data)
    assert what in error.what
    assert f"f.json, {place}" in error.where
    assert error.rule
    assert error.remedy


def test_a_bom_is_accepted_at_the_start_of_a_file_and_changes_nothing() -> None:
    """microsoft/promptflow#4188, huggingface/datasets#8241."""
    line = b'{"prompt_token_ids": [1, 2]}'
    assert strict_json.loads(BOM + line, where="f") == strict_json.loads(line, where="f")
    assert refusal(BOM + b"[1 2]").where == refusal(b"[1 2]").where


@pytest.mark.parametrize("first_line", [2, 17])
def test_a_bom_on_a_later_line_is_refused_with_its_line_number(first_line: int) -> None:
    """microsoft/promptflow#3670: a BOM on line 2 must be an error that names the line."""
    error = refusal(BOM + b'{"prompt_token_ids": [1, 2]}', first_line=first_line)
    assert "byte order mark" in error.what
    assert error.where == f"f.json, line {first_line}, column 1"


@pytest.mark.parametrize("data", [BOM + BOM + b"1", b"[1," + BOM + b"2]", b"{}\n" + BOM])
def test_a_bom_inside_a_file_is_refused(data: bytes) -> None:
    assert "byte order mark" in refusal(data).what or "after document" in refusal(data).what


def test_a_bom_character_inside_a_string_is_data() -> None:
    assert strict_json.loads(b'["a' + BOM + b'"]', where="f") == ["a\ufeff"]


def test_lines_are_counted_from_the_first_line_of_the_piece() -> None:
    assert refusal(b'{"a": NaN}', first_line=40).where == "f.json, line 40, column 7"
    assert refusal(b'{"a": 1, "a": 2}', first_line=40).where == "f.json, line 40, column 10"


def test_equal_keys_of_different_objects_are_no_duplicates() -> None:
    data = b'{"a": {"a": [{"a": 1}, {"a": "\\"a\\": 1"}]}}'
    assert strict_json.loads(data, where="f") == json.loads(data)


def test_integers_of_any_size_are_read_exactly() -> None:
    """orjson alone would give a float for these."""
    assert strict_json.loads(b"[18446744073709551616, -9223372036854775809]", where="f") == [
        2**64,
        -(2**63) - 1,
    ]


@pytest.mark.parametrize("levels", [900, 1000, 1024, 1025, 100_000])
def test_deep_nesting_is_read_or_refused_but_never_crashes(levels: int) -> None:
    data = b"[" * levels + b"]" * levels
    error: ConfigError | None = None
    try:
        strict_json.loads(data, where="f")
    except ConfigError as refused:
        error = refused
    assert error is None or "deep" in error.what or "depth" in error.what
    assert error is not None or levels <= 1024


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@settings(deadline=None)
@given(JSON_VALUES.filter(lambda value: not _has_huge_integer(value)), st.booleans())
def test_whatever_another_encoder_writes_strictly_is_read_the_same(
    value: object, ascii_only: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert strict_json.loads(text.encode(), where="f") == value


def _has_huge_integer(value: object) -> bool:
    """Beyond float64's range, where the reader refuses."""
    if isinstance(value, dict):
        return any(map(_has_huge_integer, value.values()))
    if isinstance(value, list):
        return any(map(_has_huge_integer, value))
    return isinstance(value, int) and abs(value) >= 10**308


@settings(deadline=None, max_examples=300)
@given(
    st.binary(max_size=40)
    | st.text(alphabet='{}[]:,"\\aN-0.e1 \n\ufeff', max_size=24).map(str.encode)
)
def test_arbitrary_bytes_are_read_as_json_reads_them_or_refused(data: bytes) -> None:
    try:
        value = strict_json.loads(data, where="f")
    except ConfigError:
        return
    assert json.loads(data.removeprefix(BOM)) == value


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("ab\u00e9"), st.integers(0, 9)), max_size=5))
def test_an_object_is_refused_exactly_when_it_repeats_a_key(pairs: list[tuple[str, int]]) -> None:
    text = "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"
    if len({key for key, _ in pairs}) == len(pairs):
        assert strict_json.loads(text.encode(), where="f") == dict(pairs)
    else:
        assert "appears twice" in refusal(text.encode()).what
