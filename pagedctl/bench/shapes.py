"""The shapes of the built-in workloads: their parameters, and the draws they stand for.

A shape gives the same rows on every machine and Python version: all draws come from one
``random.Random(seed)``, in an order that each shape states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import ClassVar

DRAWN_VOCAB = 151_936
"""Token ids are drawn below this; a smaller vocabulary takes them modulo its size."""


@dataclass(frozen=True)
class LengthRange:
    """Lengths in tokens from ``low`` to ``high``, both included; ``32..128``, or just ``32``."""

    low: int
    high: int

    def draw(self, rng: Random) -> int:
        """A uniform draw; a single length takes nothing from the generator."""
        return self.low if self.low == self.high else rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request to be: its group, its prompt, and its exact number of output tokens."""

    group: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Base of the shapes; the fields of a subclass are its ``key=value`` parameters."""

    name: ClassVar[str]
    seed: int = 0

    def rows(self) -> Iterator[Row]:
        """The requests, in order."""
        raise NotImplementedError

    def spec(self) -> str:
        """The SPEC that gives this shape, every parameter spelled out, the seed last."""
        names = [one.name for one in fields(self) if one.name != "seed"]
        parts = [f"{name}={_spelled(getattr(self, name))}" for name in (*names, "seed")]
        return f"{self.name}:{','.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class Uniform(Shape):
    """Independent requests. Draws: per request its prompt's length and ids; then all outputs.

    ``ids_below`` bounds the drawn ids; it is no parameter of a SPEC.
    """

    name: ClassVar[str] = "uniform"
    requests: int = 64
    prompt: LengthRange = LengthRange(32, 128)
    output: LengthRange = LengthRange(32, 128)
    ids_below: ClassVar[int] = DRAWN_VOCAB

    def rows(self) -> Iterator[Row]:
        rng = Random(self.seed)
        prompts = [
            _draw_ids(rng, self.prompt.draw(rng), self.ids_below) for _ in range(self.requests)
        ]
        outputs = [self.output.draw(rng) for _ in range(self.requests)]
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            yield Row(group=index, prompt_token_ids=prompt, max_tokens=output)


class UniformSmallIds(Uniform):
    """The same with ids from 0 to 10,000, as a widely quoted benchmark draws them."""

    ids_below: ClassVar[int] = 10_001


@dataclass(frozen=True, kw_only=True)
class Groups(Shape):
    """``prompts`` prompts with ``n`` samples each, every sample a request of its own.

    Outputs are lognormal: ``median * exp(sigma * N(0, 1))``, rounded, clipped to [min, max].
    Draws: per prompt its length and ids, then the outputs of its samples.
    """

    name: ClassVar[str] = "groups"
    prompts: int = 16
    n: int = 4
    prompt: LengthRange = LengthRange(32, 128)
    median: float = 64
    sigma: float = 0.8
    min: int = 8
    max: int = 512

    def rows(self) -> Iterator[Row]:
        rng = Random(self.seed)
        for group in range(self.prompts):
            prompt = _draw_ids(rng, self.prompt.draw(rng), DRAWN_VOCAB)
            for _ in range(self.n):
                yield Row(group=group, prompt_token_ids=prompt, max_tokens=self._output(rng))

    def _output(self, rng: Random) -> int:
        drawn = round(self.median * rng.lognormvariate(0.0, self.sigma))
        return max(self.min, min(self.max, drawn))


@dataclass(frozen=True, kw_only=True)
class Decode(Shape):
    """Requests of one prompt length and one output length. Draws: the ids, in order."""

    name: ClassVar[str] = "decode"
    requests: int = 64
    prompt: int = 128
    output: int = 128

    def rows(self) -> Iterator[Row]:
        rng = Random(self.seed)
        for index in range(self.requests):
            prompt = _draw_ids(rng, self.prompt, DRAWN_VOCAB)
            yield Row(group=index, prompt_token_ids=prompt, max_tokens=self.output)


@dataclass(frozen=True, kw_only=True)
class FixedWork:
    """A workload that never changes: its shape, the model it is quoted for, its sampling."""

    shape: Shape
    model: str
    temperature: float
    top_p: float = 1.0


SHAPES: Mapping[str, type[Shape]] = {shape.name: shape for shape in (Uniform, Groups, Decode)}

FIXED: Mapping[str, FixedWork] = {
    "decode1": FixedWork(
        shape=Decode(requests=1, prompt=128, output=256, seed=3),
        model="qwen3-8b",
        temperature=0.0,
    ),
    "decode64": FixedWork(
        shape=Decode(requests=64, prompt=128, output=512, seed=3),
        model="qwen3-8b",
        temperature=0.0,
    ),
    "rollout4k": FixedWork(
        shape=Groups(
            prompts=16,
            n=4,
            prompt=LengthRange(150, 500),
            median=1200,
            sigma=0.8,
            min=64,
            max=4096,
            seed=1,
        ),
        model="qwen3-8b",
        temperature=1.0,
        top_p=0.95,
    ),
    "grpo": FixedWork(
        shape=Groups(
            prompts=32,
            n=16,
            prompt=LengthRange(1024, 1024),
            median=600,
            sigma=0.6,
            min=32,
            max=2048,
            seed=2,
        ),
        model="qwen3-8b",
        temperature=1.0,
    ),
    "prefill2k": FixedWork(
        shape=Decode(requests=32, prompt=2048, output=1, seed=4),
        model="qwen3-8b",
        temperature=0.0,
    ),
    "nano": FixedWork(
        shape=UniformSmallIds(
            requests=256, prompt=LengthRange(100, 1024), output=LengthRange(100, 1024)
        ),
        model="qwen3-0.6b",
        temperature=0.6,
    ),
}


def _draw_ids(rng: Random, length: int, below: int) -> tuple[int, ...]:
    return tuple(rng.randrange(below) for _ in range(length))


def _spelled(value: object) -> str:
    return str(value).removesuffix(".0")
