"""A verification record is complete, strict, never overwritten, and says when it is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedctl.errors import ConfigError
from pagedctl.numerics.combination import VerifiedFacts, differences
from pagedctl.numerics.records import (
    MAX_RECORD_BYTES,
    VerificationRecord,
    default_name,
    read_record,
    read_records,
    records_folder,
    records_of,
    write_record_file,
)
from tests.numerics.record_harness import ALIGNED, OF_NO_PROFILE, as_json, folder_with, record_for

KEYS = (
    "schema", "command", "contract", "topology_invariant", "spec_digest", "arithmetic_id",
    "family", "dtype", "kv_dtype", "device", "versions", "layout", "graphs", "captured_sizes",
    "switches", "leaves", "packages", "cases", "manifest", "created_utc",
)  # fmt: skip


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "r.json"
    path.write_text(json.dumps(content))
    return path


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    record = record_for(
        replace(OF_NO_PROFILE, graphs=True, captured_sizes=(1, 8)), cases=("alone",)
    )
    write_record_file(record, tmp_path / "r.json", create_parents=False)
    assert read_record(tmp_path / "r.json") == record
    content = json.loads((tmp_path / "r.json").read_bytes())
    assert set(content) == set(KEYS)
    assert next(iter(content)) == "schema"
    assert content["schema"] == "pagedctl.verification/1"
    assert content["device"] == {
        "kind": "cpu", "name": "Some Xeon", "capability": "AVX512", "threads": 2
    }  # fmt: skip
    assert set(content["versions"]) == {"pagedctl", "torch", "triton", "cuda", "driver"}
    assert content["layout"] == {"tp": 1, "tp_layout": None}
    assert content["manifest"] == {"path": "runs/m.json", "sha256": "cd" * 32}


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_record_file(record_for(OF_NO_PROFILE), path, create_parents=False)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        write_record_file(record_for(ALIGNED), path, create_parents=False)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="does not exist"):
        write_record_file(record_for(ALIGNED), tmp_path / "no" / "r.json", create_parents=False)


def test_default_names_are_readable_and_never_the_same() -> None:
    record = record_for(replace(OF_NO_PROFILE, contract="a/b c"))
    names = {default_name(record) for _ in range(50)}
    assert len(names) == 50
    for name in names:
        assert name.startswith("a_b_c-gemma-bfloat16-cpu-invariance-20261201T093000Z-")
        assert name.endswith(".json")


# -- damaged records -------------------------------------------------------------------------


def leaf_keys(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every key of the object and of the objects in it whose keys are fixed."""
    for key, value in content.items():
        yield (key,)
        if key in ("device", "versions", "layout", "manifest"):
            yield from ((key, inner) for inner in value)


ALL_KEYS = tuple(leaf_keys(as_json(record_for(OF_NO_PROFILE))))


def holder(content: dict[str, Any], key: tuple[str, ...]) -> dict[str, Any]:
    for part in key[:-1]:
        content = content[part]
    return content


@pytest.mark.parametrize("key", ALL_KEYS, ids=".".join)
def test_a_missing_key_is_refused_by_name(tmp_path: Path, key: tuple[str, ...]) -> None:
    content = as_json(record_for(OF_NO_PROFILE))
    del holder(content, key)[key[-1]]
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=f"key '{'.'.join(key)}' is missing") as told:
        read_record(path)
    assert told.value.where == f"{path}, key {'.'.join(key)}"
    assert "pagedctl.verification/1" in told.value.rule
    assert told.value.remedy


