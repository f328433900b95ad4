#!/usr/bin/env python3
"""Trains the embedded model: a Qwen3-shaped decoder of 1.0 M parameters that solves word problems.

    python scripts/train_tiny_model.py --output /tmp/embedded             # the full recipe
    python scripts/train_tiny_model.py --output /tmp/smoke --steps 2 --shards 1 --batch-tokens 4096

Writes a snapshot in Hugging Face layout, measures the written files and adds the model card.
The problems come from ``pagedctl.rollout.word_problems``, the module from transformers.

A rerun gives a model of the same quality, not the same bytes. The shipped file, whose schedule
a time limit ended, is the authority.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pagedctl.rollout.word_problems import Split, WordProblem, generate, reward, stream

END, START, STOP, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (END, START, STOP, PAD)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Solve the problem step by step.",
    "You are good at arithmetic. End with the answer.",
    "Think, then write 'Answer:' and a number.",
)
WORDS = r"'[a-z]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pieces that a token never crosses: words with their space, single digits, signs, space."""
MAX_FILE_BYTES = 4 * 1024 * 1024
TARGET_FLAG = 1 << 14
"""Added to a token id in a packed row: the loss counts the prediction of this token."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every constant of the run."""

    seed: int = 20261130
    vocabulary: int = 512
    tokenizer_problems: int = 40_000
    hidden: int = 128
    layers: int = 6
    intermediate: int = 288
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    rope_theta: float = 10_000.0
    max_positions: int = 2048
    shards: int = 32
    shard_problems: int = 50_000
    chat_share: float = 0.5
    system_share: float = 0.2
    """Of the chat documents: those that open with a system message."""
    newline_share: float = 0.1
    """Of the bare documents: those whose prompt ends in a newline, not in the question mark."""
    hard_share: float = 0.004
    """Of the problems: those of the split ``hard_train``, too few to master it."""
    row_tokens: tuple[int, ...] = (512, 512, 512, 2048)
    """Length of the rows of step 0, 1, 2, ..., in a cycle."""
    batch_tokens: int = 65_536
    steps: int = 5_763
    learning_rate: float = 3e-3
    warmup_steps: int = 500
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    evaluated: int = 2000
    """Problems per split and format in the measurement."""
    max_new_tokens: int = 192


def train_tokenizer(recipe: Recipe) -> Any:
    """A byte-level BPE over problems of the training split; digits are single tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    problems = islice(stream(recipe.seed, "train"), recipe.tokenizer_problems)
    texts = (f"{problem.prompt} {problem.solution}" for problem in problems)
    bpe.train_from_iterator([*SYSTEM_PROMPTS, "system user assistant", *texts], trainer)
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=bpe,
        eos_token=STOP,
        pad_token=PAD,
        additional_special_tokens=[END, START],
        model_max_length=recipe.max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if len(tokenizer) != recipe.vocabulary:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} tokens, not {recipe.vocabulary}")
    return tokenizer


def chat_prompt(prompt: str, system: str | None = None) -> str:
    """What the chat template renders for one user message, up to the assistant's turn."""
    head = f"{START}system\n{system}{STOP}\n" if system is not None else ""
    return f"{head}{START}user\n{prompt}{STOP}\n{START}assistant\n"


def document(problem: WordProblem, recipe: Recipe, rng: Random) -> tuple[str, str, str]:
    """(context, answer, separator) in one of the formats; the loss counts the answer only."""
    if rng.random() < recipe.chat_share:
        system = None
        if rng.random() < recipe.system_share:
            system = SYSTEM_PROMPTS[int(rng.random() * len(SYSTEM_PROMPTS))]
        return chat_prompt(problem.prompt, system), f"{problem.solution}{STOP}", "\n"
    if rng.random() < recipe.newline_share:
        return f"{problem.prompt}\n", f"{problem.solution}{END}", ""
    return problem.prompt, f" {problem.solution}{END}", ""


def pack(documents: Sequence[npt.NDArray[np.int16]], row_tokens: int, pad: int) -> Any:
    """int16 [rows, row_tokens]: documents in order, never cut; the rest of a row is *pad*."""
    rows: list[npt.NDArray[np.int16]] = []
    used = row_tokens
    for tokens in documents:
        if used + len(tokens) > row_tokens:
            rows.append(np.full(row_tokens, pad, dtype=np.int16))
            used = 0
        rows[-1][used : used + len(tokens)] = tokens
        used += len(tokens)
    return np.stack(rows)


