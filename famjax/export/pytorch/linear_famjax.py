"""Linear attention (T2R, arXiv 2103.13076), and the layers' attention to an encoder's output.

Shapes are as in `modeling_famjax`, with k features, and r = h / g query heads for each key head.
"""

import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .attention_famjax import Attention, LayerState, row_tensor


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
