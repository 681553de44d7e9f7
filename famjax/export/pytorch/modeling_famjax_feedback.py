"""The Feedback Transformer (arXiv 2002.09402), and a Transformer with the same layers.

    z_t^l = Attn(x_t^l, {m_{t-tau}, ..., m_{t-1}})       m_t = sum_l softmax(w)_l x_t^l   (Eq. 1)

Tokens are processed one by one, each with all layers. The state holds the keys and values of the
last `span` memories, unrotated: one set for all layers, or one for each layer.

Shapes: b batch, s entries, d width, h heads, g key and value heads, e head size, l layers, and j
memories of a token, 1 or l.
"""

import torch
from torch import nn

from .attention_famjax import Attention, LayerState, Norm, align_right
from .configuration_famjax import FamjaxFeedbackConfig
from .linear_famjax import make_cross_attention
from .modeling_famjax import FamjaxForCausalLM, FamjaxState, FeedForward, Step
from .modeling_famjax_seq2seq import FamjaxForConditionalGeneration


class FeedbackAttention(Attention):
    """Attention of one token to earlier memories."""

    def __init__(self, config):
        super().__init__(config, "feedback")
        if config.feedback["shared_kv"]:
            self.k = self.v = self.k_norm = None

    def read(self, x, state, counts, distances, log_mask):
        """Attend with a token [b 1 d] to the memories of `state`.

        Args:
          counts: number of memories, by row.
          distances: [e span], vectors of the distances, farthest first; None for rotary positions.
          log_mask: [h span], added to the scores, farthest first; None without adaptive span.
        """
        q, k = self.project_query(self.normalize(x)), state.k
        s, bias = k.shape[1], None
        at = torch.arange(-s, 0, device=x.device)
        if distances is None:
            k = self.rotate(k, at)
        else:
            near = distances[:, distances.shape[1] - s :].float()
            bias = torch.einsum("bthe,es->bhts", q.float(), near) * self.scale
        if log_mask is not None:
            near = log_mask[None, :, None, log_mask.shape[1] - s :]
            bias = near if bias is None else bias + near
        mask = self.occupied(at, counts)
        some = mask.any(-1, keepdim=True)  # the first token of a stream sees no memory
        attended = self.attend(q, k, state.v, mask | ~some, bias)
        return self.project_output(torch.where(some, attended, torch.zeros_like(attended)), x)


class FeedbackLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = FeedbackAttention(config)
        self.cross = make_cross_attention(config)
        self.mlp = FeedForward(config)
        is_adaptive = config.feedback["adaptive_span"]
        self.span = nn.Parameter(torch.zeros(config.heads)) if is_adaptive else None
        self.longest, self.ramp = config.feedback["span"], config.feedback["span_ramp"]

    def forward(self, x, state, counts, distances, source=None):
        """Process one token, [b 1 d]; arguments as in `FeedbackAttention.read`."""
        a = self.attention.read(x, state, counts, distances, self.log_mask())
        if source is not None:
            a = self.cross(a, *source)
        return self.mlp(a, x)

    def log_mask(self):
        """Return the log of each head's soft mask by distance, farthest first: [h span]."""
        if self.span is None:
            return None
        distance = torch.arange(self.longest, 0, -1, device=self.span.device)
        span = self.span.float()[:, None] * self.longest
        mask = ((self.ramp + span - distance) / self.ramp).clamp(0, 1)
        return mask.clamp_min(1e-30).log().masked_fill(mask == 0, -1e30)


class SharedKeys(nn.Module):
    """The key and value projections that all layers share."""

    def __init__(self, config):
        super().__init__()
        arch, d, g, e = config.arch, config.width, config.kv_heads, config.head_dim
        self.heads = g, e
        self.norm = Norm(config.norm, d, arch) if arch["pre_norm"] else None
        self.k = nn.Linear(d, g * e, bias=arch["qkv_bias"])
        self.v = nn.Linear(d, g * e, bias=arch["qkv_bias"])
        self.k_norm = Norm("rmsnorm", e, arch) if arch["qk_norm"] else None

    def forward(self, memory):
        """Project memories [b 1 d]: k and v [b 1 g e]."""
        x = memory.to(self.k.weight.dtype) if self.norm is None else self.norm(memory)
        k, v = (y.unflatten(-1, self.heads) for y in (self.k(x), self.v(x)))
        return k if self.k_norm is None else self.k_norm(k), v


