"""The tree of switches: contracts tighten, keep what is tight, refuse what is looser."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pagedctl.config.engine_config import EngineConfig, engine_options
from pagedctl.config.kinds import Boolean, Broken, Choice, Integer, Pattern
from pagedctl.errors import ConfigError, NumericsRefused
from pagedctl.numerics.envelopes import house_envelopes
from pagedctl.numerics.resolution import Numerics, resolve_numerics
from pagedctl.numerics.switches import FIXED, SWITCHES, Value, switch_named

ROOT = Path(__file__).resolve().parents[2]
ENVELOPES = house_envelopes()
BITWISE = ENVELOPES.bitwise_names()

FOLD: dict[str, tuple[Value, Value, Value]] = {
    # switch: under fast, invariant and rl-bitwise, where nothing was chosen
    "deterministic_kernels": (False, True, True),
    "batch_invariant": (False, True, True),
    "deterministic_collectives": (False, True, True),
    "symmetric_memory": (True, False, False),
    "topology_invariant": (False, False, False),
    "layer_boundary_norm": (None, "unfused", "unfused"),
    "rope_table_dtype": ("float32", "float32", "float32"),
    "norm_cast": ("before", "before", "before"),
    "activation_rounding": ("model", "model", "model"),
    "softmax_p_dtype": ("model", "model", "model"),
    "head_dtype": ("model", "model", "model"),
    "yarn_ramp_mask_device": ("host", "host", "cpu"),
    "yarn_frequency_device": ("host", "host", "cuda"),
    "padded_vocab_size": (None, None, None),
    "logprob_order": ("torch", "torch", "blockwise"),
    "logprob_basis": ("scaled", "scaled", "scaled"),
    "temperature_form": ("divide", "divide", "divide"),
    "sampling_stream": ("per-request",) * 3,
    "ties": ("lowest index",) * 3,
}
SET_BY_CONTRACT = {
    "fast": (),
    "invariant": (
        "deterministic_kernels",
        "batch_invariant",
        "deterministic_collectives",
        "symmetric_memory",
        "layer_boundary_norm",
    ),
    "rl-bitwise": (
        "deterministic_kernels",
        "batch_invariant",
        "deterministic_collectives",
        "symmetric_memory",
        "layer_boundary_norm",
        "yarn_ramp_mask_device",
        "yarn_frequency_device",
        "logprob_order",
    ),
}
CHANGES = {
    "forward values": (
        "deterministic_kernels",
        "batch_invariant",
        "deterministic_collectives",
        "symmetric_memory",
        "topology_invariant",
        "layer_boundary_norm",
        "rope_table_dtype",
        "norm_cast",
        "activation_rounding",
        "softmax_p_dtype",
        "head_dtype",
        "yarn_ramp_mask_device",
        "yarn_frequency_device",
    ),
    "logprobs only": ("padded_vocab_size", "logprob_order", "logprob_basis"),
    "sampled tokens": ("temperature_form", "sampling_stream", "ties"),
}

ALONE: dict[str, tuple[Value, ...]] = {
    # every value of every switch, each of which fast takes alone
    "deterministic_kernels": (False, True),
    "batch_invariant": (False, True),
    "deterministic_collectives": (False, True),
    "symmetric_memory": (False, True),
    "topology_invariant": (False,),
    "layer_boundary_norm": ("fused", "unfused"),
    "rope_table_dtype": ("float32", "model"),
    "norm_cast": ("before", "after"),
    "activation_rounding": ("model", "float32"),
    "softmax_p_dtype": ("model", "float32"),
    "head_dtype": ("model", "float32"),
    "yarn_ramp_mask_device": ("host", "cpu", "cuda"),
    "yarn_frequency_device": ("host", "cpu", "cuda"),
    "padded_vocab_size": (1, 151936),
    "logprob_order": ("torch", "blockwise", "blockwise-16384", "blockwise-direct-7"),
    "logprob_basis": ("scaled", "raw", "processed"),
    "temperature_form": ("divide", "multiply"),
}

EVERY_BITWISE = {
    ("deterministic_kernels", False): """\
error: deterministic_kernels off is looser than the contract {contract}
where: switch deterministic_kernels, set by flag
rule: {contract} needs deterministic_kernels on: no autotune, no TF32 whatever the environment \
says, no atomics in a sum, and dependent launches only where every dependency waits
remedy: drop deterministic_kernels, or use --numerics fast""",
    ("batch_invariant", False): """\
error: batch_invariant off is looser than the contract {contract}
where: switch batch_invariant, set by flag
rule: {contract} needs batch_invariant on: only leaves that declare batch_invariant, one declared \
order per call site
remedy: drop batch_invariant, or use --numerics fast""",
    ("deterministic_collectives", False): """\
error: deterministic_collectives off is looser than the contract {contract}
where: switch deterministic_collectives, set by flag
rule: {contract} needs deterministic_collectives on: data movement and a fold in rank order, no \
fused all-reduce and norm, pinned NCCL
remedy: drop deterministic_collectives, or use --numerics fast""",
    ("symmetric_memory", True): """\
