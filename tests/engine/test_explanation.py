"""The explanation of a contract: standings of leaves that prove unfit, and partial checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedctl.config.engine_config import EngineConfig
from pagedctl.config.loader import Resolved
from pagedctl.engine.explanation import Explanation, explain
from pagedctl.engine.model_parts import TRIED_ELEMENTS
from pagedctl.models.binding import trial_site
from pagedctl_kernels import plan, sites
from pagedctl_kernels.plan import LeafUnfit
from tests.reference.tiny_models import tiny_model


def explained(folder: Path, **options: Any) -> Explanation:
    path = tiny_model("llama").write_config(folder)
    config = EngineConfig(model=path, dtype="float32", **options)
    environ = {"PAGEDCTL_HOME": str(folder / "home")}
    return explain(Resolved(values=config.as_dict(), origins=config.origins), environ)


def gemm_standings(found: Explanation) -> dict[str, dict[str, str]]:
    return {
        one.plan.site.name: dict(one.standings())
        for one in found.sites()
        if one.plan.site.op == "gemm"
    }


def test_a_leaf_that_fails_its_own_check_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = gemm_standings(explained(tmp_path / "control"))
    (first,) = {name for one in control.values() for name, how in one.items() if how == "chosen"}
    plain, reached = plan.bind, []

    def unfit(selection: Any, machine: Any) -> Any:
        if selection.leaf.name == first:
            reached.append(selection.site.name)
            raise LeafUnfit("planted")
        return plain(selection, machine)

    monkeypatch.setattr(plan, "bind", unfit)
    mutant = gemm_standings(explained(tmp_path / "mutant"))
    assert set(reached) == set(mutant) == set(control)
    for one in mutant.values():
        assert one[first] == "refused: unfit on this machine: planted"
        assert [*one.values()].count("chosen") == 1


def test_a_leaf_that_is_unfit_at_one_site_is_eligible_at_the_others_and_chosen_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = gemm_standings(explained(tmp_path / "control"))
    (first,) = {name for one in control.values() for name, how in one.items() if how == "chosen"}
    plain, reached = plan.bind, []

    def unfit_at_o_proj(selection: Any, machine: Any) -> Any:
        if selection.leaf.name == first and selection.site.name == "o_proj":
            reached.append(first)
            raise LeafUnfit("planted")
        return plain(selection, machine)

    monkeypatch.setattr(plan, "bind", unfit_at_o_proj)
    found = gemm_standings(explained(tmp_path / "mutant"))
    assert reached
    assert found.pop("o_proj")[first] == "refused: unfit on this machine: planted"
    chosen = set()
    for one in found.values():
        assert one[first] == "eligible"
        chosen |= {name for name, how in one.items() if how == "chosen"}
    assert len(chosen) == 1
    assert first not in chosen


def test_a_wide_weight_is_tried_in_part_and_a_narrow_one_as_a_run_does() -> None:
    head = sites.head_site("lm_head", k=4096, n=151936, dtype="bfloat16")
    tried = trial_site(head, TRIED_ELEMENTS)
    assert tried.facts["n"] == TRIED_ELEMENTS // 4096
    assert {**tried.facts, "n": 151936} == head.facts
    assert trial_site(head, None) is head
    narrow = sites.gemm_site("o_proj", k=128, n=128, dtype="float32", bias=False)
    assert trial_site(narrow, TRIED_ELEMENTS) == narrow
    norm = sites.rms_norm_site("norm", width=1 << 20, eps=1e-6, dtype="float32")
    assert trial_site(norm, 1) is norm


def test_no_run_of_the_engine_checks_in_part(tmp_path: Path) -> None:
    """The engine binds the whole sites: a display's plans are not to be run."""
    from pagedctl.engine.model_parts import bind_model, with_device
    from pagedctl.numerics.plugins import installed

    tried: list[int | None] = []
    plain = plan.bind

    def noted(selection: Any, machine: Any) -> Any:
        if selection.site.op == "head":
            tried.append(selection.site.facts["n"])
        return plain(selection, machine)

    path = tiny_model("llama").write_config(tmp_path)
    config = with_device(EngineConfig(model=path, dtype="float32", random_weights=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "bind", noted)
        patch.setattr("pagedctl.engine.model_parts.TRIED_ELEMENTS", 48 * 64)
        bind_model(config, None, installed().leaves)
        bind_model(config, None, installed().leaves, display=True)
    assert tried == [99, 64]
