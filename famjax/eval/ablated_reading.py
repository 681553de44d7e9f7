"""Reads documents with the unablated run, and with each ablation of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from famjax.eval.ablations import UNABLATED
from famjax.eval.lane_stream import LaneState, LaneStream, ReadDocument, read_documents
from famjax.eval.memory_usage import update_tokens
from famjax.train.run import Run


class AblatedReading:
    """Streams for the unablated run and for each ablation, all with the same number of lanes.

    Args:
      run: the run.
      lanes: number of documents that are read together.
      answer_lanes: number of lanes of the streams in `answering`.
      chunk: tokens per call; None is about 1024.
      ablations: names of ablations, see `famjax.eval.ablations`.

    Attributes:
      names: `UNABLATED` for the unablated run, then the ablations.
      answering: for each name, the stream that answers questions from the states after reading.
      seconds: time that the unablated run has spent reading.
      has_answered: whether the functions that answer are compiled; set by the evaluation.

    Raises:
      UserError: the model does not have the part that an ablation takes away.
    """

    def __init__(
        self,
        run: Run,
        lanes: int,
        answer_lanes: int,
        chunk: int | None = None,
        ablations: Sequence[str] = (),
    ):
        update = update_tokens(run.config)
        self.names = (UNABLATED, *ablations)
        self._reading = {
            name: LaneStream(run.model, lanes, chunk, name, update) for name in self.names
        }
        self.answering = {
            name: stream.new_stream(answer_lanes) for name, stream in self._reading.items()
        }
        self.seconds = 0.0
        self.has_answered = False
        # with a reset at every block, only the tokens after the last whole block matter: the
        # ablated stream need not read the others
        self._skips_reset = update == run.model.block_len
        self.chunk = self._reading[UNABLATED].chunk

    @property
    def passes(self) -> int:
        """How many times each document is read."""
        return len(self.names) - ("reset" in self.names and self._skips_reset)

    def warm_up(self) -> None:
        """Compile the functions that read, so that timings exclude compilation."""
        for stream in self._reading.values():
            stream.warm_up()

    def read(
        self,
        numbers: Sequence[int],
        open_document: Callable[[int], Iterable[np.ndarray]],
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[dict[str, ReadDocument]]:
        """Yield each document as a dict from the name of the ablation to what was read.

        The arguments are those of `read_documents`.
        """
        streams = {
            name: stream.new_stream()
            for name, stream in self._reading.items()
            if not (name == "reset" and self._skips_reset)
        }
        empty = streams[UNABLATED].lane(0)
        passes = [
            read_documents(stream, numbers, open_document, advance) for stream in streams.values()
        ]
        for documents in zip(self._timed(passes[0]), *passes[1:], strict=True):
            by_name = dict(zip(streams, documents, strict=True))
            yield {
                name: by_name[name] if name in by_name else self._last(documents[0], empty)
                for name in self.names
            }

    @staticmethod
    def _last(document: ReadDocument, empty: LaneState) -> ReadDocument:
        """Return a document as if nothing before its last, incomplete block had been read."""
        return document._replace(state=empty._replace(tokens=document.state.tokens))

    def _timed(self, documents: Iterator[ReadDocument]) -> Iterator[ReadDocument]:
        while True:
            begin = time.perf_counter()
            document = next(documents, None)
            if document is None:
                return
            jax.block_until_ready(document.state.memory)
            self.seconds += time.perf_counter() - begin
            yield document
