"""Transformers with feedback memory, for streams of any length with a state of constant size.

    logits, state = model(ids)[:2]                 # [b t v], and the carried state
    logits, state = model(more, state=state)[:2]   # continues; calls may have any length
    logits = model(ids, attention_mask=mask)[0]    # rows padded on the left, or on the right

TransformerFAM (arXiv 2404.09173): a block of w tokens attends to itself, to the m blocks before it
(2.1) and to a feedback memory of f tokens (2.2). After each full block the memory attends to the
block with the layer's own weights; the next block attends to the new memory.

A call is processed block by block. Keys are cached without rotary positions and rotated when they
are used, relative to the current block: no angle grows with the length of the stream.

Each row of a batch is its own stream: it starts at its first token that is not padding, and so do
its blocks. Rows may be at different positions of their streams and blocks; their keys are then
right-aligned, so that distances between queries and keys are equal in all rows.

Shapes: b batch, t tokens, d width, h heads, g key and value heads, e head size, f memory tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils import ModelOutput

from .attention_famjax import Attention, LayerState, Norm, row_tensor
from .configuration_famjax import FamjaxConfig
from .linear_famjax import LinearAttention, make_cross_attention
from .ngrams_famjax import NgramMemory, NgramState
from .short_conv_famjax import ShortConv

GATED_ACTIVATIONS = {
    "swiglu": functional.silu,
    "geglu": lambda x: functional.gelu(x, approximate="tanh"),
}
# `generate` keeps the current state under the name that beam search looks for first:
# "past_key_values", and "cache" from transformers 5.24 on
CACHE = ALL_CACHE_NAMES[0]
ACTIVATIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_exact": functional.gelu,
    "relu": functional.relu,
    "swish": functional.silu,
}


class SourceState(NamedTuple):
    """An encoder's output, as the decoder's layers attend to it.

    Attributes:
      layers: keys and values [b s g e] for each layer; with linear attention, their sums.
      mask: [b 1 s] bool, True is visible.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    mask: torch.Tensor


class FamjaxState(NamedTuple):
    """The state after the tokens processed so far. Immutable.

    Attributes:
      tokens: number of tokens processed, by row.
      layers: the layers' states.
      source: the source of a model with an encoder; None for others.
      ngrams: the state of the n-gram memory; None without one.
      embedded: the last embeddings [b k-1 d] of the short convolution; None without one.
    """

    tokens: tuple[int, ...]
    layers: tuple[LayerState, ...]
    source: SourceState | None = None
    ngrams: NgramState | None = None
    embedded: torch.Tensor | None = None

    def select(self, rows):
        """Return the state of the given rows [n], which may repeat."""

        def take(x):
            return x if x is None else x.index_select(0, rows.to(x.device))

        layers = tuple(LayerState(*map(take, layer)) for layer in self.layers)
        source = self.source
        if source is not None:
            pairs = tuple(tuple(map(take, pair)) for pair in source.layers)
            source = SourceState(pairs, take(source.mask))
        ngrams = None if self.ngrams is None else NgramState(*map(take, self.ngrams))
        tokens = tuple(self.tokens[row] for row in rows.tolist())
        return FamjaxState(tokens, layers, source, ngrams, take(self.embedded))


class Step(NamedTuple):
    """A segment of a call that ends, in each row, at or before the end of its block.

    Attributes:
      tokens: number of tokens before the segment, by row.
      counts: number of the segment's tokens, by row; the rest is padding.
    """

    tokens: tuple[int, ...]
    counts: tuple[int, ...]

    def completes_block(self, block):
        """Return whether the segment completes a block, by row."""
        pairs = zip(self.tokens, self.counts, strict=True)
        return [count > 0 and (tokens + count) % block == 0 for tokens, count in pairs]

    def tokens_after(self):
        return tuple(map(sum, zip(self.tokens, self.counts, strict=True)))


