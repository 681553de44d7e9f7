"""Launch scripts: shellcheck, the commands they run, and how they handle preempted TPUs."""

from __future__ import annotations

import functools
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch")])
# characters that a shell could interpret
COMMANDS = (
    *("gcloud", "xpk", "kubectl", "docker", "srun", "scontrol", "sudo", "gcsfuse", "curl"),
    *("python3", "famjax", "git", "sleep", "mkdir", "rm", "pkill", "nvidia-smi"),
)

TPU = "--name first --zone us-west4-a --project mine"
GKE = "--cluster c --zone us-west4-a --project mine"
IN = "--zone=us-west4-a --project=mine"
ON = "--cluster=c --zone=us-west4-a --project=mine"
DESCRIBE = f"gcloud compute tpus queued-resources describe first {IN} '--format=value(state.state)'"
INSTALL = [
    "git archive --format=tar.gz --output=/tmp/famjax-first.tar.gz HEAD",
    "gcloud compute tpus tpu-vm scp /tmp/famjax-first.tar.gz first:famjax.tar.gz --quiet "
    f"--worker=all {IN}",
    "gcloud compute tpus tpu-vm ssh first --quiet --worker=all '--command=mkdir -p famjax && "
    "tar -xzf famjax.tar.gz -C famjax && famjax/launch/tpu_worker.sh install gs://b' " + IN,
]
CREATE = (
    "gcloud compute tpus queued-resources create first --node-id=first "
    "--accelerator-type=v5litepod-32 --runtime-version=v2-alpha-tpuv5-lite"
)
FAMJAX = [
    "python3 -m pip install --quiet --user uv",
    "/home/me/.local/bin/uv venv --quiet --allow-existing --python 3.11 /home/me/venv",
    "/home/me/.local/bin/uv pip install --quiet --python /home/me/venv --editable "
    "'/home/me/famjax[tpu]'",
]
DELETE = f"gcloud compute tpus queued-resources delete first --quiet --force {IN}"
STATUS = (
    f"gcloud compute tpus tpu-vm ssh first {IN} --quiet --worker=0 "
    "'--command=famjax/launch/tpu_worker.sh status first text_fam || echo none'"
)


def start(arguments: str) -> str:
    """Return the command that starts training, as parsed by a shell on the worker."""
    remote = f"nohup famjax/launch/tpu_worker.sh train first {arguments} "
    remote += ">>train.log 2>&1 </dev/null &"
    command = "gcloud compute tpus tpu-vm ssh first --quiet --worker=all"
    return shlex.join([*command.split(), f"--command={remote}", *IN.split()])


# local.sh runs the checkout's own famjax, if installed
OWN = ROOT / ".venv/bin/famjax"
FAMJAX_HERE = OWN if OWN.exists() else "famjax"

# commands used by the scripts and by the fakes
TOOLS = ("bash", "basename", "cat", "dirname", "grep", "head", "pgrep", "rm", "sed", "tail", "wc")


@functools.cache
def tools() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with commands that exist everywhere, and no others."""
    folder = tempfile.TemporaryDirectory(prefix="famjax-tests-")
    for name in (*TOOLS, "mountpoint"):
        found = shutil.which(name)
        assert found, name
        (Path(folder.name) / name).symlink_to(found)
    return folder


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """Return a folder of commands that record their arguments and fail."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in COMMANDS:
        fake(folder, name, f'echo "{name} $*" >>{tmp_path}/called; exit 9')
    return folder


