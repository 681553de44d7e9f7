"""Losses while a run trains: on held-out and on training documents, with and without the memory.

A memory can serve as a fingerprint of the few documents that the lanes read. It then helps on these
documents and not on others (docs/memory.md). The four losses show whether that is the case.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import numpy as np

from famjax.config.derived import has_blocks, holds_out_text
from famjax.core.errors import UserError
from famjax.core.types import Array, Batch, Context, State
from famjax.data.one_pass import DocumentPass, one_pass, reset_blocks
from famjax.data.sources import Split, TextSource
from famjax.parallel import sharding, traced
from famjax.tasks import TASKS
from famjax.train import hosts
from famjax.train.hooks import Hook
from famjax.train.log import summarize
from famjax.train.objective import sum_metrics
from famjax.train.partition import merge_for_inference
from famjax.train.program import TrainProgram
from famjax.train.run_folder import CHECKED
from famjax.train.session import Session
from famjax.train.state import MetricSums

SPLITS: dict[str, Split] = {"heldout": "holdout", "training": "train"}


class HeldOutLoss(Hook):
    """Adds bits per byte to a row of metrics, every `eval.every` steps.

    heldout_bits_per_byte is measured on the first `eval.batches` batches of held-out documents,
    each read from its beginning; training_bits_per_byte on as many batches of documents trained on.
    For the same names with the suffix _without_memory the state is reset before every block; stacks
    without blocks do not have these two.

    The rows are those that training ends with, also while `train.bptt_start` makes them shorter:
    the losses of all steps are of the same tokens.
    """

    def __init__(self) -> None:
        self._program: TrainProgram | None = None
        self._batches: dict[str, list[Batch[np.ndarray]]] = {}

    def before_first_step(self, session: Session) -> None:
        if session.config.eval.every and holds_out_text(session.given_config):
            self._prepare(session)  # now, so that an error is raised before any step

    def before_log(self, session: Session, row: dict[str, float]) -> dict[str, float]:
        if not evaluates_at(session) or not holds_out_text(session.given_config):
            return {}
        with session.clock.stopped():
            if self._program is not session.program:
                self._prepare(session)
            forgets = has_blocks(session.config.model)
            suffixes = {"": False, "_without_memory": True} if forgets else {"": False}
            return {
                f"{name}_bits_per_byte{suffix}": self._measure(session, batches, forget)
                for name, batches in self._batches.items()
                for suffix, forget in suffixes.items()
            }

    def _prepare(self, session: Session) -> None:
        """Make the program, again when that of the session changes; read the documents once."""
        self._program = program = session.program
        data = session.config.data
        token_bytes = session.tokenizer.token_bytes
        self._start = make_start(program, session)
        self._evaluate = jax.jit(
            traced.with_mesh(program.mesh, make_evaluate(program.inference_graph, token_bytes)),
            donate_argnums=2,
        )
        if not self._batches:
            self._placement = sharding.batch_sharding(program.mesh, data.batch, data.length)
            self._batches = {
                name: read_batches(session, split, self._placement)
                for name, split in SPLITS.items()
            }

    def _measure(self, session: Session, batches: list[Batch[np.ndarray]], forget: bool) -> float:
        """Return the bits per byte of documents, each read once from its beginning.

        Args:
          forget: reset the state before every block.
        """
        state, block = session.state, session.config.model.block_len
        memory, sums = self._start(state.params, state.frozen), MetricSums.zeros()
        for batch in batches:
            if forget:
                batch = {**batch, "reset": reset_blocks(batch, block)}
            device_batch = hosts.upload_batch(batch, self._placement, session.config.data.batch)
            memory, part = self._evaluate(state.params, state.frozen, memory, device_batch)
            sums = jax.tree.map(jax.numpy.add, sums, part)
        return summarize(jax.device_get(sums))["bits_per_byte"]


def evaluates_at(session: Session) -> bool:
    """Return whether the run is evaluated at this step."""
    every = session.config.eval.every
    return every > 0 and session.step % every == 0


def make_start(program: TrainProgram, session: Session) -> Any:
    """Return a jitted function from (params, frozen) to the initial state of all rows."""
    rows = session.config.data.batch

    def start(params: Any, frozen: Any) -> State:
        return merge_for_inference(program.inference_graph, params, frozen).init_state(rows)

    params, frozen = session.state.params, session.state.frozen
    axes = merge_for_inference(program.inference_graph, params, frozen).state_axes()
    shapes = jax.eval_shape(start, params, frozen)
    return jax.jit(start, out_shardings=sharding.state_shardings(program.mesh, axes, shapes))


def make_evaluate(graph: Any, token_bytes: np.ndarray) -> Any:
    """Return a function from (params, frozen, memory, batch) to the next memory and metric sums.

    Args:
      graph: the model's NNX graph without dropout.
      token_bytes: [v], UTF-8 bytes of each token.
    """

    def evaluate(
        params: Any, frozen: Any, memory: State, batch: Batch[Array]
    ) -> tuple[State, MetricSums]:
        model = merge_for_inference(graph, params, frozen)
        tokens = batch["tokens"]
        ctx = model.with_tokens(Context(batch["reset"], batch["valid"]), tokens)
        x, memory = model.stack(model.embed(tokens), memory, ctx)
        return memory, sum_metrics(*model.losses(x, batch["targets"]), batch, token_bytes)

    return evaluate


def read_batches(
    session: Session, split: Split, placement: jax.sharding.Sharding
) -> list[Batch[np.ndarray]]:
    """Return this process's rows of the first `eval.batches` batches of a split's documents.

    Documents of both splits are whole, also if training reads parts of them (`data.part_bytes`):
    what a memory contributes grows with the document.

    Args:
      placement: the sharding of a batch.

    Raises:
      UserError: the source holds out no documents, or the batches have no text to predict.
    """
    config = session.config
    whole = replace(session.given_config, data=replace(session.given_config.data, part_bytes=0))
    source = TASKS["text"].make_source(whole, session.tokenizer, split, session.folder / CHECKED)
    if not isinstance(source, TextSource):
        raise UserError(
            f"eval.every={config.eval.every}: seqio and TFDS sets hold out no documents; set "
            "eval.every=0"
        )
    documents = DocumentPass(source)
    batches = list(
        islice(
            one_pass(documents, config.data.batch, config.data.length, config.model.block_len),
            config.eval.batches,
        )
    )
    if not any((batch["weights"] > 0).any() for batch in batches):
        raise UserError(
            f"eval.every={config.eval.every}: the first {config.eval.batches} batches of documents "
            f"({split}) have no text to predict; raise eval.batches, or set eval.every=0"
        )
    local = list(hosts.local_rows(placement, config.data.batch, config.data.length))
    return [
        {name: part[local] for name, part in batch.items()}  # type: ignore[index, misc]
        for batch in batches
    ]
