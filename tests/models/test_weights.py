"""Weights from files: the right bytes, from the right file, in memory of their own."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagedctl.errors import ModelError
from pagedctl.models import weights as module
from pagedctl.models.locate import embedded_location, locate_model
from pagedctl.models.resolve import ResolvedModel, resolve_model
from pagedctl.models.tensor_parallel import local_shape, shard_bounds
from pagedctl.models.weights import load_weights
from pagedctl.models.weights_digest import tensor_digests, weights_digest

Make = Callable[..., Any]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def resolved(folder: Path, **options: Any) -> ResolvedModel:
    return resolve_model(locate_model(str(folder)), **options)


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


@pytest.fixture
def model(tmp_path: Path, config_of: Make, write_model: Make) -> Path:
    """A float32 llama of one file."""
    folder: Path = write_model(tmp_path / "model", config_of())
    return folder


@pytest.fixture
def sharded(
    tmp_path: Path, config_of: Make, tensors_of: Make, halves: Make, write_sharded: Make
) -> Path:
    """The same model in two files, the second of which also has a wrong copy of a norm."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    config = config_of()
    (folder / "config.json").write_text(json.dumps(config))
    first, second = halves(tensors_of(config))
    name = "model.layers.0.input_layernorm.weight"
    dtype, shape, content = first[name]
    second = {**second, name: (dtype, shape, bytes(len(content)))}
    write_sharded(folder, dict(zip(SHARDS, (first, second), strict=True)))
    return folder


# -- the right bytes -----------------------------------------------------------------------


def test_tensors_have_the_bits_that_safetensors_reads(model: Path) -> None:
    found = resolved(model)
    loaded = load_weights(found, device="cpu")
    assert same_bits(loaded.tensors, load_file(model / "model.safetensors"))
    assert list(loaded.tensors) == [one.name for one in found.spec.tensors]
    assert loaded.casts == {}
    assert loaded.read_bytes == found.spec.weight_bytes()


def test_the_embedded_model_has_the_weights_that_transformers_loads() -> None:
    transformers = pytest.importorskip("transformers")
    location = embedded_location()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(location.path).state_dict()
    ours = load_weights(resolve_model(location), device="cpu").tensors
    tied_head = theirs.pop("lm_head.weight")
    assert same_bits(ours, theirs)
    assert torch.equal(tied_head, ours["model.embed_tokens.weight"])


def test_a_tensor_comes_from_the_file_to_which_the_index_maps_it(
    sharded: Path, model: Path
) -> None:
    """The second file's copy of the norm is ignored; a loader that merged files would take it."""
    assert same_bits(
        load_weights(resolved(sharded), device="cpu").tensors,
        load_weights(resolved(model), device="cpu").tensors,
    )


def test_a_tied_head_that_is_stored_is_not_read(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """vllm-project/vllm#6758, ml-explore/mlx-lm#1298."""
    tied = config_of(tie_word_embeddings=True)
    tensors = tensors_of(config_of())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    found = resolved(write_model(tmp_path, tied, tensors))
    loaded = load_weights(found, device="cpu")
    assert "lm_head.weight" not in loaded.tensors
    assert loaded.read_bytes == found.spec.weight_bytes()


def test_casts_are_those_of_torch_and_are_reported(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """huggingface/transformers#21524: float32 norms beside bfloat16 matrices."""
    config = config_of(without=("torch_dtype",))
    halved = tensors_of(config, "BF16")
    kept = {name: one for name, one in tensors_of(config).items() if len(one[1]) == 1}
    folder = write_model(tmp_path, config, halved | kept)
    found = resolved(folder)
    loaded = load_weights(found, device="cpu")
    stored = load_file(folder / "model.safetensors")
    assert found.spec.dtype == "bfloat16"
    assert loaded.casts == dict.fromkeys(kept, "float32")
    assert same_bits(loaded.tensors, {name: one.to(torch.bfloat16) for name, one in stored.items()})
    assert loaded.read_bytes == sum(one.nbytes for one in stored.values())
    assert [one.code for one in found.spec.warnings if one.code == "cast"] == ["cast"]


def test_a_value_that_the_dtype_cannot_hold_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="are too large for float16") as caught:
        load_weights(resolved(model, dtype="float16"), device="cpu")
    assert caught.value.where == str(model / "model.safetensors")


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="without weights"):
        load_weights(resolve_model(locate_model("qwen3-8b")), device="cpu")


# -- memory of its own ---------------------------------------------------------------------


def ownership_faults(tensors: Mapping[str, torch.Tensor], folder: Path) -> list[str]:
    """Tensors that are not compact, share memory, or lie in a mapping of a file of *folder*."""
    faults: list[str] = []
    seen: dict[int, str] = {}
    mapped = list(mappings(folder))
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() != tensor.nbytes or not tensor.is_contiguous():
            faults.append(f"{name} is not compact")
        if address in seen:
            faults.append(f"{name} shares memory with {seen[address]}")
        if any(start <= address < end for start, end in mapped):
            faults.append(f"{name} lies in a mapped file")
        seen[address] = name
    return faults