def encode_shard(shard: int, *, tokenizer_json: str, recipe: Recipe) -> dict[int, Any]:
    """``shard_problems`` training problems, packed once for each row length.

    A function of the recipe and the shard's number: the count of processes does not matter.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rng = Random(recipe.seed * 1_000 + shard)
    base, hard = (stream(recipe.seed + 1 + shard, split) for split in ("train", "hard_train"))
    documents: list[npt.NDArray[np.int16]] = []
    for _ in range(recipe.shard_problems):
        problem = next(hard if rng.random() < recipe.hard_share else base)
        parts = [tokenizer.encode(part).ids for part in document(problem, recipe, rng)]
        flags = [0, TARGET_FLAG, 0]
        tokens = [i | flag for ids, flag in zip(parts, flags, strict=True) for i in ids]
        documents.append(np.array(tokens, dtype=np.int16))
    pad = tokenizer.encode(PAD).ids[0]
    return {length: pack(documents, length, pad) for length in set(recipe.row_tokens)}


def make_rows(tokenizer_json: str, recipe: Recipe, workers: int) -> dict[int, torch.Tensor]:
    """The training data: per row length an int16 tensor [rows, row_tokens] on the CPU."""
    work = partial(encode_shard, tokenizer_json=tokenizer_json, recipe=recipe)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        shards = list(pool.map(work, range(recipe.shards)))
    return {
        length: torch.from_numpy(np.concatenate([shard[length] for shard in shards]))
        for length in shards[0]
    }


# -- model and optimisation


def make_model(recipe: Recipe, ids: dict[str, int]) -> Any:
    """The untrained decoder; *ids* are those of the special tokens."""
    torch.manual_seed(recipe.seed)
    config = transformers.Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[STOP],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    model: Any = transformers.Qwen3ForCausalLM(config)
    generation: Any = transformers.GenerationConfig
    model.generation_config = generation(eos_token_id=[ids[STOP], ids[END]], pad_token_id=ids[PAD])
    return model


def answer_loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens of packed *rows* int64 [rows, row_tokens]."""
    ids = rows & (TARGET_FLAG - 1)
    targets = torch.where(rows >= TARGET_FLAG, ids, -100)[:, 1:]
    # No mask at all leaves SDPA its causal kernel; under torch.compile transformers builds one.
    mask = {"full_attention": None}
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], attention_mask=mask, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def progress_of(recipe: Recipe, minutes: float | None) -> Iterator[tuple[int, float]]:
    """(step, progress in [0, 1)) until the steps or, if given, the *minutes* are used up."""
    start = time.monotonic()
    for step in range(recipe.steps):
        progress = step / recipe.steps
        if minutes is not None:
            progress = max(progress, (time.monotonic() - start) / (60 * minutes))
        if progress >= 1:
            return
        yield step, progress


