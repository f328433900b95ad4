"""Stop texts, beside an oracle that goes through the text character by character."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl.engine import stop_texts
from pagedctl.engine.stop_texts import StopMatch, StopTexts
from pagedctl.models.text_stream import TextStream
from tests.models.tokenizer_zoo import CHAR_OF_BYTE, EMBEDDED, Specimen

FFFD = "\ufffd"
NEAR = ("END", "ND", "EN", "a", "aa", "aaa", "\n\n", "🙂", "😀", "é漢", FFFD, "unknown", "stop2")
LONG_TOKENS = (" apples", " How", " many", " more", " buys", " the", "ing")


@cache
def specimen(name: str) -> Specimen:
    with TemporaryDirectory() as folder:
        return Specimen(name, Path(folder))


@cache
def ids_of_bytes() -> dict[bytes, int]:
    """The embedded model's tokens by their bytes; " Tom" is one, and so is each byte."""
    byte_of = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
    vocabulary = specimen(EMBEDDED).library.get_vocab(with_added_tokens=False)
    return {
        bytes(byte_of[char] for char in token): number
        for token, number in vocabulary.items()
        if all(char in byte_of for char in token) and not token.startswith("<|")
    }


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """*data* in random tokens of the vocabulary, inside characters too."""
    known, tokens = ids_of_bytes(), []
    while data:
        sizes = [n for n in range(1, min(16, len(data)) + 1) if data[:n] in known]
        size = rng.choice(sizes)
        tokens.append(data[:size])
        data = data[size:]
    return tokens


def stream(prompt: Sequence[int] = ()) -> TextStream:
    return specimen(EMBEDDED).tokenizer.text_stream(prompt)


def push_all(stops: StopTexts, ids: Sequence[int]) -> tuple[int, StopMatch] | None:
    """The match, and the number of tokens that it took."""
    for count, token in enumerate(ids, start=1):
        match = stops.push(token)
        if match is not None:
            return count, match
    return None


def push_tokens(tokens: Sequence[bytes], stops: Sequence[str], **options: Any) -> StopMatch | str:
    """The match in the embedded model's *tokens*, or the text that has none."""
    matcher = StopTexts(stops, stream(), **options)
    found = push_all(matcher, [ids_of_bytes()[token] for token in tokens])
    return matcher.finish() if found is None else found[1]


def oracle(
    arrivals: Sequence[int], text: str, stops: Sequence[str], min_tokens: int
) -> tuple[int, str, int] | None:
    """(tokens taken, stop, where it ends) in *text*, of which ``arrivals[n]`` characters are
    there after n tokens: the first end at which the text so far ends in a stop."""
    for end in range(1, len(text) + 1):
        taken = next(count for count, there in enumerate(arrivals) if there >= end)
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended and taken > min_tokens:
            return taken, max(ended, key=len), end
    return None


def check(ids: Sequence[int], arrivals: Sequence[int], text: str, rest: str, **given: Any) -> bool:
    """Whether there was a match; it is the oracle's. *text* is what came, *rest* the flush."""
    include, stops = given["include_stop"], given["stops"]
    matcher = StopTexts(stops, stream(), include_stop=include, min_tokens=given["min_tokens"])
    found, expected = push_all(matcher, ids), oracle(arrivals, text, stops, given["min_tokens"])
    if expected is None:
        assert found is None
        assert matcher.finish() == matcher.finish() == text + rest
        return False
    taken, stop, end = expected
    kept = text[: end if include else end - len(stop)]
    assert found == (taken, StopMatch(stop=stop, text=kept))
    return True


def check_text(rng: random.Random, content: str, stops: Sequence[str]) -> bool:
    """A random cut of *content*, the last character of which may be cut off."""
    data = content.encode()
    data = data[: len(data) - rng.randrange(3)]
    tokens = cut(rng, data)
    joined = [b"".join(tokens[:count]) for count in range(len(tokens) + 1)]
    arrivals = [len(one.decode("utf-8", "ignore")) for one in joined]
    text = data.decode("utf-8", "ignore")
    return check(
        [ids_of_bytes()[token] for token in tokens],
        arrivals,
        text,
        data.decode("utf-8", "replace")[len(text) :],
        stops=stops,
        include_stop=rng.random() < 0.5,
        min_tokens=rng.choice((0, 0, 1, 3, 8)),
    )