def fake(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def recorded_calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "called"
    return path.read_text().splitlines() if path.exists() else []


def script(
    line: str, fakes: Path | None = None, cwd: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of launch/ with its arguments; `fakes` precede all other commands."""
    path = f"{fakes}:{tools().name}" if fakes else tools().name
    name, *arguments = shlex.split(line)
    environment = {"PATH": path, "HOME": "/home/me", "TMPDIR": "/tmp", **more}
    command = ["bash", str(ROOT / "launch" / name), *arguments]
    # not in the checkout, whose .venv slurm.sbatch would prefer
    return subprocess.run(
        command,
        env=environment,
        cwd=cwd or tools().name,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_passes(path: Path) -> None:
    binary = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([binary, path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["tpu_vm.sh", "gke.sh", "gpu.sh", "slurm.sbatch", "local.sh"])
def test_help_shows_the_usage(name: str, fakes: Path, tmp_path: Path) -> None:
    done = script(f"{name} --help", fakes)
    assert (done.returncode, done.stderr, recorded_calls(tmp_path)) == (0, "", [])
    assert f"launch/{name}" in done.stdout
    assert "--dry-run" in done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"tpu_vm.sh create {TPU} --type v5litepod-32", [DESCRIBE, f"{CREATE} {IN}", DESCRIBE]),
        (f"tpu_vm.sh install {TPU} --runs gs://b", INSTALL),
        (
            f'tpu_vm.sh run {TPU} text_fam "data.files=it\'s */x" train.steps=9',
            [start("text_fam 'data.files=it'\\''s */x' train.steps=9")],
        ),
        (
            f"tpu_vm.sh tail {TPU}",
            [
                "gcloud compute tpus tpu-vm ssh first --quiet --worker=0 "
                f"'--command=tail -n 100 -F train.log' {IN}"
            ],
        ),
        (
            f"tpu_vm.sh stop {TPU}",
            [
                "gcloud compute tpus tpu-vm ssh first --quiet --worker=all "
                f"'--command=famjax/launch/tpu_worker.sh stop' {IN}"
            ],
        ),
        (f"tpu_vm.sh delete {TPU}", [DELETE]),
        (
            f"tpu_vm.sh train {TPU} --type v5litepod-32 --spot --runs gs://b text_fam",
            [
                *(DESCRIBE, DESCRIBE, f"{CREATE} --spot {IN}", DESCRIBE, STATUS),
                *(*INSTALL, start("text_fam"), "sleep 60", DESCRIBE, STATUS, DELETE),
            ],
        ),
        (
            "tpu_worker.sh install gs://b",
            [
                "mkdir -p /home/me/runs",
                "gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 b "
                "/home/me/runs",
                *FAMJAX,
            ],
        ),
        (
            "tpu_worker.sh install 10.0.0.2:/share",
            [
                "mkdir -p /home/me/runs",
                "sudo apt-get -qq -o DPkg::Lock::Timeout=600 update",
                "sudo apt-get -qq -o DPkg::Lock::Timeout=600 install -y nfs-common",
                "sudo mount -t nfs 10.0.0.2:/share /home/me/runs",
                "sudo chmod a+rwx /home/me/runs",
                *FAMJAX,
            ],
        ),
        (
            "tpu_worker.sh train first text_fam",
            [
                "rm -f /home/me/train.status /home/me/train.stopped",
                "pkill -TERM -f '/home/me/venv/bin/famjax train'",
                "/home/me/venv/bin/famjax train text_fam --run /home/me/runs/first",
            ],
        ),
        (
            f"gke.sh cluster {GKE} --type v5litepod-32 --bucket gs://b",
            [
                "xpk cluster create --tpu-type=v5litepod-32 --num-slices=1 --on-demand "
                f"--enable-gcsfuse-csi-driver {ON}",
                "xpk storage attach runs --type=gcsfuse --bucket=b --mount-point=/runs "
                "--readonly=false --size=1 --auto-mount=true "
                f"--mount-options=metadata-cache:ttl-secs:0 {ON}",
            ],
        ),
        (
            "gke.sh image --image I:1",
            [
                "docker build --platform=linux/amd64 --file=launch/Dockerfile "
                "--build-arg=EXTRA=tpu --tag=I:1 .",
                "docker push I:1",
            ],
        ),
        (
            f"gke.sh run {GKE} --type v5litepod-32 --image I:1 --name first text_fam 'name=a b'",
            [
                "xpk workload create --workload=first --tpu-type=v5litepod-32 --docker-image=I:1 "
                "--max-restarts=1000 --restart-on-exit-codes=75 "
                "--termination-grace-period-seconds=120 "
                "\"--command=exec famjax train text_fam 'name=a b' --run /runs/first\" " + ON
            ],
        ),
        (
            f"gke.sh tail {GKE} --name first",
            [
                "gcloud container clusters get-credentials c --region=us-west4 --dns-endpoint "
                "--project=mine",
                "kubectl logs --follow --tail=100 --all-containers --selector="
                "jobset.sigs.k8s.io/jobset-name=first,batch.kubernetes.io/job-completion-index=0",
            ],
        ),
        (
            f"gke.sh delete {GKE} --name first",
            [f"xpk workload delete --workload=first --force {ON}"],
        ),
        (f"gke.sh delete-cluster {GKE}", [f"xpk cluster delete --force {ON}"]),
        (
            "slurm.sbatch text_fam 'name=a b'",
            [
                "srun --kill-on-bad-exit=0 --cpus-per-task=8 famjax train text_fam 'name=a b'",
                "scontrol requeue JOB",
            ],
        ),
        ("local.sh eval runs/first", [f"{FAMJAX_HERE} eval runs/first"]),
        (
            "local.sh --fake-devices 8 train text_fam 'name=a b'",
            [
                "env JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 "
                f"{FAMJAX_HERE} train text_fam 'name=a b'"
            ],
        ),
        (
            "gpu.sh text_fam 'name=a b'",
            [
                f"python3 -m venv {ROOT}/.venv",
                f"{ROOT}/.venv/bin/python -m pip install --quiet --editable '{ROOT}[cuda]'",
                f"{ROOT}/.venv/bin/famjax train text_fam 'name=a b'",
            ],
        ),
    ],
)
def test_dry_run_prints_the_command(
    line: str, expected: list[str], fakes: Path, tmp_path: Path
) -> None:
    name, *rest = line.split(" ", 1)
    verb = rest[0].split(" ", 1)
    # after the verb if it takes options, else first
    dry = f"{name} {verb[0]} --dry-run {verb[1]}" if name in ("tpu_vm.sh", "gke.sh") else ""
    done = script(dry or f"{name} --dry-run {rest[0]}", fakes)
    assert done.returncode == 0, done.stderr
    # compared after parsing, since quoting may differ
    printed = [shlex.split(line) for line in done.stdout.splitlines()]
    assert printed == [shlex.split(line) for line in expected]
    assert recorded_calls(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "tpu_vm.sh fly",
            "unknown verb fly (known: train, create, install, run, tail, stop, delete)",
        ),
        ("tpu_vm.sh create --name a", "--zone is missing; give it, such as --zone us-west4-a"),
        ("tpu_vm.sh create --zone a", "--name is missing"),
        (f"tpu_vm.sh create {TPU}", "--type is missing; give it, such as --type v5litepod-8"),
        (f"tpu_vm.sh create {TPU} --type", "--type needs a value"),
        (f"tpu_vm.sh create {TPU} --tipe v5p-8", "unknown option --tipe"),
        (f"tpu_vm.sh create {TPU} --type h100 --dry-run", "--type h100 is not of a known kind"),
        (f"tpu_vm.sh install {TPU}", "--runs is missing; give it, such as --runs gs://my-runs"),
        (f"tpu_vm.sh install {TPU} --runs gs://a/b", "--runs gs://a/b is neither gs://BUCKET"),
        (f"tpu_vm.sh install {TPU} --runs runs", "--runs runs is neither"),
        (f"tpu_vm.sh run {TPU}", "which config? such as: ... text_fam"),
        (f"tpu_vm.sh tail {TPU}", "gcloud is not installed; see https://cloud.google.com/sdk"),
        (f"gke.sh delete {GKE} --name a", "xpk is not installed; install it: pip install xpk"),
        (f"gke.sh tail {GKE} --name a", "kubectl is not installed; install it: gcloud components"),
        ("gke.sh image --image a", "docker is not installed; see https://docs.docker.com"),
        ("gke.sh image", "--image is missing; give it, such as --image us-docker.pkg.dev/"),
        ("gke.sh run --zone a", "--cluster is missing"),
        (f"gke.sh run {GKE} --type a --image b --name c", "which config?"),
        ("slurm.sbatch", "which config? such as: sbatch launch/slurm.sbatch text_fam"),
        ("slurm.sbatch text_fam", "is for sbatch; on one machine: launch/gpu.sh text_fam"),
        ("gpu.sh text_fam", "nvidia-smi is not installed; install NVIDIA's driver"),
        ("gpu.sh --dry-run", "which config? such as: launch/gpu.sh text_fam"),
        (
            "local.sh --fake-devices train text_fam",
            "--fake-devices needs a number: launch/local.sh",
        ),
        ("local.sh train text_fam --dry-run", "--dry-run comes after the config; put it"),
        ("tpu_worker.sh", "is called by tpu_vm.sh"),
        (f"tpu_vm.sh run {TPU} text_fam --dry-run", "--dry-run comes after the config; put it"),
        (f"tpu_vm.sh run {TPU} text_fam --spot", "--spot comes after the config; put it before"),
        ("gpu.sh text_fam --dry-run", "--dry-run comes after the config; put it before"),
        ("slurm.sbatch text_fam --dry-run", "--dry-run comes after the config; put it before"),
    ],
)
def test_mistakes_are_one_line_errors(line: str, said: str) -> None:
    done = script(line)
    assert (done.returncode, done.stdout) == (2, "")
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"{line.split()[0]}: {said}")


@pytest.mark.parametrize("answer", ["", "(unset)"])
def test_a_missing_project_is_a_one_line_error(answer: str, fakes: Path) -> None:
    fake(fakes, "gcloud", f'[[ $1 == config ]] && echo "{answer}"')
    done = script("tpu_vm.sh delete --name a --zone b", fakes)
    assert done.returncode == 2
    assert done.stderr == (
        "tpu_vm.sh: no project; give --project ID, or set one: gcloud config set project ID\n"
    )


# A fake cloud: `states` and `ends` have one line per answer of the queue and the training, the last
# of which repeats; calls that change something are recorded.
CLOUD = """
cd {folder}
next() {{
  head -n 1 "$1"
  [[ $(wc -l <"$1") -le 1 ]] || sed -i 1d "$1"
}}
case "$*" in
  *queued-resources\\ describe*)
    next states >now
    case $(cat now) in
      NONE) echo "ERROR: NOT_FOUND: no such thing" >&2; exit 1 ;;
      DOWN) echo "ERROR: no network" >&2; exit 1 ;;
      *) cat now ;;
    esac ;;
  *tpu-vm\\ describe*) cat node 2>/dev/null || echo READY ;;
  *tpu_worker.sh\\ status\\ first\\ text_fam\\ *)
    next ends >end
    [[ $(cat end) != LOST ]] || exit 255
    cat end ;;
  *queued-resources\\ create*) echo create >>called ;;
  *queued-resources\\ delete*) /bin/rm -f node; echo delete >>called ;;
  *tpu_worker.sh\\ install*) echo install >>called ;;
  *tpu_worker.sh\\ train*) echo train >>called ;;
