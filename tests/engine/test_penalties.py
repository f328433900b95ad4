"""Edits of logits through the whole engine, against numpy in float64, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams
from tests.engine.harness import assert_same_bits, run, tiny_engine
from tests.engine.sampler_harness import Result, check_result
from tests.reference.tiny_models import VOCAB, tiny_model
from tests.reference.transformer import log_softmax

MODEL = tiny_model("qwen3", eos_token_id=0)
PROMPT = tuple(np.random.default_rng(5).integers(1, VOCAB, 14).tolist())
EDITS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 0.8, "top_k": 20},
    {"presence_penalty": 1.5, "temperature": 0.0},
    {"frequency_penalty": 0.9, "top_logprobs": 4},
    {"frequency_penalty": -1.1, "temperature": 0.0},
    {"logit_bias": ((3, 4.0), (5, -2.0), (9, 3.5)), "top_p": 0.9},
    {"allowed_token_ids": (3, 5, 9, 11, 40), "temperature": 1.7, "top_logprobs": 5},
    {"min_tokens": 4, "stop_token_ids": (3, 5, 9), "logit_bias": ((3, 9.0), (5, 9.0))},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((7, 2.0),),
        "allowed_token_ids": tuple(range(1, 60)),
        "min_p": 0.03,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "n": 3,
    },
    {},
)
LEGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "lag 1": {"lag": 1},
    "chunks": {"chunk_size": 3, "max_num_batched_tokens": 9},
    "preempted": {"debug_force_preemption_interval": 2},
    "preempted, lag 1": {"debug_force_preemption_interval": 3, "lag": 1, "chunk_size": 4},
}


def requests() -> list[Request]:
    return [
        Request(
            id=number,
            prompt_token_ids=PROMPT[number % 3 :],
            params=SamplingParams(**{"seed": number, "max_tokens": 10, **edit}),
        )
        for number, edit in enumerate(EDITS)
    ]


def build(folder: Path, **options: Any) -> Engine:
    return tiny_engine(MODEL, folder, **{"dtype": torch.float32, "block_size": 4, **options})


def result_of(done: Completion, request: Request) -> Result:
    """The completion as the float64 check reads it, cut at its own length."""
    top = done.top_logprobs
    params = {**vars(request.params), "max_tokens": len(done.token_ids)}
    return Result(
        request=Request(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            params=SamplingParams(**params),
        ),
        token_ids=done.token_ids.tolist(),
        logprobs=done.logprobs.tolist(),
        top=[None] * len(done.token_ids)
        if top is None
        else list(zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)),
    )


@pytest.mark.parametrize("basis", ["scaled", "raw", "processed"])
@pytest.mark.parametrize("leg", LEGS)
def test_every_sample_follows_the_edits_of_a_float64_reference(
    tmp_path: Path, leg: str, basis: str
) -> None:
    """vllm-project/vllm#1577 and thinking-machines-lab/tinker-feedback#148, in any batch."""
    asked = requests()
    with build(tmp_path / leg, logprob_basis=basis, **LEGS[leg]) as engine:
        found = run(engine, asked)
    assert found.max_rows > 1
    assert (found.preemptions > 0) == ("preempted" in leg)
    with build(tmp_path / "alone", logprob_basis=basis, max_num_seqs=1) as engine:
        alone = {(one.id, one.sample): one for one in engine.generate(asked)}
    for key, done in found.completions.items():
        assert_same_bits(done, alone[key])
        request = asked[int(key[0])]
        stops = frozenset((0, *request.params.stop_token_ids))
        check_result(result_of(done, request), MODEL, basis, stop_token_ids=stops)
        if request.params.min_tokens:
            assert not stops & set(done.token_ids[: request.params.min_tokens].tolist())
            assert done.finish_reason == "stop"


def test_a_penalty_counts_the_output_of_its_own_sample_alone(tmp_path: Path) -> None:
    """Samples of one prompt, greedy: equal, since none sees what the others said."""
    edit = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "temperature": 0.0}
    params = SamplingParams(n=4, max_tokens=12, ignore_eos=True, **edit)  # type: ignore[arg-type]
    with build(tmp_path, lag=1) as engine:
        found = run(engine, [Request(id=0, prompt_token_ids=PROMPT, params=params)])
    assert len({tuple(one.token_ids.tolist()) for one in found.completions.values()}) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tiny_temperature_gives_the_greedy_ids(
    tmp_path: Path, temperature: float, dtype: torch.dtype
) -> None:
    """vllm-project/vllm#3063, #2937, #890: 7 tokens; nothing overflows in float16."""
    ids = []
    with build(tmp_path, dtype=dtype) as engine:
        for chosen in (0.0, temperature):
            params = SamplingParams(temperature=chosen, max_tokens=7, ignore_eos=True, seed=1)
            (done,) = engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=params)])
            assert done.error is None
            assert np.isfinite(done.logprobs).all()
            ids.append(done.token_ids.tolist())
    assert ids[0] == ids[1]


@pytest.mark.parametrize("top_k", [None, 0, -1, VOCAB, 10**9])
def test_every_spelling_of_no_top_k_draws_the_same(tmp_path: Path, top_k: int | None) -> None:
    """vllm-project/vllm#17553, #17773: 0, None, -1 and more than the vocabulary are off."""
    done = []
    with build(tmp_path) as engine:
        for chosen in (top_k, 0):
            params = SamplingParams(top_k=chosen, max_tokens=12, temperature=2.5, seed=9)
            done += engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=params)])
    assert_same_bits(done[0], done[1])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_the_value_of_each_basis_is_specified_at_every_temperature(
    tmp_path: Path, temperature: float, top_p: float
) -> None:
    """ollama/ollama#16196, standardcompletions/rfcs#11: zero included, the basis named."""
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=2, max_tokens=6)
    request = Request(id=0, prompt_token_ids=PROMPT, params=params)
    for basis in ("scaled", "raw", "processed"):
        with build(tmp_path / basis, logprob_basis=basis) as engine:
            found = run(engine, [request])
            assert engine.manifest().config["logprob_basis"] == basis
        done = found.completions[0, 0]
        assert done.logprob_basis == basis
        for token, logprob, row in zip(
            done.token_ids, done.logprobs, found.logits[0, 0], strict=True
        ):
            z = row.double().numpy() / ((temperature or 1.0) if basis != "raw" else 1.0)
            if basis == "processed" and top_p < 1:
                order = np.argsort(-z, kind="stable")
                mass = np.cumsum(np.exp(log_softmax(z))[order])
                z[order[int((mass < top_p).sum()) + 1 :]] = -np.inf
            assert abs(float(log_softmax(z)[token]) - logprob) < 1e-5
