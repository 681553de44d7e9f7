#!/usr/bin/env bash
# famjax train on Cloud TPU VMs, from your own machine; see usage below and docs/launch.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=lib.sh
. launch/lib.sh

usage() {
  cat <<'EOF'
usage: launch/tpu_vm.sh VERB --name NAME --zone ZONE [option ...] [CONFIG key=value ...]

  train     all of these: create, install, run, wait for the end of the training, and delete. After a
            preemption, request another TPU and continue from the last checkpoint
  create    request a TPU and wait until it is ready
  install   copy this checkout's last commit to every worker and install famjax there
  run       start famjax train on every worker, after a running training has saved and exited; an
            existing run continues
  tail      follow the first worker's log
  stop      let the training save and exit
  delete    delete the TPU; what is in --runs stays

  --name NAME      name of the TPU and of the run, which is in PLACE/NAME
  --zone ZONE      such as us-west4-a; gcloud compute tpus locations list
  --type TYPE      create, train: v5litepod-8 is one host of 8 chips, v5litepod-32 a slice of several;
                   gcloud compute tpus accelerator-types list --zone ZONE
  --runs PLACE     install, train: where runs are kept, mounted as ~/runs on every worker. gs://BUCKET,
                   created with --enable-hierarchical-namespace, or HOST:/SHARE, an NFS share (Filestore)
  --project ID     default: gcloud's current project
  --spot           create, train: cheaper, but may be preempted at any time
  --dry-run        print every command, one per line, and run none

example: launch/tpu_vm.sh train --name first --zone us-west4-a --type v5litepod-8 --spot \
           --runs gs://my-runs text_fam train.steps=2000
EOF
}

readonly poll=60 # seconds between polls
name="" zone="" type="" runs="" project="" spot="" verb=${1:-}
case $verb in
  -h | --help | "") usage; exit 0 ;;
  train | create | install | run | tail | stop | delete) shift ;;
  *) die "unknown verb $verb (known: train, create, install, run, tail, stop, delete)" ;;
esac
while [[ ${1:-} == --* ]]; do
  case $1 in
    --spot) spot=--spot; shift; continue ;;
    --dry-run) dry=1; shift; continue ;;
    --help) usage; exit 0 ;;
    --name | --zone | --type | --runs | --project) [[ -n ${2:-} ]] || die "$1 needs a value" ;;
    *) die "unknown option $1; see --help" ;;
  esac
  printf -v "${1#--}" %s "$2"
  shift 2
done
check_option_order "$@"
require "$name" --name first
require "$zone" --zone us-west4-a
case $verb in create | train) require "$type" --type v5litepod-8 ;; esac
case $verb in install | train)
  require "$runs" --runs gs://my-runs
  runs=${runs%/}
  [[ $runs =~ ^gs://[^/]+$ || $runs =~ ^[^:/]+:/[^/]+ ]] ||
    die "--runs $runs is neither gs://BUCKET, without a path, nor HOST:/SHARE"
  ;;
esac
case $verb in run | train) [[ $# -gt 0 ]] || die "which config? such as: ... text_fam train.steps=2000" ;; esac

need_gcloud
where=("--zone=$zone")
if [[ -n $project ]]; then where+=("--project=$project"); fi
delete_command="launch/tpu_vm.sh delete --name $name --zone $zone${project:+ --project $project}"
tpus() { run gcloud compute tpus "$@" "${where[@]}"; }

# on WORKER COMMAND: run a shell command on one worker, or on all
on() { tpus tpu-vm ssh "$name" --quiet "--worker=$1" "--command=$2"; }

# The runtime version that JAX needs on each kind of TPU.
runtime() {
  case $type in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
    *) die "--type $type is not of a known kind (v2-, v3-, v4-, v5litepod-, v5p-, v6e-)" ;;
  esac
}

# state ANSWER: ACTIVE; NONE if there is no such TPU; PREEMPTED; UNKNOWN if gcloud fails; otherwise
# the state of the queued resource
state() {
  local result node errors="${TMPDIR:-/tmp}/famjax-$name.err"
  if [[ -n $dry ]]; then errors=/dev/null; fi
  if ! result="$(ask "$1" gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
    '--format=value(state.state)' 2>"$errors")"; then
    if grep -q NOT_FOUND "$errors"; then
      result=NONE
    else
      say "gcloud cannot tell the state of $name: $(tail -n 1 "$errors")"
      result=UNKNOWN
    fi
  elif [[ $result == ACTIVE && -z $dry ]]; then
    node="$(gcloud compute tpus tpu-vm describe "$name" "${where[@]}" '--format=value(state)' \
      2>/dev/null)" || node=""
    case $node in PREEMPTED | TERMINATED | STOPPED) result=PREEMPTED ;; esac
  fi
  echo "$result"
}

