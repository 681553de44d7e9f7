"""Sequence to sequence: every stack with cross attention, compared with its transcription."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import harness, transcription
from flax import nnx
from oracles import feedback, seq2seq, transformer

from famjax.config.resolved import resolve_model, sizes
from famjax.config.schema import (
    ArchConfig,
    Config,
    DropoutConfig,
    EncoderConfig,
    FeedbackConfig,
    LinearConfig,
    ModelConfig,
)
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.encoder_checks import check_encoder
from famjax.layers.dropout import DropoutKey
from famjax.mixers import MIXERS
from famjax.models.fold_feature_maps import fold_feature_maps
from famjax.models.remap_params import canonical_name, is_feature_map, remap_params
from famjax.models.seq2seq import Seq2Seq, make_model
from famjax.stacks import STACKS
from famjax.stacks.residual import UnstackedState
from famjax.train.flops import forward_flops

ENCODER = EncoderConfig(layers=2, features=6)
SHAPE = ModelConfig(
    vocab_size=19,
    layers=2,
    width=12,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=10,
    block_len=4,
    window=5,
    fam_len=2,
    capacity=32,
    encoder=ENCODER,
)
_FEEDBACK = replace(SHAPE, stack="feedback", block_len=1, feedback=FeedbackConfig(span=6))
_POST = ArchConfig(pre_norm=False)
_LINEAR = replace(ENCODER, cross="linear")


def _marian(positions: str, **changes: Any) -> ArchConfig:
    """Return positions at the embedding, and the further parts of Marian and BART."""
    absolute = ArchConfig(positions=positions, rotary_fraction=0.0, pre_norm=False)  # type: ignore[arg-type]
    return replace(absolute, embed_norm=True, logit_bias=True, **changes)


MODELS: dict[str, ModelConfig] = {
    "full": replace(SHAPE, mixer="full"),
    "full-linear": replace(SHAPE, mixer="full", encoder=_LINEAR),
    "full-unrolled": replace(SHAPE, mixer="full", scan_layers=False),
    "own-embedding": replace(SHAPE, mixer="full", encoder=replace(ENCODER, shared=False)),
    "swa": replace(SHAPE, mixer="swa", block_len=1),
    "bswa": replace(SHAPE, mixer="bswa"),
    "stopped": replace(SHAPE, mixer="bswa_sg"),
    "recurrent": replace(SHAPE, mixer="bswa,block_recurrent"),
    "pattern": replace(SHAPE, mixer="swa,fam"),
    "gated": replace(SHAPE, mixer="fam", fam_update="gated"),
    "delta": replace(SHAPE, mixer="delta"),
    "ngrams": replace(SHAPE, mixer="bswa", ngram_memory=2, ngram_slots=64),
    "linear": replace(
        SHAPE, mixer="linear", encoder=_LINEAR, linear=LinearConfig(features=2), norm="layernorm"
    ),
    # the random feature maps of t2r-table-2, in both places
    **{
        f"linear-{kind}": replace(
            SHAPE, mixer="linear", encoder=_LINEAR, linear=LinearConfig(kind, features=2)
        )
        for kind in ("elu", "rfa")
    },
    # Vaswani et al. (2017) as Marian computes it, and BART's embedding
    "marian": replace(
        SHAPE, mixer="full", norm="layernorm", mlp="swish", arch=_marian("sinusoidal_halves")
    ),
    "learned": replace(
        SHAPE, mixer="swa", block_len=1, arch=_marian("learned", position_offset=2, pre_norm=True)
    ),
    "linear-marian": replace(
        SHAPE,
        mixer="linear",
        encoder=_LINEAR,
        linear=LinearConfig(features=2),
        arch=_marian("sinusoidal"),
    ),
    "feedback": _FEEDBACK,
    "feedback-linear": replace(_FEEDBACK, encoder=_LINEAR),
    "feedback-post": replace(_FEEDBACK, arch=_POST, norm="layernorm"),
    # the decoder has relative positions, the encoder sinusoids
    "feedback-sinusoids": replace(
        _FEEDBACK, arch=replace(_POST, positions="sinusoidal_halves", rotary_fraction=0.0)
    ),
    "feedback-top": replace(_FEEDBACK, feedback=FeedbackConfig(span=6, composition="top")),
    **{
        f"feedback-{name}": replace(_FEEDBACK, feedback=FeedbackConfig(6, composition=name))
        for name in ("average", "layer", "same_and_lower", "previous")
    },
    "transformer": replace(_FEEDBACK, stack="transformer"),
    "transformer-post": replace(
        _FEEDBACK, stack="transformer", arch=_POST, feedback=FeedbackConfig(6, shared_kv=False)
    ),
}
# those that have a transcription of their own here: the others are compared with themselves
TRANSCRIBED = tuple(
    name
    for name in MODELS
    if name not in ("bswa", "stopped", "recurrent", "pattern", "gated", "delta", "ngrams")
)


def test_every_mixer_stack_and_composition_is_tested_or_refused() -> None:
    def refuses(**changes: Any) -> bool:
        errors = check_encoder(Config(model=replace(SHAPE, **changes)))
        return any("no attention to an encoder" in e or "feed-forward itself" in e for e in errors)

    decoders = MODELS.values()
    mixers = {name for each in decoders for name in each.mixer.split(",")}
    for mixer in MIXERS:
        assert (mixer in mixers) != refuses(mixer=mixer), mixer
    stacks = {each.stack for each in decoders}
    for stack in STACKS:
        assert (stack in stacks) != refuses(stack=stack), stack
    compositions = {each.feedback.composition for each in decoders if each.stack == "feedback"}
    assert compositions == set(get_args(get_type_hints(FeedbackConfig)["composition"]))


@pytest.mark.parametrize("name", ["full-linear", "pattern", "delta", "feedback", "transformer"])
def test_the_decoders_state_is_that_without_an_encoder(name: str) -> None:
    def shapes(config: ModelConfig) -> Any:
        return jax.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0)).init_state(2))

    config = MODELS[name]
    alone = replace(config, encoder=EncoderConfig())
    with_encoder, without = jax.tree.leaves(shapes(config)), jax.tree.leaves(shapes(alone))
    assert [(a.shape, a.dtype) for a in with_encoder] == [(a.shape, a.dtype) for a in without]


# two pairs in one row: tokens of sources and of targets, whole blocks apart
SOURCES = [np.array([3, 14, 15, 9, 2]), np.array([6, 5, 3])]
TARGETS = [np.array([1, 7, 8, 2, 8, 1]), np.array([1, 4, 0, 4, 5])]


@functools.cache
def runner(name: str) -> tuple[Any, Any]:
    """Return graph and float64 parameters of a model; attention is sharp, norms are not trivial."""
    with jax.enable_x64(True):
        graph, params = nnx.split(make_model(MODELS[name], rngs=nnx.Rngs(0)))
        given = harness.perturb_params(params)
        return graph, jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), params, given)


def model(name: str, params: Any = None) -> Seq2Seq:
    graph, own = runner(name)
    merged = nnx.merge(graph, own if params is None else params)
    assert isinstance(merged, Seq2Seq)
    return merged


def packed_row(block: int) -> dict[str, np.ndarray]:
    """Return a row with both pairs, and padding after each."""
    row: dict[str, Any] = {name: [] for name in ("tokens", "segment", "reset", "valid")}
    for number, target in enumerate(TARGETS, start=1):
        size = -(-len(target) // block) * block
        row["tokens"] += [*target, *[0] * (size - len(target))]
        row["segment"] += [number] * len(target) + [0] * (size - len(target))
        row["reset"] += [True] + [False] * (size - 1)
        row["valid"] += [True] * len(target) + [False] * (size - len(target))
    row["source"] = [*SOURCES[0], *SOURCES[1], 0]
    row["source_segment"] = [1] * len(SOURCES[0]) + [2] * len(SOURCES[1]) + [0]
    return {key: np.array(values)[None] for key, values in row.items()}


# Layers are in a scan, which JAX compiles anew in each call that is not compiled as a whole.


@functools.cache
def program(method: str, graph: Any) -> Any:
    """Return a compiled method of a model, which takes the model's parameters before its own."""
    return jax.jit(lambda params, *args: getattr(nnx.merge(graph, params), method)(*args))


