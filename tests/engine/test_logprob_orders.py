"""Logprob orders: they move the reported logprobs alone, and each is the sum that it names."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.request import Completion, Request, SamplingParams
from pagedctl.errors import ConfigError, NumericsRefused
from pagedctl.manifest import strict_json
from pagedctl.numerics.logprob_order import parse_logprob_order
from pagedctl_kernels import sites
from tests.engine.harness import Trace, run, tiny_engine
from tests.reference.tiny_models import VOCAB, tiny_model

MODEL = tiny_model("qwen3", seed=3)
WIDTHS = (33, 11, 3)
FORMS = ("blockwise", "blockwise-direct")
CUTTING = tuple(f"{form}-{width}" for form in FORMS for width in WIDTHS)
ORDERS = ("torch", *FORMS, f"blockwise-{VOCAB}", *CUTTING)
CONTRACTS = ("fast", "invariant", "rl-bitwise")


def some_requests(seed: int) -> list[Request]:
    """Random prompts: greedy and at T = 1, some truncated, some with their likeliest tokens."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            id=number,
            prompt_token_ids=tuple(rng.integers(1, VOCAB, int(rng.integers(1, 30))).tolist()),
            params=SamplingParams(
                n=1 + number % 2,
                temperature=float(number % 2),
                top_k=[0, 20][number // 2 % 2],
                max_tokens=int(rng.integers(4, 12)),
                ignore_eos=True,
                top_logprobs=[0, 5, VOCAB][number % 3],
                prompt_logprobs=number % 4 < 2,
            ),
        )
        for number in range(10)
    ]


@cache
def traced(order: str, contract: str = "invariant", seed: int = 0) -> Trace:
    with TemporaryDirectory() as folder:
        engine = tiny_engine(
            MODEL,
            Path(folder),
            dtype=torch.float32,
            numerics=contract,
            unverified=True,
            logprob_order=order,
            prefix_cache=False,
            max_num_batched_tokens=24,
            run_seed=seed,
        )
        with engine:
            return run(engine, some_requests(seed))


def float_bits(values: Any) -> list[int]:
    found: list[int] = np.asarray(values, dtype=np.float32).view(np.int32).tolist()
    return found


def logprob_bits(trace: Trace) -> list[int]:
    """Every reported float of a run, by its bits."""
    return [
        bit
        for key in sorted(trace.completions)
        for done in [trace.completions[key]]
        for part in (
            done.logprobs,
            [] if done.prompt_logprobs is None else done.prompt_logprobs,
            [] if done.top_logprobs is None else done.top_logprobs.logprobs.ravel(),
        )
        for bit in float_bits(part)
    ]


