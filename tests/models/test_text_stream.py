"""The text behind a prompt: token by token as at once, beside the tokenizers library."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import groupby, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedctl.models import text_stream
from pagedctl.models.text_stream import TextStream
from tests.models.tokenizer_zoo import BUILDERS, BYTE_LEVEL, BYTE_TOKENS, EMBEDDED, Specimen

ZOO = (EMBEDDED, *BUILDERS)
FFFD = "\ufffd"
PARTS = [one.encode() for one in ("🙂", "漢", "é", FFFD, "A", "👩\u200d👧", "\x00")]
BAD_PARTS = [b"\xf0\x9f", b"\xe6\xbc", b"\xc3", b"\x9f", b"\xed\xa0\x80", b"\xf4\x90", b"\xff\xc0"]
many = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Specimen]:
    made: dict[str, Specimen] = {}

    def of(name: str) -> Specimen:
        if name not in made:
            made[name] = Specimen(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


def random_ids(rng: random.Random, one: Specimen, most: int) -> list[int]:
    """Ids of the padded vocabulary, whole characters in tokens of a byte, and broken ones."""
    ids: list[int] = []
    for _ in range(rng.randrange(most)):
        if one.name in (*BYTE_LEVEL, *BYTE_TOKENS) and rng.random() < 0.4:
            ids += one.bytes_ids(rng.choice(PARTS if rng.random() < 0.7 else BAD_PARTS))
        else:
            ids.append(rng.randrange(one.size + 20))
    return ids


def pushed(one: Specimen, prompt: list[int], ids: list[int]) -> list[str]:
    """What each push gives, and the finish."""
    stream = one.tokenizer.text_stream(prompt)
    return [*map(stream.push, ids), stream.finish()]


def strings(one: Specimen, ids: list[int]) -> list[str]:
    """The tokens of *ids* that are neither special nor missing."""
    found = [one.library.id_to_token(token) for token in ids]
    return [token for token in found if token not in (None, "<s>", "</s>", "<end>")]


def is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x")


def by_hand(one: Specimen, ids: list[int]) -> str:
    """The text of a tokenizer with byte tokens, each bad part of which is one U+FFFD."""
    parts = []
    for place, token in enumerate(strings(one, ids)):
        space = "" if place == 0 and one.name.startswith("metaspace") else " "
        byte = is_byte(token)
        parts.append(bytes.fromhex(token[3:5]) if byte else token.replace("▁", space).encode())
    text = b"".join(parts).decode("utf-8", "replace")
    return text.removeprefix(" ") if one.name == "sentencepiece" else text


def beyond(alone: str, both: str) -> str:
    return both[len(alone) :] if both.startswith(alone) else both[len(alone) - 1 :]


def byte_rows_are_text(one: Specimen, ids: list[int]) -> bool:
    rows = [b"".join(bytes.fromhex(token[3:5]) for token in row) for row in byte_rows(one, ids)]
    return all(row.decode("utf-8", "replace").encode() == row for row in rows)


def byte_rows(one: Specimen, ids: list[int]) -> Iterator[list[str]]:
    for found, row in groupby(strings(one, ids), is_byte):
        if found:
            yield list(row)


@pytest.mark.parametrize("name", ZOO)
@many
@given(seed=st.integers(0, 2**32))
def test_pushes_join_to_the_text_that_the_output_adds(
    zoo: Callable[[str], Specimen], name: str, seed: int
) -> None:
    """For valid and broken UTF-8, special tokens in between and ids that have no text."""
    one, rng = zoo(name), random.Random(seed)
    prompt, ids = random_ids(rng, one, 6), random_ids(rng, one, 14)
    added = "".join(pushed(one, prompt, ids))
    assert added == one.tokenizer.completion_text(prompt, ids)
    if name not in BYTE_TOKENS:
        assert added == one.joint_text(prompt, ids)
        return
    assert added == beyond(by_hand(one, prompt), by_hand(one, prompt + ids))
    if byte_rows_are_text(one, prompt) and byte_rows_are_text(one, prompt + ids):
        assert added == one.joint_text(prompt, ids)


@pytest.mark.parametrize("name", ZOO)
def test_text_that_was_given_is_never_taken_back(zoo: Callable[[str], Specimen], name: str) -> None:
    """Each prefix of the output has its own text, but for the character it cuts."""
    one, rng = zoo(name), random.Random(5)
    for _ in range(60):
        prompt, ids = random_ids(rng, one, 4), random_ids(rng, one, 14)
        given = pushed(one, prompt, ids)
        for end in range(len(ids) + 1):
            prefix = one.tokenizer.completion_text(prompt, ids[:end])
            assert prefix.removeprefix("".join(given[:end])) in ("", FFFD)


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *BYTE_TOKENS])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("🙂".encode(), ["", "", "", "🙂", ""]),
        ("é漢".encode(), ["", "é", "", "", "漢", ""]),
        (FFFD.encode(), ["", "", FFFD, ""]),
        (b"\xf0\x9f\x99", ["", "", "", FFFD]),
        (b"\xf0\x9fA", ["", "", FFFD + "A", ""]),
        (b"\xc3\xc3\xa9", ["", FFFD, "é", ""]),
        (b"\xed\x9f\xbf", ["", "", "\ud7ff", ""]),
        (b"\xed\xa0\x80", ["", FFFD * 2, FFFD, ""]),
        (b"\xf4\x90\xe6", ["", FFFD * 2, "", FFFD]),
        (b"\xff\x80A", [FFFD, FFFD, "A", ""]),
    ],
)
def test_a_character_comes_when_it_is_complete_or_can_no_longer_be(
    zoo: Callable[[str], Specimen], name: str, data: bytes, expected: list[str]
) -> None:
    one = zoo(name)
    assert pushed(one, one.bytes_ids(b"x"), one.bytes_ids(data)) == expected


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *BYTE_TOKENS])
@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (b"\xe6\xbc", b"\xa2!", "漢!"),
        (b"\xe6\xbc", b"!", "!"),
        (b"\xe6\xbc", b"\xe6\xbc", FFFD),
        (b"\xf0\x9f", b"\x99", ""),
        (b"\xf0", b"\x9f\x99\x82", "🙂"),
        (b"\x99\x82", b"\x82", FFFD),
        (b"\xed\xa0", b"!", "!"),
        (b"\xf0\x9f", b"", ""),
        (b"x", b"\xe6", FFFD),
    ],
)
def test_a_character_that_the_prompt_cuts_is_the_outputs_if_that_completes_it(
    zoo: Callable[[str], Specimen], name: str, prompt: bytes, output: bytes, expected: str
) -> None:
    one = zoo(name)
    ids = one.bytes_ids(b"x" + prompt), one.bytes_ids(output)
    assert one.tokenizer.completion_text(*ids) == expected
    assert "".join(pushed(one, *ids)) == expected


@pytest.mark.parametrize(
    ("name", "token", "behind", "alone"),
    [
        ("sentencepiece", "▁Tom", " Tom", "Tom"),
        ("sentencepiece", "▁▁", "  ", " "),
        ("sentencepiece_with_every_space", "▁Tom", " Tom", " Tom"),
        ("metaspace", "▁Tom", " Tom", "Tom"),
        ("metaspace", "▁▁", "  ", ""),
        ("wordpiece", "Tom", " Tom", "Tom"),
        ("wordpiece", "##don", "don", "##don"),
        ("words", "Tom", " Tom", "Tom"),
        ("word_ends", "Tom</w>", "Tom", "Tom"),
    ],
)
def test_only_the_first_token_of_a_text_loses_its_space(
    zoo: Callable[[str], Specimen], name: str, token: str, behind: str, alone: str
) -> None:
    """A prompt of special tokens has no text, so the output's first token is the text's."""
    one = zoo(name)
    ids = [one.id_of(token)]
    assert one.tokenizer.completion_text([0, one.id_of("a")], ids) == behind
    assert one.tokenizer.completion_text([one.id_of("a"), 1, one.size + 3], ids) == behind
    for prompt in ([], [0], [0, 1, one.size + 3]):
        assert one.tokenizer.completion_text(prompt, ids) == alone
        assert pushed(one, prompt, [1, *ids, *ids])[1:3] == [alone, one.joint_text(ids, ids)]


@pytest.mark.parametrize("name", BUILDERS)
def test_tokens_of_spaces_or_of_no_text_add_what_the_library_says(
    zoo: Callable[[str], Specimen], name: str
) -> None:
    """Every sequence of up to four of them, cut into prompt and output everywhere."""
    one = zoo(name)
    found = map(one.library.token_to_id, ("", "▁", "▁▁", "▁a▁", " ", "</w>", "a", "</s>"))
    few = [token for token in found if token is not None]
    assert len(few) > 1
    for ids in map(list, product(few, repeat=4)):
        for cut in range(4):
            added = one.tokenizer.completion_text(ids[:cut], ids[cut:])
            assert added == one.joint_text(ids[:cut], ids[cut:])


def test_a_words_end_is_a_space_once_a_token_follows(zoo: Callable[[str], Specimen]) -> None:
    one = zoo("word_ends")
    ids = [one.id_of(token) for token in ("Tom</w>", "has</w>", "a", ".</w>")]
    assert pushed(one, ids[:1], ids[1:]) == [" has", " a", ".", ""]


def test_special_and_unknown_ids_have_no_text(zoo: Callable[[str], Specimen]) -> None:
    """An id of the model's padded vocabulary comes between the bytes of a character."""
    one = zoo(EMBEDDED)
    emoji = one.bytes_ids("🙂".encode())
    mixed = [0, emoji[0], one.size + 7, emoji[1], 2, *emoji[2:], 2**31]
    assert pushed(one, [], mixed) == ["", "", "", "", "", "", "🙂", "", ""]