def read_source(m: Seq2Seq, *args: Any) -> Any:
    graph, params = nnx.split(m)
    return program("read_source", graph)(params, *args)


def step(m: Seq2Seq, *args: Any) -> Any:
    graph, params = nnx.split(m)
    return program("step", graph)(params, *args)


def read_packed(name: str, params: Any = None) -> Any:
    """Return the logits of a packed row [t v]."""
    m = model(name, params)
    return read_row(m, packed_row(m.block_len))[0]


@functools.cache
def packed(name: str) -> np.ndarray:
    """Return the logits of a packed row [t v], with the model's own parameters."""
    return np.asarray(jax.jit(functools.partial(read_packed, name))(runner(name)[1]))


def starts(name: str) -> list[int]:
    block = model(name).block_len
    return [0, -(-len(TARGETS[0]) // block) * block]


@functools.cache
def read_alone(name: str, pair: int, together: bool = False) -> np.ndarray:
    """Return the logits [t v] of one pair, token by token; in a batch of both pairs if together."""
    m = model(name)
    both = [0, 1] if together else [pair]
    longest = max(len(SOURCES[i]) for i in both)
    tokens = np.stack([np.pad(SOURCES[i], (0, longest - len(SOURCES[i]))) for i in both])
    segment = np.stack([np.arange(longest) < len(SOURCES[i]) for i in both]).astype(int)
    ctx = Context(source=read_source(m, tokens, segment))
    state, out = m.init_state(len(both)), []
    for t in range(len(TARGETS[pair])):
        token = np.stack([TARGETS[i][min(t, len(TARGETS[i]) - 1)] for i in both])[:, None]
        logits, state = step(m, token, state, ctx)
        out.append(np.asarray(logits[both.index(pair), 0]))
    return np.stack(out)


def transcribe(name: str, pair: int) -> np.ndarray:
    """Return the logits [t v] of the transcription in NumPy."""
    c, params = MODELS[name], jax.tree.map(np.asarray, nnx.to_pure_dict(runner(name)[1]))
    pre_norm = c.arch.pre_norm
    layers = [_layer(c, params, i) for i in range(c.layers)]
    table = params["embedding"]
    own = params.get("source_embedding", table)
    final = None if not pre_norm else (params["encoder"]["norm"]["scale"], _bias(params["encoder"]))
    stacked = params["encoder"]["layers"][0]
    encoder = [
        transcription._weights(w["qkv"], w["mlp"], c.mlp)
        for w in (jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(c.encoder.layers))
    ]
    rotary = c.arch.rotary_fraction > 0
    x = _embed(c, params["encoder"], own, SOURCES[pair])
    source = seq2seq.encoder(encoder, final, x, rotary)
    decoder = c if c.stack == "residual" else replace(c, arch=replace(c.arch, positions="none"))
    x = _embed(decoder, params["stack"], table, TARGETS[pair])
    if c.stack == "residual":
        window = c.window if c.mixer == "swa" else 10**9
        y = seq2seq.decoder(layers, pre_norm, x, source, window, rotary)
    else:
        y = seq2seq.feedback_decoder(_feedback_stack(c, params, layers), layers, x, source)
    if pre_norm:
        y = np.stack([transformer.norm(a, params["norm"]["scale"], _bias(params)) for a in y])
    return y @ table.T + params.get("logit_bias", 0)


def _embed(c: ModelConfig, own: Any, table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return embeddings [t d] as encoder or decoder, with the parameters `own`, takes them."""
    x = table[tokens] * c.width**0.5
    if c.arch.positions == "learned":
        x = x + own["positions"]["table"][c.arch.position_offset :][: len(x)]
    elif c.arch.positions != "none":
        x = x + seq2seq.sinusoids(len(x), c.width, c.arch.positions == "sinusoidal_halves")
    if not c.arch.embed_norm:
        return x
    scale, bias = own["embed_norm"]["scale"], own["embed_norm"].get("bias")
    return np.stack([transformer.norm(row, scale, bias) for row in x])


def _bias(params: Any) -> Any:
    return params["norm"].get("bias")


def _layer(c: ModelConfig, params: Any, i: int) -> seq2seq.Layer:
    w = jax.tree.map(lambda a: a[i], params["stack"]["layers"][0])
    qkv = w["mixer"]["window"]["qkv"] if "window" in w.get("mixer", {}) else None
    qkv = qkv or (w["mixer"]["qkv"] if "mixer" in w else w["qkv"])
    phi = causal_phi = None
    if c.encoder.cross == "linear":
        features = replace(c.linear, features=c.encoder.features)
        phi = transcription._phi(replace(c, linear=features), w["cross"].get("map"))
    if c.mixer == "linear" and c.stack == "residual":
        causal_phi = transcription._phi(c, w["mixer"].get("map"))
    weights = transcription._weights
    return seq2seq.Layer(
        weights(qkv, w["mlp"], c.mlp),
        weights(w["cross"]["qkv"], w["mlp"], c.mlp),
        phi,
        causal_phi,
    )


def _feedback_stack(c: ModelConfig, params: Any, layers: Any) -> feedback.Stack:
    own = params["stack"]
    return feedback.Stack(
        layers=[layer.own for layer in layers],
        tau=c.feedback.span,
        composition="previous" if c.stack == "transformer" else c.feedback.composition,
        keys=transcription._keys(own["keys"]) if "keys" in own else None,
        logits=own.get("mix"),
        distances=own["distances"].T[::-1],
        pre_norm=c.arch.pre_norm,
    )


def some(*quick: str, slow: str = "", long: str = "") -> Any:
    """Parametrize a test with models, of which quick runs leave out those that add least."""
    marked = [pytest.param(name, marks=pytest.mark.long) for name in long.split()]
    marked += [pytest.param(name, marks=pytest.mark.slow) for name in slow.split()]
    return pytest.mark.parametrize("name", [*quick, *marked])


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


# variants of the others
OTHERS = ("full-unrolled", "own-embedding", "feedback-post", "feedback-top", "transformer-post")
OTHERS += ("linear-elu", "linear-rfa", "linear-marian", "feedback-sinusoids")
OTHERS += ("feedback-average", "feedback-layer", "feedback-same_and_lower", "feedback-previous")


@some(*(name for name in TRANSCRIBED if name not in OTHERS), long=" ".join(OTHERS))
def test_models_equal_their_transcriptions(name):
    for pair in range(2):
        np.testing.assert_allclose(read_alone(name, pair), transcribe(name, pair), atol=1e-10)


# those that are slow here have a transcription, or the mixer of others
ALIKE = "full-unrolled own-embedding gated feedback-post feedback-sinusoids feedback-top "
ALIKE += (
    "transformer linear-elu linear-rfa feedback-average feedback-layer feedback-same_and_lower "
)
ALIKE += "feedback-previous"
LONG = "bswa stopped recurrent pattern delta linear-marian ngrams"


@some(*(n for n in MODELS if n not in f"{ALIKE} {LONG}".split()), slow=ALIKE, long=LONG)
def test_pairs_in_one_row_equal_each_pair_alone(name):
    for pair, at in enumerate(starts(name)):
        alone = read_alone(name, pair)
        np.testing.assert_allclose(packed(name)[at : at + len(alone)], alone, atol=1e-10)


@some("full", "linear", "feedback", long="pattern")
def test_pairs_of_a_batch_equal_each_pair_alone(name):
    for pair in range(2):
        together = read_alone(name, pair, together=True)
        np.testing.assert_allclose(together, read_alone(name, pair), atol=1e-10)


@some("full", slow="transformer-post", long="full-linear feedback gated")
def test_gradients_equal_finite_differences(name):
    """Of all parameters along a random direction; encoder and cross attention are among them."""
    params = runner(name)[1]
    rng = np.random.default_rng(0)
    probe = rng.normal(size=(len(packed_row(model(name).block_len)["tokens"][0]), 19))
    weights = packed_row(model(name).block_len)["valid"][0][:, None] * probe

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return (read_packed(name, params) * weights).sum()

    _, grads = loss(params)
    for part in ("encoder", "cross", "stack"):
        direction = jax.tree_util.tree_map_with_path(
            lambda path, a, part=part: (
                rng.normal(size=a.shape) * (f"'{part}'" in jax.tree_util.keystr(path))
            ),
            params,
        )
        along = sum(
            float((g * d).sum())
            for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
        )
        moved = [
            loss(jax.tree.map(lambda a, d, by=by: a + by * d, params, direction))[0]
            for by in (1e-6, -1e-6)
        ]
        assert abs(along) > 1e-3
        np.testing.assert_allclose(along, float(moved[0] - moved[1]) / 2e-6, rtol=2e-5)


@some("full", "linear", "feedback", slow="pattern", long="ngrams")
def test_beams_share_a_source(name):
    """Rows of the decoder that follow one row of the source read the same of it."""
    m = model(name)
    pairs = np.repeat([0, 1], 3)
    tokens = np.stack([np.pad(s, (0, 5 - len(s))) for s in SOURCES])
    segment = np.stack([np.arange(5) < len(s) for s in SOURCES]).astype(int)
    few = Context(source=read_source(m, tokens, segment))
    many = Context(source=read_source(m, tokens[pairs], segment[pairs]))
    state = m.init_state(6)
    for token in ([3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]):
        steps = [step(m, np.array(token)[:, None], state, ctx) for ctx in (few, many)]
        np.testing.assert_allclose(steps[0][0], steps[1][0], atol=1e-10)
        state = steps[0][1]


@some("full", "linear", long="pattern ngrams")
def test_an_unstacked_state_gives_the_same(name):
    m = model(name)
    ctx = Context(source=read_source(m, SOURCES[0][None], np.ones((1, 5), int)))
    stacked, plain = m.init_state(1), m.stack.unstack(m.init_state(1))
    assert isinstance(plain, UnstackedState)
    for token in TARGETS[0]:
        given = np.array([[token]])
        logits, stacked = step(m, given, stacked, ctx)
        others, plain = step(m, given, plain, ctx)
        np.testing.assert_allclose(logits, others, atol=1e-12)


def test_linear_cross_attention_keeps_one_matrix_a_head():
    m = model("linear")
    longer = np.tile(SOURCES[0], 20)[None]
    shapes = [
        jax.tree.map(jnp.shape, jax.eval_shape(m.read_source, s, np.ones_like(s)).kv)
        for s in (SOURCES[0][None], longer)
    ]
    assert shapes[0] == shapes[1]
    (kv,) = shapes[0]
    assert kv.s == (2, 1, 2, 6, 4)  # layers b g k e


@pytest.mark.parametrize("name", ["full", "full-linear"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_source_of_padding_reads_the_same_whatever_its_length(name, packed):
    _, params = runner(name)
    # features that do not reach the least denominator of linear attention
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: a * 1e-3 if "map" in jax.tree_util.keystr(path) else a, params
    )
    m = model(name, params)

    def logits(length: int) -> np.ndarray:
        empty, targets = np.zeros((1, length), int), np.array([[1, 4, 5, 2]])
        source = read_source(m, empty, empty, np.ones((1, 4), int) if packed else None)
        graph, own = nnx.split(m)
        args = (targets, m.init_state(1), Context(source=source))
        return np.asarray(program("__call__", graph)(own, *args)[0])

    short = logits(3)
    assert np.isfinite(short).all()
    np.testing.assert_allclose(short, logits(9), atol=1e-12)


def test_a_target_depends_on_its_own_source_alone():
    def logits(other: int) -> np.ndarray:
        m = model("full")
        row = packed_row(m.block_len)
        row["source"][0, 6] = other  # of the second source
        return np.asarray(read_row_of(*nnx.split(m), row)[0])

    a, b = logits(5), logits(6)
    first = slice(0, len(TARGETS[0]))
    second = slice(starts("full")[1], None)
    np.testing.assert_array_equal(a[first], b[first])
    assert np.abs(a[second] - b[second]).max() > 1e-3


_FEW = {"encoder": replace(_LINEAR, features=2)}
FOLDED = {
    "both": replace(MODELS["linear"], **_FEW, linear=LinearConfig(features=2, rope=False)),
    "cross alone, for causal ones are rotated": replace(MODELS["linear"], **_FEW),
    "cross alone": replace(MODELS["full"], **_FEW, linear=LinearConfig(features=2)),
    "of feedback": replace(MODELS["feedback"], **_FEW, linear=LinearConfig(features=2)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded_maps_give_the_same(name):
    c = FOLDED[name]
    m = make_model(c, rngs=nnx.Rngs(0))
    folded = fold_feature_maps(m, c)
    maps = {
        "causal" if "mixer" in path else "cross": ("map" in path)
        for path, _ in nnx.to_flat_state(nnx.state(folded.stack, nnx.Param))
        if "map" in path
    }
    assert set(maps) == ({"causal"} if "rotated" in name else set())
    state, token = m.init_state(1), np.array([[3]])
    logits = [
        step(
            one,
            token,
            state,
            Context(source=read_source(one, SOURCES[0][None], np.ones((1, 5), int))),
        )
        for one in (m, folded)
    ]
    np.testing.assert_allclose(logits[0][0], logits[1][0], atol=1e-10)


def test_a_trained_model_gets_linear_attention_in_both_places():
    """T2R 3.2.2: everything but the maps is the teacher's; maps of trained ones are kept."""
    teacher = runner("full")[1]
    student = replace(SHAPE, mixer="linear", encoder=_LINEAR, linear=LinearConfig(features=2))
    params = remap_params(teacher, MODELS["full"], student)
    of_teacher = {
        canonical_name(path): a for path, a in jax.tree_util.tree_leaves_with_path(teacher)
    }
    new = []
    for path, a in jax.tree_util.tree_leaves_with_path(params):
        name = canonical_name(path)
        if is_feature_map(name[0]):
            new.append(name[0])
        else:
            np.testing.assert_array_equal(a, of_teacher[name])
    assert sorted(new) == [
        f"layer.{where}.map.{part}" for where in ("cross", "mixer") for part in ("bias", "kernel")
    ]
    again = remap_params(params, student, replace(student, capacity=64))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    for changed, said in (
        (
            {"encoder": replace(_LINEAR, features=8)},
            r"model\.encoder\.features=8: the given feature",
        ),
        (
            {"mixer": "full", "linear": LinearConfig(map="cos")},
            r"model\.linear\.map=cos: the given",
        ),
    ):
        with pytest.raises(UserError, match=said):
            remap_params(params, student, replace(student, **changed))
    with pytest.raises(UserError, match=r"model\.encoder\.layers=3: the given weights have 2"):
        remap_params(teacher, MODELS["full"], replace(student, encoder=replace(_LINEAR, layers=3)))


@pytest.mark.parametrize("name", ["full", "linear", "feedback"])
def test_flops_are_those_of_the_products_with_weights(name):
    """A source's token passes the encoder, and both sides their part of cross attention."""
    c = resolve_model(MODELS[name])
    without = replace(c, encoder=EncoderConfig())
    d, h, g, e, hidden = sizes(c)
    attention = d * (2 * h * e + 2 * g * e)
    expected = c.encoder.layers * 2 * (attention + 3 * d * hidden) + c.layers * 2 * attention
    if c.encoder.cross == "linear":
        # W of queries and keys, S, and phi(q) S and phi(q) z
        expected += c.layers * 2 * c.encoder.features * (e * (2 * h + 2 * g) + h)
    assert forward_flops(c) - forward_flops(without) == expected


@pytest.mark.parametrize("name", ["full", "feedback"])
def test_a_source_is_asked_for(name):
    m = model(name)
    with pytest.raises(UserError, match=r"set Context\.source"):
        m.step(np.array([[3]]), m.init_state(1))


@pytest.mark.long
def test_an_encoder_begins_as_deep_as_it_is():
    """Outputs of sublayers begin smaller in a deep stack: the encoder's depth is its own."""
    deep = replace(MODELS["full"], encoder=replace(ENCODER, layers=8), layers=1, width=64)
    model = make_model(resolve_model(deep), rngs=nnx.Rngs(0))

    def size(stack: Any) -> float:
        return float(jnp.std(stack.layers[0].mlp.down.kernel[...]))

    assert size(model.encoder) / size(model.stack) == pytest.approx((1 / 8) ** 0.5, rel=0.1)


# what every stack has, with attention to an encoder


def variant(name: str, **changes: Any) -> tuple[Any, Any]:
    """Return graph and parameters of a model with the weights of MODELS[name]."""
    graph, params, _ = nnx.split(
        make_model(replace(MODELS[name], **changes), rngs=nnx.Rngs(0)), nnx.Param, ...
    )
    return graph, jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), params, runner(name)[1])


def read_row(m: Any, row: Any, state: Any = None) -> Any:
    """Return logits [t v] and the state after a packed row."""
    source = m.read_source(row["source"], row["source_segment"], row["segment"])
    ctx = Context(jnp.asarray(row["reset"]), jnp.asarray(row["valid"]), source=source)
    logits, state = m(row["tokens"], m.init_state(1) if state is None else state, ctx)
    return logits[0], state


@functools.partial(jax.jit, static_argnums=0)
def _read_row(graph: Any, params: Any, row: Any, state: Any) -> Any:
    return read_row(nnx.merge(graph, params), row, state=state)


def read_row_of(
    graph: Any, params: Any, row: dict[str, np.ndarray], at: slice = slice(None), state: Any = None
) -> Any:
    """Like `read_row`, compiled."""
    decoded = ("tokens", "segment", "reset", "valid")
    part = {name: a[:, at] if name in decoded else a for name, a in row.items()}
    return _read_row(graph, params, part, state)


@some("full", "linear", "feedback", slow="gated stopped", long="recurrent pattern delta ngrams")
def test_a_second_call_goes_on_with_the_state_and_the_source(name):
    m = model(name)
    row, block = packed_row(m.block_len), max(m.block_len, 3)
    own = nnx.split(m)
    whole, _ = read_row_of(*own, row)
    first, state = read_row_of(*own, row, slice(block))
    second, _ = read_row_of(*own, row, slice(block, None), state)
    seen = row["valid"][0]
    np.testing.assert_allclose(np.concatenate([first, second])[seen], whole[seen], atol=1e-10)


@some("full", slow="full-linear gated", long="linear feedback")
def test_bfloat16_stays_close(name):
    """Its weights are rounded to 8 bits, with which the errors of a few layers are about 1%."""
    row, wide = packed_row(model(name).block_len), packed(name)
    with jax.enable_x64(False):
        narrow = variant(name, dtype="bfloat16")
        sources = (row["source"], row["source_segment"], row["segment"])
        source = jax.eval_shape(nnx.merge(*narrow).read_source, *sources)
        assert {a.dtype for a in jax.tree.leaves(source.kv)} == {jnp.dtype(jnp.bfloat16)}
        logits = np.asarray(read_row_of(*narrow, row)[0], float)
        if MODELS[name].encoder.cross == "linear":
            # the sums of one source, for decoding, have the precision of float32
            sums = jax.eval_shape(nnx.merge(*narrow).read_source, row["source"], row["source"])
            assert {a.dtype for a in jax.tree.leaves(sums.kv)} == {jnp.dtype(jnp.float32)}
    seen = row["valid"][0]
    apart = np.abs(logits - wide)[seen]
    assert 0 < apart.mean() < 0.02 * wide[seen].std()


@functools.cache
def gradients(name: str, remat: str) -> Any:
    row = packed_row(MODELS[name].block_len)
    probe = (
        np.random.default_rng(0).normal(size=(row["tokens"].size, 19)) * row["valid"][0][:, None]
    )
    graph, params = variant(name, remat=remat)
    return jax.jit(
        jax.grad(lambda params: (read_row(nnx.merge(graph, params), row)[0] * probe).sum())
    )(params)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("full-linear", "block"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("full-linear", "layer"), ("gated", "attention"))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("full-linear", "attention"), ("gated", "layer"), ("gated", "block"))
        ),
    ],
)
def test_gradients_of_recomputed_layers_are_the_same(name, remat):
    kept, recomputed = gradients(name, "none"), gradients(name, remat)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@functools.cache
