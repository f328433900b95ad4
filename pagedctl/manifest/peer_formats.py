"""The result files of vLLM's and SGLang's benches: how each is known, and our names for it.

A format is known by the keys it has, never by a version: files carry none, or a user's word
for it. ``backend`` says nothing either, because each tool can measure the other's server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagedctl.manifest.peer_object import PeerObject
from pagedctl.manifest.peer_result import LatencyStats, PeerMetrics

_CHUNKS = "between streamed chunks, each of which may hold several tokens"


@dataclass(frozen=True, kw_only=True)
class PeerFormat:
    """One kind of file: it has all of ``keys`` and at least one of ``marks``.

    ``version`` and ``model`` read what the file says of them, if it does. ``differs``: metrics
    whose definition is not ours, and theirs.
    """

    tool: str
    keys: tuple[str, ...]
    marks: tuple[str, ...]
    metrics: Callable[[PeerObject], PeerMetrics]
    version: Callable[[PeerObject], str | None]
    model: Callable[[PeerObject], str | None]
    differs: Mapping[str, str] = field(default_factory=dict)

    def fits(self, values: Mapping[str, object]) -> bool:
        return all(key in values for key in self.keys) and any(key in values for key in self.marks)


# -- vLLM --------------------------------------------------------------------------------


def _vllm_throughput(source: PeerObject) -> PeerMetrics:
    """One offline run. Its rate of tokens counts prompts too; there is no other in the file."""
    return PeerMetrics(
        wall_s=source.number("elapsed_time"),
        requests_completed=source.count("num_requests"),
        total_tokens_per_s=source.number("tokens_per_second"),
        requests_per_s=source.number("requests_per_second"),
    )


def _vllm_latency(source: PeerObject) -> PeerMetrics:
    """Runs of one batch, in seconds. Their median is our ``wall_s``."""
    percentiles = source.child("percentiles")
    return PeerMetrics(
        wall_s=percentiles.number("50"),
        e2e_ms=LatencyStats(
            mean=_milliseconds(source.number("avg_latency")),
            std=_milliseconds(source.number("std_latency")),
            median=_milliseconds(percentiles.number("50")),
            p50=_milliseconds(percentiles.number("50")),
            p90=_milliseconds(percentiles.number("90")),
            p95=_milliseconds(percentiles.number("95")),
            p99=_milliseconds(percentiles.number("99")),
        ),
    )


def _vllm_serve(source: PeerObject) -> PeerMetrics:
    return _served(source, total_rate="total_token_throughput", end_to_end="e2el")


def _vllm_version(source: PeerObject) -> str | None:
    """What ``--metadata version=...`` or a later vLLM wrote."""
    return _first_text(source, "vllm_version", "version")


def _model_id(source: PeerObject) -> str | None:
    return source.text("model_id")


# -- SGLang ------------------------------------------------------------------------------


def _sglang_serving(source: PeerObject) -> PeerMetrics:
    return _served(source, total_rate="total_throughput", end_to_end="e2e_latency")


def _sglang_version(source: PeerObject) -> str | None:
    return _first_text(source.child("server_info"), "version")


def _sglang_model(source: PeerObject) -> str | None:
    return source.child("server_info").text("model_path")


# -- both --------------------------------------------------------------------------------


def _served(source: PeerObject, *, total_rate: str, end_to_end: str) -> PeerMetrics:
    """A run against a server: the tools agree on most keys, not on the two that are given."""
    total = source.number(total_rate)
    return PeerMetrics(
        wall_s=source.number("duration"),
        requests_completed=source.count("completed"),
        requests_failed=_failed(source),
        prompt_tokens=source.count("total_input_tokens"),
        output_tokens=source.count("total_output_tokens"),
        output_tokens_per_s=source.number("output_throughput"),
        total_tokens_per_s=_sum_of_rates(source) if total is None else total,
        requests_per_s=source.number("request_throughput"),
        ttft_ms=source.latency("ttft"),
        tpot_ms=source.latency("tpot"),
        itl_ms=source.latency("itl"),
        e2e_ms=source.latency(end_to_end),
    )


def _failed(source: PeerObject) -> float | None:
    """``failed`` where it is written; else the messages in ``errors``, of a detailed file."""
    if "failed" in source.values:
        return source.count("failed")
    errors = source.items("errors")
    return None if errors is None else sum(1 for text in errors if text)


def _sum_of_rates(source: PeerObject) -> float | None:
    """Older files have the rates of prompt and output tokens alone, over the same time."""
    prompt, output = source.number("input_throughput"), source.number("output_throughput")
    return None if prompt is None or output is None else prompt + output


def _first_text(source: PeerObject, *keys: str) -> str | None:
    found = (source.values.get(key) for key in keys)
    return next((value for value in found if isinstance(value, str)), None)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


FORMATS = (
    PeerFormat(
        tool="vllm bench throughput",
        keys=("elapsed_time", "tokens_per_second"),
        marks=("num_requests", "requests_per_second", "total_num_tokens"),
        metrics=_vllm_throughput,
        version=_vllm_version,
        model=_model_id,
        differs={"requests_completed": "requests sent; the file does not count failures"},
    ),
    PeerFormat(
        tool="vllm bench latency",
        keys=("avg_latency",),
        marks=("latencies", "percentiles"),
        metrics=_vllm_latency,
        version=_vllm_version,
        model=_model_id,
        differs={"e2e_ms": "of a whole batch, not of one request"},
    ),
    PeerFormat(
        tool="vllm bench serve",
        keys=("duration", "request_throughput"),
        marks=("total_token_throughput", "model_id", "tokenizer_id", "mean_e2el_ms"),
        metrics=_vllm_serve,
        version=_vllm_version,
        model=_model_id,
        differs={"itl_ms": _CHUNKS},
    ),
    PeerFormat(
        tool="sglang bench_serving",
        keys=("duration", "request_throughput"),
        marks=("total_output_tokens_retokenized", "mean_e2e_latency_ms"),
        metrics=_sglang_serving,
        version=_sglang_version,
        model=_sglang_model,
        differs={"itl_ms": _CHUNKS},
    ),
)
