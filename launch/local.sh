#!/usr/bin/env bash
# famjax on the devices of this machine; see usage below.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=lib.sh
. "$root/launch/lib.sh"

usage() {
  cat <<'EOF'
usage: launch/local.sh [--dry-run] [--fake-devices N] VERB ...

Runs a famjax command on the devices of this machine, or on N fake CPU devices, to try a mesh.

  --dry-run          check the config, print the command, and do not run it
  --fake-devices N   use N fake CPU devices

example: launch/local.sh train text_fam mesh.fsdp=-1 mesh.data=1
         launch/local.sh --fake-devices 8 train text_fam mesh.data=2 mesh.fsdp=4
EOF
}

devices=()
while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --dry-run) dry=1; shift ;;
    --fake-devices)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] ||
        die "--fake-devices needs a number: launch/local.sh --fake-devices 8 train ..."
      flag="--xla_force_host_platform_device_count=$2"
      devices=(env JAX_PLATFORMS=cpu "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }$flag")
      shift 2
      ;;
    *) break ;;
  esac
done
check_option_order "$@"

famjax=famjax
[[ ! -x $root/.venv/bin/famjax ]] || famjax="$root/.venv/bin/famjax"
need "$famjax" "run make demo, or pip install -e $root"
if [[ -n $dry && ${1:-} == train ]]; then
  check_config "$root/.venv" "${@:2}"
fi
[[ -n $dry ]] || exec ${devices[@]+"${devices[@]}"} "$famjax" "$@"
shell_quote ${devices[@]+"${devices[@]}"} "$famjax" "$@"