def mappings(folder: Path) -> Iterable[tuple[int, int]]:
    """Address ranges of this process at which files below *folder* are mapped."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if str(folder) in line:
            start, _, end = line.split()[0].partition("-")
            yield int(start, 16), int(end, 16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_every_tensor_owns_compact_memory(model: Path) -> None:
    loaded = load_weights(resolved(model), device="cpu")
    assert ownership_faults(loaded.tensors, model) == []
    assert list(mappings(model)) == []
    for rank in range(2):
        part = load_weights(resolved(model), device="cpu", tp=2, rank=rank)
        assert ownership_faults(part.tensors, model) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_ownership_oracle_sees_a_view(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []

    def view(self: Any, file: Any, tensor: Any, path: Path) -> torch.Tensor:
        reached.append(tensor.name)
        part: torch.Tensor = self._part(file, tensor)
        return part

    monkeypatch.setattr(module._Reader, "_read", view)
    whole = load_weights(resolved(model), device="cpu").tensors
    part = load_weights(resolved(model), device="cpu", tp=2, rank=1).tensors
    assert len(reached) == 2 * len(whole)
    assert len(ownership_faults(whole, model)) == len(whole)
    faults = ownership_faults(part, model)
    assert "model.layers.0.mlp.down_proj.weight is not compact" in faults


# -- a rank's part -------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_reads_only_its_part(tp: int, model: Path) -> None:
    """4 ranks on 2 kv heads: each kv head is held twice. 99 rows on 4 ranks: the last has 24."""
    found = resolved(model)
    spec = found.spec
    whole = load_weights(found, device="cpu").tensors
    for rank in range(tp):
        loaded = load_weights(found, device="cpu", tp=tp, rank=rank)
        asked = 0
        for tensor in spec.tensors:
            start, stop = shard_bounds(spec, tensor, tp=tp, rank=rank)
            full, part = whole[tensor.name], loaded.tensors[tensor.name]
            wanted = full[:, start:stop] if tensor.shard == "columns" else full[start:stop]
            real = part[: wanted.shape[0]]
            assert part.shape == local_shape(spec, tensor, tp)
            assert torch.equal(real, wanted)
            assert not part[wanted.shape[0] :].any()
            asked += wanted.nbytes
        assert loaded.read_bytes == asked < spec.weight_bytes()


def test_a_tp_that_does_not_fit_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="cannot be split over 3 ranks"):
        load_weights(resolved(model), device="cpu", tp=3, rank=0)


def test_a_rank_that_does_not_exist_is_a_fault_of_the_caller(model: Path) -> None:
    with pytest.raises(ValueError, match="rank 2 is not in"):
        load_weights(resolved(model), device="cpu", tp=2, rank=2)


# -- files that change ---------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def rewrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
    later = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(later, later))


def replace_by_its_copy(path: Path) -> None:
    before = path.stat()
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(path)


CHANGES = {
    "truncate": (truncate, "changed after it was checked: it had"),
    "rewrite": (rewrite, "written or replaced"),
    "replace": (replace_by_its_copy, "written or replaced"),
    "remove": (Path.unlink, "cannot be read"),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_a_file_that_changed_after_the_check_is_refused(
    change: Callable[[Path], None], says: str, sharded: Path
) -> None:
    found = resolved(sharded)
    change(sharded / SHARDS[1])
    with pytest.raises(ModelError, match=says) as caught:
        load_weights(found, device="cpu")
    assert caught.value.where == str(sharded / SHARDS[1])


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, read = module._Reader._read, []

    def read_then_truncate(self: Any, file: Any, tensor: Any, path: Path) -> torch.Tensor:
        result = original(self, file, tensor, path)
        read.append(tensor.name)
        truncate(path)
        return result

    monkeypatch.setattr(module._Reader, "_read", read_then_truncate)
    with pytest.raises(ModelError, match="changed after it was checked"):
        load_weights(resolved(model), device="cpu")
    assert len(read) == 1


# -- digests of weights --------------------------------------------------------------------


def test_a_file_a_set_of_shards_and_a_live_model_have_one_digest(
    sharded: Path, model: Path
) -> None:
    live = load_weights(resolved(model), device="cpu").tensors
    file = load_file(model / "model.safetensors")
    parts = [load_file(sharded / name) for name in SHARDS]
    parts[1].pop("model.layers.0.input_layernorm.weight")
    backwards = [pair for part in reversed(parts) for pair in part.items()]
    transposed = {name: one.t().contiguous().t() for name, one in file.items()}
    digests = {
        weights_digest(pairs)
        for pairs in (live.items(), file.items(), backwards, transposed.items())
    }
    assert len(digests) == 1


def test_every_part_of_a_tensor_enters_the_digest() -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(torch.float32).view(2, 3)
    changed = tensor.clone()
    changed[1, 2] = changed[1, 1]
    variants = {
        "itself": ("a", tensor),
        "name": ("b", tensor),
        "shape": ("a", tensor.view(3, 2)),
        "dtype": ("a", tensor.view(torch.int32)),
        "bytes": ("a", changed),
    }
    assert len({weights_digest([pair]) for pair in variants.values()}) == len(variants)
    negative_zero = weights_digest([("a", torch.tensor([-0.0]))])
    assert negative_zero != weights_digest([("a", torch.tensor([0.0]))])


def test_the_digest_is_that_of_its_written_form() -> None:
    pairs = [("b", torch.zeros(2, dtype=torch.bfloat16)), ("a", torch.tensor([[1.5, -2.0]]))]
    of_a = hashlib.sha256(b"float32 [1, 2]\n" + struct.pack("<2f", 1.5, -2.0)).hexdigest()
    of_b = hashlib.sha256(b"bfloat16 [2]\n" + bytes(4)).hexdigest()
    lines = f"a sha256:{of_a}\nb sha256:{of_b}\n"
    assert weights_digest(pairs) == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    assert tensor_digests(pairs) == {"b": f"sha256:{of_b}", "a": f"sha256:{of_a}"}


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        weights_digest([("a", torch.zeros(1)), ("a", torch.zeros(1))])
