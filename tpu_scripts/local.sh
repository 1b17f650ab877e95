#!/usr/bin/env bash
# A run on this machine with N CPU devices.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source-path=SCRIPTDIR source=common.sh
source ./common.sh

usage() {
  cat <<'TEXT'
local.sh N --workdir=DIR [--python=PATH] [--dry_run] [-- flags of experiments.train]

Runs a config in ONE process with N forced CPU devices: the mesh, the sharding and the collectives of N devices, not those of N hosts.
Several processes are not available yet. Without flags: -- --config=experiments/configs/quickstart.py:smoke
TEXT
}

workdir="" python=python
parse "workdir python" "$@"
[[ $ACTION =~ ^[1-9][0-9]*$ ]] || fail "how many devices? local.sh 2 --workdir=runs/two"
need local.sh workdir
[[ ${#FLAGS[@]} -gt 0 ]] || FLAGS=(--config=experiments/configs/quickstart.py:smoke)
[[ $workdir == /* ]] || workdir=$OLDPWD/$workdir
echo "note: one process with $ACTION forced devices; several processes are not available yet" >&2
run cd ..
run env JAX_PLATFORMS=cpu "$python" -m experiments.train "--workdir=$workdir" "${FLAGS[@]}" "--config.devices=$ACTION"
