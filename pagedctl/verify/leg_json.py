"""Legs and traces as JSON objects, for another process; floats travel as their bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.verify.comparison import Answer
from pagedctl.verify.float_bits import bits
from pagedctl.verify.legs import Leg, LegTrace, Probe


def config_to_json(config: EngineConfig) -> dict[str, object]:
    return {"values": config.as_dict(), "origins": dict(config.origins)}


def config_from_json(found: Mapping[str, Any]) -> EngineConfig:
    values = {name: _tuples(value) for name, value in found["values"].items()}
    return EngineConfig(**values, origins=found["origins"])


def leg_to_json(leg: Leg) -> dict[str, object]:
    """A leg that generates: those that score need their reference."""
    values = asdict(leg)
    values["options"] = dict(leg.options)
    return values


def leg_from_json(found: Mapping[str, Any]) -> Leg:
    return Leg(
        **{
            **found,
            "probes": tuple(_probe(one) for one in found["probes"]),
            "fillers": tuple(_request(one) for one in found["fillers"]),
            "needs": tuple(found["needs"]),
        }
    )


def trace_to_json(trace: LegTrace) -> dict[str, object]:
    """*trace*, whose answers have neither prompt logprobs nor likeliest tokens."""
    return {
        "answers": [
            {
                "key": list(key),
                "start": one.start,
                "token_ids": one.token_ids.tolist(),
                "logprob_bits": bits(one.logprobs).tolist(),
                "failure": one.failure,
            }
            for key, one in trace.answers.items()
        ],
        "cached_tokens": [[list(key), count] for key, count in trace.cached_tokens.items()],
        "rows": [[rows, steps] for rows, steps in trace.rows.items()],
        "chunk_splits": trace.chunk_splits,
        "overshoots": trace.overshoots,
        "preemptions": trace.preemptions,
        "prefix_hit_tokens": trace.prefix_hit_tokens,
    }


def trace_from_json(found: Mapping[str, Any]) -> LegTrace:
    return LegTrace(
        **{
            **found,
            "answers": {tuple(one["key"]): _answer(one) for one in found["answers"]},
            "cached_tokens": {tuple(key): count for key, count in found["cached_tokens"]},
            "rows": dict(found["rows"]),
        }
    )


def _answer(found: Mapping[str, Any]) -> Answer:
    return Answer(
        start=found["start"],
        token_ids=np.array(found["token_ids"], dtype=np.int32),
        logprobs=_floats(found["logprob_bits"]),
        failure=found["failure"],
    )


def _floats(values: list[int]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.int32).view(np.float32)


def _probe(found: Mapping[str, Any]) -> Probe:
    return Probe(**{**found, "request": _request(found["request"]), "of": _request(found["of"])})


def _request(found: Mapping[str, Any]) -> Request:
    params = SamplingParams(**{name: _tuples(value) for name, value in found["params"].items()})
    ids = tuple(found["prompt_token_ids"])
    return Request(**{**found, "prompt_token_ids": ids, "params": params})


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that options and requests are made of."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
