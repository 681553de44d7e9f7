"""Consistency of the transcription, and comparisons with attention computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from . import transformer as oracle

D, H, G, E, C = 12, 4, 2, 6, 20
BLOCK, FAM = 4, 2
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def layer(seed=0, mlp="swiglu", norm="rmsnorm", d=D, h=H, g=G, e=E, c=C):
    rng = np.random.default_rng(seed)

    def w(*shape, fan=d):
        return rng.normal(size=shape) * fan**-0.5

    def scale():
        return 1 + 0.3 * rng.normal(size=d)

    names = ["w_in"] if mlp == "gelu" else ["w_gate", "w_up"]
    return oracle.LayerWeights(
        norm1_scale=scale(),
        norm1_bias=0.3 * rng.normal(size=d) if norm == "layernorm" else None,
        wq=2 * w(d, h, e),
        wk=2 * w(d, g, e),
        wv=w(d, g, e),
        wo=w(h, e, d, fan=h * e),
        norm2_scale=scale(),
        norm2_bias=0.3 * rng.normal(size=d) if norm == "layernorm" else None,
        mlp={"kind": mlp, **{name: w(d, c) for name in names}, "w_out": w(c, d, fan=c)},
    )


def sequence(t, seed=1):
    return np.random.default_rng(seed).normal(size=(t, D))


def run(kind, w, x, **kw):
    if kind == "full":
        return oracle.full_layer(w, x, **kw)
    if kind == "swa":
        return oracle.swa_layer(w, x, window=5, **kw)
    if kind == "bswa":
        return oracle.bswa_layer(w, x, block=BLOCK, segments=1, **kw)
    init = sequence(FAM, seed=2)
    return oracle.fam_layer(w, x, fam_init=init, block=BLOCK, segments=1, previous=2, **kw)[0]


def changed_rows(a, b):
    """Return which rows differ."""
    return np.abs(a - b).max(axis=-1) > 1e-8


KINDS = ["full", "swa", "bswa", "fam"]


# attention written by hand

N = 15  # identifiers; the last coordinate is always 1 and determines queries and keys
WIDE = N + 1


def reading_layer():
    """Return a layer without feed-forward whose y - x shows each key's attention weight."""
    rng = np.random.default_rng(5)
    wq, wk = np.zeros((WIDE, 1, WIDE)), np.zeros((WIDE, 1, WIDE))
    wq[-1, 0], wk[-1, 0] = 2 * rng.normal(size=(2, WIDE))
    unit = np.full(WIDE, math.sqrt(2 / WIDE + oracle.EPS))  # the norm is the identity on tokens
    w = oracle.LayerWeights(
        norm1_scale=unit,
        norm1_bias=None,
        wq=wq,
        wk=wk,
        wv=np.eye(WIDE)[:, None, :],
        wo=np.eye(WIDE)[None],
        norm2_scale=unit,
        norm2_bias=None,
        mlp={"kind": "gelu", "w_in": np.zeros((WIDE, 1)), "w_out": np.zeros((1, WIDE))},
    )
    return w, wq[-1, 0], wk[-1, 0]


def rows(numbers):
    x = np.zeros((len(numbers), WIDE))
    x[np.arange(len(numbers)), numbers] = 1
    x[:, -1] = 1
    return x


def by_hand(q, k, query, at, keys, positions, base=10_000.0):
    """softmax(Re sum_i q_i conj(k_i) exp(i (m - n) theta_i) / sqrt(e)) V, in complex numbers."""
    query = query / math.sqrt(np.mean(query**2) + oracle.EPS) * math.sqrt(2 / WIDE + oracle.EPS)
    rms = np.sqrt(np.mean(keys**2, axis=1, keepdims=True) + oracle.EPS)
    keys = keys / rms * math.sqrt(2 / WIDE + oracle.EPS)
    half = WIDE // 2
    weight_einsum = (q[:half] + 1j * q[half:]) * np.conj(k[:half] + 1j * k[half:])
    theta = base ** (-np.arange(half) / half)
    turned = np.exp(1j * np.subtract.outer(at, f64(positions))[..., None] * theta)
    scores = query[-1] * keys[:, -1] * (turned @ weight_einsum).real / math.sqrt(WIDE)
    shares = np.exp(scores) / np.exp(scores).sum()
    return shares @ keys


