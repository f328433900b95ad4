"""A SPEC that cannot be used is refused with all its faults and the nearest names."""

from __future__ import annotations

import pytest

from pagedctl.bench.shapes import Decode, Groups, LengthRange, Uniform
from pagedctl.bench.workload_spec import parse_shape
from pagedctl.bench.workloads import load_workload
from pagedctl.engine.request import SamplingParams
from pagedctl.errors import ConfigError, Fault


def faults_of(text: str) -> list[Fault]:
    with pytest.raises(ConfigError) as caught:
        load_workload(text, defaults=SamplingParams(), read_jsonl=lambda path, defaults: [])
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("uniform", Uniform()),
        ("uniform:requests=3", Uniform(requests=3)),
        (
            "uniform:prompt=100..1024,output=5,seed=7",
            Uniform(prompt=LengthRange(100, 1024), output=LengthRange(5, 5), seed=7),
        ),
        ("decode:output=1", Decode(output=1)),
        ("groups:sigma=0,median=1.5,n=2", Groups(sigma=0.0, median=1.5, n=2)),
    ],
)
def test_parameters_are_parsed(text: str, shape: object) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("unifrm", "unifrm is neither a workload nor a file", "did you mean uniform?"),
        ("decode46:x=1", "decode46:x=1 is neither a workload nor a file", "did you mean decode64?"),
        ("no/such.jsonl", "no/such.jsonl is neither a workload nor a file", "check the name"),
        ("uniform:reqests=3", "uniform has no parameter reqests", "did you mean requests?"),
        ("uniform:ids_below=3", "uniform has no parameter ids_below", "remove it"),
        ("uniform:requests=0", "requests 0 is out of range", "keeps the rule"),
        ("uniform:requests=1.0", "requests 1.0 is not an integer", "keeps the rule"),
        ("uniform:prompt=9..3", "prompt 9..3 is out of range", "keeps the rule"),
        ("uniform:prompt=0..3", "prompt 0..3 is out of range", "keeps the rule"),
        ("uniform:prompt=3-9", "prompt 3-9 is not a length", "keeps the rule"),
        ("uniform:seed=-1", "seed -1 is out of range", "keeps the rule"),
        ("uniform:seed=1,seed=1", "seed is given twice", "remove one"),
        ("uniform:seed=x,seed=1", "seed x is not an integer", "keeps the rule"),
        ("uniform:", "'' is not a parameter", "key=value"),
        ("uniform:seed=", "'seed=' is not a parameter", "key=value"),
        ("decode:prompt=1..2", "prompt 1..2 is not an integer", "keeps the rule"),
        ("groups:median=0", "median 0 is out of range", "keeps the rule"),
        ("groups:sigma=nan", "sigma nan is out of range", "keeps the rule"),
        ("groups:min=9,max=8", "min 9 is above max 8", "min <= max"),
        (
            "decode64:output=9",
            "decode64 takes no parameters",
            "use decode:requests=64,prompt=128,output=512,seed=3",
        ),
    ],
)
def test_a_broken_spec_is_refused(text: str, what: str, remedy: str) -> None:
    fault = faults_of(text)[0]
    assert fault.what == what
    assert remedy in fault.remedy


def test_all_faults_are_reported_together() -> None:
    found = faults_of("uniform:requests=0,colour=red,prompt,seed=1")
    assert {one.what for one in found} == {
        "requests 0 is out of range",
        "uniform has no parameter colour",
        "'prompt' is not a parameter",
    }
