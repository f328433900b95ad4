"""Tables about models: the list, and one model's spec, tensors, end tokens and contracts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from rich import box
from rich.table import Table

from pagedctl.models.inspection import Inspection, ListedModel
from pagedctl.models.rope import RopeSpec
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tokenizer_files import TokenizerFiles

NOTHING = "-"
ROPE_DETAILS = (
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
)


def list_table(models: Iterable[ListedModel]) -> Table:
    """Name, kind, parameters, dtype and source, one model a row."""
    table = _table("name", "kind", "parameters", "dtype", "source", numbers=("parameters",))
    for one in models:
        parameters = f"{one.spec.parameters:,}" if one.spec else NOTHING
        dtype = one.spec.dtype if one.spec else NOTHING
        location = one.location
        table.add_row(location.name, location.kind, parameters, dtype, location.source)
    return table


def inspection_tables(
    inspection: Inspection, digest: str, eligible: Mapping[str, Mapping[str, object]]
) -> list[Table]:
    """The spec, the tensors, the end tokens, the contracts."""
    return [
        _spec_table(inspection, digest),
        _tensor_table(inspection),
        _eos_table(inspection.spec),
        _contract_table(eligible),
    ]


def _table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Columns of text fold; those in *numbers* are right-justified and never wrap."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        if column in numbers:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def _spec_table(inspection: Inspection, digest: str) -> Table:
    table = _table("model", inspection.spec.name)
    for name, value in _spec_rows(inspection, digest):
        table.add_row(name, value)
    return table


def _spec_rows(inspection: Inspection, digest: str) -> Iterator[tuple[str, str]]:
    spec, tp = inspection.spec, inspection.tp
    yield "source", inspection.resolved.location.source
    yield "digest", digest
    yield "architecture", f"{spec.architecture} ({spec.family})"
    yield "dtype", f"{spec.dtype} ({spec.dtype_origin})"
    yield "parameters", f"{spec.parameters:,}"
    yield "weights", _weights(inspection)
    yield "layers", f"{spec.num_hidden_layers:,}"
    yield "hidden, intermediate", f"{spec.hidden_size:,}, {spec.intermediate_size:,}"
    heads = f"{spec.num_attention_heads} query, {spec.num_key_value_heads} kv"
    yield "heads", f"{heads}, head_dim {spec.head_dim}"
    yield "vocabulary", _vocabulary(spec)
    yield "positions", f"{spec.max_position_embeddings:,}"
    yield "rope", _rope(spec.rope, spec.head_dim)
    yield "windows", _windows(spec.windows)
    yield "norm", f"rms_norm_eps {spec.rms_norm_eps:g}{', QK-norm' if spec.qk_norm else ''}"
    yield "biases", _biases(spec)
    yield "head", "tied to the embedding" if spec.tie_word_embeddings else "its own tensor"
    yield "tokenizer", _tokenizer(inspection.resolved.tokenizer)
    yield "KV per token", f"{spec.kv_bytes_per_token(tp=tp):,} bytes{_per_rank(tp)}"


def _weights(inspection: Inspection) -> str:
    checkpoint = inspection.resolved.checkpoint
    if checkpoint is None:
        return "none: sampling needs --random-weights SEED"
    files = len(checkpoint.files)
    return f"{checkpoint.nbytes:,} bytes in {files} file{'s' if files > 1 else ''}"


def _vocabulary(spec: ModelSpec) -> str:
    if spec.input_vocab_size == spec.output_vocab_size:
        return f"{spec.input_vocab_size:,}"
    return f"{spec.input_vocab_size:,} in, {spec.output_vocab_size:,} out"


def _rope(rope: RopeSpec, head_dim: int) -> str:
    """Type, theta, the parameters that the type uses, and a partial rotation."""
    words = [rope.type, f"theta {_number(rope.theta)}"]
    if rope.type != "default":
        words.append(f"factor {_number(rope.factor)}")
    for name in ROPE_DETAILS:
        value = getattr(rope, name)
        if value is not None:
            words.append(f"{name} {_number(value)}")
    if rope.attention_scaling != 1.0:
        words.append(f"cos and sin times {rope.attention_scaling:.6g}")
    if rope.rotary_dim != head_dim:
        words.append(f"{rope.rotary_dim} of {head_dim} dimensions")
    return ", ".join(words)


def _number(value: float) -> str:
    """Without ``.0``: 500,000 and 1.5."""
    return f"{int(value) if value == int(value) else value:,}"


def _windows(windows: tuple[int | None, ...]) -> str:
    """Runs of layers with the same window: ``layers 0 to 27 all keys, 28 to 35 4,096 keys``."""
    if not any(windows):
        return "none: every layer sees all keys"
    runs: list[str] = []
    first = 0
    for window, members in groupby(windows):
        last = first + len(list(members)) - 1
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        runs.append(f"{layers}: {'all' if window is None else f'{window:,}'} keys")
        first = last + 1
    return ", ".join(runs)


def _biases(spec: ModelSpec) -> str:
    present = {
        "q, k, v": spec.attention_bias,
        "o": spec.o_proj_bias,
        "gate, up, down": spec.mlp_bias,
    }
    return ", ".join(name for name, has in present.items() if has) or "none"


def _tokenizer(files: TokenizerFiles) -> str:
    paths = (files.tokenizer_json, files.tokenizer_config, files.chat_template)
    return ", ".join(path.name for path in paths if path is not None) or "none: token ids only"


def _per_rank(tp: int) -> str:
    return f" on each of {tp} ranks" if tp > 1 else ""


def _tensor_table(inspection: Inspection) -> Table:
    """Tensors by role; with several ranks, shape and bytes are those of one."""
    spec, tp = inspection.spec, inspection.tp
    scope = " per rank" if tp > 1 else ""
    numbers = ("count", f"shape{scope}", f"bytes{scope}")
    table = _table("tensor", "count", f"shape{scope}", "stored", f"bytes{scope}", numbers=numbers)
    for group in inspection.tensor_groups():
        stored = ", ".join(group.stored) or NOTHING
        shape = " x ".join(map(str, group.rank_shape))
        name = _short(group.name)
        table.add_row(name, f"{group.count:,}", shape, stored, f"{group.rank_bytes:,}")
    table.add_section()
    table.add_row("all", f"{len(spec.tensors):,}", "", "", f"{spec.weight_bytes(tp=tp):,}")
    return table


def _short(name: str) -> str:
    """A tensor's name without what all names share, so that a row fits a terminal."""
    return name.removeprefix("model.").removeprefix("layers.*.").removesuffix(".weight")


def _eos_table(spec: ModelSpec) -> Table:
    table = _table("end token", "named by", numbers=("end token",))
    for token, files in spec.eos_sources:
        table.add_row(str(token), ", ".join(files))
    if not spec.eos_sources:
        table.add_row("none", "completions end only by length or stop")
    return table


def _contract_table(eligible: Mapping[str, Mapping[str, object]]) -> Table:
    table = _table("contract", "eligible by", "verified", "note")
    for name, found in eligible.items():
        by = str(found["eligible_by"] or NOTHING)
        table.add_row(name, by, "yes" if found["verified"] else "no", str(found["text"]))
    return table