esac
"""


def watch(
    tmp_path: Path, fakes: Path, states: list[str], ends: list[str], cloud: str = CLOUD
) -> subprocess.CompletedProcess[str]:
    """Call `tpu_vm.sh train` in a cloud with these answers."""
    fake(fakes, "gcloud", cloud.format(folder=tmp_path))
    fake(fakes, "sleep", "exit")
    fake(fakes, "git", "exit")
    for name, lines in (("states", states), ("ends", ends)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    line = f"tpu_vm.sh train {TPU} --type v5litepod-8 --spot --runs gs://b text_fam"
    return script(line, fakes)


def test_training_continues_after_each_preemption(tmp_path: Path, fakes: Path) -> None:
    # the state is queried by the loop, then before a request, then until there is a TPU
    first = ["NONE", "NONE", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    taken = ["ACTIVE", "DOWN", "ACTIVE", "SUSPENDING", "SUSPENDING", "SUSPENDED"]
    failed = ["SUSPENDED", "SUSPENDED", "FAILED"]
    back = ["FAILED", "FAILED", "WAITING_FOR_RESOURCES", "ACTIVE"]
    done = watch(
        tmp_path,
        fakes,
        [*first, *taken, *failed, *back],
        ["none", "running", "LOST", "143", "none", "running", "0"],
    )
    assert done.returncode == 0, done.stderr
    assert recorded_calls(tmp_path) == [
        *("create", "install", "train"),
        "train",  # it was asked to end before the TPU was reported lost
        *("delete", "create", "delete", "create", "install", "train"),
        "delete",
    ]


def test_a_tpu_preempted_while_the_queue_says_active_is_replaced(
    tmp_path: Path, fakes: Path
) -> None:
    (tmp_path / "node").write_text("PREEMPTED\n")
    done = watch(tmp_path, fakes, ["ACTIVE"], ["none", "0"])
    assert done.returncode == 0, done.stderr
    assert recorded_calls(tmp_path) == ["delete", "create", "install", "train", "delete"]


def test_a_mistake_is_not_retried(tmp_path: Path, fakes: Path) -> None:
    done = watch(tmp_path, fakes, ["ACTIVE"], ["none", "running", "2"])
    assert done.returncode == 2
    assert recorded_calls(tmp_path) == ["install", "train"]
    assert done.stderr.splitlines()[-1].startswith("tpu_vm.sh: famjax reported a mistake; see tail")
    assert "costs money: launch/tpu_vm.sh delete --name first" in done.stderr


def test_a_stopped_training_is_not_restarted(worker: Path, tmp_path: Path, fakes: Path) -> None:
    home = {"HOME": str(worker)}
    (worker / "end").write_text("143")
    fake(fakes, "touch", '/bin/touch "$@"')
    script("tpu_worker.sh train first text_fam", fakes, **home)
    script("tpu_worker.sh stop", fakes, **home)
    assert script("tpu_worker.sh status first text_fam", fakes, **home).stdout == "stopped\n"
    done = watch(tmp_path, fakes, ["ACTIVE"], ["running", "stopped"])
    assert done.returncode == 0
    assert "train" not in recorded_calls(tmp_path)
    assert "stopped, and saved. The TPU still exists" in done.stderr


@pytest.mark.parametrize("end", ["1", "2", "stopped", "143"])
def test_a_training_that_ended_before_is_installed_and_started_again(
    end: str, tmp_path: Path, fakes: Path
) -> None:
    done = watch(tmp_path, fakes, ["ACTIVE"], [end, "running", "0"])
    assert done.returncode == 0, done.stderr
    assert recorded_calls(tmp_path) == ["install", "train", "delete"]


def test_the_end_of_another_training_does_not_count(worker: Path, fakes: Path) -> None:
    home = {"HOME": str(worker)}
    script("tpu_worker.sh train first text_fam 'data.files=a b'", fakes, **home)
    for arguments, status in (("text_fam 'data.files=a b'", "0"), ("text_fam", "another")):
        line = f"tpu_worker.sh status first {arguments}"
        assert script(line, fakes, **home).stdout == f"{status}\n"


def test_another_training_ends_the_polling_of_this_one(tmp_path: Path, fakes: Path) -> None:
    done = watch(tmp_path, fakes, ["ACTIVE"], ["another", "running", "another"])
    assert done.returncode == 2
    assert recorded_calls(tmp_path) == ["install", "train"]
    assert "another training was started on first, so this call ends" in done.stderr


@pytest.mark.long
def test_failures_long_after_each_other_do_not_end_the_loop(tmp_path: Path, fakes: Path) -> None:
    ends = [end for _ in range(7) for end in ("1", *["running"] * 30)]
    done = watch(tmp_path, fakes, ["ACTIVE"], [*ends, "0"])
    assert done.returncode == 0, done.stderr
    assert recorded_calls(tmp_path) == ["install", *["train"] * 7, "delete"]


@pytest.mark.long
def test_a_worker_that_never_answers_ends_the_loop(tmp_path: Path, fakes: Path) -> None:
    done = watch(tmp_path, fakes, ["ACTIVE"], ["running", "LOST"])
    assert done.returncode == 2
    assert "no answer from the worker for an hour; see ssh's message" in done.stderr
    assert "The TPU still exists and costs money" in done.stderr


@pytest.mark.long
def test_a_gcloud_that_never_answers_ends_the_wait_for_a_tpu(tmp_path: Path, fakes: Path) -> None:
    # the first answer is that there is no TPU; then it is requested
    asked = tmp_path / "asked"
    fake(
        fakes,
        "gcloud",
        f"""case "$*" in
          *describe*)
            if [[ -e {asked} ]]; then echo no login >&2; else echo NOT_FOUND >&2; fi
            echo >{asked}
            exit 1 ;;
          *create*) echo create >>{tmp_path}/called ;;
          *) echo p ;;
        esac""",
    )
    fake(fakes, "sleep", f'echo "sleep $*" >>{tmp_path}/called')
    arguments = f"{TPU} --project p --type v5litepod-8"
    done = script(f"tpu_vm.sh create {arguments}", fakes, TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert recorded_calls(tmp_path) == ["create", *["sleep 60"] * 59]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tpu_vm.sh: gcloud has not answered for an hour; see its message above")
    assert last.endswith("launch/tpu_vm.sh delete --name first --zone us-west4-a --project p")


@pytest.mark.parametrize("verb", ["create", "train"])
def test_without_an_answer_from_gcloud_nothing_is_requested(
    verb: str, tmp_path: Path, fakes: Path
) -> None:
    fake(fakes, "gcloud", 'case "$*" in *describe*) echo no login >&2; exit 1 ;; esac; echo p')
    more = "--runs gs://b text_fam" if verb == "train" else ""
    done = script(f"tpu_vm.sh {verb} {TPU} --type v5litepod-8 {more}", fakes, TMPDIR=str(tmp_path))
    assert (done.returncode, recorded_calls(tmp_path)) == (2, [])
    assert "gcloud cannot tell the state of first: no login" in done.stderr


def test_runs_are_mounted_again_before_training(worker: Path, fakes: Path, tmp_path: Path) -> None:
    home = {"HOME": str(worker)}
    (worker / "place").write_text("gs://b\n")
    for name in ("mkdir", "gcsfuse"):
        fake(fakes, name, f'echo "{name} $*" >>{tmp_path}/called')
    script("tpu_worker.sh train first text_fam", fakes, **home)
    assert [call for call in recorded_calls(tmp_path) if call.startswith("gcsfuse")] == [
        f"gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 b {worker}/runs"
    ]
    assert (worker / "words").exists()
    # gcsfuse was killed: the mount is there and cannot be read
    (worker / "words").unlink()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"gcsfuse {worker}/runs fuse.gcsfuse rw 0 0\n")
    fake(
        fakes, "grep", f'[[ $3 != /proc/mounts ]] || exec {shutil.which("grep")} "$1" "$2" {mounts}'
    )
    fake(fakes, "ls", "exit 2")
    fake(fakes, "sudo", f'echo "sudo $*" >>{tmp_path}/called')
    (tmp_path / "called").unlink()
    script("tpu_worker.sh train first text_fam", fakes, **home)
    called = [call.split()[0] for call in recorded_calls(tmp_path)]
    assert f"sudo umount -l {worker}/runs" in recorded_calls(tmp_path)
    assert called.index("sudo") < called.index("gcsfuse")
    assert (worker / "words").exists()
    # nothing is trained on the worker's own disk
    (worker / "words").unlink()
    fake(fakes, "gcsfuse", "exit 1")
    script("tpu_worker.sh train first text_fam", fakes, **home)
    assert not (worker / "words").exists()
    assert script("tpu_worker.sh status first text_fam", fakes, **home).stdout == "none\n"


def test_an_earlier_call_does_not_write_the_status_of_a_later_one(
    worker: Path, fakes: Path
) -> None:
    home = {"HOME": str(worker)}
    # another call begins while this one trains
    fake(worker / "venv/bin", "famjax", f"echo 1 >{worker}/train.pid; exit 137")
    script("tpu_worker.sh train first text_fam", fakes, **home)
    assert script("tpu_worker.sh status first text_fam", fakes, **home).stdout == "none\n"


def test_repeated_failures_end_the_loop(tmp_path: Path, fakes: Path) -> None:
    done = watch(tmp_path, fakes, ["ACTIVE"], ["1"])
    assert done.returncode == 2
    assert recorded_calls(tmp_path) == ["install", *["train"] * 5]
    assert "the training failed five times" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("line", ["create", "train --runs gs://b"])
def test_a_rejected_request_ends_the_loop(line: str, fakes: Path) -> None:
    said = '*describe*) echo NOT_FOUND >&2 ;; *) echo "quota exceeded" >&2 ;;'
    fake(fakes, "gcloud", f'case "$*" in {said} esac; exit 1')
    config = " text_fam" if line != "create" else ""
    done = script(f"tpu_vm.sh {line} {TPU} --type v5p-8{config}", fakes)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "quota exceeded",
        "tpu_vm.sh: the request was refused; see gcloud's message above (quota, zone, type)",
    ]


def test_a_request_that_is_refused_after_a_preemption_is_repeated(
    tmp_path: Path, fakes: Path
) -> None:
    created = "create*) echo create >>called"
    second = f"{created}; [[ $(grep -c create called) -ne 2 ]]"
    states = ["NONE", "NONE", "ACTIVE", "ACTIVE", "NONE", "NONE", "NONE", "NONE", "ACTIVE"]
    ends = ["none", "running", "none", "0"]
    done = watch(tmp_path, fakes, states, ends, cloud=CLOUD.replace(created, second))
    assert done.returncode == 0, done.stderr
    assert recorded_calls(tmp_path).count("create") == 3
    assert "the request was refused" in done.stderr


@pytest.fixture
def worker(tmp_path: Path, fakes: Path) -> Path:
    """Return the home folder of a worker with famjax installed, which records its arguments."""
    home = tmp_path / "home"
    for folder in ("venv/bin", "famjax"):
        (home / folder).mkdir(parents=True)
    (home / "famjax" / "launch").symlink_to(ROOT / "launch")
    fake(home / "venv/bin", "famjax", f'printf "%s\\n" "$@" >{home}/words; exit $(cat {home}/end)')
    fake(fakes, "rm", '/bin/rm "$@"')
    (home / "end").write_text("0")
    return home


@pytest.mark.parametrize("status", [0, 2, 143])
def test_a_worker_returns_the_status_of_the_training(
    worker: Path, fakes: Path, status: int
) -> None:
    (worker / "end").write_text(str(status))
    home = {"HOME": str(worker)}
    assert script("tpu_worker.sh status first text_fam", fakes, **home).stdout == "none\n"
    script("tpu_worker.sh train first text_fam", fakes, **home)
    assert script("tpu_worker.sh status first text_fam", fakes, **home).stdout == f"{status}\n"


def test_a_running_training_ends_before_the_next_starts(
    worker: Path, fakes: Path, tmp_path: Path
) -> None:
    """It is signaled once, polled until it ends, and not killed."""
    fake(fakes, "pkill", f'echo "pkill $*" >>{tmp_path}/called')
    looks = f"{tmp_path}/looks"
    fake(fakes, "pgrep", f"echo x >>{looks}; [[ $(grep -c x {looks}) -lt 3 ]]")
    fake(fakes, "sleep", f"echo sleep >>{tmp_path}/called")
    script("tpu_worker.sh train first text_fam", fakes, HOME=str(worker))
    told = f"pkill -TERM -f {worker}/venv/bin/famjax train"
    assert recorded_calls(tmp_path) == [told, "sleep", "sleep", "sleep"]
    assert (worker / "words").exists()


ARGUMENTS = ["text_fam", 'data.files=it\'s "here"/*.txt', "name=$HOME & co", "train.steps=9"]


def test_arguments_on_a_tpu_are_passed_unchanged(worker: Path, fakes: Path) -> None:
    given = shlex.join(ARGUMENTS)
    printed = script(f"tpu_vm.sh run --dry-run {TPU} {given}", fakes).stdout
    (command,) = [w for w in shlex.split(printed) if w.startswith("--command=")]
    remote = command.removeprefix("--command=").removesuffix("&")
    path = f"{fakes}:{tools().name}"
    environment = {
        "HOME": str(worker),
        "PATH": f"{path}:{Path(shutil.which('nohup') or '').parent}",
    }
    subprocess.run(["bash", "-c", remote], cwd=worker, env=environment, check=True, timeout=60)
    words = (worker / "words").read_text().splitlines()
    assert words == ["train", *ARGUMENTS, "--run", f"{worker}/runs/first"]


def test_arguments_on_gke_are_passed_unchanged(fakes: Path, tmp_path: Path) -> None:
    given = shlex.join(ARGUMENTS)
    line = f"gke.sh run --dry-run {GKE} --type v5p-8 --image I --name first {given}"
    (command,) = [w for w in shlex.split(script(line, fakes).stdout) if w.startswith("--command=")]
    fake(fakes, "famjax", f'printf "%s\\n" "$@" >{tmp_path}/words')
    inside = f"({command.removeprefix('--command=')}) & wait $!"
    environment = {"HOME": "/home/me", "PATH": f"{fakes}:{tools().name}"}
    subprocess.run(["bash", "-c", inside], env=environment, check=True, timeout=60)
    words = (tmp_path / "words").read_text().splitlines()
    assert words == ["train", *ARGUMENTS, "--run", "/runs/first"]


def slurm(status: int, tmp_path: Path, fakes: Path, seconds: int = 0) -> tuple[bool, str]:
    """Run a job that ends with a status; return whether it is requeued, and its errors."""
    fake(fakes, "srun", f'echo "srun $*"; exit {status}')
    fake(fakes, "scontrol", f'echo "scontrol $*" >>{tmp_path}/called')
    for name in ("mkdir", "rm"):
        fake(fakes, name, f'{shutil.which(name)} "$@"')
    (tmp_path / "called").unlink(missing_ok=True)
    # Bash counts on from SECONDS in the environment
    more = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3", "SECONDS": str(seconds)}
    done = script("slurm.sbatch text_fam 'name=a b'", fakes, cwd=str(tmp_path), **more)
    assert done.returncode == status
    assert done.stdout.startswith("srun --kill-on-bad-exit=0 --cpus-per-task=3 ")
    assert done.stdout.endswith("famjax train text_fam name=a b\n")
    called = recorded_calls(tmp_path)
    assert called in ([], ["scontrol requeue 7"])
    return bool(called), done.stderr


@pytest.mark.parametrize(
    ("status", "again"),
    [
        *((status, False) for status in (0, 2, 130)),
        *((status, True) for status in (1, 75, 137, 143)),
    ],
)
def test_slurm_requeues_a_training_that_may_continue(
    status: int, again: bool, tmp_path: Path, fakes: Path
) -> None:
    assert slurm(status, tmp_path, fakes) == (again, "")


def test_slurm_requeues_after_five_failures_in_a_row(tmp_path: Path, fakes: Path) -> None:
    """A training that was stopped and has saved begins the count anew."""
    for status in (75, 137, 1, 143, 75, 75, 75, 75, 137):
        assert slurm(status, tmp_path, fakes) == (True, "")
    # after half an hour of training, too
    assert slurm(75, tmp_path, fakes, seconds=1800) == (True, "")
    for status in (75, 1, 137, 75):
        assert slurm(status, tmp_path, fakes, seconds=1700) == (True, "")
    again, said = slurm(75, tmp_path, fakes)
    assert not again
    assert said == "slurm.sbatch: failed 6 times in a row; not requeued\n"


def test_paths_copied_by_the_dockerfile_exist() -> None:
    """The ignore file excludes everything except the copied paths."""
    copied = [
        word
        for line in (ROOT / "launch/Dockerfile").read_text().splitlines()
        if line.startswith("COPY")
        for word in line.split()[1:-1]
    ]
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout's scripts, with a virtual environment that has famjax."""
    home = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", home / "launch")
    (home / ".venv/bin").mkdir(parents=True)
    fake(home / ".venv/bin", "python", f'PYTHONPATH={ROOT} exec {sys.executable} "$@"')
    return home


