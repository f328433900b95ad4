"""The engine's surface: the embedded model, several samples a step, capacity, manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.completions import sequences_of
from pagedctl.engine.engine import Engine
from pagedctl.engine.engine_checks import sampling_context
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.scheduler import key_of
from pagedctl.engine.step_plan import ScheduledRow, StepPlan
from pagedctl.errors import CapacityError, ConfigError, ModelError, NumericsRefused, RequestError
from pagedctl.models.locate import EMBEDDED_FOLDER
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import BATCH_INVARIANT
from pagedctl_kernels.plan import LeafUnfit
from tests.engine.harness import run, tiny_engine
from tests.reference.tiny_models import tiny_model

PROMPT = tuple(range(3, 17))


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_greedy_ids_of_the_embedded_model_equal_transformers(numerics: str) -> None:
    transformers = pytest.importorskip("transformers")
    from pagedctl.rollout.word_problems import generate

    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER)
    prompts = [tokenizer(one.prompt).input_ids for one in generate(5, 6, "heldout")]
    prompts += [tokenizer(one.prompt).input_ids for one in generate(5, 6, "hard")]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with Engine(EngineConfig(model="embedded", numerics=numerics)) as engine:
        done = engine.generate(
            Request(id=number, prompt_token_ids=tuple(ids), params=params)
            for number, ids in enumerate(prompts)
        )
    for ids, one in zip(prompts, done, strict=True):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                do_sample=False,
                max_new_tokens=64,
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert one.token_ids.tolist() == out.sequences[0, len(ids) :].tolist()
        rows = torch.cat(out.logits).double().log_softmax(-1)
        expected = rows.gather(1, torch.from_numpy(one.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(one.logprobs, expected.numpy(), rtol=0, atol=1e-5)


def test_several_positions_of_one_request_are_sampled_in_one_step(tmp_path: Path) -> None:
    """Each equals the token that a prompt cut there would sample: the seam for speculation."""
    model = tiny_model("qwen3")
    params = SamplingParams(seed=11, max_tokens=1, ignore_eos=True)
    with tiny_engine(model, tmp_path / "cut", dtype=torch.float32) as engine:
        cut = {
            length: engine.generate(
                [Request(id=length, prompt_token_ids=PROMPT[:length], params=params)]
            )[0]
            for length in (9, 12, 14)
        }
    with tiny_engine(model, tmp_path / "whole", dtype=torch.float32) as engine:
        request = Request(id="whole", prompt_token_ids=PROMPT, params=params)
        (sequence,) = sequences_of(request, sampling_context(engine.parts, 0))
        row = ScheduledRow(
            request_id="whole",
            sample=0,
            row=0,
            start=0,
            num_tokens=len(PROMPT),
            sample_offsets=(8, 11, 13),
            new_blocks=(0, 1),
            admitted=True,
        )
        runner = engine.parts.runner
        launched = runner.launch(StepPlan(step=1, rows=(row,)), {key_of(sequence): sequence})
        tokens = launched.wait()
        assert tokens.token_ids == [int(cut[length].token_ids[0]) for length in (9, 12, 14)]
        logprobs = np.array(tokens.logprobs, dtype=np.float32)
        assert logprobs.tolist() == [float(cut[length].logprobs[0]) for length in (9, 12, 14)]
        assert int(runner.rows.last_token[0]) == tokens.token_ids[-1]


def test_the_pool_is_whole_blocks_of_the_bytes_given(tmp_path: Path) -> None:
    token_bytes = 2 * 2 * 2 * 16 * 4
    with tiny_engine(
        tiny_model("llama"),
        tmp_path,
        dtype=torch.float32,
        kv_cache_memory_bytes=100 * 16 * token_bytes + 7,
    ) as engine:
        capacity = engine.capacity()
    assert (capacity.kv_blocks, capacity.kv_tokens) == (100, 1600)
    assert capacity.terms["kv"] == 101 * 16 * token_bytes  # the null block is on top
    assert capacity.max_concurrency_at_cap == 1600 / 512


def test_an_explicit_length_that_cannot_fit_is_refused_at_construction(tmp_path: Path) -> None:
    options = {"max_model_len": 400, "kv_cache_memory_bytes": 16 * 4 * 2 * 2 * 2 * 16 * 4}
    with pytest.raises(CapacityError, match="max_model_len 400 needs"):
        tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"device": "cuda"},
        {"topology_invariant": True},
        {"gpu_memory_utilization": 0.5},
        {"kv_dtype": "float16"},
        {"tp_layout": "column"},
        {"reduce_dtype": "float32"},
        {"swap_memory_bytes": 1024},
        {"redundant_experts": 1},
        {"expert_parallel": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_what_this_version_lacks_is_refused_and_never_ignored(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32, **options)
    assert next(iter(options)) in caught.value.where


def test_given_weights_must_be_exactly_the_models(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = EngineConfig(model=model.write_config(tmp_path), dtype="float32")
    tensors = model.tensors(torch.float32)
    broken = {
        "model.norm.weight is missing": {
            name: one for name, one in tensors.items() if name != "model.norm.weight"
        },
        "model.extra.weight is float32 [1]": {**tensors, "model.extra.weight": torch.zeros(1)},
        "model.norm.weight is float32 [3]": {**tensors, "model.norm.weight": torch.zeros(3)},
        "model.norm.weight is float16 [48]": {
            **tensors,
            "model.norm.weight": torch.zeros(48, dtype=torch.float16),
        },
    }
    for told, weights in broken.items():
        with pytest.raises(ModelError) as caught:
            Engine(config, weights=weights)
        assert [one.what for one in caught.value.faults] == [told]


def test_random_weights_need_no_files_and_repeat(tmp_path: Path) -> None:
    path = tiny_model("qwen3").write_config(tmp_path)
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(seed=1, max_tokens=4))
    runs = []
    for seed in (3, 3, 4):
        config = EngineConfig(model=path, random_weights=seed, kv_cache_memory_bytes=1 << 20)
        with Engine(config) as engine:
            runs.append(engine.generate([request])[0].logprobs.tolist())
    assert runs[0] == runs[1] != runs[2]


def test_the_manifest_holds_contract_leaves_and_arithmetic(tmp_path: Path) -> None:
    with tiny_engine(tiny_model("qwen3"), tmp_path, dtype=torch.float32) as engine:
        engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(n=2))])
        manifest = engine.manifest()
    assert manifest.numerics is not None
    assert manifest.numerics.arithmetic_id == engine.parts.plans.arithmetic_id
    assert manifest.numerics.leaves == engine.parts.plans.leaves()
    features = {leaf.name: leaf.features for leaf in house_registry().leaves()}
    assert BATCH_INVARIANT in features[manifest.numerics.leaves["gemm o_proj 64x48"]]
    assert manifest.config_origin["max_model_len"] == "derived: model positions"
    assert manifest.metrics["output_tokens"] == engine.stats().output_tokens > 0
    json.dumps(manifest.to_json_object())


def test_the_arithmetic_id_names_switches_and_not_the_batch(tmp_path: Path) -> None:
    def identity(name: str, **options: Any) -> str:
        return bound_leaves(tmp_path / name, **options)[0]

    plain = identity("plain")
    assert identity("batch", max_num_seqs=3, chunk_size=5, block_size=4, lag=1) == plain
    for name, options in {
        "norm": {"norm_cast": "after"},
        "order": {"logprob_order": "blockwise-direct-33"},
        "temperature": {"temperature_form": "multiply"},
    }.items():
        assert identity(name, **options) != plain


def bound_leaves(
    folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[str, dict[str, str]]:
    """The arithmetic_id of a tiny engine, and its leaves."""
    with tiny_engine(tiny_model("qwen3"), folder, dtype=dtype, **options) as engine:
        plans = engine.parts.plans
        return plans.arithmetic_id, plans.leaves()


def test_a_contract_changes_the_arithmetic_id_only_with_the_leaves_that_it_binds(
    tmp_path: Path,
) -> None:
    """Where the quickest leaves keep a row's bits, ``fast`` has the contract's arithmetic."""
    for dtype in (torch.float32, torch.float64):
        fast, invariant = (
            bound_leaves(tmp_path / f"{name} {dtype}", dtype=dtype, numerics=name)
            for name in ("fast", "invariant")
        )
        assert (fast[0] == invariant[0]) == (fast[1] == invariant[1])
    assert fast[1]["gemm o_proj 64x48"] == "torch.gemm_library"
    assert invariant[1]["gemm o_proj 64x48"] != "torch.gemm_library"
    assert fast[0] != invariant[0]


def test_all_that_this_version_lacks_is_refused_together(tmp_path: Path) -> None:
    config = EngineConfig(model=tiny_model("llama").write_config(tmp_path), tp=2, tp_layout="row")
    with pytest.raises(ConfigError) as caught:
        Engine(config)
    assert [fault.what.split()[0] for fault in caught.value.faults] == ["tp", "tp_layout"]


def test_prefix_sharing_is_on_unless_it_is_switched_off(tmp_path: Path) -> None:
    """vllm-project/vllm#3251 and others: on by default, hence in every other test too."""
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=2))
    hits = {}
    for name, options in {"default": {}, "off": {"prefix_cache": False}}.items():
        with tiny_engine(
            tiny_model("llama"), tmp_path / name, dtype=torch.float32, block_size=4, **options
        ) as engine:
            hits[name] = [engine.generate([request])[0].cached_tokens for _ in range(2)]
            assert engine.config.origins["prefix_cache"] == ("argument" if options else "default")
            assert engine.reset_prefix_cache() == (0 if options else 3)
    assert hits == {"default": [0, 12], "off": [0, 0]}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"logprob_order": "blockwise-64"}, "block width 64 leaves 35 columns"),
        ({"logprob_order": "blockwise-64", "padded_vocab_size": 150}, "leaves 22 columns"),
        ({"padded_vocab_size": 64}, "padded_vocab_size 64 is below the vocabulary"),
    ],
)
def test_a_block_width_that_does_not_divide_the_vocabulary_is_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(NumericsRefused, match=problem):
        tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"logprob_order": "blockwise"},
        {"logprob_order": "blockwise-33"},
        {"logprob_order": "blockwise-64", "padded_vocab_size": 128},
    ],
)
def test_a_block_width_that_divides_it_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    with tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32, **options) as engine:
        assert engine.config.contract["logprob_order"] == options["logprob_order"]


