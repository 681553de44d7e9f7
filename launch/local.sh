#!/usr/bin/env bash
# Runs a famjax command on whatever devices this machine has:
#   launch/local.sh train text_fam mesh.fsdp=-1 mesh.data=1
# or on pretended CPU devices, to try a mesh:
#   launch/local.sh --fake-devices 8 train text_fam mesh.data=2 mesh.fsdp=4
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ "${1:-}" == --fake-devices ]]; then
  if ! [[ "${2:-}" =~ ^[1-9][0-9]*$ ]]; then
    echo "local.sh: --fake-devices needs a number: launch/local.sh --fake-devices 8 train ..." >&2
    exit 2
  fi
  export JAX_PLATFORMS=cpu
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$2"
  shift 2
fi

if [[ -x "$root/.venv/bin/famjax" ]]; then
  exec "$root/.venv/bin/famjax" "$@"
elif command -v famjax >/dev/null; then
  exec famjax "$@"
fi
echo "local.sh: famjax is not installed; run make demo, or pip install -e $root" >&2
exit 2