def f64(x):
    return np.asarray(x, dtype=np.float64)


@pytest.mark.parametrize(
    ("kind", "hyper", "seen"),
    [
        ("full", {}, {0: [0], 5: [0, 1, 2, 3, 4, 5]}),
        ("swa", {"window": 3}, {0: [0], 1: [0, 1], 2: [0, 1, 2], 6: [4, 5, 6]}),
        (
            "bswa",
            {"block": 3, "segments": 2},
            {
                1: [0, 1],
                4: [0, 1, 2, 3, 4],
                9: [3, 4, 5, 6, 7, 8, 9],
                10: [3, 4, 5, 6, 7, 8, 9, 10],
            },
        ),
        ("bswa", {"block": 3, "segments": 0}, {2: [0, 1, 2], 3: [3], 7: [6, 7]}),
    ],
)
def test_visible_keys_and_their_weights(kind, hyper, seen):
    w, q, k = reading_layer()
    x = rows(range(11))
    y = oracle.LAYERS[kind](w, x, **hyper)
    for t, keys in seen.items():
        assert (np.flatnonzero((y - x)[t][:N] > 1e-12) == keys).all()
        np.testing.assert_allclose((y - x)[t], by_hand(q, k, x[t], t, x[keys], keys), **CLOSE)


def test_fam_equals_a_computation_by_hand():
    """Blocks of 4, FAM of 2, one memory segment, two previous FAMs; block 3 is incomplete."""
    w, q, k = reading_layer()
    x = rows(range(13))
    init = rows([13, 14])
    y, last, fams = oracle.fam_layer(w, x, fam_init=init, block=4, segments=1, previous=2)
    assert len(fams) == 3
    assert (last == fams[-1]).all()
    f0, f1, f2 = fams

    def fam(j, before, position, block, positions):
        keys = np.concatenate([before, x[block]])
        return by_hand(q, k, before[j], position + j, keys, positions)

    b0, b1, b2 = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
    for j in range(2):
        np.testing.assert_allclose(f0[j], fam(j, init, -2, b0, [-2, -1, *b0]), **CLOSE)
        np.testing.assert_allclose(f1[j] - f0[j], fam(j, f0, 2, b1, [2, 3, *b1]), **CLOSE)
        np.testing.assert_allclose(f2[j] - f1[j], fam(j, f1, 6, b2, [6, 7, *b2]), **CLOSE)

    def token(t, parts, positions):
        keys = np.concatenate(parts)
        np.testing.assert_allclose((y - x)[t], by_hand(q, k, x[t], t, keys, positions), **CLOSE)

    token(2, [init, x[:3]], [-2, -1, 0, 1, 2])
    token(5, [x[:4], f0, init, x[4:6]], [*b0, 2, 3, -2, -1, 4, 5])
    token(8, [x[4:8], f1, f0, x[8:9]], [*b1, 6, 7, 2, 3, 8])
    token(12, [x[8:12], f2, f1, x[12:]], [*b2, 10, 11, 6, 7, 12])


def test_memory_prompt_equals_a_computation_by_hand():
    w, q, k = reading_layer()
    h = rows([3, 1, 4])
    y = oracle.prompt_layer(w, h)
    for j in range(3):
        expected = by_hand(q, k, h[j], j - 3, h, [-3, -2, -1])
        np.testing.assert_allclose((y - h)[j], expected, **CLOSE)