class FeedbackDecoder:
    """Mixin for models with feedback memories: overrides methods of `FamjaxForCausalLM`."""

    supports_gradient_checkpointing = False
    _no_split_modules = ["FeedbackLayer", "EncoderLayer"]  # noqa: RUF012

    def make_stack(self, config):
        feedback, count = config.feedback, config.layers
        if config.stack not in ("feedback", "transformer") or not feedback:
            raise ValueError("the config needs stack=feedback or transformer, and feedback, a dict")
        self.composition = feedback["composition"]
        if config.stack == "transformer":
            self.composition = "previous"
        self.memories = count if self.composition in ("same_and_lower", "previous") else 1
        self.layers = nn.ModuleList(FeedbackLayer(config) for _ in range(count))
        self.keys = SharedKeys(config) if feedback["shared_kv"] else None
        shape = config.head_dim, feedback["span"]
        is_learned = feedback["positions"] == "learned"
        self.distances = nn.Parameter(torch.zeros(shape)) if is_learned else None
        is_mixed = self.composition in ("all", "same_and_lower")
        self.mix = nn.Parameter(torch.zeros(self.memories, count + 1)) if is_mixed else None
        self.capacity = None

    def mixing_weights(self, device):
        """Return the weights of the layers' states in each memory (Equation 1): [j l+1]."""
        count = len(self.layers)
        if self.mix is not None:
            logits = self.mix.float()
            if self.composition == "same_and_lower":
                at = torch.arange(count + 1, device=device)
                logits = logits.masked_fill(at > at[:count, None] + 1, -torch.inf)
            return logits.softmax(-1)
        if self.composition == "average":
            return torch.full((1, count + 1), 1 / (count + 1), device=device)
        eye = torch.eye(count + 1, device=device)
        if self.composition == "previous":
            return eye[:count]
        layer = count if self.composition == "top" else self.config.feedback["layer"]
        return eye[layer : layer + 1]

    def init_state(self, batch):
        sets = 1 if self.keys is not None and self.memories == 1 else len(self.layers)
        empty = self.embed.weight.new_zeros(batch, 0, self.config.kv_heads, self.config.head_dim)
        return FamjaxState((0,) * batch, (LayerState(empty, empty),) * sets)

    def next_step(self, tokens, starts, stops):
        rows = zip(starts, stops, strict=True)
        return Step(tokens, tuple(min(1, stop - at) for at, stop in rows))

    def forward_segment(self, ids, state, step):
        """Process one token of each row: return the embeddings and the layers' outputs [b 1 d]."""
        span = self.config.feedback["span"]
        counts = [min(tokens, span) for tokens in step.tokens]
        levels = [self.embed(ids) * self.embed_scale]
        for i, layer in enumerate(self.layers):
            own = state.layers[i % len(state.layers)]
            inputs = (levels[-1], own, counts, self.distances)
            if state.source is not None:
                inputs += ((state.source.layers[i], state.source.mask),)
            levels.append(layer(*inputs))
        mix = self.mixing_weights(ids.device).to(levels[0].dtype)
        memories = torch.einsum("jl,l...->j...", mix, torch.stack(levels))
        kept = min(max(step.tokens_after()), span)
        layers = []
        for old, pair in zip(state.layers, self.project_memories(memories), strict=True):
            joined = (torch.cat(both, 1) for both in zip((old.k, old.v), pair, strict=True))
            k, v = (align_right(x, step.counts) for x in joined)
            layers.append(LayerState(k[:, k.shape[1] - kept :], v[:, v.shape[1] - kept :]))
        return levels, state._replace(tokens=step.tokens_after(), layers=tuple(layers))

    def project_memories(self, memories):
        """Return keys and values [b 1 g e] of memories [j b 1 d], for each set."""
        if self.keys is not None:
            return [self.keys(memory) for memory in memories]
        pairs = enumerate(layer.attention for layer in self.layers)
        return [a.project_kv(a.normalize(memories[i % len(memories)])) for i, a in pairs]


class FamjaxFeedbackForCausalLM(FeedbackDecoder, FamjaxForCausalLM):
    """A language model with feedback memories."""

    config_class = FamjaxFeedbackConfig


class FamjaxFeedbackForConditionalGeneration(FeedbackDecoder, FamjaxForConditionalGeneration):
    """An encoder, and a decoder with feedback memories."""

    config_class = FamjaxFeedbackConfig
