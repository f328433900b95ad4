"""Workloads: a stated list of requests that every engine under comparison can serve.

A built-in workload ignores end tokens and has exact output lengths, so that every engine
does the same work whatever its weights. A JSON lines file says for itself. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pagedctl.bench.shapes import FIXED, FixedWork, Row
from pagedctl.bench.workload_spec import parse_shape, unknown_workload
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import ConfigError

ReadJsonl = Callable[[Path, SamplingParams], Iterable[Request]]
"""Reads the requests of a JSON lines file; a request that does not say takes the defaults."""

_EXACT_DECIDES = ("max_tokens", "stop", "ignore_eos")
_FIXED_DECIDES = (*_EXACT_DECIDES, "n", "temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A list of requests, and how it came to be.

    ``spec`` gives it again: every parameter spelled out, or the file's path. ``seed`` is that
    of the draws, None for a file. With ``exact_lengths`` every sample has exactly
    ``max_tokens`` tokens. ``sampling`` are the parameters of requests that do not say.
    ``model`` is the one that a fixed workload is quoted for. ``different_work`` says how the
    requests depart from the workload of that name; empty if they do not.
    """

    name: str
    spec: str
    seed: int | None
    requests: tuple[Request, ...]
    exact_lengths: bool
    sampling: SamplingParams
    model: str | None = None
    different_work: tuple[str, ...] = ()

    @property
    def decides(self) -> tuple[str, ...]:
        """The sampling options that the workload sets itself, whatever was given."""
        if not self.exact_lengths:
            return ()
        return _EXACT_DECIDES if self.model is None else _FIXED_DECIDES

    @property
    def num_samples(self) -> int:
        return sum(request.params.n for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each request counted once whatever its ``n``."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all samples, where their lengths are exact."""
        return sum(one.params.n * (one.params.max_tokens or 0) for one in self.requests)

    def sha256(self) -> str:
        """Over one line of JSON per request: id, group, salt, prompt and non-default sampling."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(_canonical_line(request))
        return digest.hexdigest()


def load_workload(text: str, *, defaults: SamplingParams, read_jsonl: ReadJsonl) -> Workload:
    """The workload that ``--workload`` names; a built-in name wins over a file of that name.

    *defaults* are the sampling options as given. Raises ConfigError for a SPEC that cannot
    be used, and whatever *read_jsonl* raises for a file.
    """
    name = text.partition(":")[0]
    shape = parse_shape(text)
    if shape is None:
        return _from_file(text, defaults, read_jsonl)
    if name in FIXED:
        sampling = _fixed_sampling(FIXED[name])
        requests = [
            _request(index, row, replace(sampling, seed=1_000_003 * index + 17))
            for index, row in enumerate(shape.rows())
        ]
    else:
        sampling = replace(defaults, max_tokens=None, stop=(), ignore_eos=True)
        requests = [_request(index, row, sampling) for index, row in enumerate(shape.rows())]
    return Workload(
        name=name,
        spec=name if name in FIXED else shape.spec(),
        seed=shape.seed,
        requests=tuple(requests),
        exact_lengths=True,
        sampling=sampling,
        model=FIXED[name].model if name in FIXED else None,
    )


def fit_to_model(workload: Workload, vocab: int, max_model_len: int) -> Workload:
    """A built-in workload as a model of *vocab* token ids and *max_model_len* can serve it.

    Ids are taken modulo *vocab*; outputs are cut so that prompt and output fit, and a prompt
    that leaves no room for one token is cut to ``max_model_len - 1``. ``different_work`` states
    each cut, and changed ids where the workload is a fixed one (elsewhere no ids are quoted).
    A file's requests are left as they are: the engine judges them.
    """
    if not workload.exact_lengths:
        return workload
    if max_model_len < 2:
        raise ConfigError(
            f"max_model_len {max_model_len} leaves no room for a workload",
            where="option max_model_len",
            rule="a request has at least one prompt token and one output token",
            remedy="give --max-model-len 2 or more",
        )
    fitted = tuple(_fitted(request, vocab, max_model_len) for request in workload.requests)
    found = _cuts(workload.requests, fitted, max_model_len)
    if workload.model is not None and _largest_id(workload) >= vocab:
        found = (f"token ids are taken modulo {vocab}, the model's vocabulary", *found)
    return replace(workload, requests=fitted, different_work=(*workload.different_work, *found))


def _from_file(text: str, defaults: SamplingParams, read_jsonl: ReadJsonl) -> Workload:
    path = Path(text)
    if not path.is_file():
        raise unknown_workload(text)
    requests = tuple(read_jsonl(path, defaults))
    if not requests:
        raise ConfigError(
            f"{text} has no requests",
            where=f"workload {text}",
            rule="a workload has at least one request",
            remedy="name a file with requests",
        )
    return Workload(
        name=path.name,
        spec=text,
        seed=None,
        requests=requests,
        exact_lengths=False,
        sampling=defaults,
    )


def _fixed_sampling(work: FixedWork) -> SamplingParams:
    return SamplingParams(temperature=work.temperature, top_p=work.top_p, ignore_eos=True)


def _request(index: int, row: Row, sampling: SamplingParams) -> Request:
    return Request(
        id=index,
        group=row.group,
        prompt_token_ids=row.prompt_token_ids,
        params=replace(sampling, max_tokens=row.max_tokens),
    )


def _fitted(request: Request, vocab: int, max_model_len: int) -> Request:
    prompt = request.prompt_token_ids[: max_model_len - 1]
    if max(prompt) >= vocab:
        prompt = tuple(token % vocab for token in prompt)
    room = max_model_len - len(prompt)
    wanted = request.params.max_tokens
    assert wanted is not None
    if prompt is request.prompt_token_ids and wanted <= room:
        return request
    params = replace(request.params, max_tokens=min(wanted, room))
    return replace(request, prompt_token_ids=prompt, params=params)


def _largest_id(workload: Workload) -> int:
    return max(max(request.prompt_token_ids) for request in workload.requests)


def _cuts(
    asked: tuple[Request, ...], fitted: tuple[Request, ...], max_model_len: int
) -> tuple[str, ...]:
    pairs = list(zip(asked, fitted, strict=True))
    prompts = sum(len(a.prompt_token_ids) != len(b.prompt_token_ids) for a, b in pairs)
    outputs = sum(a.params.max_tokens != b.params.max_tokens for a, b in pairs)
    found = {
        f"{prompts} prompts are cut to max_model_len {max_model_len} - 1": prompts,
        f"{outputs} outputs are cut to end at max_model_len {max_model_len}": outputs,
    }
    return tuple(text for text, count in found.items() if count)


def _canonical_line(request: Request) -> bytes:
    usual = asdict(SamplingParams())
    line = {
        "id": request.id,
        "group": request.group,
        "cache_salt": request.cache_salt,
        "prompt_token_ids": request.prompt_token_ids,
        **{name: value for name, value in asdict(request.params).items() if value != usual[name]},
    }
    return json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n"
