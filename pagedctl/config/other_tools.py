"""Names that other tools use for our options, so that a refusal can answer with ours."""

from __future__ import annotations

from collections.abc import Mapping

OTHER_TOOLS: Mapping[str, str] = {
    "tensor_parallel_size": "--tp",
    "tp_size": "--tp",
    "kv_cache_dtype": "--kv-dtype",
    "enable_prefix_caching": "--prefix-cache",
    "no_enable_prefix_caching": "--no-prefix-cache",
    "disable_radix_cache": "--no-prefix-cache",
    "enable_deterministic_inference": "--numerics invariant",
    "max_seq_len": "--max-model-len",
    "context_length": "--max-model-len",
    "max_running_requests": "--max-num-seqs",
    "max_total_tokens": "--kv-cache-memory-bytes",
    "mem_fraction_static": "--gpu-memory-utilization",
    "load_format": "--random-weights SEED",
    "model_path": "--model",
    "chunked_prefill_size": "--chunk-size",
    "long_prefill_token_threshold": "--chunk-size",
    "disable_cuda_graph": "--enforce-eager",
    "page_size": "--block-size",
    "logprobs_mode": "--logprob-basis",
    "output_json": "--json",
    "manifest": "--json",
    "num_prompts": "--workload uniform:requests=N",
    "max_new_tokens": "--max-tokens",
    "swap_space": "--swap-memory-bytes",
    "preemption_mode": "--preemption",
    "random_seed": "--seed",
    "timeout": "--collective-timeout",
}
"""Flags of vLLM, SGLang and nccl-tests, answered with ours."""
