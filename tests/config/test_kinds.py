"""Every kind of option value: what it takes, as text and typed, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedctl.config.kinds import (
    Assumptions,
    Boolean,
    Broken,
    Choice,
    Duration,
    Integer,
    IntegerChoice,
    Kind,
    ListOf,
    Number,
    Pattern,
    Size,
    Text,
)

CHOICE = Choice(values=("fast", "invariant"), later=("rl-bitwise",), instead={"auto": "fast"})


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Integer(minimum=1), "64", 64),
        (Integer(), "-3", -3),
        (Number(above=0, maximum=1), "1", 1.0),
        (Number(minimum=1e-12, or_zero=True), "0", 0.0),
        (Boolean(), "true", True),
        (CHOICE, "fast", "fast"),
        (IntegerChoice(values=(16, 32)), "32", 32),
        (Size(), "4096", 4096),
        (Size(), "1.5GiB", 3 << 29),
        (Size(), "64MiB", 64 << 20),
        (Size(), "8KiB", 8192),
        (Duration(), "20us", 20e-6),
        (Duration(), "1.5h", 5400.0),
        (ListOf(item=Integer()), "1, 2,4", (1, 2, 4)),
        (ListOf(item=Size()), "1KiB,2", (1024, 2)),
        (Pattern(regex="a+", form="a's"), "aa", "aa"),
        (Text(), "x", "x"),
        (Assumptions(), "activation=0.5GiB", (("activation", "0.5GiB"),)),
    ],
)
def test_text_is_parsed(kind: Kind, text: str, value: object) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        (Integer(minimum=1), 0, "is out of range"),
        (Integer(maximum=5), 6, "is out of range"),
        (Integer(), 5.0, "is not an integer"),
        (Integer(), True, "is not an integer"),
        (Integer(), "5", "is not an integer"),
        (Number(above=0, maximum=1), 0.0, "is out of range"),
        (Number(above=0, maximum=1), 1.5, "is out of range"),
        (Number(), float("nan"), "is out of range"),
        (Number(), float("inf"), "is out of range"),
        (Number(), True, "is not a number"),
        (Number(), "0.9", "is not a number"),
        (Number(minimum=1e-12, or_zero=True), 1e-13, "is out of range"),
        (Boolean(), 1, "is not true or false"),
        (Boolean(), "true", "is not true or false"),
        (CHOICE, "rl-bitwise", "is not available in this version"),
        (CHOICE, "auto", "is another tool's name"),
        (CHOICE, "fastt", "is unknown"),
        (CHOICE, 3, "is not a word"),
        (IntegerChoice(values=(16,)), 17, "is not among the allowed values"),
        (IntegerChoice(values=(0, 1)), True, "is not among the allowed values"),
        (Size(), 0, "is out of range"),
        (Size(), 1 << 63, "is out of range"),
        (Size(), "1000000000000GiB", "is out of range"),
        (Size(), 1.5, "is not a size"),
        (Size(), "1GB", "is not a size"),
        (Size(), "-1", "is not a size"),
        (Size(), True, "is not a size"),
        (Duration(), 3, "is not a duration"),
        (Duration(), "0s", "is not a duration"),
        (ListOf(item=Integer()), [], "is empty"),
        (ListOf(item=Integer()), [1, "2"], "is not an integer"),
        (Pattern(regex="a+", form="a's"), "b", "has an unknown form"),
        (Text(), "", "is empty"),
        (Text(), 3, "is not text"),
        (Assumptions(), "x", "is not a table"),
    ],
)
def test_a_typed_value_that_breaks_the_rule_is_refused(
    kind: Kind, value: object, problem: str
) -> None:
    with pytest.raises(Broken) as caught:
        kind.check(value)
    assert caught.value.problem == problem
    assert caught.value.rule


@pytest.mark.parametrize(
    "kind",
    [
        Integer(),
        Number(),
        Boolean(),
        CHOICE,
        IntegerChoice(values=(1,)),
        Size(),
        Duration(),
        ListOf(item=Integer()),
        Pattern(regex="a+", form="a's"),
        Assumptions(),
    ],
    ids=lambda kind: type(kind).__name__,
)
@given(text=st.text())
def test_no_text_escapes_as_another_error(kind: Kind, text: str) -> None:
    try:
        value = kind.parse(text)
    except Broken:
        return
    if not isinstance(kind, Assumptions | Duration):
        assert kind.check(value) == value


@pytest.mark.parametrize("text", ["1_0", " 2", "2 ", "\u0663", "0x10", "1e3", "", "+", "1" * 401])
def test_an_integer_is_plain_digits(text: str) -> None:
    with pytest.raises(Broken):
        Integer().parse(text)


@pytest.mark.parametrize("text", ["1_0", " 2", "\u0663", "0x10", "", ".", "infinity", "1e"])
def test_a_number_is_plain_decimal(text: str) -> None:
    with pytest.raises(Broken):
        Number().parse(text)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), (".5", 0.5), ("2.", 2.0), ("-1.5E2", -150.0)]
)
def test_a_number_may_have_an_exponent(text: str, value: float) -> None:
    assert Number().parse(text) == value


def test_closed_sets_show_their_values() -> None:
    assert CHOICE.metavar == "fast|invariant"
    assert IntegerChoice(values=(0, 1)).metavar == "0|1"


def test_another_tools_word_is_answered_with_ours() -> None:
    with pytest.raises(Broken) as caught:
        CHOICE.check("auto")
    assert caught.value.remedy == "use fast"


def test_a_misspelt_word_is_answered_with_the_nearest() -> None:
    with pytest.raises(Broken) as caught:
        CHOICE.check("invarant")
    assert caught.value.remedy == "did you mean invariant?"


@given(st.integers(min_value=1, max_value=2**60))
def test_a_bare_number_is_bytes(size_bytes: int) -> None:
    assert Size().parse(str(size_bytes)) == size_bytes
