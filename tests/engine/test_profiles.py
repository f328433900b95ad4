"""Each shipped profile is earned: the bits of a request do not follow what shares its batch.

The cases are read from the profiles, so that none is shipped without its proof here. Chunks,
pools, preemption, lag and prefix hits are proved in ``test_batch_invariance.py`` for the same
families and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request
from pagedctl.numerics.profiles import (
    NARROWER_KV,
    PROFILES,
    PROVED,
    PROVED_FORMS,
    Profile,
)
from pagedctl.numerics.switches import FIXED, SWITCHES
from tests.engine.harness import Trace, run, tiny_engine
from tests.engine.test_batch_invariance import DTYPES, PIECES, assert_equal_traces, request
from tests.reference.tiny_models import FAMILIES, TinyModel, tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
BOTH_YARN = ("yarn_ramp_mask_device", "yarn_frequency_device")


def asked() -> list[Request]:
    """Requests of every kind, but for those whose logprobs some basis or order lacks."""
    rng = np.random.default_rng(6)
    found = [request(number, rng, tokens=8, longest_prompt=24) for number in range(16)]
    return [one for one in found if not (one.params.prompt_logprobs or one.params.top_logprobs)]


def build(folder: Path, model: TinyModel, dtype: str, **options: Any) -> Engine:
    chosen: dict[str, Any] = {"dtype": DTYPES[dtype], "block_size": 4, "pieces": PIECES, **options}
    return tiny_engine(model, folder, **chosen)


def alone(open_engine: Callable[..., Engine]) -> Trace:
    """Every request by itself and cold."""
    trace = Trace()
    with open_engine(prefix_cache=False, max_num_seqs=1) as engine:
        for one in asked():
            own = run(engine, [one])
            assert (own.max_rows, own.hit_tokens) == (1, 0)
            trace.completions |= own.completions
            trace.logits |= own.logits
    return trace


def assert_packed_as_alone(open_engine: Callable[..., Engine]) -> Trace:
    """Packed at random, twice, against alone; what each gives alone."""
    single = alone(open_engine)
    arrivals = {number: number % 4 for number in range(len(asked()))}
    with open_engine() as engine:
        packed = run(engine, asked(), arrivals=arrivals)
        warm = run(engine, asked()[::-1], arrivals=arrivals)
    assert packed.max_rows > 4
    assert warm.hit_tokens > 0
    assert_equal_traces(packed, single)
    assert_equal_traces(warm, single)
    return single


def kv_dtypes(profile: Profile) -> tuple[str, ...]:
    return ("auto", *NARROWER_KV.get(profile.dtype, ()))


@pytest.mark.parametrize(
    ("profile", "kv_dtype"),
    [(one, kv_dtype) for one in PROFILES for kv_dtype in kv_dtypes(one)],
    ids=lambda value: str(value).removeprefix("profile "),
)
def test_a_profile_is_earned(tmp_path: Path, profile: Profile, kv_dtype: str) -> None:
    model, count = tiny_model(profile.family), iter(range(9))

    def open_engine(**options: Any) -> Engine:
        folder = tmp_path / str(next(count))
        engine = build(folder, model, profile.dtype, kv_dtype=kv_dtype, **options)
        numerics = engine.manifest().numerics
        assert numerics is not None
        assert (numerics.contract, numerics.verified) == (profile.contract, True)
        assert numerics.eligible_by == str(profile)
        return engine

    assert_packed_as_alone(open_engine)


def test_the_profiles_are_those_that_the_tests_have_models_for() -> None:
    assert {(one.family, one.dtype) for one in PROFILES} == {
        (family, dtype) for family in FAMILIES for dtype in DTYPES
    }
    assert {(one.device_class, one.contract) for one in PROFILES} == {("cpu", "invariant")}
    assert len(set(PROFILES)) == len(PROFILES) == 16


# -- switches --------------------------------------------------------------------------------


def other_values() -> Iterator[dict[str, Any]]:
    """Every value of a switch that the profiles cover and that is not the house's own."""
    for name, values in PROVED.items():
        if name in BOTH_YARN:
            continue
        yield from ({name: value} for value in values[1:])
    for form in PROVED_FORMS[1:]:
        yield {"logprob_order": form}
        yield {"logprob_order": f"{form}-33"}
    yield {"logprob_order": "blockwise-64", "padded_vocab_size": 128}
    yield {"padded_vocab_size": 128}
    yield from ({name: "cpu"} for name in BOTH_YARN)
    yield dict.fromkeys(BOTH_YARN, "cpu")


