"""Who may run a bitwise contract: a profile, or records of exactly what is to run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedctl.numerics.combination import Combination, Device, Layout
from pagedctl.numerics.eligibility import (
    MAX_KEYS_TOLD,
    MAX_RECORDS_TOLD,
    Eligibility,
    judge,
    judge_by_profile,
)
from pagedctl.numerics.profiles import PROFILES
from pagedctl.numerics.records import Records, read_records
from tests.numerics.record_harness import (
    ALIGNED,
    CPU,
    OF_NO_PROFILE,
    as_json,
    folder_with,
    record_for,
)

CUDA = Device(kind="cuda", name="NVIDIA H200", capability="9.0", threads=None)


# -- one key at a time -----------------------------------------------------------------------

KINDS = {
    "contract": "foreign",
    "topology_invariant": "foreign",
    "spec_digest": "foreign",
    "arithmetic_id": "stale",
    "family": "foreign",
    "dtype": "foreign",
    "kv_dtype": "foreign",
    "device": "foreign",
    "versions": "stale",
    "layout": "foreign",
    "graphs": "stale",
    "captured_sizes": "stale",
    "switches": "stale",
    "leaves": "stale",
    "packages": "stale",
}
"""What a record with another value of the key is."""


def altered(value: Any) -> Any:
    """Another value that the same key may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [*value, 8]
    return "other" if value is None else f"{value}x"


def alterations() -> list[tuple[str, str]]:
    found = []
    for key, value in as_json(record_for(OF_NO_PROFILE)).items():
        if key in KINDS:
            found += [(key, inner) for inner in value] if isinstance(value, dict) else [(key, "")]
    return found


def told(value: Any) -> str:
    """A value as a refusal spells it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


@pytest.mark.parametrize(("key", "inner"), alterations(), ids=lambda part: part or "-")
def test_a_record_with_one_other_value_grants_nothing_and_names_it(
    tmp_path: Path, key: str, inner: str
) -> None:
    """vllm-project/vllm#28131: a contract is verified for this very combination, or refused."""
    content = as_json(record_for(OF_NO_PROFILE))
    place, name = (content[key], inner) if inner else (content, key)
    had = place[name]
    place[name] = altered(had)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    found = judge(OF_NO_PROFILE, read_records(tmp_path))
    assert (found.verified, found.eligible_by, found.missing) == (False, None, ("invariance",))
    full = f"{key}.{inner}" if inner else key
    assert found.reasons[1] == (
        f"{path} is {KINDS[key]}: {full} is {told(had)}, the record is of {told(place[name])}"
    )


def test_the_unaltered_record_grants(tmp_path: Path) -> None:
    assert {key for key, _ in alterations()} == set(KINDS)
    found = judge(OF_NO_PROFILE, folder_with(tmp_path, record_for(OF_NO_PROFILE)))
    assert found == Eligibility(verified=True, eligible_by=str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("key", "inner"),
    [(key, inner) for key, inner in alterations() if key in ("switches", "leaves")],
)
def test_a_switch_or_leaf_too_few_or_too_many_is_another_combination(
    tmp_path: Path, key: str, inner: str
) -> None:
    values = dict(getattr(OF_NO_PROFILE, key))
    few = {name: value for name, value in values.items() if name != inner}
    for held in (few, {**values, "more": "x"}):
        record = record_for(replace(OF_NO_PROFILE, **{key: held}))
        folder = tmp_path / str(len(held))
        found = judge(OF_NO_PROFILE, folder_with(folder, record))
        assert not found.verified
        assert "(absent)" in found.reasons[1]
        assert "is stale" in found.reasons[1]


def test_evidence_that_decides_no_bit_is_not_compared(tmp_path: Path) -> None:
    record = record_for(OF_NO_PROFILE, cases=("other",), created_utc="2020-01-01T00:00:00Z")
    assert judge(OF_NO_PROFILE, folder_with(tmp_path, record)).verified


