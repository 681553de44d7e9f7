#!/usr/bin/env bash
# famjax train on TPUs of a GKE cluster, by xpk; see usage below and docs/launch.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=lib.sh
. launch/lib.sh

usage() {
  cat <<'EOF'
usage: launch/gke.sh VERB --cluster CLUSTER --zone ZONE [option ...] [CONFIG key=value ...]

  cluster          make the cluster, with one slice of TPUs and the bucket at /runs
  image            build the image of this checkout and push it
  run              start famjax train; a run that is there goes on. GKE brings a slice back that was
                   taken away, and the training goes on from the last checkpoint, up to 100 times
  tail             follow the log of the first host
  delete           end the training; what is in the bucket stays
  delete-cluster   give everything back but the bucket

  --cluster NAME   of the cluster
  --zone ZONE      such as us-west4-a
  --name NAME      run, tail, delete: of the run, kept at gs://BUCKET/NAME
  --type TYPE      cluster, run: such as v5litepod-32
  --image IMAGE    image, run: such as us-docker.pkg.dev/PROJECT/famjax/famjax:1
  --bucket BUCKET  cluster: made with --enable-hierarchical-namespace
  --project ID     gcloud's own if left out
  --spot           cluster: cheaper, and may be taken away at any moment
  --dry-run        print every command, one a line, and run none

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
own_first "$@"
if [[ $verb != image ]]; then
  given "$cluster" --cluster mine
  given "$zone" --zone us-west4-a
fi
case $verb in run | tail | delete) given "$name" --name first ;; esac
case $verb in cluster | run) given "$type" --type v5litepod-32 ;; esac
case $verb in image | run) given "$image" --image us-docker.pkg.dev/my-project/famjax/famjax:1 ;; esac
case $verb in cluster) given "$bucket" --bucket my-runs ;; esac
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
  # without a cache every host sees at once what the first one has written
  with_xpk storage attach runs --type=gcsfuse "--bucket=${bucket#gs://}" --mount-point=/runs \
    --readonly=false --size=1 --auto-mount=true --mount-options=metadata-cache:ttl-secs:0
}

make_image() {
  need docker "see https://docs.docker.com/engine/install"
  run docker build --file=launch/Dockerfile --build-arg=EXTRA=tpu "--tag=$image" .
  run docker push "$image"
}

# exec, so that famjax itself is told when its host is taken away, and saves. GKE starts again what a
# signal ended; 75 is the status of a host that ended because another was gone.
start() {
  with_xpk workload create "--workload=$name" "--tpu-type=$type" "--docker-image=$image" \
    --max-restarts=100 --restart-on-exit-codes=75 --termination-grace-period-seconds=120 \
    "--command=exec famjax train $(shown "$@" --run "/runs/$name")"
}

case $verb in
  cluster) make_cluster ;;
  image) make_image ;;
  run) start "$@" ;;
  tail)
    need kubectl "install it: gcloud components install kubectl"
    run kubectl logs --follow --tail=100 --all-containers \
      "--selector=jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete) with_xpk workload delete "--workload=$name" --force ;;
  delete-cluster) with_xpk cluster delete --force ;;
esac