@pytest.mark.parametrize("narrowed", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_callers_autocast_moves_no_bit(
    tmp_path: Path, dtype: torch.dtype, narrowed: torch.dtype
) -> None:
    """A training loop samples from inside its autocast; an engine may be built there, too."""
    model = tiny_model("llama")
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=6, seed=3))

    def bits(engine: Engine) -> tuple[str, bytes, bytes]:
        (completion,) = engine.generate([request])
        (scores,) = engine.score([[*PROMPT, 3]])
        return engine.parts.plans.arithmetic_id, *(
            one.logprobs.tobytes() for one in (completion, scores)
        )

    with tiny_engine(model, tmp_path / "a", dtype=dtype) as engine:
        alone = bits(engine)
        with torch.autocast("cpu", dtype=narrowed):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == narrowed
            assert bits(engine) == alone
            with tiny_engine(model, tmp_path / "b", dtype=dtype) as inside:
                assert bits(inside) == alone


def test_subnormals_that_are_flushed_later_are_refused_at_the_next_step(tmp_path: Path) -> None:
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=3))
    with tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32) as engine:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU flushes no subnormals")
        try:
            with pytest.raises(NumericsRefused, match="float32 subnormals are flushed to zero"):
                engine.generate([request])
        finally:
            torch.set_flush_denormal(False)


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has no setting of oneDNN"
)
def test_onednns_own_precision_is_refused_at_the_next_step(tmp_path: Path) -> None:
    """Torch's general answer raises then; the refusal is of the setting all the same."""
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=3))
    before = torch.backends.mkldnn.matmul.fp32_precision
    with tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32) as engine:
        try:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            with pytest.raises(NumericsRefused, match=r"mkldnn.matmul.fp32_precision is .bf16"):
                engine.generate([request])
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = before


