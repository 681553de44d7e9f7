"""TransformerFAM's equations (2.1, 2.2, B.1, B.2), token by token in float64 NumPy.

One sequence without a batch dimension. Letters as in `famjax.core.types`, and

    c  hidden width of the feed-forward      tau  index of a block      m  segments      p  previous

Positions are absolute integers. A sequence may end in the middle of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from . import linear

Array = np.ndarray

EPS = 1e-6


def f64(x: Any) -> Array:
    return np.asarray(x, dtype=np.float64)


@dataclass
class LayerWeights:
    """One layer's weights, converted to float64. A norm without bias is RMSNorm.

    `mlp` is {"kind": "gelu", "relu" or "swish", "w_in": [d c], "w_out": [c d]} or
    {"kind": "swiglu" or "geglu", "w_gate": [d c], "w_up": [d c], "w_out": [c d]}.
    """

    norm1_scale: Array  # [d]
    norm1_bias: Array | None  # [d], or None for RMSNorm
    wq: Array  # [d h e]
    wk: Array  # [d g e]
    wv: Array  # [d g e]
    wo: Array  # [h e d]
    norm2_scale: Array  # [d]
    norm2_bias: Array | None  # [d], or None for RMSNorm
    mlp: dict[str, Any]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "mlp" and value is not None:
                setattr(self, field.name, f64(value))
        self.mlp = {k: v if k == "kind" else f64(v) for k, v in self.mlp.items()}


# parts


def norm(x: Array, scale: Array, bias: Array | None) -> Array:
    """[d] -> [d]. LayerNorm with a bias, RMSNorm without."""
    if bias is None:
        return x / math.sqrt(np.mean(x * x) + EPS) * scale
    centered = x - np.mean(x)
    return centered / math.sqrt(np.mean(centered * centered) + EPS) * scale + bias


def gelu(x: Array) -> Array:
    """The tanh approximation."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0)


def silu(x: Array) -> Array:
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))  # x times the sigmoid of x, without overflow


def feed_forward(mlp: dict[str, Any], x: Array) -> Array:
    """[d] -> [d]."""
    if "w_in" in mlp:
        plain = {"gelu": gelu, "relu": relu, "swish": silu}[mlp["kind"]]
        return plain(x @ mlp["w_in"]) @ mlp["w_out"]
    gate = {"swiglu": silu, "geglu": gelu}[mlp["kind"]]
    return (gate(x @ mlp["w_gate"]) * (x @ mlp["w_up"])) @ mlp["w_out"]


