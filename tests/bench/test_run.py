"""A bench over an engine whose every step takes a stated time: the figures are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedctl.bench.metrics import BenchResult
from pagedctl.bench.run import run_bench
from pagedctl.bench.workloads import Workload, load_workload
from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from tests.bench.fake_engine import FAILURE, Clock, FakeEngine

METRICS = [
    "wall_s",
    "requests_completed",
    "requests_failed",
    "prompt_tokens",
    "output_tokens",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "tokens_per_s_end_to_end",
    "requests_per_s",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "e2e_ms",
    "kv_tokens",
    "max_concurrency_at_cap",
    "peak_device_mib",
    "finish_reasons",
    "len_p50",
    "len_max",
    "preemptions",
    "forward_tokens",
    "prefix_hit_tokens",
    "running_p50",
    "running_max",
    "kv_used_max",
]


def decode(**sampling: object) -> Workload:
    """Two requests, prompts of 3 tokens, outputs of 4."""
    defaults = SamplingParams(**sampling)  # type: ignore[arg-type]
    return load_workload(
        "decode:requests=2,prompt=3,output=4",
        defaults=defaults,
        read_jsonl=lambda path, defaults: [],
    )


def bench(workload: Workload, engine: FakeEngine, **options: object) -> BenchResult:
    given = {"warmup": 0, "repeats": 1, "clock": engine.clock, **options}
    return run_bench(engine, workload, **given)  # type: ignore[arg-type]


def test_the_figures_of_one_repeat() -> None:
    result = bench(decode(), FakeEngine(Clock(), step_s=(0.5,)))
    metrics = result.metrics
    assert list(metrics) == METRICS
    assert metrics["wall_s"] == 2.0
    assert (metrics["requests_completed"], metrics["requests_failed"]) == (2, 0)
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (6, 8)
    assert metrics["output_tokens_per_s"] == 4.0
    assert metrics["total_tokens_per_s"] == 7.0
    assert metrics["requests_per_s"] == 1.0
    assert metrics["ttft_ms"]["p50"] == 500.0  # type: ignore[index]
    assert metrics["tpot_ms"]["mean"] == 500.0  # type: ignore[index]
    assert metrics["itl_ms"]["std"] == 0.0  # type: ignore[index]
    assert metrics["e2e_ms"]["p99"] == 2000.0  # type: ignore[index]
    assert (metrics["kv_tokens"], metrics["max_concurrency_at_cap"]) == (640, 2.5)
    assert metrics["peak_device_mib"] is None
    assert metrics["finish_reasons"] == {"stop": 0, "length": 2, "abort": 0}
    assert (metrics["len_p50"], metrics["len_max"]) == (4, 4)
    assert (metrics["preemptions"], metrics["forward_tokens"]) == (4, 8)
    assert (metrics["running_p50"], metrics["running_max"]) == (2.0, 2)
    assert metrics["kv_used_max"] == 4 / 40


def test_metrics_are_medians_and_the_spread_is_kept() -> None:
    engine = FakeEngine(Clock(), step_s=(1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4))
    result = bench(decode(), engine, repeats=3)
    assert result.samples["wall_s"] == [4.0, 8.0, 16.0]
    assert result.metrics["wall_s"] == 8.0
    assert result.metrics["output_tokens_per_s"] == 1.0
    assert result.spread["output_tokens_per_s"] == (0.5, 2.0)
    assert result.metrics["ttft_ms"]["median"] == 2000.0  # type: ignore[index]
    assert result.samples["ttft_ms"] == [[1000.0] * 2, [2000.0] * 2, [4000.0] * 2]
    assert result.samples["forward_tokens"] == [8, 8, 8]


def test_counts_stay_whole_over_an_even_number_of_repeats() -> None:
    engine = FakeEngine(Clock(), step_s=(1, 1, 1, 1, 3, 3, 3, 3))
    metrics = bench(decode(), engine, repeats=2).metrics
    assert metrics["wall_s"] == 8.0
    assert all(type(metrics[name]) is int for name in METRICS if name.startswith("len_"))
    assert type(metrics["output_tokens"]) is int


def test_warm_ups_are_not_timed() -> None:
    engine = FakeEngine(Clock(), step_s=(9, 9, 9, 9, 1, 1, 1, 1))
    result = bench(decode(), engine, warmup=1)
    assert result.metrics["wall_s"] == 4.0
    assert result.metrics["forward_tokens"] == 8
    assert engine.steps == 8


def test_a_full_engine_makes_the_next_request_wait_for_its_first_token() -> None:
    result = bench(decode(), FakeEngine(Clock(), step_s=(1,), max_num_seqs=1))
    assert result.samples["ttft_ms"] == [[1000.0, 5000.0]]
    assert result.samples["e2e_ms"] == [[4000.0, 8000.0]]
    assert result.samples["tpot_ms"] == [[1000.0, 1000.0]]


def test_samples_of_one_request_count_its_prompt_once() -> None:
    result = bench(decode(n=3), FakeEngine(Clock()))
    assert (result.metrics["prompt_tokens"], result.metrics["output_tokens"]) == (6, 24)
    assert result.metrics["requests_completed"] == 2
    assert result.samples["sample_output_tokens"] == [[4] * 6]


def test_single_tokens_have_no_time_between_tokens() -> None:
    workload = load_workload(
        "decode:requests=2,prompt=3,output=1",
        defaults=SamplingParams(),
        read_jsonl=lambda path, defaults: [],
    )
    result = bench(workload, FakeEngine(Clock()))
    assert result.metrics["tpot_ms"] is None
    assert result.metrics["itl_ms"] is None
    assert result.samples["tpot_ms"] == [[None, None]]


def test_a_failed_request_is_counted_and_has_no_latency() -> None:
    result = bench(decode(), FakeEngine(Clock(), step_s=(1,), fails=frozenset({1})))
    metrics = result.metrics
    assert (metrics["requests_completed"], metrics["requests_failed"]) == (1, 1)
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (3, 4)
    assert metrics["finish_reasons"] == {"stop": 0, "length": 1, "abort": 0}
    assert result.samples["e2e_ms"] == [[4000.0, None]]
    assert result.failures == (FAILURE,)


def test_a_bench_in_which_all_fail_has_rates_of_zero() -> None:
    result = bench(decode(), FakeEngine(Clock(), fails=frozenset({0, 1})))
    assert result.metrics["output_tokens_per_s"] == 0.0
    assert result.metrics["ttft_ms"] is None
    assert result.metrics["len_p50"] is None
    assert "len_p50" not in result.spread


def test_a_sample_that_departs_from_an_exact_length_is_a_fault_of_ours() -> None:
    with pytest.raises(RuntimeError, match="request 1 gave 2 tokens, not 4"):
        bench(decode(), FakeEngine(Clock(), stops={1: 2}))


def test_a_file_may_stop_early() -> None:
    workload = replace(decode(), exact_lengths=False)
    metrics = bench(workload, FakeEngine(Clock(), stops={1: 2})).metrics
    assert metrics["finish_reasons"] == {"stop": 1, "length": 1, "abort": 0}
    assert metrics["output_tokens"] == 6


def test_preparing_the_requests_counts_end_to_end_only() -> None:
    metrics = bench(decode(), FakeEngine(Clock()), prepare_s=2.0).metrics
    assert metrics["output_tokens_per_s"] == 4.0
    assert metrics["tokens_per_s_end_to_end"] == 2.0


def test_the_peak_of_memory_is_that_of_all_repeats() -> None:
    peaks = iter([5, 9, 7])
    result = bench(decode(), FakeEngine(Clock()), repeats=3, peak_device_mib=lambda: next(peaks))
    assert result.metrics["peak_device_mib"] == 9


def test_every_run_starts_with_a_cold_prefix_cache() -> None:
    """Every run serves the same prompts: a warm cache would turn its prefills into hits."""
    prompt = tuple(range(3, 53))
    requests = tuple(
        Request(
            id=number,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=4, ignore_eos=True),
        )
        for number in range(3)
    )
    workload = replace(decode(), requests=requests)
    with Engine(EngineConfig(model="embedded")) as engine:
        result = run_bench(engine, workload, warmup=1, repeats=2)
    assert result.samples["forward_tokens"] == [53 + 2 * 5] * 2  # followers find 48 of 50
    assert result.samples["prefix_hit_tokens"] == [2 * 48] * 2


@pytest.mark.parametrize(
    ("exact", "shown"),
    [
        (True, [(2, 8), (4, 8), (6, 8), (8, 8)]),
        (False, [(0, 2), (0, 2), (0, 2), (2, 2)]),
    ],
)
def test_progress_is_told_after_every_step(exact: bool, shown: list[tuple[int, int]]) -> None:
    calls: list[tuple[int, int, str]] = []
    bench(
        replace(decode(), exact_lengths=exact),
        FakeEngine(Clock()),
        warmup=1,
        repeats=2,
        progress=lambda *call: calls.append(call),
    )
    assert [call[:2] for call in calls] == shown * 3
    assert [call[2] for call in calls[:: len(shown)]] == [
        "warm-up 1 of 1",
        "repeat 1 of 2",
        "repeat 2 of 2",
    ]


def test_the_clock_is_read_once_before_the_work_and_once_after_each_step() -> None:
    engine = FakeEngine(Clock())
    reads: list[int] = []

    def clock() -> float:
        reads.append(engine.steps)
        return engine.clock()

    bench(decode(), engine, clock=clock)
    assert reads == [0, 1, 2, 3, 4]


def test_an_id_may_be_text() -> None:
    requests = [
        Request(id=name, prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=count))
        for name, count in (("a", 1), ("b", 3))
    ]
    workload = replace(decode(), requests=tuple(requests), exact_lengths=False)
    result = bench(workload, FakeEngine(Clock(), step_s=(1,)))
    assert result.samples["e2e_ms"] == [[1000.0, 3000.0]]
    assert (result.metrics["len_p50"], result.metrics["len_max"]) == (3, 3)


def test_what_ends_a_bench_early_leaves_the_finished_repeats() -> None:
    engine = FakeEngine(Clock(), step_s=(1,))
    kept: list[BenchResult] = []

    def stop_in_the_third(done: int, total: int, text: str) -> None:
        if text == "repeat 3 of 3" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(decode(), engine, repeats=3, progress=stop_in_the_third, keep=kept.append)
    (result,) = kept
    assert result.samples["wall_s"] == [4.0, 4.0]
    assert result.metrics["output_tokens"] == 8


def test_a_bench_that_ends_in_its_first_repeat_has_nothing_to_keep() -> None:
    kept: list[BenchResult] = []

    def stop(done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(decode(), FakeEngine(Clock()), progress=stop, keep=kept.append)
    assert kept == []
