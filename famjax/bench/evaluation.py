"""The throughput of streaming evaluations, compared with the model's bare forward pass.

The floor of the ratio is 1: the bare pass makes the same calls on tokens that already exist, and
counts nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import nnx

from famjax.bench.timing import PairedTimes, time_pair
from famjax.config.schema import Config, ModelConfig
from famjax.data.lanes import empty_row, stack_rows
from famjax.eval.ablated_reading import AblatedReading
from famjax.eval.ablations import UNABLATED
from famjax.eval.long import find_task
from famjax.eval.memory_usage import update_tokens
from famjax.eval.streaming import CHUNK, Streamer
from famjax.eval.text import evaluate_text
from famjax.models.language_model import LanguageModel
from famjax.tokenizers.load import load_tokenizer
from famjax.train.run import Run

# a task whose documents are generated while they are read, with noise as the filler
_TASK = "niah_single_1"


class EvaluationTimes(NamedTuple):
    """An evaluation compared with the bare forward pass.

    Attributes:
      name: name of the evaluation.
      tokens: number of tokens that each of the two reads.
      time: times of the bare pass, and of the evaluation; the ratio is the evaluation's share of
        the bare pass's throughput.
    """

    name: str
    tokens: int
    time: PairedTimes


def compare(model: ModelConfig, batch: int, length: int, repetitions: int) -> list[EvaluationTimes]:
    """Measure the reading of documents for questions, and text loss with and without memory."""
    run = _make_run(model)
    return [
        _compare_reading(run, batch, length, repetitions),
        _compare_text(run, batch, length, repetitions),
    ]


def _make_run(model: ModelConfig) -> Run:
    config = Config(model=model)
    config = replace(config, data=replace(config.data, tokenizer="bytes"))
    tokenizer = load_tokenizer("bytes")
    made = LanguageModel(replace(model, vocab_size=tokenizer.vocab_size), rngs=nnx.Rngs(0))
    return Run(config, tokenizer, made, 0)


def _compare_reading(run: Run, batch: int, length: int, repetitions: int) -> EvaluationTimes:
    task, reading = find_task(_TASK), AblatedReading(run, batch, batch)
    documents = [
        task.evaluated_document(run.tokenizer, length, number, batch) for number in range(batch)
    ]
    sizes = [sum(map(len, document.tokens())) for document in documents]
    calls = -(-max(sizes) // reading.chunk)
    streamer = Streamer(run.model, batch, reading.chunk)
    tokens = np.zeros((batch, reading.chunk), np.int32)

    def read_bare() -> object:
        stream = streamer.new_stream()
        for _ in range(calls):
            stream.skim(tokens)
        return stream.state.memory

    def read_documents() -> object:
        found = reading.read(range(batch), lambda number: documents[number].tokens())
        return [each[UNABLATED].state.memory for each in found]

    pair = time_pair(read_bare, read_documents, repetitions)
    return EvaluationTimes(f"{_TASK}, read", calls * reading.chunk * batch, pair)


def _compare_text(run: Run, batch: int, length: int, repetitions: int) -> EvaluationTimes:
    block = update_tokens(run.config)
    chunk = max(CHUNK // block, 1) * block
    streamer = Streamer(run.model, batch, chunk)
    rows = stack_rows([empty_row(chunk)] * batch)
    rows["valid"][:] = True
    calls = -(-length // chunk)
    rng = np.random.default_rng(0)

    def read_bare() -> object:
        results = None
        # with the memory, and without
        for stream in (streamer.new_stream(), streamer.new_stream()):
            for _ in range(calls):
                results = stream.batch_losses(rows)
            stream.wait()
        return results

    with tempfile.TemporaryDirectory() as folder:
        for number in range(batch):
            letters = rng.integers(97, 123, size=length - 2).astype(np.uint8)
            Path(folder, f"{number}.txt").write_bytes(letters.tobytes())
        evaluate: Callable[[], object] = lambda: evaluate_text(  # noqa: E731
            run, folder, batch=batch, quiet=True
        )["loss"]
        pair = time_pair(read_bare, evaluate, repetitions)
    return EvaluationTimes("text, with the memory and without", 2 * calls * chunk * batch, pair)