def rotate(x: Array, position: float, base: float) -> Array:
    """[heads e] -> [heads e]. RoPE rotates components i and i + e/2 by position * base**(-2i/e)."""
    e = x.shape[-1]
    out = np.zeros_like(x)
    for i in range(e // 2):
        angle = position * base ** (-2.0 * i / e)
        x1, x2 = x[:, i], x[:, i + e // 2]
        out[:, i] = x1 * math.cos(angle) - x2 * math.sin(angle)
        out[:, i + e // 2] = x2 * math.cos(angle) + x1 * math.sin(angle)
    return out


def qkv(
    w: LayerWeights, x: Array, position: float | None, base: float
) -> tuple[Array, Array, Array]:
    """QKV(PreLN(x)) of one token: [d] -> q [h e], k [g e], v [g e], with q and k rotated.

    Without a position they are not rotated.
    """
    x = norm(x, w.norm1_scale, w.norm1_bias)
    q = np.einsum("d,dhe->he", x, w.wq)
    k = np.einsum("d,dge->ge", x, w.wk)
    v = np.einsum("d,dge->ge", x, w.wv)
    if position is None:
        return q, k, v
    return rotate(q, position, base), rotate(k, position, base), v


def smear(w: LayerWeights, x: Array, weight: Array, position: float, base: float) -> list[Array]:
    """Keys of a document's tokens [t d], the first of them at `position`: t x [g e].

    Each is smeared, before its rotation, with the unrotated key of the token before it (Olsson et
    al. 2022); weight: [g].
    """
    share = 1 / (1 + np.exp(-f64(weight)))[:, None]
    keys = []
    for t in range(len(x)):
        own = qkv(w, x[t], None, base)[1]
        before = qkv(w, x[t - 1], None, base)[1] if t > 0 else np.zeros_like(own)
        keys.append(rotate((1 - share) * own + share * before, position + t, base))
    return keys


def attend(w: LayerWeights, q: Array, keys: Sequence[Array], values: Sequence[Array]) -> Array:
    """SelfAttention of one query over the given keys and values, with the output projection.

    q: [h e]; keys, values: each [g e]. Returns [d]. Query head i uses key head i // (h / g).
    """
    h, e = q.shape
    g = w.wk.shape[1]
    heads = np.zeros((h, e))
    for i in range(h):
        j = i // (h // g)
        scores = f64([q[i] @ k[j] * e**-0.5 for k in keys])
        weights = np.exp(scores - np.max(scores))
        weights = weights / np.sum(weights)
        for weight, v in zip(weights, values, strict=True):
            heads[i] += weight * v[j]
    return np.einsum("he,hed->d", heads, w.wo)


def finish(w: LayerWeights, a: Array) -> Array:
    """O = FF(PreLN(A)) + A of one token, [d] -> [d]."""
    return feed_forward(w.mlp, norm(a, w.norm2_scale, w.norm2_bias)) + a


def tokens_layer(
    w: LayerWeights,
    x: Array,
    seen: Sequence[Sequence[int]],
    first: float,
    base: float,
    smeared: Sequence[Array] = (),
) -> Array:
    """a_t = SelfAttention(q_t, K of seen[t], V of seen[t]) + i_t; token t is at first + t.

    `smeared` are the keys, if they are not the tokens' own.
    """
    x = f64(x)
    projected = [qkv(w, x[t], first + t, base) for t in range(len(x))]
    own = smeared or [k for _, k, _ in projected]
    y = np.zeros_like(x)
    for t in range(len(x)):
        q = projected[t][0]
        keys = [own[s] for s in seen[t]]
        values = [projected[s][2] for s in seen[t]]
        y[t] = finish(w, attend(w, q, keys, values) + x[t])
    return y


# layers


def full_layer(
    w: LayerWeights, x: Array, *, rope_base: float = 10_000.0, offset: float = 0
) -> Array:
    """Causal attention over the full sequence. x: [t d]; returns [t d]."""
    return tokens_layer(w, x, [range(t + 1) for t in range(len(x))], offset, rope_base)


def swa_layer(
    w: LayerWeights, x: Array, *, window: int, rope_base: float = 10_000.0, offset: float = 0
) -> Array:
    """Token t sees tokens t-window+1 to t. x: [t d]; returns [t d]."""
    seen = [range(max(0, t - window + 1), t + 1) for t in range(len(x))]
    return tokens_layer(w, x, seen, offset, rope_base)


def seen_in_memory(tau: int, block: int, segments: int) -> list[int]:
    """Return the tokens of blocks tau-m to tau-1 that exist."""
    return [
        s for b in range(max(0, tau - segments), tau) for s in range(b * block, (b + 1) * block)
    ]


def bswa_layer(
    w: LayerWeights,
    x: Array,
    *,
    block: int,
    segments: int,
    smear_weight: Array | None = None,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> Array:
    """Equation 1: all of blocks tau-m to tau-1, and the current block up to t. [t d] -> [t d]."""
    seen = []
    for t in range(len(x)):
        tau = t // block
        seen.append(seen_in_memory(tau, block, segments) + list(range(tau * block, t + 1)))
    smeared = []
    if smear_weight is not None:
        smeared = smear(w, f64(x), smear_weight, offset, rope_base)
    return tokens_layer(w, x, seen, offset, rope_base, smeared)


def fam_layer(
    w: LayerWeights,
    x: Array,
    *,
    fam_init: Array,
    block: int,
    segments: int,
    previous: int = 1,
    gate: tuple[Array, Array, float] | None = None,
    static: bool = False,
    position: str = "last",
    smear_weight: Array | None = None,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> tuple[Array, Array, list[Array]]:
    """Algorithm 2, with the first update's zero residual (B.1) and FAM's positions (B.2.1).

    With a gate, with weight [d], bias [f] and threshold, F_tau interpolates between F_{tau-1} and
    the sum.

    Static (C.3), query and residual of every update are those of the prompt, and the previous FAM
    is a key and a value alone.

    x: [t d]; fam_init: [f d], F_{-1}. Returns y [t d], the last F [f d] (fam_init if no block was
    completed) and [F_0, F_1, ...], one for each completed block.
    """
    x = f64(x)
    fam_init = f64(fam_init)
    f = len(fam_init)
    y = np.zeros_like(x)

    def project(fam: Array, tau: int) -> list[tuple[Array, Array, Array]]:
        """QKV(PreLN(F_tau)). F_tau is at the last f positions of block tau, F_{-1} at -f..-1.

        Or between block tau's last token and the next one, or at the document's first (B.4.1).
        """
        end = offset + (tau + 1) * block
        at = {
            "last": [end - f + j for j in range(f)],
            "between": [end - 1 + (j + 1) / (f + 1) for j in range(f)],
            "zero": [offset] * f,
        }[position]
        return [qkv(w, fam[j], at[j], rope_base) for j in range(f)]

    fam = fam_init  # F_{tau-1}
    projected_fams = [project(fam_init, -1)]  # of F_{-1}, F_0, ..., F_{tau-1}
    projected: list[tuple[Array, Array, Array]] = []  # of all tokens so far
    fams: list[Array] = []

    for tau in range(math.ceil(len(x) / block)):
        begin, end = tau * block, min((tau + 1) * block, len(x))
        for t in range(begin, end):
            projected.append(qkv(w, x[t], offset + t, rope_base))
        if smear_weight is not None:
            smeared = smear(w, x[:end], smear_weight, offset, rope_base)
            for t in range(begin, end):
                projected[t] = (projected[t][0], smeared[t], projected[t][2])

        # the block's input attends to memory segments, the last p FAMs and its own prefix
        for t in range(begin, end):
            past = [projected[s] for s in seen_in_memory(tau, block, segments)]
            for back in range(1, previous + 1):  # F_{tau-back}, at index tau-back+1
                if tau - back >= -1:
                    past += projected_fams[tau - back + 1]
            past += projected[begin : t + 1]
            a = attend(w, projected[t][0], [k for _, k, _ in past], [v for _, _, v in past]) + x[t]
            y[t] = finish(w, a)

        if end - begin < block:
            break  # an incomplete block makes no update

        # FAM attends to itself and to the whole block
        compressed = projected_fams[-1] + projected[begin:end]
        keys = [k for _, k, _ in compressed]
        values = [v for _, _, v in compressed]
        updated = np.zeros_like(fam)
        for j in range(f):
            query, residual = projected_fams[-1][j][0], fam[j]
            if static:
                # at the positions of F_{tau-1}, whatever it is
                query, residual = project(fam_init, tau - 1)[j][0], fam_init[j]
            elif tau == 0:
                residual = np.zeros_like(fam[j])
            a = attend(w, query, keys, values) + residual
            updated[j] = finish(w, a)
            if gate is not None and tau > 0:
                opening = _opening(gate, a, j)
                updated[j] = (1 - opening) * fam[j] + opening * (updated[j] - residual)
        fam = updated
        fams.append(fam)
        projected_fams.append(project(fam, tau))

    return y, fam, fams


def _opening(gate: tuple[Array, Array, float], a: Array, j: int) -> float:
    """The gate of memory token j, from its attention output [d]."""
    weight, bias, threshold = f64(gate[0]), f64(gate[1]), gate[2]
    rms = math.sqrt(sum(a[i] ** 2 for i in range(len(a))) / len(a) + 1e-6)
    logit = sum(weight[i] * a[i] / rms for i in range(len(a))) + bias[j]
    return max(0.0, 1 / (1 + math.exp(-logit)) - threshold) / (1 - threshold)


def fm_layer(
    w: LayerWeights,
    x: Array,
    *,
    block: int,
    segments: int,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> Array:
    """Figure 9: Equation 1 with memory segments of the layer's own outputs. [t d] -> [t d].

    Token t sees the outputs of blocks tau-m to tau-1, at their tokens' positions, and the inputs of
    its block up to t.
    """
    x = f64(x)
    y = np.zeros_like(x)
    for t in range(len(x)):
        tau = t // block
        seen = [qkv(w, y[s], offset + s, rope_base) for s in seen_in_memory(tau, block, segments)]
        seen += [qkv(w, x[s], offset + s, rope_base) for s in range(tau * block, t + 1)]
        q, _, _ = qkv(w, x[t], offset + t, rope_base)
        y[t] = finish(w, attend(w, q, [k for _, k, _ in seen], [v for _, _, v in seen]) + x[t])
    return y


def dpfp(x: Array, order: int) -> Array:
    """Schlag et al. 2021, 5.3, with unit norm: [e] -> [2 e order]."""
    y = np.maximum(np.concatenate([x, -x]), 0)
    features = f64(
        [y[i] * y[(i - offset) % len(y)] for offset in range(1, order + 1) for i in range(len(y))]
    )
    return features / math.sqrt(sum(a * a for a in features) + 1e-6)


def delta_layer(
    w: LayerWeights,
    x: Array,
    *,
    memory: dict[str, Any],
    block: int,
    segments: int,
    order: int,
    smear_weight: Array | None = None,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> tuple[Array, Array]:
    """Window attention, and what S of the blocks before the own one returns; token by token.

    memory: key_smear.weight [n], rate_weight [n 2e], rate_bias [n], gain [n h/g], of the n last key
    heads; it smears keys with other weights than the window, smear_weight. x: [t d]; returns y
    [t d], and S [n k e] of the completed blocks.
    """
    x = f64(x)
    h, e = w.wq.shape[1:]
    g = w.wk.shape[1]
    rate_weight, rate_bias = f64(memory["rate_weight"]), f64(memory["rate_bias"])
    without = g - len(rate_bias)  # key heads that have no memory
    plain = [qkv(w, token, None, rope_base) for token in x]  # without positions
    rotated = [qkv(w, token, offset + t, rope_base) for t, token in enumerate(x)]
    keys = [k for _, k, _ in rotated]
    if smear_weight is not None:
        keys = smear(w, x, smear_weight, offset, rope_base)
    share = 1 / (1 + np.exp(-f64(memory["key_smear"]["weight"])))[:, None]
    smeared = []
    for t in range(len(x)):
        before = plain[t - 1][1] if t % block else np.zeros((g, e))
        smeared.append((1 - share) * plain[t][1][without:] + share * before[without:])
    s = np.zeros((g - without, 2 * order * e, e))
    y = np.zeros_like(x)
    for tau in range(math.ceil(len(x) / block)):
        begin, end = tau * block, min((tau + 1) * block, len(x))
        for t in range(begin, end):
            seen = seen_in_memory(tau, block, segments) + list(range(begin, t + 1))
            a = attend(w, rotated[t][0], [keys[i] for i in seen], [rotated[i][2] for i in seen])
            first = without * h // g
            for i in range(first, h):
                recalled = s[i // (h // g) - without].T @ dpfp(plain[t][0][i], order)
                a = a + f64(memory["gain"])[i - first] * recalled @ f64(w.wo)[i]
            y[t] = finish(w, a + x[t])
        if end - begin < block:
            break  # an incomplete block writes nothing
        for j in range(g - without):
            own = without + j
            rates = [
                _rate(rate_weight[j], rate_bias[j], plain[t][1][own], plain[t][2][own])
                for t in range(begin, end)
            ]
            for t, rate in zip(range(begin, end), rates, strict=True):
                phi, v = dpfp(smeared[t][j], order), plain[t][2][own]
                s[j] = s[j] + rate * np.outer(phi, v - s[j].T @ phi)
    return y, s


def block_recurrent_layer(
    w: LayerWeights,
    x: Array,
    *,
    cell: dict[str, Any],
    block: int,
    segments: int,
    smear_weight: Array | None = None,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> tuple[Array, Array]:
    """Hutchins et al. 2022, 3.1 and 3.2: window attention, and state vectors; token by token.

    cell: norm, initial and ids [f d], the kernels of projections, and those of either kind of gate.
    x: [t d]; returns y [t d], and the states [f d] after the completed blocks.
    """
    x = f64(x)
    heads = w.wq.shape[1]
    kernel = {name: f64(part["kernel"]) for name, part in cell.items() if "kernel" in part}
    plain = [qkv(w, token, None, rope_base) for token in x]  # without positions
    rotated = [qkv(w, token, offset + t, rope_base) for t, token in enumerate(x)]
    keys = [k for _, k, _ in rotated]
    if smear_weight is not None:
        keys = smear(w, x, smear_weight, offset, rope_base)

    def cell_norm(state: Array) -> Array:
        return norm(state, f64(cell["norm"]["scale"]), cell["norm"].get("bias"))

    def attend_heads(q: Array, ks: Sequence[Array], vs: Sequence[Array]) -> Array:
        """[h e], without an output projection."""
        out = np.zeros_like(q)
        for i in range(heads):
            j = i // (heads // w.wk.shape[1])
            scores = f64([q[i] @ k[j] * q.shape[1] ** -0.5 for k in ks])
            weights = np.exp(scores - np.max(scores))
            for weight, v in zip(weights / np.sum(weights), vs, strict=True):
                out[i] += weight * v[j]
        return out

    def project(name: str, x: Array) -> Array:
        return np.einsum("d,dhe->he", x, kernel[name])

    def from_heads(name: str, h: Array) -> Array:
        return np.einsum("he,hed->d", h, kernel[name]) + f64(cell[name]["bias"])

    states = [f64(state) for state in cell["initial"]]
    y = np.zeros_like(x)
    for tau in range(math.ceil(len(x) / block)):
        begin, end = tau * block, min((tau + 1) * block, len(x))
        named = [cell_norm(c) + f64(one) for c, one in zip(states, cell["ids"], strict=True)]
        state_k = [project("k", i) for i in named]
        state_v = [project("v", i) for i in named]
        for t in range(begin, end):
            seen = seen_in_memory(tau, block, segments) + list(range(begin, t + 1))
            a = attend(w, rotated[t][0], [keys[i] for i in seen], [rotated[i][2] for i in seen])
            q = project("token_q", norm(x[t], w.norm1_scale, w.norm1_bias))
            read = attend_heads(q, state_k, state_v)
            a = a + np.einsum("he,hed->d", read, kernel["token_out"])
            y[t] = finish(w, a + x[t])
        if end - begin < block:
            break  # an incomplete block updates nothing
        updated = []
        for c, i in zip(states, named, strict=True):
            own = attend_heads(project("q", i), state_k, state_v)
            tokens = [plain[t] for t in range(begin, end)]
            q = project("block_q", i)
            h = np.concatenate(
                [own, attend_heads(q, [k for _, k, _ in tokens], [v for _, _, v in tokens])]
            )
            z = from_heads("z", h)
            if "gate" in cell:
                g = 1 / (1 + np.exp(-f64(cell["gate"])))
                updated.append(g * c + (1 - g) * z)
            else:
                keep = 1 / (1 + np.exp(-(from_heads("keep", h) + 1)))
                write = 1 / (1 + np.exp(-(from_heads("write", h) - 1)))
                updated.append(keep * c + write * np.tanh(z))
        states = updated
    return y, f64(states)


def _rate(weight: Array, bias: float, k: Array, v: Array) -> float:
    """The rate at which a token is written, from its key and value."""
    x = [*k, *v]
    rms = math.sqrt(sum(a * a for a in x) / len(x) + 1e-6)
    logit = 5 * sum(a * b for a, b in zip(weight, x, strict=True)) / rms + bias
    return max(0.0, 1 / (1 + math.exp(-logit)) - 0.1) / 0.9


def linear_layer(
    w: LayerWeights,
    x: Array,
    *,
    phi: linear.Phi,
    rope: bool,
    everything: bool = False,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> tuple[Array, Array]:
    """T2R's Equations 3 to 7 (`linear`): causal, or all tokens attend to all.

    x: [t d]; returns [t d], and S after the last token [g k e].
    """
    x = f64(x)
    projected = [qkv(w, x[t], offset + t if rope else None, rope_base) for t in range(len(x))]
    keys, values = [k for _, k, _ in projected], [v for _, _, v in projected]
    y = np.zeros_like(x)
    for t in range(len(x)):
        seen = len(x) if everything else t + 1
        heads = linear.attend(phi, projected[t][0], keys[:seen], values[:seen])
        y[t] = finish(w, np.einsum("he,hed->d", heads, w.wo) + x[t])
    return y, linear.state(phi, keys, values)


def prompt_layer(
    w: LayerWeights, h: Array, *, rope_base: float = 10_000.0, offset: float = 0
) -> Array:
    """B.1: a layer applied to the FAM prompt, full attention at positions -f to -1. [f d]."""
    f = len(h)
    return tokens_layer(w, h, [range(f)] * f, offset - f, rope_base)


# model

LAYERS: dict[str, Any] = {
    "full": full_layer,
    "swa": swa_layer,
    "bswa": bswa_layer,
    "fam": fam_layer,
    "fm": fm_layer,
    "delta": delta_layer,
    "block_recurrent": block_recurrent_layer,
    "linear": linear_layer,
}


def stack(
    layers: Sequence[tuple[LayerWeights, str, dict[str, Any]]],
    prompt: Array | None,
    x: Array,
    *,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> tuple[Array, list[Array | None]]:
    """The layers of `model`: [t d] -> [t d], and the last FAM or S of each."""
    h = None if prompt is None else f64(prompt)
    memory: list[Array | None] = []
    for w, kind, hyper in layers:
        at = {"rope_base": rope_base, "offset": offset}
        if kind == "fam":
            if h is None and "fam_init" not in hyper:  # a prefix is the layer's own
                raise ValueError("a fam layer needs a prompt")
            x, fam, _ = fam_layer(w, x, **{"fam_init": h, **hyper}, **at)
            memory.append(fam)
        elif kind == "linear":
            x, s = linear_layer(w, x, **hyper, **at)
            memory.append(s)
        elif kind == "block_recurrent":
            x, states = block_recurrent_layer(w, x, **hyper, **at)
            memory.append(states)
        elif kind == "delta":
            x, s = delta_layer(w, x, **hyper, **at)
            memory.append(s)
        else:
            x = LAYERS[kind](w, x, **hyper, **at)
            memory.append(None)
        if h is not None and kind == "linear":
            before = {"rope_base": rope_base, "offset": offset - len(h)}
            h, _ = linear_layer(w, h, everything=True, **hyper, **before)
        elif h is not None:
            h = prompt_layer(w, h, **at)
    return x, memory


def model(
    embedding: Array,
    layers: Sequence[tuple[LayerWeights, str, dict[str, Any]]],
    final_norm: tuple[Array, Array | None],
    head: Array | None,
    prompt: Array | None,
    tokens: Sequence[int] | Array,
    *,
    rope_base: float = 10_000.0,
    offset: float = 0,
) -> tuple[Array, list[Array | None]]:
    """A decoder-only language model.

    Args:
      embedding: [v d].
      layers: of (weights, kind in LAYERS, keyword arguments of this kind other than
        rope_base, offset and fam_init).
      final_norm: scale [d] and bias [d] or None.
      head: [d v], or None for the transposed embedding.
      prompt: [f d], the FAM prompt as embeddings, or None. It passes through all layers of any
      kind; a layer's initial FAM is its input prompt.
      tokens: [t] integers.

    Returns:
      logits [t v], and for every layer its last FAM [f d], or its S [g k e]; None for others.
    """
    embedding = f64(embedding)
    x = np.stack([embedding[int(token)] for token in tokens])
    x, memory = stack(layers, prompt, x, rope_base=rope_base, offset=offset)
    scale, bias = final_norm
    x = np.stack([norm(row, f64(scale), None if bias is None else f64(bias)) for row in x])
    return x @ (embedding.T if head is None else f64(head)), memory


def cross_entropy(logits: Array, targets: Array, weights: Array | None = None) -> float:
    """Sum of weight * -log softmax(logits)[target], over the sum of weights (all 1 if None).

    logits: [t v]; targets: [t] integers; weights: [t].
    """
    logits = f64(logits)
    weights = np.ones(len(logits)) if weights is None else f64(weights)
    total = 0.0
    for row, target, weight in zip(logits, targets, weights, strict=True):
        top = np.max(row)
        total += weight * (top + math.log(np.sum(np.exp(row - top))) - row[int(target)])
    return float(total / np.sum(weights))


# losses


def fam_losses(
    w: LayerWeights,
    x: Array,
    *,
    fam_init: Array,
    block: int,
    segments: int,
    previous: int = 1,
    position: str = "last",
    rope_base: float = 10_000.0,
    static: bool = False,
    gate: tuple[Array, Array, float] | None = None,
) -> tuple[float, float, float | None]:
    """Equation 2, the reconstruction of C.5, and the mean gate, of one layer of FAM.

    Means over complete blocks, that of the gates without the first block.

    Arguments as of `fam_layer`.
    """
    x, fam_init = f64(x), f64(fam_init)
    shape = {"block": block, "segments": segments, "previous": previous, "position": position}
    y, _, fams = fam_layer(
        w, x, fam_init=fam_init, rope_base=rope_base, static=static, gate=gate, **shape
    )
    f, h = len(fam_init), w.wq.shape[1]
    memories = [fam_init, *fams]  # F_{-1}, F_0, ...
    tokens = [qkv(w, x[t], t, rope_base) for t in range(len(x))]

    def fam_position(tau: int, j: int) -> float:
        end = (tau + 1) * block
        return {"last": end - f + j, "between": end - 1 + (j + 1) / (f + 1), "zero": 0}[position]

    def memory(tau: int) -> list[tuple[Array, Array, Array]]:
        """Queries, keys and values of F_tau."""
        return [qkv(w, memories[tau + 1][j], fam_position(tau, j), rope_base) for j in range(f)]

    def softmax(q: Array, keys: list[Array], i: int) -> Array:
        """Weights of head i."""
        g = w.wk.shape[1]
        scores = f64([q[i] @ k[i // (h // g)] * q.shape[1] ** -0.5 for k in keys])
        weights = np.exp(scores - np.max(scores))
        return weights / np.sum(weights)

    diversity, reconstruction, openings = [], [], []
    for tau in range(len(fams)):
        begin, end = tau * block, (tau + 1) * block
        total: dict[Any, float] = {}  # of each key, over heads and queries
        for t in range(begin, end):
            named = [(("token", s), tokens[s][1]) for s in seen_in_memory(tau, block, segments)]
            for back in range(1, previous + 1):
                if tau - back >= -1:
                    named += [(("fam", back, j), m[1]) for j, m in enumerate(memory(tau - back))]
            named += [(("token", s), tokens[s][1]) for s in range(begin, t + 1)]
            for i in range(h):
                for (name, _), p in zip(
                    named, softmax(tokens[t][0], [k for _, k in named], i), strict=True
                ):
                    total[name] = total.get(name, 0) + p
        for j in range(f):
            query = memory(tau - 1)[j][0]
            if static:
                query = qkv(w, fam_init[j], fam_position(tau - 1, j), rope_base)[0]
            named = [(("fam", 1, n), m[1]) for n, m in enumerate(memory(tau - 1))]
            named += [(("token", s), tokens[s][1]) for s in range(begin, end)]
            for i in range(h):
                for (name, _), p in zip(
                    named, softmax(query, [k for _, k in named], i), strict=True
                ):
                    total[name] = total.get(name, 0) + p
        shares = [p / (h * (block + f)) for p in total.values()]
        diversity.append(sum(p * math.log(p) for p in shares if p > 0))
        left = memory(tau)
        for t in range(begin, end):
            a = attend(w, tokens[t][0], [k for _, k, _ in left], [v for _, _, v in left]) + x[t]
            reconstruction.append(np.mean((finish(w, a) - y[t]) ** 2))
        if gate is not None and tau > 0:
            own = memory(tau - 1) + tokens[begin:end]
            for j in range(f):
                query = memory(tau - 1)[j][0]
                a = attend(w, query, [k for _, k, _ in own], [v for _, _, v in own])
                openings.append(_opening(gate, a + fams[tau - 1][j], j))
    writing = float(np.mean(openings)) if openings else None
    return float(np.mean(diversity)), float(np.mean(reconstruction)), writing


def delta_writing(w: LayerWeights, x: Array, *, memory: dict[str, Any], block: int) -> float:
    """The mean rate of the delta rule over heads and the tokens of complete blocks of x [t d]."""
    rates = []
    for token in f64(x)[: len(x) // block * block]:
        _, k, v = qkv(w, token, None, 0.0)
        n = len(memory["rate_bias"])  # the last key heads have a memory
        for j in range(n):
            weight, bias = f64(memory["rate_weight"])[j], f64(memory["rate_bias"])[j]
            rates.append(_rate(weight, bias, k[j - n], v[j - n]))
    return float(np.mean(rates))
