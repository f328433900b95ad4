"""Precedence, origins, and all faults at once."""

from __future__ import annotations

import pytest

from pagedctl.config.loader import (
    argument_source,
    environment_source,
    flag_source,
    plan_source,
    resolve,
)
from pagedctl.config.other_tools import OTHER_TOOLS
from pagedctl.config.surface import COMMANDS, GROUPS
from pagedctl.errors import ConfigError

OPTIONS = COMMANDS["bench"].all_options()
PLAN = "plans/x.toml"


def plan(**values: object):  # type: ignore[no-untyped-def]
    return plan_source(PLAN, values, dict.fromkeys(values, "engine"))


def test_flag_beats_environment_beats_plan_beats_default() -> None:
    env = environment_source(OPTIONS, {"PAGEDCTL_DEVICE": "cuda", "PAGEDCTL_MODEL": "from-env"})
    got = resolve(
        OPTIONS,
        [
            flag_source({"device": "cpu"}),
            env,
            plan(model="from-plan", device="auto", max_num_seqs=3),
        ],
    )
    assert got.values["device"] == "cpu"
    assert got.values["model"] == "from-env"
    assert got.values["max_num_seqs"] == 3
    assert got.values["block_size"] == 16
    assert {name: got.origins[name] for name in ("device", "model", "max_num_seqs")} == {
        "device": "flag",
        "model": "env PAGEDCTL_MODEL",
        "max_num_seqs": f"plan {PLAN}",
    }
    assert got.origins["block_size"] == "default"


def test_every_option_has_a_value_and_an_origin() -> None:
    got = resolve(OPTIONS, [])
    assert set(got.values) == set(OPTIONS) == set(got.origins)
    assert set(got.origins.values()) == {"default"}


def test_an_empty_environment_variable_is_absent() -> None:
    got = resolve(OPTIONS, [environment_source(OPTIONS, {"PAGEDCTL_DEVICE": ""})])
    assert got.origins["device"] == "default"


def test_only_the_named_environment_variables_are_read() -> None:
    variables = {one.env for one in OPTIONS.values() if one.env}
    assert variables == {"PAGEDCTL_MODEL", "PAGEDCTL_DEVICE", "PAGEDCTL_PLAN"}
    got = resolve(OPTIONS, [environment_source(OPTIONS, {"PAGEDCTL_MAX_NUM_SEQS": "3"})])
    assert got.values["max_num_seqs"] == 256


def test_all_faults_of_all_sources_are_reported_together() -> None:
    env = environment_source(OPTIONS, {"PAGEDCTL_DEVICE": "gpu"})
    with pytest.raises(ConfigError) as caught:
        resolve(OPTIONS, [flag_source({"top_p": "1.5", "max_num_seqs": "x"}), env, plan(tp=0)])
    assert [fault.where for fault in caught.value.faults] == [
        "flag --top-p",
        "flag --max-num-seqs",
        "environment variable PAGEDCTL_DEVICE",
        f"{PLAN}, key engine.tp",
    ]
    assert caught.value.faults[0].what == "top_p 1.5 is out of range"
    assert caught.value.faults[0].rule == "top_p: a finite number > 0 and <= 1"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(OPTIONS, [argument_source({"max_seqs": 3})])
    assert caught.value.remedy == "did you mean max_num_seqs?"


@pytest.mark.parametrize(("theirs", "ours"), sorted(OTHER_TOOLS.items()))
def test_another_tools_name_is_answered_with_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(OPTIONS, [argument_source({theirs: 1})])
    assert caught.value.remedy == f"use {ours}"
    flags = {f"--{name.replace('_', '-')}" for group in GROUPS.values() for name in group.options}
    flags |= {"--workload"}
    assert ours.split()[0].replace("--no-", "--") in flags


def test_options_that_exclude_each_other_at_one_level_are_refused() -> None:
    both = {"gpu_memory_utilization": "0.5", "kv_cache_memory_bytes": "1GiB"}
    with pytest.raises(ConfigError, match="exclude each other"):
        resolve(OPTIONS, [flag_source(both)])


def test_across_levels_the_higher_replaces_both() -> None:
    got = resolve(
        OPTIONS,
        [flag_source({"kv_cache_memory_bytes": "1GiB"}), plan(gpu_memory_utilization=0.5)],
    )
    assert got.values["kv_cache_memory_bytes"] == 1 << 30
    assert got.values["gpu_memory_utilization"] is None
    assert got.origins["gpu_memory_utilization"] == "default"


def test_a_broken_value_below_a_good_one_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs 0"):
        resolve(OPTIONS, [flag_source({"max_num_seqs": "4"}), plan(max_num_seqs=0)])


def test_repeated_flags_are_collected_in_order() -> None:
    got = resolve(OPTIONS, [flag_source({"stop": ["b", "a"]})])
    assert got.values["stop"] == ("b", "a")


def test_an_assumption_is_a_flag_or_a_table() -> None:
    options = COMMANDS["plan"].all_options()
    flags = resolve(options, [flag_source({"assume": ["activation=1GiB", "context=2GiB"]})])
    table = resolve(options, [plan(assume={"activation": "1GiB", "context": "2GiB"})])
    expected = (("activation", "1GiB"), ("context", "2GiB"))
    assert flags.values["assume"] == table.values["assume"] == expected
