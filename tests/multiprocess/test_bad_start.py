"""Processes that cannot train together fail quickly, each with a one-line error."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from jax._src import clusters
from small import config
from spawn import flags, free_port, start, wait_all

from famjax.cli.main import main
from famjax.core.errors import EXIT_PEER_LOST, EXIT_USER_ERROR, UserError
from famjax.experiment.load import override, to_json
from famjax.processes import collective


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, None, "4"), "--coordinator and --process-id missing: several processes need"),
        (("10.0.0.2:8476", None, None), "--process-id and --process-count missing"),
        (("10.0.0.2", "0", "2"), "--coordinator 10.0.0.2: not an address"),
        (("10.0.0.2:8476", "2", "2"), "--process-id 2: out of range for --process-count 2; take 0"),
        (("10.0.0.2:8476", "-1", "2"), "--process-id -1: must be an integer of at least 0"),
        (("10.0.0.2:8476", "0", "0"), "--process-count 0: must be an integer of at least 1"),
    ],
)
def test_invalid_flags_are_rejected(given: tuple[str | None, ...], said: str) -> None:
    with pytest.raises(UserError) as error:
        collective.parse_flags(*given)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_slurm_variables_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm variables are detected for one process and for several."""
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node[003-004]", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert collective.detect() is None
    collective.check_single_process("eval")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    info = collective.detect()
    assert info is not None
    assert (info.index, info.count) == (1, 2)
    assert info.coordinator.startswith("node003:")
    with pytest.raises(UserError, match="famjax eval runs in one process, and 2 were started"):
        collective.check_single_process("eval")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TimeoutError("the metadata server"), EXIT_PEER_LOST),
        (RuntimeError("Failed to recognize coordinator address a:1"), EXIT_PEER_LOST),
        (RuntimeError("In K8s, cluster automatic bootstrap only supports Job"), EXIT_USER_ERROR),
        (KeyError("TPU_WORKER_HOSTNAMES"), EXIT_USER_ERROR),
    ],
)
def test_only_what_may_pass_is_worth_another_try(
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(clusters.ClusterEnv, "_cluster_types", [])

    class Cluster(clusters.ClusterEnv):  # registers itself in the list
        opt_in_only_method = False

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_process_count(cls) -> int:
            raise error

    assert main(["train", "text_fam"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("famjax: the environment (")
    assert line.endswith("or --process-count 1")
    assert ("run again" in line) == (status == EXIT_PEER_LOST)
    assert type(error).__name__ in line


@pytest.mark.long
def test_a_port_that_is_in_use_is_worth_another_try(tmp_path: Path, path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        arguments = [str(path), f"--run={tmp_path / 'run'}"]
        process = start([*arguments, *flags(0, 2, other.getsockname()[1])])
        ((status, said),) = wait_all([process])
    assert status == EXIT_PEER_LOST
    assert "process 0 of 2 cannot listen at 127.0.0.1:" in said
    assert "another process does; wait for an earlier training to end" in said
    assert "Traceback" not in said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(to_json(override(config(tmp_path / "texts"), ["data.batch=4"])))
    return path


@pytest.mark.long
def test_different_settings_and_unshared_folders_are_rejected(tmp_path: Path, path: Path) -> None:
    """Every process prints a line that names the process and what differs."""
    port, runs = free_port(), [tmp_path / "a", tmp_path / "b"]
    given = [["seed=0"], ["seed=3"]]
    processes = [
        start([str(path), f"--run={runs[0]}", *more, *flags(i, 2, port)])
        for i, more in enumerate(given)
    ]
    for status, said in wait_all(processes):
        assert status == 2
        assert said.splitlines()[-1].endswith(
            "process 1 of 2 has other settings than process 0 (seed: 0 -> 3); start all with the "
            "same command, config and famjax"
        )
    assert not runs[0].exists()

    port = free_port()
    short_timeout = "from famjax.train import hosts; hosts._VISIBLE_SECONDS = 1.0"
    processes = [
        start([str(path), f"--run={run}", *flags(i, 2, port)], more=short_timeout)
        for i, run in enumerate(runs)
    ]
    for status, said in wait_all(processes):
        assert status == 2
        assert "is not shared: process 1 of 2 does not see what process 0 wrote there" in said
        assert "Traceback" not in said


# Imports take seconds, longer on a loaded machine; processes connect when all have finished them.
WAIT_FOR_IMPORTS = """
import pathlib, time
import famjax.train.loop
folder = pathlib.Path({folder!r})
(folder / "ready-{index}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.05)
"""


# without a service there is no timeout of its own that must come first, for which 10 seconds are
# added to that of the others
WAIT_BRIEFLY = """
import jax
initialize = jax.distributed.initialize
def initialize_briefly(*args, **given):
    initialize(*args, **given | {"initialization_timeout": 2})
jax.distributed.initialize = initialize_briefly
"""


@pytest.mark.long
def test_error_names_missing_processes(tmp_path: Path, path: Path) -> None:
    """One of three processes is missing, and one process waits at an address without a service."""
    port = free_port()
    run = f"--run={tmp_path / 'run'}"
    processes = [
        start(
            [str(path), run, *flags(i, 3, port)],
            patience=5,
            more=WAIT_FOR_IMPORTS.format(folder=str(tmp_path), index=i),
        )
        for i in (0, 2)
    ]
    arguments = [str(path), run, *flags(1, 2, free_port())]
    alone = start(arguments, patience=1, more=WAIT_BRIEFLY)
    *missing, (status, said) = wait_all([*processes, alone])
    assert said.splitlines()[-1].startswith("famjax: no answer at 127.0.0.1:")
    assert status == 75
    for status, said in missing:
        assert status == 75
        assert said.splitlines()[-1] == (
            f"famjax: process 1 of 3 did not connect to 127.0.0.1:{port} within 5 seconds; check "
            "their output, and start all processes again"
        )
        assert "stack trace" not in said
    assert missing[0][1].startswith(f"waiting for 3 processes at 127.0.0.1:{port}\n")
