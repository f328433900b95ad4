"""The requests of an invariance proof: the same for the same seed, on every machine. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import ConfigError, Fault
from pagedctl.rollout.word_problems import stream

LONG_LENGTHS = (232, 273, 518, 250)
"""Prompt lengths of every sixteenth request. Attention splits its keys by 256: some cross
that border while they decode, the others have whole splits behind them."""

LONGEST = max(LONG_LENGTHS)

LONG_EVERY, SHORT_EVERY, STEM_EVERY = 16, 8, 4


class PromptSource(Protocol):
    """Draws prompts; *length* None leaves the length to the source."""

    def draw(self, random: Random, length: int | None = None) -> tuple[int, ...]: ...


class Encoder(Protocol):
    """A tokenizer, as far as prompts need one."""

    def encode(self, text: str) -> list[int]: ...


class WordProblemPrompts:
    """Word problems, as the embedded model was trained on; joined or cut to a length."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def draw(self, random: Random, length: int | None = None) -> tuple[int, ...]:
        problems = stream(random.getrandbits(48), "heldout")
        ids = self._encoder.encode(next(problems).prompt)
        while length is not None and len(ids) < length:
            ids += self._encoder.encode(next(problems).prompt)
        return tuple(ids[:length])


class RandomPrompts:
    """Ids drawn evenly over the vocabulary, 2 to 60 of them where no length is given."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def draw(self, random: Random, length: int | None = None) -> tuple[int, ...]:
        chosen = random.randint(2, 60) if length is None else length
        return tuple(random.randrange(self._vocab_size) for _ in range(chosen))


class MixedPrompts:
    """Word problems and random ids, as often as each other.

    A trained model is sure of what it was trained on: most of its logprobs are so near to 0 that
    a last bit of a logit does not show in them. It is not sure behind random ids.
    """

    def __init__(self, known: PromptSource, random: PromptSource) -> None:
        self._sources = (known, random)

    def draw(self, random: Random, length: int | None = None) -> tuple[int, ...]:
        return random.choice(self._sources).draw(random, length)


@dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Makes requests whose prompts have at most ``max_prompt`` tokens and whose outputs have
    exactly ``max_tokens``.

    Whatever is drawn follows from ``seed`` and a name, so that each run of a proof can be
    repeated by itself.
    """

    source: PromptSource
    max_prompt: int
    max_tokens: int
    block_size: int
    seed: int = 0

    @classmethod
    def of(
        cls, source: PromptSource, *, max_model_len: int, max_tokens: int, block_size: int
    ) -> RequestMaker:
        """Raises ConfigError if *max_model_len* leaves no room for a prompt."""
        if max_model_len - max_tokens < 2:
            raise ConfigError(
                f"max_tokens {max_tokens} leaves no room for a prompt",
                where="option max_tokens",
                rule=f"a prompt of at least 2 tokens and the output fit into {max_model_len}",
                remedy="give a smaller --max-tokens or a larger --max-model-len",
            )
        return cls(
            source=source,
            max_prompt=max_model_len - max_tokens,
            max_tokens=max_tokens,
            block_size=block_size,
        )

    def random(self, name: str) -> Random:
        """A generator that *name* and the seed decide, and no hash of this process."""
        return Random(f"{self.seed}/{name}")

    def prompt(self, random: Random, length: int | None = None) -> tuple[int, ...]:
        """A prompt that fits."""
        return self.source.draw(random, length)[: self.max_prompt]

    def requests(self, number: int) -> tuple[Request, ...]:
        """*number* requests: greedy ones and seeded ones at T = 1 in turn.

        Some share a stem of two blocks, some are long, some have a few tokens.
        """
        stem = self.source.draw(self.random("stem"), 2 * self.block_size)
        return tuple(self._request(place, stem) for place in range(number))

    def of_prompts(self, prompts: Sequence[Request]) -> tuple[Request, ...]:
        """The prompts, ids and salts of *prompts*, sampled as those of :meth:`requests`.

        Raises ConfigError for prompts that are too long.
        """
        faults = [_too_long(one, self) for one in prompts if self._is_too_long(one)]
        if faults:
            raise ConfigError.of(faults)
        return tuple(
            Request(
                id=one.id,
                prompt_token_ids=one.prompt_token_ids,
                cache_salt=one.cache_salt,
                params=self.params(place),
            )
            for place, one in enumerate(prompts)
        )

    def _is_too_long(self, request: Request) -> bool:
        return len(request.prompt_token_ids) > self.max_prompt

    def params(self, place: int, **sampling: object) -> SamplingParams:
        """Greedy for an even *place*, else T = 1; *sampling* wins. Nothing ends an output early."""
        values: dict[str, object] = {
            "temperature": float(place % 2),
            "seed": 1000 + place,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            **sampling,
        }
        return SamplingParams(**values)  # type: ignore[arg-type]

    def fillers(self, name: str, number: int, *, max_tokens: int | None = None) -> list[Request]:
        """Requests that only share the batch; prompts, seeds and lengths are those of *name*.

        With *max_tokens* prompts are short and outputs have exactly so many tokens.
        """
        random = self.random(f"fillers {name}")
        names = [f"pagedctl filler {name} {place}" for place in range(number)]
        return [self._filler(random, one, max_tokens) for one in names]

    def long_filler(self, name: str) -> Request:
        """One more, whose prompt no chunk holds."""
        random = self.random(f"long filler {name}")
        return Request(
            id=f"pagedctl long filler {name}",
            prompt_token_ids=self.prompt(random, LONGEST),
            params=self.params(0),
        )

    def _filler(self, random: Random, name: str, max_tokens: int | None) -> Request:
        if max_tokens is None:
            length, tokens = None, random.randint(max(1, self.max_tokens // 2), self.max_tokens)
        else:
            length = random.randint(1, 6)
            tokens = min(max_tokens, self.max_prompt + self.max_tokens - length)
        params = SamplingParams(
            temperature=random.choice((0.0, 0.7, 1.0)),
            seed=random.getrandbits(48),
            max_tokens=tokens,
            ignore_eos=True,
        )
        return Request(id=name, prompt_token_ids=self.prompt(random, length), params=params)

    def _request(self, place: int, stem: tuple[int, ...]) -> Request:
        random = self.random(f"request {place}")
        if place % LONG_EVERY == 3:
            length = LONG_LENGTHS[place // LONG_EVERY % len(LONG_LENGTHS)]
            ids = self.prompt(random, length)
        elif place % SHORT_EVERY == 6:
            ids = self.prompt(random, random.randint(1, 8))
        elif place % STEM_EVERY == 1:
            ids = (stem + self.prompt(random))[: self.max_prompt]
        else:
            ids = self.prompt(random)
        return Request(id=place, prompt_token_ids=ids, params=self.params(place))


def _too_long(request: Request, maker: RequestMaker) -> Fault:
    return Fault(
        what=f"the prompt has {len(request.prompt_token_ids)} tokens",
        where=f"option prompts, request {request.id}",
        rule=f"a prompt and {maker.max_tokens} output tokens fit into max_model_len, so it has at "
        f"most {maker.max_prompt}",
        remedy="shorten it, or give a smaller --max-tokens or a larger --max-model-len",
    )
