"""What a manifest says of an engine: configuration, contract, model, memory, devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedctl.config.engine_config import EngineConfig
from pagedctl.config.home import home_folder
from pagedctl.engine.config_checks import position_warnings
from pagedctl.engine.verification import eligibility_of
from pagedctl.manifest.environment import cpu_info, run_facts, versions
from pagedctl.manifest.schema import (
    DeviceInfo,
    ManifestWarning,
    MemoryTerm,
    ModelInfo,
    NumericsInfo,
    SwitchInfo,
)
from pagedctl.manifest.writer import ManifestBuilder
from pagedctl.models.inspection import model_info
from pagedctl.models.model_digest import model_digest
from pagedctl.numerics.eligibility import NOTHING_TO_VERIFY, Eligibility
from pagedctl.numerics.pins import pins_in_force
from pagedctl.numerics.resolution import Numerics

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine
    from pagedctl.engine.model_parts import BoundModel


def fill_header(builder: ManifestBuilder, environ: Mapping[str, str]) -> None:
    """The tool, versions, devices and environment of this process."""
    facts = run_facts(environ, torch=sys.modules.get("torch"))
    builder.tool = facts.tool
    builder.versions = dict(facts.versions)
    builder.devices = facts.devices
    builder.env = dict(facts.env)


def fill_from_config(builder: ManifestBuilder, config: EngineConfig) -> None:
    """``config``, ``config_origin`` and the contract, before anything was built.

    Options of the command that are not the engine's keep the values they have in *builder*.
    """
    builder.config |= config.as_dict()
    builder.config_origin |= dict(config.origins)
    bitwise = config.contract.contract.bitwise
    unjudged = Eligibility(verified=False) if bitwise else NOTHING_TO_VERIFY
    builder.numerics = _numerics(config.contract, unjudged, leaves={}, arithmetic_id=None)


def fill_from_engine(builder: ManifestBuilder, engine: Engine) -> None:
    """Every section that a built engine decides, and the versions that only torch knows.

    The warnings of the model and of the contract's verification are added to the manifest's.
    The first digest of a model on a machine reads all of its files: call this before anything
    is timed.
    """
    fill_from_config(builder, engine.config)
    verification = engine.parts.verification
    builder.numerics = numerics_section(engine.parts.model, verification.eligibility)
    builder.model = _model(engine)
    builder.memory = _memory(engine)
    builder.devices = _devices(builder, engine.config)
    builder.versions = versions(torch=sys.modules["torch"])
    builder.warnings += [
        ManifestWarning(code=one.code, where=one.where, text=one.text)
        for one in engine.spec.warnings
    ]
    for code, where, text in position_warnings(engine.config, engine.spec):
        builder.warn(code, where=where, text=text)
    builder.warnings += verification.warnings


def numerics_section(bound: BoundModel, eligibility: Eligibility | None = None) -> NumericsInfo:
    """The contract as it holds for *bound*, its leaves, and who vouches for it.

    *eligibility* None: that is judged here.
    """
    plans = bound.plans
    return _numerics(
        bound.numerics,
        eligibility or eligibility_of(bound, os.environ),
        leaves=plans.leaves(),
        arithmetic_id=plans.arithmetic_id,
    )


def _numerics(
    numerics: Numerics,
    eligibility: Eligibility,
    *,
    leaves: Mapping[str, str],
    arithmetic_id: str | None,
) -> NumericsInfo:
    """The contract as it holds, and who vouches for it."""
    contract = numerics.contract
    return NumericsInfo(
        contract=contract.name,
        bitwise=contract.bitwise,
        eligible_by=eligibility.eligible_by,
        verified=eligibility.verified,
        switches={
            name: SwitchInfo(value=setting.value, set_by=setting.set_by, note=setting.note)
            for name, setting in numerics.settings.items()
        },
        leaves=leaves,
        routes=None,
        pins=pins_in_force(numerics, os.environ),
        arithmetic_id=arithmetic_id,
    )


def _model(engine: Engine) -> ModelInfo:
    resolved = engine.parts.model.resolved
    digest = model_digest(resolved, home=home_folder(os.environ))
    info = model_info(replace(resolved, spec=engine.spec), digest=digest)
    seed = engine.config.random_weights
    if seed is None:
        return info
    return replace(info, source=f"{info.source}, random weights of seed {seed}")


def _memory(engine: Engine) -> tuple[MemoryTerm, ...]:
    """Each term as the model and the configuration predict it, and as it was allocated."""
    planned = {
        "weights": engine.spec.weight_bytes(),
        "kv": engine.config.kv_cache_memory_bytes,
    }
    return tuple(
        MemoryTerm(
            term=term,
            rank=0,
            planned_bytes=planned.get(term),
            measured_bytes=measured_bytes,
            source="derived",
        )
        for term, measured_bytes in engine.capacity().terms.items()
    )


def _devices(builder: ManifestBuilder, config: EngineConfig) -> tuple[DeviceInfo, ...]:
    """The device of each rank: the CPU, or the first GPUs that this process sees."""
    if config.device != "cpu":
        return builder.devices[: config.tp]
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return (cpu_info().as_device(rank=0, capability=capability),)
