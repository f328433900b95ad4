"""A failed request is rerun once, aside, to say where the finite numbers end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("place", [5, 140, 200])
@pytest.mark.parametrize("op", ["silu_mul", "down_proj"])
def test_a_token_far_into_a_chunk_is_named_by_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, place: int
) -> None:
    """A CPU takes wide activations in parts; a place in a part is not one in the chunk."""
    prompt = tuple(3 + number % 60 for number in range(300))
    prompt = (*prompt[:place], 90, *prompt[place + 1 :])  # a token that stands nowhere else
    with tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32) as engine:
        decoder = engine.parts.runner.decoder
        plans = decoder.plans
        honest, rows = getattr(plans, op).run, 0

        class Overflowing:
            """The op, with an infinity in the row of one token of the first layer."""

            def __getattr__(self, name: str) -> Any:
                return getattr(honest, name)

            def __call__(self, *arguments: Any) -> Any:
                nonlocal rows
                out = honest(*arguments)
                if rows <= place < rows + len(out):
                    out[place - rows] = torch.inf
                rows += len(out)
                return out

        broken = replace(plans, **{op: replace(getattr(plans, op), run=Overflowing())})
        monkeypatch.setattr(decoder, "plans", broken)
        found = engine.locate_fault(prompt)
    assert found is not None
    assert (found.op, found.layer, found.position) == (op, 0, place)


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
