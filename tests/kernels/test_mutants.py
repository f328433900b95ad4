"""Broken kernels must be caught: each mutant beside a control, and each proves it was reached.

A mutant replaces one small internal function. The control runs the same check unmutated and
must pass; the mutant must make it fail, after its site was seen to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.ops import gumbel_noise, halving_tree, philox
from pagedctl_kernels.ops.attention import masks, tiles, torch_reference, units
from pagedctl_kernels.ops.attention import torch_reference as attention
from pagedctl_kernels.ops.qk_norm_rope_write import torch_reference as rope
from pagedctl_kernels.ops.sample import draw, truncation
from pagedctl_kernels.ops.sample import torch_reference as sample
from tests.kernels import reference
from tests.kernels.harness import Paged, numbers, sampler, sampling_rows, sequences
from tests.kernels.reference import TOLERANCES, to_numpy
from tests.kernels.test_row_ops import Rope


@dataclass(frozen=True)
class Mutant:
    """``replace(original)`` returns the broken function put in place of ``where.name``."""

    where: Any
    name: str
    replace: Callable[[Any], Any]
    check: Callable[[], bool]


def attention_is_right(window: int | None = None) -> bool:
    batch = sequences(1, [65, 300], q_heads=6, kv_heads=3)
    atol, rtol = TOLERANCES["attention", "float32"]
    for sequence, rows in enumerate(Paged(batch, window=window).prefill()):
        q, k, v = (to_numpy(part[sequence]) for part in (batch.q, batch.k, batch.v))
        want = np.stack(
            [
                [reference.attend(q[p, h], k[:, h // 2], v[:, h // 2], p, window) for h in range(6)]
                for p in range(len(q))
            ]
        )
        if not (np.abs(to_numpy(rows) - want) <= atol + rtol * np.abs(want)).all():
            return False
    return True


def windowed_attention_is_right() -> bool:
    return attention_is_right(window=50)


def decode_equals_prefill() -> bool:
    paged = Paged(sequences(2, [300, 520]))
    whole = paged.prefill()
    decoded = paged.attend([(0, 299, 300), (1, 519, 520)])
    return all(torch.equal(d, w[-1:]) for d, w in zip(decoded, whole, strict=True))


def merge_follows_the_formula() -> bool:
    """Three splits merged left to right by scalars, against the leaf, bit for bit."""
    batch = sequences(3, [700], q_heads=1, kv_heads=1, head_dim=8)
    paged = Paged(batch)
    seen: list[tiles.State] = []
    original = torch_reference.merge_units

    def spy(states: tiles.State, chunk: units.Chunk) -> tiles.State:
        seen.append(
            tiles.State(
                *(part.clone() for part in (states.maximum, states.total, states.accumulator))
            )
        )
        return original(states, chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_reference, "merge_units", spy)
        got = paged.attend([(0, 699, 700)])[0]
    m, total, acc = seen[0].maximum[:, 0], seen[0].total[:, 0], seen[0].accumulator[:, 0]
    state = (m[0], total[0], acc[0])
    for s in (1, 2):
        big = torch.maximum(state[0], m[s])
        f, g = (torch.exp((x - big) * float(np.log(2))) for x in (state[0], m[s]))
        state = (big, state[1] * f + total[s] * g, state[2] * f + acc[s] * g)
    return torch.equal(got[0, 0], (state[2] + 0) / state[1])


def cache_holds_its_rows() -> bool:
    case = Rope("float32", qk_norm=False)
    _, _, v_cache = case()
    for row, slot in enumerate(case.slots.tolist()):
        want = case.qkv[row].view(8, 16)[6:]
        if slot >= 0 and not torch.equal(v_cache[slot // 8, :, slot % 8], want):
            return False
    return int((~v_cache.isnan()).any(-1).any(1).sum()) == int((case.slots >= 0).sum())


def rows_draw_their_own_tokens() -> bool:
    logits = numbers(4, 20, 500)
    columns = {"seed": list(range(20)), "position": list(range(50, 70))}
    packed = sampler()(logits, sampling_rows(20, **columns)).token_ids.tolist()
    alone = [
        sampler()(logits[i : i + 1], sampling_rows(1, seed=i, position=50 + i)).token_ids.item()
        for i in range(20)
    ]
    return packed == alone


def draws_vary_with_position() -> bool:
    logits = torch.zeros(100, 500)
    ids = sampler()(logits, sampling_rows(100, position=list(range(100)))).token_ids
    return len(set(ids.tolist())) > 50


def kept_sets_are_right() -> bool:
    logits = numbers(5, 1, 100) * 2
    for top_k, top_p in ((5, 1.0), (0, 0.8), (10, 0.6), (1, 1.0), (0, 0.01)):
        mask = truncation.kept_mask(
            logits,
            torch.tensor([top_k]),
            torch.tensor([top_p], dtype=torch.float64),
            torch.zeros(1),
        )
        want = reference.kept_tokens(logits[0].tolist(), 1.0, top_k, top_p, 0.0)
        if mask[0].nonzero().squeeze(-1).tolist() != want:
            return False
    return True


def ties_go_to_the_lowest_id() -> bool:
    mask = truncation.kept_mask(
        torch.zeros(1, 9), torch.tensor([4]), torch.ones(1, dtype=torch.float64), torch.zeros(1)
    )
    return mask[0].tolist() == [True] * 4 + [False] * 5


def noise_is_right() -> bool:
    words = [0, 1, 2**20, 2**30 - 99, 2**30 + 99, 2**31, 2**32 - 1]
    got = gumbel_noise.gumbel_noise(torch.tensor(words)).double().numpy()
    return bool(np.abs(got - [reference.gumbel(w) for w in words]).max() < 1.5e-6)


def sums_follow_the_tree() -> bool:
    values = numbers(6, 20, 64)
    level = values.numpy()
    while level.shape[1] > 1:
        half = level.shape[1] // 2
        level = level[:, :half] + level[:, half:]
    return bool((halving_tree.halving_tree_sum(values).numpy() == level[:, 0]).all())


def drop_last_key(original: Any) -> Any:
    return lambda keys, first, last, window: original(keys, first, last, window) & (keys != last)


def mask_off_by_one(original: Any) -> Any:
    return lambda keys, first, last, window: original(keys, first, last + 1, window)


def window_off_by_one(original: Any) -> Any:
    return lambda keys, first, last, window: original(
        keys, first, last, None if window is None else window + 1
    )


def flip_kv_head(original: Any) -> Any:
    def build(*arguments: Any) -> units.Units:
        made: units.Units = original(*arguments)
        return units.Units(**{**vars(made), "kv_head": made.kv_head.max() - made.kv_head})

    return build


def merge_in_reverse(original: Any) -> Any:
    def merge_units(states: tiles.State, chunk: units.Chunk) -> tiles.State:
        last = int(chunk.num_items) - 1
        backwards = states.at(torch.arange(last, -1, -1))
        return original(backwards, chunk)  # type: ignore[no-any-return]

    return merge_units


def ignore_offset(original: Any) -> Any:
    def address(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        block, offset = original(slots, block_size)
        return block, torch.zeros_like(offset)

    return address


def write_padding_rows(original: Any) -> Any:
    return lambda *operands: original(*operands[:4], operands[4].clamp(min=0))


def key_by_row(original: Any) -> Any:
    return lambda scaled, kept, seed, position: original(
        scaled, kept, torch.arange(len(seed)) + len(seed), position
    )


def ignore_position(original: Any) -> Any:
    return lambda seed, position, group: original(seed, torch.zeros_like(position), group)


def keep_one_extra(original: Any) -> Any:
    return lambda scaled, length, last: (
        original(scaled, length + 1, scaled.amin(-1))
        & (scaled >= scaled.gather(1, scaled.argsort(dim=1, descending=True)[:, length]))
    )


def top_k_plus_one(original: Any) -> Any:
    return lambda scaled, top_k, top_p: original(scaled, top_k.clamp(max=99) + 1, top_p)


def keep_all_ties(original: Any) -> Any:
    return lambda scaled, length, last: scaled >= last.unsqueeze(-1)


def forget_the_crossing_token(original: Any) -> Any:
    return lambda top_p, total: original(top_p, total) - (original(top_p, total) // 10)


def unrescaled_accumulator(original: Any) -> Any:
    def split_states(scores: torch.Tensor, v: torch.Tensor, p_dtype: torch.dtype) -> tiles.State:
        made = original(scores, v, p_dtype)
        last = original(scores[:, -1:], v[:, -1:], p_dtype)
        return tiles.State(made.maximum, made.total, made.accumulator + 1e-3 * last.accumulator)

    return split_states


def one_short_of_a_tile(original: Any) -> Any:
    def tile_range(positions: Any, window: int | None) -> Any:
        first, end = original(positions, window)
        return first, np.maximum(end - 1, first + 1)

    return tile_range


def pairwise_sum(original: Any) -> Any:
    def tree(values: torch.Tensor) -> torch.Tensor:
        while values.shape[-1] > 1:
            values = values[..., 0::2] + values[..., 1::2]
        return values[..., 0]

    return tree


def wrong_constant(original: Any) -> Any:
    return lambda coefficients, x: original((coefficients[0] * 1.01, *coefficients[1:]), x)


MUTANTS = {
    "last key dropped": Mutant(masks, "visible_keys", drop_last_key, attention_is_right),
    "causal mask off by one": Mutant(masks, "visible_keys", mask_off_by_one, attention_is_right),
    "window off by one": Mutant(
        masks, "visible_keys", window_off_by_one, windowed_attention_is_right
    ),
    "grouped heads flipped": Mutant(units, "build_units", flip_kv_head, attention_is_right),
    "last tile skipped": Mutant(units, "tile_range", one_short_of_a_tile, attention_is_right),
    "merge order reversed": Mutant(
        torch_reference, "merge_units", merge_in_reverse, merge_follows_the_formula
    ),
    "accumulator not as the sum": Mutant(
        attention, "split_states", unrescaled_accumulator, attention_is_right
    ),
    "slot offset ignored": Mutant(rope, "cache_address", ignore_offset, cache_holds_its_rows),
    "padding rows written": Mutant(rope, "write_cache", write_padding_rows, cache_holds_its_rows),
    "generator keyed by row": Mutant(sample, "draw", key_by_row, rows_draw_their_own_tokens),
    "generator ignores position": Mutant(
        draw, "token_words", ignore_position, draws_vary_with_position
    ),
    "top-p keeps one extra": Mutant(
        truncation, "_first_of_order", keep_one_extra, kept_sets_are_right
    ),
    "top-p target too small": Mutant(
        truncation, "_target_mass", forget_the_crossing_token, kept_sets_are_right
    ),
    "top-k off by one": Mutant(truncation, "_prefix_mask", top_k_plus_one, kept_sets_are_right),
    "ties all kept": Mutant(truncation, "_first_of_order", keep_all_ties, ties_go_to_the_lowest_id),
    "sum pairwise": Mutant(halving_tree, "halving_tree_sum", pairwise_sum, sums_follow_the_tree),
    "noise constant wrong": Mutant(gumbel_noise, "horner", wrong_constant, noise_is_right),
}


@pytest.fixture(params=MUTANTS.items(), ids=lambda item: item[0].replace(" ", "-"))
def mutant(request: pytest.FixtureRequest) -> Mutant:
    return request.param[1]


def test_a_mutant_is_reached_and_caught_and_its_control_passes(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mutant.check(), "control"
    reached: list[bool] = []
    broken = mutant.replace(getattr(mutant.where, mutant.name))

    def spy(*operands: Any, **named: Any) -> Any:
        reached.append(True)
        return broken(*operands, **named)

    monkeypatch.setattr(mutant.where, mutant.name, spy)
    caught = not mutant.check()
    assert reached, "the mutated site was never called"
    assert caught


def test_a_short_philox_is_caught_by_the_published_words(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    want = 0x6627E8D5
    assert philox.philox4x32((zero,) * 4, (zero,) * 2)[0].item() == want
    monkeypatch.setattr(philox, "ROUNDS", 9)
    assert philox.philox4x32((zero,) * 4, (zero,) * 2)[0].item() != want


def test_decode_equals_prefill_has_power_against_row_dependent_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert decode_equals_prefill()
    honest = torch_reference.score_tiles

    def by_height(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        return honest(q, k, scale * (1 + 1e-6 * (q.shape[1] < 16)))

    monkeypatch.setattr(torch_reference, "score_tiles", by_height)
    assert not decode_equals_prefill()
