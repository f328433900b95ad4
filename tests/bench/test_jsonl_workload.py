"""A workload from a file: ours, a peer's, and one with faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedctl.bench.jsonl_workload import read_jsonl_workload
from pagedctl.engine.jsonl import LineRules
from pagedctl.engine.request import SamplingParams
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import ConfigError

LIMITS = RequestLimits(input_vocab_size=512, output_vocab_size=512, max_model_len=64)


def rules(path: Path) -> LineRules:
    defaults = SamplingParams(temperature=0.5, max_tokens=9)
    return LineRules(source=str(path), limits=LIMITS, defaults=defaults, peer_ids=True)


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_lines_of_ours_and_of_a_peer_are_read_with_the_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.jsonl",
        '{"id": "a", "prompt_token_ids": [1, 2], "n": 2}',
        '{"id": 7, "group": "g", "prompt_ids": [3, 4, 5], "max_tokens": 4, "seed": 17}',
    )
    ours, peers = read_jsonl_workload(path, rules(path))
    assert (ours.id, ours.prompt_token_ids) == ("a", (1, 2))
    assert ours.params == SamplingParams(n=2, temperature=0.5, max_tokens=9)
    assert (peers.id, peers.group, peers.prompt_token_ids) == (7, "g", (3, 4, 5))
    assert peers.params == SamplingParams(temperature=0.5, max_tokens=4, seed=17)


def test_the_faults_of_all_lines_are_reported_together(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.jsonl",
        '{"prompt_token_ids": [1]}',
        '{"prompt_token_ids": [999]}',
        "not json",
    )
    with pytest.raises(ConfigError) as caught:
        read_jsonl_workload(path, rules(path))
    first, second = caught.value.faults
    assert "line 2" in first.where
    assert "line 3" in second.where


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_jsonl_workload(tmp_path / "none.jsonl", rules(tmp_path))
