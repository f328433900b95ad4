"""A bitwise contract runs where a profile or a record covers the engine, else it is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine import build
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.verification import combination_of, record_of, write_record
from pagedctl.errors import ModelError, NumericsRefused
from pagedctl.manifest.schema import FileEntry, NumericsInfo
from pagedctl.numerics.records import read_record
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.ops.silu_mul import torch_reference
from pagedctl_kernels.registry import Registry
from tests.reference.tiny_models import TinyModel, tiny_model

MANIFEST = FileEntry(role="manifest", path="runs/m.json", sha256="ab" * 32, bytes=9)
WITH_FOREIGN_LEAF = "op gemm is served by acme.gemm"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEDCTL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def outside(name: str = "acme.gemm", op: str = "gemm") -> Registry:
    """The house's leaves and one more, which wins: the house's own product by another name."""
    spare = next(leaf for leaf in house_registry().leaves(op) if leaf.name.endswith("per_row"))
    return house_registry().with_leaves([replace(spare, name=name, priority=1000)])


def config_of(folder: Path, model: TinyModel | None = None, **options: Any) -> EngineConfig:
    chosen = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 20, "random_weights": 0}
    path = (model or tiny_model("llama")).write_config(folder)
    return EngineConfig(model=path, **{**chosen, **options})


@contextmanager
def opened(folder: Path, *, registry: Registry | None = None, **options: Any) -> Iterator[Engine]:
    needs_record = bool(options.pop("needs_record", True))
    with Engine(
        config_of(folder, **options), registry=registry, needs_record=needs_record
    ) as engine:
        yield engine


def standing(engine: Engine) -> tuple[bool, str | None, list[str]]:
    """Verified, by whom, and the codes of the manifest's warnings."""
    manifest = engine.manifest()
    assert manifest.numerics is not None
    codes = [one.code for one in manifest.warnings]
    return manifest.numerics.verified, manifest.numerics.eligible_by, codes


def numerics_of(engine: Engine) -> NumericsInfo:
    numerics = engine.manifest().numerics
    assert numerics is not None
    return numerics


def refusal(folder: Path, **options: Any) -> NumericsRefused:
    with pytest.raises(NumericsRefused) as told, opened(folder, **options):
        pass
    return told.value


def earn(
    folder: Path, command: Any = "invariance", path: Path | None = None, **options: Any
) -> Path:
    """A record of the engine that these options build, in PAGEDCTL_HOME or at *path*."""
    with opened(folder, needs_record=False, **options) as engine:
        record = record_of(
            engine.parts.model, command=command, cases=("alone", "packed"), manifest=MANIFEST
        )
    return write_record(record, path, os.environ)


# -- a profile covers it ---------------------------------------------------------------------


def test_a_shipped_profile_needs_no_record_and_no_warning(tmp_path: Path) -> None:
    for name, options in {
        "default": {},
        "argument": {"numerics": "invariant"},
        "switches": {"norm_cast": "after", "logprob_order": "blockwise-33"},
        "unverified has no effect": {"unverified": True},
        "harness": {"needs_record": False},
    }.items():
        with opened(tmp_path / name, **options) as engine:
            assert standing(engine) == (True, "profile llama float32 cpu", [])


def test_fast_promises_nothing_and_needs_nothing(tmp_path: Path) -> None:
    for options in ({}, {"unverified": True}, {"needs_record": False}):
        with opened(tmp_path, numerics="fast", registry=outside(), **options) as engine:
            assert standing(engine) == (True, None, [])


def test_a_folder_of_damaged_records_is_not_looked_at_where_a_profile_covers(
    tmp_path: Path, home: Path
) -> None:
    (home / "records").mkdir(parents=True)
    (home / "records" / "r.json").write_text("{")
    with opened(tmp_path) as engine:
        assert standing(engine) == (True, "profile llama float32 cpu", [])


# -- nothing covers it -----------------------------------------------------------------------


def test_the_default_contract_runs_with_one_warning(tmp_path: Path) -> None:
    for name, options in {"default": {}, "its-own-name": {"numerics": "invariant"}}.items():
        with opened(tmp_path / name, registry=outside(), **options) as engine:
            assert standing(engine) == (False, None, ["unverified"])
            (warning,) = engine.manifest().warnings
            assert warning.where == "option numerics"
            assert warning.text == (
                "invariant runs unverified: profile llama float32 cpu covers the house's leaves, "
                f"and {WITH_FOREIGN_LEAF}; to earn a record: pagedctl invariance --numerics "
                f"invariant --model {engine.config.model} --dtype float32 --random-weights 0 "
                "--record"
            )


