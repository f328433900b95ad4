"""Weights from a seed: the same on every device, chunk and shard, and normal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch

from pagedctl.models.locate import locate_model
from pagedctl.models.random_weights import (
    RandomWeights,
    distribution_of,
    random_levels,
    random_weights,
    stream_key,
)
from pagedctl.models.resolve import resolve_spec, spec_from_config
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tensor_parallel import local_shape, shard_bounds
from pagedctl.models.weights_digest import weights_digest

Make = Callable[..., Any]
SEED = 7
MASK = 0xFFFFFFFF


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 (Salmon et al. 2011) on Python integers."""
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & MASK,
            (low >> 32) ^ counter[3] ^ key[1],
            low & MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def level(seed: int, name: str, index: int) -> int:
    """The level of one value, from the scheme as it is written down."""
    digest = hashlib.sha256(f"pagedctl.weights/1:{seed}:{name}".encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    block = index // 8
    words = philox_words([block & MASK, block >> 32, 1, 0], [number & MASK, number >> 32])
    bits = sum(word << (32 * place) for place, word in enumerate(words))
    return bits >> (16 * (index % 8)) & 0xFFFF


@pytest.fixture
def spec(config_of: Make) -> ModelSpec:
    """An untied qwen2 (q, k, v biases) whose widths are no multiples of 8."""
    config = config_of("qwen2", hidden_size=68, head_dim=16, intermediate_size=36)
    found: ModelSpec = spec_from_config(config)
    return found


def tensor(spec: ModelSpec, name: str) -> Any:
    return next(one for one in spec.tensors if one.name == name)


# -- the scheme ----------------------------------------------------------------------------


def test_a_value_is_a_function_of_seed_name_and_index(spec: ModelSpec) -> None:
    normal = NormalDist()
    made = random_weights(spec, SEED, device="cpu")
    scales = {
        "model.embed_tokens.weight": 0.02,
        "model.layers.1.self_attn.k_proj.bias": 0.02,
        "model.layers.1.mlp.down_proj.weight": 0.02,
        "lm_head.weight": 4.5 / 68**0.5,
    }
    for name, scale in scales.items():
        flat = made[name].flatten()
        for index in (0, 1, 7, 8, 15, 31, flat.numel() - 1):
            z = normal.inv_cdf((level(SEED, name, index) + 0.5) / 65536)
            assert flat[index].item() == torch.tensor(z * scale, dtype=torch.float32).item()


def test_levels_beyond_32_bits_of_blocks_use_the_second_counter_word() -> None:
    start = 8 * 2**32 - 4
    name = "model.embed_tokens.weight"
    found = random_levels(stream_key(SEED, name), start, start + 8, device=torch.device("cpu"))
    assert found.tolist() == [level(SEED, name, start + place) for place in range(8)]


def test_norms_are_one_and_nothing_else_is_constant(spec: ModelSpec) -> None:
    for name, values in random_weights(spec, SEED, device="cpu").items():
        assert bool((values == 1).all()) == ("norm" in name)


@pytest.mark.parametrize("model", ["embedded", "qwen3-8b", "qwen2.5-0.5b", "mistral-7b-v0.1"])
def test_every_tensor_has_a_distribution(model: str) -> None:
    spec = resolve_spec(locate_model(model))
    kinds = {one.role: distribution_of(spec, one).kind for one in spec.tensors}
    assert kinds["norm"] == ("signs" if spec.tie_word_embeddings else "constant")
    assert kinds["embed_tokens"] == kinds["down_proj"] == "normal"


def test_the_dtypes_are_roundings_of_one_another(spec: ModelSpec) -> None:
    whole = random_weights(spec, SEED, device="cpu")
    for dtype in ("bfloat16", "float16"):
        narrow = random_weights(replace(spec, dtype=dtype), SEED, device="cpu")
        for name, values in narrow.items():
            assert values.dtype == getattr(torch, dtype)
            assert torch.equal(values, whole[name].to(values.dtype))
    wide = random_weights(replace(spec, dtype="float64"), SEED, device="cpu")
    assert all(torch.equal(whole[name], values.float()) for name, values in wide.items())


PINNED = {
    "float32": "sha256:c821fad66d639173ec08019577c909c821851197a153028255f798b889040a8e",
    "bfloat16": "sha256:6516e2d0d74ef044fe601b78568f12773595965a8c36e730a312d98fd4127d53",
}


@pytest.mark.parametrize(("dtype", "digest"), PINNED.items())
def test_the_bits_of_a_seed_never_change(dtype: str, digest: str, spec: ModelSpec) -> None:
    made = random_weights(replace(spec, dtype=dtype), 0, device="cpu")
    assert weights_digest(made.items()) == digest


# -- the same in every part ----------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_a_shard_is_a_slice_of_the_whole(tp: int, spec: ModelSpec) -> None:
    whole = random_weights(spec, SEED, device="cpu")
    for rank in range(tp):
        parts = random_weights(spec, SEED, device="cpu", tp=tp, rank=rank)
        assert list(parts) == list(whole)
        for one in spec.tensors:
            start, stop = shard_bounds(spec, one, tp=tp, rank=rank)
            full, part = whole[one.name], parts[one.name]
            wanted = full[:, start:stop] if one.shard == "columns" else full[start:stop]
            assert part.shape == local_shape(spec, one, tp)
            assert torch.equal(part[: wanted.shape[0]], wanted)
            assert not part[wanted.shape[0] :].any()


def test_rows_are_made_alone(spec: ModelSpec) -> None:
    maker = RandomWeights(spec, SEED, device="cpu")
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"):
        one = tensor(spec, name)
        whole = maker.rows(one, 0, one.shape[0])
        for start, stop in ((0, 1), (3, 4), (5, 17), (31, one.shape[0]), (9, 9)):
            assert torch.equal(maker.rows(one, start, stop), whole[start:stop])


@pytest.mark.parametrize("chunk_values", [1, 7, 8, 1000])
def test_the_chunk_size_changes_no_bit(chunk_values: int, spec: ModelSpec) -> None:
    default = RandomWeights(spec, SEED, device="cpu")
    chunked = RandomWeights(spec, SEED, device="cpu", chunk_values=chunk_values)
    one = tensor(spec, "model.layers.0.mlp.down_proj.weight")
    assert torch.equal(chunked.rows(one, 2, 8), default.rows(one, 2, 8))
    bias = tensor(spec, "model.layers.0.self_attn.q_proj.bias")
    assert torch.equal(chunked.rows(bias, 5, 31), default.rows(bias, 5, 31))


def test_columns_are_a_slice_at_any_chunk_size(spec: ModelSpec) -> None:
    one = tensor(spec, "model.layers.0.mlp.down_proj.weight")
    whole = RandomWeights(spec, SEED, device="cpu").rows(one, 0, one.shape[0])
    for chunk_values in (50, 1000, 100_000):
        maker = RandomWeights(spec, SEED, device="cpu", chunk_values=chunk_values)
        assert torch.equal(maker.columns(one, 5, 31), whole[:, 5:31])


def test_tensors_own_compact_memory(spec: ModelSpec) -> None:
    for rank in range(2):
        for values in random_weights(spec, SEED, device="cpu", tp=2, rank=rank).values():
            assert values.is_contiguous()
            assert values.untyped_storage().nbytes() == values.nbytes


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits() -> None:
    spec = resolve_spec(locate_model("embedded"))
    for dtype in ("float32", "bfloat16"):
        typed = replace(spec, dtype=dtype)
        on_cpu = random_weights(typed, SEED, device="cpu")
        on_gpu = random_weights(typed, SEED, device="cuda")
        assert all(torch.equal(on_cpu[name], on_gpu[name].cpu()) for name in on_cpu)


# -- normal, and independent ---------------------------------------------------------------


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    """4 million values of one matrix, divided by their standard deviation; float64."""
    spec = resolve_spec(locate_model("qwen3-0.6b"))
    one = tensor(spec, "model.embed_tokens.weight")
    rows = RandomWeights(replace(spec, dtype="float64"), SEED, device="cpu").rows(one, 1000, 5000)
    return rows / 0.02


def test_values_are_normal(sample: torch.Tensor) -> None:
    """Moments and tails within five standard errors of those of N(0, 1)."""
    x = sample.flatten()
    n = x.numel()
    assert abs(x.mean()) < 5 * (1 / n) ** 0.5
    assert abs((x**2).mean() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 5 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    for bound in (0.5, 1.0, 2.0, 3.0, 4.0):
        share = 2 * (1 - NormalDist().cdf(bound))
        found = (x.abs() > bound).double().mean()
        assert abs(found - share) < 5 * (share / n) ** 0.5 + 2.0**-16
    assert 4.2 < x.abs().max() < 4.4


def test_values_are_independent(sample: torch.Tensor) -> None:
    """No correlation along rows, columns or the lags of a block, of values or of squares."""
    for x in (sample, sample**2 - 1):
        flat = x.flatten()
        limit = 5 * flat.var() / (flat.numel() - 8192) ** 0.5
        for lag in (1, 2, 3, 4, 5, 6, 7, 8, 16, 1024, 8192):
            assert abs((flat[lag:] * flat[:-lag]).mean()) < limit


def test_seeds_and_names_give_unrelated_values(config_of: Make) -> None:
    spec = spec_from_config(config_of(hidden_size=256, num_attention_heads=4))
    layer = [f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1)]
    first, second = (random_weights(spec, seed, device="cpu") for seed in (0, 1))
    for left, right in (
        (first[layer[0]], first[layer[1]]),
        (first[layer[0]], second[layer[0]]),
        (first[layer[0]], first["model.layers.0.self_attn.o_proj.weight"]),
    ):
        n = left.numel()
        assert abs((left * right).mean()) < 5 * 0.02**2 / n**0.5


# -- logits --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_logits_have_a_standard_deviation_of_about_four_and_a_half(
    tied: bool, config_of: Make
) -> None:
    """Through transformers' own forward pass; no token is sure to repeat itself."""
    transformers = pytest.importorskip("transformers")
    config = config_of(
        "qwen3", hidden_size=256, intermediate_size=512, vocab_size=999, tie_word_embeddings=tied
    )
    made = random_weights(spec_from_config(config), SEED, device="cpu")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    )
    missing, unexpected = model.load_state_dict(made, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    ids = torch.arange(64).view(1, -1) * 13
    with torch.inference_mode():
        logits = model(ids).logits[0]
    assert 4.2 < logits.std() < 4.8
    own = logits.gather(1, ids[0][:, None])
    assert abs(own.mean()) < 4.5
    assert (logits.argmax(dim=1) == ids[0]).sum() < 8
