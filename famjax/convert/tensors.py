"""How one parameter of ours lies in a Hugging Face checkpoint, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """One of several maps that a checkpoint keeps as one.

    Attributes:
      place: which one.
      of: so many.
      each: outputs of one map that stand together; then follow as many of the next map. All of
        them: the maps lie one behind the other. Those of one head: they take turns head by head.
    """

    number: int
    total: int
    width: int


@dataclass(frozen=True)
class Tensor:
    """A parameter's name and layout there.

    Attributes:
      name: "{}" stands for the layer.
      inputs: how many leading axes of ours are one axis there, the inputs; all others are the
        outputs. 0 is a vector.
      turned: [outputs inputs] there; else [inputs outputs].
      part: of a tensor that holds several maps.
    """

    name: str
    inputs: int = 0
    transposed: bool = False
    part: Part | None = None

    def flat_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return inputs and outputs of our [shape]; a vector has one input."""
        return math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])

    def checkpoint_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that a parameter of our `shape` has in the checkpoint."""
        inputs, outputs = self.flat_shape(shape)
        outputs *= self.part.total if self.part else 1
        if not self.inputs:
            return (outputs,)
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def row_multiple(self) -> int:
        """Return of how many rows there a piece must consist, or a multiple of that."""
        by_output = self.transposed or not self.inputs
        return self.part.total * self.part.width if self.part and by_output else 1

    def from_checkpoint(self, rows: np.ndarray) -> np.ndarray:
        """Return [inputs outputs] of ours that some rows there hold."""
        x = rows.T if self.transposed else np.atleast_2d(rows)
        if self.part:
            number, total, width = self.part
            x = x.reshape(x.shape[0], -1, total, width)[:, :, number].reshape(x.shape[0], -1)
        return x

    def to_checkpoint(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor there, of our parameters of all its parts in order."""
        inputs, _ = self.flat_shape(ours[0].shape)
        maps = [x.reshape(inputs, -1) for x in ours]
        if self.part:
            by_part = [x.reshape(inputs, -1, self.part.width) for x in maps]
            maps = [np.stack(by_part, 2).reshape(inputs, -1)]
        x = maps[0].T if self.transposed else maps[0]
        return np.ascontiguousarray(x if self.inputs else x[0])


# keys are paths of parameters: those of a layer below "layer"
Tensors = dict[str, Tensor]


def linear_kernel(name: str, inputs: int = 1) -> Tensor:
    """Return the kernel of a torch.nn.Linear."""
    return Tensor(f"{name}.weight", inputs, transposed=True)
