"""The base classes of mixers: the module in a layer, and what a config alone determines about it.

A new mixer is one file with a `Mixer` and a `MixerSpec`, and one line in `famjax.mixers.MIXERS`.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import Config, ModelConfig
from famjax.core.types import Array, Context, State, param_dtype
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV

# formats of `famjax export`; each is a module in famjax/export with a function
# write(source, folder), which returns lines about the comparison with the run
FORMATS = ("hf", "peft", "orbax", "stablehlo")


class BlockWeights(NamedTuple):
    """The attention weights of a block.

    Attributes:
      segments, memory, block: [b h w m*w], [b h w p*f], [b h w w], the weights of the block's
        queries on the memory segments, the feedback memories, and the block itself. Together they
        sum to 1.
      from_memory: [b h f f+w], the weights of the memory's queries on the memory itself and the
        block; None without a memory.
    """

    segments: Array
    memory: Array
    block: Array
    from_memory: Array | None = None


class MemoryLosses(NamedTuple):
    """Auxiliary losses of a memory: scalars, each the mean over the complete blocks of a call.

    Losses that the memory does not have are None.

    Attributes:
      diversity, reconstruction: losses of FAM, see `famjax.mixers.fam_measures`; diversity is in
        nats.
      writing: the mean gate of FAM's update, or the mean write rate of the delta rule, in [0, 1].
    """

    diversity: Array | None = None
    reconstruction: Array | None = None
    writing: Array | None = None


class Mixer(nnx.Module):
    """The attention of a layer, which mixes tokens, and the state that it carries.

    A mixer is a function of a segment and a carried state, with this contract:

    - the state has constant shapes, whatever was read;
    - calls on consecutive segments equal one call on all of them;
    - `step` equals `__call__` on one token, at any position in a block;
    - neither padding nor the state before a reset has an effect on what follows.

    `tests/contracts` checks it for every mixer, with `tests/contracts/harness.py`.

    Attributes:
      qkv: the projections, the same in every mixer, so that one can replace another.
      block_len: a call takes a multiple of this many tokens.
      receptive_blocks: number of earlier blocks that a block depends on; None means all.
      reads_prompt: whether calls need `Context.prompt` even without resets.
    """

    reads_prompt: bool = False
    qkv: QKV
    block_len: int
    receptive_blocks: int | None = None

    @abc.abstractmethod
    def init_state(self, batch: int, prompt: Array | None = None) -> State:
        """Return the state of streams that have read nothing.

        Args:
          prompt: [f d], or [b f d] if each row has its own, the FAM prompt at this layer's input
            (TransformerFAM B.1); None if no layer of the model has a memory.
        """

    @abc.abstractmethod
    def state_axes(self) -> State:
        """Return the logical axes of the state's arrays (`famjax.parallel.sharding`)."""

    @abc.abstractmethod
    def __call__(
        self, x: Array, state: State, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, State]:
        """Process whole blocks, from their start: [b t d] -> [b t d], and the state after them.

        Args:
          mlp: the layer's feed-forward, for a mixer that applies it to its memory or its output.
        """

    @abc.abstractmethod
    def step(self, x: Array, state: State, ctx: Context, mlp: FeedForward) -> tuple[Array, State]:
        """Process one token per lane: [b 1 d] -> [b 1 d], and the state after it."""

    def check_capacity(self, state: State, tokens: int) -> None:
        """Raise a `UserError` if that many more tokens do not fit into the state; not under jit."""

    # the memory that outlives the window; most mixers have none

    def encode_memory_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        """Return the attention output of the FAM prompt's tokens (B.1).

        Args:
          prompt: [f d], or with an offset [b], [b f d]; the result has the same shape.
        """
        return self.qkv.encode_memory_prompt(prompt, offset)

    def memory(self, state: State) -> Array | None:
        """Return the memory in a state, [b f ...]; None if there is none.

        It has f parts, which are memory tokens [d] or heads [k e].
        """
        return None

    def passable_state(self, state: State) -> State:
        """Return the part of a state that `pass_state` uses."""
        return ()

    def pass_state(self, fresh: State, saved: State) -> State:
        """Return the state of a new document that inherits a memory (random state passing, B.2.3).

        Args:
          saved: a state, or its `passable_state`.
        """
        return fresh

    def attention_mass(self, x: Array, state: State, ctx: Context, mlp: FeedForward) -> Array:
        """Return the mean share of the memory in what tokens read: a scalar.

        It is a share of the attention weights, or of the norms of the vectors read,
        |memory| / (|memory| + |window|). The latter leaves out padding.
        """
        return jnp.zeros(())

    def memory_gates(self, x: Array, state: State, ctx: Context, mlp: FeedForward) -> Array | None:
        """Return the gates of the update by one block, [b w d] -> [b f]; None without gates."""
        return None

    def token_rates(self, x: Array, state: State, ctx: Context, mlp: FeedForward) -> Array | None:
        """Return the rates at which tokens are written to the memory, [b t d] -> [b t f].

        None if it is not written token by token.
        """
        return None

    def block_weights(
        self, x: Array, state: State, ctx: Context, mlp: FeedForward
    ) -> BlockWeights | None:
        """Return the attention weights of one block [b w d]; None if the mixer has no blocks."""
        return None

    def memory_losses(
        self, x: Array, y: Array, state: State, ctx: Context, mlp: FeedForward
    ) -> MemoryLosses | None:
        """Return the memory's auxiliary losses in a call; None if it has none.

        Args:
          x, y: [b t d], the layer's input and output.
        """
        return None

    def replace_memory(self, state: State, memory: Array) -> State:
        """Return a state with another memory [b f ...]."""
        return state

    # measurements, and training of feature maps

    def attention_map(self, x: Array) -> Array | None:
        """Return the attention weights of documents in one call, [b t d] -> [b h t t].

        None if the mixer attends to more than tokens.
        """
        return None

    def match_softmax(
        self, x: Array, state: State, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, Array]:
        """Return the output with softmax attention [b t d], and the feature maps' errors [b].

        A mixer without feature maps returns its usual output, and errors of 0.
        """
        return self(x, state, ctx, mlp)[0], jnp.zeros(len(x), param_dtype())

    def encode_prompt_with_softmax(self, prompt: Array, offset: Array | None = None) -> Array:
        """Return what `encode_memory_prompt` returns, computed with softmax attention."""
        return self.encode_memory_prompt(prompt, offset)

    def fold_feature_map(self) -> None:
        """Fold a feature map into the projections, in place (T2R, Equation 8)."""


