"""The flags are frozen, documented with their default, and the reference is the parser's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from pagedctl.cli.main import BODIES, build_app
from pagedctl.cli.reference import flag_names, reference_page, walk
from pagedctl.config.options import Option
from pagedctl.config.surface import COMMANDS
from tests.conftest import Cli

FILES = [
    "--json",
    "--no-progress",
    "--no-quiet",
    "--plan",
    "--progress",
    "--quiet",
    "-q",
]
MODEL = ["--device", "--dtype", "--model", "--random-weights"]
CONTRACT = [
    "--activation-rounding",
    "--batch-invariant",
    "--no-batch-invariant",
    "--deterministic-collectives",
    "--no-deterministic-collectives",
    "--deterministic-kernels",
    "--no-deterministic-kernels",
    "--explain-numerics",
    "--no-explain-numerics",
    "--head-dtype",
    "--layer-boundary-norm",
    "--leaf",
    "--logprob-basis",
    "--logprob-order",
    "--norm-cast",
    "--numerics",
    "--padded-vocab-size",
    "--rope-table-dtype",
    "--softmax-p-dtype",
    "--symmetric-memory",
    "--no-symmetric-memory",
    "--temperature-form",
    "--topology-invariant",
    "--no-topology-invariant",
    "--unverified",
    "--no-unverified",
    "--yarn-frequency-device",
    "--yarn-ramp-mask-device",
]
ENGINE = [
    "--block-size",
    "--chunk-size",
    "--debug-force-preemption-interval",
    "--enforce-eager",
    "--no-enforce-eager",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--kv-dtype",
    "--lag",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--preemption",
    "--prefix-cache",
    "--no-prefix-cache",
    "--swap-memory-bytes",
]
PARALLEL = [
    "--collective-timeout",
    "--expert-parallel",
    "--no-expert-parallel",
    "--redundant-experts",
    "--reduce-dtype",
    "--tp",
    "--tp-layout",
    "--verify",
    "--no-verify",
]
SAMPLING = [
    "--ignore-eos",
    "--no-ignore-eos",
    "--max-tokens",
    "--min-p",
    "--n",
    "-n",
    "--seed",
    "--stop",
    "--temperature",
    "--top-k",
    "--top-p",
]
SWITCHED = [*MODEL, *CONTRACT, *ENGINE, *PARALLEL]
JSONL = ["--input", "-i", "--output", "-o"]
FROZEN = {
    "pagedctl generate": sorted(
        [
            *SWITCHED,
            *SAMPLING,
            *FILES,
            *JSONL,
            "--chat",
            "--no-chat",
            "--keep",
            "--prompt",
            "--ray",
            "--replicas",
            "--resume",
            "--no-resume",
        ]
    ),
    "pagedctl score": sorted(
        [*SWITCHED, *FILES, *JSONL, "--check", "--no-check", "--start", "--temperature"]
    ),
    "pagedctl bench": sorted(
        [*SWITCHED, *SAMPLING, *FILES, "--repeats", "--suite", "--warmup", "--workload"]
    ),
    "pagedctl invariance": sorted(
        [
            *SWITCHED,
            *FILES,
            "--bisect",
            "--no-bisect",
            "--cases",
            "--junit",
            "--max-tokens",
            "--processes",
            "--prompts",
            "--record",
            "--requests",
        ]
    ),
    "pagedctl env": FILES,
    "pagedctl models list": FILES,
    "pagedctl models inspect": sorted([*FILES, "--tp"]),
}


def commands() -> dict[str, Any]:
    return dict(walk(typer.main.get_command(build_app()), "pagedctl"))


def test_the_list_of_flags_is_frozen() -> None:
    assert {path: flag_names(one) for path, one in commands().items()} == FROZEN


def test_every_command_of_the_parser_is_in_the_surface_table() -> None:
    assert {path.removeprefix("pagedctl ") for path in commands()} == set(BODIES) <= set(COMMANDS)


def test_every_line_of_help_ends_with_the_default_and_names_its_variable() -> None:
    for one in commands().values():
        for parameter in one.params:
            if parameter.name in ("help", "model", "files"):
                continue
            assert "Default: " in parameter.help
            assert parameter.help.endswith(".")
    plan = next(p for p in commands()["pagedctl env"].params if p.name == "plan")
    assert "PAGEDCTL_PLAN" in plan.help


def test_the_reference_page_has_every_command_and_flag() -> None:
    page = reference_page()
    for path, one in commands().items():
        assert f"## {path}\n" in page
        assert all(f"`{name}`" in page for name in flag_names(one))


def test_the_reference_page_on_disk_is_current() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == reference_page()


def test_every_option_of_the_surface_says_its_default() -> None:
    options: list[Option] = [
        one for command in COMMANDS.values() for one in command.all_options().values()
    ]
    assert len(options) > 100
    assert all(one.default_words() and one.help for one in options)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("path", ["env", "generate", "score", "bench", "models inspect"])
def test_help_never_cuts_a_name(cli: Cli, path: str, columns: str) -> None:
    text = cli(*path.split(), "--help", env={"COLUMNS": columns}).stdout
    assert "…" not in text
    for name in flag_names(commands()[f"pagedctl {path}"]):
        assert name in text
    assert f"Usage: pagedctl {path}" in text
