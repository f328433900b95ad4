"""Keys of prefixes, and hits that are exact whatever the digest is worth."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from pagedctl.engine.prefix_index import (
    CachedBlock,
    Link,
    PrefixIndex,
    chained_key,
    extend_keys,
    root_key,
)

ROOT = root_key("arithmetic", None)


def keys_of(tokens: list[int], *, block_size: int = 2, root: bytes = ROOT) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, block_size=block_size, num_blocks=len(tokens) // block_size)
    return keys


def enter(index: PrefixIndex, tokens: list[int], blocks: list[int], root: bytes = ROOT) -> Link:
    """Enter *blocks* of two tokens each as the prefix *tokens*."""
    parent: Link = root
    for place, (block, key) in enumerate(zip(blocks, keys_of(tokens, root=root), strict=True)):
        parent = index.put(key, tokens[2 * place : 2 * place + 2], block, parent)
    index.audit()
    return parent


def hits(index: PrefixIndex, tokens: list[int], root: bytes = ROOT) -> list[int]:
    parent: Link = root
    found = []
    for place, key in enumerate(keys_of(tokens, root=root)):
        one = index.find(key, tokens[2 * place : 2 * place + 2], parent)
        if one is None:
            break
        found.append(one.block)
        parent = one
    return found


def test_a_key_stands_for_the_whole_prefix() -> None:
    prefixes = [list(ids) for ids in product((1, 2, 258), repeat=4)]
    last = {keys_of(ids)[-1] for ids in prefixes}
    assert len(last) == len(prefixes)
    assert keys_of([1, 2, 3, 4])[:1] == keys_of([1, 2])


def test_keys_are_extended_and_never_made_again() -> None:
    tokens = [5, 6, 7, 8, 9]
    keys = keys_of(tokens[:2])
    extend_keys(keys, ROOT, tokens, block_size=2, num_blocks=2)
    assert keys == keys_of(tokens)
    extend_keys(keys, ROOT, tokens, block_size=2, num_blocks=1)
    assert len(keys) == 2


def test_roots_differ_by_arithmetic_and_salt() -> None:
    roots = {root_key(name, salt) for name in ("a", "b") for salt in (None, "", "x", "y")}
    assert len(roots) == 8
    assert len({chained_key(root, [1, 2]) for root in roots}) == 8


def test_keys_do_not_depend_on_the_process() -> None:
    """The same in every process: ranks of one engine must find the same blocks."""
    code = (
        "from pagedctl.engine.prefix_index import chained_key, root_key;"
        "print(chained_key(root_key('arithmetic', 'x'), [1, 2, 50256]).hex())"
    )
    here = chained_key(root_key("arithmetic", "x"), [1, 2, 50256]).hex()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


def test_the_first_block_of_a_prefix_stays_the_one_to_find() -> None:
    index = PrefixIndex()
    enter(index, [1, 2, 3, 4], [0, 1])
    enter(index, [1, 2, 3, 4], [5, 6])
    assert hits(index, [1, 2, 3, 4]) == [0, 1]
    assert (len(index), 5 in index) == (2, False)
    assert index.blocks() == (0, 1)


def test_a_block_goes_by_itself_and_its_children_wait_for_their_parent() -> None:
    index = PrefixIndex()
    enter(index, [1, 2, 3, 4], [0, 1])
    assert index.drop(0)
    assert not index.drop(0)
    assert hits(index, [1, 2, 3, 4]) == []
    enter(index, [1, 2], [7])
    assert hits(index, [1, 2, 3, 4]) == [7, 1]


def test_blocks_behind_a_duplicate_are_found_behind_the_first() -> None:
    """Two sequences compute one block, and the one that is not entered goes on."""
    index = PrefixIndex()
    enter(index, [1, 2], [0])
    enter(index, [1, 2, 3, 4], [5, 6])
    assert hits(index, [1, 2, 3, 4]) == [0, 6]


@pytest.fixture(params=["one key for all", "three keys"])
def colliding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that tells next to nothing."""
    values = 1 if request.param == "one key for all" else 3
    monkeypatch.setattr(
        "pagedctl.engine.prefix_index._digest", lambda data: bytes([sum(data) % values])
    )


@pytest.mark.usefixtures("colliding")
def test_prefixes_with_an_equal_last_block_never_share_it() -> None:
    """openvinotoolkit/openvino.genai#3722, vllm-project/aibrix#2329: [A][X] and [B][X]."""
    assert chained_key(b"a", [1, 2]) == chained_key(b"a", [2, 1])
    for first, second in (([1, 2, 5, 5], [2, 1, 5, 5]), ([5, 5, 5, 5], [5, 5])):
        index = PrefixIndex()
        enter(index, first, list(range(len(first) // 2)))
        assert len(hits(index, second)) == (0 if first[:2] != second[:2] else 1)
    index = PrefixIndex()
    enter(index, [5, 5], [0])
    assert hits(index, [5, 5, 5, 5]) == [0]


@pytest.mark.usefixtures("colliding")
def test_every_hit_is_exact_under_colliding_keys() -> None:
    prefixes = [list(ids) for ids in product((1, 2, 4), repeat=4)]
    for first in prefixes:
        index = PrefixIndex()
        enter(index, first, [0, 1])
        for second in prefixes:
            found = hits(index, second)
            shared = [first[: 2 * n] == second[: 2 * n] for n in (1, 2)]
            assert found == [0, 1][: len(found)]
            assert all(shared[: len(found)])


@pytest.mark.usefixtures("colliding")
def test_salts_separate_under_colliding_keys() -> None:
    index = PrefixIndex()
    enter(index, [1, 2], [0], root=root_key("arithmetic", "a"))
    assert hits(index, [1, 2], root=root_key("arithmetic", "b")) == []
    assert hits(index, [1, 2], root=root_key("arithmetic", "a")) == [0]


@pytest.mark.usefixtures("colliding")
def test_a_block_whose_key_is_taken_is_not_found_and_misleads_nobody_behind_it() -> None:
    index = PrefixIndex()
    enter(index, [1, 2], [0])
    parent = index.put(keys_of([2, 1])[0], [2, 1], 7, ROOT)
    assert isinstance(parent, CachedBlock)
    assert 7 not in index
    index.audit()
    assert hits(index, [2, 1]) == []


def test_a_long_prefix_is_compared_without_recursion() -> None:
    """A chain whose first blocks were entered twice is walked to its root."""
    index, tokens = PrefixIndex(), [token % 7 for token in range(20_000)]
    enter(index, tokens, list(range(10_000)))
    for block in range(9_999):
        index.drop(block)
    enter(index, tokens[:-2], list(range(9_999)))
    assert hits(index, tokens)[-1] == 9_999


def test_the_audit_sees_directions_that_disagree() -> None:
    index = PrefixIndex()
    enter(index, [1, 2, 3, 4], [0, 1])
    index.audit()
    del index._by_block[0]
    with pytest.raises(RuntimeError, match="without blocks"):
        index.audit()
