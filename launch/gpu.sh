#!/usr/bin/env bash
# famjax train on the NVIDIA GPUs of this machine; see usage below.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=lib.sh
. "$root/launch/lib.sh"

usage() {
  cat <<'EOF'
usage: launch/gpu.sh [--dry-run] CONFIG [key=value ...]

Installs famjax for CUDA into the checkout's .venv, once, and trains on all GPUs of this machine; the
same command goes on where a stopped run left off. The run lies in runs/NAME, from where you call.

  --dry-run   check the config, print every command, one a line, and run none

example: launch/gpu.sh text_fam train.steps=2000 name=first
CUDA_VISIBLE_DEVICES=0,1 before it takes these GPUs alone; nohup lets it go on when you leave.
EOF
}

case ${1:-} in
  -h | --help | "") usage; exit 0 ;;
  --dry-run) dry=1; shift ;;
esac
[[ $# -gt 0 && $1 != -* ]] || die "which config? such as: launch/gpu.sh text_fam train.steps=2000"
own_first "$@"
need nvidia-smi "install NVIDIA's driver"
need python3 "install Python 3.11 or newer"

bin="$root/.venv/bin"
if [[ -n $dry ]]; then check_config "$root/.venv" "$@"; fi
if [[ -n $dry || ! -x $bin/python ]]; then run python3 -m venv "$root/.venv"; fi
if [[ -n $dry ]] || ! "$bin/python" -c 'import famjax, jax_cuda13_plugin' 2>/dev/null; then
  run "$bin/python" -m pip install --quiet --editable "${root}[cuda]"
fi
run "$bin/famjax" train "$@"