def check_random(rng: random.Random) -> bool:
    """Words that share beginnings or are one token, and stop texts from the text or near it."""
    words = (*NEAR, *rng.sample(LONG_TOKENS, 4))
    content = "".join(rng.choice(words) for _ in range(rng.randrange(10)))
    stops = []
    for _ in range(rng.randrange(1, 5)):
        start = rng.randrange(len(content) + 1)
        stops.append(content[start : start + rng.randrange(7)] or rng.choice(NEAR))
    return check_text(rng, content, stops)


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_the_match_is_that_of_the_text_however_it_is_cut_into_tokens(seed: int) -> None:
    """vllm-project/vllm#3672: stop texts need not align with tokens."""
    check_random(random.Random(seed))


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_any_piece_of_the_text_of_random_tokens_is_found(seed: int) -> None:
    """Broken UTF-8, special tokens and ids without text among them."""
    rng = random.Random(seed)
    ids = [rng.randrange(540) for _ in range(rng.randrange(1, 40))]
    plain = stream()
    parts = [plain.push(token) for token in ids]
    text, rest = "".join(parts), plain.finish()
    if not text:
        return
    arrivals = [sum(map(len, parts[:count])) for count in range(len(parts) + 1)]
    places = [rng.randrange(len(text)) for _ in range(3)]
    stops = [text[place : place + rng.randrange(1, 9)] for place in places]
    options = {"include_stop": rng.random() < 0.5, "min_tokens": rng.choice((0, 0, 2, 9))}
    found = check(ids, arrivals, text, rest, stops=stops, **options)
    assert found or options["min_tokens"]


@pytest.mark.parametrize(("include_stop", "end"), [(False, ""), (True, "END")])
def test_a_stop_text_over_several_tokens_is_cut_from_the_text(include_stop: bool, end: str) -> None:
    """vllm-project/vllm#3672, #3574, #3572, #2577, #3026: no part of it leaks."""
    tokens = [b" the", b" ", b"E", b"N", b"D", b"!"]
    expected = StopMatch(stop="END", text=" the " + end)
    assert push_tokens(tokens, ["END"], include_stop=include_stop) == expected


@pytest.mark.parametrize("stop", [" appl", "x ap", "pl", "p"])
def test_what_follows_a_stop_text_in_its_token_is_cut_too(stop: str) -> None:
    """vllm-project/vllm#3672: it ends inside a token, and may start inside one."""
    before = "x apples".partition(stop)[0]
    for include_stop, end in ((False, ""), (True, stop)):
        found = push_tokens([b"x", b" apples"], [stop], include_stop=include_stop)
        assert found == StopMatch(stop=stop, text=before + end)


@pytest.mark.parametrize(
    ("stops", "content", "stop", "text"),
    [
        (["unknown", "stop2"], "a stop2 b", "stop2", "a "),
        (["END"], "one END", "END", "one "),
        (["zzz", "END"], "one END", "END", "one "),
        (["ND", "END"], "one END", "END", "one "),
        (["END", "ND"], "one END", "END", "one "),
        (["ENDX", "EN"], "one ENDX", "EN", "one "),
        (["DX", "END"], "one ENDX", "END", "one "),
        (["aa"], "baaa", "aa", "b"),
        (["aab"], "aaab", "aab", "a"),
        (["aaa", "aa"], "aaa", "aa", ""),
        (["b", "c"], "xcb", "c", "x"),
        (["\n\n"], "a\nb\n\n\n", "\n\n", "a\nb"),
        (["🙂"], "a😀🙂", "🙂", "a😀"),
        ([FFFD], f"a{FFFD}b", FFFD, "a"),
        (["x", "x"], "ax", "x", "a"),
    ],
)
def test_the_stop_text_that_is_complete_first_wins_and_then_the_longest(
    stops: list[str], content: str, stop: str, text: str
) -> None:
    """ModelTC/LightLLM#1456: every stop text counts, and the reason names the one met."""
    for seed in range(20):
        tokens = cut(random.Random(seed), content.encode())
        assert push_tokens(tokens, stops) == StopMatch(stop=stop, text=text)


