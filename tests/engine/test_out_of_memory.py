"""Memory that cannot be had is a typed refusal: real allocations that fail, in processes of
their own with a bounded address space."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedctl.engine.out_of_memory import refused_if_out_of_memory
from pagedctl.errors import CapacityError
from tests.engine.harness import tiny_engine
from tests.reference.tiny_models import tiny_model

PREAMBLE = """
import dataclasses, resource, sys
from pathlib import Path
import torch
from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import CapacityError
from tests.reference.tiny_models import tiny_model

with Engine(EngineConfig(model="embedded")):
    pass  # whatever libraries set up once is in memory now

def used():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()

def limit(more):
    resource.setrlimit(resource.RLIMIT_AS, (used() + more,) * 2)

def refused(call):
    try:
        call()
    except CapacityError as error:
        print(error.where, "|", error.what, "|", error.remedy)
    else:
        print("served")
"""
WEIGHTS = """
model = tiny_model("llama", num_hidden_layers=0, hidden_size=512)
deep = dataclasses.replace(model, config={**model.config, "num_hidden_layers": 8,
                                          "intermediate_size": 2048})
config = EngineConfig(model=deep.write_config(Path(sys.argv[1])), random_weights=0,
                      kv_cache_memory_bytes=1 << 20)
limit(ROOM)
refused(lambda: Engine(config))
"""
WIDE = """
model = tiny_model("llama", vocab_size=64)
wide = dataclasses.replace(model, config={**model.config, "vocab_size": 2_000_000})
config = EngineConfig(model=wide.write_config(Path(sys.argv[1])), random_weights=0,
                      kv_cache_memory_bytes=1 << 20)
limit(ROOM)
refused(lambda: Engine(config))
"""
STEP = """
model = tiny_model("llama", intermediate_size=60_000)
config = EngineConfig(model=model.write_config(Path(sys.argv[1])), dtype="float32",
                      kv_cache_memory_bytes=1 << 20)
engine = Engine(config, weights=model.tensors(torch.float32))
prompt = tuple(range(1, 90)) * 4
short = Request(id=0, prompt_token_ids=prompt[:2], params=SamplingParams(max_tokens=1))
engine.generate([short])
limit(ROOM)
long = Request(id=1, prompt_token_ids=prompt, params=SamplingParams(max_tokens=1))
refused(lambda: engine.generate([long]))
try:
    engine.step()
except RuntimeError as error:
    print(error)
engine.close()
"""


def run_limited(script: str, room: int, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script.replace("ROOM", str(room)), str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """Eight layers of 13 MB each in float32."""
    (line,) = run_limited(WEIGHTS, 60 << 20, tmp_path)
    where, what, remedy = line.split(" | ")
    assert where.startswith("model ")
    assert "weights of 10" in what
    assert "cannot be held" in what
    assert "--dtype" in remedy
    assert run_limited(WEIGHTS, 6 << 30, tmp_path) == ["served"]


def test_weights_whose_check_does_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """A vocabulary of two million columns: the leaf's own check at binding is what fails."""
    (line,) = run_limited(WIDE, 300 << 20, tmp_path)
    where, what, _ = line.split(" | ")
    assert where.startswith("model ")
    assert "cannot be held" in what


def test_a_step_that_does_not_fit_is_refused_and_ends_the_engine(tmp_path: Path) -> None:
    """356 tokens times 120,000 gate and up columns are 171 MB in float32."""
    line, after = run_limited(STEP, 30 << 20, tmp_path)
    where, what, remedy = line.split(" | ")
    assert where == "option max_num_batched_tokens"
    assert what == "memory for a step cannot be had"
    assert "--max-num-batched-tokens" in remedy
    assert "an exception ended a step halfway" in after
    assert run_limited(STEP, 6 << 30, tmp_path)[0] == "served"


@pytest.mark.parametrize("size", [1 << 50, 1 << 60, (1 << 63) - 1])
def test_a_pool_that_no_machine_holds_is_refused_in_bytes(tmp_path: Path, size: int) -> None:
    with pytest.raises(CapacityError) as caught:
        tiny_engine(tiny_model("llama"), tmp_path, kv_cache_memory_bytes=size)
    assert caught.value.where == "option kv_cache_memory_bytes"
    assert "cannot be allocated" in caught.value.what
    assert "--kv-cache-memory-bytes" in caught.value.remedy


def test_another_error_passes_as_it_is() -> None:
    with (
        pytest.raises(RuntimeError, match="must match the size"),
        refused_if_out_of_memory("what", where="where", rule="rule", remedy="remedy"),
    ):
        torch.ones(2) + torch.ones(3)