@pytest.mark.parametrize("text", ["Tom has 3 apples.", "  a\n\n🙂 naïve → 漢字", FFFD])
def test_a_text_comes_back_behind_any_prompt(zoo: Callable[[str], Specimen], text: str) -> None:
    for name in BYTE_LEVEL:
        one = zoo(name)
        for prompt in ([], one.tokenizer.encode("Q: 漢"), [2]):
            assert one.tokenizer.completion_text(prompt, one.tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ZOO)
def test_of_a_long_prompt_only_the_last_tokens_are_read(
    zoo: Callable[[str], Specimen], name: str
) -> None:
    """They give the text that the whole prompt gives, however little text they have."""
    one, rng = zoo(name), random.Random(3)
    for _ in range(40):
        prompt = [rng.randrange(one.size) for _ in range(2000)]
        ids = random_ids(rng, one, 8)
        tail = prompt[-num_read(one, prompt) :]
        assert len(tail) < 100
        assert one.tokenizer.completion_text(prompt, ids) == "".join(pushed(one, tail, ids))
        if name not in BYTE_TOKENS:
            assert one.tokenizer.completion_text(prompt, ids) == one.joint_text(prompt, ids)
        else:
            expected = beyond(by_hand(one, prompt), by_hand(one, prompt + ids))
            assert one.tokenizer.completion_text(prompt, ids) == expected