def in_training(name: str, **rates: float) -> tuple[Any, Any, Any]:
    """Return a compiled function of keys, other state and a row, its keys and its other state."""
    c = replace(MODELS[name], dropout=DropoutConfig(**rates))
    graph, _, keys, rest = nnx.split(make_model(c, rngs=nnx.Rngs(0)), nnx.Param, DropoutKey, ...)

    params = runner(name)[1]

    def read(keys: Any, rest: Any, row: Any) -> Any:
        return read_row(nnx.merge(graph, params, keys, rest), row)[0]

    return jax.jit(read), keys, rest


def dropping(name: str, key: int, **rates: float) -> np.ndarray:
    """Return the logits [t v] of a packed row in training."""
    read, keys, rest = in_training(name, **rates)
    keys = jax.tree.map(lambda _: jnp.array([0, key], jnp.uint32), keys)
    row = packed_row(MODELS[name].block_len)
    return np.asarray(read(keys, rest, row))[row["valid"][0]]


@some("full", "feedback", slow="full-linear gated")
def test_attention_to_an_encoder_is_dropped_by_the_key(name):
    first, again, other = (dropping(name, key, residual=0.5) for key in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


@some("full-linear", slow="full gated", long="feedback")
def test_a_layer_that_is_dropped_reads_no_source(name, monkeypatch):
    """LayerDrop leaves out a layer with its attention to the encoder."""
    dropped = dropping(name, 1, layer=1.0)
    monkeypatch.setitem(globals(), "SOURCES", [np.array([9, 9, 4, 1, 2]), np.array([2, 2, 3])])
    np.testing.assert_array_equal(dropping(name, 1, layer=1.0), dropped)
    assert np.abs(dropping(name, 1, layer=1e-9) - dropped).max() > 1e-3