def test_a_contract_that_is_asked_for_is_refused_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    plain = build.load_model

    def watched(*words: Any, **named: Any) -> Any:
        loaded.append(words)
        return plain(*words, **named)

    monkeypatch.setattr(build, "load_model", watched)
    error = refusal(tmp_path, numerics="rl-bitwise")
    assert not loaded
    model = tmp_path / "config.json"
    options = f"--numerics rl-bitwise --model {model}"
    assert error.lines() == [
        "error: rl-bitwise is not verified for this run\n"
        "  profile llama float32 cpu is not shipped for rl-bitwise\n"
        "  rl-bitwise needs a record of invariance, and none grants it\n"
        "  rl-bitwise needs a record of align, and none grants it",
        "where: option numerics, set by argument",
        "rule: a bitwise contract that is asked for is covered by a shipped profile, or by a "
        "record of invariance and of align for exactly this run",
        f"remedy: earn it: pagedctl invariance {options} --dtype float32 --random-weights 0 "
        f"--record, then pagedctl align {options} --dump DUMP --dtype float32 "
        "--random-weights 0 --record; or run with --unverified",
    ]
    with opened(tmp_path, numerics="rl-bitwise", unverified=True):
        assert loaded


def test_the_origin_of_the_contract_decides_whether_it_was_asked_for(tmp_path: Path) -> None:
    """The default's name as an argument counts as the default; with_options always asks."""
    config = config_of(tmp_path, numerics="invariant")
    assert config.origins["numerics"] == "default"
    with pytest.raises(NumericsRefused, match=WITH_FOREIGN_LEAF):
        Engine(config.with_options(numerics="invariant"), registry=outside())


def test_unverified_runs_what_was_asked_for_and_is_stamped(tmp_path: Path) -> None:
    with opened(tmp_path, numerics="rl-bitwise", unverified=True) as engine:
        assert standing(engine) == (False, None, [])
        assert numerics_of(engine).contract == "rl-bitwise"


def test_a_harness_is_neither_refused_nor_warned_and_says_what_is_true(tmp_path: Path) -> None:
    with opened(tmp_path, numerics="rl-bitwise", needs_record=False) as engine:
        assert standing(engine) == (False, None, [])
    with opened(tmp_path, registry=outside(), needs_record=False) as engine:
        assert standing(engine) == (False, None, [])
    earn(tmp_path, "invariance", numerics="rl-bitwise")
    earn(tmp_path, "align", numerics="rl-bitwise")
    with opened(tmp_path, numerics="rl-bitwise", needs_record=False) as engine:
        assert standing(engine)[0] is True


def build_silu_mul(site: Any, machine: Any) -> Any:
    """Code of somebody else, which happens to be the house's."""
    return torch_reference.build(site, machine)


def test_a_leaf_of_a_house_name_and_other_code_is_not_the_houses(tmp_path: Path) -> None:
    house = house_registry().leaves()
    entry = f"{__name__}:build_silu_mul"
    impostor = [replace(one, entry=entry) if one.op == "silu_mul" else one for one in house]
    with opened(tmp_path, registry=Registry(impostor)) as engine:
        assert engine.parts.plans.silu_mul.leaf.name in {leaf.name for leaf in house}
        assert standing(engine) == (False, None, ["unverified"])
    with opened(tmp_path, registry=Registry(house)) as engine:
        assert standing(engine)[0] is True


def test_a_chosen_leaf_of_the_house_stays_inside_the_profile(tmp_path: Path) -> None:
    for leaf, verified in {"acme.gemm": False, "torch.gemm_row_blocks": True}.items():
        with opened(tmp_path, registry=outside(), leaf=(f"gemm={leaf}",)) as engine:
            assert standing(engine)[0] is verified
            assert engine.parts.plans.o_proj.leaf.name == leaf


# -- records ---------------------------------------------------------------------------------


def test_a_record_grants_what_no_profile_covers(tmp_path: Path, home: Path) -> None:
    asked = {"numerics": "invariant", "registry": outside()}
    path = earn(tmp_path, registry=outside())
    assert path.parent == home / "records"
    assert path.name.startswith("invariant-llama-float32-cpu-invariance-")
    with opened(tmp_path, **asked) as engine:
        assert standing(engine) == (True, str(path), [])


