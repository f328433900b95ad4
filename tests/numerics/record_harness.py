"""Combinations and records as data, and a folder of records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedctl.numerics.combination import Combination, Device, Layout, Versions
from pagedctl.numerics.records import (
    ProvedManifest,
    Records,
    VerificationRecord,
    read_records,
    write_record_file,
)

CPU = Device(kind="cpu", name="Some Xeon", capability="AVX512", threads=2)

OF_NO_PROFILE = Combination(
    contract="invariant",
    topology_invariant=False,
    spec_digest="sha256:" + "ab" * 32,
    arithmetic_id="0123456789abcdef",
    family="gemma",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    device=CPU,
    versions=Versions(pagedctl="0.1.0", torch="2.9.1", triton=None, cuda="13.0", driver=None),
    layout=Layout(tp=1, tp_layout=None),
    graphs=False,
    captured_sizes=(),
    switches={"batch_invariant": True, "norm_cast": "before", "padded_vocab_size": None},
    leaves={"attention": "torch.attention", "gemm o_proj 64x48": "torch.gemm_row_blocks"},
    packages={"acme-numerics": "2.1"},
)
"""What no shipped profile covers, so that records decide."""

ALIGNED = replace(OF_NO_PROFILE, contract="rl-bitwise", evidence=("invariance", "align"))


def record_for(found: Combination, command: Any = "invariance", **other: Any) -> VerificationRecord:
    """What *command* would write of *found*; *other* stands over that."""
    values: dict[str, Any] = {
        **found.values(),
        "command": command,
        "cases": ("alone", "packed"),
        "manifest": ProvedManifest(path="runs/m.json", sha256="cd" * 32),
        "created_utc": "2026-12-01T09:30:00Z",
        **other,
    }
    return VerificationRecord(**values)


def as_json(record: VerificationRecord) -> dict[str, Any]:
    """The record's object, as a file holds it."""
    found: dict[str, Any] = json.loads(
        json.dumps(record.to_json_object(), default=lambda one: vars(one))
    )
    return found


def folder_with(folder: Path, *records: VerificationRecord) -> Records:
    """Write the records as a.json, b.json, ... and read the folder."""
    for name, record in zip("abcdefghij", records, strict=False):
        write_record_file(record, folder / f"{name}.json", create_parents=True)
    return read_records(folder)
