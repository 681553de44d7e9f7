"""The training loop: it feeds the compiled step, and never waits for the device between logs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from famjax.core import sharding
from famjax.core.config import Config
from famjax.core.errors import UserError
from famjax.core.experiment import validate
from famjax.core.types import Array, Context
from famjax.data.pipeline import Batches, make_batches, make_source
from famjax.models.language_model import LanguageModel
from famjax.train import flops
from famjax.train.checkpoint import Checkpoints
from famjax.train.metrics import MetricsWriter
from famjax.train.optimizers import make_optimizer, make_schedule
from famjax.train.progress import Progress
from famjax.train.run import CHECKPOINTS, Run, abstract_model, prepare_run
from famjax.train.state import Totals, TrainState
from famjax.train.step import Batch, init_train_state, make_step, zero_totals


class Stopped(Exception):  # noqa: N818
    """The run was asked to stop and has saved; `signal` says by what."""

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name} at step {step}, saved")
        self.signal = number


class Program(NamedTuple):
    """What is compiled once for a run.

    Attributes:
      mesh: of devices.
      graph: the model's NNX graph.
      shardings: where a `TrainState` lies.
      start: () -> TrainState before the first step.
      step: (state, batch) -> state; the state given is donated.
      inspect: (params, memory, batch) -> dict of scalars about the memory.
      batch: where a batch lies.
    """

    mesh: Mesh
    graph: Any
    shardings: Any
    start: Callable[[], TrainState]
    step: Callable[[TrainState, Batch], TrainState]
    inspect: Callable[[Any, Any, Batch], dict[str, Array]]
    batch: jax.sharding.NamedSharding


def make_program(config: Config, token_bytes: np.ndarray) -> Program:
    """Build and place everything for a config whose vocabulary is known."""
    mesh = sharding.make_mesh(config.mesh)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    graph, _ = abstract_model(config)

    def start() -> TrainState:
        model = LanguageModel(config.model, rngs=nnx.Rngs(config.seed))
        return init_train_state(config, model, optimizer)

    shapes = jax.eval_shape(start)
    shardings = place(config, mesh, graph, shapes)
    rows = sharding.batch_sharding(mesh, config.data.batch)
    step = make_step(config, graph, optimizer, jnp.asarray(token_bytes))
    return Program(
        mesh,
        graph,
        shardings,
        jax.jit(start, out_shardings=shardings),
        jax.jit(step, donate_argnums=0, in_shardings=(shardings, rows), out_shardings=shardings),
        jax.jit(make_inspect(config, graph)),
        rows,
    )


def place(config: Config, mesh: Mesh, graph: Any, shapes: TrainState) -> TrainState:
    """Return the sharding of every array of the training state."""
    everywhere = sharding.replicated(mesh)
    memory = jax.tree.map(lambda _: everywhere, shapes.memory)
    if config.data.layout == "lanes":
        axes = nnx.merge(graph, shapes.params).state_axes()
        memory = sharding.state_shardings(mesh, axes, shapes.memory)
    return TrainState(
        everywhere,
        sharding.parameter_shardings(mesh, shapes.params),
        sharding.optimizer_shardings(mesh, shapes.params, shapes.opt_state),
        memory,
        everywhere,
        jax.tree.map(lambda _: everywhere, shapes.totals),
        everywhere,
    )


def make_inspect(config: Config, graph: Any) -> Callable[[Any, Any, Batch], dict[str, Array]]:
    """Return a function of (params, memory, batch): how large the FAM is, and how much it is read.

    It looks at the first row only.
    """

    def inspect(params: Any, memory: Any, batch: Batch) -> dict[str, Array]:
        model = nnx.merge(graph, params)
        lanes = config.data.layout == "lanes"
        state = jax.tree.map(lambda a: a[:, :1], memory) if lanes else model.init_state(1)
        row = jax.tree.map(lambda a: a[:1], batch)
        ctx = Context(row["reset"], row["valid"]) if lanes else Context()
        x = model.embed(row["tokens"])
        mass = model.stack.attention_mass(x, state, ctx)
        _, after = model.stack(x, state, ctx)
        fams = [jnp.sqrt(jnp.square(fam).mean()) for fam in model.stack.feedback(after)]
        if not fams:
            return {}
        return {"state_norm": jnp.stack(fams).mean(), "fam_attention": mass.mean()}

    return inspect


def train(config: Config, run_dir: str | Path, quiet: bool = False) -> Run:
    """Train, or go on with the run in the folder, to `config.train.steps`.

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
    validate(config)
    folder = Path(run_dir)
    config, tokenizer = prepare_run(folder, config)
    source = make_source(config, tokenizer)
    program = make_program(config, tokenizer.token_bytes)
    batches = make_batches(config, source, model_block_len(program.graph, config))
    checkpoints = Checkpoints(folder / CHECKPOINTS, config.train.keep)
    with Progress(config.train.steps, 0, quiet) as progress:
        if hasattr(source, "report"):
            progress.note(source.report())
        try:
            trainer = Trainer(config, program, source, batches, checkpoints, folder, progress)
            state = trainer.run()
        finally:
            batches.release()
            checkpoints.wait()
    model = nnx.merge(program.graph, state.params)
    return Run(config, tokenizer, model, int(state.step))


def model_block_len(graph: Any, config: Config) -> int:
    """Documents start on these boundaries, with full attention too."""
    return config.model.block_len


