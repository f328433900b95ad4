"""The kernel benchmark's cases: shapes, byte counts, and that ours and peers do the same work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedctl.bench.kernels import case as cases
from pagedctl.bench.kernels.attention_cases import block_tables
from pagedctl.bench.kernels.bench import Bench
from pagedctl.bench.kernels.case import Case
from pagedctl.bench.kernels.linear_stack import LinearStack
from pagedctl.bench.kernels.replay import Timing
from pagedctl.bench.kernels.report import CASES, Line, table
from pagedctl.bench.kernels.shapes import (
    BLOCK_SIZE,
    QWEN3_06B,
    QWEN3_8B,
    Batch,
    ModelShape,
    batches,
)

TINY = ModelShape(
    name="tiny",
    layers=2,
    hidden=64,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocabulary=300,
)
DECODE = Batch(
    workload="decode",
    model=TINY,
    queries=(1,) * 4,
    keys=(33,) * 4,
    group=2,
    shared=32,
    temperature=0.0,
)
PREFILL = replace(DECODE, workload="prefill", queries=(20,) * 2, keys=(20,) * 2, group=1, shared=0)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_MOST_COPIES", 2)


def built(op: str) -> Iterator[Case]:
    for batch in (DECODE, PREFILL):
        yield from CASES[op](batch, Bench("cpu"))


def first(result: object) -> torch.Tensor:
    """The tensor that a launch is about."""
    result = getattr(result, "token_ids", result)
    one = result[0] if isinstance(result, tuple) else result
    assert isinstance(one, torch.Tensor)
    return one.double()


@pytest.mark.parametrize("op", ["gemm", "head", "rms_norm", "silu_mul", "embedding", "logprob"])
def test_ours_and_the_peer_compute_the_same(op: str) -> None:
    for case in built(op):
        assert case.product is not None
        ours = [first(launch()) for launch in case.product]
        name, launches = next(iter(case.peers.items()))
        for got, launch in zip(ours, launches, strict=True):
            torch.testing.assert_close(got, first(launch()), rtol=0.02, atol=0.05, msg=name)
        assert not torch.equal(*ours[:2]), "the buffers do not rotate"


def test_a_greedy_draw_is_the_peers() -> None:
    for case in built("sample"):
        assert case.product is not None
        for ours, peer in zip(case.product, case.peers["torch.argmax"], strict=True):
            assert torch.equal(first(ours()), first(peer()))


@pytest.mark.parametrize("op", ["attention", "qk_norm_rope_write"])
def test_our_launches_run(op: str) -> None:
    for case in built(op):
        assert case.product is not None
        for launch in case.product:
            assert first(launch()).isfinite().all()


@pytest.mark.parametrize(("batch", "top_p"), [(DECODE, 0.9), (DECODE, 1.0)])
def test_a_peers_draw_is_of_likely_tokens(batch: Batch, top_p: float) -> None:
    (case,) = CASES["sample"](replace(batch, temperature=1.0, top_p=top_p), Bench("cpu"))
    for launch in itertools.chain.from_iterable(case.peers.values()):
        ids = first(launch())
        assert ids.numel() == batch.sampled
        assert ((ids >= 0) & (ids < TINY.vocabulary)).all()


def test_edits_change_the_logits_in_place() -> None:
    case = next(built("logit_edits"))
    assert case.product is not None
    logits = case.product[0].args[0]  # type: ignore[attr-defined]
    before = logits.clone()
    case.product[0]()
    assert not torch.equal(before, logits)


def test_the_stack_holds_every_weight_of_the_published_shapes() -> None:
    def gigabytes(model: ModelShape) -> float:
        return sum(one.weight_bytes for one in (*model.projections(), model.head())) / 1e9

    assert gigabytes(QWEN3_8B) == pytest.approx(15.14, abs=0.01)
    assert gigabytes(QWEN3_06B) == pytest.approx(1.19, abs=0.01)
    stack = LinearStack(Bench("cpu"), TINY)
    assert len(stack.products) == len(stack.projections) == 4 * TINY.layers + 1


def test_the_floor_reads_a_groups_shared_keys_once() -> None:
    tables, num_blocks = block_tables(DECODE)
    used = {int(one) for row in tables for one in row[:3]}
    assert len(used) == 2 * 2 + 4  # two shared blocks a group, one block of each sequence
    assert num_blocks >= len(used)
    assert DECODE.distinct_keys == 4 * 33 - 2 * 32
    assert np.array_equal(tables[0, :2], tables[1, :2])
    assert DECODE.shared % BLOCK_SIZE == 0


def test_scores_count_the_keys_that_each_query_sees() -> None:
    chunk = replace(PREFILL, queries=(3,), keys=(10,))
    assert chunk.scores == 8 + 9 + 10
    assert DECODE.scores == 4 * 33


def test_the_batches_are_drawn_alike_and_cover_the_workloads() -> None:
    found = list(batches())
    assert found == list(batches())
    names = " ".join(batch.workload for batch in found)
    for workload in ("decode1", "decode64", "rollout4k", "grpo", "prefill2k", "nano"):
        assert workload in names


def test_an_op_without_a_leaf_is_a_line_without_a_time() -> None:
    peer = Timing(trials_us=(3.0, 1.0, 2.0))
    line = Line(
        op="gemm", workload="w", shape="s", floor_us=1.0, product=None, peers={"cuBLAS": peer}
    )
    cells = [[*column.cells] for column in table("gemm", [line]).columns]
    assert ["no leaf"] in cells
    assert ["2.0"] in cells
    assert peer.spread_us == 2.0