class MixerSpec(abc.ABC):
    """What the rest of the program needs to know about a mixer before one is made.

    Costs are per layer. They may be requested before a config is checked, when its sizes may be
    inconsistent, or 0.

    Attributes:
      title: the mixer's name in messages, as in "does not support linear attention".
      keys: config keys (`fnmatch` patterns) that have an effect only with mixers that list them.
      switches: like `keys`, but with the values 0, false, none and "" they are always accepted.
      is_blockwise: whether it attends block by block, so that blocks can be sharded, and
        recomputed one at a time.
      is_bounded: whether documents are limited to `model.capacity` tokens, of which the state is a
        cache.
      is_local: whether it attends to a token window (`window`), with the RoPE base of local layers.
      has_memory_prompt: whether it has the FAM prompt (`encode_memory_prompt`).
      applies_mlp: whether it applies the feed-forward itself, so that it returns the layer's
        output.
      passes_memory: whether it has a memory that outlives the window, which `Mixer.pass_state`
        passes on.
      has_feature_map: whether it has a feature map, which `train.match` and `train.only` train.
      has_attention_weights: whether it computes weights, to which dropout and caps can apply.
      has_attention_map: whether it defines `Mixer.attention_map`.
      allows_post_norm: whether norms may follow the residual sums, `arch.pre_norm` false.
      formats: the formats of `famjax export` that support it, of all in `FORMATS`; hf and peft
        need the layer in PyTorch.
      layer_type: its name in Hugging Face's `layer_types`; "" if there is none.
      convert_name: its name for `famjax convert --to`; "" means its registered name.
      convert_settings: model config settings that apply, unless others are given, where
        `famjax convert` or `load_pretrained` adds this mixer, or a run starts from a model without
        it (`init`).
    """

    title: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    switches: ClassVar[tuple[str, ...]] = ()
    is_blockwise: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    has_memory_prompt: ClassVar[bool] = False
    applies_mlp: ClassVar[bool] = False
    passes_memory: ClassVar[bool] = False
    has_feature_map: ClassVar[bool] = False
    has_attention_weights: ClassVar[bool] = True
    has_attention_map: ClassVar[bool] = False
    allows_post_norm: ClassVar[bool] = False
    formats: ClassVar[tuple[str, ...]] = ("orbax", "stablehlo")
    layer_type: ClassVar[str] = ""
    convert_name: ClassVar[str] = ""
    convert_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @property
    def smears_keys(self) -> bool:
        """Return whether `model.smeared_keys` applies to it."""
        return "model.smeared_keys" in (*self.keys, *self.switches)

    def unexportable_setting(self, model: ModelConfig) -> str:
        """Return the setting that the exported PyTorch code does not support, or ""."""
        return ""

    @abc.abstractmethod
    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> Mixer:
        """Return a new mixer."""

    def initial_param(self, model: ResolvedModelConfig, name: str, rngs: nnx.Rngs) -> Array:
        """Return the initial value of a parameter outside of `QKV`, such as "map.kernel"."""
        return operator.attrgetter(name)(self.make(model, rngs))[...]

    def check(self, config: Config) -> Iterator[str]:
        """Yield an error line for each setting that this mixer cannot work with."""
        yield from ()

    @abc.abstractmethod
    def keys_seen(self, model: ModelConfig) -> float:
        """Return the number of keys that a token attends to, on average over a long document.

        The causal part, a block or a cache, counts with half of its length.
        """

    @abc.abstractmethod
    def keys_computed(self, model: ModelConfig) -> float:
        """Return the number of keys that a token's query is multiplied with, masked or not."""

    def flops(self, model: ModelConfig, computed: bool = False) -> float:
        """Return the model FLOPs of the forward pass of one token, feed-forward included.

        Args:
          computed: count all query-key pairs, not only unmasked ones.
        """
        keys = self.keys_computed(model) if computed else self.keys_seen(model)
        return 2 * layer_weights(model) + attention_flops(model, keys)

    def weight_flops(self, model: ModelConfig) -> float:
        """Return the part of `flops` that is products with weights of linear maps."""
        return 2 * layer_weights(model)

    def softmax_matching_flops(self, model: ModelConfig, length: int) -> float:
        """Return the FLOPs of one token of a row of `length` while feature maps are trained."""
        return self.flops(model)

    def remote_keys(self, model: ModelConfig, tokens: float) -> float:
        """Return how many keys of a row a device receives from other devices.

        Args:
          tokens: number of the row's tokens that other devices hold.
        """
        return 0

    def recurrent_share(self, model: ModelConfig) -> float:
        """Return the fraction of a block's tokens that are processed sequentially."""
        return 0.0

    def count_params(self, model: ModelConfig) -> int:
        """Return the number of parameters besides those of `QKV`."""
        return 0

    def constants(self, model: ModelConfig) -> dict[str, float]:
        """Return the constants, by name, that determine the function besides the parameters.

        They are constants of the code, or were in earlier versions. Checkpoints and memory files
        record them, since the same parameters with other constants are another function.
        """
        return {}

    @abc.abstractmethod
    def state_bytes(self, model: ModelConfig) -> int:
        """Return a lower bound on the bytes of the state of one document."""

    @abc.abstractmethod
    def max_attention_weights(self, config: Config) -> int:
        """Return a lower bound on how many attention weights of a head training holds at once."""

    def window(self, model: ModelConfig) -> int:
        """Return the window of a local mixer, in tokens; 0 for other mixers."""
        return 0

    def has_write_gates(self, model: ModelConfig) -> bool:
        """Return whether its memory has gates or rates: `train.write_loss` is on their mean."""
        return False

    def rope_off_setting(self, model: ModelConfig) -> str:
        """Return the setting that disables rotary positions of queries and keys, or ""."""
        return ""

    def describe(self, model: ModelConfig) -> list[str]:
        """Return phrases about the size of its memory, for the card of an exported model."""
        return []


