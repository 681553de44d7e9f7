#!/usr/bin/env bash
# Called by tpu_vm.sh on each worker of a TPU: install PLACE, train NAME CONFIG ...,
# status NAME CONFIG ..., stop.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi

# From the repository that gcsfuse's documentation names.
install_gcsfuse() {
  local from=https://packages.cloud.google.com/apt key=/usr/share/keyrings/cloud.google.asc
  run sudo curl -fsSLo "$key" "$from/doc/apt-key.gpg"
  run sudo sh -c ". /etc/os-release; echo \"deb [signed-by=$key] $from gcsfuse-\$VERSION_CODENAME main\" \
>/etc/apt/sources.list.d/gcsfuse.list"
  apt_install gcsfuse
}

# A machine that has just booted is still updating itself.
apt_install() {
  run sudo apt-get -qq -o DPkg::Lock::Timeout=600 update
  run sudo apt-get -qq -o DPkg::Lock::Timeout=600 install -y "$@"
}

mount_runs() {
  run mkdir -p ~/runs
  case $1 in
    gs://*)
      command -v gcsfuse >/dev/null || install_gcsfuse
      # without caches every worker sees immediately what the first one has written
      run gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
        "$(basename "$1")" ~/runs
      ;;
    *)
      apt_install nfs-common
      run sudo mount -t nfs "$1" ~/runs
      run sudo chmod a+rwx ~/runs
      ;;
  esac
}

# ensure_mounted PLACE. After a reboot nothing is mounted, and a gcsfuse that was killed leaves a mount
# that cannot be read. Without the mount, training would begin anew on the worker's own disk.
ensure_mounted() {
  if [[ -z $dry ]] && grep -q " $HOME/runs " /proc/mounts && ! ls ~/runs >/dev/null 2>&1; then
    sudo umount -l ~/runs
  fi
  mountpoint -q ~/runs || mount_runs "$1"
}

# With the Python version that famjax is tested with, which the system may not have.
install() {
  [[ -n $dry ]] || echo "$1" >~/place
  ensure_mounted "$1"
  run python3 -m pip install --quiet --user uv
  run ~/.local/bin/uv venv --quiet --allow-existing --python 3.11 ~/venv
  run ~/.local/bin/uv pip install --quiet --python ~/venv --editable "$HOME/famjax[tpu]"
}

readonly training="$HOME/venv/bin/famjax train"

# has_ended SECONDS: wait until no training runs any more; false after that many seconds
has_ended() {
  local i
  for ((i = 0; i < $1; i += 2)); do
    sleep 2
    pgrep -f "$training" >/dev/null || return 0
  done
  return 1
}

# Give an earlier training ten minutes to save and exit; it holds the chips until then.
stop_previous() {
  run pkill -TERM -f "$training" && [[ -z $dry ]] || return 0
  has_ended 600 && return
  pkill -KILL -f "$training" || true
  has_ended 60 || true
}

train() {
  local name=$1 status=0
  # an earlier call of this script ends with its training, and must not write the status of this one
  [[ -n $dry ]] || { echo $$ >~/train.pid; shell_quote "$@" >~/train.command; }
  shift
  run rm -f ~/train.status ~/train.stopped
  stop_previous
  [[ -n $dry || ! -f ~/place ]] || ensure_mounted "$(<~/place)"
  run ~/venv/bin/famjax train "$@" --run ~/runs/"$name" || status=$?
  [[ -n $dry || $(<~/train.pid) != "$$" ]] || echo "$status" >~/train.status
}

# Leaves a mark, so that a `tpu_vm.sh train` that waits for it does not restart it.
stop() {
  run touch ~/train.stopped
  run pkill -TERM -f "$training" || say "no training is running"
}

# status NAME CONFIG ...: of this training, or another if one with other arguments was started last
status() {
  # without train.command, an older version has started it
  if [[ -f ~/train.command || -f ~/train.status ]] &&
    [[ "$(cat ~/train.command 2>/dev/null)" != "$(shell_quote "$@")" ]]; then
    echo another
  elif [[ -f ~/train.status && -f ~/train.stopped ]]; then
    echo stopped
  elif [[ -f ~/train.status ]]; then
    cat ~/train.status
  elif pgrep -f "$training" >/dev/null; then
    echo running
  else
    echo none
  fi
}

case ${1:-} in
  install | train | status | stop) "$@" ;;
  *) die "is called by tpu_vm.sh, with install PLACE, train NAME CONFIG ...," \
    "status NAME CONFIG ... or stop" ;;
esac
