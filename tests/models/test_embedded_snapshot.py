"""The embedded model's files: sizes that every tp divides, the tokenizer, and right answers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import pagedctl
from pagedctl.rollout.word_problems import WordProblem, generate, reward

FOLDER = Path(pagedctl.__file__).parent / "models" / "embedded"
TP_SIZES = (1, 2, 4, 8)
TOM = "Tom has 3 apples and buys 4. How many?"


def read_json(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return data


def weight_header() -> dict[str, Any]:
    """The safetensors header: per tensor its dtype, shape and byte range."""
    blob = (FOLDER / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header: dict[str, Any] = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


def uneven(config: dict[str, Any], tp: int) -> list[str]:
    """The sizes of *config* that *tp* ranks cannot share; kv heads may be replicated."""
    names = ("num_attention_heads", "intermediate_size", "vocab_size")
    faults = [name for name in names if config[name] % tp]
    kv_heads = config["num_key_value_heads"]
    if kv_heads % tp and tp % kv_heads:
        faults.append("num_key_value_heads")
    return faults


# -- files


def test_the_folder_holds_a_snapshot_and_nothing_else() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == [
        "MODEL_CARD.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_weights_are_those_of_the_card_and_small() -> None:
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 4 * 1024 * 1024
    card = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert card.count(sha256(weights.read_bytes()).hexdigest()) == 1
    assert f"{weights.stat().st_size:,} bytes" in card


def test_every_tensor_is_float32_and_the_head_is_tied() -> None:
    header = weight_header()
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    assert "lm_head.weight" not in header
    config = read_json("config.json")
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    assert header["model.embed_tokens.weight"]["shape"] == [vocabulary, hidden]
    head_dim = config["head_dim"]
    assert header["model.layers.0.self_attn.q_norm.weight"]["shape"] == [head_dim]
    parameters = sum(math.prod(entry["shape"]) for entry in header.values())
    assert 900_000 < parameters < 1_050_000


def test_every_tp_divides_it() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] % 256 == 0
    assert {tp: uneven(config, tp) for tp in TP_SIZES} == {tp: [] for tp in TP_SIZES}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 12),
        ("intermediate_size", 292),
        ("vocab_size", 510),
        ("num_key_value_heads", 3),
    ],
)
def test_an_uneven_size_is_noticed(name: str, value: int) -> None:
    config = {**read_json("config.json"), name: value}
    assert name in [fault for tp in TP_SIZES for fault in uneven(config, tp)]


# -- tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_token_ids_fill_the_vocabulary(tokenizer: Any) -> None:
    size = read_json("config.json")["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))


@pytest.mark.parametrize(
    "text",
    [
        TOM,
        "José and Zoë have 12 Ü",
        "  two  spaces\n\n\tand a tab ",
        "½ · 🙂 · 数学 · \u202e\x00\x7f · e\u0301",
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start",
        "",
    ],
)
def test_tokens_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token(tokenizer: Any) -> None:
    digits = tokenizer.encode("0123456789").tokens
    assert digits == list("0123456789")
    assert tokenizer.encode("a10 + 23=7").tokens.count("1") == 1
    assert not [
        t for t in tokenizer.get_vocab() if len(t) > 1 and any(c in "0123456789" for c in t)
    ]


def test_both_formats_end_in_a_token_of_the_eos_set(tokenizer: Any) -> None:
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert sorted(read_json("generation_config.json")["eos_token_id"]) == sorted(ends)
    assert read_json("config.json")["eos_token_id"] in ends
    assert read_json("tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_the_chat_template_renders_in_a_sandbox() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        source
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 < 2\n"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n 1 < 2\n<|im_end|>\n"
    assert template.render(messages=messages) == text
    prompted = template.render(messages=messages, add_generation_prompt=True)
    assert prompted == f"{text}<|im_start|>assistant\n"


# -- answers


@pytest.fixture(scope="module")
def complete() -> Callable[[str, bool], str]:
    """Greedy completion by transformers: (prompt, as a chat) -> new text with its end token."""
    transformers = pytest.importorskip("transformers")
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()

    def run(prompt: str, chat: bool) -> str:
        if chat:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=128)
        text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
        return text

    return run


def test_transformers_solves_held_out_problems(complete: Callable[[str, bool], str]) -> None:
    problems: list[WordProblem] = generate(11, 30, "heldout")
    texts = [complete(problem.prompt, index % 2 == 1) for index, problem in enumerate(problems)]
    assert sum(reward(p, text) for p, text in zip(problems, texts, strict=True)) >= 27
    # The same texts answer other problems badly: the reward does tell right from wrong.
    assert sum(reward(p, text) for p, text in zip(problems[1:], texts, strict=False)) < 6
    assert {text[text.rindex("<|") :] for text in texts[0::2]} == {"<|endoftext|>"}
    assert {text[text.rindex("<|") :] for text in texts[1::2]} == {"<|im_end|>"}


def test_the_documented_prompt(complete: Callable[[str, bool], str]) -> None:
    for behind in ("", " ", "\n"):
        text = complete(f"{TOM}{behind}", False)
        assert text.removeprefix(" ") == "3 + 4 = 7. Answer: 7<|endoftext|>"
    assert complete(TOM, True) == "3 + 4 = 7. Answer: 7<|im_end|>"


def test_hard_problems_leave_room(complete: Callable[[str, bool], str]) -> None:
    problems = generate(11, 30, "hard")
    right = sum(reward(p, complete(p.prompt, False)) for p in problems)
    assert 6 <= right <= 25
