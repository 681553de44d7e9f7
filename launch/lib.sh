# shellcheck shell=bash
# What the scripts here share: errors in one line, and commands that --dry-run prints and does not
# run. Bash 3.2 will do, which macOS has.

dry=""

say() { echo "${0##*/}: $*" >&2; }

die() {
  say "$*"
  exit 2
}

# shown WORD...: the words as one line that a shell reads back as they are
shown() {
  local word line="" quote="'\\''"
  for word; do
    if [[ -z $word || $word == *[!A-Za-z0-9_./:=,@%+-]* ]]; then
      word="'${word//"'"/$quote}'"
    fi
    line+="$word "
  done
  echo "${line% }"
}

# run COMMAND...: run it, or print it
run() {
  if [[ -n $dry ]]; then shown "$@"; else "$@"; fi
}

# ask ANSWER COMMAND...: what the command prints; for --dry-run, ANSWER, and the command is printed
exec 3>&1
ask() {
  local answer=$1
  shift
  if [[ -z $dry ]]; then
    "$@"
  else
    shown "$@" >&3
    echo "$answer"
  fi
}

# need COMMAND HOW: stop if the command is not there, and say how it is installed
need() {
  [[ -n $dry ]] || command -v "$1" >/dev/null || die "$1 is not installed; $2"
}

# own_first WORD...: stop if an option of the script's own stands behind the config, where it would
# go to famjax, and the rest to a cloud that is paid for
own_first() {
  local word
  for word; do
    case $word in --dry-run | --spot) die "$word stands behind the config; give it before" ;; esac
  done
}

# given VALUE --option EXAMPLE: stop if the option was left out
given() {
  [[ -n $1 ]] || die "$2 is missing; give it, such as $2 $3 (see --help)"
}

# need_gcloud: gcloud, and a project to use it in
need_gcloud() {
  need gcloud "see https://cloud.google.com/sdk/docs/install, or: brew install --cask gcloud-cli"
  if [[ -z $dry && -z $project ]]; then
    project="$(gcloud config get-value project 2>/dev/null)" || project=""
    [[ -n $project && $project != "(unset)" ]] ||
      die "no project; give --project ID, or set one: gcloud config set project ID"
  fi
}

# check_config VENV CONFIG [key=value ...]: stop where famjax train would refuse them. Where famjax
# is not installed yet in that virtual environment, say that they were not checked.
check_config() {
  local venv=$1 python="$1/bin/python"
  shift
  if ! [[ -x $python ]] || ! "$python" -c 'import famjax, tyro' 2>/dev/null; then
    say "famjax is not installed in $venv, so the config and its overrides were not checked"
    return
  fi
  "$python" -c '
import sys
from famjax.cli import main, train
sys.exit(main.guarded(lambda: train.check(sys.argv[1:])))
' "$@" || exit
}
