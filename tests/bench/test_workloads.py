"""The fixed workloads are the published ones, draw by draw; others are stable and fit a model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from pagedctl.bench.shapes import FIXED, SHAPES
from pagedctl.bench.workloads import Workload, fit_to_model, load_workload
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import ConfigError
from tests.house.test_imports import loaded_after


def no_file(path: Path, defaults: SamplingParams) -> NoReturn:
    raise AssertionError(f"{path} was read")


def load(text: str, **sampling: object) -> Workload:
    defaults = SamplingParams(**sampling)  # type: ignore[arg-type]
    return load_workload(text, defaults=defaults, read_jsonl=no_file)


def published_line(request: Request) -> str:
    """A request as the published generator prints it."""
    return json.dumps(
        {
            "id": request.id,
            "group": request.group,
            "prompt_ids": list(request.prompt_token_ids),
            "max_tokens": request.params.max_tokens,
            "seed": request.params.seed,
        }
    )


# name: requests, prompt tokens, distinct prompt tokens, output tokens, p50, longest, first ids,
# sha256 of the published generator's lines, sha256 of our own
PINNED = {
    "decode1": (
        (1, 128, 128, 256, 256, 256),
        (62380, 142666, 34189, 96981, 124270, 17177),
        "86f0f12706339bbbaa2d98079c3f38b82e69037f55f77f335c0eed4d67555597",
        "d6bae8f52718fe02200bb2add447083304117ba28980f643e7b9a916f1f257a8",
    ),
    "decode64": (
        (64, 8192, 8192, 32768, 512, 512),
        (62380, 142666, 34189, 96981, 124270, 17177),
        "4dc3588a137e541746c2b859aa7939baf15c793f0616bc0f46c39a1958e63a03",
        "11bbe1fffad42949fac2b94f03abccc6956fca1d07d0830818d1e464e482e076",
    ),
    "rollout4k": (
        (64, 18068, 4517, 90954, 1028, 4096),
        (149213, 16543, 66864, 30911, 129875, 117831),
        "cf1593b389caeb486438d64e0063d981ceb06b93153b3724b1486383b348b76e",
        "222cd71a7c366173cec07ab726bfd90ed1cb98a0315d34412c14833dc804c0a4",
    ),
    "grpo": (
        (512, 524288, 32768, 356144, 585, 2048),
        (14824, 24008, 22248, 94649, 44324, 80776),
        "1a28d8c1bf4fc6a6ce3f236ddc379c076f1653c9b48d23e4ec31688ab09f9880",
        "27753e8831d7bf1ce6490e867daf1e15043215d13f07fcf52375208b0d551f2d",
    ),
    "prefill2k": (
        (32, 65536, 65536, 32, 1, 1),
        (61878, 79507, 27044, 103824, 125535, 40625),
        "8cf868d20b45e3bca878e55ef2e152fa1060e294bd70a787d07fe8f63da4b696",
        "de0a3fb254bb33c7b95ed70df70d19e402fe4de86d9823d32bc6742a22d28429",
    ),
    "nano": (
        (256, 142827, 142827, 133966, 499, 1024),
        (6311, 6890, 663, 4242, 8376, 7961),
        "d580ba97d862ff0af998dbae30c43aa9a01ff75858f5759aa3ef62b0ae39e4b4",
        "61e2d6d3eb67cd1dd08dd50f6d87632f7fb9540dab03ac564f82620acabefb33",
    ),
}


def test_every_fixed_workload_is_pinned() -> None:
    assert set(PINNED) == set(FIXED)


@pytest.mark.parametrize("name", PINNED)
def test_a_fixed_workload_is_the_published_one(name: str) -> None:
    statistics, first_ids, published_sha256, own_sha256 = PINNED[name]
    work = load(name)
    lengths = sorted(one.params.max_tokens or 0 for one in work.requests)
    distinct = {one.group: len(one.prompt_token_ids) for one in work.requests}
    assert statistics == (
        len(work.requests),
        work.prompt_tokens,
        sum(distinct.values()),
        work.output_tokens,
        lengths[len(lengths) // 2],
        lengths[-1],
    )
    assert work.requests[0].prompt_token_ids[:6] == first_ids
    lines = "".join(published_line(one) + "\n" for one in work.requests)
    assert hashlib.sha256(lines.encode()).hexdigest() == published_sha256
    assert work.sha256() == own_sha256


@pytest.mark.parametrize(
    ("name", "temperature", "top_p", "model"),
    [
        ("decode1", 0.0, 1.0, "qwen3-8b"),
        ("decode64", 0.0, 1.0, "qwen3-8b"),
        ("rollout4k", 1.0, 0.95, "qwen3-8b"),
        ("grpo", 1.0, 1.0, "qwen3-8b"),
        ("prefill2k", 0.0, 1.0, "qwen3-8b"),
        ("nano", 0.6, 1.0, "qwen3-0.6b"),
    ],
)
def test_a_fixed_workload_brings_its_sampling(
    name: str, temperature: float, top_p: float, model: str
) -> None:
    work = load(name, temperature=0.3, top_k=5, n=4, max_tokens=3)
    assert (work.spec, work.model, work.exact_lengths) == (name, model, True)
    assert work.sampling == SamplingParams(temperature=temperature, top_p=top_p, ignore_eos=True)
    for index, one in enumerate(work.requests):
        own = replace(one.params, max_tokens=None, seed=None)
        assert own == work.sampling
        assert one.params.seed == 1_000_003 * index + 17
    assert "temperature" in work.decides


@pytest.mark.parametrize(
    ("text", "spec", "sha256", "tokens"),
    [
        (
            "uniform",
            "uniform:requests=64,prompt=32..128,output=32..128,seed=0",
            "80df5dd111dc6d25bab00fc1295734f006a9d8b8afcb9176bdea4dd33632c4af",
            (4603, 4957),
        ),
        (
            "groups",
            "groups:prompts=16,n=4,prompt=32..128,median=64,sigma=0.8,min=8,max=512,seed=0",
            "59d3946ff646b014c65328be96fe120cbae06f296db1366b3b54b9b56a45a199",
            (5708, 5156),
        ),
        (
            "decode",
            "decode:requests=64,prompt=128,output=128,seed=0",
            "17955b8825faaf6597afe1847c979221d5a1e0d6f03149ad26622be58eafa877",
            (8192, 8192),
        ),
        (
            "uniform:prompt=7,seed=3",
            "uniform:requests=64,prompt=7,output=32..128,seed=3",
            "9cc80d629856303e2001d76b4ef910d1f82250bb8e133eb8c46771ae2d355af9",
            (448, 4808),
        ),
    ],
)
def test_a_workload_with_parameters_is_stable_and_spells_them_out(
    text: str, spec: str, sha256: str, tokens: tuple[int, int]
) -> None:
    work = load(text)
    assert (work.spec, work.sha256()) == (spec, sha256)
    assert (work.prompt_tokens, work.output_tokens) == tokens
    assert load(work.spec) == work


def test_parameters_take_the_sampling_that_was_given_and_keep_exact_lengths() -> None:
    work = load(
        "decode:requests=2,prompt=3,output=4,seed=5",
        n=2,
        temperature=0.5,
        max_tokens=9,
        stop=("x",),
    )
    assert work.seed == 5
    assert work.num_samples == 4
    assert work.output_tokens == 16
    for one in work.requests:
        assert one.params == SamplingParams(n=2, temperature=0.5, max_tokens=4, ignore_eos=True)
    assert work.decides == ("max_tokens", "stop", "ignore_eos")


def test_groups_share_prompt_and_group_and_their_lengths_are_clipped() -> None:
    work = load("groups:prompts=3,n=5,prompt=4..9,median=20,sigma=2,min=10,max=30")
    assert len(work.requests) == 15
    assert [one.id for one in work.requests] == list(range(15))
    for start in range(0, 15, 5):
        group = work.requests[start : start + 5]
        assert len({one.prompt_token_ids for one in group}) == 1
        assert {one.group for one in group} == {start // 5}
    lengths = [one.params.max_tokens for one in work.requests]
    assert min(lengths) == 10  # type: ignore[type-var]
    assert max(lengths) == 30  # type: ignore[type-var]


def test_fixed_shapes_can_be_given_as_parameters() -> None:
    fixed, spelled = load("decode64"), load(FIXED["decode64"].shape.spec())
    assert [one.prompt_token_ids for one in fixed.requests] == [
        one.prompt_token_ids for one in spelled.requests
    ]
    assert spelled.spec == "decode:requests=64,prompt=128,output=512,seed=3"


def test_a_workload_that_fits_is_left_as_it_is() -> None:
    work = load("decode64")
    assert fit_to_model(work, 151_936, 640) == work
    assert fit_to_model(work, 200_000, 40_960).different_work == ()


def test_a_smaller_vocabulary_takes_ids_modulo_its_size() -> None:
    work = fit_to_model(load("decode1"), 512, 2048)
    assert work.requests[0].prompt_token_ids[:3] == (62380 % 512, 142666 % 512, 34189 % 512)
    assert work.different_work == ("token ids are taken modulo 512, the model's vocabulary",)
    assert work.sha256() != load("decode1").sha256()


def test_ids_that_nobody_quotes_are_fitted_without_a_mark() -> None:
    work = fit_to_model(load("uniform"), 512, 2048)
    assert max(max(one.prompt_token_ids) for one in work.requests) < 512
    assert work.different_work == ()


@pytest.mark.parametrize(("name", "max_model_len"), [("rollout4k", 2048), ("uniform", 200)])
def test_outputs_are_cut_to_the_model(name: str, max_model_len: int) -> None:
    before = load(name)
    work = fit_to_model(before, 151_936, max_model_len)
    cut = 0
    for old, new in zip(before.requests, work.requests, strict=True):
        wanted = old.params.max_tokens
        assert wanted is not None
        room = max_model_len - len(old.prompt_token_ids)
        cut += wanted > room
        assert new == replace(old, params=replace(old.params, max_tokens=min(wanted, room)))
    assert 0 < cut < len(work.requests)
    assert work.different_work == (
        f"{cut} outputs are cut to end at max_model_len {max_model_len}",
    )


def test_prompts_that_leave_no_room_are_cut_by_what_they_must() -> None:
    work = fit_to_model(load("prefill2k"), 151_936, 2048)
    assert {len(one.prompt_token_ids) for one in work.requests} == {2047}
    assert {one.params.max_tokens for one in work.requests} == {1}
    assert work.different_work == ("32 prompts are cut to max_model_len 2048 - 1",)


def test_a_model_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no room"):
        fit_to_model(load("decode1"), 512, 1)


def test_a_file_is_read_with_the_defaults_and_left_to_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text("one line\n")
    request = Request(id="a", prompt_token_ids=(600_000,))

    def read(found: Path, defaults: SamplingParams) -> list[Request]:
        assert found == path
        assert defaults == SamplingParams(temperature=0.5)
        return [request]

    work = load_workload(str(path), defaults=SamplingParams(temperature=0.5), read_jsonl=read)
    assert work.requests == (request,)
    assert (work.name, work.spec, work.seed, work.model) == ("work.jsonl", str(path), None, None)
    assert (work.exact_lengths, work.decides) == (False, ())
    assert fit_to_model(work, 512, 8) is work


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(ConfigError, match="has no requests"):
        load_workload(str(path), defaults=SamplingParams(), read_jsonl=lambda path, defaults: [])


def test_the_digest_is_over_the_work_and_not_over_metadata() -> None:
    work = load("decode:requests=2,prompt=3,output=4")
    digest = work.sha256()

    def changed(**fields: object) -> str:
        first = replace(work.requests[0], **fields)  # type: ignore[arg-type]
        return replace(work, requests=(first, *work.requests[1:])).sha256()

    assert changed(metadata={"answer": 3}) == digest
    longer = replace(work.requests[0].params, max_tokens=5)
    others = [changed(id=9), changed(cache_salt="s"), changed(prompt_token_ids=(1, 2))]
    assert len({digest, changed(params=longer), *others}) == 5


def test_the_shapes_load_nothing_heavy() -> None:
    statement = "import pagedctl.bench.workloads, pagedctl.bench.jsonl_workload"
    assert loaded_after(statement) == set()
    assert set(SHAPES) == {"uniform", "groups", "decode"}
