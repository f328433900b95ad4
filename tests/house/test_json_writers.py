"""Whatever we write as JSON is strict, in every file and on every stream."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedctl.engine
from pagedctl.cli.parsing import BARE
from pagedctl.cli.session import open_session
from pagedctl.config.surface import COMMANDS
from pagedctl.engine import completion_lines, score_lines
from pagedctl.engine.request import Completion, RequestFailure, Scores, TopLogprobs
from pagedctl.errors import Fault, RequestError
from pagedctl.manifest.schema import NumericsInfo, SwitchInfo
from pagedctl.manifest.writer import ManifestBuilder, ManifestTarget, to_bytes

ROOT = Path(__file__).resolve().parents[2]

HOSTILE = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-0.0": -0.0,
    "1e-45": 1e-45,
    "2**63": 2**63,
    "2**64": 2**64,
    "-2**63 - 1": -(2**63) - 1,
}
REASONS = {
    "nan": "NaN",
    "inf": "Infinity",
    "-inf": "-Infinity",
    "2**64": f"integer beyond 64 bits: {2**64}",
    "-2**63 - 1": f"integer beyond 64 bits: {-(2**63) - 1}",
}


# -- who writes --------------------------------------------------------------------------

OTHER_ENCODERS = {
    "pagedctl/manifest/strict_json.py": "the strict writer itself",
    "pagedctl/models/chat_template.py": "the template's tojson filter: prompt text",
    "pagedctl/models/spec.py": "hashed, allow_nan=False",
    "pagedctl/models/model_digest.py": "hashed",
    "pagedctl/bench/workloads.py": "hashed: ids and lengths",
    "kernels/pagedctl_kernels/order.py": "hashed: texts and integers",
}
"""Modules that call another JSON encoder, and what becomes of its output."""


def encoders(source: str) -> Iterator[str]:
    """Every call in *source* of a JSON encoder other than ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if name in ("json.dump", "json.dumps", "orjson.dumps", "json.JSONEncoder"):
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module in ("json", "orjson"):
            yield from (f"from {node.module} import {one.name}" for one in node.names)


