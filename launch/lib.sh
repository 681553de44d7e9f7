# shellcheck shell=bash
# Shared by the scripts: one-line errors, and commands that --dry-run prints instead of running them.
# Works with Bash 3.2, which macOS has.

dry=""

say() { echo "${0##*/}: $*" >&2; }

die() {
  say "$*"
  exit 2
}

# shell_quote WORD...: print the words as one line, quoted for the shell
shell_quote() {
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
  if [[ -n $dry ]]; then shell_quote "$@"; else "$@"; fi
}

# ask ANSWER COMMAND...: print the command's output; with --dry-run, print the command and ANSWER
exec 3>&1
ask() {
  local answer=$1
  shift
  if [[ -z $dry ]]; then
    "$@"
  else
    shell_quote "$@" >&3
    echo "$answer"
  fi
}

# need COMMAND HOW: exit if the command is missing, and say how to install it
need() {
  [[ -n $dry ]] || command -v "$1" >/dev/null || die "$1 is not installed; $2"
}

# check_option_order WORD...: exit if an option of the script itself comes after the config, where it
# would be passed to famjax, and the command would run on a cloud that costs money
check_option_order() {
  local word
  for word; do
    case $word in --dry-run | --spot) die "$word comes after the config; put it before" ;; esac
  done
}

# require VALUE --option EXAMPLE: exit if the option is missing
require() {
  [[ -n $1 ]] || die "$2 is missing; give it, such as $2 $3 (see --help)"
}

# need_gcloud: check that gcloud is installed and that there is a project
need_gcloud() {
  need gcloud "see https://cloud.google.com/sdk/docs/install, or: brew install --cask gcloud-cli"
  if [[ -z $dry && -z $project ]]; then
    project="$(gcloud config get-value project 2>/dev/null)" || project=""
    [[ -n $project && $project != "(unset)" ]] ||
      die "no project; give --project ID, or set one: gcloud config set project ID"
  fi
}

# check_config VENV CONFIG [key=value ...]: exit if famjax train would reject them. If famjax is not
# installed yet in that virtual environment, say that they were not checked.
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
sys.exit(main.run_guarded(lambda: train.check(sys.argv[1:])))
' "$@" || exit
}
