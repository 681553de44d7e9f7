"""Transformers with feedback memory, read in a stream of any length with memory of constant size.

    logits, state = model(ids)[:2]                 # [b t v], and what is remembered
    logits, state = model(more, state=state)[:2]   # goes on; pieces may have any length

TransformerFAM (arXiv 2404.09173): a block of w tokens attends to itself, to the m blocks before it
(2.1) and to a feedback memory of f tokens (2.2), which attends to the block when it is full, goes
through the layer's own weights, and is what the next block sees.

Text is read block by block. Keys are kept as they are before rotary positions and turned when they
are seen, by their distance from the block: no angle grows with the length of the stream.

Shapes: b batch, t tokens, d width, h heads, g key and value heads, e head size, f memory tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_famjax import FamjaxConfig

GATES = {
    "swiglu": functional.silu,
    "geglu": lambda x: functional.gelu(x, approximate="tanh"),
}
PLAIN = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_exact": functional.gelu,
    "relu": functional.relu,
}


class LayerState(NamedTuple):
    """What a layer remembers: keys [b s g e] before rotation, values [b s g e].

    `k` and `v` are of the tokens still seen, the last of them the latest. fam alone has the others:
    the memory [b f d] in float32, and the keys and values of the last memories, oldest first.
    """

    k: torch.Tensor
    v: torch.Tensor
    fam: torch.Tensor | None = None
    fam_k: torch.Tensor | None = None
    fam_v: torch.Tensor | None = None


class FamjaxState(NamedTuple):
    """Where a stream stands: tokens read, and each layer's memory. It is never changed in place."""

    tokens: int
    layers: tuple[LayerState, ...]


@dataclass
class FamjaxOutput(ModelOutput):
    """`state` goes into the next call; `loss` is there where labels are given."""

    logits: torch.Tensor | None = None
    state: FamjaxState | None = None
    loss: torch.Tensor | None = None


class Norm(nn.Module):
    def __init__(self, kind, width, arch):
        super().__init__()
        self.eps = arch["norm_eps"]
        self.plus = 1.0 if arch["norm_plus_one"] and kind == "rmsnorm" else 0.0
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layernorm" else None

    def forward(self, x):
        """Norm in float32; the result has the weights' type."""
        y = x.float()
        if self.bias is not None:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = y * (self.weight.float() + self.plus)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(self.weight.dtype)


class Rotary:
    """Turns pairs (i, i + r/2) of a head's first r elements by position times their frequency."""

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
            theta = [self.stretched(x, arch) for x in theta]
        self.theta = theta

    @staticmethod
    def stretched(theta, arch):
        turns = arch["rope_length"] * theta / (2 * math.pi)
        share = (turns - arch["rope_low"]) / (arch["rope_high"] - arch["rope_low"])
        share = min(max(share, 0.0), 1.0)
        return theta * (share + (1 - share) / arch["rope_factor"])

    def __call__(self, x, positions):
        """[b t h e] at positions [t]."""
        theta = torch.tensor(self.theta, dtype=torch.float32, device=x.device)
        angle = (positions.float()[:, None] * theta)[:, None]
        half = len(self.theta)
        first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
        cos, sin = angle.cos(), angle.sin()
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, -1).to(x.dtype)


