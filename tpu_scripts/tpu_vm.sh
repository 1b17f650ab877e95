#!/usr/bin/env bash
# A training run on a Cloud TPU VM that was asked for as a queued resource.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source-path=SCRIPTDIR source=common.sh
source ./common.sh

usage() {
  cat <<'TEXT'
tpu_vm.sh ACTION --project=P --zone=Z --name=N [options] [-- flags of experiments.train]

  create   asks for the TPU                    --type=v5litepod-8 --runtime=v2-alpha-tpuv5-lite [--disk=D] [--spot]
  wait     until it is there (POLL_S seconds between looks; 3: preempted, 1: refused)
  copy     sends the committed files of this checkout to every worker
  install  mounts the disk and installs the library there                [--disk=D] [--device=/dev/sdb]
  doctor   tpu_scripts/doctor.py on every worker; with --hosts=N also between them
  run      starts or continues the run in the background: -- --config=experiments/configs/quickstart.py
  logs     follows its output
  fetch    copies the run directory to --into=runs
  delete   gives the TPU back; the disk stays
  keep     all of it: create, wait, copy, install, run, until the run has ended; after a preemption again

--hosts=N is given for a TPU of several hosts, with --shared=DIR, a directory that all of them have mounted (Filestore, a bucket); the run
directory is then DIR/NAME. --disk is a persistent disk of the same zone. The run directory lies on it, so it survives a preempted TPU; without it, keep --spot runs short.
--dry_run prints the commands. Exit codes: 0 done, 1 refused by Google (its message is above), 2 called wrongly or the run failed, 3 preempted.
TEXT
}

PLACE=/mnt/marl_llm

look_up() { # the state of the queued resource, or GONE
  if [[ $DRY_RUN == 1 ]]; then
    run gcloud compute tpus queued-resources describe "$name" "${where[@]}" "--format=value(state.state)" >&2
    echo ACTIVE
    return
  fi
  gcloud compute tpus queued-resources describe "$name" "${where[@]}" "--format=value(state.state)" 2>/dev/null || echo GONE
}

on_workers() {
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all "--command=$1"
}

create() {
  need create project zone name type runtime
  local more=()
  [[ $spot != 1 ]] || more+=(--spot)
  [[ -z $disk ]] || more+=("--data-disk=source=projects/$project/zones/$zone/disks/$disk,mode=read-write")
  run gcloud compute tpus queued-resources create "$name" "${where[@]}" "--node-id=$name" "--accelerator-type=$type" \
    "--runtime-version=$runtime" "${more[@]}" || {
    echo "error: Google refused $type in $zone. A quota is raised at console.cloud.google.com/iam-admin/quotas; else another zone or type" >&2
    exit 1
  }
}

wait_for() {
  need wait project zone name
  local state
  while true; do
    state=$(look_up)
    case $state in
      ACTIVE) return ;;
      FAILED | GONE)
        echo "error: the request for $name is $state; gcloud compute tpus queued-resources describe $name ${where[*]} says why" >&2
        exit 1
        ;;
      SUSPENDED | SUSPENDING)
        echo "$name was preempted" >&2
        exit 3
        ;;
    esac
    echo "$name: $state" >&2
    sleep "${POLL_S:-30}"
  done
}

copy() {
  need copy project zone name
  run git -C .. archive --format=tar.gz -o "$archive" HEAD
  run gcloud compute tpus tpu-vm scp "$archive" "$name:/tmp/marl_llm.tar.gz" "${where[@]}" --worker=all
}

install() {
  need install project zone name
  local script="set -e; sudo mkdir -p $PLACE"
  if [[ -n $disk ]]; then # formatted once, when it has no file system
    script+="; mountpoint -q $PLACE || { sudo blkid $device >/dev/null || sudo mkfs.ext4 -q $device; sudo mount -o discard,defaults $device $PLACE; }"
  fi
  script+="; sudo chown \$USER $PLACE; mkdir -p ~/marl_llm; tar -xzf /tmp/marl_llm.tar.gz -C ~/marl_llm; python3 -m venv ~/venv"
  script+="; ~/venv/bin/pip install -q -e ~/marl_llm[tpu,hf,tools]"
  on_workers "$script"
}

