"""A real model of 135M parameters: greedy ids equal those of transformers, run here and now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pagedctl import Engine, EngineConfig, Request, SamplingParams
from pagedctl.models.locate import locate_model
from pagedctl.models.resolve import resolve_model

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees. " * 12 + "Therefore",
)
CHATS = (
    "What is the capital of Italy?",
    "Write one sentence about autumn.",
    "Name three prime numbers and add them up.",
    "Explain in two lines why the sky is blue.",
)
TOKENS = 24
SCHEDULES = {
    "packed": {},
    "chunked": {"chunk_size": 7, "max_num_batched_tokens": 32, "max_num_seqs": 4},
}

Ids = list[list[int]]


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> Ids:
    """Bare texts and chats, encoded by transformers' tokenizer from the same folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in CHATS
    ]
    return [*(tokenizer(text)["input_ids"] for text in TEXTS), *chats]


@pytest.fixture(scope="module")
def expected(smollm2: Path, prompts: Ids) -> Ids:
    """Each prompt alone, by transformers in float32: what follows the prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        chosen = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
        )
        made.append(chosen[0, len(prompt) :].tolist())
    return made


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("contract", ["fast", "invariant"])
def test_greedy_ids_equal_those_of_transformers(
    smollm2: Path, prompts: Ids, expected: Ids, contract: str, schedule: str
) -> None:
    assert greedy(smollm2, prompts, contract, SCHEDULES[schedule]) == expected


def test_the_chat_template_of_the_snapshot_gives_the_ids_of_transformers(
    smollm2: Path, prompts: Ids
) -> None:
    from pagedctl.models.tokenizer import load_tokenizer

    resolved = resolve_model(locate_model(str(smollm2)), weights="ignore")
    tokenizer = load_tokenizer(resolved.tokenizer)
    assert tokenizer is not None
    chats = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHATS]
    assert [list(one) for one in chats] == prompts[len(TEXTS) :]


def greedy(
    snapshot: Path, prompts: Sequence[list[int]], contract: str, options: dict[str, int]
) -> Ids:
    config = EngineConfig(
        model=str(snapshot),
        dtype="float32",
        numerics=contract,
        kv_cache_memory_bytes=256 << 20,
        **options,
    )
    with Engine(config) as engine:
        completions = engine.generate(
            Request(
                id=place,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(temperature=0.0, max_tokens=TOKENS),
            )
            for place, prompt in enumerate(prompts)
        )
        return [one.token_ids.tolist() for one in completions]
