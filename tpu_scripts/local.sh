#!/usr/bin/env bash
# A run on N processes of this machine, each with forced CPU devices.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source-path=SCRIPTDIR source=common.sh
source ./common.sh

usage() {
  cat <<'TEXT'
local.sh N --workdir=DIR [--devices=1] [--python=PATH] [--dry_run] [-- flags of experiments.train]

Runs a config on N real processes with DEVICES forced CPU devices each, joined as the processes of N hosts would be: what works here has
its processes, collectives and directory right before a cluster is paid for. Process 0 prints here, the others into DIR/logs.
Ctrl-C or SIGTERM stops all of them after the same step, with a checkpoint. Exit code: process 0's. Without flags: -- --config=experiments/configs/quickstart.py:smoke
TEXT
}

free_port() {
  "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

workdir="" python=python devices=1
parse "workdir python devices" "$@"
[[ $ACTION =~ ^[1-9][0-9]*$ ]] || fail "how many processes? local.sh 2 --workdir=runs/two"
[[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices=$devices must be a whole number of devices per process"
need local.sh workdir
[[ ${#FLAGS[@]} -gt 0 ]] || FLAGS=(--config=experiments/configs/quickstart.py:smoke)
[[ $workdir == /* ]] || workdir=$OLDPWD/$workdir
[[ $python != */* || $python == /* ]] || python=$OLDPWD/$python
run cd ..
port=PORT
[[ $DRY_RUN == 1 || $ACTION == 1 ]] || port=$(free_port)
started=()
# processes in the background ignore Ctrl-C, so both signals go on as SIGTERM; all of them then end after the same step
trap 'kill -TERM "${started[@]}" 2>/dev/null || true' TERM INT
for ((rank = 0; rank < ACTION; rank++)); do
  command=(env JAX_PLATFORMS=cpu "$python" -m experiments.train "--workdir=$workdir" "${FLAGS[@]}" "--config.devices=$((ACTION * devices))")
  [[ $ACTION == 1 ]] || command+=("--distributed=127.0.0.1:$port,$ACTION,$rank")
  if [[ $DRY_RUN == 1 ]]; then
    run "${command[@]}"
  else
    "${command[@]}" &
    started+=("$!")
  fi
done
[[ $DRY_RUN != 1 ]] || exit 0
code=0
for ((rank = ACTION - 1; rank >= 0; rank--)); do # process 0 last: its code is the run's
  while true; do
    code=0
    wait "${started[rank]}" || code=$?
    kill -0 "${started[rank]}" 2>/dev/null || break # a trapped signal ends `wait` too
  done
done
exit "$code"