error: symmetric_memory on is looser than the contract {contract}
where: switch symmetric_memory, set by flag
rule: {contract} needs symmetric_memory off: no symmetric-memory route and no distributed arg-max
remedy: drop symmetric_memory, or use --numerics fast""",
    ("layer_boundary_norm", "fused"): """\
error: layer_boundary_norm fused is looser than the contract {contract}
where: switch layer_boundary_norm, set by flag
rule: {contract} needs layer_boundary_norm unfused: the residual sum is rounded to the model's \
dtype before the norm reads it
remedy: drop layer_boundary_norm, or use --numerics fast""",
}
RL_BITWISE_ALONE = {
    ("logprob_order", "torch"): """\
error: logprob_order torch is looser than the contract rl-bitwise
where: switch logprob_order, set by flag
rule: rl-bitwise needs logprob_order another value than torch: a trainer sums its log-softmax over \
blocks of the vocabulary
remedy: drop logprob_order, or use --numerics fast""",
    ("yarn_ramp_mask_device", "host"): """\
error: yarn_ramp_mask_device host is looser than the contract rl-bitwise
where: switch yarn_ramp_mask_device, set by flag
rule: rl-bitwise needs yarn_ramp_mask_device cpu: where YaRN's ramp is computed
remedy: drop yarn_ramp_mask_device, or use --numerics fast""",
    ("yarn_ramp_mask_device", "cuda"): """\
error: yarn_ramp_mask_device cuda is looser than the contract rl-bitwise
where: switch yarn_ramp_mask_device, set by flag
rule: rl-bitwise needs yarn_ramp_mask_device cpu: where YaRN's ramp is computed
remedy: drop yarn_ramp_mask_device, or use --numerics fast""",
    ("yarn_frequency_device", "host"): """\
error: yarn_frequency_device host is looser than the contract rl-bitwise
where: switch yarn_frequency_device, set by flag
rule: rl-bitwise needs yarn_frequency_device cuda: where YaRN's frequencies are computed
remedy: drop yarn_frequency_device, or use --numerics fast""",
    ("yarn_frequency_device", "cpu"): """\