train() {
  need run project zone name
  [[ ${#FLAGS[@]} -gt 0 ]] || fail "run needs the run's config: ... run -- --config=experiments/configs/quickstart.py"
  local command inner
  if [[ $hosts != 1 ]]; then
    [[ -n $shared ]] || fail "--hosts=$hosts needs --shared=DIR, a directory that all hosts have mounted"
    FLAGS+=(--distributed=auto)
  fi
  command=$(quoted ../venv/bin/python -m experiments.train "--workdir=${shared:-$PLACE}/$name" "${FLAGS[@]}")
  # a shell that outlives ssh: the exit code is written when the run ends by itself, and not when the machine goes
  inner="$command; code=\$?; [ \$code = 143 ] || echo \$code > $PLACE/$name.exit"
  on_workers "cd ~/marl_llm; rm -f $PLACE/$name.exit; nohup bash -c $(quoted "$inner") >> $PLACE/$name.log 2>&1 < /dev/null & sleep 1"
}

ended() { # the exit code of the run, or nothing
  [[ $DRY_RUN != 1 ]] || { on_workers "cat $PLACE/$name.exit 2>/dev/null || true" >&2 && echo 0 && return; }
  gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 "--command=cat $PLACE/$name.exit 2>/dev/null || true" 2>/dev/null | tail -1 || true
}

delete() {
  need delete project zone name
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

keep() {
  need keep project zone name type runtime
  local state code
  while true; do
    [[ $(look_up) != GONE && $DRY_RUN != 1 ]] || create
    code=0
    (wait_for) || code=$?
    if [[ $code == 0 ]]; then
      copy
      install
      train
      while state=$(look_up) && [[ $state == ACTIVE ]]; do
        code=$(ended)
        [[ -z $code ]] || break
        sleep "${POLL_S:-30}"
      done
      if [[ $state == ACTIVE ]]; then
        [[ $code == 0 ]] || echo "error: the run ended with $code; tpu_vm.sh logs shows why, and the TPU is still there: tpu_vm.sh delete" >&2
        [[ $code == 0 ]] || exit 2
        return
      fi
      echo "$name was preempted ($state); the run goes on on a new one" >&2
    elif [[ $code != 3 ]]; then
      exit "$code"
    fi
    delete
  done
}

project="" zone="" name="" type="" runtime="" disk="" spot="" device=/dev/sdb into=runs hosts=1 shared=""
parse "project zone name type runtime disk device into hosts shared spot?" "$@"
where=("--project=$project" "--zone=$zone")
archive=${TMPDIR:-/tmp}/marl_llm_$name.tar.gz
have gcloud git
case $ACTION in
  create) create ;;
  wait) wait_for ;;
  copy) copy ;;
  install) install ;;
  run) train ;;
  keep) keep ;;
  delete) delete ;;
  doctor)
    need doctor project zone name
    together=""
    [[ $hosts == 1 ]] || together=" --distributed=auto"
    on_workers "cd ~/marl_llm && ../venv/bin/python tpu_scripts/doctor.py --workdir=${shared:-$PLACE} --platform=tpu$together"
    ;;
  logs)
    need logs project zone name
    on_workers "tail -n 100 -F $PLACE/$name.log"
    ;;
  fetch)
    need fetch project zone name
    run mkdir -p "$into"
    run gcloud compute tpus tpu-vm scp --recurse "$name:${shared:-$PLACE}/$name" "$into" "${where[@]}" --worker=0
    ;;
  *) fail "an action is missing: create, wait, copy, install, doctor, run, logs, fetch, delete or keep (see --help)" ;;
esac
