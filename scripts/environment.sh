# Sourced by scripts/quickstart and scripts/test: makes .venv with pagedctl installed in it.
# Every step is skipped if it is done already, and says what it does.

# The CPU release that the suite runs on. GPU machines take what PyPI gives them: a CUDA build.
CPU_TORCH="torch==2.13.0"
GPU_TORCH="torch>=2.11"

say() { printf '\n== %s\n' "$*" >&2; }

make_venv() {
  local python="${PYTHON:-python3}"
  if [ -x .venv/bin/python ]; then
    return
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than Python 3.11; set PYTHON to a newer one" >&2
    exit 2
  }
  say "making the virtual environment .venv with $("$python" --version)"
  "$python" -m venv .venv
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Whether pip's own sources would bring CUDA packages along with $1.
pulls_cuda() {
  .venv/bin/pip install --quiet --dry-run --ignore-installed --report - "$1" |
    .venv/bin/python -c '
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]]
sys.exit(not any(name.startswith(("nvidia", "cuda")) for name in names))'
}

install_torch() {
  if .venv/bin/python -c 'import torch' 2>/dev/null; then
    return
  fi
  if has_gpu; then
    say "a GPU is present: installing $GPU_TORCH with CUDA"
    .venv/bin/pip install --quiet "$GPU_TORCH"
  elif pulls_cuda "$CPU_TORCH"; then
    say "no GPU: installing the CPU build of $CPU_TORCH through uv"
    .venv/bin/pip install --quiet uv
    .venv/bin/uv pip install --quiet --python .venv/bin/python --torch-backend cpu "$CPU_TORCH"
  else
    say "no GPU: installing $CPU_TORCH, a CPU build here"
    .venv/bin/pip install --quiet "$CPU_TORCH"
  fi
}

# Install the project in place; $1 is "" or the extras, for example "[dev]".
install_project() {
  local stamp=".venv/.pagedctl-installed$1"
  if [ "$stamp" -nt pyproject.toml ]; then
    return
  fi
  say "installing pagedctl$1 into .venv"
  .venv/bin/pip install --quiet --editable ".$1"
  touch "$stamp"
}
