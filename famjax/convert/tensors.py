"""The layout of a parameter in a Hugging Face checkpoint, and conversion in both directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """One of several linear maps that a checkpoint stores fused in one tensor.

    Attributes:
      number: index of the map.
      total: number of maps.
      width: number of contiguous outputs of one map, which are followed by as many of the next. If
        these are all outputs of a map, the maps are concatenated; if they are those of one head,
        the maps are interleaved by head.
    """

    number: int
    total: int
    width: int


@dataclass(frozen=True)
class Tensor:
    """A parameter's name and layout in the checkpoint.

    Attributes:
      name: the tensor's name, in which "{}" is replaced by the layer's number.
      inputs: number of leading axes of our array that are inputs, flattened to one axis in the
        checkpoint; the others are outputs. 0 for a vector.
      transposed: whether it is stored as [outputs inputs], else as [inputs outputs].
      part: which part of a fused tensor it is; None if the tensor is not fused.
      is_row: whether a vector is stored as a matrix of one row.
    """

    name: str
    inputs: int = 0
    transposed: bool = False
    part: Part | None = None
    is_row: bool = False

    def names(self, shape: Sequence[int]) -> dict[str, int | None]:
        """Return the tensors' names for an array of `shape` outside of the layer pattern.

        An encoder's arrays hold all of its layers: each name maps to the layer's index in the
        array. The name of any other array maps to None.
        """
        if "{}" not in self.name:
            return {self.name: None}
        return {self.name.format(i): i for i in range(shape[0])}

    def flat_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (inputs, outputs) of our `shape`; a vector has one input."""
        return math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])

    def checkpoint_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in the checkpoint of a parameter with our `shape`."""
        inputs, outputs = self.flat_shape(shape)
        outputs *= self.part.total if self.part else 1
        if not self.inputs:
            return (1, outputs) if self.is_row else (outputs,)
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def row_multiple(self) -> int:
        """Return a number of which the rows of every slice of the checkpoint must be a multiple."""
        by_output = self.transposed or not self.inputs
        return self.part.total * self.part.width if self.part and by_output else 1

    def from_checkpoint(self, rows: np.ndarray) -> np.ndarray:
        """Return our [inputs outputs] from a slice of rows of the checkpoint."""
        x = rows.T if self.transposed else np.atleast_2d(rows)
        if self.part:
            number, total, width = self.part
            x = x.reshape(x.shape[0], -1, total, width)[:, :, number].reshape(x.shape[0], -1)
        return x

    def to_checkpoint(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Return the checkpoint's tensor from our arrays for all of its parts, in order."""
        inputs, _ = self.flat_shape(ours[0].shape)
        maps = [x.reshape(inputs, -1) for x in ours]
        if self.part:
            by_part = [x.reshape(inputs, -1, self.part.width) for x in maps]
            maps = [np.stack(by_part, 2).reshape(inputs, -1)]
        x = maps[0].T if self.transposed else maps[0]
        return np.ascontiguousarray(x if self.inputs or self.is_row else x[0])


# keys are parameter paths; those of a layer start with "layer"
Tensors = dict[str, Tensor]


def linear_kernel(name: str, inputs: int = 1) -> Tensor:
    """Return the kernel of a torch.nn.Linear."""
    return Tensor(f"{name}.weight", inputs, transposed=True)
