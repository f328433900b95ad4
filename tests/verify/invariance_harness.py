"""A small model to prove something of: random weights, so that a child process has them too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.kv_cache import block_bytes
from pagedctl.verify.case_legs import Subject
from pagedctl.verify.invariance import InvarianceProof, request_maker
from pagedctl.verify.invariance_result import InvarianceResult
from pagedctl.verify.legs import Engines
from pagedctl.verify.reference import Reference
from tests.reference.tiny_models import tiny_model

SIZES = ("vocab_size", "max_position_embeddings")


def tiny_config(folder: Path, family: str = "qwen3", **options: Any) -> EngineConfig:
    """A tiny model of *family* with a pool for all rows of a proof; SIZES are the model's."""
    sizes = {name: options.pop(name) for name in SIZES if name in options}
    chosen = {"dtype": "float32", "random_weights": 3, "kv_cache_memory_bytes": 8 << 20, **options}
    return EngineConfig(model=tiny_model(family, **sizes).write_config(folder), **chosen)


@contextmanager
def proof(
    folder: Path, *, requests: int = 6, max_tokens: int = 8, cases: Any = None, **options: Any
) -> Iterator[InvarianceProof]:
    """A small proof of a tiny model, in this process alone."""
    with Engine(tiny_config(folder, **options), needs_record=False) as engine:
        maker = request_maker(engine, max_tokens)
        yield InvarianceProof(
            engine=engine,
            maker=maker,
            requests=maker.requests(requests),
            cases=cases,
            processes=1,
        )


def prove(folder: Path, **options: Any) -> InvarianceResult:
    with proof(folder, **options) as asked:
        return asked.run()


@contextmanager
def subject(
    folder: Path, *, requests: int = 6, max_tokens: int = 8, **options: Any
) -> Iterator[tuple[Subject, Engines]]:
    """What the legs of a tiny model are made of, and the engines to run them on."""
    with proof(folder, requests=requests, max_tokens=max_tokens, **options) as asked:
        engines = Engines(asked.engine)
        yield (
            Subject(
                config=asked.engine.config,
                block_bytes=block_bytes(asked.engine.spec, asked.engine.config),
                vocab_size=asked.engine.spec.output_vocab_size,
                maker=asked.maker,
                requests=asked.requests,
                reference=Reference(engines),
            ),
            engines,
        )
