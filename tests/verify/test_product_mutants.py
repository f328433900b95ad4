"""The engine broken at each selection point: the case that concerns it sees it, and whose it is.

The runs are those of the proof itself, on the embedded model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.kv_cache import block_bytes
from pagedctl.verify.case_legs import Subject
from pagedctl.verify.cases import CASES
from pagedctl.verify.comparison import Divergence
from pagedctl.verify.invariance_requests import RandomPrompts, RequestMaker
from pagedctl.verify.judgement import divergences
from pagedctl.verify.legs import Engines
from pagedctl.verify.localisation import Suspect
from pagedctl.verify.reference import Reference
from pagedctl.verify.selection_points import selection_points
from pagedctl.verify.suspects import locate
from tests.verify.product_mutants import HERE_AND_THERE, MUTANTS, REFUSED

REQUESTS = 4
TOKENS = 8
VOCAB = 512


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(dtype="float32"), needs_record=False) as found:
        yield found


def subject_of(engine: Engine) -> Subject:
    """A few requests of the proof, on engines that share the model of *engine*."""
    config = engine.config
    assert config.max_model_len is not None
    maker = RequestMaker.of(
        RandomPrompts(VOCAB),
        max_model_len=config.max_model_len,
        max_tokens=TOKENS,
        block_size=config.block_size,
    )
    return Subject(
        config=config,
        block_bytes=block_bytes(engine.spec, config),
        vocab_size=engine.spec.output_vocab_size,
        maker=maker,
        requests=maker.requests(REQUESTS),
        reference=Reference(Engines(engine)),
    )


def first_divergence(engine: Engine, case: str) -> tuple[Divergence, Suspect | None] | None:
    """Run the legs of *case* up to the first that differs; the suspect of that difference."""
    subject, engines = subject_of(engine), Engines(engine)
    subject.reference.prepare(subject.requests)
    legs = list(CASES[case].legs(subject))
    subject.reference.prepare(probe.of for leg in legs for probe in leg.probes)
    for leg, trace in engines.traces(legs):
        for found in divergences(case, leg, trace, subject.reference):
            return found, locate(found, legs, engines, subject.reference).suspect
    return None


@pytest.mark.parametrize("case", sorted({mutant.case for mutant in MUTANTS.values()}))
def test_a_sound_engine_differs_nowhere(engine: Engine, case: str) -> None:
    assert first_divergence(engine, case) is None


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in HERE_AND_THERE])
def test_a_broken_selection_point_is_seen_and_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutant = MUTANTS[name]
    reached = mutant.put(monkeypatch)
    found = first_divergence(engine, mutant.case)
    assert reached.count > 0
    assert found is not None
    divergence, suspect = found
    assert divergence.difference.position > 0
    assert suspect is not None
    assert suspect.op in mutant.suspects


def test_every_line_of_the_checklist_has_a_mutant(engine: Engine) -> None:
    """What does not apply has none; what is refused at every step is tested as a refusal."""
    points = selection_points(engine, frozenset(CASES))
    applicable = {point.name for point in points if point.standing != "not applicable"}
    broken = {name for mutant in MUTANTS.values() for name in mutant.points}
    assert broken | REFUSED == applicable
    assert not broken & REFUSED


def test_settings_that_change_in_a_run_are_refused(engine: Engine) -> None:
    """Threads and narrowed float32 are no mutants: the next step is not run at all."""
    import torch

    from pagedctl.engine.request import Request, SamplingParams
    from pagedctl.errors import NumericsRefused

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    changes: tuple[tuple[Any, Any, Any], ...] = (
        (torch.set_float32_matmul_precision, "high", "highest"),
        (torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    )
    for change, value, before in changes:
        with Engine(engine.config, sharing=engine, needs_record=False) as other:
            other.submit(Request(id=0, prompt_token_ids=(5, 6), params=replace(params, seed=1)))
            other.step()
            change(value)
            try:
                with pytest.raises(NumericsRefused):
                    other.step()
            finally:
                change(before)
