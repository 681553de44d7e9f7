"""The layers' attention to a block, to the blocks before it, and to a memory; and its parts.

Shapes are as in `modeling_famjax`.
"""

import math
from typing import NamedTuple

import torch
from torch import nn


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

    def __init__(self, config):
        super().__init__()
        self.threshold = config.fam_gate_threshold
        self.weight = nn.Parameter(torch.zeros(config.width))
        self.bias = nn.Parameter(torch.zeros(config.fam_len))

    def forward(self, attended):
        """Return the gates of attention outputs: [b f d] -> [b f 1]."""
        rms = (attended.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        logits = (attended / rms * self.weight.float()).sum(-1) + self.bias.float()
        gate = logits.sigmoid()[..., None] - self.threshold
        return gate.clamp(min=0) / (1 - self.threshold)


class KeySmear(nn.Module):
    """Smears keys: adds to each a share of the one before it, with one weight for each key head."""

    def __init__(self, heads):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self, k, follows):
        """k [b s g e], unrotated; follows [b or 1, s] bool, whether a key has one before it."""
        share = self.weight.float().sigmoid()[:, None].to(k.dtype)
        before = torch.where(follows[..., None, None], k.roll(1, 1), torch.zeros_like(k))
        return (1 - share) * k + share * before


class DeltaMemory(nn.Module):
    """An associative memory: a matrix for each of the last g key heads, by the delta rule."""

    def __init__(self, config):
        super().__init__()
        e, g = config.head_dim, config.delta_heads or config.kv_heads
        h = g * config.heads // config.kv_heads
        self.order = config.delta_order
        self.key_smear = KeySmear(g)
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
        """Read the memory with unrotated queries of all heads [b t h e]: [b t h*e]."""
        others = q.shape[2] - len(self.gain)
        features = self.features(q[:, :, others:]).unflatten(2, (s.shape[1], -1))
        recalled = torch.einsum("btgrk,bgke->btgre", features, s).flatten(2, 3)
        scaled = (self.gain.float()[:, None] * recalled).to(q.dtype)
        return nn.functional.pad(scaled, (0, 0, others, 0)).flatten(2)

    def write(self, s, k, v):
        """Write a block into the memory: unrotated keys and values of all heads [b w g e]."""
        k, v = k[:, :, -len(self.rate_bias) :], v[:, :, -len(self.rate_bias) :]
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
        self.key_smear = KeySmear(config.kv_heads) if is_smeared else None

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
        """Return how many keys a row caches after that many tokens."""
        # the first visible key is smeared with the one before it
        more = 0 if self.key_smear is None else 1
        return min(tokens, self.visible_tokens(tokens) + more)

    def visible_tokens(self, tokens):
        """Return how many earlier tokens a row's next token attends to after that many tokens."""
        if self.mixer == "full":
            return tokens
        if self.mixer == "swa":
            return min(tokens, self.window - 1)
        offset = tokens % self.block_len
        return offset + min(tokens - offset, self.memory)

    def visible_fam_tokens(self, tokens):
        """Return how many memory tokens a row attends to after that many tokens."""
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
        """Drop entries that are no longer visible to any row after that many tokens."""
        first = state.k.shape[1] - max(map(self.cached_tokens, tokens))
        state = state._replace(k=state.k[:, first:], v=state.v[:, first:])
        if self.mixer != "fam":
            return state
        first = state.fam_k.shape[1] - max(map(self.visible_fam_tokens, tokens))
        return state._replace(fam_k=state.fam_k[:, first:], fam_v=state.fam_v[:, first:])


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
