"""A package beside ours, found through its entry point by the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Cli, python_path

CONTRACTS = """
from pagedctl.plugins import (
    BATCH_INVARIANT, DETERMINISTIC, Capability, Choices, Envelope, Fault, LeafSpec, Limit,
    OrderTemplate, Plugin, formats, keep_alignment,
)

def resolve(choices: Choices) -> None:
    keep_alignment(choices)
    choices.tighten("logprob_order", "blockwise-128", "blockwise-direct-128")

def check_checkpoint(facts, numerics):
    if facts.output_vocab_size % 128:
        yield Fault(
            what=f"a vocabulary of {facts.output_vocab_size} is not acme's",
            where=f"family {facts.family}, {facts.dtype}",
            rule=f"a multiple of 128 under {numerics.contract.name}",
            remedy="use another model",
        )

def plugin() -> Plugin:
    return Plugin(
        envelopes=(
            Envelope(name="acme", bitwise=True, promise="acme's bits", resolve=resolve),
            Envelope(
                name="acme-128",
                bitwise=True,
                promise="acme's bits for acme's models",
                resolve=lambda choices: None,
                check_checkpoint=check_checkpoint,
            ),
        ),
        leaves=(
            LeafSpec(
                name="acme.block_sumexp",
                op="block_sumexp",
                entry="acme_leaves:build",
                formats=formats("x", dtypes=("float32",)),
                capability=Capability(kind="cpu"),
                order=OrderTemplate(
                    op="block_sumexp",
                    device_class="cpu",
                    terms=(
                        ("block", "{block_size} columns"),
                        ("sum", "neighbours first, {internal}"),
                        ("transcendental", "exp of {library}, {isa}"),
                    ),
                ),
                limits=(Limit(fact="block_size", minimum=1),),
                features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
                priority=100,
            ),
        ),
    )
"""

LEAVES = '''
import torch

class BlockSumexp:
    """Sums of neighbours, then of their neighbours: another tree than the house's."""

    def __init__(self, block_size):
        self.block_size = block_size

    def __call__(self, shifted, *, block_size):
        assert (shifted.dtype, shifted.ndim, block_size) == (torch.float32, 2, self.block_size)
        assert bool((shifted.amax(dim=-1) == 0).all())
        return torch.stack(
            [neighbours(one) for one in torch.split(torch.exp(shifted), block_size, dim=-1)], -1
        )

def neighbours(values):
    size = 1 << (values.shape[-1] - 1).bit_length()
    total = torch.nn.functional.pad(values, (0, size - values.shape[-1]))
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]

def build(site, machine):
    return BlockSumexp(int(site.facts["block_size"]))
