"""The shared option groups: every option of model, contract, engine, parallel and sampling.

Each field is one option. Its name is the flag, the plan key, the attribute and the manifest
key. A default of None means "not given": the loader, the contract, the model or the pool
then decides, and the origin says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedctl.config.kinds import (
    Boolean,
    Choice,
    Integer,
    IntegerChoice,
    Number,
    Pattern,
    Size,
    Text,
)
from pagedctl.config.options import option
from pagedctl.numerics.plugins import OTHER_NAMES, installed
from pagedctl.numerics.switches import LOGPROB_ORDER_PATTERN

MAX_SEED = 2**53 - 1
"""Seeds stay below 2^53, so that every JSON reader keeps them."""


MAX_VOCAB_SIZE = 2**31 - 1
"""Token ids are int32."""


MAX_SAMPLES = 16384
"""Samples of one request; a slip of the keyboard may not take the memory of all others."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, in which dtype, with which weights, on which device."""

    model: str = option(
        Text(metavar="NAME|PATH", path="if_exists"),
        "embedded; a snapshot folder; a config.json; org/name[@revision] from the local Hugging "
        "Face cache; or a built-in architecture such as qwen3-8b. Never downloaded",
        default="embedded",
        env="PAGEDCTL_MODEL",
    )
    dtype: str = option(
        Choice(
            values=("auto", "float32", "bfloat16", "float16"),
            instead={"half": "float16", "float": "float32", "bf16": "bfloat16"},
        ),
        "auto takes config.json's, else that of most matrix tensors; it never narrows",
        default="auto",
    )
    random_weights: int | None = option(
        Integer(minimum=0, maximum=MAX_SEED),
        "weights from this seed instead of from files",
        default_text="weights from files",
    )
    device: str = option(
        Choice(values=("auto", "cpu", "cuda")),
        "auto takes cuda if a usable one exists",
        default="auto",
        env="PAGEDCTL_DEVICE",
    )