class Trainer:
    """One process's share of a run, from its newest checkpoint to its last step."""

    def __init__(
        self,
        config: Config,
        program: Program,
        source: Any,
        batches: Batches,
        checkpoints: Checkpoints,
        folder: Path,
        progress: Progress,
    ):
        self.config, self.program, self.source = config, program, source
        self.batches, self.checkpoints, self.progress = batches, checkpoints, progress
        self.folder = folder
        self.schedule = make_schedule(config.optimizer, config.train.steps)
        self.tokens = 0.0  # valid ones read since the run began
        self.saved = -1
        self.clock = Clock()

    def run(self) -> TrainState:
        state, step = self.resume()
        first = step
        asked = _Asked()
        with asked.listening(), MetricsWriter(self.folder, step if step else None) as metrics:
            while step < self.config.train.steps:
                with self.clock.waiting():
                    batch = jax.device_put(next(self.batches), self.program.batch)
                log = (step + 1) % self.config.train.log_every == 0
                log |= step + 1 == self.config.train.steps
                about = self.program.inspect(state.params, state.memory, batch) if log else {}
                state = self.program.step(state, batch)
                step += 1
                if step == first + 1:
                    jax.block_until_ready(state)
                    self.clock.start()  # what was before is compilation
                if log:
                    state = self.log(metrics, state, step, about)
                if step % self.config.train.checkpoint_every == 0:
                    self.save(state, step)
                if asked.signal:
                    self.save(state, step)
                    self.checkpoints.wait()
                    raise Stopped(asked.signal, step)
            self.save(state, step)
            self.checkpoints.wait()
        return state

    def resume(self) -> tuple[TrainState, int]:
        """Return the newest good checkpoint's state, or the first state."""
        if self.checkpoints.latest() is None:
            return self.program.start(), 0
        shapes = jax.eval_shape(self.program.start)
        template = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            shapes,
            self.program.shardings,
        )
        step, tree, extra = self.checkpoints.restore(
            template._asdict(), report=self.progress.note
        )
        self.batches.set_state(extra["data"])
        self.tokens = extra["tokens"]
        self.saved = step
        self.progress.note(f"goes on from step {step:,} of {self.config.train.steps:,}")
        return TrainState(**tree), step

    def save(self, state: TrainState, step: int) -> None:
        """Save at this step, once. A state that is not finite is not saved but reported."""
        if self.saved == step:
            return
        self.refuse_bad(state)
        extra = {"data": self.batches.get_state(), "tokens": self.tokens}
        self.checkpoints.save(step, state._asdict(), extra)
        self.saved = step

    def refuse_bad(self, state: TrainState) -> None:
        bad = int(state.bad)
        if bad:
            self.checkpoints.wait()
            last = self.checkpoints.latest()
            kept = f"the last good checkpoint is step {last}" if last else "nothing was saved yet"
            raise UserError(
                f"the loss is not finite since step {bad}; {kept} in {self.checkpoints.folder}; "
                "lower optimizer.learning_rate, or raise optimizer.warmup_steps"
            )

    def log(
        self, metrics: MetricsWriter, state: TrainState, step: int, about: dict[str, Array]
    ) -> TrainState:
        """Write a row, tell the curriculum, and return the state with the totals set to zero."""
        totals, about = jax.device_get((state.totals, about))
        self.tokens += float(totals.tokens)
        row = {**summary(totals), **{name: float(value) for name, value in about.items()}}
        row["learning_rate"] = float(self.schedule(step - 1))
        row["tokens"] = self.tokens
        row |= self.guide(totals, row)
        timing = self.clock.lap(float(totals.tokens), self.config)
        metrics.write(step, {**row, **timing})
        shown = {k: row[k] for k in ("loss", "accuracy", "longest") if k in row}
        self.progress.update(step, **shown, **timing)
        self.refuse_bad(state)
        zeros = jax.device_put(zero_totals(), self.program.shardings.totals)
        return state._replace(totals=zeros)

    def guide(self, totals: Totals, row: dict[str, float]) -> dict[str, float]:
        """Let a curriculum advance on the answers of the interval.

        The batches made ahead are dropped when it does, so that what follows depends on the step
        alone and not on how far the loading thread had got.
        """
        if not hasattr(self.source, "advance"):
            return {}
        state = self.batches.get_state()
        after = self.source.advance(state["source"], row["accuracy"])
        if after != state["source"]:
            self.batches.set_state({**state, "source": after})
        return {"longest": float(after["longest"])}


def summary(totals: Totals) -> dict[str, float]:
    """Return the means of an interval: a loss in nats, shares, and bits."""

    def mean(total: Any, of: Any) -> float:
        return float(total / of) if of else 0.0

    return {
        "loss": mean(totals.loss, totals.weight),
        "accuracy": mean(totals.right, totals.answers),
        "bits_per_byte": mean(totals.nats, totals.bytes) / float(np.log(2)),
        "grad_norm": mean(totals.grad_norm, totals.steps),
    }


class Clock:
    """Where the loop's time goes."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.begin, self.waited = time.perf_counter(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    def lap(self, tokens: float, config: Config) -> dict[str, float]:
        """Return rates since the last lap, or {} where there is no time to speak of."""
        seconds, waited = time.perf_counter() - self.begin, self.waited
        self.start()
        if seconds <= 0:
            return {}
        rate = tokens / seconds
        peak = sum(flops.peak_flops(d) or flops.measured_peak(config.model.dtype)
                   for d in jax.devices()[:1]) * jax.device_count()
        return {
            "tokens_per_second": rate,
            "model_flops_utilisation": rate * flops.training_flops(config.model) / peak,
            "data_wait": waited / seconds,
        }


class _Asked:
    """Remembers the first SIGTERM or SIGINT; a second one acts as always."""

    signal = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        def note(number: int, _: Any) -> None:
            if self.signal:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self.signal = number

        before = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                before[number] = signal.signal(number, note)
            except ValueError:  # not the main thread: whoever runs us there handles signals
                continue
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
