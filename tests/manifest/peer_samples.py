"""Result objects of vLLM's and SGLang's benches as their versions write them, and our reading.

Shapes follow the tools' sources over several years; values are made up and consistent.
"""

from __future__ import annotations

import math
from typing import Any

THROUGHPUT: dict[str, Any] = {
    "elapsed_time": 12.5,
    "num_requests": 250,
    "total_num_tokens": 100000,
    "requests_per_second": 20.0,
    "tokens_per_second": 8000.0,
}
LATENCY: dict[str, Any] = {
    "avg_latency": 1.3125,
    "latencies": [1.0, 1.25, 1.5],
    "percentiles": {
        "10": 1.05, "25": 1.125, "50": 1.25, "75": 1.375, "90": 1.45, "99": 1.495,
    },
}  # fmt: skip
LATENCY_WITH_STD: dict[str, Any] = {**LATENCY, "std_latency": 0.203125}

_SERVE_SETUP: dict[str, Any] = {
    "date": "20260301-101500",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "Qwen/Qwen3-8B",
    "tokenizer_id": "Qwen/Qwen3-8B",
    "num_prompts": 4,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": None,
}
_SERVE_TIMES: dict[str, Any] = {
    "mean_ttft_ms": 52.5, "median_ttft_ms": 50.0, "std_ttft_ms": 4.5, "p99_ttft_ms": 61.0,
    "mean_tpot_ms": 8.5, "median_tpot_ms": 8.25, "std_tpot_ms": 0.5, "p99_tpot_ms": 9.75,
    "mean_itl_ms": 8.4, "median_itl_ms": 8.1, "std_itl_ms": 1.5, "p99_itl_ms": 15.0,
}  # fmt: skip
SERVE_2024: dict[str, Any] = {
    "date": "20240520-101500",
    "backend": "vllm",
    "model_id": "meta-llama/Llama-2-7b-hf",
    "tokenizer_id": "meta-llama/Llama-2-7b-hf",
    "best_of": 1,
    "use_beam_search": False,
    "num_prompts": 4,
    "request_rate": 2.5,
    "duration": 4.0,
    "completed": 4,
    "total_input_tokens": 100,
    "total_output_tokens": 400,
    "request_throughput": 1.0,
    "input_throughput": 25.0,
    "output_throughput": 100.0,
    **{name: value for name, value in _SERVE_TIMES.items() if not name.startswith("std_")},
}
SERVE: dict[str, Any] = {
    **_SERVE_SETUP,
    "duration": 4.0,
    "completed": 3,
    "total_input_tokens": 100,
    "total_output_tokens": 300,
    "request_throughput": 0.75,
    "request_goodput": None,
    "output_throughput": 75.0,
    "total_token_throughput": 100.0,
    **_SERVE_TIMES,
}
SERVE_WITH_FAILED: dict[str, Any] = {
    **SERVE,
    "failed": 1,
    "latencies": [0.9, 0.0, 0.95, 0.91],
    "queue_times": [0.0, 0.0, 0.0, 0.0],
    "max_output_tokens_per_s": 120.0,
    "max_concurrent_requests": 4,
    "rtfx": 0.0,
    "mean_e2el_ms": 920.0,
    "median_e2el_ms": 910.0,
    "std_e2el_ms": 21.6,
    "p25_e2el_ms": 905.0,
    "p50_e2el_ms": 910.0,
    "p90_e2el_ms": 942.0,
    "p95_e2el_ms": 946.0,
    "p99.9_e2el_ms": 949.9,
}
SERVE_DETAILED: dict[str, Any] = {
    **SERVE,
    "version": "0.11.0",
    "input_lens": [25, 25, 25, 25],
    "output_lens": [100, 0, 100, 100],
    "ttfts": [0.05, 0.0, 0.06, 0.0475],
    "itls": [[0.008] * 99, [], [0.0085] * 99, [0.008] * 99],
    "start_times": [10.0, 10.0, 10.0, 10.0],
    "generated_texts": ["a", "", "b\ufffd", "\ud83d"],
    "errors": ["", "Internal Server Error", "", ""],
}
POOLING: dict[str, Any] = {
    **_SERVE_SETUP,
    "duration": 2.0,
    "completed": 4,
    "total_input_tokens": 100,
    "total_input_sequences": 4,
    "request_throughput": 2.0,
    "input_sequence_throughput": 2.0,
    "total_token_throughput": 50.0,
    "mean_e2el_ms": 20.0,
    "median_e2el_ms": 20.0,
    "std_e2el_ms": 0.0,
    "p99_e2el_ms": 20.0,
}
SGLANG_2024: dict[str, Any] = {
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": math.inf,
    "max_concurrency": None,
    "sharegpt_output_len": None,
    "random_input_len": 25,
    "random_output_len": 100,
    "random_range_ratio": 0.0,
    "duration": 4.0,
    "completed": 4,
    "total_input_tokens": 100,
    "total_output_tokens": 400,
    "total_output_tokens_retokenized": 398,
    "request_throughput": 1.0,
    "input_throughput": 25.0,
    "output_throughput": 100.0,
    "mean_e2e_latency_ms": 920.0,
    "median_e2e_latency_ms": 910.0,
    "std_e2e_latency_ms": 21.6,
    "p99_e2e_latency_ms": 950.0,
    **_SERVE_TIMES,
    "p95_itl_ms": 12.0,
    "concurrency": 0.92,
    "accept_length": None,
}
SGLANG_2026: dict[str, Any] = {
    **SGLANG_2024,
    "tag": None,
    "request_rate": 8.0,
    "server_info": {
        "model_path": "Qwen/Qwen3-8B",
        "tp_size": 2,
        "version": "0.5.6",
        "internal_states": [{"avg_spec_accept_length": None}],
    },
    "total_input_text_tokens": 100,
    "total_input_vision_tokens": 0,
    "total_throughput": 125.0,
    "p90_e2e_latency_ms": 940.0,
    "p95_e2e_latency_ms": 945.0,
    "max_itl_ms": 20.0,
    "max_output_tokens_per_s": 120.0,
    "max_concurrent_requests": 4,
}
SGLANG_DETAILED: dict[str, Any] = {
    **SGLANG_2026,
    "completed": 3,
    "errors": ["", "", "timeout", ""],
    "output_lens": [100, 100, 0, 100],
    "generated_texts": ["a", "b", "", "c"],
}
SAMPLES: dict[str, dict[str, Any]] = {
    "throughput": THROUGHPUT,
    "latency": LATENCY,
    "latency with std": LATENCY_WITH_STD,
    "serve 2024": SERVE_2024,
    "serve": SERVE,
    "serve with failed": SERVE_WITH_FAILED,
    "serve detailed": SERVE_DETAILED,
    "pooling": POOLING,
    "sglang 2024": SGLANG_2024,
    "sglang 2026": SGLANG_2026,
    "sglang detailed": SGLANG_DETAILED,
}