@pytest.mark.parametrize("line", ["gpu.sh --dry-run", "local.sh --dry-run train"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("text_fam train.stps=9", "famjax: unknown key 'train.stps'; did you mean 'train.steps'?"),
        ("text_fan", "famjax: unknown config 'text_fan'; did you mean 'text_fam'?"),
        ("text_fam data.length=1000", "famjax: data.length=1000 is not a multiple of model.block"),
    ],
)
def test_a_dry_run_rejects_what_training_would(
    line: str, given: str, said: str, checkout: Path
) -> None:
    done = dry_run(checkout, f"{line} {given}")
    assert (done.returncode, done.stdout) == (2, "")
    (told,) = done.stderr.splitlines()
    assert told.startswith(said)


@pytest.mark.parametrize("line", ["gpu.sh --dry-run", "local.sh --dry-run train"])
def test_a_dry_run_accepts_what_training_would(line: str, checkout: Path) -> None:
    done = dry_run(checkout, f"{line} text_fam train.steps=9 --run here")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith("famjax train text_fam train.steps=9 --run here")


@pytest.mark.parametrize("line", ["gpu.sh --dry-run", "local.sh --dry-run train"])
def test_a_dry_run_without_famjax_reports_that_nothing_was_checked(
    line: str, checkout: Path
) -> None:
    fake(checkout / ".venv/bin", "python", "exit 1")
    done = dry_run(checkout, f"{line} text_fam train.stps=9")
    assert done.returncode == 0
    assert "is not installed" in done.stderr
    assert "not checked" in done.stderr


def dry_run(checkout: Path, line: str) -> subprocess.CompletedProcess[str]:
    name, *arguments = shlex.split(line)
    return subprocess.run(
        ["bash", str(checkout / "launch" / name), *arguments],
        env={"PATH": tools().name, "HOME": "/home/me"},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
    )
