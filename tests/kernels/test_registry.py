"""Selection: filters before ranks, ties by name, and every refusal has its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    DETERMINISTIC,
    CallSite,
    Capability,
    LeafSpec,
    Limit,
    Requirement,
    formats,
)
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.order import Order, OrderTemplate, arithmetic_id
from pagedctl_kernels.plan import LeafUnfit, plan
from pagedctl_kernels.registry import NoLeafError, Registry

CPU = Machine(kind="cpu", isa="AVX512", library="lib 1", threads=2)
HOPPER = Machine(kind="cuda", capability=(9, 0))
SITE = CallSite(op="toy", name="layer.toy", dtypes={"x": "float32"}, facts={"k": 64, "n": 32})
ORDER = OrderTemplate(op="toy", device_class="cpu", terms=(("chain", "over {k}"),))


HOPPER_ORDER = replace(ORDER, device_class="sm_90")


def leaf(name: str, **changes: object) -> LeafSpec:
    fields: dict[str, object] = {
        "name": name,
        "op": "toy",
        "entry": "tests.kernels.test_registry:build_toy",
        "formats": formats("x", dtypes=("float32",)),
        "capability": Capability(kind="cpu"),
        "order": ORDER,
        "features": frozenset({BATCH_INVARIANT}),
    }
    return LeafSpec(**{**fields, **changes})  # type: ignore[arg-type]


def build_toy(site: CallSite, machine: Machine) -> Callable[[], str]:
    return lambda: f"{site.name} on {machine.kind}"


def build_unfit(site: CallSite, machine: Machine) -> str:
    raise LeafUnfit("the library reorders")


def names(registry: Registry, requirement: Requirement, site: CallSite = SITE) -> list[str]:
    ranked = registry.explain(site, CPU, requirement)
    return [one.leaf.name for one in ranked if not one.refusals]


def test_priority_ranks_before_traits_and_traits_before_names() -> None:
    registry = Registry(
        [
            leaf("a"),
            leaf("b"),
            leaf("c", traits=(("size", "small"),)),
            leaf("d", priority=1),
        ]
    )
    wanted = Requirement(traits=(("size", "small"),))
    assert names(registry, wanted) == ["d", "c", "a", "b"]
    assert names(registry, Requirement()) == ["d", "a", "b", "c"]


def test_selection_does_not_depend_on_registration_order() -> None:
    leaves = [leaf("b"), leaf("a"), leaf("c", priority=-1)]
    for order in (leaves, leaves[::-1]):
        assert Registry(order).select(SITE, CPU, Requirement()).leaf.name == "a"


def test_a_silent_leaf_is_excluded_by_a_required_feature() -> None:
    registry = Registry([leaf("fast", features=frozenset(), priority=9), leaf("slow")])
    assert names(registry, Requirement()) == ["fast", "slow"]
    wanted = Requirement(features=frozenset({BATCH_INVARIANT}))
    assert registry.select(SITE, CPU, wanted).leaf.name == "slow"


def test_names_restrict_the_candidates_and_never_bypass_features() -> None:
    registry = Registry([leaf("fast", features=frozenset(), priority=9), leaf("slow")])
    assert names(registry, Requirement(names=("slow",))) == ["slow"]
    both = Requirement(names=("fast",), features=frozenset({BATCH_INVARIANT}))
    with pytest.raises(NoLeafError) as caught:
        registry.select(SITE, CPU, both)
    assert "fast (priority 9): refused: does not declare batch_invariant" in str(caught.value)


def test_explain_lists_every_reason_of_every_leaf() -> None:
    registry = Registry(
        [
            leaf("cuda", capability=Capability(kind="cuda", minimum=(9, 0)), order=HOPPER_ORDER),
            leaf(
                "narrow",
                formats=formats("x", dtypes=("float16",)),
                limits=(Limit(fact="k", maximum=32), Limit(fact="n", multiple_of=5)),
                features=frozenset(),
            ),
        ]
    )
    wanted = Requirement(features=frozenset({BATCH_INVARIANT, DETERMINISTIC}))
    reasons = {c.leaf.name: c.refusals for c in registry.explain(SITE, CPU, wanted)}
    assert reasons["narrow"] == (
        "no format takes x:float32",
        "k 64 is above 32",
        "n 32 is not a multiple of 5",
        "does not declare batch_invariant, deterministic",
    )
    assert reasons["cuda"] == (
        "needs a cuda device, this is cpu",
        "does not declare deterministic",
    )


def test_no_leaf_error_names_the_site_the_device_and_each_candidate() -> None:
    registry = Registry([leaf("only", capability=Capability(kind="cuda"), order=HOPPER_ORDER)])
    with pytest.raises(NoLeafError) as caught:
        registry.select(SITE, CPU, Requirement(features=frozenset({BATCH_INVARIANT})))
    assert str(caught.value).splitlines() == [
        "no leaf of op toy qualifies at layer.toy on cpu (required: batch_invariant)",
        "  only (priority 0): refused: needs a cuda device, this is cpu",
    ]
    with pytest.raises(NoLeafError, match="no leaf of op toy is registered"):
        Registry([]).select(SITE, CPU, Requirement())


@pytest.mark.parametrize(
    ("capability", "refusal"),
    [
        (Capability(kind="cuda", minimum=(8, 0), maximum=(9, 0)), None),
        (Capability(kind="cuda", minimum=(10, 0)), "needs sm_100, this is sm_90"),
        (Capability(kind="cuda", maximum=(8, 9)), "runs up to sm_89, this is sm_90"),
        (Capability(kind="cpu"), "needs a cpu device, this is sm_90"),
    ],
)
def test_capability_is_checked_at_both_ends(capability: Capability, refusal: str | None) -> None:
    assert capability.refusal(HOPPER) == refusal


@pytest.mark.parametrize(
    ("limit", "refusal"),
    [
        (Limit(fact="k", minimum=64, maximum=64, multiple_of=32), None),
        (Limit(fact="k", minimum=65), "k 64 is below 65"),
        (Limit(fact="k", allowed=(32, 128)), "k 64 is not one of 32, 128"),
        (Limit(fact="rows", maximum=8), "bounds rows, which varies at this call site"),
        (Limit(fact="width", maximum=8), "bounds width, which this call site does not state"),
    ],
)
def test_limits_bound_stated_facts_and_never_a_varying_one(
    limit: Limit, refusal: str | None
) -> None:
    assert limit.refusal(SITE) == refusal


def test_a_pinned_order_admits_equal_orders_only() -> None:
    other = OrderTemplate(op="toy", device_class="cpu", terms=(("chain", "two halves of {k}"),))
    registry = Registry([leaf("a", order=other, priority=5), leaf("b")])
    pinned = leaf("b").resolve_order(SITE, CPU)
    assert registry.select(SITE, CPU, Requirement(order=pinned)).leaf.name == "b"
    refused = {
        c.leaf.name: c.refusals for c in registry.explain(SITE, CPU, Requirement(order=pinned))
    }
    assert refused["a"] == ("order, chain: two halves of 64 here, over 64 required",)


@pytest.mark.parametrize("fact", ["rows", "n", "num_tokens", "num_seqs", "shard", "tp"])
def test_an_order_cannot_depend_on_the_batch_the_shard_or_the_fusion(fact: str) -> None:
    with pytest.raises(ValueError, match=f"may not depend on {fact}"):
        OrderTemplate(op="toy", device_class="cpu", terms=(("chain", f"{{{fact}}}"),))


def test_plug_in_leaves_join_a_new_registry_and_leave_the_old_one() -> None:
    house = Registry([leaf("a")])
    joined = house.with_leaves([leaf("plug", priority=3)])
    assert joined.select(SITE, CPU, Requirement()).leaf.name == "plug"
    assert [one.name for one in house.leaves()] == ["a"]
    with pytest.raises(ValueError, match="leaf a is registered twice"):
        house.with_leaves([leaf("a")])


def test_an_unfit_leaf_gives_way_and_its_reason_is_reported() -> None:
    unfit = leaf("first", priority=2, entry="tests.kernels.test_registry:build_unfit")
    assert plan(Registry([unfit, leaf("second")]), SITE, CPU, Requirement()).leaf.name == "second"
    with pytest.raises(NoLeafError, match="unfit on this machine: the library reorders"):
        plan(Registry([unfit]), SITE, CPU, Requirement())


def test_arithmetic_id_is_of_the_set_of_orders() -> None:
    one = Order(op="a", device_class="cpu", terms=(("x", "1"), ("y", "2")))
    swapped = Order(op="a", device_class="cpu", terms=(("y", "2"), ("x", "1")))
    two = Order(op="b", device_class="cpu", terms=())
    assert arithmetic_id([one, two]) == arithmetic_id([two, one, swapped, one])
    assert arithmetic_id([one]) != arithmetic_id([one, two])


@pytest.mark.parametrize(
    "term",
    ["{n}", "{rows}", "{q_heads}", "{block_size}", "{vocab_size}", "{k.real}", "{k:{n}}", "{k!r}"],
)
def test_an_order_may_name_nothing_but_the_allowed_facts(term: str) -> None:
    with pytest.raises(ValueError, match="may not depend on"):
        OrderTemplate(op="toy", device_class="cpu", terms=(("chain", term),))


def test_an_order_of_another_device_class_is_refused() -> None:
    with pytest.raises(ValueError, match="its order is of cpu"):
        leaf("cuda", capability=Capability(kind="cuda"))
    registry = Registry([leaf("h", capability=Capability(kind="cuda"), order=HOPPER_ORDER)])
    blackwell = Machine(kind="cuda", capability=(10, 0))
    (candidate,) = registry.explain(SITE, blackwell, Requirement())
    assert candidate.refusals == ("its order is of sm_90, this is sm_100",)


def test_a_leaf_whose_order_cannot_be_filled_is_refused_and_the_others_serve() -> None:
    order = OrderTemplate(op="toy", device_class="cpu", terms=(("width", "{width}"),))
    registry = Registry([leaf("lacking", order=order, priority=9), leaf("plain")])
    assert registry.select(SITE, CPU, Requirement()).leaf.name == "plain"
    reasons = {one.leaf.name: one.refusals for one in registry.explain(SITE, CPU, Requirement())}
    assert reasons["lacking"] == ("its order names 'width', which this call site does not state",)
