"""The checklist of an invariance proof: every place where an engine might choose by the batch.

One line each: *measured* if a case that ran varies what might decide there, *pinned* if the
contract leaves one way only, *not applicable* if this engine has no such place, *open* if none of
these holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pagedctl.engine.engine import Engine
from pagedctl_kernels.leaf import BATCH_INVARIANT, DETERMINISTIC
from pagedctl_kernels.plan import Plan

Standing = Literal["pinned", "measured", "not applicable", "open"]


@dataclass(frozen=True, kw_only=True)
class SelectionPoint:
    """One place where bits might follow the batch, and how this engine stands there."""

    name: str
    standing: Standing
    text: str


@dataclass(frozen=True, kw_only=True)
class _Point:
    """``pin`` says what leaves one way only, None: nothing does; ``cases`` vary what might decide.

    ``absent`` says why an engine has no such place.
    """

    name: str
    pin: str | None = None
    cases: tuple[str, ...] = ()
    absent: str | None = None

    def judged(self, cases_run: frozenset[str]) -> SelectionPoint:
        if self.absent is not None:
            return SelectionPoint(name=self.name, standing="not applicable", text=self.absent)
        ran = ", ".join(case for case in self.cases if case in cases_run)
        if ran:
            pin = self.pin or "nothing pins it"
            text = f"{pin}; varied by {ran}"
            return SelectionPoint(name=self.name, standing="measured", text=text)
        if self.pin is not None:
            return SelectionPoint(name=self.name, standing="pinned", text=self.pin)
        text = "nothing pins it, and no case that ran varies it"
        return SelectionPoint(name=self.name, standing="open", text=text)


def selection_points(engine: Engine, cases_run: frozenset[str]) -> tuple[SelectionPoint, ...]:
    """Every selection point of *engine*, after the cases *cases_run* of an invariance proof ran."""
    groups = (
        _attention(engine),
        _products(engine),
        _other_ops(engine),
        _ranks(engine),
        _device(engine),
        _scheduling(engine),
        _sampling(engine),
        _logprobs(engine),
    )
    return tuple(point.judged(cases_run) for group in groups for point in group)


def _attention(engine: Engine) -> Iterator[_Point]:
    plans = list(engine.parts.plans.attention.values())
    terms = dict(plans[0].order.terms)
    pin = _pin(plans, "for prefill, decode, cached prefixes and groups, at any number of rows")
    yield _Point(name="attention path", pin=pin, cases=("rescore", "prefix", "packed"))
    yield _Point(
        name="attention library by batch size", pin=_pin(plans), cases=("packed", "repeat")
    )
    splits = terms.get("splits")
    yield _Point(
        name="attention split",
        pin=f"{splits}, whatever the batch and the length" if splits else None,
        cases=("packed", "chunks", "rescore"),
    )


def _products(engine: Engine) -> Iterator[_Point]:
    plans = engine.parts.plans
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "head"):
        plan: Plan = getattr(plans, name)
        shape = f"{plan.site.facts['k']}x{plan.site.facts['n']}"
        yield _Point(
            name=f"GEMM tactic of {plan.site.name} {shape}",
            pin=_pin([plan], "for every number of rows"),
            cases=("packed", "chunks"),
        )
    yield _Point(
        name="rows of a batch cut for the cache",
        pin=_pin([plans.gate_up_proj, plans.silu_mul, plans.down_proj], "row by row"),
        cases=("packed", "chunks"),
    )
    dense = "the model is dense: no experts"
    yield _Point(name="grouped GEMM tactic", absent=dense)
    yield _Point(name="MoE finalise", absent=dense)


def _other_ops(engine: Engine) -> Iterator[_Point]:
    plans = engine.parts.plans
    yield _Point(
        name="norm configuration by width",
        pin=_pin([plans.norm], f"{dict(plans.norm.order.terms).get('sum', 'one')} for every row"),
        cases=("packed", "chunks"),
    )
    yield _Point(
        name="embedding, RoPE and activation",
        pin=_pin([plans.embedding, plans.qk_norm_rope_write, plans.silu_mul], "row by row"),
        cases=("packed", "chunks"),
    )


def _ranks(engine: Engine) -> Iterator[_Point]:
    tp = engine.config.tp
    absent = "tp 1: no collectives" if tp == 1 else None
    pin = None
    if engine.parts.model.numerics["deterministic_collectives"]:
        pin = "one route per call site, folds in rank order"
    yield _Point(name="all-reduce strategy by size", pin=pin, absent=absent)
    yield _Point(name="collectives by rows or bytes", pin=pin, absent=absent)
    yield _Point(name="fused all-reduce and norm", pin=pin, absent=absent)
    yield _Point(
        name="shards of another tp",
        pin=f"tp {tp} is part of the contract",
        cases=("topology",),
        absent="tp 1: one shard, and bits are promised for one tp only" if tp == 1 else None,
    )


def _device(engine: Engine) -> Iterator[_Point]:
    machine = engine.parts.model.machine
    on_cpu = machine.kind == "cpu"
    yield _Point(
        name="graph padding ladder",
        cases=("graphs",),
        absent="no graphs on the CPU: no step is padded" if on_cpu else None,
    )
    deterministic = bool(engine.parts.model.numerics["deterministic_kernels"])
    yield _Point(
        name="autotune",
        pin=_pin(engine.parts.plans.all(), feature=DETERMINISTIC, text="bound once, never tuned"),
        cases=("process",),
    )
    guard = "narrowed products are refused, before plans are made and at every step"
    yield _Point(name="TF32 and narrowed float32", pin=guard if deterministic else None)
    threads = f"{machine.threads} threads, checked at every step" if deterministic else None
    absent = None if on_cpu else "products run on the device"
    yield _Point(name="threads of a product", pin=threads, absent=absent)
    yield _Point(
        name="process: hash seeds, addresses, order of imports",
        pin="no decision reads a hash, an address or the clock",
        cases=("process",),
    )


def _scheduling(engine: Engine) -> Iterator[_Point]:
    config = engine.config
    one_path = "prefill, chunks, decode and recompute are one path"
    yield _Point(name="chunk boundary", pin=one_path, cases=("chunks",))
    yield _Point(
        name="prefix-reuse boundary",
        pin=None if config.prefix_cache else "the prefix cache is off",
        cases=("prefix",),
    )
    yield _Point(name="preemption and recompute", pin=one_path, cases=("preemption", "pools"))
    yield _Point(name="pool size and placement of blocks", cases=("pools", "prefix"))
    yield _Point(name="admission order and resident rows", cases=("packed", "repeat"))
    yield _Point(name="lag of the host", cases=("packed", "chunks", "pools", "preemption"))
    yield _Point(
        name="KV dtype",
        pin=f"{config.kv_dtype}: a new key is read back from the cache like an old one",
        cases=("rescore", "prefix"),
    )


def _sampling(engine: Engine) -> Iterator[_Point]:
    plans = engine.parts.plans
    yield _Point(
        name="random stream of a request",
        pin=_pin([plans.sample], "keyed by the request's seed and the absolute position"),
        cases=("packed", "sampled", "preemption"),
    )
    yield _Point(
        name="RNG of unseeded requests",
        pin="the seed is derived from the run seed and the id",
        cases=("sampled", "process"),
    )
    yield _Point(
        name="truncation and ties",
        pin=_pin([plans.sample], "integer masses, ties to the lowest id"),
        cases=("sampled",),
    )
    yield _Point(
        name="penalties and bias", pin=_pin([plans.logit_edits], "row by row"), cases=("sampled",)
    )


def _logprobs(engine: Engine) -> Iterator[_Point]:
    plans = engine.parts.plans
    order = engine.parts.model.numerics["logprob_order"]
    yield _Point(
        name="logprob path: sampled, prompt, likeliest",
        pin=_pin([plans.logprob], "one function for all three"),
        cases=("rescore", "sampled"),
    )
    yield _Point(
        name="logprob order",
        pin=_pin([plans.logprob, plans.block_sumexp], f"order {order}, fixed block sums"),
        cases=("packed", "rescore"),
    )


def _pin(
    plans: Iterable[Plan], text: str = "bound once", *, feature: str = BATCH_INVARIANT
) -> str | None:
    """What pins an op: its leaves, if all of them declare *feature*."""
    chosen = list(plans)
    if any(feature not in plan.leaf.features for plan in chosen):
        return None
    if feature == DETERMINISTIC:
        return f"{len(chosen)} leaves {text}"
    return f"{', '.join(dict.fromkeys(plan.leaf.name for plan in chosen))}, {text}"