def test_settings_that_void_the_contract_are_refused_before_and_during_a_run(
    tmp_path: Path,
) -> None:
    """The precision of float32 products belongs to the process; it may not drift unseen."""
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=3))
    model = tiny_model("llama")
    with tiny_engine(model, tmp_path / "a", dtype=torch.float32) as engine:
        try:
            torch.set_float32_matmul_precision("medium")
            with pytest.raises(NumericsRefused, match=r"float32_matmul_precision\(\) is .medium"):
                engine.generate([request])
            with pytest.raises(NumericsRefused):
                tiny_engine(model, tmp_path / "b", dtype=torch.float32)
        finally:
            torch.set_float32_matmul_precision("highest")
    threads = torch.get_num_threads()
    with tiny_engine(model, tmp_path / "c", dtype=torch.float32) as engine:
        try:
            torch.set_num_threads(threads + 1)
            with pytest.raises(NumericsRefused, match="threads"):
                engine.generate([request])
        finally:
            torch.set_num_threads(threads)


def test_one_unfit_width_moves_every_projection_to_the_next_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused and separate projections must not end up with different orders."""
    from pagedctl_kernels import plan

    def gemm_leaves(folder: str) -> set[str]:
        with tiny_engine(tiny_model("llama"), tmp_path / folder, dtype=torch.float32) as engine:
            leaves = engine.parts.plans.leaves()
        return {leaf for site, leaf in leaves.items() if site.startswith("gemm ")}

    (first,) = gemm_leaves("control")
    plain, reached = plan.bind, []

    def unfit_at_o_proj(selection: Any, machine: Any) -> Any:
        if selection.leaf.name == first and selection.site.name == "o_proj":
            reached.append(first)
            raise LeafUnfit("planted")
        return plain(selection, machine)

    monkeypatch.setattr(plan, "bind", unfit_at_o_proj)
    (second,) = gemm_leaves("mutant")
    assert reached
    ranked = sorted(
        (leaf.priority, leaf.name)
        for leaf in house_registry().leaves()
        if leaf.op == "gemm" and BATCH_INVARIANT in leaf.features
    )
    names = [name for _, name in ranked]
    assert names.index(second) < names.index(first)


def test_the_manifest_warns_of_positions_beyond_the_models(tmp_path: Path) -> None:
    codes = {}
    for name, options in {"plain": {}, "far": {"max_model_len": 600}}.items():
        with tiny_engine(
            tiny_model("llama"), tmp_path / name, dtype=torch.float32, **options
        ) as engine:
            codes[name] = {one.code for one in engine.manifest().warnings}
    assert codes["far"] - codes["plain"] == {"beyond_positions"}


def test_given_weights_are_copied(tmp_path: Path) -> None:
    """A trainer's optimiser writes into its own tensors while requests are running."""
    model = tiny_model("qwen3")
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(seed=1, max_tokens=4))
    config = EngineConfig(model=model.write_config(tmp_path), kv_cache_memory_bytes=4 << 20)
    tensors = {name: torch.nn.Parameter(one) for name, one in model.tensors(torch.float32).items()}
    with Engine(config, weights=tensors) as engine:
        before = engine.generate([request])[0].logprobs.tolist()
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.mul_(1.5)
        assert engine.generate([request])[0].logprobs.tolist() == before
        decoder = engine.parts.runner.decoder
        assert not decoder.embedding.requires_grad
        assert not decoder.layers[0].qkv_proj.weight.requires_grad


