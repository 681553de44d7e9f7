"""The training loop: it feeds the compiled step, and never waits for the device between logs."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from famjax.core import sharding
from famjax.core.checks import mixer_pattern, validate
from famjax.core.config import Config
from famjax.core.errors import StopRequested, UserError
from famjax.core.experiment import from_json
from famjax.core.failure_monitor import set_last_step
from famjax.core.mesh import refuse_rows, repeated
from famjax.core.processes import first_then_all, from_first, index
from famjax.core.types import Array
from famjax.data.pipeline import halve_lanes, make_batches, make_source
from famjax.data.reassign import with_rows
from famjax.data.sources import Source
from famjax.data.tokenizers import Tokenizer
from famjax.train import flops, hosts, lock
from famjax.train.checkpoint import Checkpoints, reading_extra
from famjax.train.metrics import METRICS
from famjax.train.opening import opening
from famjax.train.optimizers import make_schedule
from famjax.train.partition import has_frozen_params, refuse_base
from famjax.train.profile import Profiler, refuse_past
from famjax.train.program import make_program, with_mesh
from famjax.train.progress import Progress
from famjax.train.run import (
    CHECKED,
    CHECKPOINTS,
    Run,
    initial_weights,
    prepare_run,
    refuse_other,
)
from famjax.train.state import MetricSums, TrainState
from famjax.train.step import zero_sums
from famjax.train.warmup import at_length, halve_memory, length_at, resize_memory


def train(config: Config, run_dir: str | Path, quiet: bool = False) -> Run:
    """Train, or go on with the run in the folder, to `config.train.steps`.

    A run killed at any moment and called again ends as one never killed, bit for bit. `train.steps`
    may be raised between calls; a cosine or wsd schedule then follows the new number.

    Args:
      config: the experiment.
      run_dir: the run's folder; a checkpoint there is resumed.
      quiet: no progress line.

    Returns:
      The trained model.

    Raises:
      UserError: the config, the data or the folder is wrong, or the loss was not finite.
      Stopped: SIGTERM or SIGINT came; everything is saved.
    """
    return train_with_source(config, run_dir, quiet)[0]


def train_with_source(
    config: Config, run_dir: str | Path, quiet: bool = False
) -> tuple[Run, Source]:
    """Return what `train` does, and the documents that the run was trained on."""
    validate(config)
    if config.model.lora.rank and not config.init:
        raise UserError(
            f"model.lora.rank={config.model.lora.rank}: adapters need weights to adapt; give "
            "init=FOLDER, a run or what famjax convert wrote, or set model.lora.rank=0"
        )
    if has_frozen_params(config) and not config.init:
        raise UserError(
            f"train.only={config.train.only}: what is not trained is taken from another model; "
            "give init=FOLDER, a run or what famjax convert wrote, or set train.only=all"
        )
    folder = Path(run_dir)
    hosts.compare(config)
    # all processes at once, since each waits for the devices of the others
    jax.devices()
    with lock.for_all(folder) as new, removing_failed_start(folder, new):
        begun = from_first("begun", lambda: Checkpoints(folder / CHECKPOINTS).latest() is not None)
        config, tokenizer = first_then_all("prepare", lambda: prepare_run(folder, config, begun))
        hosts.refuse_unshared(folder)
        keep = config.train.keep
        checkpoints = first_then_all("open", lambda: Checkpoints(folder / CHECKPOINTS, keep))
        set_last_step(checkpoints.latest)
        latest = from_first("latest", checkpoints.latest)
        progress = Progress(config.train.steps, latest or 0, quiet, index() > 0)
        trainer = Trainer(config, tokenizer, checkpoints, folder, progress, latest)
        with progress:
            try:
                state = trainer.run()
            finally:
                trainer.batches.release()
                checkpoints.wait()
    model = nnx.merge(trainer.program.graph, state.params, *state.frozen[:1])
    return Run(config, tokenizer, model, int(state.step)), trainer.source


@contextmanager
def removing_failed_start(folder: Path, new: bool) -> Iterator[None]:
    """Take the folder away again if it was made here for a run that was refused at its start."""
    try:
        yield
    except UserError:
        rows = folder / METRICS
        begun = (rows.exists() and rows.stat().st_size) or any((folder / CHECKPOINTS).glob("*"))
        if new and not begun:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class Trainer:
    """One process's share of a run, from its newest checkpoint to its last step."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        checkpoints: Checkpoints,
        folder: Path,
        progress: Progress,
        latest: int | None,
    ):
        self.tokenizer, self.folder = tokenizer, folder
        self.checkpoints, self.progress = checkpoints, progress
        refuse_rows(config, jax.device_count())
        self.config, self.chosen = with_mesh(config)
        self.source: Any = make_source(config, tokenizer, checked=folder / CHECKED)
        hosts.compare_documents(self.source)  # when it returns, all have read the record
        if index() == 0 and hasattr(self.source, "save_checked"):
            self.source.save_checked()
        self.attention_span: tuple[int, ...] = ()  # see `make_program`
        self.programs, self.is_compiled = 0, False  # compiled so far, and whether the one in use is
        self.latest = latest  # step of the newest checkpoint when the run began
        self.set_length(length_at(config, latest or 0))
        self.schedule = make_schedule(config.optimizer, config.train.steps)
        self.tokens = 0.0  # valid ones read since the run began
        self.saved = -1
        self.base = ""  # fingerprint of the weights in `config.init`
        self.clock = Clock()

    def run(self) -> TrainState:
        last = self.config.train.steps
        if self.latest is None:
            self.tell()
        state, step = self.resume()
        if step >= last:
            self.progress.note(
                f"nothing to do: step {step:,} of train.steps={last} is done; raise it to go on"
            )
            return state
        if self.latest is not None:
            self.tell()
        asked, profiler = hosts.Asked(), Profiler(self.config, self.folder, self.progress.note)
        writer = hosts.metrics_writer(self.folder, step if step else None)
        with asked.listening(), profiler, writer as metrics:
            self.profile_tick(profiler, state, step)
            while step < last:
                log = (step + 1) % self.config.train.log_every == 0 or step + 1 == last
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, about = self.run_step(state, step, inspect=log)
                step += 1
                if log:
                    state = self.log(metrics, state, step, about)
                    self.update_spans(state, step)
                self.profile_tick(profiler, state, step)
                if length_at(self.config, step) != self.length:
                    state = self.grow_bptt(state, step)
                if step % self.config.train.checkpoint_every == 0:
                    self.save(state, step)
                if number := asked.at(step):
                    self.save(state, step)
                    self.checkpoints.wait()
                    raise StopRequested(number, step)
            self.save(state, step)
            self.checkpoints.wait()
        return state

    def tell(self) -> None:
        """Say what is trained, on what."""
        shapes = jax.eval_shape(self.program.start)
        for line in opening(at_length(self.config, self.length), shapes):
            self.progress.say(line)
        if hasattr(self.source, "report"):
            self.progress.note(self.source.report())
        for line in self.about_mesh(shapes):
            self.progress.note(line)

    def run_step(
        self, state: TrainState, step: int, inspect: bool
    ) -> tuple[TrainState, dict[str, Array]]:
        """Return what `dispatch_step` does; say so if the program has to be compiled for it."""
        if self.is_compiled:
            return self.dispatch_step(state, inspect)
        with self.progress.compiling(f"the training step{' anew' * (self.programs > 0)}", step):
            state, about = self.dispatch_step(state, inspect=True)
        self.programs, self.is_compiled = self.programs + 1, True
        jax.block_until_ready(state)
        self.clock.start()  # what was before is compilation
        return state, about

    @jax.transfer_guard("disallow")
    def dispatch_step(
        self, state: TrainState, inspect: bool
    ) -> tuple[TrainState, dict[str, Array]]:
        """Start one step; the guard refuses whatever would make the host wait for the device.

        Returns:
          The next state, and if asked for what `Program.inspect` says of the step.
        """
        with self.clock.waiting("data"):
            batch = hosts.upload(next(self.batches), self.program.batch, self.rows)
        about = {}
        # calls come back at once, unless too many steps are under way
        with self.clock.waiting("device"):
            if inspect:
                about = self.program.inspect(state.params, state.frozen, state.memory, batch)
            state = self.program.step(state, batch)
        self.clock.steps += 1
        return state, about

    def profile_tick(self, profiler: Profiler, state: TrainState, step: int) -> None:
        """Let the profiler begin or end behind a step that the device is done with."""
        if profiler.wants(step):
            with self.clock.waiting("device"):
                jax.block_until_ready(state)
        with self.clock.stopped():
            profiler.after(step)

    def set_length(self, length: int) -> None:
        """Let the steps that follow read so many tokens of a row."""
        config = at_length(self.config, length)
        self.length, self.rows = config.data.length, config.data.batch
        self.program = make_program(config, self.tokenizer.token_bytes, self.attention_span)
        self.is_compiled = False
        self.batches = make_batches(
            config,
            self.source,
            self.tokenizer,
            self.config.model.block_len,
            hosts.held(self.program.batch, self.rows, self.length),
        )

    def update_spans(self, state: TrainState, step: int) -> None:
        """Let layers whose spans are learned look no farther than they see."""
        if not self.config.model.feedback.adaptive_span:
            return
        stack = nnx.merge(self.program.graph, state.params, *state.frozen[:1]).stack
        c = self.config.optimizer
        # by so many learning rates Adam can move a parameter in a step
        rates = max(1.0, (1 - c.beta1) / (1 - c.beta2) ** 0.5)
        grown = rates * c.learning_rate * self.config.train.log_every
        attention_span, now = stack.attention_span(grown * stack.plan.span), stack.plan.spans
        # each program takes its time to compile: a little less is not worth another
        if any(a > b for a, b in zip(attention_span, now, strict=True)) or sum(
            attention_span
        ) <= 0.75 * sum(now):
            self.progress.note(f"step {step:,}: layers look at {max(attention_span):,} tokens")
            self.set_attention_span(attention_span)

    def set_attention_span(self, slots: tuple[int, ...]) -> None:
        """Let calls look at so many slots, see `make_program`."""
        self.attention_span = slots
        config = at_length(self.config, self.length)
        self.program = make_program(config, self.tokenizer.token_bytes, slots)
        self.is_compiled = False

    def grow_bptt(self, state: TrainState, step: int) -> TrainState:
        """Let rows become twice as long, and half as many, which go on where they stand."""
        before, rows = self.length, self.rows
        data = halve_lanes(hosts.whole(self.batches.get_state()))
        self.batches.release()
        self.set_length(length_at(self.config, step))
        self.batches.set_state(data)
        self.progress.note(
            f"step {step:,}: rows of {self.length:,} tokens, {self.rows:,} of them "
            f"(were {before:,} and {rows:,})"
        )
        halve_batch = jax.jit(halve_memory, out_shardings=self.program.shardings.memory)
        return state._replace(memory=halve_batch(state.memory))

    def about_mesh(self, shapes: TrainState) -> Iterator[str]:
        """Yield what to say of the mesh: how it was chosen, and what it leaves undivided."""
        if self.chosen:
            yield self.chosen
        yield from repeated(self.config)
        for name in sharding.replicated_parameters(
            self.program.mesh, (shapes.params, shapes.frozen)
        ):
            yield f"mesh: every device has a whole copy of {name}"

    def resume(self) -> tuple[TrainState, int]:
        """Return the newest good checkpoint's state, or the first state."""
        if self.latest is None:
            state = self.begin()
            self.update_spans(state, 0)
            return state, 0
        step, tree, extra = self.checkpoints.restore(self.template, report=self.progress.note)
        if step < self.config.train.steps:
            self.progress.note(f"goes on from step {step:,} of {self.config.train.steps:,}")
        with reading_extra(self.checkpoints.path(step)):
            self.compare(from_json(json.dumps(extra["config"])), step)
            self.tokens = float(extra["tokens"])
            state = self.with_rows(from_tree(tree), extra["data"])
        self.saved = step
        if has_frozen_params(self.config):
            state = state._replace(frozen=self.begin().frozen)
            refuse_base(extra.get("base", ""), self.base, self.config.init, self.folder)
        else:
            state = state._replace(frozen=self.no_keys())
        if extra.get("looked"):
            self.set_attention_span(tuple(extra["looked"]))
        return state, step

    def with_rows(self, state: TrainState, data: dict[str, Any]) -> TrainState:
        """Return the state for as many rows as are read now, and let the data go on in them."""
        rows, before = self.rows, len(data["batches"]["rows"])
        if rows == before:
            self.batches.set_state(data)
            return state
        self.batches.set_state(with_rows(data, rows, self.source))
        change = f"{before - rows} end" if rows < before else f"{rows - before} begin anew"
        self.progress.note(
            f"data.batch: {before} -> {rows}; {min(rows, before)} rows go on, {change}, and the "
            "documents that were not begun are dealt to all"
        )
        if self.config.data.layout != "lanes":
            return state
        places = self.program.shardings.memory
        resize = jax.jit(functools.partial(resize_memory, rows=rows), out_shardings=places)
        return state._replace(memory=resize(state.memory))

    def no_keys(self) -> Any:
        """Return what is frozen where that is dropout's keys alone; each step draws them anew."""
        shapes = jax.eval_shape(self.program.start).frozen
        zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        return jax.device_put(zeros, self.program.shardings.frozen)

    def template(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of a step holds, and let rows have that step's length."""
        if (length := length_at(self.config, step)) != self.length:
            self.batches.release()
            self.set_length(length)
        program, config = self.program, at_length(self.config, length)
        extra = from_first("extra", lambda: self.checkpoints.extra(step))
        with reading_extra(self.checkpoints.path(step)):
            saved = extra.get("data", {}).get("batches", {}).get("rows", [])
        if saved and len(saved) != self.rows:
            data = dataclasses.replace(config.data, batch=len(saved))
            config = dataclasses.replace(config, data=data)
            program = make_program(config, self.tokenizer.token_bytes, self.attention_span)
        places = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            jax.eval_shape(program.start),
            program.shardings,
        )
        return to_tree(places)

    def begin(self) -> TrainState:
        """Return the state before the first step: drawn, or with the weights in `config.init`."""
        if not self.config.init:
            with self.progress.compiling("the first state", 0):
                return self.program.start()
        mesh = self.program.mesh
        weights, self.base = initial_weights(self.config, self.folder, self.progress.note, mesh)
        places = sharding.parameter_shardings(mesh, weights)
        with warnings.catch_warnings(), self.progress.compiling("the first state", 0):
            # what changes its type (lora.base) leaves its place behind
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return self.program.start(jax.device_put(weights, places))

    def compare(self, before: Config, step: int) -> None:
        """Refuse a checkpoint made with another config; tell what a changed one means."""
        refuse_other(before, self.config, self.checkpoints.path(step))
        refuse_past(before, self.config, step)
        old, new = make_schedule(before.optimizer, before.train.steps)(step), self.schedule(step)
        if old != new:
            self.progress.note(
                f"train.steps: {before.train.steps} -> {self.config.train.steps}; the "
                f"{self.config.optimizer.schedule} schedule follows, the learning rate goes from "
                f"{float(old):.3g} to {float(new):.3g}"
            )

    def save(self, state: TrainState, step: int) -> None:
        """Save at this step, once. A state that is not finite is not saved but reported."""
        if self.saved == step:
            return
        self.refuse_bad(state)
        extra = {
            "data": hosts.whole(self.batches.get_state()),
            "tokens": self.tokens,
            "config": dataclasses.asdict(self.config),
            "base": self.base,
            "looked": self.attention_span,
        }
        self.checkpoints.save(step, to_tree(state), extra)
        self.saved = step

    def refuse_bad(self, state: TrainState) -> None:
        with self.clock.waiting("device"):
            bad = int(jax.device_get(state.bad))
        if bad:
            self.checkpoints.wait()
            last = self.checkpoints.latest()
            kept = f"the last good checkpoint is step {last}" if last else "nothing was saved yet"
            mend = "start a run with a lower optimizer.learning_rate or more optimizer.warmup_steps"
            model = self.config.model
            if "full" in mixer_pattern(model):
                mend += (
                    f"; or a document is longer than model.capacity={model.capacity} tokens, all "
                    "that full attention holds: raise it"
                )
            raise UserError(
                f"the loss is not finite at step {bad}; {kept} in {self.checkpoints.folder}; {mend}"
            )

    def log(
        self, metrics: Any, state: TrainState, step: int, about: dict[str, Array]
    ) -> TrainState:
        """Write a row, tell the curriculum, and return the state with the totals set to zero."""
        with self.clock.waiting("device"):
            totals, about = jax.device_get((state.totals, about))
        self.tokens += float(totals.tokens)
        row = {
            **summary(totals, self.config.train.match),
            **{name: float(value) for name, value in about.items()},
        }
        row["learning_rate"] = float(self.schedule(step - 1))
        row["tokens"] = self.tokens
        if self.config.train.bptt_start:
            row["length"] = self.length
        row |= self.advance_curriculum(totals, row)
        timing = self.clock.lap(float(totals.tokens / totals.steps), self.config)
        metrics.write(step, {**row, **timing})
        shown = ("loss", "accuracy", "longest", "length", "tokens_per_second", "data_wait")
        self.progress.update(step, **{k: v for k, v in (row | timing).items() if k in shown})
        self.refuse_bad(state)
        zeros = jax.jit(zero_sums, out_shardings=self.program.shardings.totals)()
        return state._replace(totals=zeros)

    def advance_curriculum(self, totals: MetricSums, row: dict[str, float]) -> dict[str, float]:
        """Let a curriculum advance on the answers of the interval.

        The batches made ahead are dropped when it does, so that what follows depends on the step
        alone and not on how far the loading thread had got.
        """
        if not hasattr(self.source, "dispatch_step"):
            return {}
        state = self.batches.get_state()
        # where nothing is predicted (train.match) it stays where it begins
        after = self.source.dispatch_step(state["source"], row.get("accuracy", 0.0))
        if after != state["source"]:
            self.batches.set_state({**state, "source": after})
        return {"longest": float(after["longest"])} if "longest" in after else {}