# properties of the layers


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu", "geglu"])
def test_windows_over_the_full_sequence_are_full_attention(norm, mlp):
    w, x = layer(mlp=mlp, norm=norm), sequence(14)
    full = oracle.full_layer(w, x)
    np.testing.assert_allclose(oracle.swa_layer(w, x, window=14), full, **CLOSE)
    np.testing.assert_allclose(oracle.bswa_layer(w, x, block=4, segments=3), full, **CLOSE)
    # but with one less, token 13, and block 3, no longer see the start
    assert np.flatnonzero(changed_rows(oracle.swa_layer(w, x, window=13), full)).tolist() == [13]
    less = oracle.bswa_layer(w, x, block=4, segments=2)
    assert np.flatnonzero(changed_rows(less, full)).tolist() == [12, 13]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_causal(kind):
    w, x = layer(), sequence(18)
    y = run(kind, w, x)
    for t in [0, 3, 4, 9]:
        other = x.copy()
        other[t] += 1
        changed = changed_rows(run(kind, w, other), y)
        assert not changed[:t].any()
        assert changed[t : t // BLOCK * BLOCK + BLOCK].all()  # t and later tokens of its block
    # a shorter sequence that ends within a block has the same prefix
    np.testing.assert_allclose(run(kind, w, x[:10]), y[:10], **CLOSE)


@pytest.mark.parametrize("previous", [1, 2])
def test_fam_remembers_what_bswa_cannot_see(previous):
    w, x = layer(), sequence(6 * BLOCK)
    other = x.copy()
    other[1] += 1

    def fam(x):
        init = sequence(FAM, seed=2)
        return oracle.fam_layer(w, x, fam_init=init, block=BLOCK, segments=0, previous=previous)

    def bswa(x):
        return oracle.bswa_layer(w, x, block=BLOCK, segments=0)

    assert changed_rows(fam(x)[0], fam(other)[0])[5 * BLOCK :].all()
    assert all(changed_rows(a, b).all() for a, b in zip(fam(x)[2], fam(other)[2], strict=True))
    assert not changed_rows(bswa(x), bswa(other))[BLOCK:].any()


def test_fam_is_updated_by_complete_blocks_only():
    w, x, init = layer(), sequence(11), sequence(FAM, seed=2)

    def fam(t):
        return oracle.fam_layer(w, x[:t], fam_init=init, block=BLOCK, segments=1)

    assert [len(fam(t)[2]) for t in [0, 3, 4, 7, 8, 11]] == [0, 0, 1, 1, 2, 2]
    assert (fam(3)[1] == init).all()
    np.testing.assert_allclose(fam(11)[1], fam(8)[1], **CLOSE)
    assert changed_rows(fam(8)[1], fam(4)[1]).all()


def test_a_fam_of_zeros_only_dilutes():
    """Its keys and values are zero under RMSNorm: with zero queries, token 0 sees 1 + f keys."""
    w, x = layer(), sequence(1)
    w = replace(w, wq=0 * w.wq)
    y, _, _ = oracle.fam_layer(w, x, fam_init=np.zeros((FAM, D)), block=BLOCK, segments=0)
    diluted = oracle.full_layer(replace(w, wo=w.wo / (1 + FAM)), x)
    np.testing.assert_allclose(y, diluted, **CLOSE)
    assert changed_rows(y, oracle.full_layer(w, x)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_offset_of_positions_changes_nothing(kind):
    w, x = layer(), sequence(14)
    y = run(kind, w, x)
    np.testing.assert_allclose(run(kind, w, x, offset=4321), y, **CLOSE)
    # although positions matter: both their order and the base
    assert changed_rows(run(kind, w, x, rope_base=100.0), y)[1:].all()
    swapped = run(kind, w, x[[1, 0, *range(2, 14)]])
    assert changed_rows(swapped[2:4], y[2:4]).all()


def test_grouped_queries_are_repeated_key_heads():
    w, x = layer(), sequence(9)
    y = oracle.full_layer(w, x)
    repeated = replace(w, wk=w.wk.repeat(H // G, axis=1), wv=w.wv.repeat(H // G, axis=1))
    tiled = replace(w, wk=np.tile(w.wk, (1, H // G, 1)), wv=np.tile(w.wv, (1, H // G, 1)))
    np.testing.assert_allclose(oracle.full_layer(repeated, x), y, **CLOSE)
    assert changed_rows(oracle.full_layer(tiled, x), y).all()


def test_norms_activations_and_rotations():
    x = sequence(1)[0]
    np.testing.assert_allclose(
        oracle.norm(x, np.full(D, 2.0), None), 2 * x / np.sqrt((x**2).mean() + 1e-6), **CLOSE
    )
    np.testing.assert_allclose(
        oracle.norm(x, np.full(D, 2.0), np.ones(D)),
        2 * (x - x.mean()) / np.sqrt(x.var() + 1e-6) + 1,
        **CLOSE,
    )
    np.testing.assert_allclose(oracle.silu(x), x / (1 + np.exp(-x)), **CLOSE)
    exact = [v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in x]
    np.testing.assert_allclose(oracle.gelu(x), exact, atol=1e-3)
    assert np.abs(oracle.gelu(x) - exact).max() > 1e-6  # the approximation, not the exact one
    one = {"w_gate": [[2.0]], "w_up": [[3.0]], "w_out": [[5.0]]}
    for kind, gate in [("swiglu", oracle.silu), ("geglu", oracle.gelu)]:
        weights = {k: f64(v) for k, v in one.items()}
        out = oracle.feed_forward({"kind": kind, **weights}, f64([0.7]))
        np.testing.assert_allclose(out, gate(f64([1.4])) * 2.1 * 5, **CLOSE)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_single_token_passes_through_norms_and_feed_forward(kind):
    """One key has all the attention at any position: A = V W_O + I, O = FF(PreLN(A)) + A."""
    w, x = layer(mlp="geglu", norm="layernorm"), sequence(1)
    pre = oracle.norm(x[0], w.norm1_scale, w.norm1_bias)
    v = np.einsum("d,dge->ge", pre, w.wv)
    a = x[0] + sum(v[i // (H // G)] @ w.wo[i] for i in range(H))
    pre = oracle.norm(a, w.norm2_scale, w.norm2_bias)
    expected = a + (oracle.gelu(pre @ w.mlp["w_gate"]) * (pre @ w.mlp["w_up"])) @ w.mlp["w_out"]
    np.testing.assert_allclose(run(kind, w, x, offset=17)[0], expected, **CLOSE)
    np.testing.assert_allclose(oracle.prompt_layer(w, x)[0], expected, **CLOSE)


def test_fam_passes_through_the_feed_forward():
    """Without attention: F_0 = FF(PreLN(0)), with zero residual; then FF(PreLN(F_0)) + F_0."""
    w, x = layer(norm="layernorm"), sequence(2 * BLOCK)
    w = replace(w, wo=0 * w.wo)
    init = sequence(FAM, seed=2)
    _, _, (f0, f1) = oracle.fam_layer(w, x, fam_init=init, block=BLOCK, segments=1)
    first = oracle.feed_forward(w.mlp, w.norm2_bias)  # LayerNorm maps 0 to its bias
    second = first + oracle.feed_forward(w.mlp, oracle.norm(first, w.norm2_scale, w.norm2_bias))
    np.testing.assert_allclose(f0, [first] * FAM, **CLOSE)
    np.testing.assert_allclose(f1, [second] * FAM, **CLOSE)
    assert np.abs(second - first).max() > 0.1


# model

V = 11
HYPER = {
    "full": {},
    "swa": {"window": 5},
    "bswa": {"block": BLOCK, "segments": 1},
    "fam": {"block": BLOCK, "segments": 0, "previous": 1},
}


def make_model(kinds, with_prompt=True, tied=True):
    rng = np.random.default_rng(7)
    return {
        "embedding": rng.normal(size=(V, D)),
        "layers": [(layer(seed=10 + i), kind, HYPER[kind]) for i, kind in enumerate(kinds)],
        "final_norm": (1 + 0.3 * rng.normal(size=D), None),
        "head": None if tied else rng.normal(size=(D, V)),
        "prompt": rng.normal(size=(FAM, D)) if with_prompt else None,
    }


TOKENS = np.random.default_rng(8).integers(V, size=14)


def test_the_prompt_passes_through_every_kind_of_layer():
    m = make_model(["bswa", "fam", "full", "swa", "fam"])
    logits, fams = oracle.model(**m, tokens=TOKENS)
    assert logits.shape == (14, V)
    assert [fam is None for fam in fams] == [True, False, True, True, False]

    x, h = m["embedding"][TOKENS], m["prompt"]
    w = [weights for weights, _, _ in m["layers"]]
    x = oracle.bswa_layer(w[0], x, **HYPER["bswa"])
    h = oracle.prompt_layer(w[0], h)
    x, first, _ = oracle.fam_layer(w[1], x, fam_init=h, **HYPER["fam"])
    h = oracle.prompt_layer(w[1], h)
    x = oracle.full_layer(w[2], x)
    h = oracle.prompt_layer(w[2], h)
    x = oracle.swa_layer(w[3], x, **HYPER["swa"])
    h = oracle.prompt_layer(w[3], h)
    x, second, _ = oracle.fam_layer(w[4], x, fam_init=h, **HYPER["fam"])
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * m["final_norm"][0]
    np.testing.assert_allclose(logits, x @ m["embedding"].T, **CLOSE)
    np.testing.assert_allclose(fams[1], first, **CLOSE)
    np.testing.assert_allclose(fams[4], second, **CLOSE)


def test_the_prompt_affects_fam_layers_only():
    for kinds, matters in [(["bswa", "full"], False), (["bswa", "fam"], True)]:
        m = make_model(kinds)
        logits, _ = oracle.model(**m, tokens=TOKENS)
        other, _ = oracle.model(**{**m, "prompt": m["prompt"] + sequence(FAM)}, tokens=TOKENS)
        assert changed_rows(logits, other).all() == matters
        assert changed_rows(logits, other).any() == matters
    with pytest.raises(ValueError, match="prompt"):
        oracle.model(**make_model(["fam"], with_prompt=False), tokens=TOKENS)


def test_the_model_is_causal_untied_and_uses_the_offset():
    m = make_model(["fam", "bswa"], tied=False)
    logits, _ = oracle.model(**m, tokens=TOKENS)
    other = TOKENS.copy()
    other[6] = (other[6] + 1) % V
    changed = changed_rows(oracle.model(**m, tokens=other)[0], logits)
    assert not changed[:6].any()
    assert changed[6:].all()
    np.testing.assert_allclose(oracle.model(**m, tokens=TOKENS, offset=999)[0], logits, **CLOSE)
    tied, _ = oracle.model(**{**m, "head": None}, tokens=TOKENS)
    transposed, _ = oracle.model(**{**m, "head": m["embedding"].T}, tokens=TOKENS)
    np.testing.assert_allclose(tied, transposed, **CLOSE)
    assert changed_rows(tied, logits).all()


def test_cross_entropy_is_a_weighted_mean():
    assert oracle.cross_entropy(np.full((3, 8), 1e4), [0, 3, 7]) == pytest.approx(math.log(8))
    logits = np.log([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    logits += np.array([[3.0], [-5.0]])
    expected = (2 * -math.log(0.25) + 0.5 * -math.log(0.1)) / 2.5
    assert oracle.cross_entropy(logits, [1, 0], [2, 0.5]) == pytest.approx(expected)
    assert oracle.cross_entropy(logits, [1, 0], [1, 0]) == pytest.approx(math.log(4))