def mean_where(values: Array, counted: Array) -> Array:
    """Return the mean of the values of blocks where `counted` [b n] is True; 0 if it is nowhere.

    Args:
      values: the same number of values for each block, in the blocks' order: [b n ...], [b n*w d].
    """
    by_block = values.reshape(*counted.shape, -1).mean(-1)
    return jnp.where(counted, by_block, 0).sum() / jnp.maximum(counted.sum(), 1)


def mean_of_valid(x: Array, valid: Array | None) -> Array:
    """Return the mean of x [b t ...] where `valid` [b t] is True; 0 if it is nowhere."""
    if valid is None:
        return x.mean()
    used = valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
    return jnp.where(used, x, 0).sum() / jnp.maximum(valid.sum() * x[0, 0].size, 1)


def norm_share(recalled: Array, attended: Array, valid: Array | None) -> Array:
    """Return the mean share of `recalled` in the norms of the two [b t ... d]; 0 of two zeros.

    Args:
      valid: [b t] bool, the tokens that count; None means all.
    """
    part, rest = (jnp.linalg.norm(a.astype(param_dtype()), axis=-1) for a in (recalled, attended))
    total = part + rest
    return mean_of_valid(part / jnp.where(total > 0, total, 1), valid)


def layer_weights(model: ModelConfig) -> int:
    """Return the number of weights in a layer's projections and feed-forward, without biases."""
    d, h, g, e, hidden = sizes(model)
    gated = 3 if model.mlp in ("swiglu", "geglu") else 2
    return d * (2 * h * e + 2 * g * e + gated * hidden)


def attention_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of one token's scores and weighted sums of values, for that many keys."""
    return 2 * 2 * model.heads * sizes(model).e * keys


def kv_bytes(model: ModelConfig) -> int:
    """Return the bytes of one token's keys and values, over all heads."""
    s = sizes(model)
    return 2 * s.g * s.e * (2 if model.dtype == "bfloat16" else 4)
