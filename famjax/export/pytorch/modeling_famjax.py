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

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils import ModelOutput

from .configuration_famjax import FamjaxConfig

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


class LayerState(NamedTuple):
    """A layer's state. Keys are stored without rotation.

    Attributes:
      k, v: [b s g e], keys and values of the tokens that are still visible, oldest first.
      fam: [b f d] float32, the memory of fam; None for other mixers.
      fam_k, fam_v: keys and values of the last memories of fam, oldest first.
      s: [b g k e] float32, the memory of delta, or the sums of linear; None for other mixers.
      z: [b g k] float32, the sums of linear's keys; None for other mixers.
      summary: [b f d] float32, the static summary tokens of fam; None without them.
    """

    k: torch.Tensor
    v: torch.Tensor
    fam: torch.Tensor | None = None
    fam_k: torch.Tensor | None = None
    fam_v: torch.Tensor | None = None
    s: torch.Tensor | None = None
    z: torch.Tensor | None = None
    summary: torch.Tensor | None = None


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
    """

    tokens: tuple[int, ...]
    layers: tuple[LayerState, ...]
    source: SourceState | None = None

    def select(self, rows):
        """Return the state of the given rows [n], which may repeat."""

        def take(x):
            return x if x is None else x.index_select(0, rows.to(x.device))

        layers = tuple(LayerState(*map(take, layer)) for layer in self.layers)
        source = self.source
        if source is not None:
            pairs = tuple(tuple(map(take, pair)) for pair in source.layers)
            source = SourceState(pairs, take(source.mask))
        return FamjaxState(tuple(self.tokens[row] for row in rows.tolist()), layers, source)


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


class Norm(nn.Module):
    def __init__(self, kind, width, arch):
        super().__init__()
        self.eps = arch["norm_eps"]
        self.plus = 1.0 if arch["norm_plus_one"] and kind == "rmsnorm" else 0.0
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layernorm" else None

    def forward(self, x):
        """Normalize in float32; the result has the weights' dtype."""
        y = x.float()
        if self.bias is not None:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = y * (self.weight.float() + self.plus)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(self.weight.dtype)


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


class Rotary:
    """Rotates pairs (i, i + r/2) of a head's first r elements by position times frequency."""

    def __init__(self, config, local):
        arch, base = config.arch, config.rope_base
        kind = arch["rope_scaling"]
        if local and arch["local_rope_base"]:
            base, kind = arch["local_rope_base"], "none"
        rotated = int(config.head_dim * arch["rotary_fraction"])
        theta = [base ** (-i / rotated) for i in range(0, rotated, 2)]
        if kind == "linear":
            theta = [x / arch["rope_factor"] for x in theta]
        elif kind == "llama3":
            theta = [self.scale_llama3(x, arch) for x in theta]
        self.theta = theta

    @staticmethod
    def scale_llama3(theta, arch):
        rotations = arch["rope_length"] * theta / (2 * math.pi)
        ramp = (rotations - arch["rope_low"]) / (arch["rope_high"] - arch["rope_low"])
        ramp = min(max(ramp, 0.0), 1.0)
        return theta * (ramp + (1 - ramp) / arch["rope_factor"])

    def __call__(self, x, positions):
        """Rotate x [b t h e] to positions [t] or [b t]; long ones are to be float64."""
        positions = positions if positions.is_floating_point() else positions.float()
        theta = torch.tensor(self.theta, dtype=positions.dtype, device=x.device)
        angle = (positions[..., None] * theta)[..., None, :]
        half = len(self.theta)
        first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
        cos, sin = angle.cos(), angle.sin()
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(rotated, -1).to(x.dtype)


