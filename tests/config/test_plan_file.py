"""Plan files: the documented examples are read, and every kind of fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedctl.config.acceptance import parse_bound
from pagedctl.config.plan_file import PlanFile, read_plan_file
from pagedctl.errors import ConfigError

GOOD = """
schema = "pagedctl.plan/1"
name = "qwen3-8b-a10g-tp4"
model = { model = "qwen3-8b", dtype = "bfloat16" }
parallel = { tp = 4 }
numerics = { numerics = "invariant" }
engine = { max_model_len = 40960, max_num_seqs = 64, gpu_memory_utilization = 0.90 }
[hardware]
gpu = "A10G"
assume = { activation = "0.5GiB", collective_latency = ["20us", "50us", "100us"] }
probe = "@probe"
[workload]
workload = "prompts.jsonl"
sampling = { n = 4, max_tokens = 16384, temperature = 1.0, top_p = 0.95, seed = 0 }
[validate]
steps = [
  { id = "probe", run = "probe" },
  { id = "peer", run = "import", with = { file = "peer.json", optional = true } },
  { id = "reference", run = "parity make-ref", with = { requests = 8, max_tokens = 64 } },
  { id = "parity", run = "parity", with = { hf_ref = "@reference", max_num_seqs = 8 } },
  { id = "throughput", run = "bench", with = { numerics = "fast" } },
  { id = "compare", run = "compare", with = { files = ["@peer", "@throughput"] } },
]
[acceptance]
"parity.n_bad" = "== 0"
"throughput.kv_tokens" = ">= 0.95 * peer.kv_tokens"
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def read(tmp_path: Path, text: str = GOOD) -> PlanFile:
    return read_plan_file(write(tmp_path, text))


def faults(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return [f"{fault.where.split('x.toml, ')[-1]}: {fault.what}" for fault in caught.value.faults]


def test_a_plan_gives_options_steps_and_acceptance(tmp_path: Path) -> None:
    plan = read(tmp_path)
    assert plan.name == "qwen3-8b-a10g-tp4"
    assert plan.options["tp"] == 4
    assert plan.options["numerics"] == "invariant"
    assert plan.options["top_p"] == 0.95
    assert plan.tables["top_p"] == "workload.sampling"
    assert [step.id for step in plan.steps] == [
        "probe",
        "peer",
        "reference",
        "parity",
        "throughput",
        "compare",
    ]
    assert plan.acceptance[1][0] == "throughput.kv_tokens"
    assert str(plan.acceptance[1][1]) == ">= 0.95 * peer.kv_tokens"


def test_relative_paths_are_relative_to_the_plan_file(tmp_path: Path) -> None:
    assert read(tmp_path).options["workload"] == "prompts.jsonl"
    (tmp_path / "prompts.jsonl").write_text("")
    plan = read(tmp_path)
    assert plan.options["workload"] == str(tmp_path / "prompts.jsonl")
    assert plan.options["probe"] == "@probe"
    assert plan.options["model"] == "qwen3-8b"


def test_a_command_takes_only_the_options_it_has(tmp_path: Path) -> None:
    source = read(tmp_path).source(["tp", "plan"])
    assert source.values == {"tp": 4}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('schema = "pagedctl.plan/1"', 'schema = "pagedctl.plan/2"', "key schema: schema is"),
        ('name = "qwen3-8b-a10g-tp4"', "", "key name: the plan has no name"),
        ("tp = 4", 'tp = "4"', "key parallel.tp: tp 4 is not an integer"),
        ("tp = 4", "tp = 4, tpp = 1", "key parallel.tpp: tpp is not a known option"),
        ("tp = 4", "block_size = 16", "key parallel.block_size: block_size does not belong"),
        ("[hardware]", "[hardwear]", "table hardwear: hardwear is not a known option"),
        ("parallel = { tp = 4 }", "parallel = 4", "key parallel: parallel is not a table"),
        ('gpu = "A10G"', "gpu = 3", "key hardware.gpu: gpu 3 is not text"),
        ("top_p = 0.95", "top_p = 1.95", "key workload.sampling.top_p: top_p 1.95 is out"),
        ('probe = "@probe"', 'probe = "@prob"', "key hardware.probe: @prob names no step"),
        ('run = "bench"', 'run = "benches"', "key validate.steps[4]: step throughput runs"),
        ('id = "peer"', 'id = "probe"', "key validate.steps[1]: step id probe is used twice"),
        ('"@reference"', '"@later"', "key validate.steps[3].with: @later is not an earlier"),
        ('hf_ref = "@r', 'hf_reff = "@r', "key validate.steps[3].with.hf_reff: hf_reff is not"),
        ('"== 0"', '"= 0"', 'key acceptance."parity.n_bad": parity.n_bad has the bound'),
        ("* peer.", "* pear.", 'key acceptance."throughput.kv_tokens": pear.kv_tokens names'),
        ('"parity.n_bad"', '"party.n_bad"', 'key acceptance."party.n_bad": party.n_bad names'),
        ("[validate]", "[validate]\nextra = 1", "key validate: validate does not hold steps"),
        ('run = "probe" }', 'run = "probe", wiht = {} }', "key validate.steps[0]: wiht is not"),
    ],
)
def test_a_fault_names_its_place(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    found = faults(tmp_path, GOOD.replace(old, new, 1))
    assert any(one.startswith(expected) for one in found), found


def test_all_faults_of_a_plan_are_reported_together(tmp_path: Path) -> None:
    text = GOOD.replace("tp = 4", "tp = 0").replace("top_p = 0.95", "top_p = 2.0")
    assert len(faults(tmp_path, text)) == 2


def test_a_file_that_is_not_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not TOML"):
        read(tmp_path, "name = ")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan_file(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("text", "value", "other", "holds"),
    [
        (">= 0.95 * a.b", 0.95, 1.0, True),
        (">= 0.95 * a.b", 0.94, 1.0, False),
        ("== 0", 0.0, None, True),
        ("<= 1e3", 1001.0, None, False),
        ("<=3", 3.0, None, True),
    ],
)
def test_a_bound_judges(text: str, value: float, other: float | None, holds: bool) -> None:
    bound = parse_bound(text)
    assert bound is not None
    assert bound.holds(value, other) is holds


@pytest.mark.parametrize("text", ["", "> 1", "= 1", ">= x", ">= 1 a.b", ">= 1 * ", ">= 1 * .b"])
def test_other_bounds_are_no_bounds(text: str) -> None:
    assert parse_bound(text) is None
