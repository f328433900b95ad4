"""What a peer's result file says, in our names and units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pagedctl.manifest.schema import Imported

_ORIGIN = "derived: the imported file"


@dataclass(frozen=True, kw_only=True)
class LatencyStats:
    """Statistics of one latency in milliseconds; None: the source has no such figure."""

    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, kw_only=True)
class PeerMetrics:
    """The metrics of a bench manifest, as far as the source has them.

    None is "the source does not say", never 0. A NaN or an infinity of the source is kept: the
    manifest's writer turns it into null with its reason. Counts are ints, or such a float.
    """

    wall_s: float | None = None
    requests_completed: float | None = None
    requests_failed: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    tokens_per_s_end_to_end: float | None = None
    requests_per_s: float | None = None
    ttft_ms: LatencyStats | None = None
    tpot_ms: LatencyStats | None = None
    itl_ms: LatencyStats | None = None
    e2e_ms: LatencyStats | None = None
    kv_tokens: float | None = None
    max_concurrency_at_cap: float | None = None
    peak_device_mib: float | None = None
    finish_reasons: Mapping[str, int] | None = None
    len_p50: float | None = None
    len_max: float | None = None
    preemptions: float | None = None
    forward_tokens: float | None = None
    prefix_hit_tokens: float | None = None


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """One run of another tool.

    ``imported`` has the tool, its version where the file names it, and the source object whole;
    ``line`` is where that starts in the file. ``model`` is the tool's name of the model.
    ``request_rate`` is in requests per second: infinity where all were sent at once, None where
    the file does not say. ``differs`` tells, by metric, where the source's definition is not
    ours.
    """

    imported: Imported
    line: int
    metrics: PeerMetrics
    model: str | None
    request_rate: float | None
    differs: Mapping[str, str]

    def manifest_sections(self) -> dict[str, object]:
        """The sections of the manifest of an import, by name."""
        config = {"model": self.model, "request_rate": self.request_rate}
        return {
            "config": config,
            "config_origin": dict.fromkeys(config, _ORIGIN),
            "metrics": asdict(self.metrics),
            "imported": self.imported,
        }
