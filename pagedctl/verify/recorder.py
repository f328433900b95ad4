"""Records what one sequence meets in an engine: a digest of its rows at every op call.

The engine's bound plans are watched for a while; nothing is computed otherwise. The step plan
says which rows of a call are the sequence's: its tokens lie together in the flat batch, behind
those of the rows before it, and what is scored or sampled is counted in the same order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import TracebackType
from typing import Any

import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import RequestId
from pagedctl.engine.step_plan import StepPlan
from pagedctl.models.binding import DecoderPlans
from pagedctl.verify.stage_leaves import stage_leaves
from pagedctl.verify.step_share import StepShare, share_of
from pagedctl.verify.trace import Point, Trace
from pagedctl_kernels.ops.interfaces import AttentionMetadata, SamplingRows
from pagedctl_kernels.plan import Plan

DIGEST_BYTES = 8
TOKEN_OPS = frozenset(
    {
        *("embedding", "norm", "qkv_proj", "qk_norm_rope_write", "attention", "o_proj"),
        *("gate_up_proj", "silu_mul", "down_proj"),
    }
)
"""Plans that run over every token of a step; the others run over what is scored or sampled."""


class Recorder:
    """Watches an engine's plans while it is entered; gives the :class:`Trace` of one sample.

    Engines that share a model are not confused: only steps of *engine* are recorded. In
    :meth:`Engine.score` a sequence's id is its place. ``trace`` is what is given on entering, and
    grows while steps run. Leaving restores the plans.

    Example: ``with Recorder(engine, "a", 0) as trace: engine.generate(requests)``.
    """

    def __init__(self, engine: Engine, request_id: RequestId, sample: int = 0) -> None:
        parts = engine.parts
        self._key = (request_id, sample)
        self._runner, self._decoder, self._sampler = (
            parts.runner,
            parts.runner.decoder,
            parts.runner.sampler,
        )
        self._block_size = engine.config.block_size
        self.trace = Trace(leaves=stage_leaves(self._decoder.plans, engine.spec.windows))
        self._share: StepShare | None = None
        self._seen: Counter[str] = Counter()
        self._metadata: AttentionMetadata | None = None

    def __enter__(self) -> Trace:
        self._kept = (self._runner.launch, self._decoder.plans, self._sampler.plans)
        self._runner.launch = self._launch  # type: ignore[method-assign]
        self._decoder.plans = self._watched(self._decoder.plans)
        self._sampler.plans = self._decoder.plans
        return self.trace

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        launch, self._decoder.plans, self._sampler.plans = self._kept
        self._runner.launch = launch  # type: ignore[method-assign]

    # -- steps ---------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan, sequences: Mapping[Any, Any]) -> Any:
        self._share = share_of(plan, self._key, sequences)
        self._seen.clear()
        try:
            return self._kept[0](plan, sequences)
        finally:
            self._share = None

    def _watched(self, plans: DecoderPlans) -> DecoderPlans:
        """The same plans, each reporting its calls."""
        changed: dict[str, Any] = {}
        for one in fields(plans):
            value = getattr(plans, one.name)
            if isinstance(value, Plan):
                changed[one.name] = self._watch(one.name, value)
            else:
                changed[one.name] = {
                    window: self._watch(one.name, plan) for window, plan in value.items()
                }
        return replace(plans, **changed)

    def _watch(self, name: str, plan: Plan) -> Plan:
        return replace(plan, run=_Watched(plan.run, name, self._saw, self._prepared))

    def _prepared(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    # -- calls ---------------------------------------------------------------------------------

    def _saw(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """A call of the plan *name* ended; record the sequence's rows of it."""
        share = self._share
        if share is None:
            return
        if name in TOKEN_OPS:
            self._saw_tokens(name, share, arguments, result)
        elif name == "sample":
            self._saw_sample(share, arguments[0], arguments[1], result.token_ids)
        elif name != "logit_edits":
            self._saw_outputs(name, share, arguments, result)

    def _saw_tokens(
        self, name: str, share: StepShare, arguments: tuple[Any, ...], result: Any
    ) -> None:
        """Rows of all tokens; the wide activations come in several calls, rows in order."""
        outputs = result if isinstance(result, tuple) else (result,)
        height = len(outputs[0])
        turn, begin = divmod(self._seen[name], share.num_tokens)
        self._seen[name] += height
        rows = range(max(share.first, begin), min(share.first + share.count, begin + height))
        if not rows:
            return
        taken = slice(rows.start - begin, rows.stop - begin)
        position = share.start + rows.start - share.first
        layer, stage = _place(name, turn, len(self._decoder.layers))
        own = [one[taken] for one in outputs]
        if name == "embedding":
            self._add(position, None, "token", arguments[0][taken])
        elif name == "qk_norm_rope_write":
            self._add(position, layer, "position", arguments[4][taken])
            own += _written(arguments[5][taken], *arguments[6:8])
        elif name == "attention":
            self._add_blocks(position, layer, share, arguments[1], arguments[2])
        self._add(position, layer, stage, *own)

    def _saw_sample(
        self, share: StepShare, logits: torch.Tensor, rows: SamplingRows, token_ids: torch.Tensor
    ) -> None:
        for place, position in share.outputs.items():
            row = place - share.num_scored
            if row < 0:
                continue
            taken = slice(row, row + 1)
            self._add(position, None, "logit_edits", logits[taken])
            self._add(position, None, "stream", rows.seed[taken], rows.position[taken])
            others = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
            self._add(position, None, "sampling", *(one[taken] for one in others))
            self._add(position, None, "sample", token_ids[taken])

    def _saw_outputs(
        self, name: str, share: StepShare, arguments: tuple[Any, ...], result: torch.Tensor
    ) -> None:
        """Rows of head, block_sumexp and logprob: what is scored, in pieces, then what is drawn.

        A logprob's block sums are taken while it runs, or not at all if it has another way.
        """
        counter = "logprob" if name == "block_sumexp" else name
        begin = self._seen[counter]
        self._seen[name] += len(result)
        for place, position in share.outputs.items():
            if not begin <= place < begin + len(result):
                continue
            taken = slice(place - begin, place - begin + 1)
            if name != "logprob":
                self._add(position, None, name, result[taken])
                continue
            logits, temperature, token_ids = arguments
            columns = 1 + (share.top if place >= share.num_scored else 0)
            at = temperature[taken]
            at = at.masked_fill(at == 0, 1)  # the same division: by one
            self._add(position, None, "reported", logits[taken], at)
            self._add(position, None, "likeliest", token_ids[taken, 1:columns])
            self._add(position, None, "logprob", result[taken, :columns])

    # -- digests -------------------------------------------------------------------------------

    def _add(self, position: int, layer: int | None, stage: str, *rows: torch.Tensor) -> None:
        """Digest each row of *rows*, tensors [n, ...] that belong together, from *position* on."""
        parts = [_bytes_of(one) for one in rows]
        for place in range(len(parts[0])):
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            for one in parts:
                digest.update(one[place])
            point = Point(position=position + place, layer=layer, stage=stage)
            self.trace.add(point, int.from_bytes(digest.digest(), "little"))

    def _add_blocks(
        self,
        position: int,
        layer: int | None,
        share: StepShare,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        """Digest, for each of the sequence's tokens, all keys and values up to its own."""
        assert self._metadata is not None
        table = torch.as_tensor(self._metadata.block_tables[share.plan_row], device=k_cache.device)
        tokens = torch.arange(position + share.count, device=k_cache.device)
        blocks, offsets = table.long()[tokens // self._block_size], tokens % self._block_size
        keys, values = (_bytes_of(one[blocks, :, offsets]) for one in (k_cache, v_cache))
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for token in range(len(keys)):
            digest.update(keys[token])
            digest.update(values[token])
            if token >= position:
                point = Point(position=token, layer=layer, stage="blocks")
                self.trace.add(point, int.from_bytes(digest.digest(), "little"))


class _Watched:
    """A leaf's ``run`` that tells of every call after it was made, and is that leaf otherwise."""

    def __init__(
        self,
        run: Any,
        name: str,
        saw: Callable[[str, tuple[Any, ...], Any], None],
        prepared: Callable[[AttentionMetadata], None],
    ) -> None:
        self._run = run
        self._name = name
        self._saw = saw
        self._prepared = prepared

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._run(*arguments, **named)
        self._saw(self._name, arguments, result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def prepare(self, *arguments: Any) -> Any:
        """A step's attention work, or a weight."""
        if self._name == "attention":
            self._prepared(*arguments)
        return self._run.prepare(*arguments)


def _place(name: str, turn: int, num_layers: int) -> tuple[int | None, str]:
    """The layer and the stage of a plan's call number *turn* over all tokens."""
    if name == "embedding":
        return None, name
    if name != "norm":
        return turn, name
    if turn == 2 * num_layers:
        return None, "final_norm"
    return turn // 2, ("input_norm", "post_attention_norm")[turn % 2]


def _written(
    slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> list[torch.Tensor]:
    """The keys and values that were just written to *slots* int64[n], each [n, kv_heads, dim]."""
    size = k_cache.shape[2]
    at = slots.clamp(min=0)
    return [cache[at // size, :, at % size] for cache in (k_cache, v_cache)]


def _bytes_of(rows: torch.Tensor) -> list[bytes]:
    """The bits of each row of [n, ...]."""
    flat = rows.detach().reshape(len(rows), -1).cpu()
    if not flat.numel():
        return [b""] * len(rows)
    whole = flat.clone(memory_format=torch.contiguous_format)  # a single row may keep its stride
    return [one.tobytes() for one in whole.view(torch.uint8).numpy()]
