"""What a proof has to span before it may earn a record.

A record grants its contract to every batch, length and order of events on its machine, and holds
none of the options that a run is narrowed by. So a run that was narrowed by one earns none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.request import Request
from pagedctl.models.spec import ModelSpec
from pagedctl.verify.case_legs import CROWD_LEAST
from pagedctl_kernels.house import SPLIT_TOKENS


def too_narrow(
    config: EngineConfig, spec: ModelSpec, requests: Sequence[Request]
) -> Iterator[tuple[str, str]]:
    """What a proof of *requests* would leave out that a record grants: (what, remedy)."""
    if config.max_num_seqs < CROWD_LEAST:
        yield (
            f"max_num_seqs {config.max_num_seqs} leaves out batches of {CROWD_LEAST} rows",
            f"give --max-num-seqs {CROWD_LEAST} or more",
        )
    if config.debug_force_preemption_interval is not None:
        yield (
            "preemptions are forced in every run",
            "leave --debug-force-preemption-interval out",
        )
    longest = max(len(one.prompt_token_ids) + (one.params.max_tokens or 0) for one in requests)
    if longest <= SPLIT_TOKENS < spec.max_position_embeddings:
        yield (
            f"no sequence has more than {longest} tokens, and attention splits its keys by "
            f"{SPLIT_TOKENS}",
            "give more --requests and --max-tokens, or longer --prompts",
        )