SAME_ARITHMETIC = ({"padded_vocab_size": 128},)
"""Padding columns add exact zeros."""


@cache
def house(yarn: bool) -> tuple[str, Trace]:
    """The arithmetic_id of the house's own values, and what each request gives by itself."""
    with TemporaryDirectory() as folder:
        open_engine = opener(Path(folder), yarn, {})
        with open_engine() as engine:
            identity = engine.parts.plans.arithmetic_id
        return identity, alone(open_engine)


def opener(folder: Path, yarn: bool, switches: dict[str, Any]) -> Callable[..., Engine]:
    model = tiny_model("qwen3", rope_scaling=YARN) if yarn else tiny_model("llama")
    count = iter(range(9))

    def open_engine(**options: Any) -> Engine:
        place = folder / str(next(count))
        return build(place, model, "bfloat16", numerics="invariant", **switches, **options)

    return open_engine


@pytest.mark.parametrize(
    "switches",
    list(other_values()),
    ids=lambda one: ",".join(f"{name}={value}" for name, value in one.items()),
)
def test_a_value_of_a_switch_that_the_profiles_cover_is_proved(
    tmp_path: Path, switches: dict[str, Any]
) -> None:
    """The value is in force: the arithmetic is another one, or what the requests give is."""
    yarn = any(name in BOTH_YARN for name in switches)
    single = assert_packed_as_alone(opener(tmp_path, yarn, switches))
    with opener(tmp_path / "said", yarn, switches)() as engine:
        numerics = engine.manifest().numerics
        assert numerics is not None
        assert numerics.verified
        for name, value in switches.items():
            assert numerics.switches[name].value == value
    identity, house_alone = house(yarn)
    assert numerics.arithmetic_id is not None
    moved = (numerics.arithmetic_id, bits(single)) != (identity, bits(house_alone))
    assert moved == (switches not in SAME_ARITHMETIC)


def bits(trace: Trace) -> dict[Any, tuple[list[int], bytes]]:
    return {
        key: (one.token_ids.tolist(), one.logprobs.tobytes())
        for key, one in trace.completions.items()
    }


def test_a_switch_without_a_proof_would_be_seen() -> None:
    """Every switch of the tree is in one of the two tables, and no other name."""
    beside = {"logprob_order", "padded_vocab_size"}
    assert set(PROVED) | beside == {one.name for one in SWITCHES} | set(FIXED)
    proved = [name for one in other_values() for name in one]
    for one in SWITCHES:
        held = PROVED.get(one.name, ("",))
        assert (one.name in proved) == (len(held) > 1 or one.name in beside), one.name
        if one.name not in beside:
            assert set(held) <= set(one.values), one.name


def test_logits_that_follow_the_batch_fail_the_proof(tmp_path: Path) -> None:
    """A mutant moves every logit by one unit where rows share a step."""
    met: list[int] = []
    count = iter(range(9))

    def open_engine(**options: Any) -> Engine:
        engine = build(tmp_path / str(next(count)), tiny_model("llama"), "float32", **options)
        sampler = engine.parts.runner.sampler
        plain: Callable[..., Any] = sampler.sample

        def mutant(logits: torch.Tensor, *rest: Any) -> Any:
            met.append(len(logits))
            shared = torch.nextafter(logits, torch.full_like(logits, torch.inf))
            return plain(shared if len(logits) > 1 else logits, *rest)

        sampler.sample = mutant  # type: ignore[method-assign]
        return engine

    with pytest.raises(AssertionError):
        assert_packed_as_alone(open_engine)
    assert {1} < set(met)
