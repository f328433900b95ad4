"""Runs the cases and renders what came out: a table per op, and every trial as JSON."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType

import torch
import triton
from rich.console import Console
from rich.table import Table

from pagedctl.bench.kernels.attention_cases import attention_cases
from pagedctl.bench.kernels.bench import Bench
from pagedctl.bench.kernels.case import Case
from pagedctl.bench.kernels.ceilings import Ceilings, measure_ceilings
from pagedctl.bench.kernels.linear_stack import PRODUCT, LinearStack, StackTiming
from pagedctl.bench.kernels.logit_cases import logit_edits_cases, logprob_cases, sample_cases
from pagedctl.bench.kernels.product_cases import gemm_cases, head_cases
from pagedctl.bench.kernels.replay import Timing, replayed
from pagedctl.bench.kernels.row_cases import (
    embedding_cases,
    qk_norm_rope_write_cases,
    rms_norm_cases,
    silu_mul_cases,
)
from pagedctl.bench.kernels.shapes import (
    DECODE_ROWS,
    PREFILL_ROWS,
    QWEN3_06B,
    QWEN3_8B,
    Batch,
    ModelShape,
    batches,
)

CASES: Mapping[str, Callable[[Batch, Bench], Iterator[Case]]] = MappingProxyType(
    {
        "gemm": gemm_cases,
        "head": head_cases,
        "attention": attention_cases,
        "rms_norm": rms_norm_cases,
        "qk_norm_rope_write": qk_norm_rope_write_cases,
        "silu_mul": silu_mul_cases,
        "embedding": embedding_cases,
        "sample": sample_cases,
        "logprob": logprob_cases,
        "logit_edits": logit_edits_cases,
    }
)
STACKS: Mapping[str, ModelShape] = MappingProxyType({"stack-8b": QWEN3_8B, "stack-0.6b": QWEN3_06B})
OPS = (*STACKS, *CASES)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One shape of one op: every trial of ours (None: no leaf serves it) and of each peer."""

    op: str
    workload: str
    shape: str
    floor_us: float
    product: Timing | None
    peers: Mapping[str, Timing]


class KernelBench:
    """Times ops on the current GPU; prints each op's table when it is done."""

    def __init__(self, console: Console) -> None:
        self.bench = Bench("cuda")
        self.console = console
        self.lines: list[Line] = []

    @cached_property
    def ceilings(self) -> Ceilings:
        found = measure_ceilings()
        self.console.print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
            f"triton {triton.__version__}: reads {found.read / 1e3:,.0f} GB/s, "
            f"multiplies {found.multiply / 1e6:,.0f} TFLOP/s in bfloat16"
        )
        return found

    @torch.inference_mode()
    def run(self, op: str, *, workload: str | None, rows: Sequence[int] | None) -> None:
        """Times *op* at its shapes; *workload* and *rows* keep only some of them."""
        model = STACKS.get(op)
        timed = self._cases(op, workload) if model is None else self._stack(op, model, rows)
        lines = list(timed)
        _free_memory()
        self.lines += lines
        self.console.print(table(op, lines))

    def as_object(self) -> dict[str, object]:
        """Every trial, as what JSON can hold."""
        return {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "read_gb_s": self.ceilings.read / 1e3,
            "multiply_tflop_s": self.ceilings.multiply / 1e6,
            "lines": [asdict(line) for line in self.lines],
        }

    def _stack(self, op: str, model: ModelShape, rows: Sequence[int] | None) -> Iterator[Line]:
        stack = LinearStack(self.bench, model)
        for count in rows or (*DECODE_ROWS, *PREFILL_ROWS):
            yield _stack_line(op, stack.time(count, self.ceilings))

    def _cases(self, op: str, workload: str | None) -> Iterator[Line]:
        timed: set[str] = set()
        for batch in batches():
            if workload is not None and workload not in batch.workload:
                continue
            for case in CASES[op](batch, self.bench):
                if case.shape not in timed:  # the same work as in an earlier batch
                    timed.add(case.shape)
                    yield self._timed(case)
            _free_memory()

    def _timed(self, case: Case) -> Line:
        ours = {} if case.product is None else {PRODUCT: case.product}
        timings = replayed({**ours, **case.peers})
        return Line(
            op=case.op,
            workload=case.workload,
            shape=case.shape,
            floor_us=self.ceilings.floor_us(case.moved_bytes, case.operations),
            product=timings.pop(PRODUCT, None),
            peers=timings,
        )


def _stack_line(op: str, found: StackTiming) -> Line:
    timings = dict(found.timings)
    return Line(
        op=op,
        workload=found.model,
        shape=f"{found.rows} rows" + ("" if found.with_head else ", no head, no graph"),
        floor_us=found.floor_us,
        product=timings.pop(PRODUCT, None),
        peers=timings,
    )


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def table(op: str, lines: Sequence[Line]) -> Table:
    made = Table(title=op, title_justify="left")
    made.add_column("workload")
    made.add_column("shape")
    for column in ("us", "spread", "floor us", "of floor"):
        made.add_column(column, justify="right")
    made.add_column("peer")
    for column in ("peer us", "ratio"):
        made.add_column(column, justify="right")
    for line in lines:
        ours = line.product
        cells = ["no leaf", "", f"{line.floor_us:.1f}", ""]
        if ours is not None:
            share = f"{line.floor_us / ours.us:.0%}"
            cells = [f"{ours.us:.1f}", f"{ours.spread_us:.1f}", f"{line.floor_us:.1f}", share]
        beside = [
            (name, f"{one.us:.1f}", "" if ours is None else f"{one.over(ours):.2f}")
            for name, one in line.peers.items()
        ]
        for index, peer in enumerate(beside or [("", "", "")]):
            first = [line.workload, line.shape, *cells] if index == 0 else [""] * 6
            made.add_row(*first, *peer)
    return made
