"""What bounds the requests of one engine. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagedctl.engine.block_pool import blocks_for
from pagedctl.engine.request_faults import BrokenField
from pagedctl.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PoolBound:
    """A KV pool that holds fewer tokens than the model has positions."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What bounds a request, in tokens.

    Prompt and stop ids are below ``input_vocab_size``, ids that edit logits below
    ``output_vocab_size``; a prompt is shorter than ``max_model_len``, which ``pool`` decides
    where it is given. Stop texts need a tokenizer, prompt logprobs a basis that given tokens
    have. ``eos_token_ids`` are the model's end tokens.
    """

    input_vocab_size: int
    output_vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    has_tokenizer: bool = True
    logprob_basis: str = "scaled"
    pool: PoolBound | None = None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        max_model_len: int | None,
        *,
        has_tokenizer: bool = True,
        logprob_basis: str = "scaled",
        pool: PoolBound | None = None,
    ) -> RequestLimits:
        """Those of a model; *max_model_len* None stands for the model's positions."""
        return cls(
            input_vocab_size=spec.input_vocab_size,
            output_vocab_size=spec.output_vocab_size,
            max_model_len=max_model_len or spec.max_position_embeddings,
            eos_token_ids=tuple(spec.eos_token_ids),
            has_tokenizer=has_tokenizer,
            logprob_basis=logprob_basis,
            pool=pool,
        )

    def too_long(self, what: str, num_cached: int) -> BrokenField:
        """The refusal of a sequence that needs *num_cached* tokens in the pool, and more."""
        if self.pool is None:
            return BrokenField(
                f"{what}, max_model_len is {self.max_model_len}",
                rule="a prompt is shorter than max_model_len, so that one token can follow; "
                "a sequence to score may reach it",
                remedy="shorten it, or give a larger --max-model-len",
                kind="too_long",
            )
        needed = blocks_for(num_cached, self.pool.block_size)
        return BrokenField(
            f"{what} in {needed} blocks, the KV pool has {self.pool.num_blocks}",
            rule="a request fits into the pool, which lowers max_model_len to "
            f"{self.max_model_len} here",
            remedy="shorten it, or give a larger --kv-cache-memory-bytes",
            kind="never_fits",
        )
