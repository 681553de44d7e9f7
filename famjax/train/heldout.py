"""Held-out loss while a run trains, with the memory and without, beside that of its own documents.

A memory can serve as a fingerprint of the few documents that the lanes read: then it helps on them
and not on others (docs/memory.md). The four figures tell these apart.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import jax
import numpy as np
from flax import nnx

from famjax.config.resolved import ResolvedConfig
from famjax.core.errors import UserError
from famjax.core.types import Array, Batch, Context, State
from famjax.data.one_pass import DocumentPass, one_pass, reset_blocks
from famjax.data.sources import Split, TextSource
from famjax.models.language_model import LanguageModel
from famjax.parallel import sharding
from famjax.tasks import TASKS
from famjax.train import hosts
from famjax.train.hooks import Hook
from famjax.train.log import summarize
from famjax.train.objective import count, zero_sums
from famjax.train.program import TrainProgram
from famjax.train.run import CHECKED
from famjax.train.session import Session
from famjax.train.state import MetricSums

SPLITS: dict[str, Split] = {"heldout": "holdout", "training": "train"}


class HeldOutLoss(Hook):
    """Adds to a row of metrics, every `eval.every` steps, four figures in bits per byte.

    heldout_bits_per_byte: of the first documents held out, `eval.batches` batches, each read from
    its beginning; training_bits_per_byte: of as many that are trained on. The same with
    _without_memory: the state is reset before every block.
    """

    def __init__(self) -> None:
        self._program: TrainProgram | None = None

    def after_log(self, session: Session, row: dict[str, float]) -> dict[str, float]:
        every = session.config.eval.every
        if not every or session.step % every:
            return {}
        with session.clock.stopped():
            if self._program is not session.program:
                self._prepare(session)
            found = {}
            for name, batches in self._batches.items():
                for suffix, forget in (("", False), ("_without_memory", True)):
                    bits = self._measure(session, batches, forget)
                    found[f"{name}_bits_per_byte{suffix}"] = bits
            return found

    def _prepare(self, session: Session) -> None:
        """Read the documents, and compile; again when rows or program change in training."""
        self._program = program = session.program
        token_bytes = jax.numpy.asarray(session.tokenizer.token_bytes)
        self._start = make_start(program, session)
        self._evaluate = jax.jit(
            sharding.with_mesh(program.mesh, make_evaluate(program.inference_graph, token_bytes))
        )
        self._batches = {name: read_batches(session, split) for name, split in SPLITS.items()}

    def _measure(self, session: Session, batches: list[Batch[np.ndarray]], forget: bool) -> float:
        """Return bits per byte of documents that are read once, from their beginning."""
        state, program = session.state, session.program
        block = block_len(session.config)
        memory, sums = self._start(state.params, state.frozen), zero_sums()
        for batch in batches:
            if forget:
                batch = {**batch, "reset": reset_blocks(batch, block)}
            device_batch = hosts.upload_batch(batch, program.batch, session.rows)
            memory, part = self._evaluate(state.params, state.frozen, memory, device_batch)
            sums = jax.tree.map(jax.numpy.add, sums, part)
        return summarize(jax.device_get(sums))["bits_per_byte"]


def make_start(program: TrainProgram, session: Session) -> Any:
    """Return a jitted function of (params, frozen) to the state before documents, of all rows."""

    def start(params: Any, frozen: Any) -> State:
        return nnx.merge(program.inference_graph, params, *frozen[:1]).init_state(session.rows)

    params, frozen = session.state.params, session.state.frozen
    axes = nnx.merge(program.inference_graph, params, *frozen[:1]).state_axes()
    shapes = jax.eval_shape(start, params, frozen)
    return jax.jit(start, out_shardings=sharding.state_shardings(program.mesh, axes, shapes))


def make_evaluate(graph: Any, token_bytes: Array) -> Any:
    """Return a function of (params, frozen, memory, batch) to the memory after it, and the sums.

    Args:
      graph: the model's NNX graph without dropout.
      token_bytes: [v], UTF-8 bytes of each token.
    """

    def evaluate(
        params: Any, frozen: Any, memory: State, batch: Batch[Array]
    ) -> tuple[State, MetricSums]:
        model: LanguageModel = nnx.merge(graph, params, *frozen[:1])
        x, memory = model.stack(
            model.embed(batch["tokens"]), memory, Context(batch["reset"], batch["valid"])
        )
        return memory, count(*model.losses(x, batch["targets"]), batch, token_bytes)

    return evaluate


def read_batches(session: Session, split: Split) -> list[Batch[np.ndarray]]:
    """Return the first `eval.batches` batches of a split's documents: this process's rows of them.

    Raises:
      UserError: no text is held out.
    """
    config = session.config
    source = TASKS["text"].make_source(
        session.given_config, session.tokenizer, split, session.folder / CHECKED
    )
    if not isinstance(source, TextSource):
        raise UserError(
            f"eval.every={config.eval.every}: seqio and TFDS sets hold out no documents; set "
            "eval.every=0"
        )
    documents = DocumentPass(source, None)
    batches = one_pass(documents, session.rows, session.length, block_len(config))
    local = list(hosts.local_rows(session.program.batch, session.rows, session.length))
    return [
        {name: part[local] for name, part in batch.items()}  # type: ignore[index, misc]
        for batch in islice(batches, config.eval.batches)
    ]


def block_len(config: ResolvedConfig) -> int:
    """Return the tokens between resets: of a stack without blocks, its attention span."""
    model = config.model
    return model.block_len if model.stack == "residual" else model.feedback.span