def test_a_closed_or_broken_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=4))
    with tiny_engine(tiny_model("llama"), tmp_path) as engine:
        engine.submit(request)
    for call in (lambda: engine.submit(request), engine.step, lambda: engine.generate([request])):
        with pytest.raises(RuntimeError, match="it is closed"):
            call()
    with tiny_engine(tiny_model("llama"), tmp_path, lag=1) as engine:
        engine.submit(request)
        engine.step()

        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.parts.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(RuntimeError, match="an exception ended a step halfway"):
            engine.step()


@pytest.mark.parametrize("seed", [-1, 2**53, 1.5, True])
def test_a_bad_run_seed_is_refused_at_construction(tmp_path: Path, seed: object) -> None:
    with pytest.raises(ConfigError, match="run_seed"):
        tiny_engine(tiny_model("llama"), tmp_path, run_seed=seed)  # type: ignore[arg-type]


def test_an_id_and_its_text_are_one(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=2)
    with tiny_engine(tiny_model("llama"), tmp_path) as engine:
        engine.submit(Request(id=5, prompt_token_ids=PROMPT, params=params))
        with pytest.raises(RequestError, match="in use"):
            engine.submit(Request(id="5", prompt_token_ids=PROMPT, params=params))


def test_an_id_may_return_while_its_overshoot_is_still_in_flight(tmp_path: Path) -> None:
    """Results belong to sequences, not to whoever has the id when they arrive."""
    model = tiny_model("qwen3")
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    first = model.reference().greedy(list(PROMPT), 2)[0]
    place = 0 if first[1] == first[0] else 1
    stops = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=(first[place],))
    with tiny_engine(model, tmp_path, lag=1) as engine:
        engine.submit(Request(id="x", prompt_token_ids=PROMPT, params=stops))
        done = []
        while not done:
            done = engine.step()
        assert engine.has_unfinished()  # the overshoot
        engine.submit(Request(id="x", prompt_token_ids=PROMPT, params=greedy))
        again = []
        while engine.has_unfinished():
            again += engine.step()
    assert done[0].token_ids.tolist() == first[: place + 1]
    assert again[0].token_ids.tolist() == model.reference().greedy(list(PROMPT), 6)[0]


