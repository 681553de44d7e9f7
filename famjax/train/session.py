"""A training run between two steps: its program, its batches and its state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from famjax.config.resolved import ResolvedConfig
from famjax.config.schema import Config, MeshConfig
from famjax.core.types import Array
from famjax.data.sources import Source, TextSource
from famjax.experiment.mesh_checks import check_rows, duplicated_work
from famjax.parallel import sharding
from famjax.parallel.mesh import describe, is_auto
from famjax.pipeline import make_batches, make_source
from famjax.processes.collective import all_gather, process_index
from famjax.tokenizers.load import WITHOUT_FILE
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train import hosts
from famjax.train.checkpoint import Checkpoints
from famjax.train.clock import Clock
from famjax.train.program import make_program, mesh_demand
from famjax.train.progress import Progress
from famjax.train.resolve import resolve
from famjax.train.run_folder import CHECKED
from famjax.train.startup import describe_epochs, startup_lines
from famjax.train.state import TrainState
from famjax.train.warmup import row_length_at, with_row_length


class Session:
    """One process's share of a run.

    Args:
      config: config of the run, with its vocabulary size.
      tokenizer: the run's tokenizer.
      checkpoints: the run's checkpoints.
      folder: folder of the run.
      progress: prints messages for the user.
      latest_step: step of the newest checkpoint, or None.

    Attributes:
      given_config: the config as it was given.
      config: the resolved config.
      source: the documents.
      batches: the iterator of batches, at its current position.
      program: the compiled functions, for rows of `length` tokens.
      length, rows: tokens in a row and rows in a batch, which BPTT warm-up changes.
      attention_span: see `make_program`.
      state: the training state; None until it is created or restored.
      step: number of steps done.
      saved_step: step of the newest checkpoint that this process has saved or restored; -1 for
        none.
      clock: measures how the loop spends its time.
      base: fingerprint of the weights in `config.init`; "" if nothing is frozen.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        checkpoints: Checkpoints,
        folder: Path,
        progress: Progress,
        latest_step: int | None,
    ):
        check_rows(config, jax.device_count())
        self.given_config = config
        devices = sharding.make_mesh(MeshConfig()).size
        # with limits of their own, processes could choose different meshes, and wait for each other
        # for ever
        device_bytes = min(all_gather("device bytes", sharding.local_device_bytes()))
        self.config: ResolvedConfig = resolve(config, tokenizer, devices, device_bytes)
        self.tokenizer, self.checkpoints, self.folder = tokenizer, checkpoints, folder
        self.progress, self.latest_step, self.clock = progress, latest_step, Clock()
        self.source: Source = make_source(config, tokenizer, checked=folder / CHECKED)
        hosts.check_same_documents(self.source)  # now all have read the record
        if process_index() == 0:
            self.source.save_checked()
        self.attention_span: tuple[int, ...] = ()
        self.state: Any = None
        self.step, self.saved_step, self.base = 0, -1, ""
        self._programs, self._is_compiled = 0, False
        self.set_length(row_length_at(config, latest_step or 0))

    def set_length(self, length: int) -> None:
        """Make the program and the batches for rows of `length` tokens."""
        config = with_row_length(self.config, length)
        self.length, self.rows = config.data.length, config.data.batch
        self._rebuild_program()
        self.batches = make_batches(
            config,
            self.source,
            self.tokenizer,
            self.config.model.block_len,
            hosts.local_rows(self.program.batch, self.rows, self.length),
        )

    def set_attention_span(self, entries: tuple[int, ...]) -> None:
        """Make the program for layers that attend to this many entries; see `make_program`."""
        self.attention_span = entries
        self._rebuild_program()

    def _rebuild_program(self) -> None:
        config = with_row_length(self.config, self.length)
        self.program = make_program(config, self.tokenizer.token_bytes, self.attention_span)
        self._is_compiled = False

    def run_step(self, inspect: bool) -> dict[str, Array]:
        """Start one step; if its program has to be compiled first, show that.

        Returns:
          The metrics of `TrainProgram.inspect` if `inspect` is set or the step was compiled, else
          {}.
        """
        if self._is_compiled:
            # refuses transfers for which the host would have to wait; compilation may need some
            with jax.transfer_guard("disallow"):
                metrics = self._dispatch(inspect)
        else:
            again = " anew" * (self._programs > 0)
            with self.progress.compiling(f"the training step{again}", self.step):
                metrics = self._dispatch(inspect=True)
            self._programs, self._is_compiled = self._programs + 1, True
            jax.block_until_ready(self.state)
            self.clock.start()  # the time before this is compilation
        self.step += 1
        return metrics

    def _dispatch(self, inspect: bool) -> dict[str, Array]:
        """Enqueue one step."""
        with self.clock.waiting("data"):
            batch = hosts.upload_batch(next(self.batches), self.program.batch, self.rows)
        metrics = {}
        # calls return at once, unless too many steps are in flight
        with self.clock.waiting("device"):
            state: TrainState = self.state
            if inspect:
                metrics = self.program.inspect(state.params, state.frozen, state.memory, batch)
            self.state = self.program.step(state, batch)
        self.clock.steps += 1
        return metrics

    def describe(self) -> None:
        """Show what is trained, and on which devices and documents."""
        shapes = jax.eval_shape(self.program.start)
        for line in startup_lines(with_row_length(self.config, self.length), shapes):
            self.progress.note_unless_quiet(line)
        if line := self.source.report():
            self.progress.note(line)
        if not self.tokenizer.is_lossless and self.tokenizer.name not in WITHOUT_FILE:
            self.progress.note(
                f"tokenizer {self.tokenizer.name} changes text, by normalization or by characters "
                "that it does not know: what it drops is neither learned nor counted"
            )
        if line := self._epochs():
            self.progress.note(line)
        for line in self._mesh_notes(shapes):
            self.progress.note(line)

    def _epochs(self) -> str:
        """Return how often a new run reads its text; "" if unknown."""
        if self.latest_step is not None or not isinstance(self.source, TextSource):
            return ""
        config, data = self.config, self.config.data
        # in lanes, documents begin on blocks
        epoch = self.source.epoch_tokens(config.model.block_len if data.layout == "lanes" else 1)
        tokens = config.train.steps * data.batch * (data.length - data.repeat_len)
        return describe_epochs(tokens / epoch) if epoch else ""

    def _mesh_notes(self, shapes: TrainState) -> Iterator[str]:
        if is_auto(self.given_config.mesh):
            yield describe(self.config.mesh, mesh_demand(self.config))
        yield from duplicated_work(self.config)
        parameters = (shapes.params, shapes.frozen)
        for name in sharding.replicated_parameters(self.program.mesh, parameters):
            yield f"mesh: every device has a whole copy of {name}"
