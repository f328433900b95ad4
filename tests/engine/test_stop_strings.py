"""Stop texts through the whole engine: what ends a sample, its text, its ids and logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams
from pagedctl.errors import RequestError
from tests.engine.harness import assert_prefix_bits, assert_same_bits, drain, run, tiny_engine
from tests.reference.tiny_models import VOCAB, tiny_model

PROMPT = tuple(range(7, 16))
MODEL = tiny_model("qwen3", eos_token_id=98)
NEW = MODEL.reference().greedy(list(PROMPT), 16)[0]
"""What the model says greedily; no token of the first ones comes twice."""

PLACE = 4
LEGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lag 1": {"lag": 1},
    "preempted every step": {"debug_force_preemption_interval": 1, "chunk_size": 3},
    "preempted, lag 1": {"debug_force_preemption_interval": 2, "lag": 1, "pool_blocks": 30},
}
legs = pytest.mark.parametrize("leg", LEGS)


def pieces(*texts: str, at: int = PLACE) -> list[str]:
    """The texts of all ids; those that are sampled from place *at* on are *texts*."""
    assert len(set(NEW[: at + len(texts)])) == at + len(texts)
    found = [f"<{place}>" for place in range(VOCAB)]
    for place, text in enumerate(texts, start=at):
        found[NEW[place]] = text
    return found


def text_of(vocabulary: list[str], ids: list[int]) -> str:
    return "".join(vocabulary[token] for token in ids)


def build(folder: Path, vocabulary: list[str] | None, **options: Any) -> Engine:
    chosen = {"dtype": torch.float32, "block_size": 4, "pieces": vocabulary, **options}
    return tiny_engine(MODEL, folder, **chosen)


def asked(name: int | str = 0, **params: Any) -> Request:
    chosen = {"temperature": 0.0, "max_tokens": 12, **params}
    return Request(id=name, prompt_token_ids=PROMPT, params=SamplingParams(**chosen))


def ended(engine: Engine, **params: Any) -> Completion:
    """The one completion, checked against the same request without any stop."""
    done = run(engine, [asked(**params)]).completions[0, 0]
    free = engine.generate([asked(max_tokens=16, ignore_eos=True)])[0]
    assert_prefix_bits(done, free)
    return done


@legs
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_text_over_two_tokens_ends_the_sample_and_no_part_of_it_leaks(
    tmp_path: Path, leg: str, include_stop: bool
) -> None:
    """vllm-project/vllm#3672, #3574, #3572, #2577, #3026: stop "END", tokens "E" and "ND!"."""
    vocabulary = pieces("E", "ND!")
    with build(tmp_path, vocabulary, **LEGS[leg]) as engine:
        done = ended(engine, stop=("END",), include_stop=include_stop)
        assert engine.stats().preemptions > 0 or "preempted" not in leg
    before = text_of(vocabulary, NEW[:PLACE])
    assert done.text == (before + "END" if include_stop else before)
    assert done.token_ids.tolist() == NEW[: PLACE + 2]
    assert (done.finish_reason, done.stop_reason) == ("stop", "END")


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ("END", "END"),
        (["END"], "END"),
        (["unknown", "END"], "END"),
        (["END!", "END"], "END"),
        (["ND", "END"], "END"),
        (["unknown", "D"], "D"),
    ],
)
def test_each_stop_text_counts_and_the_reason_names_the_one_that_was_met(
    tmp_path: Path, stop: Any, reason: str
) -> None:
    """ModelTC/LightLLM#1456: a bare text, several texts, one of them not in the output."""
    vocabulary = pieces("aE", "ND!")
    with build(tmp_path, vocabulary) as engine:
        done = ended(engine, stop=stop)
    assert done.stop_reason == reason
    text = text_of(vocabulary, NEW[: PLACE + 2])
    assert done.text == text[: text.index(reason)]


def test_an_empty_stop_text_is_refused_and_the_others_are_served(tmp_path: Path) -> None:
    """ModelTC/LightLLM#1456: [""] and ["", "END"] by name; they neither match nor vanish."""
    with build(tmp_path, pieces("E", "ND!")) as engine:
        for stop in ("", [""], ["", "END"]):
            with pytest.raises(RequestError) as caught:
                engine.submit(asked("bad", stop=stop))
            assert caught.value.where == 'request "bad", field stop'
        assert ended(engine, stop=["END"]).stop_reason == "END"


def test_stop_texts_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with build(tmp_path, None) as engine:
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            engine.submit(asked(stop=("END",)))
        assert ended(engine).text is None


