"""Every key of a config.json has one of four fates, so none changes the arithmetic unseen.

1. Read: it is part of the model (``READ``), or says that the weights are quantised.
2. Ignored: known not to enter the arithmetic of inference (``IGNORED``, or a leading "_").
3. Refused unless neutral: known to change the arithmetic in a way that is not built
   (``NEUTRAL`` lists the values, besides null, at which it changes nothing).
4. Unknown: refused if its name looks arithmetic and its value is neither null, false nor
   empty; else ignored with a warning that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pagedctl.models.reader import ConfigReader, same_number, shown

READ = frozenset(
    {
        "architectures",
        "attention_bias",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "output_vocab_size",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rotary_dim",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "use_sliding_window",
        "vocab_size",
    }
)
QUANTISATION = ("quantization_config", "compression_config", "quantization")
IGNORED = frozenset(
    {
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "model_max_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_last_hidden_states",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_flash_attn",
    }
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_in_multiplier": (1,),
    "attention_multiplier": (),
    "attention_out_multiplier": (1,),
    "attn_logit_softcapping": (),
    "attn_output_gate": (False,),
    "attn_scale": (),
    "attn_temperature_tuning": (False,),
    "bias": (False,),
    "clip_qkv": (),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (),
    "interleaved_sliding_window": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "key_multiplier": (1,),
    "kv_lora_rank": (),
    "layer_norm_eps": (),
    "lm_head_bias": (False,),
    "lm_head_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_multipliers": (),
    "moe_intermediate_size": (),
    "mup_base_width": (),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_experts_per_tok": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "parallel_attn": (False,),
    "per_layer_config": (),
    "position_embedding_type": ("rope", "rotary"),
    "pruned_heads": (),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "sliding_window_pattern": (),
    "text_config": (),
    "tie_encoder_decoder": (False,),
    "use_alibi": (False,),
    "use_bidirectional_attention": (False,),
    "use_dynamic_ntk": (False,),
    "use_logn_attn": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "vision_config": (),
}
LOOKS_ARITHMETIC = re.compile(
    "scal|mult|cap|clip|mup|alibi|norm|bias|window|sink|gate|gating|expert|moe|rope|rotary"
    "|attn|attention|activation|act_fn|quant|resid|conv|lora|ssm|mamba|position|head|logit"
    "|embed|interleav|sparse|nope|pattern"
)


def check_keys(reader: ConfigReader) -> None:
    """Refuse or warn about every key that the resolver does not read."""
    for key, value in reader.values.items():
        if value is None or key in READ or key in QUANTISATION or _is_ignored(key):
            continue
        if key in NEUTRAL:
            _check_neutral(reader, key, value)
        elif _is_off(value) or not LOOKS_ARITHMETIC.search(key.lower()):
            reader.warn(
                "unknown_key", key, f"{key} {shown(value)} is not a known key; it is ignored"
            )
        else:
            reader.fault(
                key,
                f"{key} {shown(value)} is not a known key and may change the arithmetic",
                "a key whose name looks arithmetic is understood or refused",
                f"remove {key} if it changes nothing at inference; else use another model",
            )
    _check_quantisation(reader)
    _note_remote_code(reader)


def _is_ignored(key: str) -> bool:
    return key in IGNORED or key.startswith("_")


def _check_neutral(reader: ConfigReader, key: str, value: object) -> None:
    allowed = NEUTRAL[key]
    if _is_empty(value) or any(same_number(value, neutral) for neutral in allowed):
        return
    wanted = " or ".join(["null", *(shown(neutral) for neutral in allowed)])
    reader.fault(
        key,
        f"{key} {shown(value)} is not supported",
        f"{key} changes the arithmetic of the model; only {wanted} is served",
        "use a model without it",
    )


def _is_off(value: object) -> bool:
    return value is False or _is_empty(value)


def _is_empty(value: object) -> bool:
    return isinstance(value, dict | list | tuple | str) and not value


def _check_quantisation(reader: ConfigReader) -> None:
    for key in QUANTISATION:
        block = reader.mapping(key)
        if block:
            method = shown(block.get("quant_method", "not named")).strip('"')
            reader.fault(
                key,
                f"the checkpoint is quantised (quant_method: {method})",
                "weights are plain float32, bfloat16 or float16 tensors",
                "use the unquantised checkpoint of this model",
            )


def _note_remote_code(reader: ConfigReader) -> None:
    if reader.mapping("auto_map"):
        reader.warn(
            "remote_code",
            "auto_map",
            "auto_map names code that comes with the model; it is never run, and the "
            "arithmetic is that of model_type",
        )