@dataclass(frozen=True, kw_only=True)
class ContractOptions:
    """The numerical contract and its single switches. None: the contract decides."""

    numerics: str = option(
        Choice(
            values=installed().envelopes.names(),
            instead=OTHER_NAMES,
            otherwise=installed().contract_remedy(),
        ),
        "the contract; it tightens what was not given and refuses what is looser",
        default="invariant",
    )
    topology_invariant: bool | None = option(
        Boolean(), "the same bits at every tp; needs a bitwise contract", default_text="off"
    )
    unverified: bool = option(
        Boolean(),
        "run a bitwise contract without a profile or record; stamped in the manifest",
        default=False,
    )
    explain_numerics: bool = option(
        Boolean(), "print the resolved tree and the chosen leaves, then exit", default=False
    )
    deterministic_kernels: bool | None = option(
        Boolean(),
        "no autotune, no TF32, no atomics in a sum",
        default_text="on under a bitwise contract",
    )
    batch_invariant: bool | None = option(
        Boolean(),
        "only leaves whose rows do not depend on the batch",
        default_text="on under a bitwise contract",
    )
    deterministic_collectives: bool | None = option(
        Boolean(),
        "data movement and a fold in rank order instead of library sums",
        default_text="on under a bitwise contract",
    )
    logprob_order: str | None = option(
        Pattern(
            regex=LOGPROB_ORDER_PATTERN,
            form="torch, blockwise[-W] or blockwise-direct[-W], W a number of columns",
            metavar="ORDER",
        ),
        "torch, blockwise[-W] or blockwise-direct[-W]: block sums of the log-softmax, W columns "
        "a block, and the form of the last subtraction",
        default_text="torch; blockwise under rl-bitwise",
    )
    padded_vocab_size: int | None = option(
        Integer(minimum=1, maximum=MAX_VOCAB_SIZE),
        "the trainer's padded vocabulary; padding columns are exactly minus infinity",
        default_text="no padding",
    )
    logprob_basis: str | None = option(
        Choice(
            values=("scaled", "raw", "processed"),
            instead={
                "raw_logprobs": "raw",
                "processed_logprobs": "processed",
                "temperature": "scaled",
            },
        ),
        "what a logprob is of: logits / T, logits, or after penalties and truncation",
        default_text="scaled",
    )
    head_dtype: str | None = option(
        Choice(values=("model", "float32")),
        "dtype of the output projection; must match the trainer's",
        default_text="model",
    )
    layer_boundary_norm: str | None = option(
        Choice(values=("fused", "unfused")),
        "unfused rounds the residual sum to the model's dtype before the norm",
        default_text="unfused under a bitwise contract, else either",
    )
    rope_table_dtype: str | None = option(
        Choice(values=("float32", "model")), "dtype of the cos/sin table", default_text="float32"
    )
    norm_cast: str | None = option(
        Choice(values=("before", "after")),
        "round the normalised value before or after the weight",
        default_text="before",
    )
    activation_rounding: str | None = option(
        Choice(values=("model", "float32")), "dtype of silu(gate)", default_text="model"
    )
    softmax_p_dtype: str | None = option(
        Choice(values=("model", "float32")),
        "dtype of the attention probabilities",
        default_text="model",
    )
    temperature_form: str | None = option(
        Choice(values=("divide", "multiply")),
        "divide logits by T, or multiply by its reciprocal",
        default_text="divide",
    )
    symmetric_memory: bool | None = option(
        Boolean(),
        "symmetric-memory routes and the distributed arg-max",
        default_text="off under a bitwise contract, else on",
    )
    yarn_ramp_mask_device: str | None = option(
        Choice(values=("host", "cpu", "cuda")),
        "where YaRN's ramp is computed: float64 on the host, or float32 on a device",
        default_text="host; cpu under rl-bitwise",
    )
    yarn_frequency_device: str | None = option(
        Choice(values=("host", "cpu", "cuda")),
        "where YaRN's frequencies are computed: float64 on the host, or float32 on a device",
        default_text="host; cuda under rl-bitwise",
    )
    leaf: tuple[str, ...] = option(
        Pattern(
            regex=r"[a-z0-9_]+=[A-Za-z0-9_.-]+",
            form="OP=NAME, for example gemm=torch.gemm_row_blocks",
            metavar="OP=NAME",
        ),
        "for developers: only this leaf may serve the op; the contract's requirements stay; "
        "repeatable",
        default=(),
        repeatable=True,
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Batching, KV pool and scheduling."""

    max_model_len: int | None = option(
        Integer(minimum=1),
        "prompt + output tokens of a request",
        default_text="the model's positions",
    )
    max_num_seqs: int = option(Integer(minimum=1), "running requests", default=256)
    max_num_batched_tokens: int = option(
        Integer(minimum=1), "tokens per step; may be below max_num_seqs", default=8192
    )
    chunk_size: int | None = option(
        Integer(minimum=1),
        "most new tokens of one request per step",
        default_text="max_num_batched_tokens",
    )
    block_size: int = option(
        IntegerChoice(values=(1, 2, 4, 8, 16, 32, 64, 128, 256)),
        "tokens per KV block; below 16 on the CPU only",
        default=16,
    )
    gpu_memory_utilization: float | None = option(
        Number(above=0, maximum=1),
        "share of total device memory that this process may use, everything included",
        default_text="0.90 on a GPU",
    )
    kv_cache_memory_bytes: int | None = option(
        Size(),
        "exact KV pool per rank; not together with gpu_memory_utilization",
        default_text="1GiB on the CPU",
    )
    kv_dtype: str = option(
        Choice(values=("auto", "float32", "bfloat16", "float16"), later=("fp8",)),
        "dtype of cached keys and values; auto is the model's",
        default="auto",
    )
    prefix_cache: bool = option(
        Boolean(), "reuse blocks of equal prefixes, running or finished", default=True
    )
    preemption: str = option(
        Choice(values=("recompute",), later=("swap", "auto")),
        "how a request gives up its blocks",
        default="recompute",
    )
    swap_memory_bytes: int | None = option(
        Size(), "pinned host memory for swapped requests, per rank", default_text="4GiB with swap"
    )
    enforce_eager: bool = option(Boolean(), "no CUDA graphs", default=False)
    lag: int | None = option(
        IntegerChoice(values=(0, 1)),
        "steps by which the host follows the device, exactly",
        default_text="0 on the CPU, 1 on a GPU",
    )
    debug_force_preemption_interval: int | None = option(
        Integer(nonzero=True),
        "preempt a running request every N steps; negative: only while prefilling",
        default_text="off",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Tensor parallelism."""

    tp: int = option(Integer(minimum=1), "ranks of one engine", default=1)
    tp_layout: str | None = option(
        Choice(values=("row", "column")),
        "row sums partials over ranks; column has no cross-rank sum and the bits of tp 1",
        default_text="row; column with topology_invariant",
    )
    reduce_dtype: str = option(
        Choice(values=("model", "float32")), "dtype of row-layout sums in fast", default="model"
    )
    verify: bool = option(Boolean(), "the agreement check before each step", default=True)
    collective_timeout: float = option(
        Number(above=0),
        "seconds to wait for one collective before every rank stops",
        default=30.0,
    )
    expert_parallel: bool | None = option(
        Boolean(), "whole experts per rank", default_text="on for mixture-of-experts at tp > 1"
    )
    redundant_experts: int = option(Integer(minimum=0), "byte-identical expert copies", default=0)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Defaults for requests that do not say."""

    n: int = option(
        Integer(minimum=1, maximum=MAX_SAMPLES),
        "samples per request, each with its own stream",
        default=1,
        short="-n",
    )
    max_tokens: int | None = option(
        Integer(minimum=1), "output tokens of a sample", default_text="up to max_model_len"
    )
    temperature: float = option(
        Number(minimum=1e-12, maximum=1e6, or_zero=True),
        "0 is greedy; never taken from generation_config.json",
        default=1.0,
    )
    top_p: float = option(
        Number(above=0, maximum=1), "smallest set with this much mass", default=1.0
    )
    top_k: int = option(
        Integer(minimum=-1), "most likely tokens kept; 0 and -1 keep all", default=0
    )
    min_p: float = option(
        Number(minimum=0, maximum=1), "least share of the largest probability", default=0.0
    )
    seed: int = option(
        Integer(minimum=0, maximum=MAX_SEED),
        "the run seed: a request without a seed of its own draws from (run seed, id)",
        default=0,
    )
    stop: tuple[str, ...] = option(
        Text(),
        "end at this text; cut from the text, kept in the ids; repeatable",
        default=(),
        repeatable=True,
    )
    ignore_eos: bool = option(
        Boolean(), "ignore the model's end tokens; stop texts still act", default=False
    )


@dataclass(frozen=True, kw_only=True)
class FilesOptions:
    """Files of every command."""

    plan: str | None = option(Text(metavar="FILE"), "a deployment plan file", env="PAGEDCTL_PLAN")
    json: str | None = option(
        Text(metavar="PATH"),
        "write the manifest here; bare, print it on stdout in place of the table",
        default_text="beside the output, else in PAGEDCTL_RUNS_DIR",
        optional_value=True,
    )
    quiet: bool = option(Boolean(), "no progress, notes or tables", default=False, short="-q")
    progress: bool = option(Boolean(), "show progress on stderr", default=True)


@dataclass(frozen=True, kw_only=True)
class JsonlOptions:
    """Input and output of commands that read and write JSON lines."""

    input: str | None = option(
        Text(metavar="FILE"), "JSON lines to read; - is stdin", default_text="stdin", short="-i"
    )
    output: str | None = option(
        Text(metavar="FILE"), "JSON lines to write; - is stdout", default_text="stdout", short="-o"
    )
