"""Entropy of attention weights, and their distance from a teacher's (T2R 4, A.2).

With a query's weights a_j over its context, and a teacher's b_j:

    entropy = -sum_j a_j log a_j (nats)          distance = sqrt(sum_j (a_j - b_j)^2)

The paper predicts one word from the 512 before it, and averages the last query's measures over all
samples, layers and heads (Figures 5 and 6); that is "last" here. "mean" averages over all queries,
including early ones: the i-th query has an entropy of at most log i, and the first one has an
entropy and a distance of 0.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.derived import mixer_pattern
from famjax.core.errors import UserError
from famjax.core.types import Array, Context, Params, State
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import rechunk
from famjax.eval.text import text_source
from famjax.mixers import mixer_specs
from famjax.models.language_model import LanguageModel
from famjax.stacks.residual import ResidualStack
from famjax.train.run import Run


def analyze(
    run: Run,
    teacher: Run | None = None,
    files: str | None = None,
    length: int = 512,
    examples: int = 16,
    quiet: bool = False,
) -> dict[str, Any]:
    """Return the entropy of a run's attention, and its distance from a teacher's.

    Both models run on the same texts. Each layer reads the output of the lower layers of its own
    model.

    Args:
      run: a run with a residual stack.
      teacher: a run with the same numbers of layers and heads, and the same tokenizer.
      files: texts, in the form of `data.files`; None is the holdout.
      length: tokens per example. An example is a contiguous part of a document, and is read with an
        empty memory.
      examples: number of examples. The first example of each document is taken, then the second
        one of each, and so on. There may be fewer.
      quiet: whether to hide the progress.

    Returns:
      length; examples, the actual number; layers, rows of layer, mixer, entropy and distance;
      entropy and distance, averaged over the layers; uniform, both measures for weights that are
      equal over the context. Each measure is a dict of mean (over all queries) and last (of the
      last query). In the rows of layers it also has heads and last_heads, the same values for each
      head; and for entropy also undefined, the fraction of queries whose weights are not a
      distribution (some below 0, or all 0), which are excluded. A measure without a value is None.

    Raises:
      UserError: the models cannot be compared, or no text has that length.
    """
    runs = [run] if teacher is None else [run, teacher]
    _check(runs, length, examples)
    tokens = text_spans(run, files, length, examples)
    rows = [_LayerMeasures(i, name) for i, name in enumerate(_mixers(run))]
    with TokenProgress("analyze", len(tokens) * length, quiet) as progress:
        for i, line in enumerate(tokens):
            read = [attention_weights(opened.model, line) for opened in runs]
            with nullcontext() if i else progress.compiling():
                for row, weights, *other in zip(rows, *read, strict=True):
                    row.add(weights, *other)
            progress.advance(length)
    layers = [row.report() for row in rows]
    return {
        "length": length,
        "examples": len(tokens),
        "layers": layers,
        **_overall(layers),
        "uniform": _overall([row.report_uniform() for row in rows]),
    }


def attention_weights(model: LanguageModel, tokens: np.ndarray) -> Iterator[Array | None]:
    """Read a document [t] with an empty memory, and yield the weights [h t t] of each layer.

    Yields None for a layer that also attends to a memory. Only one layer's weights are held at a
    time.
    """
    t = len(tokens)
    fill = -t % model.block_len
    # the models are causal: padding of the last block affects no valid token
    ctx = Context(valid=jnp.arange(t + fill)[None] < t)
    padded = jnp.pad(jnp.asarray(tokens, jnp.int32), (0, fill))[None]
    x = model.embed(padded)
    state = model.init_state(1)
    stack = model.stack
    assert isinstance(stack, ResidualStack)  # see `_check_run`
    x, _ = stack.make_input(x, state[len(stack.layers) :], model.with_tokens(ctx, padded))
    split = [nnx.split(layer) for layer in stack.layers]
    for repeat in range(stack.repeats):
        for (graph, params), old in zip(split, state, strict=False):
            held = jax.tree.map(operator.itemgetter(repeat), (params, old))
            x, weights = _run_layer(graph, *held, x, ctx)
            yield None if weights is None else weights[0, :, :t, :t]


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: Any, params: Params, state: State, x: Array, ctx: Context
) -> tuple[Array, Array | None]:
    layer = nnx.merge(graph, params)
    return layer(x, state, ctx)[0], layer.mixer.attention_map(x)


@jax.jit
def entropy(weights: Array) -> Array:
    """Return the entropy in nats of normalized weights: [... s] -> [...].

    NaN where the weights are not a distribution.
    """
    total = weights.sum(-1, keepdims=True)
    is_distribution = (weights >= 0).all(-1, keepdims=True) & (total > 0)
    shares = jnp.where(is_distribution, weights, 0) / jnp.where(is_distribution, total, 1)
    return jnp.where(is_distribution[..., 0], jax.scipy.special.entr(shares).sum(-1), jnp.nan)


@jax.jit
def distance(weights: Array, others: Array) -> Array:
    """Return the Euclidean distance of two sets of weights, not normalized: [... s] -> [...]."""
    return jnp.sqrt(jnp.square(weights - others).sum(-1))


@dataclass
class _Mean:
    """A running mean per head that ignores NaN.

    Attributes:
      total, count: [h], sum and number of the values that are not NaN.
      missing: [h], number of NaN.
    """

    total: Any = 0.0
    count: Any = 0
    missing: Any = 0

    def add(self, values: np.ndarray) -> None:
        """Add values [h t]."""
        known = ~np.isnan(values)
        self.total = self.total + np.where(known, values, 0).sum(-1, dtype=np.float64)
        self.count = self.count + known.sum(-1)
        self.missing = self.missing + (~known).sum(-1)

    def heads(self) -> list[float | None]:
        counts = zip(self.total, self.count, strict=True)
        return [float(total / count) if count else None for total, count in counts]

    def undefined(self) -> float:
        return float(self.missing.sum() / (self.missing + self.count).sum())


@dataclass
class _Measure:
    """The means of a measure in one layer: over all queries, and over the last ones only."""

    all: _Mean = field(default_factory=_Mean)
    last: _Mean = field(default_factory=_Mean)

    def add(self, values: Array) -> None:
        """Add values [h t]."""
        array = np.asarray(values)
        self.all.add(array)
        self.last.add(array[:, -1:])

    def report(self) -> dict[str, Any]:
        heads, last = self.all.heads(), self.last.heads()
        return {"mean": mean(heads), "last": mean(last), "heads": heads, "last_heads": last}


@dataclass
class _LayerMeasures:
    """The measures of one layer; each is None if the layer has no values of it."""

    layer: int
    mixer: str
    entropy: _Measure | None = None
    distance: _Measure | None = None
    uniform_entropy: _Measure | None = None
    uniform_distance: _Measure | None = None

    def add(self, weights: Array | None, other: Array | None = None) -> None:
        if weights is None:
            return
        uniform = _uniform(*weights.shape[:2])
        self.entropy = self.entropy or _Measure()
        self.entropy.add(entropy(weights))
        self.uniform_entropy = self.uniform_entropy or _Measure()
        self.uniform_entropy.add(entropy(uniform))
        if other is not None:
            self.distance = self.distance or _Measure()
            self.distance.add(distance(weights, other))
            self.uniform_distance = self.uniform_distance or _Measure()
            self.uniform_distance.add(distance(uniform, other))

    def report(self) -> dict[str, Any]:
        measures: dict[str, Any] = {"entropy": None, "distance": None}
        if self.entropy is not None:
            measures["entropy"] = {
                **self.entropy.report(),
                "undefined": self.entropy.all.undefined(),
            }
        if self.distance is not None:
            measures["distance"] = self.distance.report()
        return {"layer": self.layer, "mixer": self.mixer, **measures}

    def report_uniform(self) -> dict[str, Any]:
        measures = {"entropy": self.uniform_entropy, "distance": self.uniform_distance}
        return {name: found and found.report() for name, found in measures.items()}


def _uniform(heads: int, tokens: int) -> Array:
    """Return equal weights of each query over its context, [h t t]."""
    weights = jnp.tril(jnp.ones((tokens, tokens))) / jnp.arange(1, tokens + 1)[:, None]
    return jnp.broadcast_to(weights, (heads, tokens, tokens))


def mean(values: list[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _overall(layers: list[dict[str, Any]]) -> dict[str, dict[str, float | None] | None]:
    """Average entropy and distance over layers, as the paper's figures do."""

    def average(name: str) -> dict[str, float | None] | None:
        reports = [layer[name] for layer in layers if layer[name] is not None]
        keys = ("mean", "last") if reports else ()
        return {key: mean([row[key] for row in reports]) for key in keys} or None

    return {name: average(name) for name in ("entropy", "distance")}