# -- our reading: every metric that is not here is None ----------------------------------

_TIMES: dict[str, Any] = {
    "ttft_ms": {"mean": 52.5, "median": 50.0, "std": 4.5, "p99": 61.0},
    "tpot_ms": {"mean": 8.5, "median": 8.25, "std": 0.5, "p99": 9.75},
    "itl_ms": {"mean": 8.4, "median": 8.1, "std": 1.5, "p99": 15.0},
}
_LATENCY: dict[str, Any] = {
    "wall_s": 1.25,
    "e2e_ms": {"mean": 1312.5, "median": 1250.0, "p50": 1250.0, "p90": 1450.0, "p99": 1495.0},
}
_SERVE: dict[str, Any] = {
    "wall_s": 4.0,
    "requests_completed": 3,
    "prompt_tokens": 100,
    "output_tokens": 300,
    "output_tokens_per_s": 75.0,
    "total_tokens_per_s": 100.0,
    "requests_per_s": 0.75,
    **_TIMES,
}
_RUN_OF_4: dict[str, Any] = {
    **_SERVE,
    "requests_completed": 4,
    "output_tokens": 400,
    "output_tokens_per_s": 100.0,
    "total_tokens_per_s": 125.0,
    "requests_per_s": 1.0,
}
_SGLANG: dict[str, Any] = {
    **_RUN_OF_4,
    "itl_ms": {**_TIMES["itl_ms"], "p95": 12.0},
    "e2e_ms": {"mean": 920.0, "median": 910.0, "std": 21.6, "p99": 950.0},
}
_SGLANG_2026: dict[str, Any] = {
    **_SGLANG,
    "e2e_ms": {**_SGLANG["e2e_ms"], "p90": 940.0, "p95": 945.0},
}
EXPECTED: dict[str, dict[str, Any]] = {
    "throughput": {
        "wall_s": 12.5,
        "requests_completed": 250,
        "total_tokens_per_s": 8000.0,
        "requests_per_s": 20.0,
    },
    "latency": _LATENCY,
    "latency with std": {
        **_LATENCY,
        "e2e_ms": {**_LATENCY["e2e_ms"], "std": 203.125},
    },
    "serve 2024": {
        **_RUN_OF_4,
        **{
            name: {each: value for each, value in times.items() if each != "std"}
            for name, times in _TIMES.items()
        },
    },
    "serve": _SERVE,
    "serve with failed": {
        **_SERVE,
        "requests_failed": 1,
        "e2e_ms": {
            "mean": 920.0, "median": 910.0, "std": 21.6, "p50": 910.0, "p90": 942.0, "p95": 946.0,
        },
    },
    "serve detailed": {**_SERVE, "requests_failed": 1},
    "pooling": {
        "wall_s": 2.0,
        "requests_completed": 4,
        "prompt_tokens": 100,
        "total_tokens_per_s": 50.0,
        "requests_per_s": 2.0,
        "e2e_ms": {"mean": 20.0, "median": 20.0, "std": 0.0, "p99": 20.0},
    },
    "sglang 2024": _SGLANG,
    "sglang 2026": _SGLANG_2026,
    "sglang detailed": {**_SGLANG_2026, "requests_completed": 3, "requests_failed": 1},
}  # fmt: skip