@pytest.mark.parametrize("key", ALL_KEYS, ids=".".join)
@pytest.mark.parametrize("value", [3.5, [None], {"a": {}}], ids=str)
def test_a_value_of_another_type_is_refused_by_name(
    tmp_path: Path, key: tuple[str, ...], value: object
) -> None:
    if key == ("switches",) and value == {"a": {}}:
        told = "switch a is no switch's value"
    elif key == ("schema",):
        told = "is not a verification record"
    else:
        told = ".".join(key)
    content = as_json(record_for(OF_NO_PROFILE))
    holder(content, key)[key[-1]] = value
    with pytest.raises(ConfigError, match=told) as error:
        read_record(written(tmp_path, content))
    assert all(str(tmp_path) in fault.where for fault in error.value.faults)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("command", "bench", "one of invariance, align"),
        ("cases", [], "names the cases that passed"),
        ("cases", ["alone", ""], "names the cases that passed"),
        ("created_utc", "yesterday", "a time like 2026-12-01T09:30:00Z"),
        ("manifest", {"path": "m.json", "sha256": "ab"}, "64 hexadecimal digits"),
        ("graphs", 0, "true or false"),
        ("captured_sizes", [True], "an integer"),
        ("schema", "pagedctl.verification/2", "another major version"),
        ("schema", "pagedctl.manifest/1", "is not a verification record"),
        ("alignment", "yes", "key 'alignment' is not known"),
    ],
)
def test_a_value_that_a_record_cannot_have_is_refused(
    tmp_path: Path, key: str, value: object, told: str
) -> None:
    content = {**as_json(record_for(OF_NO_PROFILE)), key: value}
    with pytest.raises(ConfigError) as error:
        read_record(written(tmp_path, content))
    assert told in "\n".join(error.value.lines())


def test_all_faults_of_a_record_are_told_together(tmp_path: Path) -> None:
    content = as_json(record_for(OF_NO_PROFILE))
    del content["family"]
    content["layout"]["tp"] = "one"
    content["layout"]["ranks"] = 1
    with pytest.raises(ConfigError) as error:
        read_record(written(tmp_path, content))
    keys = {fault.where.rpartition(" ")[2] for fault in error.value.faults}
    assert keys == {"family", "layout.tp", "layout.ranks"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty"),
        (b"[]", "not a verification record"),
        (b'{"schema": "pagedctl.verif', "not strict JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"schema": NaN}', "NaN"),
    ],
)
def test_a_damaged_record_spoils_no_other(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "0.json").write_bytes(data)
    (tmp_path / "1.json").mkdir()
    (tmp_path / "left.json.0123456789ab.tmp").write_bytes(b"{")
    records = folder_with(tmp_path, record_for(OF_NO_PROFILE))
    assert [one.path.name for one in records.sound] == ["a.json"]
    assert told in records.damaged[0].what
    assert str(tmp_path / "0.json") in records.damaged[0].where
    assert "cannot read" in records.damaged[1].what
    assert len(records.damaged) == 2


@pytest.mark.parametrize("kind", ["pipe", "device", "link to itself", "huge"])
def test_what_is_no_record_by_its_looks_holds_no_run_up(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "0.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(MAX_RECORD_BYTES + 1)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    records = folder_with(tmp_path, record_for(OF_NO_PROFILE))
    assert [one.path.name for one in records.sound] == ["a.json"]
    (damaged,) = records.damaged
    assert damaged.what.startswith("cannot read it: ")
    assert damaged.where == str(path)


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    folder = records_folder(tmp_path)
    folder.write_text("not a folder")
    found = read_records(folder)
    assert found.sound == ()
    assert (found.damaged[0].what, found.damaged[0].where) == (
        "cannot read it: Not a directory",
        str(folder),
    )


def test_a_folder_that_does_not_exist_has_no_records(tmp_path: Path) -> None:
    found = read_records(records_folder(tmp_path))
    assert (found.sound, found.damaged) == ((), ())
    assert records_folder(tmp_path) == tmp_path / "records"


# -- comparison ------------------------------------------------------------------------------


def test_less_may_be_known_than_a_record_holds(tmp_path: Path) -> None:
    records = folder_with(
        tmp_path, record_for(OF_NO_PROFILE), record_for(ALIGNED), record_for(ALIGNED, "align")
    )
    facts = {"contract": "rl-bitwise", "spec_digest": ALIGNED.spec_digest}
    found = records_of(facts, records)
    assert {name: len(paths) for name, paths in found.items()} == {"invariance": 1, "align": 1}
    assert records_of({**facts, "dtype": "float32"}, records) == {}


def test_true_is_not_one() -> None:
    record: VerificationRecord = record_for(OF_NO_PROFILE)
    facts = {**OF_NO_PROFILE.facts(), "switches.batch_invariant": 1}
    assert [one.key for one in differences(record, facts)] == ["switches.batch_invariant"]


def test_every_field_but_the_evidence_is_compared() -> None:
    compared = {key.partition(".")[0] for key in OF_NO_PROFILE.facts()}
    assert compared == set(KEYS) - {"schema", "command", "cases", "manifest", "created_utc"}
    assert compared >= VerifiedFacts.FOREIGN
