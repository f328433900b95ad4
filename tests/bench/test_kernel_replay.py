"""Device times: of a CUDA graph's launches, in proportion to the work."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pagedctl.bench.kernels.ceilings import Ceilings
from pagedctl.bench.kernels.replay import Timing, launched, replayed


@pytest.mark.gpu
@pytest.mark.parametrize("measure", [replayed, launched])
def test_a_launch_of_twice_the_bytes_takes_twice_the_time(measure: object) -> None:
    assert callable(measure)
    sizes = {"one": 2**27, "two": 2**28}
    candidates = {
        name: [partial(torch.randn(size, device="cuda").clone) for _ in range(3)]
        for name, size in sizes.items()
    }
    found = measure(candidates, trials=3)
    assert 1.7 < found["two"].us / found["one"].us < 2.3
    assert all(len(timing.trials_us) == 3 for timing in found.values())
    assert 2 * 4 * sizes["one"] / found["one"].us < 8e6, "no memory copies 8 TB/s"


def test_a_floor_is_the_larger_of_bytes_and_operations() -> None:
    ceilings = Ceilings(read=100.0, multiply=10.0)
    assert ceilings.floor_us(1000, 10) == 10.0
    assert ceilings.floor_us(1000, 1000) == 100.0


def test_a_ratio_is_that_of_neighbouring_trials() -> None:
    drifting = Timing(trials_us=(10.0, 20.0, 40.0))
    twice = Timing(trials_us=(20.0, 40.0, 80.0))
    assert twice.over(drifting) == 2.0
    assert (twice.us, twice.spread_us) == (40.0, 60.0)
