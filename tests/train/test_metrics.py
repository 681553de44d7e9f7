"""metrics.jsonl is strict JSON and resumable, and damage is reported."""

from __future__ import annotations

import errno
import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from famjax.core.errors import UserError
from famjax.train.metrics import MetricsWriter, read_metrics


def write(folder, steps, resume=None):
    with MetricsWriter(folder, resume) as writer:
        for step in steps:
            writer.write(step, {"loss": 1 / (step + 1)})


def test_rows_and_scalar_types(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(3, {"loss": jnp.float32(0.5), "tokens": np.int64(7), "stage": "warm", "n": 1})
        text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 3, "loss": 0.5, "tokens": 7, "stage": "warm", "n": 1}\n'
    assert list((tmp_path / "tensorboard").iterdir())


def test_each_row_is_flushed(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"loss": 1.0})
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_non_finite_numbers_are_strict_json(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"a": math.nan, "b": jnp.float32(math.inf), "c": -math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "a": "nan",
        "b": "inf",
        "c": "-inf",
    }
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path):
    write(tmp_path / "whole", range(0, 60, 5))
    write(tmp_path / "cut", range(0, 40, 5))
    with (tmp_path / "cut/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 40, "lo')
    write(tmp_path / "cut", range(25, 60, 5), resume=20)
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]
    assert not list(tmp_path.rglob("*.tmp"))


def test_restarting_drops_all_rows(tmp_path):
    write(tmp_path, [0, 1, 2])
    write(tmp_path, [0, 1])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_last_line_without_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    write(tmp_path, [3], resume=2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("torn", ['{"st', '{"step": 2, "loss": 1.', '"x"', "\x00\x00"])
def test_an_incomplete_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    assert read_metrics(path) == [{"step": 1}]


def test_error_names_a_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is damaged"):
        read_metrics(path)
    with pytest.raises(UserError, match="line 2 is damaged"):
        MetricsWriter(tmp_path, 3)
    assert "2}" in path.read_text()


def test_a_huge_file_is_not_read_into_memory(tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(10**12)  # sparse: uses no disk space
    with pytest.raises(UserError, match="line 1 is damaged"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_missing_and_empty_files_have_no_rows(tmp_path):
    with pytest.raises(UserError, match="no metrics"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").touch()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_full_disk_leaves_complete_rows(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"loss": 1.0})
        whole = writer._file

        class Full:
            def fileno(self):
                return whole.fileno()

            def write(self, line):
                return whole.write(line[:5])

        writer._file = Full()
        with pytest.raises(UserError, match=r"cannot write .*free some space"):
            writer.write(2, {"loss": 1.0})
        writer._file = whole
        writer.write(3, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]


def test_a_full_disk_stops_tensorboard_and_does_not_block(tmp_path):
    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = MetricsWriter(tmp_path, None)
    events = writer._board._events
    flush, events._py_recordio_writer.flush = events._py_recordio_writer.flush, fail
    for step in (1, 2):
        with pytest.raises(UserError, match=r"cannot write .*tensorboard: No space left .* resume"):
            writer.write(step, dict.fromkeys(map(str, range(100)), 1.0))
    events._py_recordio_writer.flush = flush
    writer.write(3, {"loss": 1.0})
    writer.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes()


def test_a_full_disk_at_the_end_hides_no_earlier_error(tmp_path):
    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def end(error):
        with MetricsWriter(tmp_path, None) as writer:
            writer._board._events._py_recordio_writer.flush = fail
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        end(KeyboardInterrupt())
    with pytest.raises(UserError, match=r"cannot write .*tensorboard"):
        end(None)


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "run").write_text("a file where the run's folder should be")
    with pytest.raises(UserError, match="cannot write"):
        MetricsWriter(tmp_path / "run", None)


def test_a_pipe_does_not_block(tmp_path):
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    for read in (lambda: MetricsWriter(tmp_path, 1), lambda: read_metrics(path)):
        with pytest.raises(UserError, match="not a regular file"):
            read()


def test_tensorboard_purges_repeated_steps(tmp_path):
    write(tmp_path, [25], resume=20)
    (file,) = (tmp_path / "tensorboard").iterdir()
    version, purge, start, row = read_events(file.read_bytes())
    assert version.file_version == purge.file_version == "brain.Event:2"
    assert purge.step == start.step == 21
    assert start.session_log.status == start.session_log.START
    assert row.step == 25
    assert {each.tag: each.simple_value for each in row.summary.value} == {
        "loss": pytest.approx(1 / 26)
    }


def read_events(data):
    """Return the events of a file: each has its size, two checksums of 4 bytes and the message."""
    found = []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found
