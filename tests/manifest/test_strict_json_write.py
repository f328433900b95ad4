"""Strict JSON, written: no value is lost, none is invented, and every null says why."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl.manifest import strict_json


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Mode(StrEnum):
    FAST = "fast"


@dataclass(frozen=True)
class Point:
    y: float
    x: float


def written(value: object) -> Any:
    """*value* through the writer, read by a parser that refuses NaN and Infinity tokens."""

    def refuse(token: str) -> object:
        raise AssertionError(f"{token} in the output")

    return json.loads(strict_json.dumps(value), parse_constant=refuse)


def test_hostile_numbers_become_null_with_a_reason_or_stay_exact() -> None:
    """vllm-project/vllm#19661, THUDM/slime#1790, dphnAI/sonar#183: NaN, infinities, -0.0,
    1e-45 and 2**63 in results broke strict encoders or readers."""
    found = strict_json.dumps(
        {"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0, "e": 1e-45, "f": 2**63}
    )
    assert found == (
        b'{"a":null,"a_reason":"NaN","b":null,"b_reason":"Infinity",'
        b'"c":null,"c_reason":"-Infinity","d":-0.0,"e":1e-45,"f":9223372036854775808}'
    )


def test_an_infinite_request_rate_has_one_documented_form() -> None:
    """bentoml/llm-optimizer#21: one tool writes Infinity, one "inf", a third null."""
    assert written({"request_rate": math.inf}) == {
        "request_rate": None,
        "request_rate_reason": "Infinity",
    }


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 2)])
def test_no_numpy_float_becomes_null_without_a_reason(kind: type, shape: tuple[int, ...]) -> None:
    array: np.ndarray = np.full(shape, 0.5, dtype=kind)
    array[(-1,) * len(shape)] = np.nan
    place = "".join(f"[{n - 1}]" for n in shape)
    result = written({"x": array if shape else array[()]})
    assert result["x_reason"] == (f"{place}: NaN" if shape else "NaN")
    expected = array.astype(object)
    if shape:
        expected[(-1,) * len(shape)] = None
        assert result["x"] == expected.tolist()
    else:
        assert result["x"] is None


def test_the_reason_of_a_list_names_the_indices() -> None:
    assert written({"x": [1, math.nan, [2.0, [-math.inf]]], "y": 1}) == {
        "x": [1, None, [2.0, [None]]],
        "x_reason": "[1]: NaN; [2][1][0]: -Infinity",
        "y": 1,
    }


def test_the_reason_stands_in_the_nearest_object() -> None:
    assert written({"rows": [{"t": math.inf}, {"t": 1.0}]}) == {
        "rows": [{"t": None, "t_reason": "Infinity"}, {"t": 1.0}]
    }


def test_long_reasons_count_what_they_do_not_list_but_keep_every_integer() -> None:
    result = written({"x": [math.nan] * 1000 + [2**70]})
    assert result["x"] == [None] * 1001
    assert "and 980 more non-finite values" in result["x_reason"]
    assert f"[1000]: integer beyond 64 bits: {2**70}" in result["x_reason"]
    assert len(result["x_reason"]) < 500


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, 10**400, -(10**5000)],
    ids=["2**64", "-2**63-1", "10**400", "-10**5000"],
)
def test_integers_beyond_64_bits_keep_their_exact_value_in_the_reason(value: int) -> None:
    result = written({"n": value})
    assert result["n"] is None
    assert int(result["n_reason"].removeprefix("integer beyond 64 bits: "), 0) == value


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 0, 2**53 + 1])
def test_integers_of_64_bits_are_exact(value: int) -> None:
    assert written({"n": value, "m": [value]}) == {"n": value, "m": [value]}


def test_a_reason_never_overwrites_data() -> None:
    result = written({"x_reason": "mine", "x": math.nan, "x_reason_2": 7})
    assert result == {"x_reason": "mine", "x": None, "x_reason_3": "NaN", "x_reason_2": 7}
    both = written({"x": math.nan, "x_reason": math.inf})
    assert both == {
        "x": None,
        "x_reason_2": "NaN",
        "x_reason": None,
        "x_reason_reason": "Infinity",
    }


