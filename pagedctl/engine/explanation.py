"""What ``--explain-numerics`` shows: the tree as it holds here, every leaf, and who vouches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pagedctl.config.engine_config import EngineConfig
from pagedctl.config.loader import Resolved
from pagedctl.engine.config_checks import refuse_later
from pagedctl.engine.manifest_sections import numerics_section
from pagedctl.engine.model_parts import TRIED_ELEMENTS, BoundModel, bind_model, with_device
from pagedctl.engine.verification import eligibility_of, how_to_earn
from pagedctl.errors import NumericsRefused, PagedctlError
from pagedctl.manifest.schema import NumericsInfo
from pagedctl.models.binding import trial_site
from pagedctl.numerics.eligibility import Eligibility
from pagedctl.numerics.pins import hold_pins
from pagedctl.numerics.plugins import Installed, installed
from pagedctl.numerics.resolution import Numerics, Resolution, draft_numerics
from pagedctl.numerics.switches import SWITCHES
from pagedctl_kernels.plan import Plan
from pagedctl_kernels.registry import Candidate


@dataclass(frozen=True, kw_only=True)
class ExplainedSite:
    """One call site with its bound leaf.

    ``name`` is the manifest's. ``tried_columns``: the leaf checked itself on so many of the
    weight's columns, where a run checks all; None: as a run does.
    """

    name: str
    plan: Plan
    tried_columns: int | None

    def standings(self) -> tuple[tuple[str, str], ...]:
        """Each leaf of the op with ``chosen``, ``eligible`` or ``refused: REASONS``.

        Leaves of another kind of device than the chosen one's are no choice here.
        """
        kind = self.plan.leaf.capability.kind
        here = [one for one in self.plan.candidates if one.leaf.capability.kind == kind]
        return tuple((one.leaf.name, self._standing(one)) for one in here)

    def _standing(self, candidate: Candidate) -> str:
        if candidate.leaf == self.plan.leaf:
            return "chosen"
        if candidate.refusals:
            return "refused: " + "; ".join(candidate.refusals)
        return "eligible"


@dataclass(frozen=True, kw_only=True)
class ExplainedModel:
    """A bound model, who vouches for its contract, and the commands that earn what is missing."""

    bound: BoundModel
    eligibility: Eligibility
    how_to_earn: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The contract as a run with these options would have it.

    ``error`` is why there is no such run; ``resolution`` then holds the tree and the values that
    the contract did not take, and ``model`` is None. A missing record is no error: what only
    measures or proves runs without one.
    """

    resolution: Resolution
    model: ExplainedModel | None
    error: PagedctlError | None

    @property
    def numerics(self) -> Numerics:
        """The tree, on its device where a model was bound."""
        return self.resolution.numerics if self.model is None else self.model.bound.numerics

    def sites(self) -> tuple[ExplainedSite, ...]:
        """Every call site, in the order in which a token meets them."""
        if self.model is None:
            return ()
        plans = self.model.bound.plans
        return tuple(
            ExplainedSite(name=name, plan=plan, tried_columns=_tried_columns(plan))
            for name, plan in zip(plans.leaves(), plans.all(), strict=True)
        )

    def info(self) -> NumericsInfo:
        """The ``numerics`` object of a run's manifest; raises ``error`` if there is none."""
        if self.error is not None:
            raise self.error
        assert self.model is not None
        return numerics_section(self.model.bound, self.model.eligibility)


def explain(options: Resolved, environ: Mapping[str, str]) -> Explanation:
    """Resolve the contract of *options* and bind its leaves; no weight is read.

    *environ* tells where records are kept. Raises ConfigError if an installed plug-in is
    broken: then nothing is known of the tree.
    """
    here = installed().require_sound()
    resolution = _draft(options, here)
    if resolution.faults:
        error = NumericsRefused.of(resolution.faults)
        return Explanation(resolution=resolution, model=None, error=error)
    try:
        bound = _bind(options, here)
    except PagedctlError as refusal:
        return Explanation(resolution=resolution, model=None, error=refusal)
    eligibility = eligibility_of(bound, environ)
    model = ExplainedModel(
        bound=bound, eligibility=eligibility, how_to_earn=how_to_earn(bound, eligibility)
    )
    return Explanation(resolution=resolution, model=model, error=None)


def _draft(options: Resolved, here: Installed) -> Resolution:
    values: Mapping[str, object] = options.values
    given = {one.name: values[one.name] for one in SWITCHES}
    envelope = here.envelopes[str(values["numerics"])]
    return draft_numerics(envelope, given, options.origins)  # type: ignore[arg-type]


def _bind(options: Resolved, here: Installed) -> BoundModel:
    """As an engine is built, up to where it would read weights."""
    config = with_device(refuse_later(EngineConfig.from_resolved(options)))
    hold_pins(config.contract.on_device(config.device, tp=config.tp), os.environ)
    return bind_model(config, None, here.leaves, display=True)


def _tried_columns(plan: Plan) -> int | None:
    tried = trial_site(plan.site, TRIED_ELEMENTS)
    if tried == plan.site:
        return None
    columns = tried.facts["n"]
    assert isinstance(columns, int)
    return columns
