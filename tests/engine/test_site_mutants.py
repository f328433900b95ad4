"""One product of the model taken over the whole batch at once: seen, at each site by itself.

A library call over many rows adds up in another order than one over few. So the bits of a
request follow its mates, which is what the contract rules out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl_kernels.ops import linear
from pagedctl_kernels.ops.row_blocks import packed_weight
from tests.engine.harness import Trace, run, tiny_engine
from tests.reference.tiny_models import VOCAB, TinyModel, tiny_model

SITES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "head")
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 32}


@cache
def wide_model() -> TinyModel:
    return tiny_model("llama", attention_bias=False, mlp_bias=False, **WIDE)


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(2)
    return [
        Request(
            id=number,
            prompt_token_ids=tuple(rng.integers(1, VOCAB, 9 + number).tolist()),
            params=SamplingParams(seed=number, max_tokens=6, ignore_eos=True),
        )
        for number in range(count)
    ]


@dataclass
class PlainWeights:
    """Weights as they were before a leaf packed them for its library."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def packing(self, weight: torch.Tensor) -> torch.Tensor:
        packed = packed_weight(weight)
        self.pairs.append((packed, weight))
        return packed

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The plain weight of a packed one; another leaf's is plain already."""
        return next((plain for packed, plain in self.pairs if packed is weight), weight)


def batched(engine: Engine, site: str, plain: PlainWeights) -> list[int]:
    """Let *site* of *engine* multiply all rows in one library call; how many rows it met."""
    met: list[int] = []
    leaf: Any = getattr(engine.parts.plans, site).run

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        met.append(len(x))
        return x @ plain.of(weight).T

    leaf.product = product
    return met


def alone_and_packed(folder: Path, site: str | None) -> tuple[Trace, Trace, list[int]]:
    """Request 0 by itself, then among sixteen, on an engine mutated at *site*."""
    plain = PlainWeights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "packed_weight", plain.packing)
        engine = tiny_engine(wide_model(), folder, dtype=torch.float32, prefix_cache=False)
    with engine:
        met = [] if site is None else batched(engine, site, plain)
        alone = run(engine, requests(1))
        packed = run(engine, requests(16))
    assert packed.max_rows == 16
    return alone, packed, met


def same_bits(alone: Trace, packed: Trace) -> bool:
    pairs = zip(alone.logits[0, 0], packed.logits[0, 0], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@cache
def moved_by_the_library() -> bool:
    """Whether this machine's library adds up one row otherwise than many."""
    with TemporaryDirectory() as folder:
        results = [alone_and_packed(Path(folder) / site, site) for site in SITES]
    return any(not same_bits(alone, packed) for alone, packed, _ in results)


def test_the_control_passes(tmp_path: Path) -> None:
    alone, packed, _ = alone_and_packed(tmp_path, None)
    assert same_bits(alone, packed)


@pytest.mark.parametrize("site", SITES)
def test_a_product_over_the_whole_batch_is_reached_and_caught(tmp_path: Path, site: str) -> None:
    alone, packed, met = alone_and_packed(tmp_path, site)
    assert max(met) >= 16
    assert min(met) == 1
    if not moved_by_the_library():
        pytest.skip("this machine's library adds up every number of rows alike")
    assert not same_bits(alone, packed)