@pytest.mark.parametrize("stops", [[], [""], ["", "END"]])
def test_an_empty_stop_text_is_refused(stops: list[str]) -> None:
    """ModelTC/LightLLM#1456: it is neither a match everywhere nor the end of the others."""
    with pytest.raises(ValueError, match="none empty"):
        StopTexts(stops, stream())


def test_a_stop_tokens_text_is_in_no_text() -> None:
    """vllm-project/vllm#55483: the engine does not push a stop token, and nothing else adds it."""
    ids = [ids_of_bytes()[token] for token in (b"T", b"o", b"m", b"x", b"y")]
    one = specimen(EMBEDDED).tokenizer
    matcher = StopTexts(["never"], stream())
    assert push_all(matcher, ids[:2]) is None
    assert matcher.finish() == one.completion_text([], ids[:2]) == "To"


def test_half_a_character_is_never_matched() -> None:
    """Neither as the U+FFFD that it is not yet, nor as the one it is at the end."""
    emoji = [bytes([byte]) for byte in "🙂".encode()]
    assert push_tokens(emoji[:3], [FFFD]) == FFFD
    assert push_tokens([*emoji, b"a"], [FFFD]) == "🙂a"
    assert push_tokens([*emoji[:3], b"a"], [FFFD]) == StopMatch(stop=FFFD, text="")
    assert push_tokens([*emoji[:3], b"a"], ["a"]) == StopMatch(stop="a", text=FFFD)


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "a"), (3, "aa"), (4, "aaa"), (5, None)]
)
def test_a_match_is_complete_behind_min_tokens_and_may_start_before(
    min_tokens: int, text: str | None
) -> None:
    """Of "aa" in five tokens "a", the first that ends in token ``min_tokens + 1`` or later."""
    found = push_tokens([b"a"] * 5, ["aa"], min_tokens=min_tokens)
    assert found == ("aaaaa" if text is None else StopMatch(stop="aa", text=text))


def test_min_tokens_counts_tokens_without_text() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    ids = [ids_of_bytes()[one] for one in (first, second, b"!")]
    for min_tokens, expected in ((1, "é"), (2, None)):
        matcher = StopTexts(["é"], stream(), min_tokens=min_tokens, include_stop=True)
        found = push_all(matcher, ids)
        assert (None if found is None else found[1].text) == expected
    specials = StopTexts(["!"], stream(), min_tokens=3)
    assert push_all(specials, [0, 2, 600, ids[2]]) == (4, StopMatch(stop="!", text=""))


def test_a_prompts_text_is_no_part_of_a_match() -> None:
    """It ends in "EN" here, or in the first bytes of a character."""
    prompt = [ids_of_bytes()[token] for token in (b"E", b"N")]
    matcher = StopTexts(["END", "ND"], stream(prompt))
    assert push_all(matcher, [ids_of_bytes()[b"D"]]) is None
    assert matcher.finish() == "D"
    first, second = "é".encode()[:1], "é".encode()[1:]
    matcher = StopTexts(["é"], stream([ids_of_bytes()[first]]))
    found = push_all(matcher, [ids_of_bytes()[second]])
    assert found == (1, StopMatch(stop="é", text=""))


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace", "wordpiece"])
def test_the_space_of_the_first_token_can_be_matched(name: str) -> None:
    one = specimen(name)
    token = one.id_of("Tom" if name == "wordpiece" else "▁Tom")
    for prompt, expected in (([one.id_of("a")], (1, StopMatch(stop=" To", text=""))), ([], None)):
        matcher = StopTexts([" To"], one.tokenizer.text_stream(prompt))
        assert push_all(matcher, [token]) == expected