@legs
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_is_in_ids_and_logprobs_and_not_in_the_text(
    tmp_path: Path, leg: str, include_stop: bool
) -> None:
    """vllm-project/vllm#55483: stop_token_ids reached as token 3 of 10; unless asked for."""
    vocabulary = pieces("a", "b", "STOP", at=0)
    with build(tmp_path, vocabulary, **LEGS[leg]) as engine:
        done = ended(engine, stop_token_ids=(NEW[2],), max_tokens=10, include_stop=include_stop)
    assert done.text == ("abSTOP" if include_stop else "ab")
    assert done.token_ids.tolist() == NEW[:3]
    assert (done.finish_reason, done.stop_reason) == ("stop", NEW[2])


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("how", ["eos", "stop text", "stop token", "length", "cancel"])
def test_every_token_has_its_logprob_however_the_eighth_ends_it(
    tmp_path: Path, how: str, lag: int
) -> None:
    """vllm-project/vime#70, mlx-node/mlx-node#36: equal lengths; NovaSky-AI/SkyRL#2148: its own
    logprob, nothing synthetic appended."""
    count = 8
    assert NEW[count - 1] not in NEW[: count - 1]
    params: dict[str, Any] = {
        "stop text": {"stop": ("END",)},
        "stop token": {"stop_token_ids": (NEW[count - 1],), "ignore_eos": True},
        "length": {"max_tokens": count},
    }.get(how, {})
    model = tiny_model("qwen3", eos_token_id=[98, NEW[count - 1]] if how == "eos" else 98)
    options: dict[str, Any] = {"dtype": torch.float32, "lag": lag}
    with tiny_engine(model, tmp_path, pieces=pieces("END", at=count - 1), **options) as engine:
        engine.submit(asked(**params))
        found = []
        while not found:
            if engine.stats().output_tokens == count and how == "cancel":
                engine.cancel(0)
            found = engine.step()
        drain(engine)
        (free,) = engine.generate([asked(max_tokens=16, ignore_eos=True)])
    (done,) = found
    assert len(done.logprobs) == len(done.token_ids) == count
    assert_prefix_bits(done, free)
    assert (done.logprobs < 0).all()
    expected = {
        "eos": ("stop", NEW[count - 1]),
        "stop token": ("stop", NEW[count - 1]),
        "stop text": ("stop", "END"),
        "length": ("length", None),
        "cancel": ("abort", None),
    }
    assert (done.finish_reason, done.stop_reason) == expected[how]


@legs
def test_a_stop_text_counts_from_min_tokens_on(tmp_path: Path, leg: str) -> None:
    vocabulary = pieces("ax", "bx", "cx", "dx", at=1)
    with build(tmp_path, vocabulary, **LEGS[leg]) as engine:
        counts = {
            least: len(ended(engine, stop=("x",), min_tokens=least).token_ids) for least in range(6)
        }
    # Tokens 2 to 5 hold an x: the first of them that comes after min_tokens ends it.
    assert counts == {0: 2, 1: 2, 2: 3, 3: 4, 4: 5, 5: 12}


@legs
def test_samples_look_for_stop_texts_each_in_its_own_text(tmp_path: Path, leg: str) -> None:
    """Seeded samples of one request, packed with others; beside each by itself."""
    vocabulary = [chr(ord("a") + place % 26) * (1 + place // 26) for place in range(VOCAB)]
    requests = [
        asked(n, temperature=1.0, seed=n, n=3, stop=("ab", "q", "zz"), max_tokens=20)
        for n in range(4)
    ]
    with build(tmp_path / "alone", vocabulary, max_num_seqs=1) as engine:
        alone = {(one.id, one.sample): one for one in engine.generate(requests)}
    with build(tmp_path / "packed", vocabulary, **LEGS[leg]) as engine:
        packed = run(engine, requests)
    assert packed.max_rows > 1
    reasons = set()
    for key, done in packed.completions.items():
        assert_same_bits(done, alone[key])
        reasons.add(done.stop_reason)
        text = text_of(vocabulary, done.token_ids.tolist())
        hits = [text.find(stop) for stop in ("ab", "q", "zz") if stop in text]
        assert (done.finish_reason == "stop") == bool(hits) or done.stop_reason == 98
        if isinstance(done.stop_reason, str):
            assert done.text == text[: text.index(done.stop_reason)]
    assert len(reasons - {None}) >= 2


def test_a_text_without_a_match_is_whole(tmp_path: Path) -> None:
    """The start of a stop text at the end of the output is text."""
    vocabulary = pieces("E", "N", at=10)
    with build(tmp_path, vocabulary) as engine:
        done = ended(engine, stop=("END",))
        plain = ended(engine)
    assert done.finish_reason == "length"
    assert done.text == plain.text == text_of(vocabulary, NEW[:12])
    assert done.text.endswith("EN")