# Returns 1 if there is no TPU and nothing to wait for: the request failed, or the last TPU is still
# being deleted; 2 if the request was refused, or gcloud does not answer.
create() {
  # unknown: polls in a row without an answer from gcloud
  local now software unknown=0
  software="$(runtime)" || exit 2
  now="$(state NONE)"
  case $now in
    ACTIVE) return ;;
    UNKNOWN) return 2 ;;
    FAILED | SUSPENDED | PREEMPTED) delete && now=NONE ;;
  esac
  if [[ $now == NONE ]]; then
    tpus queued-resources create "$name" "--node-id=$name" "--accelerator-type=$type" \
      "--runtime-version=$software" ${spot:+"$spot"} || {
      say "the request was refused; see gcloud's message above (quota, zone, type)"
      return 2
    }
  fi
  while now="$(state ACTIVE)"; [[ $now != ACTIVE ]]; do
    say "$name: $now"
    if [[ $now == UNKNOWN ]]; then unknown=$((unknown + 1)); else unknown=0; fi
    [[ $unknown -lt 60 ]] ||
      die "gcloud has not answered for an hour; see its message above. If there is a TPU, it costs" \
        "money: $delete_command"
    case $now in FAILED | SUSPEND* | PREEMPTED | DELETING | NONE) return 1 ;; esac
    run sleep "$poll"
  done
}

install() {
  local packed="${TMPDIR:-/tmp}/famjax-$name.tar.gz"
  if [[ -z $dry ]] && ! git diff --quiet HEAD; then
    say "uncommitted changes are not copied"
  fi
  run git archive --format=tar.gz "--output=$packed" HEAD &&
    tpus tpu-vm scp "$packed" "$name:famjax.tar.gz" --quiet --worker=all &&
    on all "mkdir -p famjax && tar -xzf famjax.tar.gz -C famjax && famjax/launch/tpu_worker.sh \
install $(shell_quote "$runs")"
}

# It keeps running when the connection ends.
start() {
  on all "nohup famjax/launch/tpu_worker.sh train $(shell_quote "$name" "$@") >>train.log 2>&1 </dev/null &"
}

# training_status ANSWER CONFIG ...: the exit status of this training; running; stopped; another if
# one with other arguments was started last; none if none was; or unknown
training_status() {
  local answer=$1
  shift
  ask "$answer" gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --quiet --worker=0 \
    --command="famjax/launch/tpu_worker.sh status $(shell_quote "$name" "$@") || echo none" ||
    echo unknown
}

delete() { tpus queued-resources delete "$name" --quiet --force; }

# restart CONFIG ...: install if this call has started nothing there yet, and start; at most five
# times on one TPU, unless the training ran for half an hour in between
restart() {
  [[ $polls -lt 30 ]] || tries=0
  polls=0
  tries=$((tries + 1))
  [[ $tries -le 5 ]] || die "the training failed five times; see tail. $(cost_warning)"
  if [[ $status == none || -z $started ]]; then install || return 0; fi
  start "$@" || return 0
  started=1
}

cost_warning() { echo "The TPU still exists and costs money: $delete_command"; }

# Until the training ends by itself, whatever happens to the TPU.
train() {
  # tries: starts on one TPU; polls: since the last start, while it ran; failed: requests for a TPU in
  # a row; unknown: polls in a row without an answer from the worker; started: whether this call has
  # started the training, or seen it running. What ended before is started again, unless it finished
  local now status answer=none tries=0 polls=0 failed=0 unknown=0 had="" started=""
  now="$(state NONE)"
  [[ $now != UNKNOWN ]] || die "cannot start; see gcloud's message above"
  while :; do
    if [[ $now != ACTIVE && $now != UNKNOWN ]]; then
      say "$name: $now, requesting a TPU"
      tries=0
      create || {
        # once there was a TPU, its request is not at fault
        [[ $? != 2 || -n $had ]] || exit 2
        failed=$((failed + 1))
        [[ $failed -lt 30 ]] || die "there was no TPU $failed times in a row; call train again later"
        run sleep "$poll"
        now="$(state NONE)"
        continue
      }
      failed=0 unknown=0
    fi
    [[ $now == UNKNOWN ]] || had=1
    status="$(training_status "$answer" "$@")"
    if [[ $status == unknown ]]; then unknown=$((unknown + 1)); else unknown=0; fi
    case $status in
      running) started=1 ;;
      stopped | 2) [[ -n $started ]] || status="$status before this call" ;;
      another)
        [[ -z $started ]] || die "another training was started on $name, so this call ends"
        status="another before this call"
        ;;
    esac
    case $status in
      running) polls=$((polls + 1)) ;;
      unknown) [[ $unknown -lt 60 ]] ||
        die "no answer from the worker for an hour; see ssh's message above. $(cost_warning)" ;;
      0) say "the training has finished"; delete; return ;;
      stopped) say "stopped, and saved. $(cost_warning)"; return ;;
      2) die "famjax reported a mistake; see tail. $(cost_warning)" ;;
      *) say "training: $status, starting it"; restart "$@" ;;
    esac
    answer=0
    run sleep "$poll"
    now="$(state ACTIVE)"
  done
}

case $verb in
  train) train "$@" ;;
  create)
    create || {
      [[ $? != 2 ]] || exit 2
      die "there is no TPU $name; call create again, or train, which requests it 30 times"
    }
    ;;
  install) install ;;
  run) start "$@" ;;
  tail) on 0 "tail -n 100 -F train.log" ;;
  stop) on all "famjax/launch/tpu_worker.sh stop" ;;
  delete) delete ;;
esac
