"""Rules over several sampling fields of a request, each of which is right by itself. No torch."""

from __future__ import annotations

from pagedctl.engine.request import SamplingParams
from pagedctl.engine.request_faults import BrokenField, RequestFaults, spelled
from pagedctl.engine.request_limits import RequestLimits


def check_together(params: SamplingParams, limits: RequestLimits, faults: RequestFaults) -> None:
    """Record what this model and engine cannot serve of *params*."""
    with faults.collecting("stop"):
        _check_stop(params, limits)
    with faults.collecting("min_tokens"):
        _check_min_tokens(params)
    with faults.collecting("allowed_token_ids"):
        _check_allowed(params, limits)
    with faults.collecting("prompt_logprobs"):
        _check_prompt_logprobs(params, limits)


def _check_stop(params: SamplingParams, limits: RequestLimits) -> None:
    if params.stop and not limits.has_tokenizer:
        raise BrokenField(
            f"stop {spelled(params.stop)} is text, and this model has no tokenizer.json",
            rule="a stop text is looked for in the text, which needs the model's tokenizer",
            remedy="use stop_token_ids",
        )


def _check_min_tokens(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BrokenField(
            f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}",
            rule="min_tokens <= max_tokens",
        )


def _check_allowed(params: SamplingParams, limits: RequestLimits) -> None:
    """While stop ids are barred, one of the others must be left to draw."""
    eos = () if params.ignore_eos else limits.eos_token_ids
    others = set(params.allowed_token_ids) - {*eos, *params.stop_token_ids}
    if params.min_tokens and params.allowed_token_ids and not others:
        raise BrokenField(
            f"allowed_token_ids {spelled(params.allowed_token_ids)} all end the sample, "
            f"and min_tokens is {params.min_tokens}",
            rule="before min_tokens no end token is drawn, so another one must be allowed",
            remedy="allow another token, or leave min_tokens out",
        )


def _check_prompt_logprobs(params: SamplingParams, limits: RequestLimits) -> None:
    if params.prompt_logprobs and limits.logprob_basis == "processed":
        raise BrokenField(
            "prompt_logprobs have no basis processed",
            rule="penalties and truncation belong to a sampled token; a prompt has scaled or raw "
            "logprobs",
            remedy="leave prompt_logprobs out, or use logprob_basis scaled or raw",
        )
