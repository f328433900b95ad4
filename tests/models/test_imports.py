"""The spec is for commands that must answer in a fraction of a second."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pagedctl.models

TORCH_FREE = (
    "architecture builtin checkpoint_files checkpoint_index checkpoint_match config_json "
    "config_keys eos file_stamp inspection json_object locate model_digest reader resolve rope "
    "rope_block rope_config safetensors_header spec tensor_parallel text_stream "
    "tokenizer_files windows"
)
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "triton")


def test_resolving_a_model_loads_no_heavy_library() -> None:
    modules = [f"pagedctl.models.{name}" for name in TORCH_FREE.split()]
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; "
        "from pagedctl.models.locate import locate_model; "
        "from pagedctl.models.resolve import resolve_model; "
        "resolve_model(locate_model('qwen3-8b')); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    root = Path(pagedctl.models.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_list_of_torch_free_modules_names_modules_that_exist() -> None:
    present = {module.name for module in pkgutil.iter_modules(pagedctl.models.__path__)}
    assert set(TORCH_FREE.split()) <= present