def test_a_token_is_searched_in_its_own_text_and_the_longest_stop_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    plain = stop_texts.first_completed

    def measured(stops: Sequence[str], window: str, start: int) -> tuple[str, int] | None:
        sizes.append(len(window))
        return plain(stops, window, start)

    monkeypatch.setattr(stop_texts, "first_completed", measured)
    tokens = cut(random.Random(2), b"Tom has 3 apples. " * 400)
    assert isinstance(push_tokens(tokens, ["END", "twelve chars"]), str)
    assert len(sizes) == len(tokens) > 2000
    assert max(sizes) <= 11 + max(map(len, tokens))


# -- mutants ---------------------------------------------------------------------------------


def battery() -> None:
    """The oracle on fixed random cases; some of them match."""
    rng = random.Random(17)
    matches = sum(check_random(rng) for _ in range(800))
    assert 200 < matches < 700


Found = tuple[str, int] | None


def from_the_tokens_start(plain: Any, stops: Sequence[str], window: str, start: int) -> Found:
    found: Found = plain(stops, window[start:], 0)
    return None if found is None else (found[0], found[1] + start)


def window_short_by_one(plain: Any, stops: Sequence[str], window: str, start: int) -> Found:
    longest = max(map(len, stops))
    lost = 1 if start == longest - 1 > 0 else 0
    found: Found = plain(stops, window[lost:], start - lost)
    return None if found is None else (found[0], found[1] + lost)


def first_listed_wins(plain: Any, stops: Sequence[str], window: str, start: int) -> Found:
    return next((found for stop in stops if (found := plain([stop], window, start))), None)


def shortest_wins(plain: Any, stops: Sequence[str], window: str, start: int) -> Found:
    ends = [found for stop in stops if (found := plain([stop], window, start))]
    return min(ends, key=lambda found: (found[1], len(found[0])), default=None)


def first_to_start_wins(plain: Any, stops: Sequence[str], window: str, start: int) -> Found:
    ends = [found for stop in stops if (found := plain([stop], window, start))]
    return min(ends, key=lambda found: found[1] - len(found[0]), default=None)


def searched_again(plain: Any, stops: Sequence[str], window: str, start: int) -> Found:
    found: Found = plain(stops, window, 0)
    return found


def held_back_bytes_given_at_once(plain: Any, self: TextStream, token_id: int) -> str:
    text: str = plain(self, token_id)
    return text + (FFFD if self._pending else "")


def one_token_of_min_tokens_forgotten(plain: Any, self: StopTexts, token_id: int) -> Any:
    if self._num_tokens == 0 and self._min_tokens:
        self._num_tokens += 1
    return plain(self, token_id)


MUTANTS: list[tuple[object, str, Callable[..., Any]]] = [
    (stop_texts, "first_completed", from_the_tokens_start),
    (stop_texts, "first_completed", window_short_by_one),
    (stop_texts, "first_completed", first_listed_wins),
    (stop_texts, "first_completed", shortest_wins),
    (stop_texts, "first_completed", first_to_start_wins),
    (stop_texts, "first_completed", searched_again),
    (TextStream, "push", held_back_bytes_given_at_once),
    (StopTexts, "push", one_token_of_min_tokens_forgotten),
]


def test_the_oracle_passes_without_a_mutant() -> None:
    battery()


@pytest.mark.parametrize(
    ("owner", "site", "mutant"), MUTANTS, ids=[mutant.__name__ for _, _, mutant in MUTANTS]
)
def test_the_oracle_sees_each_mutant(
    monkeypatch: pytest.MonkeyPatch, owner: object, site: str, mutant: Callable[..., Any]
) -> None:
    plain, reached = getattr(owner, site), []

    def mutated(*arguments: Any) -> Any:
        reached.append(site)
        return mutant(plain, *arguments)

    monkeypatch.setattr(owner, site, mutated)
    with pytest.raises(AssertionError):
        battery()
    assert reached
