#!/usr/bin/env bash
# famjax train on TPUs of a GKE cluster, by xpk; see usage below and docs/launch.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=lib.sh
. launch/lib.sh

usage() {
  cat <<'EOF'
usage: launch/gke.sh VERB --cluster CLUSTER --zone ZONE [option ...] [CONFIG key=value ...]

  cluster          create the cluster, with one TPU slice and the bucket mounted at /runs
  image            build the image of this checkout and push it
  run              start famjax train; an existing run continues. After a preemption GKE restarts the
                   job, up to 1,000 times, and the training continues from the last checkpoint
  tail             follow the log of the first host
  delete           end the training; the bucket stays
  delete-cluster   delete everything except the bucket

  --cluster NAME   name of the cluster
  --zone ZONE      such as us-west4-a
  --name NAME      run, tail, delete: name of the run, which is kept at gs://BUCKET/NAME
  --type TYPE      cluster, run: such as v5litepod-32
  --image IMAGE    image, run: such as us-docker.pkg.dev/PROJECT/famjax/famjax:1
  --bucket BUCKET  cluster: created with --enable-hierarchical-namespace
  --project ID     default: gcloud's current project
  --spot           cluster: cheaper, but may be preempted at any time
  --dry-run        print every command, one per line, and run none

example: launch/gke.sh run --cluster mine --zone us-west4-a --type v5litepod-32 --name first \
           --image us-docker.pkg.dev/my-project/famjax/famjax:1 text_fam train.steps=2000
EOF
}

cluster="" zone="" name="" type="" image="" bucket="" project="" spot="" verb=${1:-}
case $verb in
  -h | --help | "") usage; exit 0 ;;
  cluster | image | run | tail | delete | delete-cluster) shift ;;
  *) die "unknown verb $verb (known: cluster, image, run, tail, delete, delete-cluster)" ;;
esac
while [[ ${1:-} == --* ]]; do
  case $1 in
    --spot) spot=--spot; shift; continue ;;
    --dry-run) dry=1; shift; continue ;;
    --help) usage; exit 0 ;;
    --cluster | --zone | --name | --type | --image | --bucket | --project)
      [[ -n ${2:-} ]] || die "$1 needs a value" ;;
    *) die "unknown option $1; see --help" ;;
  esac
  printf -v "${1#--}" %s "$2"
  shift 2
done
check_option_order "$@"
if [[ $verb != image ]]; then
  require "$cluster" --cluster mine
  require "$zone" --zone us-west4-a
fi
case $verb in run | tail | delete) require "$name" --name first ;; esac
case $verb in cluster | run) require "$type" --type v5litepod-32 ;; esac
case $verb in image | run) require "$image" --image us-docker.pkg.dev/my-project/famjax/famjax:1 ;; esac
case $verb in cluster) require "$bucket" --bucket my-runs ;; esac
case $verb in run) [[ $# -gt 0 ]] || die "which config? such as: ... text_fam train.steps=2000" ;; esac

# with_xpk ARGUMENT ...: xpk, on the cluster
with_xpk() {
  need xpk "install it: pip install xpk"
  need_gcloud
  run xpk "$@" "--cluster=$cluster" "--zone=$zone" ${project:+"--project=$project"}
}

make_cluster() {
  with_xpk cluster create "--tpu-type=$type" --num-slices=1 "${spot:---on-demand}" \
    --enable-gcsfuse-csi-driver
  # without a cache every host sees immediately what the first one has written
  with_xpk storage attach runs --type=gcsfuse "--bucket=${bucket#gs://}" --mount-point=/runs \
    --readonly=false --size=1 --auto-mount=true --mount-options=metadata-cache:ttl-secs:0
}

make_image() {
  need docker "see https://docs.docker.com/engine/install"
  # TPU hosts are x86; a Mac would build for ARM
  run docker build --platform=linux/amd64 --file=launch/Dockerfile --build-arg=EXTRA=tpu "--tag=$image" .
  run docker push "$image"
}

# exec, so that famjax itself gets the signal when its host is preempted, and saves. GKE restarts what
# a signal ended; 75 is the status of a host that exited because another was gone. While a host waits
# to be replaced, that is one restart every five minutes.
start() {
  with_xpk workload create "--workload=$name" "--tpu-type=$type" "--docker-image=$image" \
    --max-restarts=1000 --restart-on-exit-codes=75 --termination-grace-period-seconds=120 \
    "--command=exec famjax train $(shell_quote "$@" --run "/runs/$name")"
}

case $verb in
  cluster) make_cluster ;;
  image) make_image ;;
  run) start "$@" ;;
  tail)
    need kubectl "install it: gcloud components install kubectl"
    need_gcloud
    # where xpk creates clusters; kubectl may point to another one
    run gcloud container clusters get-credentials "$cluster" "--region=${zone%-*}" --dns-endpoint \
      ${project:+"--project=$project"}
    run kubectl logs --follow --tail=100 --all-containers \
      "--selector=jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete) with_xpk workload delete "--workload=$name" --force ;;
  delete-cluster) with_xpk cluster delete --force ;;
esac