def text_spans(run: Run, files: str | None, length: int, examples: int) -> list[np.ndarray]:
    """Return contiguous examples [length], taken from each document in turn."""
    source = text_source(run, files)
    longest = [0]

    def iterate_spans(k: int) -> Iterator[np.ndarray]:
        pieces = (piece.tokens for piece in source.open(source.key(0, 1, k)))
        for span in rechunk(pieces, length):
            longest[0] = max(longest[0], len(span))
            if len(span) == length:
                yield span

    spans = list(islice(_round_robin(map(iterate_spans, range(len(source)))), examples))
    if not spans:
        raise UserError(
            f"text:{files or 'holdout'}: no document has {length:,} tokens, the longest has "
            f"{longest[0]:,}; give --length, or other texts"
        )
    return spans


def _round_robin(iterators: Iterable[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield the first item of each iterator, then the second ones, until all have ended."""
    while True:
        left = []
        for iterator in iterators:
            if (item := next(iterator, None)) is not None:
                left.append(iterator)
                yield item
        if not left:
            return
        iterators = left


def _mixers(run: Run) -> list[str]:
    names = mixer_pattern(run.config.model)
    return [*names] * (run.config.model.layers // len(names))


def _check(runs: list[Run], length: int, examples: int) -> None:
    for name, value in (("length", length), ("examples", examples)):
        if value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    for run, which in zip(runs, ("the run", "the teacher"), strict=False):
        _check_run(run, which, length)
    if len(runs) == 2:
        _check_pair(*runs)


def _check_run(run: Run, which: str, length: int) -> None:
    stack, capacity = run.config.model.stack, run.model.stack.capacity
    if stack != "residual":
        raise UserError(
            f"{which} has model.stack={stack}, which is not supported; give one with "
            "model.stack=residual, whose layers attend to tokens"
        )
    if not any(spec.has_attention_map for spec in mixer_specs(run.config.model)):
        raise UserError(
            f"{which} has model.mixer={run.config.model.mixer}, whose layers also read a memory; "
            "measure that with --memory, or give one with other layers"
        )
    if capacity is not None and length > capacity:
        raise UserError(
            f"--length {length}: {which} has full attention of {capacity} tokens (model.capacity); "
            f"give --length {capacity} or less"
        )


def _check_pair(run: Run, teacher: Run) -> None:
    ours, theirs = run.config.model, teacher.config.model
    for name in ("vocab_size", "layers", "heads"):
        one, other = getattr(ours, name), getattr(theirs, name)
        if one != other:
            raise UserError(
                f"--teacher: model.{name}={other}, but the run's is {one}; give the model that the "
                "run was converted from"
            )
    if run.tokenizer.fingerprint != teacher.tokenizer.fingerprint:
        raise UserError(
            f"--teacher: its tokenizer {teacher.tokenizer.name} is not the run's "
            f"{run.tokenizer.name}; give the model that the run was converted from"
        )