class MemoryGate(nn.Module):
    """How far each memory token moves towards its new value, from 0 (it is kept) to 1."""

    threshold = 1e-2  # a gate below this is closed

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.width))
        self.bias = nn.Parameter(torch.zeros(config.fam_len))

    def forward(self, attended):
        """Return the gates of attention outputs: [b f d] -> [b f 1]."""
        rms = (attended.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        logits = (attended / rms * self.weight.float()).sum(-1) + self.bias.float()
        gate = logits.sigmoid()[..., None] - self.threshold
        return gate.clamp(min=0) / (1 - self.threshold)


class KeySmear(nn.Module):
    """Blends each key with the one before it, by one weight for each key head."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.kv_heads))

    def forward(self, k, follows):
        """k [b s g e], unrotated; follows [b or 1, s] bool, whether a key has one before it."""
        share = self.weight.float().sigmoid()[:, None].to(k.dtype)
        before = torch.where(follows[..., None, None], k.roll(1, 1), torch.zeros_like(k))
        return (1 - share) * k + share * before


class DeltaMemory(nn.Module):
    """An associative memory: a matrix for each key head, written by the delta rule."""

    def __init__(self, config):
        super().__init__()
        h, g, e = config.heads, config.kv_heads, config.head_dim
        self.order = config.delta_order
        self.key_smear = KeySmear(config)
        self.rate_weight = nn.Parameter(torch.zeros(g, 2 * e))
        self.rate_bias = nn.Parameter(torch.zeros(g))
        self.gain = nn.Parameter(torch.zeros(h))

    def init_state(self, batch):
        """Return the empty memory [b g k e]."""
        g, width = self.rate_weight.shape
        shape = (batch, g, self.order * width, width // 2)
        return self.rate_weight.new_zeros(shape, dtype=torch.float32)

    def features(self, x):
        """Map to features of unit norm: [... e] -> [... k]."""
        x = x.float()
        y = torch.cat([x, -x], -1).relu()
        products = torch.cat([y * y.roll(o, -1) for o in range(1, self.order + 1)], -1)
        return products * torch.rsqrt(products.square().sum(-1, keepdim=True) + 1e-6)

    def read(self, q, s):
        """Read the memory with unrotated queries [b t h e]: [b t h*e]."""
        features = self.features(q).unflatten(2, (s.shape[1], -1))
        recalled = torch.einsum("btgrk,bgke->btgre", features, s).flatten(2, 3)
        return (self.gain.float()[:, None] * recalled).to(q.dtype).flatten(2)

    def write(self, s, k, v):
        """Write a block into the memory: unrotated keys and values [b w g e]."""
        x = torch.cat([k, v], -1).float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        logits = 5 * (x * self.rate_weight.float()).sum(-1) + self.rate_bias.float()
        rates = (logits.sigmoid() - 0.1).relu() / 0.9
        follows = torch.arange(k.shape[1], device=k.device)[None] > 0
        features, v = self.features(self.key_smear(k, follows)), v.float()
        for i in range(k.shape[1]):
            error = v[:, i] - torch.einsum("bgk,bgke->bge", features[:, i], s)
            update = rates[:, i, :, None] * error
            s = s + features[:, i, :, :, None] * update[:, :, None]
        return s


class FeatureMap(nn.Module):
    """phi of linear attention (T2R, arXiv 2103.13076): a map for each key head and its queries."""

    scale = 1e-2  # of signed features

    def __init__(self, config, features):
        super().__init__()
        self.kind = config.linear["map"]
        g, e = config.kv_heads, config.head_dim
        self.shape = g, e, e if self.kind == "elu" else features
        learned = self.kind in ("relu", "learned_elu", "cos", "tanh")
        # not zeros, of which relu would have no gradient in a new model
        draw = torch.randn(g * e, features) * e**-0.5 if learned else None
        self.weight = None if draw is None else nn.Parameter(draw)
        self.bias = nn.Parameter(torch.zeros(g, features)) if learned else None
        self.tau = nn.Parameter(torch.ones(g)) if self.kind == "rfa" else None

    def forward(self, x):
        """Map [... g r e] to features [... g r k]."""
        if self.weight is not None:
            y = self.project(x, self.weight.view(self.shape)) + self.bias[:, None]
            return {
                "relu": functional.relu,
                "learned_elu": lambda y: functional.elu(y) + 1,
                "cos": lambda y: self.scale * y.cos(),
                "tanh": lambda y: self.scale * y.tanh(),
            }[self.kind](y)
        fixed = {
            "elu": lambda y: functional.elu(y) + 1,
            "rfa": self.random_fourier,
            "performer": self.positive_random,
        }[self.kind]
        return fixed(x.float()).to(x.dtype)

    @staticmethod
    def project(x, weight):
        return torch.einsum("...gre,gek->...grk", x, weight)

    def random_fourier(self, x):
        g, e, k = self.shape
        length = (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        scaled = x / (length * self.tau.float()[:, None, None])
        angle = self.project(scaled, as_tensor(random_vectors(g, e, k // 2), x))
        return self.scale * torch.cat([angle.sin(), angle.cos()], -1)

    def positive_random(self, x):
        g, e, k = self.shape
        x = x * e**-0.25
        products = self.project(x, as_tensor(orthogonal_vectors(g, e, k), x))
        exponent = products - x.square().sum(-1, keepdim=True) / 2
        return k**-0.5 * (exponent.exp() + 1e-4)


def as_tensor(array, like):
    return torch.tensor(array, dtype=like.dtype, device=like.device)


@functools.cache
def random_vectors(g, e, k):
    """Return w [g e k] of N(0, 1), the same for all layers and models."""
    return np.random.RandomState(0).normal(size=(g, e, k))


@functools.cache
def orthogonal_vectors(g, e, k):
    """Return w [g e k] like `random_vectors`, but in each head every e vectors are orthogonal."""
    n = -(-k // e)
    directions, lengths = random_vectors(2 * g, e, n * e).reshape(2, g, e, n, e).swapaxes(2, 3)
    q, r = np.linalg.qr(directions)
    # the factorization whose r has a positive diagonal
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    q = q * np.linalg.norm(lengths, axis=-2, keepdims=True)
    return q.swapaxes(1, 2).reshape(g, e, n * e)[..., :k]


def sum_keys(k, v):
    """Return the sums s [b g k e] and z [b g k] of features [b t g k] and values [b t g e]."""
    return torch.einsum("btgk,btge->bgke", k.float(), v.float()), k.float().sum(1)


def normalize_sums(num, den):
    """Divide [b t g r e] by [b t g r], of at least 0.01: [b t h*e]."""
    return (num / den.clamp_min(1e-2)[..., None]).flatten(2)


def attend_sums(q, s, z):
    """Attend with features [b t g r k] to sums (T2R, Equation 4): [b t h*e]."""
    num = torch.einsum("btgrk,bgke->btgre", q.float(), s)
    return normalize_sums(num, torch.einsum("btgrk,bgk->btgr", q.float(), z))


class Attention(nn.Module):
    """Attention of one layer, with its mixer's mask and memory."""

    def __init__(self, config, mixer):
        super().__init__()
        arch, d, e = config.arch, config.width, config.head_dim
        h, g = config.heads, config.kv_heads
        self.mixer, self.heads = mixer, (h, g, e)
        self.block_len, self.fam_len = config.block_len, config.fam_len
        self.window, self.previous = config.window, config.fam_previous
        self.memory = config.memory_segments * config.block_len
        self.rotate = Rotary(config, local=mixer == "swa")
        self.scale = (arch["query_scale"] or e) ** -0.5
        self.query_gain = self.scale * e**0.5  # scales queries where nothing divides by sqrt(e)
        self.cap = arch["attention_cap"]
        self.norm, self.pre_norm = Norm(config.norm, d, arch), arch["pre_norm"]
        self.q = nn.Linear(d, h * e, bias=arch["qkv_bias"])
        self.k = nn.Linear(d, g * e, bias=arch["qkv_bias"])
        self.v = nn.Linear(d, g * e, bias=arch["qkv_bias"])
        self.out = nn.Linear(h * e, d, bias=arch["out_bias"])
        self.q_norm = Norm("rmsnorm", e, arch) if arch["qk_norm"] else None
        self.k_norm = Norm("rmsnorm", e, arch) if arch["qk_norm"] else None
        self.post_norm = Norm(config.norm, d, arch) if arch["post_norm"] else None
        is_gated = mixer == "fam" and config.fam_update == "gated"
        self.memory_gate = MemoryGate(config) if is_gated else None
        self.is_static = mixer == "fam" and config.fam_update == "static"
        self.delta_memory = DeltaMemory(config) if mixer == "delta" else None
        is_smeared = config.smeared_keys and mixer in ("bswa", "bswa_sg", "fam", "delta")
        self.key_smear = KeySmear(config) if is_smeared else None

    def project(self, x):
        """Normalize and project: [b t d] -> q [b t h e], k and v [b t g e]."""
        x = self.normalize(x)
        return self.project_query(x), *self.project_kv(x)

    def normalize(self, x):
        """Return the input of the projections."""
        return self.norm(x) if self.pre_norm else x.to(self.norm.weight.dtype)

    def project_query(self, x):
        """Project a normalized input: [b t d] -> [b t h e]."""
        q = self.q(x).unflatten(-1, (self.heads[0], self.heads[2]))
        return q if self.q_norm is None else self.q_norm(q)

    def project_kv(self, x):
        """Project a normalized input: [b t d] -> k and v [b t g e]."""
        k, v = (y.unflatten(-1, self.heads[1:]) for y in (self.k(x), self.v(x)))
        return k if self.k_norm is None else self.k_norm(k), v

    def attend(self, q, k, v, mask=None, bias=None):
        """Attend with queries [b t h e] to keys and values [b s g e]: [b t h*e].

        Args:
          mask: [b t s], True is visible.
          bias: [b h t s], added to the scores.
        """
        h, g, _ = self.heads
        k, v = k.repeat_interleave(h // g, 2), v.repeat_interleave(h // g, 2)
        scores = torch.einsum("bthe,bshe->bhts", q.float(), k.float()) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -math.inf)
        weights = scores.softmax(-1).to(v.dtype)
        return torch.einsum("bhts,bshe->bthe", weights, v).flatten(2)

    def project_output(self, attended, residual):
        y = self.out(attended)
        if self.post_norm is not None:
            y = self.post_norm(y)
        y = y.to(residual.dtype) + residual
        return y if self.pre_norm else self.norm(y)

    def encode_prompt(self, prompt):
        """Return the memory prompt after full attention among its tokens (B.1): [b f d]."""
        q, k, v = self.project(prompt)
        at = torch.arange(-prompt.shape[1], 0, device=prompt.device)
        return self.project_output(self.attend(self.rotate(q, at), self.rotate(k, at), v), prompt)

    def init_state(self, prompt):
        """Return the initial state, from the memory prompt [b f d]."""
        _, k, v = self.project(prompt)
        if self.delta_memory is not None:
            return LayerState(k[:, :0], v[:, :0], s=self.delta_memory.init_state(len(prompt)))
        if self.mixer != "fam":
            return LayerState(k[:, :0], v[:, :0])
        fam = prompt.float()
        summary = fam if self.is_static else None
        return LayerState(k[:, :0], v[:, :0], fam, k, v, summary=summary)

    def forward(self, x, state, step):
        """Process tokens [b t d] of one block."""
        q, k, v = self.project(x)
        t, s, device = x.shape[1], state.k.shape[1], x.device
        offset = row_tensor([tokens % self.block_len for tokens in step.tokens], device)
        new, at = torch.arange(t, device=device), torch.arange(-s, t, device=device)
        old_k, old_v = state.k, state.v
        if self.mixer == "bswa_sg":
            # no gradient flows into memory segments
            past = (at[:s] < -offset)[..., None, None]
            old_k = torch.where(past, old_k.detach(), old_k)
            old_v = torch.where(past, old_v.detach(), old_v)
        own_k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
        k = own_k
        distance = new[:, None] - at
        mask = distance >= 0
        if self.mixer == "swa":
            mask &= distance < self.window
        mask = mask[None] & self.occupied(
            at, [self.visible_tokens(tokens) for tokens in step.tokens]
        )
        position = offset + new  # in the block
        if self.key_smear is not None:
            cached = [self.cached_tokens(tokens) for tokens in step.tokens]
            k = self.key_smear(k, self.occupied(at - 1, cached)[:, 0])
        seen_k, seen_v = self.rotate(k, offset + at), v
        if self.mixer == "fam":
            fam_k = self.rotate(state.fam_k, self.fam_positions(state))
            seen_k, seen_v = torch.cat([seen_k, fam_k], 1), torch.cat([seen_v, state.fam_v], 1)
            indices = torch.arange(-fam_k.shape[1], 0, device=device)
            fam_mask = self.occupied(
                indices, [self.visible_fam_tokens(tokens) for tokens in step.tokens]
            )
            rows = max(len(mask), len(fam_mask))
            mask = torch.cat([mask.expand(rows, -1, -1), fam_mask.expand(rows, t, -1)], 2)
        attended = self.attend(self.rotate(q, position), seen_k, seen_v, mask)
        if self.delta_memory is not None:
            attended = attended + self.delta_memory.read(q, state.s)
        y = self.project_output(attended, x)
        return y, state._replace(k=align_right(own_k, step.counts), v=align_right(v, step.counts))

    def cached_tokens(self, tokens):
        """Return how many keys a row caches after so many tokens."""
        # the first visible key is blended with the one before it
        more = 0 if self.key_smear is None else 1
        return min(tokens, self.visible_tokens(tokens) + more)

    def visible_tokens(self, tokens):
        """Return how many earlier tokens a row's next token attends to after so many tokens."""
        if self.mixer == "full":
            return tokens
        if self.mixer == "swa":
            return min(tokens, self.window - 1)
        offset = tokens % self.block_len
        return offset + min(tokens - offset, self.memory)

    def visible_fam_tokens(self, tokens):
        """Return how many memory tokens a row attends to after so many tokens."""
        return min(1 + tokens // self.block_len, self.previous) * self.fam_len

    def occupied(self, at, counts):
        """Return which cache entries `at`, the newest at -1, are filled: [b or 1, 1, entries]."""
        return at >= -row_tensor(counts, at.device)[..., None]

    def fam_positions(self, state):
        """Return the memories' positions: those of the last f tokens of their block (B.2.1)."""
        f = self.fam_len
        count = state.fam_k.shape[1] // f
        at = torch.arange(-f, 0, device=state.fam_k.device)
        distance = torch.arange(count - 1, -1, -1, device=at.device) * self.block_len
        return (at - distance[:, None]).flatten()

    def write_delta_memory(self, state, step):
        """Write the completed block, the last w tokens, into the associative memory."""
        w = self.block_len
        ends = step.completes_block(w)
        if not any(ends):
            return state
        k, v = state.k[:, -w:], state.v[:, -w:]
        completed = row_tensor(ends, k.device)[..., None, None]
        written = self.delta_memory.write(state.s, k, v)
        return state._replace(s=torch.where(completed, written, state.s))

    def update_memory(self, state, step, mlp):
        """Update the memory with the completed block, the last w tokens (2.2, Equation 2)."""
        f, w, fam = self.fam_len, self.block_len, state.fam
        ends = step.completes_block(w)
        if not any(ends):
            return state
        completed = row_tensor(ends, fam.device)[..., None]
        q, fam_k, fam_v = self.project(fam)
        if self.is_static:
            q, _, _ = self.project(state.summary)
        at = torch.arange(-f, w, device=fam.device)
        first = row_tensor([tokens < w for tokens in step.tokens], fam.device)[..., None]
        block_k = state.k[:, -w - 1 :]
        if self.key_smear is not None:
            position = torch.arange(w - block_k.shape[1], w, device=fam.device)
            follows = (position > 0) | (position == 0) & ~first[..., 0]
            block_k = self.key_smear(block_k, follows)
        block_k = block_k[:, -w:]
        k, v = torch.cat([fam_k, block_k], 1), torch.cat([fam_v, state.v[:, -w:]], 1)
        attended = self.attend(self.rotate(q, at[:f]), self.rotate(k, at), v)
        # the initial memory carries no context: the first residual is zero (B.1)
        residual = torch.where(first, torch.zeros_like(fam), fam)
        if self.is_static:
            residual = state.summary
        attended = self.project_output(attended, residual)
        new = mlp(attended, state.summary if self.is_static else fam)
        if self.memory_gate is not None:
            gated = fam + self.memory_gate(attended) * (new - residual - fam)
            new = torch.where(first, new, gated)
        _, fam_k, fam_v = self.project(new)

        def append(old, new):
            # rows that complete no block keep their memories, right-aligned with those of rows that
            # have one more
            appended, unchanged = torch.cat([old, new], 1), torch.cat([old[:, :f], old], 1)
            return appended if all(ends) else torch.where(completed[..., None], appended, unchanged)

        return state._replace(
            fam=torch.where(completed, new, fam),
            fam_k=append(state.fam_k, fam_k),
            fam_v=append(state.fam_v, fam_v),
        )

    def trim_state(self, state, tokens):
        """Drop entries that are no longer visible to any row after so many tokens."""
        first = state.k.shape[1] - max(map(self.cached_tokens, tokens))
        state = state._replace(k=state.k[:, first:], v=state.v[:, first:])
        if self.mixer != "fam":
            return state
        first = state.fam_k.shape[1] - max(map(self.visible_fam_tokens, tokens))
        return state._replace(fam_k=state.fam_k[:, first:], fam_v=state.fam_v[:, first:])


class LinearAttention(Attention):
    """Causal linear attention, whose state is the sums over all tokens (T2R, Equations 4 to 7)."""

    def __init__(self, config):
        super().__init__(config, "linear")
        self.map = FeatureMap(config, config.linear["features"])
        self.is_rotated = config.linear["rope"]

    def project_features(self, x, at):
        """Project tokens [b t d] at positions [t] or [b t].

        Returns:
          phi(q) [b t g r k], phi(k) [b t g k], v [b t g e].
        """
        q, k, v = self.project(x)
        q = q * self.query_gain
        if self.is_rotated:
            q, k = self.rotate(q, at.double()), self.rotate(k, at.double())
        q = q.unflatten(2, (k.shape[2], -1))
        return self.map(q), self.map(k[..., None, :])[..., 0, :], v

    def encode_prompt(self, prompt):
        at = torch.arange(-prompt.shape[1], 0, device=prompt.device)
        q, k, v = self.project_features(prompt, at)
        return self.project_output(attend_sums(q, *sum_keys(k, v)).to(v.dtype), prompt)

    def init_state(self, prompt):
        _, g, e = self.heads
        empty = prompt.new_zeros(len(prompt), 0, g, e)
        s = prompt.new_zeros(len(prompt), g, self.map.shape[-1], e, dtype=torch.float32)
        return LayerState(empty, empty, s=s, z=s[..., 0])

    def forward(self, x, state, step):
        count = torch.arange(x.shape[1], device=x.device)
        q, k, v = self.project_features(x, row_tensor(step.tokens, x.device) + count)
        valid = count < row_tensor(step.counts, x.device)
        k = torch.where(valid[..., None, None], k, torch.zeros_like(k))
        similar = torch.einsum("bigrk,bjgk->bgrij", q.float(), k.float()).tril()
        num = torch.einsum("bgrij,bjge->bigre", similar, v.float())
        num = num + torch.einsum("btgrk,bgke->btgre", q.float(), state.s)
        den = similar.sum(-1).movedim(-1, 1)
        den = den + torch.einsum("btgrk,bgk->btgr", q.float(), state.z)
        s, z = sum_keys(k, v)
        state = state._replace(s=state.s + s, z=state.z + z)
        return self.project_output(normalize_sums(num, den).to(v.dtype), x), state

    def cached_tokens(self, tokens):
        return 0


class CrossAttention(Attention):
    """Attention to an encoder's output, without rotary positions."""

    def __init__(self, config):
        super().__init__(config, "full")

    def read_source(self, encoded, mask):
        """Return what it needs of an encoder's output [b s d] with a mask [b 1 s]."""
        return self.project_kv(encoded)

    def forward(self, x, keys, mask):
        """Attend with x [b t d] to what `read_source` returned, with a mask [b 1 s]."""
        q = self.project_query(self.normalize(x))
        return self.project_output(self.attend(q, *keys, mask), x)


class LinearCrossAttention(CrossAttention):
    """Linear attention to an encoder's output, of which it needs only sums (T2R, 3.2.2)."""

    def __init__(self, config):
        super().__init__(config)
        self.map = FeatureMap(config, config.encoder["features"])

    def read_source(self, encoded, mask):
        k, v = self.project_kv(encoded)
        k = self.map(k[..., None, :])[..., 0, :]
        return sum_keys(torch.where(mask[:, 0, :, None, None], k, torch.zeros_like(k)), v)

    def forward(self, x, keys, mask):
        q = self.project_query(self.normalize(x)) * self.query_gain
        attended = attend_sums(self.map(q.unflatten(2, (self.heads[1], -1))), *keys)
        return self.project_output(attended.to(q.dtype), x)


def make_cross_attention(config):
    """Return a layer's attention to the encoder's output; None without an encoder."""
    if not config.encoder:
        return None
    is_linear = config.encoder["cross"] == "linear"
    return LinearCrossAttention(config) if is_linear else CrossAttention(config)


def row_tensor(values, device):
    """Return one number per row as [b 1], or [1 1] if all are equal."""
    if len(set(values)) == 1:
        return torch.full((1, 1), values[0], device=device)
    return torch.tensor(values, device=device)[:, None]


def align_right(x, counts):
    """Shift the rows of [b s g e] so that each row's newest token is the last.

    Of a row's last `max(counts)` entries only counts[row] are tokens; padding follows them.
    """
    if len(set(counts)) == 1:
        return x
    gaps = row_tensor([max(counts) - count for count in counts], x.device)
    at = (torch.arange(x.shape[1], device=x.device) - gaps).clamp_min(0)
    return x.gather(1, at[..., None, None].expand_as(x))


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
            raise ValueError(f"stack={config.stack}: take the classes of modeling_famjax_feedback")
        if "linear" in names and not config.linear:
            raise ValueError("mixer=linear: the config needs linear, a dict")
        d, arch = config.width, config.arch
        self.positions = position_table(config)
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
        """Return the initial state of so many rows."""
        states = []
        prompt = self.prompt
        if prompt is None:  # no layer uses its value
            prompt = self.embed.weight.new_zeros(1, self.config.width)
        prompt = prompt.float().expand(batch, -1, -1)
        for layer in self.layers:
            prompt, state = layer(prompt)
            states.append(state)
        return FamjaxState((0,) * batch, tuple(states))

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
        x = add_positions(self.config, self.positions, self.embed(ids) * self.embed_scale, at)
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
        return levels, state._replace(tokens=step.tokens_after(), layers=tuple(states))

    def logits(self, x):
        x = self.head(x)
        cap = self.config.arch["logit_cap"]
        return cap * torch.tanh(x.float() / cap) if cap else x.float()

    # generate(): the state replaces the cache ------------------------------------------------

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, state=None, attention_mask=None, **kwargs):
        """Return the arguments of `forward`.

        At first these are all tokens, after the `state` that the caller of `generate` has passed;
        then the last token, after the current state of this `generate`.
        """
        if attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError("generate continues the last column: pad with padding_side='left'")
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