@pytest.mark.parametrize(
    "value", [math.nan, [1.0, math.nan], np.array([np.inf], np.float32), [[2**64]]]
)
def test_a_null_that_no_key_could_explain_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="here is no key"):
        strict_json.dumps(value)


FLOAT32_BITS = st.integers(0, 2**32 - 1)


def same_bits(values: np.ndarray, texts: list[str]) -> bool:
    """Whether *texts*, read as float64 (what JSON readers do) and narrowed, give *values*."""
    read = np.array([np.float32(float(text)) for text in texts], dtype=np.float32)
    return bool((read.view(np.uint32) == values.view(np.uint32)).all())


def digits(text: str) -> int:
    return len(text.lower().partition("e")[0].lstrip("-").replace(".", "").strip("0"))


def float32_texts(values: np.ndarray) -> list[str]:
    return strict_json.dumps(values).decode().strip("[]").split(",")


@settings(deadline=None)
@given(st.lists(FLOAT32_BITS, min_size=1, max_size=200))
def test_float32_reads_back_to_the_same_bits_in_the_fewest_digits(bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    if not values.size:
        return
    texts = float32_texts(values)
    assert same_bits(values, texts)
    shortest = [np.format_float_scientific(value, unique=True, trim="-") for value in values]
    assert [digits(text) for text in texts] == [digits(text) for text in shortest]
    one_by_one = strict_json.dumps(list(values)).decode().strip("[]").split(",")
    assert one_by_one == texts


def test_float32_is_exact_over_every_exponent_and_at_its_edges() -> None:
    rng = np.random.default_rng(0)
    exponents = np.repeat(np.arange(255, dtype=np.uint32), 80) << 23
    mantissas = rng.integers(0, 2**23, exponents.size, dtype=np.uint32)
    edges = np.array([1e-45, -0.0, 0.0, 3.4028235e38, -3.4028235e38, 1.1754944e-38], np.float32)
    for values in (edges, (exponents | mantissas).view(np.float32), exponents.view(np.float32)):
        assert same_bits(values, float32_texts(values))
    assert float32_texts(edges)[:2] == ["1e-45", "-0.0"]


def test_widening_a_float32_first_would_not_give_the_fewest_digits() -> None:
    """The control of the two tests above: they can tell the forms apart."""
    value = np.float32(0.1)
    assert digits(repr(float(value))) > digits(float32_texts(np.array([value]))[0])


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.floats(width=32).map(np.float32)
    | st.integers(-(2**31), 2**31 - 1).map(np.int32)
)
KEYS = st.sampled_from(["a", "a_reason", "a_reason_2", "b", "b_reason"]) | st.text(max_size=4)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.tuples(inner, inner)
            | st.dictionaries(KEYS, inner, max_size=4)
        ),
        max_leaves=12,
    ),
    max_size=5,
)


def assert_kept(before: object, after: object) -> int:
    """Every value of *before* is in *after*, or null there; returns the number of nulls made."""
    if isinstance(before, Mapping):
        assert isinstance(after, dict)
        made = 0
        reasons = [str(after[key]) for key in after if key not in before]
        for key, value in before.items():
            nulls = assert_kept(value, after[key])
            made += 0 if isinstance(value, Mapping) else nulls
        listed = sum(reason.count("NaN") + reason.count("Infinity") for reason in reasons)
        listed += sum(reason.count("integer beyond") for reason in reasons)
        assert listed == made
        return 0
    if isinstance(before, list | tuple):
        assert isinstance(after, list)
        assert len(after) == len(before)
        return sum(assert_kept(b, a) for b, a in zip(before, after, strict=True))
    if isinstance(before, np.generic):
        before = before.item() if before.dtype.kind == "i" else float(before)
        after = float(np.float32(after)) if isinstance(after, float) else after
    lost = isinstance(before, float) and not math.isfinite(before)
    lost = lost or (isinstance(before, int) and not -(2**63) <= before < 2**64)
    if lost:
        assert after is None
        return 1
    assert type(after) is type(before)
    assert after == before
    return 0


