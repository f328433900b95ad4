"""Built-in architectures: public config.json figures of well-known models, without weights.

They go through the same resolver as a file. Positions, dtype and end tokens are those of
the instruction-tuned release where one exists.
"""

from __future__ import annotations

from collections.abc import Mapping

Config = Mapping[str, object]


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    **more: object,
) -> Config:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def _llama2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> Config:
    return _llama(
        hidden,
        layers,
        heads,
        kv_heads,
        intermediate,
        vocab_size=32_000,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        torch_dtype="float16",
        bos_token_id=1,
        eos_token_id=2,
    )


def _llama31(
    hidden: int, layers: int, heads: int, intermediate: int, factor: float, **more: object
) -> Config:
    """Llama 3.1 to 3.3: 8 kv heads, llama3 rope from 8,192 positions."""
    return _llama(
        hidden,
        layers,
        heads,
        8,
        intermediate,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=128_000,
        eos_token_id=[128_001, 128_008, 128_009],
        **more,
    )


def _smollm2(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, theta: float
) -> Config:
    return _llama(
        hidden,
        layers,
        heads,
        kv_heads,
        intermediate,
        vocab_size=49_152,
        max_position_embeddings=8192,
        rope_theta=theta,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def _mistral_7b(vocabulary: int, theta: float, window: int | None) -> Config:
    return {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _qwen(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    **more: object,
) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151_643,
        "eos_token_id": [151_645, 151_643],
        **more,
    }


def _qwen25(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    *,
    tied: bool,
    vocabulary: int = 152_064,
) -> Config:
    return _qwen(
        "qwen2",
        hidden,
        layers,
        heads,
        kv_heads,
        intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
    )


def _qwen3(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool
) -> Config:
    return _qwen(
        "qwen3",
        hidden,
        layers,
        heads,
        kv_heads,
        intermediate,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        attention_bias=False,
        tie_word_embeddings=tied,
    )


BUILTIN: Mapping[str, Config] = {
    "llama-2-7b": _llama2(4096, 32, 32, 32, 11_008),
    "llama-2-13b": _llama2(5120, 40, 40, 40, 13_824),
    "llama-2-70b": _llama2(8192, 80, 64, 8, 28_672),
    "llama-3.1-8b": _llama31(4096, 32, 32, 14_336, 8.0),
    "llama-3.1-70b": _llama31(8192, 80, 64, 28_672, 8.0),
    "llama-3.2-1b": _llama31(2048, 16, 32, 8192, 32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama31(3072, 28, 24, 8192, 32.0, head_dim=128, tie_word_embeddings=True),
    "mistral-7b-v0.1": _mistral_7b(32_000, 10_000.0, 4096),
    "mistral-7b-v0.3": _mistral_7b(32_768, 1_000_000.0, None),
    "qwen2.5-0.5b": _qwen25(896, 24, 14, 2, 4864, tied=True, vocabulary=151_936),
    "qwen2.5-1.5b": _qwen25(1536, 28, 12, 2, 8960, tied=True, vocabulary=151_936),
    "qwen2.5-3b": _qwen25(2048, 36, 16, 2, 11_008, tied=True, vocabulary=151_936),
    "qwen2.5-7b": _qwen25(3584, 28, 28, 4, 18_944, tied=False),
    "qwen2.5-14b": _qwen25(5120, 48, 40, 8, 13_824, tied=False),
    "qwen2.5-32b": _qwen25(5120, 64, 40, 8, 27_648, tied=False),
    "qwen2.5-72b": _qwen25(8192, 80, 64, 8, 29_568, tied=False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17_408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25_600, tied=False),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536, 100_000.0),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560, 100_000.0),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 130_000.0),
}