def num_read(one: Specimen, prompt: list[int]) -> int:
    """How many tokens of *prompt* a stream looks at."""
    read: list[int] = []

    def counted(context: str | None, token_id: int) -> text_stream.Piece:
        read.append(token_id)
        return one.tokenizer._piece_of(context, token_id)

    TextStream(counted, prompt)
    return len(read)


def test_no_token_costs_more_because_of_those_before_it(
    zoo: Callable[[str], Specimen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text without one good character included: what is decoded never grows."""
    one = zoo(EMBEDDED)
    sizes: list[int] = []
    plain = text_stream._decode_complete

    def measured(found: bytes) -> tuple[str, bytes]:
        sizes.append(len(found))
        return plain(found)

    monkeypatch.setattr(text_stream, "_decode_complete", measured)
    for data in (b"\x80", b"\xf0\x9f\x99", b"\xed\xa0", b"a"):
        ids = one.bytes_ids(data * 500)
        one.tokenizer.completion_text([], ids)
    assert len(sizes) > 3500
    assert max(sizes) <= 4


# -- mutants ---------------------------------------------------------------------------------


def battery(zoo: Callable[[str], Specimen]) -> None:
    """The oracle of the first test on fixed cases."""
    rng = random.Random(11)
    for _ in range(300):
        for name in ("byte_level", "metaspace", "word_ends"):
            one = zoo(name)
            prompt, ids = random_ids(rng, one, 6), random_ids(rng, one, 8)
            assert "".join(pushed(one, prompt, ids)) == one.joint_text(prompt, ids)


def no_context_of_the_prompt(plain: Any, piece_of: Any, token_ids: Any) -> Any:
    return None, plain(piece_of, token_ids)[1]


def only_the_last_token_of_the_prompt(plain: Any, piece_of: Any, token_ids: Any) -> Any:
    return plain(piece_of, token_ids[-1:])


def nothing_pending_behind_the_prompt(plain: Any, piece_of: Any, token_ids: Any) -> Any:
    return plain(piece_of, token_ids)[0], b""


def incomplete_at_once(plain: Any, found: bytes) -> Any:
    return found.decode("utf-8", "replace"), b""


def one_byte_of_two_pending(plain: Any, found: bytes) -> Any:
    text, pending = plain(found)
    return text, pending[:1]


def the_prompts_replacement_kept(plain: Any, self: TextStream, text: str) -> Any:
    return text


MUTANTS: list[tuple[object, str, Callable[..., Any]]] = [
    (text_stream, "_end_of", no_context_of_the_prompt),
    (text_stream, "_end_of", only_the_last_token_of_the_prompt),
    (text_stream, "_end_of", nothing_pending_behind_the_prompt),
    (text_stream, "_decode_complete", incomplete_at_once),
    (text_stream, "_decode_complete", one_byte_of_two_pending),
    (TextStream, "_without_prompt", the_prompts_replacement_kept),
]


@pytest.mark.parametrize(
    ("owner", "site", "mutant"), MUTANTS, ids=[mutant.__name__ for _, _, mutant in MUTANTS]
)
def test_the_oracle_sees_each_mutant(
    zoo: Callable[[str], Specimen],
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    site: str,
    mutant: Callable[..., Any],
) -> None:
    battery(zoo)
    plain, reached = getattr(owner, site), []

    def mutated(*arguments: Any) -> Any:
        reached.append(site)
        return mutant(plain, *arguments)

    monkeypatch.setattr(owner, site, mutated)
    with pytest.raises(AssertionError):
        battery(zoo)
    assert reached
