#!/usr/bin/env bash
# A training run as a JobSet on GKE, by kubectl or by xpk.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source-path=SCRIPTDIR source=common.sh
source ./common.sh

usage() {
  cat <<'TEXT'
gke.sh ACTION --name=N [options] [-- flags of experiments.train]

  image   builds and pushes the image of the Dockerfile   --image=REGISTRY/NAME:TAG
  submit  fills in gke_jobset.yaml.tmpl and applies it     --image= --claim= --accelerator=tpu-v5-lite-podslice --topology=2x4 --chips=8
           of several hosts: --topology=4x4 --chips=4 --hosts=4 (chips of each host; the claim must be ReadWriteMany)
  xpk     the same job through xpk, without a claim: --workdir must be a path that the cluster's --storage mounts
                                                           --image= --project= --zone= --cluster= --type=v5litepod-8
  logs    follows the run's output
  delete  removes the JobSet; the claim with the run directory stays

--claim is a PersistentVolumeClaim of the namespace; the run directory is /runs/NAME on it. --restarts=20 bounds how often a preempted run
begins again. --grace=30 are the seconds that a pod has after SIGTERM. --dry_run prints commands and the filled-in file.
Exit codes: 0 done, 1 refused (the tool's message is above), 2 called wrongly.
TEXT
}

# The flags as a JSON list, which YAML reads.
json_list() {
  local out="" one
  for one in "$@"; do
    one=${one//\\/\\\\}
    out+=", \"${one//\"/\\\"}\""
  done
  echo "[${out#, }]"
}

fill_in() {
  local text word
  text=$(<gke_jobset.yaml.tmpl)
  for word in name restarts grace accelerator topology image args chips claim hosts; do
    text=${text//@$word@/"${!word}"}
  done
  echo "$text"
}

refused() {
  echo "error: $1 refused the job; a message about quota or capacity names what is exhausted. Another --topology or --zone may have it" >&2
  exit 1
}

submit() {
  need submit name image claim accelerator topology chips
  [[ ${#FLAGS[@]} -gt 0 ]] || fail "submit needs the run's config: ... submit -- --config=experiments/configs/quickstart.py"
  [[ $hosts == 1 ]] || FLAGS+=(--distributed=auto)
  args=$(json_list "--workdir=/runs/$name" "--grace_s=$((grace - 5))" "${FLAGS[@]}")
  if [[ $DRY_RUN == 1 ]]; then
    echo "+ kubectl apply -f - <<EOF"
    fill_in
    echo "EOF"
  else
    fill_in | kubectl apply -f - || refused kubectl
  fi
}

by_xpk() {
  need xpk name image project zone cluster type
  [[ " ${FLAGS[*]} " == *" --workdir="* ]] || fail "xpk needs --workdir= among the run's flags, on storage that outlives the pod"
  run xpk workload create "--workload=$name" "--cluster=$cluster" "--project=$project" "--zone=$zone" "--tpu-type=$type" \
    "--docker-image=$image" "--max-restarts=$restarts" \
    "--command=exec $(quoted python -m experiments.train "--grace_s=$((grace - 5))" "${FLAGS[@]}")" || refused xpk
}

# shellcheck disable=SC2034  # fill_in reads them by name
name="" image="" claim="" accelerator="" topology="" chips="" project="" zone="" cluster="" type="" restarts=20 grace=30 hosts=1 args=""
parse "name image claim accelerator topology chips project zone cluster type restarts grace hosts" "$@"
case $ACTION in
  image)
    need image image
    have docker
    run docker build -f Dockerfile -t "$image" ..
    run docker push "$image"
    ;;
  submit) have kubectl && submit ;;
  xpk) have xpk && by_xpk ;;
  logs)
    need logs name
    have kubectl
    run kubectl logs -f -l "jobset.sigs.k8s.io/jobset-name=$name" --tail=100
    ;;
  delete)
    need delete name
    have kubectl
    run kubectl delete jobset "$name"
    ;;
  *) fail "an action is missing: image, submit, xpk, logs or delete (see --help)" ;;
esac
