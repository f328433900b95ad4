"""The proof as a library: every dtype, basis and contract, and what it leaves out with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedctl.config.engine_config import EngineConfig
from pagedctl.errors import CapacityError, NumericsRefused
from pagedctl.verify import power_check
from pagedctl.verify.cases import CASES
from pagedctl.verify.invariance import require_promise
from pagedctl.verify.invariance_requests import RandomPrompts
from tests.verify.invariance_harness import proof, prove

SMALL: dict[str, Any] = {"requests": 2, "max_tokens": 4}


@pytest.mark.parametrize(
    "options",
    [
        {"family": "mistral", "dtype": "bfloat16", "kv_dtype": "bfloat16"},
        {"numerics": "rl-bitwise", "block_size": 4, "lag": 1},
        {"logprob_basis": "raw", "chunk_size": 9},
    ],
    ids=["bfloat16", "rl-bitwise", "raw"],
)
def test_a_sound_engine_passes_packed_sampled_and_rescored(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """vllm-project/vllm#32480: equality of fp32 logprobs, alone against 65 rows."""
    found = prove(tmp_path, cases=("packed", "sampled", "rescore"), **SMALL, **options)
    assert found.verdict.holds is True, (found.lacks(), found.first)
    assert found.proved == ("packed", "rescore", "sampled")
    assert found.faults_caught == 4
    assert next(one for one in found.cases if one.name == "packed").rows_max == 256
    assert found.still_needed == (("align",) if "numerics" in options else ())


def test_a_basis_that_prompts_do_not_have_is_left_out_of_them(tmp_path: Path) -> None:
    options = {"cases": ("rescore", "sampled"), "logprob_basis": "processed"}
    found = prove(tmp_path, **SMALL, **options)
    assert found.verdict.holds is True, found.lacks()
    runs = {one.name: one.runs for one in found.cases}
    assert (runs["rescore"], runs["sampled"]) == (1, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prefix_cache": False}, "the prefix cache is off"),
        ({"max_model_len": 64}, "prompts of 80 tokens do not fit into 60"),
    ],
)
def test_a_case_that_the_options_rule_out_says_why(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    found = prove(tmp_path, cases=("prefix", "rescore"), **SMALL, **options)
    assert found.verdict.holds is True
    assert f"prefix: {reason}" in found.left_out


def test_every_case_is_told_of_in_order_and_progress_only_grows(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    with proof(tmp_path, cases=("chunks",), **SMALL) as asked:
        found = asked.run(lambda done, total, text: told.append((done, total, text)))
    assert [one.name for one in found.cases] == list(CASES)
    done = [one for one, _, _ in told]
    assert done == sorted(done)
    assert {total for _, total, _ in told} == {len(CASES) + 5}
    assert max(done) < len(CASES) + 5
    parts = {text.partition(":")[0] for _, _, text in told}
    assert {"alone", "chunks", "fast"} < parts
    assert any(part.startswith("planted fault ") for part in parts)


def test_a_proof_gives_the_same_figures_again(tmp_path: Path) -> None:
    one, other = (
        prove(tmp_path / name, cases=("packed",), **SMALL).metrics() for name in ("a", "b")
    )
    for found in (one, other):
        del found["wall_s"]
        for case in found["cases"]:  # type: ignore[attr-defined]
            del case["wall_s"]
    assert one == other


def test_a_model_without_its_own_prompts_is_asked_random_ids(tmp_path: Path) -> None:
    with proof(tmp_path, **SMALL) as asked:
        assert isinstance(asked.maker.source, RandomPrompts)


def test_what_cannot_be_loaded_a_second_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No planted fault could be tried: that is no verdict. ``fast`` is only not measured."""

    def refused(*given: Any, **named: Any) -> Any:
        raise CapacityError("no memory", where="weights", rule="they fit", remedy="get more")

    monkeypatch.setattr(power_check, "Engine", refused)
    found = prove(tmp_path, cases=("rescore",), **SMALL)
    assert found.fast is None
    assert (found.faults_caught, found.verdict.holds) == (0, None)
    assert [one.sentence() for one in found.faults] == ["not tried: no memory"] * 4


def test_a_contract_without_bits_has_nothing_to_prove() -> None:
    with pytest.raises(NumericsRefused, match="fast promises no bits"):
        require_promise(EngineConfig(numerics="fast"))
    require_promise(EngineConfig(numerics="rl-bitwise"))


def test_a_vocabulary_of_two_tokens_is_proved(tmp_path: Path) -> None:
    found = prove(tmp_path, cases=("sampled",), vocab_size=2, **SMALL)
    assert found.verdict.holds is True, found.lacks()


def test_a_model_without_room_for_a_prefix_is_not_said_to_be_invariant(tmp_path: Path) -> None:
    """Nothing varies the prefix there, and nothing pins it."""
    found = prove(tmp_path, max_position_embeddings=40, **SMALL)
    point = next(one for one in found.points if one.name == "prefix-reuse boundary")
    assert (point.standing, found.verdict.holds) == ("open", True)
    whole = replace(found, is_whole=True)
    assert whole.verdict.text.startswith("equal under invariant in packed, repeat, chunks, ")
    closed = tuple(replace(one, standing="pinned") for one in found.points)
    assert replace(whole, points=closed).verdict.text == "BATCH-INVARIANT under invariant"
