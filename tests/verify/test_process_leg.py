"""Another process runs the same legs: a job file in, answers out, bit for bit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import PagedctlError
from pagedctl.manifest import strict_json
from pagedctl.verify import process_leg
from pagedctl.verify.case_legs import packed_leg
from pagedctl.verify.comparison import Answer, first_difference
from pagedctl.verify.leg_json import (
    config_from_json,
    config_to_json,
    leg_from_json,
    leg_to_json,
    trace_from_json,
    trace_to_json,
)
from pagedctl.verify.legs import Leg, LegTrace, Probe
from tests.verify.invariance_harness import subject, tiny_config


def through_json(value: object) -> object:
    return strict_json.loads(strict_json.dumps(value), where="job")


def test_a_leg_comes_through_json_as_it_was() -> None:
    request = Request(
        id="q",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(seed=5, stop_token_ids=(7, 8), logit_bias=((1, 0.5),)),
        cache_salt="salt",
    )
    leg = Leg(
        name="leg",
        order="other",
        probes=(Probe(request=request, of=request, first=1, end=3, cached_tokens=16),),
        fillers=(replace(request, id=9),),
        options={"lag": 1, "kv_cache_memory_bytes": 1 << 20, "prefix_cache": False},
        arrivals=3,
        rows=64,
        needs=("preemptions",),
        continues=True,
        fillers_first=True,
    )
    assert leg_from_json(through_json(leg_to_json(leg))) == leg  # type: ignore[arg-type]


def test_a_configuration_comes_through_json_with_its_origins(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, leaf=("gemm=torch.gemm_packed",))
    found = config_from_json(through_json(config_to_json(config)))  # type: ignore[arg-type]
    assert found == config
    assert found.origins == config.origins


def test_answers_come_through_json_with_every_bit() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, 4000, dtype=np.int64).astype(np.int32)
    answer = Answer(
        start=3,
        token_ids=rng.integers(0, 1 << 17, 4000).astype(np.int32),
        logprobs=bits.view(np.float32),
        failure="non_finite",
    )
    trace = LegTrace(
        answers={("q", 0): answer, (4, 1): answer},
        cached_tokens={("q", 0): 16},
        rows={1: 2, 65: 3},
        chunk_splits=1,
        overshoots=2,
        preemptions=3,
        prefix_hit_tokens=4,
    )
    found = trace_from_json(through_json(trace_to_json(trace)))  # type: ignore[arg-type]
    assert (found.rows, found.cached_tokens) == (trace.rows, trace.cached_tokens)
    assert [found.counter(name) for name in ("chunk_splits", "overshoots", "preemptions")] == [
        1,
        2,
        3,
    ]
    assert found.answers.keys() == trace.answers.keys()
    for one in found.answers.values():
        assert first_difference(answer, one) is None


def test_another_process_gives_the_same_bits_in_the_same_steps(tmp_path: Path) -> None:
    """vllm-project/vllm#51187: two process lifetimes, 48 rows and more, logprobs compared."""
    with subject(tmp_path, requests=5) as (made, engines):
        leg = packed_leg(made, "batch", 64)
        ((_, here),) = engines.traces([leg])
        (there,) = process_leg.traces_of_process(made.config, [leg], number=2, environ=os.environ)
        assert here.rows == there.rows
        assert max(there.rows) >= 48
        for probe in leg.probes:
            answer = there.answers[probe.request.id, 0]
            assert first_difference(made.reference.expected(probe, 0), answer) is None


@pytest.mark.parametrize("taken", [None, "2", "3", "random"])
def test_every_process_has_a_hash_seed_of_its_own(taken: str | None) -> None:
    environ = {} if taken is None else {"PYTHONHASHSEED": taken}
    seeds = [process_leg._other_hash_seed(environ, number) for number in (2, 3, 4)]
    assert len({*seeds, taken}) == 4
    assert all(0 <= int(seed) < 2**32 for seed in seeds)


def test_a_process_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    leg = Leg(name="leg", probes=(), options={"kv_cache_memory_bytes": 1})
    with pytest.raises(PagedctlError) as caught:
        process_leg.traces_of_process(config, [leg], number=2, environ=os.environ)
    assert caught.value.what.startswith("process 2 ended with code 2: error: the pool")
    assert caught.value.where == "case process"
