#!/usr/bin/env bash
# famjax train on the NVIDIA GPUs of this machine; see usage below.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=lib.sh
. "$root/launch/lib.sh"

usage() {
  cat <<'EOF'
usage: launch/gpu.sh [--dry-run] CONFIG [key=value ...]

Installs famjax for CUDA into the checkout's .venv, once, and trains on all GPUs of this machine. The
same command continues a stopped run. The run is in runs/NAME of the current folder.

  --dry-run   check the config, print every command, one per line, and run none

example: launch/gpu.sh text_fam train.steps=2000 name=first
Put CUDA_VISIBLE_DEVICES=0,1 before it to use only these GPUs, nohup to keep it running after logout.
EOF
}

case ${1:-} in
  -h | --help | "") usage; exit 0 ;;
  --dry-run) dry=1; shift ;;
esac
[[ $# -gt 0 && $1 != -* ]] || die "which config? such as: launch/gpu.sh text_fam train.steps=2000"
check_option_order "$@"
need nvidia-smi "install NVIDIA's driver"
need python3 "install Python 3.11 or newer"

bin="$root/.venv/bin"
if [[ -n $dry ]]; then check_config "$root/.venv" "$@"; fi
if [[ -n $dry || ! -x $bin/python ]]; then run python3 -m venv "$root/.venv"; fi
# JAX for CUDA 12, which older drivers need, is installed by hand
installed='
import famjax
from importlib.util import find_spec
assert any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
'
if [[ -n $dry ]] || ! "$bin/python" -c "$installed" 2>/dev/null; then
  run "$bin/python" -m pip install --quiet --editable "${root}[cuda]"
fi
run "$bin/famjax" train "$@"