@dataclass
class FamjaxOutput(ModelOutput):
    """`state` is for the next call; `loss` is set if labels are given.

    hidden_states: if requested, the embeddings and each layer's output [b t d]; the last one is the
    normalized input of the head.
    """

    logits: torch.Tensor | None = None
    state: FamjaxState | None = None
    loss: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None

    @property
    def decoder_hidden_states(self):
        """The hidden states, under the name by which `generate` reads them with an encoder."""
        return self.hidden_states


def position_table(config):
    """Return the table of learned positions; None without one."""
    rows = config.arch["position_offset"] + config.capacity
    return nn.Embedding(rows, config.width) if config.arch["positions"] == "learned" else None


def add_positions(config, table, x, at):
    """Add the vectors of positions [b t] or [1 t] to embeddings [b t d]."""
    if table is not None:
        return x + table(config.arch["position_offset"] + at % config.capacity)
    kind = config.arch["positions"]
    return x if kind == "none" else x + sinusoids(at, x.shape[-1], kind).to(x.dtype)


def sinusoids(at, width, kind):
    """Return sines and cosines of positions (Vaswani et al., 2017, 3.5): [b t] -> [b t d]."""
    # in float64: the products with positions are large
    theta = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = at.double()[..., None] * theta.to(at.device)
    if kind == "sinusoidal_halves":
        return torch.cat((angle.sin(), angle.cos()), -1).float()
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()


def slice_rows(ids, starts, count):
    """Return `count` columns of [b t] from each row's start; undefined beyond t."""
    if len(set(starts)) == 1:
        return ids[:, starts[0] : starts[0] + count]
    at = row_tensor(starts, ids.device) + torch.arange(count, device=ids.device)
    return ids.gather(1, at.clamp_max(ids.shape[1] - 1))


def gather_columns(pieces, index):
    """Return the columns `index` [b n] of the concatenated pieces, each [b t d]: [b n d]."""
    x = torch.cat(pieces, 1)
    return x.gather(1, index.to(x.device)[..., None].expand(-1, -1, x.shape[-1]))


def valid_range(mask, b, t, fresh):
    """Return for each row its first column that is not padding, and the column after its last.

    Args:
      mask: attention_mask or None.
      fresh: whether the call continues no earlier tokens.
    """
    if mask is None:
        return [0] * b, [t] * b
    if mask.ndim != 2 or len(mask) != b or mask.shape[1] < t:
        raise ValueError(
            f"attention_mask: shape {list(mask.shape)} does not match input_ids {[b, t]}"
        )
    if fresh and mask.shape[1] != t:
        raise ValueError(
            f"attention_mask has {mask.shape[1]} columns and input_ids {t}: pass the state of the "
            "previous tokens"
        )
    mask = mask[:, mask.shape[1] - t :].bool().cpu()
    starts = mask.int().argmax(1)
    stops = starts + mask.sum(1)
    at = torch.arange(t)
    if not torch.equal(mask, (at >= starts[:, None]) & (at < stops[:, None])):
        raise ValueError("attention_mask: padding within a row is not supported; pad at its start")
    return starts.tolist(), stops.tolist()


