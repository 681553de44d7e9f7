"""Trainings of experiments run in processes: in which order, how many at once, for how long."""

import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from experiment_helpers import COPY, reproduce

from famjax.core.errors import UserError
from famjax.reproduce.cell import Cell
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.runner import (
    Runner,
    expected_seconds,
    make_cells,
    reason_of_failure,
    split_cores,
)
from famjax.train.lock import hold


@pytest.mark.long
def test_a_failure_is_told_and_the_rest_is_done_later(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAILS", "Feedback")
    assert reproduce(tmp_path, COPY, "--seeds", "1", "--jobs", "1") == 2
    error = capsys.readouterr().err
    assert "Feedback, seed 0: out of memory; take less; see" in error
    monkeypatch.delenv("FAKE_FAILS")
    assert reproduce(tmp_path, COPY, "--seeds", "1", "--jobs", "1") == 0
    assert "1/1" in capsys.readouterr().err


def test_what_does_not_fit_into_the_time_is_said(fake, tmp_path, capsys):
    assert reproduce(tmp_path, COPY, "--hours", "0.01") == 0
    out, err = capsys.readouterr()
    assert "nothing is done yet" in out
    assert "6 training runs are left" in err
    assert f"{COPY}, not run: Transformer (3), Feedback (3)" in err


@pytest.mark.long
def test_bases_come_first_and_are_shared(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    chosen = {"fam-table-3": "FAM 1", "fam-table-4": "1 previous"}
    experiments = {name: EXPERIMENTS[name] for name in chosen}
    cells = [
        cell
        for name, variant in chosen.items()
        for cell in make_cells(experiments[name], tmp_path, 1, (variant,), "here", ())
    ]
    assert len(cells) == 4
    lines = []

    def said():
        """Return the lines of what is done."""
        return [line for line in lines if not line.startswith("training ")]

    base, variant = cells[0], cells[1]
    runner = Runner(experiments, 1, lines.append)
    # 1,000 steps, of which its variants continue 400
    assert runner.estimate(variant) == pytest.approx(60 * experiments["fam-table-3"].minutes)
    assert 2 < runner.estimate(base) / runner.estimate(variant) < 2.5
    # as many processes as cells: the fake asserts that its base is there
    assert Runner(experiments, 4, lines.append).run(cells) == []
    assert sum("base" in line for line in said()) == 1
    assert len(said()) == 3
    # what is done needs no base of newer code
    newer = [replace(cell, code="newer") for cell in cells]
    assert Runner(experiments, 1, lines.append).run(newer) == []
    assert len(said()) == 3


@pytest.mark.long
def test_a_variant_that_another_continues_comes_first(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    experiment = EXPERIMENTS["memory-growing"]
    runner = Runner({experiment.id: experiment}, 4, (lines := []).append)
    cells = make_cells(experiment, tmp_path, 1, ("parts then whole",), "here", ())
    names = ["", "parts", "parts then whole"]
    assert [cell.variant for cell in cells] == names
    # in any order: the fake asserts that what it continues is there
    assert runner.run(cells[::-1]) == []

    def trained():
        """Return the names of what was trained since the last call."""
        found = [re.search("training memory-growing: (.*), seed", line) for line in lines]
        lines.clear()
        return [match[1] for match in found if match]

    assert trained() == ["base", *names[1:]]
    # a second one continues what is done
    second = make_cells(experiment, tmp_path, 1, ("parts then parts",), "here", ())
    assert runner.run(second) == []
    assert trained() == ["parts then parts"]
    # newer code trains again what it continues, and so does this one if that training is gone
    (result,) = tmp_path.glob("memory-growing/parts-then-whole/*/result.json")
    result.unlink()
    assert runner.run([replace(cell, code="newer") for cell in cells]) == []
    assert trained() == ["base", *names[1:]]
    result.unlink()
    shutil.rmtree(cells[1].training_folder(experiment))
    assert runner.run(cells) == []
    assert trained() == names[1:]


def test_seeds_are_trained_one_after_the_other(tmp_path):
    cells = make_cells(EXPERIMENTS["memory-passing"], tmp_path, 2, ("sum packed",), "here", ())
    expected = [("sum", 0), ("sum packed", 0), ("sum", 1), ("sum packed", 1)]
    assert [(cell.variant, cell.seed) for cell in cells] == expected


def test_the_expected_time_of_a_training_grows_with_its_tokens():
    seconds = expected_seconds(EXPERIMENTS["t2r-figure-5"])
    # 2,400 steps; 800 and 1 of the variants, of which the longest takes the experiment's minutes
    assert 2.5 < seconds[""] / seconds["T2R 4"] < 3
    assert seconds["T2R 4"] == pytest.approx(60 * EXPERIMENTS["t2r-figure-5"].minutes)
    assert 0.1 < seconds["before finetuning 4"] / seconds["T2R 4"] < 0.2
    longer = expected_seconds(EXPERIMENTS["t2r-figure-5"], given=("train.steps=1600",))
    assert 1.8 < longer["T2R 4"] / seconds["T2R 4"] < 2


def test_a_variant_that_is_the_base_is_not_trained_again():
    seconds = expected_seconds(EXPERIMENTS["t2r-figure-4"])
    assert seconds["Transformer"] < 0.2 * seconds["from scratch 4"]


def test_times_are_learned_from_trainings_that_take_long(tmp_path):
    experiment = EXPERIMENTS["t2r-figure-5"]
    names = "before finetuning 4", "T2R 4", "T2R 16"
    short, first, second = (Cell(str(tmp_path), experiment.id, name, 0) for name in names)
    runner = Runner({experiment.id: experiment}, 1, lambda _: None)
    before = runner.estimate(second)

    def finish(cell, seconds):
        process = SimpleNamespace(cell=cell, check=lambda: None, seconds=lambda: seconds)
        runner._report(process, [], 1)

    finish(short, 1000.0)
    assert runner.estimate(second) == before
    finish(first, 2 * before)
    assert runner.estimate(second) == pytest.approx(2 * before)
    # also if the user shortens all of them
    first, second = (replace(cell, given=("train.steps=8",)) for cell in (first, second))
    runner = Runner({experiment.id: experiment}, 1, lambda _: None)
    before = runner.estimate(second)
    finish(first, 3 * before)
    assert runner.estimate(second) == pytest.approx(3 * before)


def test_sigterm_stops_the_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    seen = tmp_path / "pid"
    program = (
        "import os, time\n"
        f"open({str(seen)!r}, 'w').write(f'{{os.getpid()}} {{os.getpgid(0)}}')\n"
        "time.sleep(99)\n"
    )
    (tmp_path / "sleeper.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("famjax.reproduce.runner._PROCESS", "sleeper")

    def stop() -> None:
        while not (seen.exists() and seen.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=stop)
    thread.start()
    runner = Runner({COPY: EXPERIMENTS[COPY]}, 1, print)
    with pytest.raises(KeyboardInterrupt):
        runner.run([Cell(str(tmp_path), COPY, EXPERIMENTS[COPY].variants[0].name, 0)])
    thread.join()
    pid, group = map(int, seen.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    # Ctrl-C in a terminal does not reach it: the runner's signal is its only one
    assert group != os.getpgid(0)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL; if the machine ran out of"),
        ("import sys; sys.exit('famjax: no data')", "no data; see"),
        ("raise SystemExit(1)", "no output; see"),
    ],
)
def test_why_a_process_failed_is_said(program, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    (tmp_path / "failing.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("famjax.reproduce.runner._PROCESS", "failing")
    cell = Cell(str(tmp_path), COPY, EXPERIMENTS[COPY].variants[0].name, 0)
    log = cell.folder(EXPERIMENTS[COPY]) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("300/1200 of an earlier process\n")
    with pytest.raises(UserError, match=reason):
        Runner({COPY: EXPERIMENTS[COPY]}, 1, print).run([cell])


def test_equal_trainings_do_not_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    names = {"ft-figure-5": "all layers", "ft-figure-8": "weighted sum"}
    first, second = (Cell(str(tmp_path), *pair, 0) for pair in names.items())
    runner = Runner({name: EXPERIMENTS[name] for name in names}, 2, print)

    class Process:
        cell = first

    assert runner._next([second], []) == second
    assert runner._next([second], [Process]) is None


def test_cores_are_split():
    parts = [set(part.split(",")) for part in split_cores(2)]
    assert len(split_cores(5)) == 5
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if cores >= 2:
        assert not parts[0] & parts[1]


def test_a_command_that_trains_in_the_same_folder_is_named_with_the_option_of_reproduce(tmp_path):
    with hold(tmp_path, print), pytest.raises(UserError) as error, hold(tmp_path, print):
        pass
    assert "give --run another folder" in str(error.value)
    reason = reason_of_failure(f"step 1\nfamjax: {error.value}\n")
    assert reason == str(error.value).replace("--run another folder", "--folder another folder")
    assert reason_of_failure("") == "no output"