def test_a_record_is_exactly_what_the_engine_says_of_itself(tmp_path: Path) -> None:
    path = earn(tmp_path, registry=outside(), path=tmp_path / "r.json")
    record = read_record(path)
    with opened(tmp_path, registry=outside()) as engine:
        numerics = numerics_of(engine)
        assert record.facts() == combination_of(engine.parts.model).facts()
        assert record.arithmetic_id == numerics.arithmetic_id
        assert record.leaves == numerics.leaves
        assert record.switches == {name: one.value for name, one in numerics.switches.items()}
        (device,) = engine.manifest().devices
        versions = engine.manifest().versions
    assert (record.device.name, record.device.capability) == (device.name, device.capability)
    assert record.device.threads == torch.get_num_threads()
    assert (record.versions.torch, record.versions.cuda) == (versions["torch"], versions["cuda"])
    assert (record.layout.tp, record.graphs, record.captured_sizes) == (1, False, ())
    assert record.spec_digest == engine.spec.spec_digest


def test_a_record_survives_other_weights_and_no_other_architecture(tmp_path: Path) -> None:
    path = earn(tmp_path, registry=outside(), random_weights=0)
    found = []
    for seed in (0, 5):
        options = {"registry": outside(), "random_weights": seed}
        with opened(tmp_path, **options) as engine:
            assert standing(engine) == (True, str(path), [])
            params = SamplingParams(max_tokens=8, seed=1)
            found.append(engine.generate([Request(id=0, prompt_token_ids=(5, 6), params=params)]))
    assert found[0][0].token_ids.tolist() != found[1][0].token_ids.tolist()
    model = tiny_model("llama")
    config = config_of(tmp_path / "given", model, random_weights=None)
    with Engine(config, model.tensors(torch.float32), registry=outside()) as engine:
        assert standing(engine) == (True, str(path), [])
    config = config_of(tmp_path / "deeper", tiny_model("llama", num_hidden_layers=3))
    with pytest.raises(NumericsRefused) as told:
        Engine(config.with_options(numerics="invariant"), registry=outside())
    assert f"{path} is foreign: spec_digest is sha256:" in told.value.what


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_dtype": "bfloat16"}, "foreign: kv_dtype is bfloat16, the record is of float32"),
        ({"dtype": "bfloat16"}, "foreign: dtype is bfloat16, the record is of float32"),
        (
            {"norm_cast": "after"},
            "switches.norm_cast is after, the record is of before",
        ),
        ({"logprob_basis": "raw"}, "stale: switches.logprob_basis is raw"),
        ({"leaf": ("head=torch.head_row_blocks",)}, "stale: arithmetic_id is "),
        ({"registry": outside("acme.other")}, "stale: leaves.gemm qkv_proj 48x128 is acme.other"),
    ],
)
def test_what_was_not_proved_is_refused_by_its_key(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    chosen: dict[str, Any] = {"registry": outside(), **options}
    path = earn(tmp_path, registry=outside())
    named = {name: value for name, value in chosen.items() if name != "registry"}
    config = config_of(tmp_path, **named).with_options(numerics="invariant")
    with pytest.raises(NumericsRefused) as error:
        Engine(config, registry=chosen["registry"])
    line = next(line for line in error.value.what.splitlines() if str(path) in line)
    assert told in line
    earn(tmp_path, **chosen)
    with Engine(config, registry=chosen["registry"]) as engine:
        assert standing(engine)[0] is True


def test_another_number_of_threads_is_another_device(tmp_path: Path) -> None:
    path = earn(tmp_path, registry=outside())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with opened(tmp_path, registry=outside(), needs_record=False) as engine:
            assert standing(engine)[0] is False
        config = config_of(tmp_path).with_options(numerics="invariant")
        with pytest.raises(NumericsRefused) as told:
            Engine(config, registry=outside())
    finally:
        torch.set_num_threads(threads)
    said = f"{path} is foreign: device.threads is {threads + 1}, the record is of {threads}"
    assert said in told.value.what
    with Engine(config, registry=outside()) as engine:
        assert standing(engine)[0] is True


@pytest.mark.parametrize("first", ["invariance", "align"])
def test_rl_bitwise_is_granted_by_both_records_and_by_neither_alone(
    tmp_path: Path, first: str
) -> None:
    asked = {"numerics": "rl-bitwise"}
    second = {"invariance": "align", "align": "invariance"}[first]
    one = earn(tmp_path, first, **asked)
    error = refusal(tmp_path, **asked)
    assert f"{one} is the record of {first}, which is not all" in error.what
    assert f"rl-bitwise needs a record of {second}, and none grants it" in error.what
    assert error.remedy.startswith(f"earn it: pagedctl {second} --numerics rl-bitwise ")
    assert f"pagedctl {first}" not in error.remedy
    other = earn(tmp_path, second, **asked)
    by = {first: one, second: other}
    with opened(tmp_path, **asked) as engine:
        both = f"{by['invariance']} and {by['align']}"
        assert standing(engine) == (True, both, [])


def test_a_damaged_record_warns_a_run_that_another_one_grants(tmp_path: Path, home: Path) -> None:
    path = earn(tmp_path, registry=outside())
    (home / "records" / "0.json").write_text("{")
    with opened(tmp_path, registry=outside()) as engine:
        assert standing(engine) == (True, str(path), ["damaged_record"])
        (warning,) = engine.manifest().warnings
        assert str(home / "records" / "0.json") in warning.text
    with opened(tmp_path, registry=outside(), needs_record=False) as engine:
        assert standing(engine) == (True, str(path), [])


def test_an_engine_that_shares_a_model_is_judged_too(tmp_path: Path) -> None:
    config = config_of(tmp_path, numerics="rl-bitwise")
    with Engine(config, needs_record=False) as first:
        more = {"max_num_seqs": 3}
        with Engine(config.with_options(**more), sharing=first, needs_record=False) as second:
            assert standing(second) == (False, None, [])
        with pytest.raises(NumericsRefused, match="rl-bitwise is not verified"):
            Engine(config.with_options(**more), sharing=first)


# -- the command that earns ------------------------------------------------------------------


def test_the_command_that_earns_names_every_option_that_matters(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    options = {
        "numerics": "rl-bitwise",
        "logprob_order": "blockwise-33",
        "head_dtype": "float32",
        "batch_invariant": True,
        "kv_dtype": "bfloat16",
        "enforce_eager": True,
        "leaf": ("gemm=torch.gemm_row_blocks", "head=torch.head_row_blocks"),
        "random_weights": 3,
        "max_num_seqs": 7,
    }
    command = refusal(folder, **options).remedy.removeprefix("earn it: ").split(", then ")[0]
    assert command == (
        f"pagedctl invariance --numerics rl-bitwise --model '{folder}/config.json' "
        "--dtype float32 --random-weights 3 --batch-invariant --logprob-order blockwise-33 "
        "--head-dtype float32 --leaf gemm=torch.gemm_row_blocks --leaf head=torch.head_row_blocks "
        "--kv-dtype bfloat16 --enforce-eager --record"
    )


def test_weights_from_python_need_weights_of_a_seed_on_the_command_line(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = config_of(tmp_path, model, numerics="rl-bitwise", random_weights=None)
    with pytest.raises(NumericsRefused) as told:
        Engine(config, model.tensors(torch.float32))
    assert "--random-weights 0 --record, then " in told.value.remedy


# -- what no record helps --------------------------------------------------------------------


def test_a_quantised_checkpoint_is_refused_whatever_records_say(tmp_path: Path) -> None:
    earn(tmp_path)
    path = tmp_path / "config.json"
    quantised = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps(quantised))
    for options in ({}, {"unverified": True}, {"numerics": "fast"}, {"needs_record": False}):
        chosen: dict[str, Any] = {"dtype": "float32", "random_weights": 0, **options}
        needs_record = bool(chosen.pop("needs_record", True))
        with pytest.raises(ModelError, match="quantization_config"):
            Engine(EngineConfig(model=str(path), **chosen), needs_record=needs_record)


def test_the_rule_of_widths_holds_whatever_records_say(tmp_path: Path) -> None:
    for options in ({"unverified": True}, {"needs_record": False}, {}):
        error = refusal(tmp_path, logprob_order="blockwise-64", **options)
        assert error.what == "block width 64 leaves 35 columns"


# -- switches in the manifest ----------------------------------------------------------------


def test_a_value_that_is_not_the_chosen_one_has_a_note(tmp_path: Path) -> None:
    with opened(tmp_path, numerics="rl-bitwise", unverified=True) as engine:
        manifest = json.loads(json.dumps(engine.manifest().to_json_object(), default=str))
    switches = manifest["numerics"]["switches"]
    moved = switches["yarn_frequency_device"]
    assert moved["value"] == "cpu"
    assert moved["note"].startswith("cuda means cpu")
    assert [name for name, one in switches.items() if "note" in one] == ["yarn_frequency_device"]