def mean_loss(logits, labels, mask, count):
    """Return the mean next-token loss; or its sum over `count`, if given."""
    targets = labels[:, 1:].to(logits.device)
    if mask is not None:
        valid = mask[:, -labels.shape[1] :].to(logits.device).bool()
        targets = targets.masked_fill(~(valid[:, 1:] & valid[:, :-1]), -100)
    reduction = "mean" if count is None else "sum"
    logits = logits[:, :-1].flatten(0, 1)
    total = functional.cross_entropy(logits, targets.flatten(), reduction=reduction)
    return total if count is None else total / count


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        arch, d, c = config.arch, config.width, config.mlp_width
        bias = arch["mlp_bias"]
        self.parallel, self.kind, self.pre_norm = arch["parallel"], config.mlp, arch["pre_norm"]
        self.norm = Norm(config.norm, d, arch)
        self.up = nn.Linear(d, c, bias=bias)
        self.gate = nn.Linear(d, c, bias=bias) if config.mlp in GATED_ACTIVATIONS else None
        self.down = nn.Linear(c, d, bias=bias)
        self.post_norm = Norm(config.norm, d, arch) if arch["post_norm"] else None

    def forward(self, a, x):
        """Apply the feed-forward.

        Args:
          a: the output of attention.
          x: the input of attention, used only if both are parallel.
        """
        y = x if self.parallel else a
        y = self.norm(y) if self.pre_norm else y.to(self.norm.weight.dtype)
        up = self.up(y)
        y = (
            ACTIVATIONS[self.kind](up)
            if self.gate is None
            else GATED_ACTIVATIONS[self.kind](self.gate(y)) * up
        )
        y = self.down(y)
        if self.post_norm is not None:
            y = self.post_norm(y)
        y = a + y.to(a.dtype)
        return y if self.pre_norm else self.norm(y)


class Layer(nn.Module):
    def __init__(self, config, mixer):
        super().__init__()
        is_linear = mixer == "linear"
        self.attention = LinearAttention(config) if is_linear else Attention(config, mixer)
        self.cross = make_cross_attention(config)
        self.mlp = FeedForward(config)

    def forward(self, x, state=None, step=None, source=None):
        """Process a segment of one block, [b t d].

        Without a step, x is the memory prompt: return the next layer's prompt, and the initial
        state.

        Args:
          source: further arguments of `CrossAttention`, if the layer has it.
        """
        if step is None:
            return self.mlp(self.attention.encode_prompt(x), x), self.attention.init_state(x)
        a, state = self.attention(x, state, step)
        if self.attention.mixer == "fam":
            state = self.attention.update_memory(state, step, self.mlp)
        elif self.attention.mixer == "delta":
            state = self.attention.write_delta_memory(state, step)
        if self.cross is not None:
            a = self.cross(a, *source)
        return self.mlp(a, x), self.attention.trim_state(state, step.tokens_after())


class FamjaxForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FamjaxConfig
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        d, arch = config.width, config.arch
        self.embed = nn.Embedding(config.vocab_size, d)
        self.make_stack(config)
        self.norm = Norm(config.norm, d, arch) if arch["pre_norm"] else nn.Identity()
        self.head = nn.Linear(d, config.vocab_size, bias=arch["logit_bias"])
        self.embed_scale = arch["embed_scale"] or d**0.5
        self.gradient_checkpointing = False
        self.post_init()

    def make_stack(self, config):
        """Set the modules between the embedding and the last norm."""
        names = config.mixer.split(",")
        if config.stack != "residual":
            raise ValueError(f"stack={config.stack}: use the classes of modeling_famjax_feedback")
        if "linear" in names and not config.linear:
            raise ValueError("mixer=linear: the config needs linear, a dict")
        d, arch = config.width, config.arch
        self.positions = position_table(config)
        self.short_conv = ShortConv(config) if config.short_conv else None
        self.ngram_memory = NgramMemory(config) if config.ngram_memory else None
        self.embed_norm = Norm(config.norm, d, arch) if arch["embed_norm"] else None
        self.prompt = nn.Parameter(torch.zeros(config.fam_len, d)) if "fam" in names else None
        self.layers = nn.ModuleList(
            Layer(config, names[i % len(names)]) for i in range(config.layers)
        )
        self.capacity = config.capacity if "full" in names else None

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, new_embeddings):
        self.head = new_embeddings

    def init_state(self, batch):
        """Return the initial state of that many rows."""
        states = []
        prompt = self.prompt
        if prompt is None:  # no layer uses its value
            prompt = self.embed.weight.new_zeros(1, self.config.width)
        prompt = prompt.float().expand(batch, -1, -1)
        for layer in self.layers:
            prompt, state = layer(prompt)
            states.append(state)
        ngrams, embedded = (
            None if part is None else part.init_state(batch)
            for part in (self.ngram_memory, self.short_conv)
        )
        return FamjaxState((0,) * batch, tuple(states), ngrams=ngrams, embedded=embedded)

    def forward(
        self,
        input_ids=None,
        state=None,
        labels=None,
        attention_mask=None,
        logits_to_keep=0,
        use_cache=None,
        output_hidden_states=None,
        num_items_in_batch=None,
        return_dict=None,
        **kwargs,
    ):
        """Process tokens [b t], block by block, after those of `state`.

        Args:
          attention_mask: [b t], 0 at padding, at the start or end of a row; logits there are
            undefined. Columns before the last t are of earlier calls.
          labels: [b t], aligned with input_ids; -100 and padding are ignored.
          logits_to_keep: number of last tokens with logits, 0 for all; or a tensor of columns.
          use_cache: False returns no state.
          num_items_in_batch: divisor of the summed loss; None means the mean loss.
        """
        self.check_inputs(input_ids, labels, logits_to_keep, kwargs)
        b, t = input_ids.shape
        starts, stops = valid_range(attention_mask, b, t, state is None or not any(state.tokens))
        state = self.init_state(b) if state is None else state
        self.check_state(state, starts, stops, kwargs.get("position_ids"))
        hidden = self.default_to_config(output_hidden_states, "output_hidden_states", False)
        kept = torch.arange(t)
        kept = kept[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep.cpu()
        needed = 0 if hidden else int(kept.min())
        pieces, total, index = [], 0, torch.zeros(b, t, dtype=torch.long)
        while any(at < stop for at, stop in zip(starts, stops, strict=True)):
            step = self.next_step(state.tokens, starts, stops)
            levels, state = self.forward_segment(
                slice_rows(input_ids, starts, max(step.counts)), state, step
            )
            starts = [at + count for at, count in zip(starts, step.counts, strict=True)]
            if max(starts) > needed:
                pieces.append(levels if hidden else levels[-1:])
                for row, (at, count) in enumerate(zip(starts, step.counts, strict=True)):
                    index[row, at - count : at] = torch.arange(total, total + count)
                total += max(step.counts)
        index = index if hidden else index[:, kept]
        levels = [gather_columns(level, index) for level in zip(*pieces, strict=True)]
        levels[-1] = self.norm(levels[-1])
        logits = self.logits(levels[-1][:, kept] if hidden else levels[-1])
        loss = None
        if labels is not None:
            loss = mean_loss(logits, labels, attention_mask, num_items_in_batch)
        output = FamjaxOutput(
            logits=logits,
            state=state if self.default_to_config(use_cache, "use_cache", True) else None,
            loss=loss,
            hidden_states=tuple(levels) if hidden else None,
        )
        return (
            output
            if self.default_to_config(return_dict, "return_dict", True)
            else output.to_tuple()
        )

    def default_to_config(self, given, name, default):
        return getattr(self.config, name, default) if given is None else given

    def check_inputs(self, ids, labels, logits_to_keep, others):
        """Raise a `ValueError` for inputs that are invalid, or would be ignored silently."""
        if ids is None or others.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds is not supported: pass input_ids")
        if not ids.numel():
            raise ValueError(f"input_ids of shape {list(ids.shape)} have no token")
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need all logits: do not pass logits_to_keep")
        ignored = {"position_ids", "cache_position", "token_type_ids"}
        for name, value in others.items():
            if name not in ignored and value is not None and value is not False:
                instead = ": pass state" if name in ("past_key_values", "cache") else ""
                raise ValueError(f"{name} is not supported{instead}")

    def check_state(self, state, starts, stops, positions):
        """Raise a `ValueError` if the tokens cannot continue from the state."""
        if len(state.tokens) != len(starts):
            raise ValueError(
                f"the state has {len(state.tokens)} rows and input_ids have {len(starts)}"
            )
        ends = [n + z - a for n, a, z in zip(state.tokens, starts, stops, strict=True)]
        if self.capacity is not None and max(ends) > self.capacity:
            raise ValueError(
                f"full attention: {max(ends)} tokens do not fit its capacity of {self.capacity}"
            )
        if ends == list(state.tokens):
            raise ValueError("attention_mask: every token is padding")
        if positions is None:
            return
        rows = zip(positions.expand(len(starts), -1), state.tokens, starts, stops, strict=True)
        if any(row[a:z].tolist() != list(range(n, n + z - a)) for row, n, a, z in rows):
            raise ValueError(
                "position_ids: positions are counted from a row's first token; put each packed "
                "text in its own row"
            )

    def next_step(self, tokens, starts, stops):
        """Return the next step.

        Args:
          tokens: number of tokens processed before, by row.
          starts, stops: the columns that are left, by row.
        """
        w = self.config.block_len
        rows = zip(tokens, starts, stops, strict=True)
        return Step(tokens, tuple(min(w - n % w, stop - at) for n, at, stop in rows))

    def forward_segment(self, ids, state, step):
        """Process a step: return the embeddings and each layer's output, [b t d], and the state."""
        at = row_tensor(step.tokens, ids.device) + torch.arange(ids.shape[1], device=ids.device)
        x, embedded, ngrams = self.embed_tokens(ids), state.embedded, state.ngrams
        if embedded is not None:
            x, embedded = self.short_conv(x, embedded, step.counts)
        x = add_positions(self.config, self.positions, x, at)
        if ngrams is not None:
            x, ngrams = self.ngram_memory(x, ids, ngrams, step.counts, self.embed_tokens)
        x = x if self.embed_norm is None else self.embed_norm(x)
        levels, states = [x], []
        for number, (layer, old) in enumerate(zip(self.layers, state.layers, strict=True)):
            inputs = (x, old, step)
            if state.source is not None:
                inputs += ((state.source.layers[number], state.source.mask),)
            if self.gradient_checkpointing and self.training:
                x, new = self._gradient_checkpointing_func(layer.__call__, *inputs)
            else:
                x, new = layer(*inputs)
            levels.append(x)
            states.append(new)
        tokens = step.tokens_after()
        return levels, FamjaxState(tokens, tuple(states), state.source, ngrams, embedded)

    def embed_tokens(self, ids):
        return self.embed(ids) * self.embed_scale

    def logits(self, x):
        x = self.head(x)
        cap = self.config.arch["logit_cap"]
        return cap * torch.tanh(x.float() / cap) if cap else x.float()

    # generate(): the state replaces the cache

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, state=None, attention_mask=None, **kwargs):
        """Return the arguments of `forward`.

        At first these are all tokens, after the `state` that the caller of `generate` has passed;
        then the last token, after the current state of this `generate`.
        """
        if attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError("generate appends to the last column: pad with padding_side='left'")
        current = kwargs.get(CACHE)
        started = isinstance(current, FamjaxState)
        forwarded = ("use_cache", "output_hidden_states", "output_attentions")
        return {
            "input_ids": input_ids[:, -1:] if started else input_ids,
            "state": current if started else state,
            "attention_mask": attention_mask,
            "logits_to_keep": 1,
            **{name: kwargs[name] for name in forwarded if name in kwargs},
        }

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        given = model_kwargs.get("state")
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        model_kwargs["state"] = given
        if outputs.state is not None:
            model_kwargs[CACHE] = outputs.state
        return model_kwargs

    def _expand_inputs_for_generation(self, expand_size=1, *args, **kwargs):
        ids, kwargs = super()._expand_inputs_for_generation(expand_size, *args, **kwargs)
        if (state := kwargs.get("state")) is not None:
            rows = torch.arange(len(state.tokens)).repeat_interleave(expand_size)
            kwargs["state"] = state.select(rows)
        return ids, kwargs

    def _reorder_cache(self, state, beam_idx):
        return None if state is None else state.select(beam_idx)