error: yarn_frequency_device cpu is looser than the contract rl-bitwise
where: switch yarn_frequency_device, set by flag
rule: rl-bitwise needs yarn_frequency_device cuda: where YaRN's frequencies are computed
remedy: drop yarn_frequency_device, or use --numerics fast""",
}
REFUSALS = {
    (contract, switch, value): text.format(contract=contract)
    for contract in ("invariant", "rl-bitwise")
    for (switch, value), text in EVERY_BITWISE.items()
} | {("rl-bitwise", switch, value): text for (switch, value), text in RL_BITWISE_ALONE.items()}

TOPOLOGY = """\
error: topology_invariant cannot be kept under the contract fast
where: switch topology_invariant, set by flag
rule: equal bits at every tp need a bitwise contract
remedy: use --numerics invariant, or drop topology_invariant"""


def resolve(contract: str, **given: Value) -> Numerics:
    return resolve_numerics(ENVELOPES[contract], given, dict.fromkeys(given, "flag"))


def test_the_tables_of_these_tests_have_every_switch_and_every_contract() -> None:
    names = {one.name for one in SWITCHES}
    assert set(FOLD) == names | set(FIXED)
    assert set(ALONE) == names
    assert {name for listed in CHANGES.values() for name in listed} == set(FOLD)
    assert ENVELOPES.names() == tuple(SET_BY_CONTRACT) == ("fast", "invariant", "rl-bitwise")
    assert BITWISE == ("invariant", "rl-bitwise")


@pytest.mark.parametrize("place", range(3))
def test_the_fold_of_every_switch_under_every_contract(place: int) -> None:
    contract = ENVELOPES.names()[place]
    tree = resolve(contract)
    assert {name: tree[name] for name in tree.settings} == {
        name: values[place] for name, values in FOLD.items()
    }
    for name, setting in tree.settings.items():
        by_contract = name in SET_BY_CONTRACT[contract]
        set_by = "always" if name in FIXED else "contract" if by_contract else "default"
        assert setting.set_by == set_by, name
        assert name in CHANGES[setting.changes]


@pytest.mark.parametrize(("contract", "switch", "value"), REFUSALS)
def test_a_looser_value_is_refused_word_for_word(contract: str, switch: str, value: Value) -> None:
    with pytest.raises(NumericsRefused) as caught:
        resolve(contract, **{switch: value})
    assert "\n".join(caught.value.lines()) == REFUSALS[contract, switch, value]


@pytest.mark.parametrize("contract", ENVELOPES.names())
def test_every_value_is_kept_or_refused_by_the_table_alone(contract: str) -> None:
    for switch, values in ALONE.items():
        for value in values:
            if (contract, switch, value) in REFUSALS:
                continue
            setting = resolve(contract, **{switch: value}).settings[switch]
            assert (setting.value, setting.set_by) == (value, "flag")


@pytest.mark.parametrize("switch", ALONE)
def test_a_switch_used_alone_under_fast_moves_no_other(switch: str) -> None:
    plain = resolve("fast").settings
    for value in ALONE[switch]:
        tree = resolve("fast", **{switch: value}).settings
        assert tree[switch].value == value
        assert {name: one for name, one in tree.items() if name != switch} == {
            name: one for name, one in plain.items() if name != switch
        }


@pytest.mark.parametrize(
    "order", ["blockwise", "blockwise-16384", "blockwise-direct", "blockwise-direct-16384"]
)
def test_rl_bitwise_keeps_an_explicit_blockwise_form(order: str) -> None:
    setting = resolve("rl-bitwise", logprob_order=order).settings["logprob_order"]
    assert (setting.value, setting.set_by) == (order, "flag")


def test_all_looser_values_are_refused_together() -> None:
    with pytest.raises(NumericsRefused) as caught:
        resolve("rl-bitwise", batch_invariant=False, symmetric_memory=True, logprob_order="torch")
    assert [one.what.split()[0] for one in caught.value.faults] == [
        "batch_invariant",
        "symmetric_memory",
        "logprob_order",
    ]


def test_a_topology_contract_needs_a_bitwise_one() -> None:
    with pytest.raises(NumericsRefused) as caught:
        resolve("fast", topology_invariant=True)
    assert "\n".join(caught.value.lines()) == TOPOLOGY
    for contract in BITWISE:
        setting = resolve(contract, topology_invariant=True).settings["topology_invariant"]
        assert (setting.value, setting.set_by) == (True, "flag")


def test_every_switch_is_an_option_without_a_value_that_checks_what_the_switch_takes() -> None:
    options = engine_options()
    for one in SWITCHES:
        kind = options[one.name].kind
        assert options[one.name].default is None
        if isinstance(kind, Boolean):
            assert one.values == (False, True)
        elif isinstance(kind, Choice):
            assert one.values == kind.values
        elif isinstance(kind, Pattern):
            assert (one.values, one.form) == ((), kind.regex)
        else:
            assert isinstance(kind, Integer)
            assert (one.values, one.form) == ((), r"[1-9][0-9]{0,9}")
            assert kind.minimum == 1
            assert kind.maximum is not None
            assert one.takes(kind.maximum)
            with pytest.raises(Broken):  # a record and a manifest hold 64 bits
                kind.check(10**20)
        for value in ALONE[one.name]:
            assert one.takes(value)
    assert not switch_named("batch_invariant").takes(1)
    assert not switch_named("padded_vocab_size").takes(0)
    assert not switch_named("logprob_order").takes("megatron")


def test_a_yarn_device_means_the_compute_device_where_there_is_no_cuda() -> None:
    tree = resolve("rl-bitwise")
    here = tree.on_device("cpu").settings
    assert here["yarn_frequency_device"].value == "cpu"
    assert here["yarn_frequency_device"].note == "cuda means cpu: this run has no CUDA device"
    assert here["yarn_ramp_mask_device"] == tree.settings["yarn_ramp_mask_device"]
    assert tree.on_device("cuda").settings == tree.settings
    fast = resolve("fast", yarn_ramp_mask_device="cuda").on_device("cpu")
    assert (fast["yarn_ramp_mask_device"], fast["yarn_frequency_device"]) == ("cpu", "host")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprob_order", "megatron"),
        ("logprob_order", "blockwise-0"),
        ("logprob_order", "blockwise-1\N{ARABIC-INDIC DIGIT TWO}"),
        ("logprob_order", "blockwise-" + "1" * 5000),
        ("batch_invariant", "yes"),
        ("norm_cast", "around"),
        ("padded_vocab_size", 0),
    ],
)
def test_a_value_that_a_switch_does_not_have_is_refused_to_callers_too(
    name: str, value: Value
) -> None:
    for contract in ENVELOPES.names():
        with pytest.raises(ConfigError, match=name):
            EngineConfig(numerics=contract, **{name: value})  # type: ignore[arg-type]


def comparisons_with_a_contract(source: str) -> list[int]:
    """The lines that compare something with the name of a contract of ours."""
    names = set(ENVELOPES.names())
    found = []
    for node in ast.walk(ast.parse(source)):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        found += [
            part.lineno
            for one in compared
            for part in ast.walk(one)
            if isinstance(part, ast.Constant) and part.value in names
        ]
    return found


def test_no_contract_is_compared_by_name() -> None:
    files = [*(ROOT / "pagedctl").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    assert len(files) > 100
    found = {
        str(path.relative_to(ROOT)): lines
        for path in files
        if (lines := comparisons_with_a_contract(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'pinned = contract == "invariant"',
        'pinned = numerics.contract.name in ("invariant", "rl-bitwise")',
        'if config.numerics != "fast": pass',
        'match name:\n    case "rl-bitwise": pass',
    ],
)
def test_the_search_for_comparisons_sees_one(source: str) -> None:
    assert comparisons_with_a_contract(source)