'''

PROMPTS = ("--prompt", "Tom has 3 apples and buys 4.", "--prompt", "Tom", "--max-tokens", "8")
RUN = ("generate", *PROMPTS, "--ignore-eos", "--kv-cache-memory-bytes", "16MiB", "--quiet")
LEAF = "acme.block_sumexp"
SITE = "block_sumexp"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that is an installed distribution: two modules and its dist-info."""
    folder = tmp_path / "site"
    info = folder / "acme_numerics-2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-numerics\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text("[pagedctl.plugins]\nacme = acme_contracts:plugin\n")
    (folder / "acme_contracts.py").write_text(CONTRACTS)
    (folder / "acme_leaves.py").write_text(LEAVES)
    return folder


def with_package(package: Path) -> dict[str, str]:
    return {"PYTHONPATH": python_path(package)}


def numerics(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())["numerics"]
    return found


def test_their_contract_and_leaf_run_and_the_manifest_names_them(
    cli: Cli, package: Path, tmp_path: Path
) -> None:
    env = with_package(package)
    words = (*RUN, "--numerics", "acme", "--unverified", "-o", "acme.jsonl")
    done = cli(*words, "--json", "acme.json", env=env)
    assert done.returncode == 0, done.stderr
    theirs = numerics(tmp_path / "acme.json")
    assert (theirs["contract"], theirs["bitwise"], theirs["verified"]) == ("acme", True, False)
    assert theirs["leaves"][SITE] == LEAF
    assert theirs["switches"]["logprob_order"] == {"value": "blockwise-128", "set_by": "contract"}
    assert theirs["switches"]["batch_invariant"] == {"value": True, "set_by": "contract"}
    assert theirs["pins"]["ONEDNN_DEFAULT_FPMATH_MODE"] == "STRICT"

    # The same contract with our leaf: the tokens are the same, some logprobs and the id are not.
    ours = (*words[:-1], "house.jsonl", "--leaf", "block_sumexp=torch.block_sumexp")
    assert cli(*ours, "--json", "house.json", env=env).returncode == 0
    house = numerics(tmp_path / "house.json")
    assert house["leaves"][SITE] == "torch.block_sumexp"
    assert house["arithmetic_id"] != theirs["arithmetic_id"]
    lines = {
        name: sorted(
            (json.loads(line) for line in (tmp_path / name).read_text().splitlines()),
            key=lambda line: str(line["id"]),
        )
        for name in ("acme.jsonl", "house.jsonl")
    }
    both = list(zip(lines["acme.jsonl"], lines["house.jsonl"], strict=True))
    assert len(both) == 2
    assert all(one["token_ids"] == other["token_ids"] for one, other in both)
    assert any(one["logprobs"] != other["logprobs"] for one, other in both)


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_their_leaf_serves_our_contracts_too(
    cli: Cli, package: Path, tmp_path: Path, command: str
) -> None:
    bench = "uniform:requests=2,prompt=4,output=4,seed=0"
    words = {
        "generate": RUN,
        "bench": ("bench", "--workload", bench, "--repeats", "1", "--warmup", "0", "--quiet"),
    }[command]
    for contract in ("invariant", "fast"):
        path = f"{contract}.json"
        done = cli(
            *words,
            "--numerics",
            contract,
            "--unverified",
            "--json",
            path,
            env=with_package(package),
        )
        assert done.returncode == 0, done.stderr
        found = numerics(tmp_path / path)
        assert (found["contract"], found["leaves"][SITE]) == (contract, LEAF)


def test_help_shows_their_contracts_among_the_choices_and_stays_quick(
    cli: Cli, package: Path
) -> None:
    done = cli("generate", "--help", env={**with_package(package), "COLUMNS": "200"})
    assert done.returncode == 0
    assert "fast|invariant|rl-bitwise|acme|acme-128" in done.stdout
    # The quickest of three: other processes share the machine.
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert cli("--help", env=with_package(package)).returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_their_contract_refuses_what_bitwise_rules_out_and_what_it_rules_out(
    cli: Cli, package: Path
) -> None:
    env = with_package(package)
    loose = cli(*RUN, "--numerics", "acme", "--unverified", "--no-batch-invariant", env=env)
    assert (loose.returncode, loose.stderr) == (
        2,
        "error: batch_invariant off is looser than the contract acme\n"
        "where: switch batch_invariant, set by flag\n"
        "rule: acme needs batch_invariant on: only leaves that declare batch_invariant, one "
        "declared order per call site\n"
        "remedy: drop batch_invariant, or use --numerics fast\n",
    )
    torch_order = cli(
        *RUN, "--numerics", "acme", "--unverified", "--logprob-order", "blockwise-64", env=env
    )
    assert torch_order.returncode == 2
    assert (
        "rule: acme needs logprob_order blockwise-128 or blockwise-direct-128: "
        in torch_order.stderr
    )
    pinned = cli(
        *RUN,
        "--numerics",
        "acme",
        "--unverified",
        env={**env, "ONEDNN_DEFAULT_FPMATH_MODE": "ANY"},
    )
    assert pinned.returncode == 2
    assert "error: the environment variable ONEDNN_DEFAULT_FPMATH_MODE is ANY" in pinned.stderr


def test_their_validator_sees_the_model_before_its_weights(cli: Cli, package: Path) -> None:
    words = (*RUN, "--numerics", "acme-128", "--unverified")
    env = with_package(package)
    assert cli(*words, env=env).returncode == 0
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    path = package / "config.json"
    path.write_text(json.dumps(config))
    line = json.dumps({"prompt_token_ids": [5], "max_tokens": 1}) + "\n"
    refused = cli(
        "generate",
        *("--model", str(path), "--random-weights", "0", "-i", "-", "--quiet"),
        *("--numerics", "acme-128", "--unverified"),
        env=env,
        stdin=line,
    )
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: a vocabulary of 1000 is not acme's\n"
        "where: family llama, float32\n"
        "rule: a multiple of 128 under acme-128\n"
        "remedy: use another model\n",
    )


def test_a_broken_package_is_refused_by_name_where_there_is_a_contract(
    cli: Cli, package: Path, tmp_path: Path
) -> None:
    (package / "acme_contracts.py").write_text("import acme_of_another_version\n")
    env = with_package(package)
    score = tmp_path / "score.jsonl"
    score.write_text('{"id": 0, "token_ids": [5, 6, 7]}\n')
    error = (
        "plug-in acme cannot be loaded: ModuleNotFoundError: No module named "
        "'acme_of_another_version'"
    )
    for words in (RUN, ("bench", "--quiet"), ("score", "-i", "score.jsonl", "--quiet")):
        done = cli(*words, env=env)
        assert (done.returncode, done.stdout, done.stderr) == (
            2,
            "",
            f"error: {error}\n"
            "where: entry point acme_contracts:plugin of the group pagedctl.plugins, package "
            "acme-numerics\n"
            "rule: a plug-in gives a Plugin whose contracts and leaves have names of their own\n"
            "remedy: mend or uninstall acme-numerics\n",
        )
    unknown = cli(*RUN, "--numerics", "acme", env=env)
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "error: numerics acme is unknown\n"
        "where: flag --numerics\n"
        "rule: numerics: one of fast, invariant, rl-bitwise\n"
        f"remedy: mend or uninstall acme-numerics: {error}\n",
    )
    for words in (("--help",), ("generate", "--help"), ("env",), ("models", "list")):
        done = cli(*words, env=env)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_what_a_record_is_of_names_the_version_of_the_package(package: Path) -> None:
    """Another version of it is another program, whatever its leaf declares."""
    code = (
        "from pagedctl import Engine, EngineConfig\n"
        "from pagedctl.engine.verification import combination_of\n"
        "config = EngineConfig(unverified=True, kv_cache_memory_bytes=1 << 24)\n"
        "for more in ({}, {'leaf': ('block_sumexp=torch.block_sumexp',)}, {'numerics': 'acme'}):\n"
        "    with Engine(config.with_options(**more)) as engine:\n"
        "        print(dict(combination_of(engine.parts.model).packages))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **with_package(package)},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    served = "{'acme-numerics': '2.1'}"
    assert done.stdout.splitlines() == [served, "{}", served]


BROKEN_LEAVES = {
    "an import fails": ("import acme_of_another_version", "ModuleNotFoundError: No module named "),
    "it is no Python": ("def (:", "SyntaxError: "),
    "it leaves the process": ("raise SystemExit(0)", "SystemExit: 0"),
    "there is no function": ("del build", "TypeError: acme_leaves has no function build"),
    "it cannot be called": ("build = 3", "TypeError: acme_leaves has no function build"),
    "it fails": ("def build(site, machine): return 1 / 0", "ZeroDivisionError: division by zero"),
    "it gives nothing": (
        "def build(site, machine): return None",
        "TypeError: acme_leaves:build gives NoneType, which cannot be called",
    ),
}


@pytest.mark.parametrize("case", BROKEN_LEAVES)
def test_a_leaf_that_cannot_be_built_is_refused_by_name(cli: Cli, package: Path, case: str) -> None:
    """Neither a traceback nor an end without a word: whoever offers the leaf has to mend it."""
    added, told = BROKEN_LEAVES[case]
    (package / "acme_leaves.py").write_text(f"{LEAVES}\n{added}\n")
    done = cli(*RUN, env=with_package(package))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: leaf acme.block_sumexp: {told}")
    assert done.stderr.endswith(
        "where: call site block_sumexp\n"
        "rule: a leaf's entry is module:function, which returns the implementation\n"
        "remedy: mend or uninstall the plug-in that offers it\n"
    )


def test_a_leaf_that_writes_into_its_input_moves_no_logprob_of_ours(
    cli: Cli, package: Path
) -> None:
    env = with_package(package)
    sound = cli(*RUN, "--unverified", env=env)
    spoiled = LEAVES.replace("def build(", "def build_sound(") + (
        "\ndef build(site, machine):\n"
        "    sound = build_sound(site, machine)\n"
        "    def spoil(shifted, *, block_size):\n"
        "        sums = sound(shifted, block_size=block_size)\n"
        "        shifted.fill_(0)\n"
        "        return sums\n"
        "    return spoil\n"
    )
    (package / "acme_leaves.py").write_text(spoiled)
    done = cli(*RUN, "--unverified", env=env)
    assert (done.returncode, done.stdout) == (sound.returncode, sound.stdout)
    assert done.stdout