def test_a_cpu_record_never_grants_a_cuda_run(tmp_path: Path) -> None:
    records = folder_with(tmp_path, record_for(OF_NO_PROFILE))
    on_gpu = replace(OF_NO_PROFILE, device=CUDA)
    found = judge(on_gpu, records)
    assert not found.verified
    assert "is foreign: device.kind is cuda, the record is of cpu" in found.reasons[1]
    alike = replace(OF_NO_PROFILE, device=replace(CPU, kind="cuda"))
    assert not judge(alike, records).verified


# -- both halves of rl-bitwise ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("commands", "missing"),
    [
        ((), ("invariance", "align")),
        (("invariance",), ("align",)),
        (("align",), ("invariance",)),
        (("align", "align"), ("invariance",)),
        (("invariance", "align"), ()),
        (("align", "invariance"), ()),
    ],
)
def test_rl_bitwise_needs_both_records(
    tmp_path: Path, commands: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    records = folder_with(tmp_path, *(record_for(ALIGNED, one) for one in commands))
    found = judge(ALIGNED, records)
    assert found.missing == missing
    assert found.verified == (not missing)
    for command in missing:
        assert f"rl-bitwise needs a record of {command}, and none grants it" in found.reasons
    if not missing:
        both = [tmp_path / "ab"[commands.index(one)] for one in ("invariance", "align")]
        assert found.eligible_by == f"{both[0]}.json and {both[1]}.json"
    elif commands:
        half = f"{tmp_path / 'ab'[len(commands) - 1]}.json is the record of {commands[0]}"
        assert f"{half}, which is not all" in found.reasons


def test_two_halves_of_two_arithmetics_grant_nothing(tmp_path: Path) -> None:
    other = replace(ALIGNED, arithmetic_id="f" * 16)
    records = folder_with(tmp_path, record_for(ALIGNED), record_for(other, "align"))
    for found in (ALIGNED, other):
        assert not judge(found, records).verified
    assert judge(ALIGNED, records).missing == ("align",)
    assert judge(other, records).missing == ("invariance",)


def test_a_contract_takes_no_record_of_another(tmp_path: Path) -> None:
    records = folder_with(
        tmp_path, record_for(ALIGNED), record_for(ALIGNED, "align"), record_for(OF_NO_PROFILE)
    )
    assert judge(ALIGNED, records).verified
    assert judge(OF_NO_PROFILE, records).verified
    for contract in ("invariant", "rl-bitwise"):
        alone = tuple(one for one in records.sound if one.record.contract == contract)
        other = OF_NO_PROFILE if contract == "rl-bitwise" else ALIGNED
        found = judge(other, Records(sound=alone))
        assert not found.verified
        assert "is foreign: contract is" in found.reasons[1]


def test_an_align_record_alone_does_not_grant_invariant(tmp_path: Path) -> None:
    found = judge(OF_NO_PROFILE, folder_with(tmp_path, record_for(OF_NO_PROFILE, "align")))
    assert not found.verified
    assert "no record of invariance grants it" in found.reasons


# -- what is told ----------------------------------------------------------------------------


def test_the_nearest_records_are_told_first_and_not_all_of_many(tmp_path: Path) -> None:
    near = replace(OF_NO_PROFILE, arithmetic_id="f" * 16)
    far = replace(near, family="x", dtype="float32", kv_dtype="float32", device=CUDA)
    records = folder_with(tmp_path, *[record_for(far)] * 7, record_for(near))
    reasons = judge(OF_NO_PROFILE, records).reasons
    candidates = [one for one in reasons if str(tmp_path) in one]
    assert len(candidates) == MAX_RECORDS_TOLD
    assert candidates[0].startswith(f"{tmp_path / 'h.json'} is stale: arithmetic_id is ")
    assert "3 more records are stale or foreign" in reasons
    assert candidates[1].count("the record is of") == MAX_KEYS_TOLD
    assert candidates[1].endswith("; and 4 more keys")


def test_a_damaged_record_is_told_and_stops_no_run_that_another_grants(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text("{")
    records = folder_with(tmp_path, record_for(OF_NO_PROFILE))
    found = judge(OF_NO_PROFILE, records)
    assert found.verified
    assert len(found.damaged) == 1
    assert str(tmp_path / "0.json") in found.damaged[0]
    refused = judge(ALIGNED, records)
    assert any(one.startswith("a record cannot be read: ") for one in refused.reasons)


def test_of_many_damaged_files_some_are_told(tmp_path: Path) -> None:
    for number in range(MAX_RECORDS_TOLD + 3):
        (tmp_path / f"{number}.json").write_text("{")
    for found in (
        judge(OF_NO_PROFILE, read_records(tmp_path)),
        judge(OF_NO_PROFILE, folder_with(tmp_path, record_for(OF_NO_PROFILE))),
    ):
        assert len(found.damaged) == MAX_RECORDS_TOLD + 1
        assert found.damaged[-1] == "3 more files"


def test_what_a_record_says_writes_nothing_but_text_on_a_terminal(tmp_path: Path) -> None:
    record = record_for(OF_NO_PROFILE, family="\x1b[2Jgone\nerror: x")
    reasons = judge(OF_NO_PROFILE, folder_with(tmp_path, record)).reasons
    assert all(one.isprintable() for one in reasons)
    assert any(repr(record.family) in one for one in reasons)


# -- profiles --------------------------------------------------------------------------------

SHIPPED = replace(
    OF_NO_PROFILE,
    family="qwen3",
    switches={"batch_invariant": True, "logprob_order": "blockwise-direct-33"},
)


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_a_profile_covers_its_own_combination(tmp_path: Path, profile: Any) -> None:
    found = replace(SHIPPED, family=profile.family, dtype=profile.dtype, kv_dtype=profile.dtype)
    granted = Eligibility(verified=True, eligible_by=str(profile))
    assert judge_by_profile(found) == granted
    damaged = folder_with(tmp_path / "records")
    assert judge(found, damaged) == granted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "gemma"}, "profile gemma bfloat16 cpu is not shipped for invariant"),
        ({"dtype": "fp8"}, "profile qwen3 fp8 cpu is not shipped for invariant"),
        ({"contract": "rl-bitwise"}, "profile qwen3 bfloat16 cpu is not shipped for rl-bitwise"),
        ({"device": CUDA}, "profile qwen3 bfloat16 sm_90 is not shipped for invariant"),
        (
            {"outside_leaves": (("gemm", "acme.gemm"),)},
            "profile qwen3 bfloat16 cpu covers the house's leaves, and op gemm is served by "
            "acme.gemm",
        ),
        ({"layout": Layout(tp=2, tp_layout="row")}, "covers one rank, and tp is 2"),
        ({"graphs": True}, "covers runs without graphs"),
        ({"kv_dtype": "float16"}, "does not cover kv_dtype float16"),
        ({"switches": {"batch_invariant": False}}, "does not cover batch_invariant off"),
        ({"switches": {"norm_cast": "sideways"}}, "does not cover norm_cast sideways"),
        ({"switches": {"yarn_frequency_device": "cuda"}}, "yarn_frequency_device cuda"),
        ({"switches": {"brand_new": True}}, "does not cover brand_new on"),
    ],
)
def test_what_leaves_a_profile_is_named(changes: dict[str, Any], reason: str) -> None:
    control: Combination = SHIPPED
    assert judge_by_profile(control).verified
    found = judge_by_profile(replace(control, **changes))
    assert (found.verified, found.eligible_by) == (False, None)
    assert len(found.reasons) == 1
    assert found.reasons[0].endswith(reason)


def test_all_that_leaves_a_profile_is_named_together() -> None:
    found = replace(SHIPPED, graphs=True, kv_dtype="float16", outside_leaves=(("head", "a.b"),))
    assert len(judge_by_profile(found).reasons) == 3


def test_bfloat16_keys_and_values_go_with_float32_alone() -> None:
    wide = replace(SHIPPED, dtype="float32", kv_dtype="bfloat16")
    assert judge_by_profile(wide).verified
    assert not judge_by_profile(replace(wide, dtype="float64")).verified
