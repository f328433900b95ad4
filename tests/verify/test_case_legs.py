"""The runs of each case meet what the case is there for, and none proves anything by accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedctl.verify.case_legs import (
    CUT_TOKENS,
    ROWS,
    cut,
    packed_legs,
    pool_legs,
    preemption_legs,
    repeat_legs,
)
from pagedctl.verify.cases import CASES
from pagedctl.verify.comparison import first_difference
from pagedctl.verify.prefix_legs import prefix_legs, room
from tests.verify.invariance_harness import subject


def test_packed_meets_every_number_of_rows_exactly(tmp_path: Path) -> None:
    """vllm-project/vllm#51187: 48 rows and more, on both sides of every size."""
    with subject(tmp_path) as (made, engines):
        met = {leg.name: trace.most_rows for leg, trace in engines.traces([*packed_legs(made)])}
    assert [met[f"{rows} rows"] for rows in ROWS] == list(ROWS)
    assert set(ROWS) >= {7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65}
    assert met["stops at lag 1"] >= 48


def test_packed_mates_orders_and_lags_vary(tmp_path: Path) -> None:
    with subject(tmp_path) as (made, _):
        legs = list(packed_legs(made))
    prompts = [{one.prompt_token_ids for one in leg.fillers} for leg in legs]
    for place, one in enumerate(prompts):
        assert all(one.isdisjoint(other) for other in prompts[place + 1 :])
    assert {leg.options["lag"] for leg in legs} == {0, 1}


def test_no_more_rows_than_the_configuration_allows(tmp_path: Path) -> None:
    with subject(tmp_path, max_num_seqs=16) as (made, _):
        rows = [leg.options["max_num_seqs"] for leg in packed_legs(made)]
    assert rows == [7, 8, 9, 15, 16, 16]


def test_a_repeat_is_the_same_batch_five_times(tmp_path: Path) -> None:
    """vllm-project/vllm#51187: 5 repeats gave 3 different logprob sets."""
    with subject(tmp_path) as (made, engines):
        legs = list(repeat_legs(made))
        traces = [trace for _, trace in engines.traces(legs)]
    assert len(legs) == 5
    assert all(leg.schedule() == legs[0].schedule() for leg in legs)
    assert [leg.continues for leg in legs] == [False, True, True, True, True]
    assert all(trace.rows == traces[0].rows for trace in traces)
    assert traces[0].most_rows >= 48


def test_tight_pools_preempt_what_is_compared(tmp_path: Path) -> None:
    with subject(tmp_path, requests=8, max_tokens=24) as (made, engines):
        traces = {leg.name: trace for leg, trace in engines.traces([*pool_legs(made)])}
    assert traces["tight pool"].preemptions + traces["tight pool, lag 1"].preemptions > 0
    assert len(traces) == 4


def test_a_pool_is_never_larger_than_what_was_given(tmp_path: Path) -> None:
    with subject(tmp_path, kv_cache_memory_bytes=300_000) as (made, _):
        given = made.config.kv_cache_memory_bytes
        assert all(leg.options["kv_cache_memory_bytes"] <= given for leg in pool_legs(made))  # type: ignore[operator]


def test_preemptions_come_anywhere_and_during_prefill(tmp_path: Path) -> None:
    with subject(tmp_path) as (made, engines):
        legs = list(preemption_legs(made))
        intervals = [leg.options["debug_force_preemption_interval"] for leg in legs]
        traces = [trace for _, trace in engines.traces(legs)]
    assert intervals == [1, 3, -1, -3]
    assert all(trace.preemptions > 0 for trace in traces)


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_prefix_hits_are_those_of_whole_blocks(tmp_path: Path, block_size: int) -> None:
    """sgl-project/sglang#34683, vllm-project/vllm#5543, #40896: cold and warm are one."""
    with subject(tmp_path, block_size=block_size) as (made, engines):
        legs = list(prefix_legs(made))
        found = {}
        for leg, trace in engines.traces(legs):
            found[leg.name] = trace
            for probe in leg.probes:
                key = (probe.request.id, 0)
                assert probe.cached_tokens in (None, trace.cached_tokens[key]), (leg.name, key)
                expected = made.reference.expected(probe, 0)
                assert first_difference(expected, trace.answers[key]) is None
    names = ["stem", "ask", "ask again", "30 others", "ask after 30 others", "next turn"]
    assert list(found) == [*names, "cold in a new engine"]
    shared = {probe.request.id for probe in legs[1].probes}
    for count in {block_size, block_size + 1, 2 * block_size - 1, 2 * block_size}:
        assert f"prefix {count} and a tail" in shared
    own = next(one.request for one in legs[1].probes if one.request.id == "prefix of its own")
    assert len(own.prompt_token_ids) == 2 * block_size + block_size // 2
    assert found["ask"].cached_tokens[own.id, 0] == 0
    whole = (len(own.prompt_token_ids) - 1) // block_size * block_size
    assert found["ask again"].cached_tokens[own.id, 0] == whole > 0
    assert found["ask after 30 others"].cached_tokens[own.id, 0] == whole
    assert len(legs[3].fillers) == 30


def test_prefixes_need_room(tmp_path: Path) -> None:
    with subject(tmp_path, max_model_len=64, max_tokens=4) as (made, _):
        assert room(made) == "prompts of 80 tokens do not fit into 60"


def test_runs_of_a_case_have_names_of_their_own(tmp_path: Path) -> None:
    with subject(tmp_path, requests=3, max_tokens=4) as (made, _):
        for case in CASES.values():
            names = [leg.name for leg in case.legs(made)]
            assert len(names) == len(set(names)), case.name


def test_a_cut_request_is_the_beginning_of_the_whole(tmp_path: Path) -> None:
    with subject(tmp_path, requests=2, max_tokens=CUT_TOKENS + 4) as (made, _):
        probe = cut(made.requests[1])
        assert probe.request.params.max_tokens == probe.end == CUT_TOKENS
        assert len(made.reference.expected(probe, 0).token_ids) == CUT_TOKENS
    with subject(tmp_path, requests=2) as (made, _):
        assert cut(made.requests[0]).request == made.requests[0]
