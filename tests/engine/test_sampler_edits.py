"""What a row is drawn from and what its logprobs are of, with edits, in every basis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine import edit_rows
from pagedctl.engine.edit_rows import EditRows
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request
from pagedctl.engine.sampler import Sampler
from pagedctl.engine.sequence import Sequence
from pagedctl_kernels.ops.logit_edits import torch_reference as logit_edits
from pagedctl_kernels.ops.logprob.torch_reference import TorchLogprob
from tests.engine.harness import Trace, assert_same_bits, run, tiny_engine
from tests.engine.sampler_harness import Result, Steps, asked, check_result
from tests.kernels.conftest import poisoned_memory  # noqa: F401
from tests.kernels.harness import sampling_rows
from tests.kernels.test_logit_edits import Edit, edited_rows
from tests.reference.tiny_models import VOCAB, tiny_model

BASES = ("scaled", "raw", "processed")
STOPS = frozenset({0, 7, 40})
MODEL = tiny_model("qwen3")


def edited_request(number: int, **changes: Any) -> Request:
    """A request with every edit, on tokens that several of them touch; *number* decides."""
    rng = np.random.default_rng(number)
    prompt = tuple(rng.integers(1, VOCAB, 6 + number % 5).tolist())
    ids = rng.permutation(VOCAB)[:60].tolist()
    params: dict[str, Any] = {
        "temperature": [0.0, 0.7, 1.3][number % 3],
        "top_k": [0, 12][number % 2],
        "top_p": [1.0, 0.8, 0.9][number % 3],
        "min_p": [0.0, 0.05][number // 2 % 2],
        "allowed_token_ids": (*ids, *prompt) if number % 2 else (),
        "logit_bias": tuple((token, float(rng.normal(0, 3))) for token in ids[:20]),
        "repetition_penalty": [1.3, 0.7, 2.0][number % 3],
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "min_tokens": number % 6,
        "top_logprobs": [0, 5, 1, VOCAB][number % 4],
    }
    return asked(number, prompt, **{**params, **changes})


def engine_of(
    folder: Path, basis: str = "scaled", *, dtype: torch.dtype = torch.float64, **options: Any
) -> Engine:
    return tiny_engine(MODEL, folder, dtype=dtype, logprob_basis=basis, block_size=4, **options)


def results_of(folder: Path, basis: str, requests: list[Request], **how: Any) -> list[Result]:
    with engine_of(folder, basis) as engine:
        return Steps(engine=engine, stop_token_ids=STOPS, **how).run(requests)


def requests(count: int = 12) -> list[Request]:
    return [edited_request(number) for number in range(count)]


def check_all(folder: Path, basis: str, asked_for: list[Request], **how: Any) -> None:
    for result in results_of(folder, basis, asked_for, **how):
        check_result(result, MODEL, basis, stop_token_ids=STOPS)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("basis", BASES)
def test_every_token_and_logprob_follows_the_edits_of_a_float64_reference(
    tmp_path: Path, basis: str, lag: int
) -> None:
    check_all(tmp_path, basis, requests(), lag=lag, chunk=5)


def test_each_edit_alone_follows_the_reference(tmp_path: Path) -> None:
    """vllm-project/vllm#1577: the prompt counts for repetition, negative logits multiply."""
    alone: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -1.0},
        {"logit_bias": ((5, 8.0), (6, 7.5))},
        {"allowed_token_ids": (3, 17, 44)},
        {"min_tokens": 5},
        {},
    ]
    prompt = (5, 6, 7, 8, 9, 5)
    greedy = [
        asked(number, prompt, temperature=0.0, **params) for number, params in enumerate(alone)
    ]
    check_all(tmp_path, "scaled", greedy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_row(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Ids, logprobs, likeliest tokens and scores, of edited rows and of plain ones."""
    plain = [asked(100 + n, (n + 1, 5, 6), temperature=0.8, top_logprobs=3 * n) for n in range(3)]
    mixed = [*requests(), *plain]
    assert len(requests()) > edit_rows.FIRST_SLOTS
    order = np.random.default_rng(0).permutation(len(mixed)).tolist()
    with engine_of(tmp_path, dtype=dtype) as engine:
        shared = {"engine": engine, "stop_token_ids": STOPS, "score": True}
        packed = Steps(**shared).run(mixed)
        rows = np.random.default_rng(1).permutation(32)[: len(mixed)].tolist()
        moved = Steps(**shared, rows=rows, lag=1, chunk=3).run([mixed[one] for one in order])
        for place, one in enumerate(order):
            assert moved[place].bits() == packed[one].bits()
        for place, request in enumerate(mixed):
            (alone,) = Steps(**shared).run([request])
            assert alone.bits() == packed[place].bits()


def test_a_run_without_edits_has_no_tables_and_never_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    plain = logit_edits.TorchLogitEdits.__call__

    def spy(self: Any, logits: torch.Tensor, edits: Any) -> None:
        calls.append(True)
        plain(self, logits, edits)

    monkeypatch.setattr(logit_edits.TorchLogitEdits, "__call__", spy)
    with engine_of(tmp_path) as engine:
        steps = Steps(engine=engine, stop_token_ids=STOPS)
        steps.run([asked(n, (n + 1, 5), temperature=1.0) for n in range(4)])
        assert (len(calls), engine.parts.runner.edits.num_slots) == (0, 0)
        steps.run([asked(9, (1, 5), min_tokens=3)])
        assert (len(calls), engine.parts.runner.edits.num_slots) == (3, 0)
        steps.run(requests(2))
        assert engine.parts.runner.edits.num_slots == edit_rows.FIRST_SLOTS


def test_slots_are_used_again_and_hold_nothing_of_their_last_owner(tmp_path: Path) -> None:
    """One engine serves many in turn; each has the bits that it has in a new engine."""
    some = requests(9)
    with engine_of(tmp_path / "shared") as engine:
        steps = Steps(engine=engine, stop_token_ids=STOPS)
        for request in (*some, *reversed(some)):
            (used,) = steps.run([request])
            with engine_of(tmp_path / "new") as new:
                (fresh,) = Steps(engine=new, stop_token_ids=STOPS).run([request])
            assert used.bits() == fresh.bits()
        assert engine.parts.runner.edits.num_slots == edit_rows.FIRST_SLOTS


@pytest.mark.parametrize("readmit_at", [2, 4, 7])
def test_an_admission_in_the_middle_counts_what_was_sampled_before(
    tmp_path: Path, readmit_at: int
) -> None:
    some = requests(8)
    through = results_of(tmp_path, "scaled", some)
    for lag in (0, 1):
        again = results_of(tmp_path, "scaled", some, readmit_at=readmit_at, lag=lag)
        assert [one.bits() for one in again] == [one.bits() for one in through]


def test_stop_ids_are_drawn_from_min_tokens_on_and_not_before(tmp_path: Path) -> None:
    """The stop set is made the likeliest by far, so each row draws it as soon as it may."""
    bias = tuple((token, 90.0) for token in (7, 40))
    some = [
        asked(n, (n + 1, 5), min_tokens=n, temperature=[0.0, 1.0][n % 2], logit_bias=bias)
        for n in range(7)
    ]
    for number, result in enumerate(results_of(tmp_path, "scaled", some)):
        assert not set(result.token_ids[:number]) & STOPS
        assert set(result.token_ids[number:]) <= {7, 40}


def test_a_stop_id_that_the_head_has_no_logit_for_is_not_barred(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        steps = Steps(engine=engine, stop_token_ids=frozenset({5, VOCAB, VOCAB + 30}))
        (result,) = steps.run([asked(1, (3, 4), min_tokens=8, logit_bias=((5, 90.0),))])
    assert 5 not in result.token_ids


def test_a_fault_survives_edits_that_would_hide_it(tmp_path: Path) -> None:
    """huggingface/trl#6166: both rows fail, though the broken logit's token is not allowed."""
    poisoned = dict(MODEL.tensors(torch.float32))
    head = poisoned["lm_head.weight"].clone()
    head[11] = 3e38
    poisoned["lm_head.weight"] = head
    some = [edited_request(2, temperature=0.0), edited_request(1, allowed_token_ids=(3, 4, 5))]
    with engine_of(tmp_path, dtype=torch.float32) as probe:
        config = probe.config
    with Engine(config, weights=poisoned) as engine:
        results = Steps(engine=engine, stop_token_ids=STOPS).run(some)
    assert [one.faulty for one in results] == [True, True]


def test_a_row_whose_logprob_would_be_nan_is_faulty(tmp_path: Path) -> None:
    """The draw never sees the removed token, but the logprob is of the row with it."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 1e30
    rows = sampling_rows(2, temperature=[1e-12, 1.0])
    edits = edited_rows({0: Edit(allowed=(4, 5)), 1: Edit(allowed=(4, 5))}, VOCAB, torch.float32)
    with engine_of(tmp_path, dtype=torch.float32) as engine:
        sampled = engine.parts.runner.sampler.sample(logits, rows, edits)
    assert sampled.faulty.tolist() == [True, False]
    assert sampled.logprobs[1].item() == pytest.approx(-1e30)
    assert set(sampled.token_ids.tolist()) <= {0, 4, 5}


# -- the whole engine ------------------------------------------------------------------------

LEGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "lag 1, chunks": {"lag": 1, "chunk_size": 3},
    "few rows, lag 1": {"max_num_seqs": 3, "lag": 1},
    "small pool": {"pool_blocks": 20},
    "small pool, lag 1": {"pool_blocks": 20, "lag": 1},
}


def served(folder: Path, asked_for: list[Request], **options: Any) -> Trace:
    blocks = options.pop("pool_blocks", 1000)
    options["kv_cache_memory_bytes"] = blocks * 4 * 2 * 2 * 2 * 16 * 4
    with engine_of(folder, dtype=torch.float32, **options) as engine:
        return run(engine, asked_for)


@pytest.mark.parametrize("leg", list(LEGS))
def test_edited_requests_have_the_same_bits_however_they_are_scheduled(
    tmp_path: Path, leg: str
) -> None:
    """Counts follow the device at lag 1, and are rebuilt after a preemption."""
    asked_for = [
        edited_request(number, max_tokens=24, ignore_eos=number % 2 == 0) for number in range(10)
    ]
    packed = served(tmp_path / "packed", asked_for, **LEGS[leg])
    assert packed.max_rows > 1
    assert (packed.preemptions > 0) == ("pool_blocks" in LEGS[leg])
    with engine_of(tmp_path / "single", dtype=torch.float32) as engine:
        for request in asked_for:
            single = run(engine, [request]).completions[request.id, 0]
            done = packed.completions[request.id, 0]
            assert_same_bits(done, single)
            assert_same_top(done, single, request.params.top_logprobs)


def assert_same_top(one: Completion, other: Completion, count: int) -> None:
    if count == 0:
        assert one.top_logprobs is None
        return
    assert one.top_logprobs is not None
    assert other.top_logprobs is not None
    assert one.top_logprobs.token_ids.shape == (len(one.token_ids), count)
    assert np.array_equal(one.top_logprobs.token_ids, other.top_logprobs.token_ids)
    assert np.array_equal(one.top_logprobs.logprobs, other.top_logprobs.logprobs)


@pytest.mark.parametrize("lag", [0, 1])
def test_no_sample_ends_before_min_tokens(tmp_path: Path, lag: int) -> None:
    """An end token is the likeliest by far, so each sample ends as soon as it may."""
    asked_for = [
        asked(number, (number + 1, 5), min_tokens=number, ignore_eos=False, stop_token_ids=(7,),
              logit_bias=((0, 90.0), (7, 80.0)))
        for number in range(6)
    ]  # fmt: skip
    trace = served(tmp_path, asked_for, lag=lag)
    for number in range(6):
        ids = trace.completions[number, 0].token_ids.tolist()
        assert len(ids) == number + 1
        assert not {0, 7} & set(ids[:-1])
        assert ids[-1] == 0


def test_min_tokens_bars_no_end_token_that_is_ignored(tmp_path: Path) -> None:
    request = asked(0, (1, 5), min_tokens=4, stop_token_ids=(7,), logit_bias=((0, 90.0), (7, 80.0)))
    done = served(tmp_path, [request]).completions[0, 0]
    assert done.token_ids.tolist() == [0] * 8


# -- mutants ---------------------------------------------------------------------------------


class Site:
    """Counts how often a mutated site was reached."""

    def __init__(self) -> None:
        self.reached = 0


def replaced(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, change: Callable[[Any], Any]
) -> Site:
    """Put ``change(original)`` in the place of ``where.name``, counting its calls."""
    site, broken = Site(), change(getattr(where, name))

    def spy(*arguments: Any, **named: Any) -> Any:
        site.reached += 1
        return broken(*arguments, **named)

    monkeypatch.setattr(where, name, spy)
    return site


def nothing(original: Any) -> Any:
    return lambda *arguments: None


def prompt_forgotten(original: Any) -> Any:
    def write(self: EditRows, slot: int, sequence: Sequence) -> None:
        original(self, slot, sequence)
        self.in_prompt[slot] = False

    return write


def output_forgotten(original: Any) -> Any:
    def write(self: EditRows, slot: int, sequence: Sequence) -> None:
        original(self, slot, sequence)
        self.counts[slot] = 0

    return write


def negative_logits_divided(original: Any) -> Any:
    return lambda z, penalty: z / penalty


def edits_after_truncation(original: Any) -> Any:
    """Top-k and top-p of the plain logits, then the edits."""

    def sample(self: Sampler, logits: Any, rows: Any, edits: Any = None, top: Any = None) -> Any:
        cut = self.plans.sample.run.truncated(logits, rows)
        return original(self, cut, rows, edits, top)

    return sample


def logprob_of_edited(original: Any) -> Any:
    return lambda self, logits, edited, rows: original(self, edited, edited, rows)


def logprob_unedited(original: Any) -> Any:
    return lambda self, logits, edited, rows: original(self, logits, logits, rows)


def barred_one_longer(original: Any) -> Any:
    def sampled(self: EditRows, plan: Any) -> Any:
        for place, position, row in original(self, plan):
            yield place, position - 1, row

    return sampled


def oracle(folder: Path) -> None:
    for basis in BASES:
        check_all(folder, basis, requests(), lag=1)


@pytest.mark.parametrize(
    ("where", "name", "change"),
    [
        (logit_edits, "repeated", negative_logits_divided),
        (EditRows, "_write", prompt_forgotten),
        (EditRows, "count", nothing),
        (EditRows, "_sampled", barred_one_longer),
        (Sampler, "sample", edits_after_truncation),
        (Sampler, "_reported", logprob_of_edited),
        (Sampler, "_reported", logprob_unedited),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)).rpartition(".")[2],
)
def test_a_wrong_edit_is_reached_and_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    change: Callable[[Any], Any],
) -> None:
    """The control is the first test of this file."""
    site = replaced(monkeypatch, where, name, change)
    with pytest.raises(AssertionError):
        oracle(tmp_path)
    assert site.reached > 0


def test_likeliest_tokens_of_unscaled_logits_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two logits with one quotient go by id; by logits alone they would not."""
    below, above = np.float32(1.9), np.nextafter(np.float32(1.9), np.float32(2))
    tried = np.linspace(1.1, 1.8, 50, dtype=np.float32)
    temperature = torch.tensor([next(t for t in tried if below / t == above / t)])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = float(below), float(above)

    def check() -> None:
        with engine_of(tmp_path, dtype=torch.float32) as engine:
            likeliest = engine.parts.plans.logprob.run.likeliest
            assert likeliest(logits, temperature, 2).tolist() == [[3, 4]]

    check()

    def unscaled(original: Any) -> Any:
        return lambda self, logits, temperature, count: original(
            self, logits, torch.ones_like(temperature), count
        )

    site = replaced(monkeypatch, TorchLogprob, "likeliest", unscaled)
    with pytest.raises(AssertionError):
        check()
    assert site.reached == 1


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        ("_clear", nothing, test_slots_are_used_again_and_hold_nothing_of_their_last_owner),
        (
            "_write",
            output_forgotten,
            lambda folder: test_an_admission_in_the_middle_counts_what_was_sampled_before(
                folder, 4
            ),
        ),
    ],
)
def test_a_slot_written_wrongly_is_reached_and_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Any], Any],
    check: Callable[[Path], None],
) -> None:
    site = replaced(monkeypatch, EditRows, name, change)
    with pytest.raises(AssertionError):
        check(tmp_path)
    assert site.reached > 0
