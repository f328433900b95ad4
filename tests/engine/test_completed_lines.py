"""What an output holds and what is left make the whole work, wherever the writing stopped."""

from __future__ import annotations

import io
import json
import random

import pytest

from pagedctl.engine.completed_lines import (
    CompletedLines,
    open_refusals,
    open_requests,
    read_completed_lines,
)
from pagedctl.engine.jsonl import RefusedLine
from pagedctl.engine.request import Request, RequestId, SamplingParams
from pagedctl.errors import ConfigError, RequestError

PLACE = "out.jsonl"
Line = tuple[RequestId | None, int, str]
"""(id, sample, which): one line that a run writes; *which* tells refusals of one id apart."""


def refused_line(request_id: RequestId | None, number: int) -> RefusedLine:
    error = RequestError(f"refusal {number}", where="w", rule="r", remedy="m")
    return RefusedLine(id=request_id, line_number=number, error=error)


def request(request_id: RequestId, n: int) -> Request:
    params = SamplingParams(n=n)
    return Request(id=request_id, prompt_token_ids=(1, 2), params=params)


def written(line: Line) -> bytes:
    request_id, sample, which = line
    values: dict[str, object] = {"id": request_id, "sample": sample}
    if which.startswith("refusal"):
        values["error"] = {"kind": "bad_field", "what": which}
    else:
        values |= {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}
    return json.dumps(values).encode() + b"\n"


def some_work(dice: random.Random) -> tuple[list[Request], list[RefusedLine], list[Line]]:
    """Requests, refused lines, and every line of a whole run in an order that one can have.

    Refused lines come first, in order, then what the engine refuses, then samples as they end.
    Ids of refused lines are missing, of their own, or those of a request (a second use).
    """
    requests = [request(one, dice.randint(1, 4)) for one in (0, "a", 7, "7x", "b")]
    ids = [None, None, "a", "a", 7, "bad", 11]
    refused = [refused_line(dice.choice(ids), number) for number in range(dice.randint(0, 8))]
    late = [one for one in requests if dice.random() < 0.3]
    samples: list[Line] = [
        (one.id, sample, "sample")
        for one in requests
        if one not in late
        for sample in range(one.params.n)
    ]
    dice.shuffle(samples)
    lines: list[Line] = [(one.id, 0, f"refusal {one.line_number}") for one in refused]
    lines += [(one.id, 0, "refusal by the engine") for one in late]
    return requests, refused, lines + samples


def test_lines_and_open_work_are_the_whole_work_at_every_stop() -> None:
    dice = random.Random(0)
    for _ in range(60):
        requests, refused, lines = some_work(dice)
        for stop in range(len(lines) + 1):
            data = b"".join(map(written, lines[:stop]))
            torn = written(lines[stop])[: dice.randint(0, 9)] if stop < len(lines) else b""
            found = read_completed_lines(
                io.BytesIO(data + torn), PLACE, requests=requests, refused=refused
            )
            assert (found.num_lines, found.size_bytes) == (stop, len(data))
            assert found.torn_bytes == len(torn)
            assert found.num_errors == sum(which != "sample" for _, _, which in lines[:stop])
            left = [
                (one.id, 0, f"refusal {one.line_number}") for one in open_refusals(refused, found)
            ]
            for one in open_requests(requests, refused, found):
                name = one.request.id
                if (name, 0, "refusal by the engine") in lines:
                    assert list(one.samples) == list(range(one.request.params.n))
                    left.append((name, 0, "refusal by the engine"))
                else:
                    left += [(name, sample, "sample") for sample in one.samples]
            assert sorted(map(str, left)) == sorted(map(str, lines[stop:]))


def test_an_empty_output_leaves_all_of_the_work() -> None:
    requests, refused = [request("a", 3)], [refused_line(None, 1)]
    assert open_refusals(refused, CompletedLines()) == tuple(refused)
    (one,) = open_requests(requests, refused, CompletedLines())
    assert (one.request, list(one.samples)) == (requests[0], [0, 1, 2])
    found = read_completed_lines(io.BytesIO(), PLACE, requests=requests, refused=refused)
    assert found == CompletedLines()


def test_every_damaged_line_is_named_and_whole_ones_are_not() -> None:
    lines = [written(("a", 0, "sample")), b"\n", b"\xff\n", written(("a", 1, "sample")), b"{}\n"]
    with pytest.raises(ConfigError) as caught:
        read_completed_lines(
            io.BytesIO(b"".join(lines)), PLACE, requests=[request("a", 2)], refused=[]
        )
    places = [fault.where for fault in caught.value.faults]
    assert places == [f"{PLACE}, line {number}" for number in (2, 3, 5)]