def to_tree(state: TrainState) -> dict[str, Any]:
    """Return the state as `Checkpoints` takes it: parameters by themselves, for who wants no more.

    The rest is one entry, as each costs a folder and its time.
    """
    rest = state._asdict()
    del rest["frozen"]  # they are in `config.init`
    return {"params": rest.pop("params"), "rest": rest}


def from_tree(tree: dict[str, Any]) -> TrainState:
    return TrainState(params=tree["params"], **tree["rest"])


def summary(totals: MetricSums, match: bool = False) -> dict[str, float]:
    """Return the means of an interval: a loss in nats, shares, and bits.

    Args:
      match: `train.match`, whose loss is an error; nothing is predicted.
    """

    def mean(total: Any, of: Any) -> float:
        return float(total / of) if of else 0.0

    found = {
        "loss": mean(totals.loss, totals.weight),
        "accuracy": mean(totals.right, totals.answers),
        "bits_per_byte": mean(totals.nats, totals.bytes) / float(np.log(2)),
        "grad_norm": mean(totals.grad_norm, totals.steps),
    }
    return {k: v for k, v in found.items() if not match or k in ("loss", "grad_norm")}


class Clock:
    """Where the loop's time goes: it waits for data, it waits for the device, or it works itself.

    What is waited for goes on at the same time, and so does the device while the host works: of a
    loop that keeps its device busy nearly all time is waiting for it.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.begin, self.steps = time.perf_counter(), 0
        self.waited = {"data": 0.0, "device": 0.0}

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the time inside as waiting for "data" or for the "device"."""
        begin = time.perf_counter()
        yield
        self.waited[what] += time.perf_counter() - begin

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the time inside."""
        begin = time.perf_counter()
        yield
        self.begin += time.perf_counter() - begin

    def lap(self, tokens: float, config: Config) -> dict[str, float]:
        """Return rates since the last lap, and the seconds of a step, the sum of its three parts.

        {} if no step was made in it but the one that compiled.

        Args:
          tokens: of a step.
          config: what is trained.
        """
        if not self.steps:
            return {}
        seconds = time.perf_counter() - self.begin
        rate = tokens * self.steps / seconds
        data, device = (self.waited[what] / self.steps for what in ("data", "device"))
        # measured at the first lap only, and before the next one begins
        peak = flops.peak_flops(jax.devices()[0]) or flops.measured_peak(config.model.dtype)
        shares = {
            "tokens_per_second": rate,
            "model_flops_utilisation": rate
            * flops.step_flops(config)
            / (peak * jax.device_count()),
            "data_wait": data * self.steps / seconds,
            "step_seconds": seconds / self.steps,
            "data_seconds": data,
            "host_seconds": seconds / self.steps - data - device,
            "device_seconds": device,
        }
        self.start()
        return shares
