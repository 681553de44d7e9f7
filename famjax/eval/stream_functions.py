"""The compiled functions of a stream: reading, losses, single tokens, generation, beam search."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike

from famjax.core.types import Array, Context, Params, State
from famjax.eval.beam import BeamSettings, Hypotheses, beam_search
from famjax.eval.sampling import Sampling
from famjax.models.language_model import LanguageModel
from famjax.parallel import traced

# maximum tokens that one call generates, to amortize dispatch and synchronization
TOKENS_PER_CALL = 32


class StreamFunctions(NamedTuple):
    """The jitted functions of a model. All of them but `search` donate their state argument.

    Attributes:
      start: (params, b) -> state.
      read: (params, state, tokens, ctx, last, steps) -> (logits [b v] after the token with index
        `last`, state). `last` is one index for all lanes, or [b]. With `steps` (static) the tokens
        up to `last` are read one by one, from anywhere in a block.
      skim: (params, state, tokens, ctx) -> (a scalar that is ready when the state is, state).
      losses: (params, state, tokens, targets, ctx, last, steps) -> (nll, correct, logits [b v],
        state).
      step: (params, state, tokens [b 1], ctx) -> (logits [b v], state).
      draw: (logits [b v], sampling, position) -> tokens [b 1] at that position of the text.
      write: (params, state, final_len, token [1 1], position, count, sampling, stops) ->
        (tokens [TOKENS_PER_CALL], number of tokens written, logits [1 v], state).
      search: (params, state, final_len, logits [b v], settings, stops, prompt) -> hypotheses, as
        `famjax.eval.beam.beam_search`.

    `final_len` (static) is the most tokens that the document has when the text is complete.
    """

    start: Callable[[Params, int], State]
    # the arguments are `...` where one, `steps`, is given by name
    read: Callable[..., tuple[Array, State]]
    skim: Callable[[Params, State, Array, Context], tuple[Array, State]]
    losses: Callable[..., tuple[Array, Array, Array, State]]
    step: Callable[[Params, State, Array, Context], tuple[Array, State]]
    draw: Callable[[Array, Sampling, ArrayLike], Array]
    write: Callable[
        [Params, State, int, ArrayLike, ArrayLike, ArrayLike, Sampling, ArrayLike],
        tuple[Array, Array, Array, State],
    ]
    search: Callable[
        [Params, State, int, Array, BeamSettings, ArrayLike, ArrayLike | None], Hypotheses
    ]


@functools.lru_cache(maxsize=8)
def jit_functions(graph: Any, mesh: Mesh) -> StreamFunctions:
    """Return the jitted functions of a model's graph; they take its parameters as arguments.

    All streams over models with the same graph share them, and compile once.

    Args:
      mesh: the devices that the parameters are on.
    """

    def bind(f: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(traced.with_mesh(mesh, f), graph)

    return StreamFunctions(
        start=jax.jit(bind(_start), static_argnums=1),
        read=jax.jit(bind(_read), donate_argnums=1, static_argnames="steps"),
        skim=jax.jit(bind(_skim), donate_argnums=1),
        losses=jax.jit(bind(_losses), donate_argnums=1, static_argnames="steps"),
        step=jax.jit(bind(_step), donate_argnums=1),
        draw=jax.jit(lambda logits, sampling, position: sampling.draw(logits, position)),
        write=jax.jit(bind(_write), donate_argnums=1, static_argnums=2),
        search=jax.jit(bind(_search), static_argnums=2),
    )


def _start(graph: Any, params: Params, batch: int) -> State:
    model = nnx.merge(graph, params)
    return traced.with_state_constraint(model.init_state(batch), model.state_axes())


def _read(
    graph: Any,
    params: Params,
    state: State,
    tokens: Array,
    ctx: Context,
    last: Array,
    steps: bool = False,
) -> tuple[Array, State]:
    model = nnx.merge(graph, params)
    x, state = _run_stack(model, tokens, state, ctx, last, steps)
    # logits of one token only: with a large vocabulary, those of all tokens dominate the cost
    x = jnp.take(x, last, axis=1) if last.ndim == 0 else x[jnp.arange(len(last)), last]
    return model.logits(x), state


def _skim(
    graph: Any, params: Params, state: State, tokens: Array, ctx: Context
) -> tuple[Array, State]:
    model = nnx.merge(graph, params)
    # XLA omits what only the logits need; without `scan_layers` that includes the last layer's
    # attention and feed-forward
    _, state = model.stack(model.embed(tokens), state, model.with_tokens(ctx, tokens))
    return jax.tree.leaves(state)[0].ravel()[0], state


def _losses(
    graph: Any,
    params: Params,
    state: State,
    tokens: Array,
    targets: Array,
    ctx: Context,
    last: Array,
    steps: bool = False,
) -> tuple[Array, Array, Array, State]:
    model = nnx.merge(graph, params)
    x, state = _run_stack(model, tokens, state, ctx, last, steps)
    logits = model.logits(jnp.take(x, last, axis=1))
    return *model.losses(x, targets), logits, state


def _step(
    graph: Any, params: Params, state: State, tokens: Array, ctx: Context
) -> tuple[Array, State]:
    logits, state = nnx.merge(graph, params).step(tokens, state, ctx)
    return logits[:, 0], state


def _search(
    graph: Any,
    params: Params,
    state: State,
    final_len: int,
    logits: Array,
    settings: BeamSettings,
    stops: Array,
    prompt: Array | None,
) -> Hypotheses:
    model = nnx.merge(graph, params)
    state = model.unstack(model.stack.shorten(state, final_len), settings.beams)
    model.stack.unstack_layers(state)
    axes = model.stack.row_axes(state)
    return beam_search(model.step, logits, state, axes, settings, stops, prompt)


def _run_stack(
    model: LanguageModel, tokens: Array, state: State, ctx: Context, last: Array, steps: bool
) -> tuple[Array, State]:
    """Return the stack's output [b t d] for tokens [b t], and the state.

    Args:
      steps: whether to read the tokens up to `last` one by one, without resets; the output of later
        ones is 0, and they do not change the state.
    """
    x = model.embed(tokens)
    if not steps:
        return model.stack(x, state, model.with_tokens(ctx, tokens))

    def step(at: Array, state: State) -> tuple[Array, State]:
        embedded, token = (jax.lax.dynamic_slice_in_dim(a, at, 1, axis=1) for a in (x, tokens))
        return model.stack.step(embedded, state, model.with_tokens(Context(), token))

    def read_token(carry: Any) -> Any:
        at, y, state = carry
        output, state = step(at, state)
        return at + 1, jax.lax.dynamic_update_slice_in_dim(y, output, at, axis=1), state

    output = jax.eval_shape(step, last, state)[0]
    y = jnp.zeros(x.shape, output.dtype)
    state = model.unstack(state)
    model.stack.unstack_layers(state)
    carry = (jnp.zeros_like(last), y, state)
    _, y, state = jax.lax.while_loop(lambda carry: carry[0] <= last, read_token, carry)
    return y, model.restack(state)


def _write(
    graph: Any,
    params: Params,
    state: State,
    final_len: int,
    token: Array,
    position: Array,
    count: Array,
    sampling: Sampling,
    stops: Array,
) -> tuple[Array, Array, Array, State]:
    """Alternately read a token and sample the next one, up to a stop token or `count` tokens.

    Args:
      graph, params: the model.
      state: the state of one lane.
      final_len: maximum number of tokens of the document when the text is complete.
      token: [1 1], the first token to read.
      position: position of the first token to sample.
      count: maximum number of tokens to sample, at most TOKENS_PER_CALL.
      sampling: the sampling parameters.
      stops: [...], stop tokens.

    Returns:
      the sampled tokens [TOKENS_PER_CALL], their number, the last logits [1 v], and the state.
    """

    def keep_writing(carry: Any) -> Array:
        token, written, *_ = carry
        return (written < count) & ~jnp.isin(token, stops).any()

    def write_token(carry: Any) -> Any:
        token, written, tokens, _, state = carry
        logits, state = model.step(token, state)
        token = sampling.draw(logits[:, 0], position + written.astype(position.dtype))
        tokens = tokens.at[written].set(token[0, 0])
        return token, written + 1, tokens, logits[:, 0], state

    model = nnx.merge(graph, params)
    shape = jax.eval_shape(model.step, token, state)[0]
    tokens = jnp.zeros(TOKENS_PER_CALL, jnp.int32)
    logits = jnp.zeros(shape.shape[::2], shape.dtype)
    whole, state = state, model.unstack(model.stack.shorten(state, final_len))
    model.stack.unstack_layers(state)
    carry = (token, jnp.int32(0), tokens, logits, state)
    _, written, tokens, logits, state = jax.lax.while_loop(keep_writing, write_token, carry)
    return tokens, written, logits, model.stack.lengthen(model.restack(state), whole)
