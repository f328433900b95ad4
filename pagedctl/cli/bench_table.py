"""The result of ``pagedctl bench`` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from pagedctl.bench.metrics import LATENCIES, BenchResult
from pagedctl.bench.workloads import Workload
from pagedctl.cli.words import count_of

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine

RATES: Mapping[str, str] = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
    "requests_per_s": "requests/s",
    "wall_s": "wall s",
}


def header(engine: Engine, workload: Workload, *, repeats: int) -> Text:
    """``bench · embedded · cpu float32 · fast · uniform:requests=64,... · 3 repeats``."""
    config, spec = engine.config, engine.spec
    parts = (
        "bench",
        spec.name,
        f"{config.device} {spec.dtype}",
        config.numerics,
        workload.spec,
        count_of(repeats, "repeat"),
    )
    return Text(" · ".join(parts))


def table(result: BenchResult) -> Columns:
    """Rates with their spread, latencies, and the load: side by side where there is room."""
    return Columns((_rates(result), _latencies(result), _load(result)), padding=(0, 4))


def _rates(result: BenchResult) -> Table:
    grid = _grid("", "median", "min", "max")
    for name, label in RATES.items():
        low, high = result.spread[name]
        grid.add_row(label, _number(result.metrics[name]), _number(low), _number(high))
    return grid


def _latencies(result: BenchResult) -> Table:
    grid = _grid("", "p50", "p99")
    for name in LATENCIES:
        found = result.metrics[name]
        statistics = found if isinstance(found, Mapping) else {}
        label = name.removesuffix("_ms").upper() + " ms"
        grid.add_row(label, _number(statistics.get("p50")), _number(statistics.get("p99")))
    return grid


def _load(result: BenchResult) -> Table:
    grid = _grid("", "")
    metrics = result.metrics
    running = f"{_number(metrics['running_p50'])}/{_number(metrics['running_max'])}"
    grid.add_row("running p50/max", running)
    grid.add_row("KV used max", _percent(metrics["kv_used_max"]))
    grid.add_row("preemptions", _number(metrics["preemptions"]))
    grid.add_row("forward tokens", _number(metrics["forward_tokens"]))
    grid.add_row("len p50/max", f"{_number(metrics['len_p50'])}/{_number(metrics['len_max'])}")
    return grid


def _grid(*headings: str) -> Table:
    """A table without lines; the first column is words, the rest are numbers, never wrapped."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1), show_header=any(headings))
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return grid


def _percent(share: object) -> str:
    assert isinstance(share, float)
    return f"{100 * share:.1f} %"


def _number(value: object) -> str:
    """A count in full; a measured figure with about three digits; ``-`` if there is none."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    assert isinstance(value, float)
    if value.is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