class Attention(nn.Module):
    """What a layer attends to, by its mixer."""

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
        self.cap = arch["attention_cap"]
        self.norm = Norm(config.norm, d, arch)
        self.q = nn.Linear(d, h * e, bias=arch["qkv_bias"])
        self.k = nn.Linear(d, g * e, bias=arch["qkv_bias"])
        self.v = nn.Linear(d, g * e, bias=arch["qkv_bias"])
        self.out = nn.Linear(h * e, d, bias=arch["out_bias"])
        self.q_norm = Norm("rmsnorm", e, arch) if arch["qk_norm"] else None
        self.k_norm = Norm("rmsnorm", e, arch) if arch["qk_norm"] else None
        self.post_norm = Norm(config.norm, d, arch) if arch["post_norm"] else None

    def project(self, x):
        """[b t d] -> q [b t h e], k and v [b t g e]."""
        h, g, e = self.heads
        x = self.norm(x)
        q = self.q(x).unflatten(-1, (h, e))
        k = self.k(x).unflatten(-1, (g, e))
        v = self.v(x).unflatten(-1, (g, e))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def attend(self, q, k, v, mask=None):
        """q [b t h e]; k, v [b s g e]; mask [t s] of what is seen -> [b t h*e]."""
        h, g, _ = self.heads
        k, v = k.repeat_interleave(h // g, 2), v.repeat_interleave(h // g, 2)
        scores = torch.einsum("bthe,bshe->bhts", q.float(), k.float()) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        weights = scores.softmax(-1).to(v.dtype)
        return torch.einsum("bhts,bshe->bthe", weights, v).flatten(2)

    def add(self, attended, residual):
        y = self.out(attended)
        if self.post_norm is not None:
            y = self.post_norm(y)
        return y.to(residual.dtype) + residual

    def among(self, prompt):
        """Full attention among the tokens of the memory's initial value (B.1): [b f d]."""
        q, k, v = self.project(prompt)
        at = torch.arange(-prompt.shape[1], 0, device=prompt.device)
        return self.add(self.attend(self.rotate(q, at), self.rotate(k, at), v), prompt)

    def begin(self, prompt):
        """Return the state before the first token, from the initial memory [b f d]."""
        _, k, v = self.project(prompt)
        if self.mixer != "fam":
            return LayerState(k[:, :0], v[:, :0])
        return LayerState(k[:, :0], v[:, :0], prompt.float(), k, v)

    def forward(self, x, state, done):
        """Read tokens [b t d] of one block, of which `done` were read before."""
        q, k, v = self.project(x)
        t, device = x.shape[1], x.device
        here = torch.arange(done, done + t, device=device)  # from the block's start
        old_k, old_v = state.k, state.v
        if self.mixer == "bswa_sg":
            # no gradient flows into memory segments
            past = max(old_k.shape[1] - done, 0)
            old_k = torch.cat([old_k[:, :past].detach(), old_k[:, past:]], 1)
            old_v = torch.cat([old_v[:, :past].detach(), old_v[:, past:]], 1)
        k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
        at = torch.arange(done + t - k.shape[1], done + t, device=device)
        distance = here[:, None] - at
        mask = distance >= 0
        if self.mixer == "swa":
            mask &= distance < self.window
        seen_k, seen_v = self.rotate(k, at), v
        if self.mixer == "fam":
            fam_k = self.rotate(state.fam_k, self.fam_positions(state))
            seen_k, seen_v = torch.cat([seen_k, fam_k], 1), torch.cat([seen_v, state.fam_v], 1)
            mask = torch.cat([mask, mask.new_ones(t, fam_k.shape[1])], 1)
        y = self.add(self.attend(self.rotate(q, here), seen_k, seen_v, mask), x)
        return y, state._replace(k=k, v=v)

    def fam_positions(self, state):
        """The memory made from a block stands at the block's last f positions (B.2.1)."""
        f = self.fam_len
        count = state.fam_k.shape[1] // f
        at = torch.arange(-f, 0, device=state.fam_k.device)
        behind = torch.arange(count - 1, -1, -1, device=at.device) * self.block_len
        return (at - behind[:, None]).flatten()

    def feed_back(self, state, first, mlp):
        """Compress the block just read, the last w tokens, into the memory (2.2, Equation 2)."""
        f, w, fam = self.fam_len, self.block_len, state.fam
        q, fam_k, fam_v = self.project(fam)
        at = torch.arange(-f, w, device=fam.device)
        k, v = torch.cat([fam_k, state.k[:, -w:]], 1), torch.cat([fam_v, state.v[:, -w:]], 1)
        attended = self.attend(self.rotate(q, at[:f]), self.rotate(k, at), v)
        # the initial memory has nothing to pass on: the first residual is zero (B.1)
        new = mlp(self.add(attended, torch.zeros_like(fam) if first else fam), fam)
        _, fam_k, fam_v = self.project(new)
        return state._replace(
            fam=new,
            fam_k=torch.cat([state.fam_k, fam_k], 1)[:, -self.previous * f :],
            fam_v=torch.cat([state.fam_v, fam_v], 1)[:, -self.previous * f :],
        )

    def forget(self, state, block_ended):
        """Drop what no later token sees."""
        if self.mixer == "full" or not (block_ended or self.mixer == "swa"):
            return state
        keep = self.window - 1 if self.mixer == "swa" else self.memory
        first = max(state.k.shape[1] - keep, 0)
        return state._replace(k=state.k[:, first:], v=state.v[:, first:])


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        arch, d, c = config.arch, config.width, config.mlp_width
        bias = arch["mlp_bias"]
        self.parallel, self.kind = arch["parallel"], config.mlp
        self.norm = Norm(config.norm, d, arch)
        self.up = nn.Linear(d, c, bias=bias)
        self.gate = nn.Linear(d, c, bias=bias) if config.mlp in GATES else None
        self.down = nn.Linear(c, d, bias=bias)
        self.post_norm = Norm(config.norm, d, arch) if arch["post_norm"] else None

    def forward(self, a, x):
        """a: what attention gave; x: what it had read."""
        y = self.norm(x if self.parallel else a)
        up = self.up(y)
        y = PLAIN[self.kind](up) if self.gate is None else GATES[self.kind](self.gate(y)) * up
        y = self.down(y)
        if self.post_norm is not None:
            y = self.post_norm(y)
        return a + y.to(a.dtype)


class Layer(nn.Module):
    def __init__(self, config, mixer):
        super().__init__()
        self.attention = Attention(config, mixer)
        self.mlp = FeedForward(config)

    def forward(self, x, state, tokens):
        """Read a piece of one block, [b t d], behind so many tokens of the stream."""
        block = self.attention.block_len
        a, state = self.attention(x, state, tokens % block)
        ended = (tokens + x.shape[1]) % block == 0
        if ended and self.attention.mixer == "fam":
            state = self.attention.feed_back(state, tokens < block, self.mlp)
        return self.mlp(a, x), self.attention.forget(state, ended)


class FamjaxForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FamjaxConfig
    _is_stateful = True
    _no_split_modules = ["Layer"]  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        names = config.mixer.split(",")
        d, arch = config.width, config.arch
        self.embed = nn.Embedding(config.vocab_size, d)
        self.positions = nn.Embedding(config.capacity, d) if arch["learned_positions"] else None
        self.prompt = nn.Parameter(torch.zeros(config.fam_len, d)) if "fam" in names else None
        self.layers = nn.ModuleList(
            Layer(config, names[i % len(names)]) for i in range(config.layers)
        )
        self.norm = Norm(config.norm, d, arch)
        tied = config.tie_word_embeddings
        self.head = None if tied else nn.Linear(d, config.vocab_size, bias=False)
        self.embed_scale = arch["embed_scale"] or d**0.5
        self.capacity = config.capacity if "full" in names else None
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, embed):
        self.embed = embed

    def init_state(self, batch):
        """Return the state of so many texts of which nothing was read."""
        states = []
        prompt = self.prompt
        if prompt is None:  # no layer asks for its value
            prompt = self.embed.weight.new_zeros(1, self.config.width)
        prompt = prompt.float().expand(batch, -1, -1)
        for layer in self.layers:
            states.append(layer.attention.begin(prompt))
            if self.prompt is not None:
                prompt = layer.mlp(layer.attention.among(prompt), prompt)
        return FamjaxState(0, tuple(states))

    def forward(
        self,
        input_ids,
        state=None,
        labels=None,
        attention_mask=None,
        logits_to_keep=0,
        return_dict=True,
        **kwargs,
    ):
        """Read tokens [b t], block by block, behind those that `state` has read.

        Args:
          labels: [b t], those of input_ids; -100 counts nowhere.
          logits_to_keep: of so many last tokens; 0 is all.
        """
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("padding is not supported: read texts of equal length together")
        if state is None:
            state = self.init_state(input_ids.shape[0])
        total = state.tokens + input_ids.shape[1]
        if self.capacity is not None and total > self.capacity:
            raise ValueError(
                f"full attention: {total} tokens do not fit its capacity of {self.capacity}"
            )
        outputs = []
        while input_ids.shape[1]:
            left = self.config.block_len - state.tokens % self.config.block_len
            x, state = self.read(input_ids[:, :left], state)
            outputs.append(x)
            if logits_to_keep:
                outputs = [torch.cat(outputs, 1)[:, -logits_to_keep:]]
            input_ids = input_ids[:, left:]
        logits = self.logits(torch.cat(outputs, 1))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        output = FamjaxOutput(logits=logits, state=state, loss=loss)
        return output if return_dict else output.to_tuple()

    def read(self, ids, state):
        """Read a piece of one block."""
        x = self.embed(ids) * self.embed_scale
        if self.positions is not None:
            at = torch.arange(state.tokens, state.tokens + ids.shape[1], device=ids.device)
            x = x + self.positions(at % self.config.capacity)
        states = []
        for layer, old in zip(self.layers, state.layers, strict=True):
            x, new = layer(x, old, state.tokens)
            states.append(new)
        return x, FamjaxState(state.tokens + ids.shape[1], tuple(states))

    def logits(self, x):
        x = self.norm(x)
        x = functional.linear(x, self.embed.weight) if self.head is None else self.head(x)
        cap = self.config.arch["logit_cap"]
        return cap * torch.tanh(x.float() / cap) if cap else x.float()

    # generate(): the state takes the place of a cache --------------------------------------------

    def prepare_inputs_for_generation(
        self, input_ids, state=None, attention_mask=None, is_first_iteration=False, **kwargs
    ):
        # at first the text may go on from a state that was given
        ids = input_ids if state is None or is_first_iteration else input_ids[:, -1:]
        return {
            "input_ids": ids,
            "state": state,
            "attention_mask": attention_mask,
            "logits_to_keep": 1,
        }

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        return model_kwargs | {"state": outputs.state}

    def _beam_search(self, *args, **kwargs):
        raise ValueError("beams are not supported: each would need a memory of its own")
