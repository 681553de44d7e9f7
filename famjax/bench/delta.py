"""The cost of a delta-rule memory in every second layer or in all: against BSWA of equal shape.

The floor is the ratio of the FLOPs that are computed, including those of masked scores. It is the
same for a training step, although the memory's gradient computes each block once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from famjax.bench.fam import streaming_call
from famjax.bench.steps import training_call
from famjax.bench.timing import PairedTimes, time_pair
from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.train.flops import forward_flops

BLOCKS = (64, 128, 256, 512)
MIXERS = ("bswa,delta", "delta")


class DeltaCost(NamedTuple):
    """The times of a model with delta-rule memories, and of BSWA, at one block length.

    Attributes:
      mixer: `model.mixer` of the first model.
      block_len: number of tokens of a block.
      training, streaming: times of a training step, and of reading as many tokens.
      floor: ratio of their FLOPs.
    """

    mixer: str
    block_len: int
    training: PairedTimes
    streaming: PairedTimes
    floor: float


def measure_costs(
    model: ModelConfig, batch: int, length: int, repetitions: int
) -> Iterator[DeltaCost]:
    """Measure training step and streaming of each of `MIXERS` at each of `BLOCKS`."""
    for block_len in BLOCKS:
        bswa = replace(model, mixer="bswa", block_len=block_len)
        for mixer in MIXERS:
            delta = replace(bswa, mixer=mixer)
            flops, bswa_flops = (
                forward_flops(resolve_model(m), computed=True) for m in (delta, bswa)
            )
            training, streaming = (
                time_pair(call(delta, batch, length), call(bswa, batch, length), repetitions)
                for call in (training_call, streaming_call)
            )
            yield DeltaCost(mixer, block_len, training, streaming, flops / bswa_flops)
