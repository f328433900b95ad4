"""Faults that a proof of invariance must catch, planted as leaves of the real registry. No torch.

A proof that finds nothing proves something only if it would have found a fault. Each planted
fault is one leaf that claims to be batch-invariant and is not. It is selected and bound like any
other, and the same requests that prove the model must expose it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedctl.config.engine_config import EngineConfig
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    DETERMINISTIC,
    Capability,
    Format,
    LeafSpec,
    formats,
)
from pagedctl_kernels.order import OrderTemplate
from pagedctl_kernels.registry import Registry
from pagedctl_kernels.sites import DTYPES

LEAVES = "pagedctl.verify.planted_leaves"
INTERNAL_DTYPES = ("float32", "float64")


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """A registry with a faulty leaf of the op *op* on top.

    ``description`` says what the leaf does wrong. An engine over ``registry`` runs it wherever a
    model has the op.
    """

    name: str
    description: str
    op: str
    registry: Registry

    def config_for(self, config: EngineConfig) -> EngineConfig:
        """*config* without the ``--leaf`` options that would keep the faulty leaf out."""
        kept = tuple(text for text in config.leaf if text.partition("=")[0] != self.op)
        return config if kept == config.leaf else replace(config, leaf=kept)


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    name: str
    description: str
    op: str
    builder: str
    formats: tuple[Format, ...]
    terms: tuple[tuple[str, str], ...]


_RECIPES = (
    _Recipe(
        name="gemm-split-by-rows",
        description="a matrix product whose K segments follow the number of rows",
        op="gemm",
        builder="build_gemm",
        formats=formats("x", "w", "y", dtypes=DTYPES),
        terms=(
            ("inputs", "{x_dtype}"),
            ("chain", "the library's, over each segment of K = {k}"),
            ("segments", "planted fault: as many as leave the rows room"),
            ("output", "segments added in {y_dtype}"),
        ),
    ),
    _Recipe(
        name="head-moved-by-rows",
        description="an output head whose logits move by one float32 step when several rows "
        "are in the call",
        op="head",
        builder="build_head",
        formats=formats("x", "w", dtypes=DTYPES),
        terms=(
            ("chain", "that of the sound leaf, over K = {k}"),
            ("output", "planted fault: moved by one step for more than one row"),
        ),
    ),
    _Recipe(
        name="sample-keyed-by-row",
        description="a generator whose key is the row of the batch, not the request's seed",
        op="sample",
        builder="build_sample",
        formats=formats("x", dtypes=INTERNAL_DTYPES),
        terms=(
            ("temperature", "{temperature_form} in {internal}"),
            ("noise", "planted fault: keyed by the row of the batch"),
        ),
    ),
    _Recipe(
        name="logprob-order-by-rows",
        description="a logprob from another order when more than one row is in the call",
        op="logprob",
        builder="build_logprob",
        formats=formats("x", dtypes=INTERNAL_DTYPES),
        terms=(
            ("temperature", "{temperature_form} in {internal}"),
            ("form", "{form}"),
            ("fold", "planted fault: the library's logsumexp for more than one row"),
        ),
    ),
)


def planted_faults(registry: Registry) -> tuple[PlantedFault, ...]:
    """Every built-in fault, each planted alone into a copy of *registry*."""
    return tuple(
        PlantedFault(
            name=recipe.name,
            description=recipe.description,
            op=recipe.op,
            registry=registry.with_leaves(_faulty_leaves(recipe, registry)),
        )
        for recipe in _RECIPES
    )


def _faulty_leaves(recipe: _Recipe, registry: Registry) -> list[LeafSpec]:
    """One leaf per device class that *registry* serves the op on, above all others."""
    others = registry.leaves(recipe.op)
    classes = {leaf.order.device_class: leaf.capability.kind for leaf in others}
    top = max((leaf.priority for leaf in others), default=0) + 1
    return [
        LeafSpec(
            name=f"planted.{recipe.name}.{device_class}",
            op=recipe.op,
            entry=f"{LEAVES}:{recipe.builder}",
            formats=recipe.formats,
            capability=Capability(kind=kind),
            order=OrderTemplate(op=recipe.op, device_class=device_class, terms=recipe.terms),
            features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
            priority=top,
        )
        for device_class, kind in sorted(classes.items())
    ]
