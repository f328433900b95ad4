"""A failed request is rerun once, aside, to say where the finite numbers end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from tests.engine.harness import assert_same_bits, tiny_engine
from tests.reference.tiny_models import tiny_model

PROMPT = tuple(range(3, 40))


def broken_engine(folder: Path, name: str, row: int) -> Engine:
    """An engine over a model whose weight *name* has a NaN in *row*."""
    model = tiny_model("llama")
    tensors = {key: one.clone() for key, one in model.tensors(torch.float32).items()}
    tensors[name][row] = float("nan")
    with tiny_engine(model, folder, dtype=torch.float32, chunk_size=8, block_size=4) as whole:
        config = whole.config
    return Engine(config, weights=tensors)


@pytest.mark.parametrize(
    ("name", "row", "op", "layer", "position"),
    [
        ("model.embed_tokens.weight", PROMPT[21], "embedding", None, 21),
        ("model.layers.0.input_layernorm.weight", 5, "norm", 0, 0),
        ("model.layers.0.self_attn.q_proj.weight", 3, "qkv_proj", 0, 0),
        ("model.layers.1.self_attn.o_proj.weight", 3, "o_proj", 1, 0),
        ("model.layers.1.mlp.up_proj.weight", 7, "gate_up_proj", 1, 0),
        ("model.layers.1.mlp.down_proj.weight", 7, "down_proj", 1, 0),
        ("lm_head.weight", 11, "head", None, 0),
    ],
)
def test_the_first_op_and_token_with_a_value_that_is_not_finite_is_named(
    tmp_path: Path, name: str, row: int, op: str, layer: int | None, position: int
) -> None:
    """huggingface/trl#6166: a NaN row means that the forward pass was broken, and where."""
    with broken_engine(tmp_path, name, row) as engine:
        (done,) = engine.generate([Request(id=0, prompt_token_ids=PROMPT)])
        assert done.error is not None
        assert done.error.kind == "non_finite"
        found = engine.locate_fault(PROMPT)
    assert found is not None
    assert (found.op, found.layer, found.position) == (op, layer, position)


def test_a_sound_sequence_has_no_location_and_serving_is_not_touched(tmp_path: Path) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    asked = Request(id=0, prompt_token_ids=PROMPT, params=params)
    options = {"dtype": torch.float32, "block_size": 4, "chunk_size": 8}
    with tiny_engine(tiny_model("llama"), tmp_path / "plain", **options) as engine:
        (expected,) = engine.generate([asked])
    with tiny_engine(tiny_model("llama"), tmp_path / "watched", **options) as engine:
        engine.submit(asked)
        done = []
        while engine.has_unfinished():
            done += engine.step()
            assert engine.locate_fault(PROMPT) is None
        before = engine.stats()
    assert_same_bits(done[0], expected)
    assert before.forward_tokens == len(PROMPT) + 11