@settings(deadline=None, max_examples=200)
@given(TREES)
def test_nested_structures_keep_every_value_and_explain_every_null(tree: dict[str, object]) -> None:
    plain = strict_json.dumps(tree)
    assert_kept(tree, strict_json.loads(plain, where="tree"))
    assert strict_json.loads(strict_json.dumps(tree, indent=True), where="tree") == json.loads(
        plain
    )


def test_python_types_have_one_form_each() -> None:
    value = {
        "path": Path("runs/a.json"),
        "tuple": (1, 2),
        "point": Point(1.0, 2.0),
        "enum": [Colour.RED, Level.HIGH, Mode.FAST],
        Mode.FAST: True,
        "at": datetime(2026, 12, 1, 9, 30, tzinfo=UTC),
        "numpy": [np.int64(-5), np.uint64(2**64 - 1), np.bool_(True), np.float64(0.1)],
    }
    assert strict_json.dumps(value).decode() == (
        '{"path":"runs/a.json","tuple":[1,2],"point":{"y":1.0,"x":2.0},'
        '"enum":["red",3,"fast"],"fast":true,"at":"2026-12-01T09:30:00Z",'
        '"numpy":[-5,18446744073709551615,true,0.1]}'
    )


def test_numpy_layouts_do_not_matter() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    for same in (array, np.asfortranarray(array), array.astype(">f4"), array[::-1][::-1]):
        assert written({"x": same}) == {"x": expected}
    assert written({"x": np.array(3.5), "y": np.zeros((0, 3))}) == {"x": 3.5, "y": []}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": [1, {"b": {1, 2}}]}, r"a\[1\]\.b: set"),
        ({"a": b"x"}, "a: bytes"),
        ({"a": 1j}, "a: complex"),
        ({"a": np.array(["x"])}, "a: numpy str"),
        ({"a": np.array([object()])}, "a: numpy object"),
        ({"a": np.longdouble(1)}, "a: numpy longdouble|a: numpy float128"),
        ({"a": np.complex64(1)}, "a: numpy complex64"),
        ({"a": datetime(2026, 1, 1)}, "not UTC"),
        ({"a": datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1)))}, "not UTC"),
        ({1: 2}, "key 1 of type int"),
        ({"a": Point}, "a: type"),
    ],
)
def test_types_without_a_json_form_are_refused_by_path(value: object, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        strict_json.dumps(value)


def test_a_structure_that_holds_itself_is_refused() -> None:
    loop: dict[str, object] = {}
    loop["self"] = [loop]
    with pytest.raises(ValueError, match="holds itself"):
        strict_json.dumps(loop)


def test_the_deepest_structure_that_is_accepted_can_be_written_and_read() -> None:
    deep: object = {"x": 1}
    for _ in range(strict_json.MAX_DEPTH - 1):
        deep = [deep]
    assert strict_json.loads(strict_json.dumps(deep), where="deep") == deep


def test_a_file_name_that_is_not_utf8_does_not_cost_the_manifest() -> None:
    name = b"caf\xe9.jsonl".decode("utf-8", "surrogateescape")
    assert written({"argv": [name], "path": Path(name)}) == {
        "argv": ["caf\\udce9.jsonl"],
        "path": "caf\\udce9.jsonl",
    }


def test_keys_that_would_have_the_same_text_are_refused() -> None:
    with pytest.raises(ValueError, match="same JSON text"):
        strict_json.dumps({"\udce9": 1, "\\udce9": 2})


def test_writing_plain_values_does_not_import_numpy() -> None:
    script = (
        "import sys; from pagedctl.manifest import strict_json;"
        "strict_json.dumps({'a': [1.5, None, (2,)]}); sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
