"""The decoder over the accelerator's leaves: the right logits, and a row's bits its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.harness import assert_same_bits
from tests.kernels.triton.harness import DEVICE
from tests.models.decoder_harness import DeviceDecoder, plans_of
from tests.reference.tiny_models import FAMILIES, VOCAB, tiny_model

# Largest error of a logit over the largest logit; two layers, each rounding to D many times.
TOLERANCE = {"float32": 2e-6, "float16": 1e-2, "bfloat16": 8e-2}
DTYPES = [
    "float32",
    "float16",
    pytest.param("bfloat16", marks=pytest.mark.gpu),
]
ON_GPU = DEVICE == "cuda"
LENGTHS = (300, 41, 17, 1) if ON_GPU else (21, 9, 1)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def decoder(family: str, dtype: str, **options: Any) -> DeviceDecoder:
    return DeviceDecoder(tiny_model(family, num_hidden_layers=2), prompts(), dtype=dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_float64_reference(family: str, dtype: str) -> None:
    device = decoder(family, dtype)
    narrowed = tiny_model(family, num_hidden_layers=2)
    for got, ids in zip(device.whole(), device.sequences, strict=True):
        want = narrowed.reference().logits(ids)
        error = np.abs(got.double().cpu().numpy() - want).max() / np.abs(want).max()
        assert error < TOLERANCE[dtype]


def replayed(device: DeviceDecoder) -> list[torch.Tensor]:
    """Logits of every position by packed, chunked and single-token steps."""
    longest, *others = range(len(device.sequences))
    pieces: list[list[torch.Tensor]] = [[] for _ in device.sequences]

    def step(*spans: tuple[int, int, int]) -> None:
        for (sequence, *_), logits in zip(spans, device.step(spans), strict=True):
            pieces[sequence].append(logits)

    length = len(device.sequences[longest])
    ends = {i: len(device.sequences[i]) for i in others}
    step((longest, 0, length // 3), *((i, 0, ends[i] - 1) for i in others if ends[i] > 1))
    step(*((i, ends[i] - 1, ends[i]) for i in reversed(others)), (longest, length // 3, length - 3))
    for position in range(length - 3, length):
        step((longest, position, position + 1))
    return [torch.cat(parts) for parts in pieces]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_prefill_chunks_and_decodes_in_any_company_give_the_same_bits(
    family: str, dtype: str
) -> None:
    """On a GPU alone: the interpreter's products follow the tile."""
    whole = decoder(family, dtype).whole()
    other = decoder(family, dtype, seed=5, block_size=32 if ON_GPU else 16)
    for got, want in zip(replayed(other), whole, strict=True):
        assert_same_bits(got.cpu(), want.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_tokens_and_logprobs_are_a_rows_own(dtype: str) -> None:
    device = decoder("qwen3", dtype)
    logits = torch.cat(device.whole())
    count = len(logits)
    columns = {
        "temperature": [0.0, 1.0, 0.7][:3] * (-(-count // 3)),
        "top_p": [1.0, 0.9, 1.0, 0.5] * (-(-count // 4)),
        "seed": list(range(count)),
        "position": list(range(7, 7 + count)),
    }
    columns = {name: values[:count] for name, values in columns.items()}
    packed = device.sampled(logits, **columns)
    assert not packed.faulty.any()
    for row in range(0, count, 7):
        alone = device.sampled(
            logits[row : row + 1], **{name: values[row] for name, values in columns.items()}
        )
        assert torch.equal(alone.token_ids, packed.token_ids[row : row + 1])
        assert_same_bits(alone.logprobs.cpu(), packed.logprobs[row : row + 1].cpu())


@pytest.mark.gpu
def test_a_leaf_whose_bits_follow_the_batch_is_seen() -> None:
    """The same replay over an activation that adds an ulp in steps of more than 16 rows."""
    plain = decoder("qwen3", "float32")
    for got, want in zip(replayed(plain), decoder("qwen3", "float32").whole(), strict=True):
        assert_same_bits(got.cpu(), want.cpu())
    bound = plans_of(plain.spec).silu_mul
    reached = []

    def mutant(gate_up: torch.Tensor) -> torch.Tensor:
        out = bound.run(gate_up)
        if len(gate_up) > 16:
            reached.append(len(gate_up))
            out = torch.nextafter(out, torch.full_like(out, torch.inf))
        return out

    plans = replace(plans_of(plain.spec), silu_mul=replace(bound, run=mutant))
    whole = decoder("qwen3", "float32", plans=plans).whole()
    got = replayed(decoder("qwen3", "float32", plans=plans))
    assert reached
    assert not all(torch.equal(one, other) for one, other in zip(got, whole, strict=True))