def block_sum(exponentials: torch.Tensor, width: int) -> torch.Tensor:
    """[V] -> []: blocks of *width* columns, each in a halving tree, added left to right."""
    sums = []
    for start in range(0, len(exponentials), width):
        block = exponentials[start : start + width]
        size = 1 << (min(width, len(block)) - 1).bit_length()
        block = torch.cat([block, block.new_zeros(size - len(block))])
        while len(block) > 1:
            block = block[: len(block) // 2] + block[len(block) // 2 :]
        sums.append(block[0])
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total


def by_definition(logits: torch.Tensor, token: int, order: str) -> torch.Tensor:
    """The logprob of *token* at T = 1 as its order says it, step by step in float32."""
    parsed = parse_logprob_order(order)
    shifted = logits - logits.max()
    log_total = torch.log(block_sum(torch.exp(shifted), parsed.block_size))
    if parsed.form == "blockwise":
        return -(log_total - shifted[token])
    return shifted[token] - log_total


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_order_moves_a_sampled_id_or_a_bit_of_a_logit(contract: str, seed: int) -> None:
    orders = [one for one in ORDERS if (contract, one) != ("rl-bitwise", "torch")]
    plain = traced("torch", seed=seed) if contract != "fast" else traced("torch", contract, seed)
    assert plain.max_rows >= 4
    for order in orders:
        trace = traced(order, contract, seed)
        assert trace.completions.keys() == plain.completions.keys()
        for key, done in plain.completions.items():
            assert trace.completions[key].token_ids.tolist() == done.token_ids.tolist()
            ours, theirs = trace.logits[key], plain.logits[key]
            assert len(ours) == len(theirs) == len(done.token_ids)
            assert torch.equal(torch.stack(ours), torch.stack(theirs))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_logprobs_do_differ_where_blocks_cut_the_vocabulary(seed: int) -> None:
    plain = logprob_bits(traced("torch", seed=seed))
    for order in CUTTING:
        assert logprob_bits(traced(order, seed=seed)) != plain, order
    uncut = logprob_bits(traced(f"blockwise-{VOCAB}", seed=seed))
    assert uncut == logprob_bits(traced("blockwise", seed=seed))
    assert logprob_bits(traced("blockwise-direct", seed=seed)) == plain
    by_width = [logprob_bits(traced(f"blockwise-{width}", seed=seed)) for width in WIDTHS]
    assert len({tuple(bits) for bits in by_width}) == len(WIDTHS)


@pytest.mark.parametrize("order", ORDERS)
def test_every_logprob_is_the_sum_that_its_order_names(order: str) -> None:
    trace = traced(order)
    checked = 0
    for key, done in trace.completions.items():
        for place, token in enumerate(done.token_ids.tolist()):
            logits = trace.logits[key][place]
            want = by_definition(logits, token, order)
            assert float_bits(done.logprobs[place : place + 1]) == float_bits([want.item()])
            if done.top_logprobs is not None:
                for other, value in entries(done, place).items():
                    want = by_definition(logits, other, order)
                    assert float_bits([value]) == float_bits([want.item()])
            checked += 1
    assert checked > 50


def entries(done: Completion, place: int) -> dict[int, float]:
    assert done.top_logprobs is not None
    ids = done.top_logprobs.token_ids[place].tolist()
    return dict(zip(ids, done.top_logprobs.logprobs[place].tolist(), strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_the_sampled_token_among_the_likeliest_has_its_logprob_bit_for_bit(order: str) -> None:
    seen = 0
    for done in traced(order).completions.values():
        for place, token in enumerate(done.token_ids.tolist()):
            if done.top_logprobs is not None and token in (found := entries(done, place)):
                assert float_bits([found[token]]) == float_bits(done.logprobs[place : place + 1])
                seen += 1
    assert seen > 20


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("case", ["one allowed id", "a temperature near zero"])
@pytest.mark.parametrize(
    ("order", "negative"),
    [
        ("torch", False),
        ("blockwise", True),
        ("blockwise-33", True),
        ("blockwise-direct", False),
        ("blockwise-direct-33", False),
    ],
)
def test_the_zero_of_a_certain_token_has_the_sign_of_its_order(
    order: str, negative: bool, case: str, contract: str, tmp_path: Path
) -> None:
    """-(log(sum) - target) is -0.0 and target - log(sum) is +0.0, down to the line in a file."""
    if (contract, order) == ("rl-bitwise", "torch"):
        order = "blockwise-direct"
    one_id = case == "one allowed id"
    engine = tiny_engine(
        MODEL,
        tmp_path,
        dtype=torch.float32,
        numerics=contract,
        unverified=True,
        logprob_order=order,
        logprob_basis="processed" if one_id else "scaled",
    )
    params = SamplingParams(
        max_tokens=3,
        ignore_eos=True,
        top_logprobs=1,
        **({"allowed_token_ids": (41,)} if one_id else {"temperature": 1e-9}),  # type: ignore[arg-type]
    )
    with engine:
        (done,) = engine.generate([Request(id=0, prompt_token_ids=(5, 6, 7), params=params)])
    assert not one_id or done.token_ids.tolist() == [41] * 3
    assert done.top_logprobs is not None
    zero = -0.0 if negative else 0.0
    assert float_bits(done.logprobs) == float_bits([zero] * 3)
    assert float_bits(done.top_logprobs.logprobs.ravel()) == float_bits([zero] * 3)
    written = json.loads(strict_json.dumps({"logprobs": done.logprobs}))["logprobs"]
    assert [math.copysign(1, value) for value in written] == [-1.0 if negative else 1.0] * 3


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("form", FORMS)
def test_an_explicit_width_that_does_not_divide_the_vocabulary_is_refused(
    contract: str, form: str, tmp_path: Path
) -> None:
    with pytest.raises(NumericsRefused) as caught:
        tiny_engine(MODEL, tmp_path, numerics=contract, unverified=True, logprob_order=f"{form}-16")
    assert caught.value.lines() == [
        "error: block width 16 leaves 3 columns",
        "where: option logprob_order, set by argument",
        "rule: an explicit width divides the (padded) vocabulary of 99",
        "remedy: give the trainer's shard width, or the order without a width",
    ]


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_padded_vocabulary_is_what_a_width_has_to_divide(contract: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "numerics": contract,
        "unverified": True,
        "dtype": torch.float32,
        "logprob_order": "blockwise-16",
    }
    with tiny_engine(MODEL, tmp_path / "a", padded_vocab_size=112, **options) as engine:
        trace = run(engine, some_requests(1)[:3])
    for key, done in trace.completions.items():
        token = int(done.token_ids[0])
        want = by_definition(trace.logits[key][0], token, "blockwise-16")
        assert float_bits(done.logprobs[:1]) == float_bits([want.item()])
    with pytest.raises(NumericsRefused) as caught:
        tiny_engine(MODEL, tmp_path / "b", padded_vocab_size=104, **options)
    assert caught.value.lines()[:3] == [
        "error: block width 16 leaves 8 columns",
        "where: option logprob_order, set by argument",
        "rule: an explicit width divides the (padded) vocabulary of 104",
    ]
    with pytest.raises(NumericsRefused) as caught:
        tiny_engine(MODEL, tmp_path / "c", padded_vocab_size=96, **options)
    assert caught.value.lines() == [
        "error: padded_vocab_size 96 is below the vocabulary",
        "where: option padded_vocab_size, set by argument",
        "rule: at least the model's 99",
        "remedy: give the trainer's padded size, or leave it out",
    ]


@pytest.mark.parametrize("order", ["megatron", "blockwise-", "blockwise--33", "Torch", "torch-33"])
def test_an_unknown_order_is_refused_to_programs_too(order: str, tmp_path: Path) -> None:
    for contract in CONTRACTS:
        with pytest.raises(ConfigError, match="logprob_order"):
            tiny_engine(MODEL, tmp_path, numerics=contract, logprob_order=order)
    with pytest.raises(ValueError, match="is not a logprob order"):
        parse_logprob_order(order)
    with pytest.raises(ValueError, match="form"):
        sites.logprob_site("logprob", dtype="float32", form=order)
