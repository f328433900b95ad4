"""EngineConfig: the same loader from Python, with origins, contract and derived values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pagedctl.config.engine_config import EngineConfig, engine_options
from pagedctl.config.options import options_of
from pagedctl.config.surface import COMMANDS, GROUPS, PLAN_TABLES
from pagedctl.errors import ConfigError, NumericsRefused


def test_fields_flags_and_plan_keys_are_the_same_names() -> None:
    fields = {one.name for one in dataclasses.fields(EngineConfig)} - {"origins"}
    assert fields == set(engine_options()) == set(options_of(EngineConfig))
    flags = set(COMMANDS["generate"].all_options())
    assert fields <= flags
    in_plan = set().union(
        *(set(PLAN_TABLES[t]) for t in ("model", "numerics", "engine", "parallel"))
    )
    assert fields == in_plan


def test_no_option_name_has_two_meanings() -> None:
    for command in COMMANDS.values():
        shared = [set(GROUPS[name].options) for name in command.groups]
        assert sum(map(len, shared)) == len(set().union(*shared)) if shared else True


def test_keyword_arguments_are_checked_and_have_an_origin() -> None:
    config = EngineConfig(max_num_seqs=64)
    assert config.origins["max_num_seqs"] == "argument"
    assert config.origins["block_size"] == "default"
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_num_seqs=0, tp="2")  # type: ignore[arg-type]
    assert [fault.where for fault in caught.value.faults] == [
        "argument tp",
        "argument max_num_seqs",
    ] or [fault.where for fault in caught.value.faults] == [
        "argument max_num_seqs",
        "argument tp",
    ]


def test_load_reads_environment_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        'schema = "pagedctl.plan/1"\nname = "p"\nengine = { max_num_seqs = 3, block_size = 32 }\n'
    )
    monkeypatch.setenv("PAGEDCTL_PLAN", str(path))
    monkeypatch.setenv("PAGEDCTL_DEVICE", "cpu")
    config = EngineConfig.load(block_size=64)
    assert (config.max_num_seqs, config.block_size, config.device) == (3, 64, "cpu")
    assert config.origins["max_num_seqs"] == f"plan {path}"
    assert config.origins["block_size"] == "argument"
    assert config.origins["device"] == "env PAGEDCTL_DEVICE"


def test_the_constructor_reads_neither_environment_nor_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDCTL_DEVICE", "cpu")
    monkeypatch.setenv("PAGEDCTL_PLAN", "/absent.toml")
    assert EngineConfig().device == "auto"


def test_load_refuses_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        EngineConfig.load(max_seqs=3)


def test_a_value_looser_than_the_contract_is_refused_at_construction() -> None:
    with pytest.raises(NumericsRefused) as caught:
        EngineConfig(batch_invariant=False, symmetric_memory=True)
    assert {fault.what.split()[0] for fault in caught.value.faults} == {
        "batch_invariant",
        "symmetric_memory",
    }
    assert EngineConfig(numerics="fast", batch_invariant=False).contract["batch_invariant"] is False


def test_the_default_contract_is_invariant() -> None:
    assert EngineConfig().contract.contract.name == "invariant"


def test_deriving_fills_what_was_not_given_and_nothing_else() -> None:
    config = EngineConfig(max_num_seqs=7).derive(
        "model positions", max_model_len=2048, max_num_seqs=9
    )
    assert config.max_model_len == 2048
    assert config.origins["max_model_len"] == "derived: model positions"
    assert config.max_num_seqs == 7
    assert config.origins["max_num_seqs"] == "argument"


def test_origins_do_not_enter_equality_and_cannot_be_changed() -> None:
    config = EngineConfig(block_size=16)
    assert config == EngineConfig()
    with pytest.raises(TypeError):
        config.origins["block_size"] = "x"  # type: ignore[index]


def test_a_replaced_value_was_asked_for_and_is_checked_like_any() -> None:
    """dataclasses.replace keeps the origins, which would call a chosen contract the default."""
    config = EngineConfig()
    chosen = dataclasses.replace(config, numerics="rl-bitwise")
    assert (chosen.origins["numerics"], config.origins["numerics"]) == ("argument", "default")
    for broken in ({"max_num_seqs": -5}, {"numerics": "nope"}, {"leaf": "gemm"}):
        with pytest.raises(ConfigError, match=next(iter(broken))):
            dataclasses.replace(config, **broken)
    assert EngineConfig(origins={"tp": "flag"}).origins["numerics"] == "default"
