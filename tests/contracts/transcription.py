"""NumPy transcriptions (`tests/oracles`) of every stack, for one lane and the model's parameters.

Each takes the config, the stack's parameters and the embedded tokens [t d], and returns the
stack's outputs [t d] and its memory after the last token; `memory_in_state` extracts the same
memory from a state.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from oracles import feedback, linear, lstm, ngrams, segments, short_conv, transformer

from famjax.config.derived import is_segmented, segment_transformer
from famjax.config.schema import ModelConfig
from famjax.layers import feature_map

Outputs = tuple[Any, list[Any]]

# the residual stack

# the oracle's name of each mixer, and its arguments other than weights
MIXERS: dict[str, Any] = {
    "full": lambda c: ("full", {}),
    "swa": lambda c: ("swa", {"window": c.window}),
    "bswa": lambda c: ("bswa", {"block": c.block_len, "segments": c.memory_segments}),
    "bswa_sg": lambda c: ("bswa", {"block": c.block_len, "segments": c.memory_segments}),
    "fam": lambda c: (
        "fam",
        {"block": c.block_len, "segments": c.memory_segments, "previous": c.fam_previous},
    ),
    "fm": lambda c: ("fm", {"block": c.block_len, "segments": c.memory_segments}),
    "delta": lambda c: (
        "delta",
        {"block": c.block_len, "segments": c.memory_segments, "order": c.delta_order},
    ),
    "block_recurrent": lambda c: (
        "block_recurrent",
        {"block": c.block_len, "segments": c.memory_segments},
    ),
    "linear": lambda c: ("linear", {"rope": c.linear.rope}),
}


def _residual(c: ModelConfig, p: Any, x: Any, offset: float = 0) -> Outputs:
    """Return outputs and, for every layer, its FAM or S; None where it has neither."""
    at = {"rope_base": c.rope_base, "offset": offset}
    return transformer.stack(residual_layers(c, p), p.get("prompt"), x, **at)


def residual_layers(c: ModelConfig, p: Any) -> list[tuple[transformer.LayerWeights, str, Any]]:
    """Return the layers of a residual stack as arguments of `transformer.stack`."""
    names = c.mixer.split(",")
    layers = []
    for i in range(c.layers):
        name, stacked = names[i % len(names)], p["layers"][i % len(names)]
        w = jax.tree.map(functools.partial(_at, i // len(names)), stacked)
        mixer = w["mixer"]["window"] if "window" in w["mixer"] else w["mixer"]
        kind, hyper = MIXERS[name](c)
        if kind == "linear":
            hyper |= {"phi": _phi(c, mixer.get("map"))}
        if kind == "fam" and c.fam_update == "gated":
            gate = w["mixer"]["memory_gate"]
            hyper |= {"gate": (gate["weight"], gate["bias"], c.fam_gate_threshold)}
        if kind == "fam":
            hyper |= {"static": c.fam_update == "static", "position": c.fam_position}
            hyper |= {"fam_init": w["mixer"]["prefix"]} if c.fam_init == "prefix" else {}
        if kind == "delta":
            hyper |= {"memory": w["mixer"]["delta_memory"]}
        if kind == "block_recurrent":
            hyper |= {"cell": w["mixer"]["recurrent_cell"]}
        if "key_smear" in mixer:
            hyper |= {"smear_weight": mixer["key_smear"]["weight"]}
        layers.append((_weights(mixer["qkv"], w["mlp"], c.mlp), kind, hyper))
    return layers


def _phi(c: ModelConfig, weights: Any) -> linear.Phi:
    """Return phi with famjax's random numbers, which the feature map's own tests check."""
    draw = {"rfa": feature_map.random_vectors, "performer": feature_map.orthogonal_vectors}
    kind, e = c.linear.map, c.head_dim or c.width // c.heads
    sizes = (c.kv_heads or c.heads, e, feature_map.num_vectors(c))
    return linear.phi_of(kind, weights, draw[kind](*sizes) if kind in draw else None)


# the feedback stacks


def _feedback(c: ModelConfig, p: Any, x: Any) -> Outputs:
    """Return outputs and the memories of the last tokens, token t in slot t: [j span d]."""
    f = c.feedback
    own = [jax.tree.map(functools.partial(_at, i), p["layers"][0]) for i in range(c.layers)]
    w = feedback.Stack(
        layers=[_weights(w["qkv"], w["mlp"], c.mlp) for w in own],
        tau=f.span,
        composition="previous" if c.stack == "transformer" else f.composition,
        keys=_keys(p["keys"]) if "keys" in p else None,
        logits=p.get("mix"),
        layer=f.layer,
        # slots are in reversed order
        distances=p["distances"].T[::-1] if f.positions == "learned" else None,
        rope_base=c.rope_base,
        spans=np.stack([w["span"] for w in own]) * f.span if f.adaptive_span else None,
        ramp=f.span_ramp,
        pre_norm=c.arch.pre_norm,
    )
    y, memory = feedback.stack(w, x)
    slots = np.zeros((len(memory.tokens[0]), f.span, c.width))
    for t, left in enumerate(memory.tokens):
        slots[:, t % f.span] = left
    return y, [slots]


def _keys(p: Any) -> feedback.KeyWeights:
    norm = p.get("norm", {})
    return feedback.KeyWeights(
        norm.get("scale"), norm.get("bias"), p["k"]["kernel"], p["v"]["kernel"]
    )


# the LSTM


def _lstm(c: ModelConfig, p: Any, x: Any) -> Outputs:
    """Return outputs, and h and c [l d]."""
    cells = [p["cells"][i] for i in range(c.layers)]
    layers = [
        {"input": w["input"]["kernel"], "hidden": w["hidden"]["kernel"], "bias": w["bias"]}
        for w in cells
    ]
    y, *memory = lstm.stack(layers, x)
    return y, memory


# segments


def _segments(c: ModelConfig, p: Any, x: Any) -> Outputs:
    """Return outputs, and the memory [f d] of an RMT."""
    layers = [w for w, _, _ in residual_layers(segment_transformer(c), p["transformer"])]
    norm = (p["memory_norm"]["scale"], p["memory_norm"].get("bias"))
    read = {"rmt": segments.rmt, "autocompressor": segments.autocompressor}[c.stack]
    y, memory = read(layers, norm, p["prompt"], x, segment=c.block_len, rope_base=c.rope_base)
    return y, [memory] if c.stack == "rmt" else []


# all stacks

STACKS = {
    "residual": _residual,
    "feedback": _feedback,
    "transformer": _feedback,
    "lstm": _lstm,
    "rmt": _segments,
    "autocompressor": _segments,
}


def model(c: ModelConfig, p: Any, tokens: Any, **kw: Any) -> Outputs:
    """Map tokens [t] -> logits [t v], and the memory of the stack.

    An `offset` shifts all positions of a residual stack (B.2.2).
    """
    embedded = p["embedding"][tokens] * c.width**0.5  # as in `LanguageModel.embed`, not in the head
    recalled = 0
    if c.ngram_memory:
        w = p["stack"]["ngram_memory"]
        recalled = ngrams.recalled(tokens, embedded, w["kernel"], w["bias"], c.ngram_slots)
    if c.short_conv:
        embedded = short_conv.convolve(embedded, p["stack"]["short_conv"]["kernel"])
    embedded = embedded + recalled
    x, memory = STACKS[c.stack](c, p["stack"], embedded, **kw)
    if "norm" in p:
        x = np.stack([transformer.norm(y, p["norm"]["scale"], p["norm"].get("bias")) for y in x])
    return x @ (p["embedding"].T if c.tied else p["head"]["kernel"]), memory


def memory_in_state(c: ModelConfig, state: Any, lane: int) -> list[Any]:
    """Return the memory in a state as `model` returns it, or [] for a stack with another memory."""
    if c.stack == "residual":
        names = c.mixer.split(",")
        places = [divmod(i, len(names)) for i in range(c.layers)]
        held = {"fam": "fam", "delta": "s", "linear": "s", "block_recurrent": "states"}
        return [
            getattr(state[place], held[names[place]])[repeat, lane]
            if names[place] in held
            else None
            for repeat, place in places
        ]
    if is_segmented(c):
        return [] if state.memory is None else [state.memory[0, lane]]
    if c.stack == "lstm":
        return [state.h[:, lane], state.c[:, lane]]
    return [state.slots[0][:, lane]] if c.feedback.cache == "memory" else []


def _weights(qkv: Any, mlp: Any, kind: str) -> transformer.LayerWeights:
    up = {"w_gate": mlp["gate"], "w_up": mlp["up"]} if "gate" in mlp else {"w_in": mlp["up"]}
    inner = {name: w["kernel"] for name, w in (up | {"w_out": mlp["down"]}).items()}
    return transformer.LayerWeights(
        norm1_scale=qkv["norm"]["scale"],
        norm1_bias=qkv["norm"].get("bias"),
        wq=qkv["q"]["kernel"],
        # keys that all layers share are stored elsewhere
        wk=qkv["k"]["kernel"] if "k" in qkv else np.zeros(0),
        wv=qkv["v"]["kernel"] if "v" in qkv else np.zeros(0),
        wo=qkv["out"]["kernel"],
        norm2_scale=mlp["norm"]["scale"],
        norm2_bias=mlp["norm"].get("bias"),
        mlp={"kind": kind, **inner},
    )


def _at(i: int, a: Any) -> Any:
    return a[i]