def test_a_row_is_clean_for_its_next_user(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = model.tensors(torch.float32)
    tensors["model.embed_tokens.weight"][77] = float("nan")
    config = EngineConfig(
        model=model.write_config(tmp_path), max_num_seqs=1, kv_cache_memory_bytes=4 << 20
    )
    params = SamplingParams(max_tokens=3)
    with Engine(config, weights=tensors) as engine:
        bad, good = engine.generate(
            [
                Request(id="bad", prompt_token_ids=(5, 77), params=params),
                Request(id="good", prompt_token_ids=PROMPT, params=params),
            ]
        )
    assert bad.error is not None
    assert good.error is None


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 8, 64])
def test_whether_a_request_is_faulty_does_not_depend_on_chunking(
    tmp_path: Path, chunk_size: int
) -> None:
    """Past its window a NaN may or may not reach a row, by tiling; the fault is the request's."""
    model = tiny_model("mistral")
    tensors = model.tensors(torch.float32)
    tensors["model.embed_tokens.weight"][77] = float("nan")
    prompt = (*range(3, 13), 77, *range(20, 39))
    config = EngineConfig(
        model=model.write_config(tmp_path), chunk_size=chunk_size, kv_cache_memory_bytes=4 << 20
    )
    with Engine(config, weights=tensors) as engine:
        (done,) = engine.generate(
            [Request(id=0, prompt_token_ids=prompt, params=SamplingParams(max_tokens=4))]
        )
    assert done.error is not None
    assert done.error.kind == "non_finite"
    assert len(done.token_ids) == 0


def test_the_basis_is_what_it_says(tmp_path: Path) -> None:
    """thinking-machines-lab/tinker-feedback#148: three conventions, each named in the result."""
    params = SamplingParams(seed=3, max_tokens=5, temperature=0.7, top_k=5, ignore_eos=True)
    request = Request(id=0, prompt_token_ids=PROMPT, params=params)
    seen = {}
    for basis in ("scaled", "raw", "processed"):
        with tiny_engine(tiny_model("qwen3"), tmp_path / basis, logprob_basis=basis) as engine:
            seen[basis] = run(engine, [request])
        assert seen[basis].completions[0, 0].logprob_basis == basis
    ids = seen["scaled"].completions[0, 0].token_ids.tolist()
    assert seen["raw"].completions[0, 0].token_ids.tolist() == ids
    for place, token in enumerate(ids):
        row = seen["scaled"].logits[0, 0][place].double()
        kept = row.clone()
        kept[row < row.topk(5).values[-1]] = -torch.inf
        expected = {"scaled": row / 0.7, "raw": row, "processed": kept / 0.7}
        for basis, z in expected.items():
            reported = float(seen[basis].completions[0, 0].logprobs[place])
            assert reported == pytest.approx(float(z.log_softmax(-1)[token]), abs=1e-5)


def test_min_p_reaches_the_sampler(tmp_path: Path) -> None:
    params = SamplingParams(seed=3, n=32, max_tokens=1, min_p=1.0)
    with tiny_engine(tiny_model("qwen3"), tmp_path) as engine:
        done = engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=params)])
        free = engine.generate(
            [Request(id=1, prompt_token_ids=PROMPT, params=SamplingParams(n=32, max_tokens=1))]
        )
    greedy = tiny_model("qwen3").reference().greedy(list(PROMPT), 1)[0]
    assert {one.token_ids[0] for one in done} == set(greedy)
    assert len({one.token_ids[0] for one in free}) > 1


def test_noise_is_keyed_by_the_absolute_position_of_the_drawn_token(tmp_path: Path) -> None:
    """The published stream: the first token after a prompt of n tokens has position n."""
    from pagedctl_kernels.ops.gumbel_noise import gumbel_noise
    from pagedctl_kernels.ops.philox import token_words

    params = SamplingParams(seed=5, max_tokens=1)
    with tiny_engine(tiny_model("qwen3"), tmp_path, dtype=torch.float32) as engine:
        trace = run(engine, [Request(id=0, prompt_token_ids=PROMPT, params=params)])
    row = trace.logits[0, 0][0]
    groups = torch.arange(-(-len(row) // 4))
    words = token_words(
        torch.full_like(groups, 5), torch.full_like(groups, len(PROMPT)), groups
    ).flatten()[: len(row)]
    expected = int((row + gumbel_noise(words)).argmax())
    assert trace.completions[0, 0].token_ids.tolist() == [expected]


def test_a_pool_that_cannot_be_allocated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="cannot be allocated"):
        tiny_engine(tiny_model("llama"), tmp_path, kv_cache_memory_bytes=1 << 50)