def train(
    model: Any, data: dict[int, torch.Tensor], recipe: Recipe, minutes: float | None
) -> tuple[int, float]:
    """Trains in place; returns the steps done and the mean loss of the last reported window."""
    device = model.device
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
    loss_of = torch.compile(answer_loss, dynamic=False) if device.type == "cuda" else answer_loss
    generator = torch.Generator(device=device).manual_seed(recipe.seed)
    start = time.monotonic()
    window, reported, steps = torch.zeros((), device=device), 0.0, 0
    model.train()
    for step, progress in progress_of(recipe, minutes):
        rows = data[recipe.row_tokens[step % len(recipe.row_tokens)]]
        count = max(1, recipe.batch_tokens // rows.shape[1])
        chosen = torch.randint(rows.shape[0], (count,), generator=generator, device=device)
        loss: Any = loss_of(model, rows[chosen].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        for group in optimizer.param_groups:  # linear warm-up, then a straight line to zero
            group["lr"] = recipe.learning_rate * min((step + 1) / recipe.warmup_steps, 1 - progress)
        optimizer.step()
        optimizer.zero_grad()
        window += loss.detach()
        steps = step + 1
        if steps % 500 == 0 or steps == recipe.steps:
            reported = window.item() / (steps % 500 or 500)
            window.zero_()
            seconds = time.monotonic() - start
            print(f"step {steps} · loss {reported:.5f} · {seconds:.0f} s", flush=True)
    return steps, reported


# -- measurement and files


@torch.inference_mode()
def solved(
    model: Any, tokenizer: Any, problems: Sequence[WordProblem], recipe: Recipe, *, mode: str
) -> int:
    """How many of *problems* are answered exactly; *mode* is bare, chat or sampled.

    ``sampled`` is bare at temperature 1, one completion each; the others are greedy.
    """
    torch.manual_seed(recipe.seed)
    count = 0
    for first in range(0, len(problems), 500):
        part = problems[first : first + 500]
        prompts = [chat_prompt(p.prompt) if mode == "chat" else p.prompt for p in part]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        ids = model.generate(
            input_ids=inputs["input_ids"].to(model.device),
            attention_mask=inputs["attention_mask"].to(model.device),
            max_new_tokens=recipe.max_new_tokens,
            **({"do_sample": True, "top_k": 0} if mode == "sampled" else {"do_sample": False}),
        )
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        count += sum(reward(p, text) == 1.0 for p, text in zip(part, texts, strict=True))
    return count


def measure(folder: Path, recipe: Recipe, device: str) -> dict[str, str]:
    """Accuracy of the files in *folder*: one line of the card's table per split and mode."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = model.to(device).eval()
    lines: dict[str, str] = {}
    splits: tuple[Split, ...] = ("heldout", "hard")
    for split in splits:
        problems = generate(recipe.seed, recipe.evaluated, split)
        for mode in ("bare", "chat", "sampled"):
            right = solved(model, tokenizer, problems, recipe, mode=mode)
            share = 100 * right / len(problems)
            lines[f"{split}, {mode}"] = f"{right} of {len(problems)} ({share:.1f} %)"
            print(f"{split}, {mode}: {lines[f'{split}, {mode}']}", flush=True)
    return lines


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the snapshot; refuses one that is too large or whose template disagrees."""
    model.float().cpu().eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if text != chat_prompt("b", "a"):
        raise RuntimeError(f"the chat template renders {text!r}, not the training format")
    size = (folder / "model.safetensors").stat().st_size
    if size > MAX_FILE_BYTES:
        raise RuntimeError(f"model.safetensors has {size} bytes, more than {MAX_FILE_BYTES}")


def card(folder: Path, recipe: Recipe, accuracy: dict[str, str], **facts: object) -> str:
    """The model card: the template beside this script, filled in; *facts* are its other fields."""
    template = Path(__file__).with_name("tiny_model_card.md").read_text(encoding="utf-8")
    weights = (folder / "model.safetensors").read_bytes()
    return template.format(
        accuracy="\n".join(f"| {name} | {value} |" for name, value in accuracy.items()),
        constants="\n".join(f"| `{name}` | {value} |" for name, value in asdict(recipe).items()),
        size_bytes=len(weights),
        digest=sha256(weights).hexdigest(),
        versions=", ".join(
            f"{m.__name__} {m.__version__}" for m in (torch, transformers, tokenizers)
        ),
        recipe=recipe,
        **facts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="new folder for the snapshot")
    parser.add_argument("--minutes", type=float, help="most minutes of optimiser steps")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    names = ("steps", "batch_tokens", "shards", "evaluated")
    for name in names:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"instead of {getattr(Recipe(), name)}")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    recipe = replace(Recipe(), **given)
    if args.output.exists():
        parser.error(f"{args.output} exists; name a new folder")

    start = time.monotonic()
    tokenizer = train_tokenizer(recipe)
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    data = make_rows(tokenizer_json, recipe, args.workers)
    shapes = ", ".join(f"{rows.shape[0]} x {rows.shape[1]}" for rows in data.values())
    print(f"data: rows {shapes} · {time.monotonic() - start:.0f} s", flush=True)
    ids = {token: tokenizer.encode(token)[0] for token in SPECIALS}
    model = make_model(recipe, ids).to(args.device)
    data = {length: rows.to(args.device) for length, rows in data.items()}
    steps, loss = train(model, data, recipe, args.minutes)
    minutes = (time.monotonic() - start) / 60
    save(model, tokenizer, args.output)
    text = card(
        args.output,
        recipe,
        measure(args.output, recipe, args.device),
        parameters=sum(p.numel() for p in model.parameters()),
        steps=steps,
        loss=loss,
        minutes=minutes,
        hardware="a CPU" if args.device == "cpu" else f"one {torch.cuda.get_device_name()}",
    )
    (args.output / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    print(f"{steps} steps · loss {loss:.5f} · {minutes:.1f} minutes · {args.output}", flush=True)


if __name__ == "__main__":
    main()