def test_no_module_writes_json_but_through_the_strict_writer() -> None:
    """vllm-project/vllm#19661: the standard encoder writes NaN, which strict readers refuse."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("pagedctl", "kernels/pagedctl_kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if any(encoders(path.read_text(encoding="utf-8")))
    }
    assert found == set(OTHER_ENCODERS)


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.dump({}, stream)",
        "import orjson\ndef f(x):\n    return orjson.dumps(x)",
        "from json import dumps",
    ],
)
def test_the_search_for_encoders_sees_one(source: str) -> None:
    assert list(encoders(source))


# -- what they write ---------------------------------------------------------------------


def builder(value: object) -> ManifestBuilder:
    """A manifest that holds *value* wherever a run may put a number."""
    found = ManifestBuilder(command="bench", argv=[], target=None)
    found.config = {"x": value}
    found.metrics = {"x": value, "ttft_ms": {"x": value}, "rows": [{"x": value}]}
    found.samples = {"x": [[1.0, value]]}
    found.numerics = NumericsInfo(
        contract="fast",
        bitwise=False,
        eligible_by=None,
        verified=True,
        switches={"switch": SwitchInfo(value={"x": value}, set_by="flag")},
        leaves={},
        routes=None,
        pins={},
    )
    return found


def manifest_file(value: object, folder: Path) -> bytes:
    path = folder / "m.json"
    build = builder(value)
    build.target = ManifestTarget(path=path)
    build.close_complete()
    return path.read_bytes()


def run_header(value: object, folder: Path) -> bytes:
    """What stands beside an output while the run lasts."""
    return to_bytes(builder(value).snapshot("interrupted"))


def bare_json(value: object, folder: Path) -> bytes:
    """The manifest on stdout."""
    result = StringIO()
    session = open_session(
        COMMANDS["bench"], [], arguments={}, flags={"json": BARE}, environ={}, result=result
    )
    session.emit(builder(value).snapshot("complete"))
    return result.getvalue().encode()


FAILURE = RequestFailure(kind="internal", what="w", where="x", rule="r", remedy="m")


def completion(value: object, logprobs: Any, *, failed: bool = False) -> Completion:
    return Completion(
        id="q",
        sample=0,
        group="q",
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        token_ids=np.arange(len(logprobs), dtype=np.int32),
        logprobs=logprobs,
        logprob_basis="scaled",
        text=None,
        finish_reason=None if failed else "stop",
        stop_reason=None,
        temperature=value,  # type: ignore[arg-type]
        seed=0,
        weight_version_first=0,
        weight_version_last=0,
        cached_tokens=0,
        preemptions=0,
        top_logprobs=TopLogprobs(
            token_ids=np.zeros((1, 2), dtype=np.int32), logprobs=logprobs.reshape(1, 2)
        ),
        prompt_logprobs=logprobs,
        metadata={"x": value, "deep": [{"x": value}]},
        error=FAILURE if failed else None,
    )


def scores(value: object, logprobs: Any) -> Scores:
    return Scores(
        id="q",
        sample=0,
        start=1,
        temperature=value,  # type: ignore[arg-type]
        logprob_basis="scaled",
        logprobs=logprobs,
        weight_version_first=0,
        weight_version_last=0,
    )


def floats32(value: object) -> Any:
    """*value* as a float32 beside another, as logprobs come; a half where it does not fit."""
    fits = isinstance(value, float)
    return np.array([0.5, value if fits else 0.5], dtype=np.float32)


REFUSED = RequestError.of_kind(
    "bad_field", [Fault(what="x is NaN", where="line 1", rule="x is finite", remedy="give one")]
)
LINES: dict[Callable[..., bytes], Callable[[object], bytes]] = {
    completion_lines.completion_line: lambda value: completion_lines.completion_line(
        completion(value, floats32(value))
    ),
    completion_lines.refusal_line: lambda value: completion_lines.refusal_line("q", REFUSED),
    score_lines.score_line: lambda value: score_lines.score_line(scores(value, floats32(value))),
    score_lines.refused_score_line: lambda value: score_lines.refused_score_line("q", 0, REFUSED),
}
"""Every function that makes a line, called with a value wherever it takes a number."""


def line_makers() -> Iterator[Callable[..., bytes]]:
    """The public functions of the engine package that return bytes and are named a line."""
    for one in pkgutil.iter_modules(pagedctl.engine.__path__):
        module = importlib.import_module(f"pagedctl.engine.{one.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            ours = function.__module__ == module.__name__ and not name.startswith("_")
            if ours and name.endswith("_line") and function.__annotations__["return"] == "bytes":
                yield function


def test_every_line_that_we_write_is_in_the_table() -> None:
    assert set(line_makers()) == set(LINES)


FILES = {one.__name__: one for one in (manifest_file, run_header, bare_json)}


def strict(data: bytes) -> Any:
    def refuse(token: str) -> object:
        raise AssertionError(f"{token} in {data!r}")

    assert data.endswith(b"\n")
    return json.loads(data, parse_constant=refuse)


def places(found: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Every (object, key) of a written file whose key is x."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key == "x":
                yield found, key
            yield from places(value)
    elif isinstance(found, list):
        for value in found:
            yield from places(value)


def check(found: dict[str, Any], key: str, name: str) -> None:
    """Exactly the value, or null and its reason beside it."""
    value, reason = found[key], found.get(f"{key}_reason")
    while isinstance(value, list):  # the value is the last of each list
        value = value[-1]
        reason = None if reason is None else reason.rpartition("]: ")[2]
    if name in REASONS:
        assert (value, reason) == (None, REASONS[name])
        return
    assert reason is None
    assert type(value) is type(HOSTILE[name])
    assert value == HOSTILE[name]
    assert math.copysign(1, value) == math.copysign(1, float(HOSTILE[name]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_ours_is_strict_whatever_number_is_in_it(
    tmp_path: Path, file: str, name: str
) -> None:
    """vllm-project/vllm#19661, THUDM/slime#1790, dphnAI/sonar#183: NaN, infinities, -0.0,
    1e-45, 2**63 in results."""
    found = strict(FILES[file](HOSTILE[name], tmp_path))
    checked = list(places(found))
    assert len(checked) == 6
    for place, key in checked:
        check(place, key, name)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("make", LINES, ids=lambda one: one.__name__)
def test_a_line_of_ours_is_strict_whatever_number_is_in_it(
    make: Callable[..., bytes], name: str
) -> None:
    """THUDM/slime#1790, dphnAI/sonar#183: one NaN among the logprobs cost a whole batch."""
    data = LINES[make](HOSTILE[name])
    assert data.count(b"\n") == 1
    found = strict(data)
    for place, key in places(found):
        check(place, key, name)
    if "temperature" in found:
        check(found, "temperature", name)
    if isinstance(HOSTILE[name], float):
        for key in ("logprobs", "prompt_logprobs"):
            if key in found:
                check({"y": found[key], "y_reason": found.get(f"{key}_reason")}, "y", name)
    if found.get("top_logprobs") and name in ("nan", "inf", "-inf"):
        assert found["top_logprobs"][0][1][1] is None
        assert found["top_logprobs_reason"] == f"[0][1][1]: {REASONS[name]}"


def test_a_failed_request_has_its_error_beside_numbers_that_are_null() -> None:
    line = completion_lines.completion_line(completion(math.nan, floats32(-math.inf), failed=True))
    found = strict(line)
    assert found["error"] == asdict(FAILURE)
    assert (found["logprobs"], found["logprobs_reason"]) == ([0.5, None], "[1]: -Infinity")
