"""Every mixer and stack in its variants, compiled once: NumPy in, NumPy out."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from xla_flags import known_flags

from famjax.config.derived import mixer_pattern
from famjax.config.schema import ArchConfig, FeedbackConfig, LinearConfig, ModelConfig
from famjax.core.types import Context
from famjax.models.language_model import LanguageModel

from . import transcription

# quick compilation takes an eighth of the time; the programs are tiny
FAST = known_flags(
    {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
)
jit = functools.partial(jax.jit, compiler_options=FAST)

B, W, LENGTH, WIDTH, VOCAB = 3, 4, 24, 16, 11  # lanes, block, stream, width, vocabulary

BASE = ModelConfig(
    vocab_size=VOCAB,
    layers=2,
    width=WIDTH,
    heads=4,
    kv_heads=2,
    mlp_width=24,
    block_len=W,
    window=W,
    capacity=LENGTH,
    fam_len=3,
)

TOKENS = np.random.default_rng(5).integers(VOCAB, size=(B, LENGTH))

OWN, ROTARY, MEMORY = {"shared_kv": False}, {"positions": "rotary"}, {"cache": "memory"}
ADAPTIVE = {"adaptive_span": True, "span_ramp": 2, "span_start": 0.4}
POST = ArchConfig(pre_norm=False)


def _feedback(
    composition: str, *changes: Any, stack: str = "feedback", **model: Any
) -> ModelConfig:
    """Return a stack with a span of six tokens; most calls start and end within the ring."""
    fields: dict[str, Any] = functools.reduce(operator.or_, changes, {"composition": composition})
    feedback = FeedbackConfig(span=6, **fields)
    return replace(BASE, stack=stack, block_len=1, mixer="full", feedback=feedback, **model)


def _linear(map: str, mixer: str = "linear", rope: bool = False, **model: Any) -> ModelConfig:
    """Return a config whose chunks end within blocks and whose calls end within chunks."""
    linear: Any = {"map": map, "features": 6, "chunk": 5, "rope": rope}
    return replace(BASE, mixer=mixer, linear=LinearConfig(**linear), **model)


# attention heads (multi-head, grouped, multi-query), norms, feed-forwards and tied embeddings are
# distributed over the variants, so that each is combined with several
CASES: dict[str, ModelConfig] = {
    "full": replace(BASE, mixer="full", norm="layernorm"),
    "swa-2": replace(BASE, mixer="swa", window=2, kv_heads=1, mlp="gelu", norm="layernorm"),
    "swa-6": replace(BASE, mixer="swa", window=6, tied=False),  # longer than a block
    "swa-block": replace(BASE, mixer="swa", kv_heads=4, mlp="geglu", tied=False),
    "bswa-0": replace(BASE, mixer="bswa", memory_segments=0, kv_heads=4, mlp="gelu"),
    "bswa-1": replace(BASE, mixer="bswa", memory_segments=1, norm="layernorm", tied=False),
    "bswa-3": replace(BASE, mixer="bswa", memory_segments=3, kv_heads=1, mlp="geglu"),
    "bswa_sg-2": replace(BASE, mixer="bswa_sg", memory_segments=2, kv_heads=4),
    "fam-0-1": replace(BASE, mixer="fam", memory_segments=0, kv_heads=4, norm="layernorm"),
    "fam-2-1": replace(BASE, mixer="fam", memory_segments=2, kv_heads=1, mlp="gelu"),
    "fam-1-3": replace(BASE, mixer="fam", memory_segments=1, fam_previous=3, mlp="geglu"),
    # initial gates from closed to open
    "fam-gated": replace(
        BASE,
        mixer="fam",
        memory_segments=1,
        fam_update="gated",
        kv_heads=4,
        fam_max_timescale=90.0,
        fam_gate_threshold=0.005,
    ),
    "fam-static": replace(
        BASE,
        mixer="fam",
        memory_segments=1,
        fam_update="static",
        fam_previous=2,
        mlp="geglu",
        norm="layernorm",
    ),
    "fm-1": replace(BASE, mixer="fm", memory_segments=1, kv_heads=4, norm="layernorm"),
    "fm-2": replace(BASE, mixer="fm", memory_segments=2, kv_heads=1, mlp="gelu", tied=False),
    "fm-4": replace(BASE, mixer="fm", memory_segments=4, mlp="geglu", norm="layernorm"),
    "fam-between": replace(BASE, mixer="fam", memory_segments=0, fam_position="between"),
    "fam-zero": replace(
        BASE,
        mixer="fam",
        memory_segments=1,
        fam_previous=2,
        fam_init="prefix",
        fam_position="zero",
        kv_heads=4,
        norm="layernorm",
    ),
    "bswa-smeared": replace(BASE, mixer="bswa", memory_segments=2, smeared_keys=True),
    "fam-smeared": replace(
        BASE, mixer="fam", memory_segments=0, smeared_keys=True, kv_heads=4, norm="layernorm"
    ),
    "delta": replace(
        BASE, mixer="delta", memory_segments=0, kv_heads=4, delta_order=3, norm="layernorm"
    ),
    "delta-smeared": replace(
        BASE,
        mixer="delta",
        memory_segments=1,
        delta_heads=1,
        smeared_keys=True,
        mlp="gelu",
        tied=False,
    ),
    "block_recurrent": replace(
        BASE, mixer="block_recurrent", memory_segments=1, mlp="gelu", norm="layernorm"
    ),
    "block_recurrent-lstm": replace(
        BASE, mixer="bswa,block_recurrent", memory_segments=0, recurrent_gate="lstm", kv_heads=1
    ),
    "bswa-conv": replace(BASE, mixer="bswa", short_conv=4),
    # longer than a block, and with other states beside it
    "fam-conv": replace(
        BASE,
        mixer="fam",
        memory_segments=0,
        short_conv=6,
        ngram_memory=2,
        ngram_slots=64,
        norm="layernorm",
        tied=False,
    ),
    "bswa-ngrams": replace(BASE, mixer="bswa", ngram_memory=5, ngram_slots=512),
    # with collisions, and other states beside it
    "fam-ngrams": replace(
        BASE,
        mixer="fam",
        memory_segments=0,
        ngram_memory=3,
        ngram_slots=7,
        norm="layernorm",
        tied=False,
    ),
    "bswa,fam": replace(BASE, mixer="bswa,fam", layers=4, norm="layernorm", tied=False),
    "linear": _linear("relu", rope=True),
    "linear-relu": _linear("relu", kv_heads=4),
    "linear-elu": _linear("elu", kv_heads=4, norm="layernorm"),
    "linear-rfa": _linear("rfa", kv_heads=1, mlp="gelu"),
    "linear-performer": _linear("performer", mlp="geglu", tied=False),
    "linear-cos": _linear("cos", rope=True, kv_heads=1),
    "linear-tanh": _linear("tanh", tied=False),
    "fam,linear": _linear("learned_elu", "fam,linear", rope=True),
    "feedback-all": _feedback("all", mlp="relu", norm="layernorm", kv_heads=4),
    "feedback-average": _feedback(
        "average", OWN, ROTARY, MEMORY, kv_heads=1, norm="layernorm", arch=POST
    ),
    "feedback-top": _feedback("top", ADAPTIVE, mlp="geglu"),
    "feedback-layer": _feedback("layer", ROTARY, {"layer": 1}, mlp="gelu", arch=POST),
    "feedback-same_and_lower": _feedback("same_and_lower", MEMORY, ADAPTIVE, tied=False),
    "feedback-previous": _feedback("previous", OWN, ROTARY, kv_heads=4, norm="layernorm"),
    "transformer-own": _feedback("previous", OWN, MEMORY, stack="transformer", mlp="relu"),
    "transformer-shared": _feedback(
        "previous", ROTARY, ADAPTIVE, stack="transformer", kv_heads=1, norm="layernorm"
    ),
    "lstm": replace(BASE, stack="lstm", block_len=1, mixer="full", tied=False),
    "rmt": replace(BASE, stack="rmt", mlp="gelu", norm="layernorm", tied=False),
    # longer than a stream, as some tests read more
    "autocompressor": replace(BASE, stack="autocompressor", kv_heads=1, capacity=2 * LENGTH),
}
# one case of each mixer and stack, for tests that gain little from all variants
KINDS = ["full", "swa-2", "bswa-1", "bswa_sg-2", "fam-1-3", "fam-gated", "fam-smeared"]
KINDS += ["fam-static", "fam-zero", "fm-2", "delta-smeared", "block_recurrent"]
KINDS += ["bswa,fam", "bswa-conv", "bswa-ngrams"]
KINDS += ["linear", "feedback-all", "feedback-same_and_lower", "transformer-shared", "lstm"]
KINDS += ["rmt", "autocompressor"]

# further variants of a mixer or stack in KINDS: long or slow in tests that do not depend on what is
# theirs
FURTHER = ("fam-gated", "fam-smeared", "fam-static", "fam-zero", "bswa,fam")
FURTHER += ("feedback-same_and_lower",)

# options of pretrained families; Hugging Face's code is their oracle (tests/convert)
_FAMILIES = ArchConfig(
    norm_eps=1e-3,
    norm_plus_one=True,
    post_norm=True,
    qk_norm=True,
    query_scale=7,
    attention_cap=1.5,
    logit_cap=2.0,
    embed_scale=2,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    rotary_fraction=0.5,
    local_rope_base=100.0,
    rope_scaling="llama3",
    rope_factor=4,
    rope_length=64,
)
# learned positions, whose table wraps around within the stream
_OTHERS = ArchConfig(parallel=True, rotary_fraction=0.0, positions="learned")
FAMILIES = {
    f"{case}, {name}": replace(CASES[case], arch=arch, capacity=LENGTH if case == "full" else 10)
    for case in ("full", "swa-2", "bswa-3", "fam-1-3")
    for name, arch in (("families", _FAMILIES), ("others", _OTHERS))
}
FAMILIES |= {
    f"{case}, {name}": replace(CASES[case], arch=arch)
    for case, name, arch in (
        ("linear", "families", _FAMILIES),
        ("feedback-previous", "families", _FAMILIES),
        ("feedback-all", "others", replace(_OTHERS, positions="none")),
        ("transformer-shared", "families", _FAMILIES),
    )
}


def every(*cases: str, slow: Sequence[str] = (), long: Sequence[str] = FURTHER) -> Any:
    """Parametrize a test with cases: in CI only KINDS and the options of families.

    The other variants, and those in `slow`, are only compared with their transcriptions there.
    Quick runs leave out those in `long` too.
    """
    others = [case for case in cases if case not in {*KINDS, *FAMILIES}]
    return marked((*cases, *slow), (*others, *slow), long)


def kinds(
    slow: Sequence[str] = FURTHER,
    without: Sequence[str] = (),
    also: Sequence[str] = (),
    long: Sequence[str] = (),
) -> Any:
    """Parametrize a test with KINDS.

    CI leaves out those in `slow`, and quick runs those in `long` too.
    """
    return marked([*(case for case in KINDS if case not in without), *also], slow, long)


def marked(cases: Sequence[str], slow: Sequence[str], long: Sequence[str]) -> Any:
    """Parametrize a test with cases, some of which are slow or long."""

    def marks(case: str) -> Any:
        return pytest.mark.slow if case in slow else pytest.mark.long if case in long else ()

    given = [pytest.param(case, marks=marks(case)) for case in cases]
    return pytest.mark.parametrize("case", given)


def but(*quick: str) -> list[str]:
    """Return KINDS without those given, which quick runs have."""
    return [case for case in KINDS if case not in quick]


class Runner:
    """A model and its compiled functions.

    Args:
      x64: parameters and computation in float64.
      params: of another runner; None initializes them.
    """

    def __init__(self, config: ModelConfig, x64: bool = True, params: Any = None):
        self.config, self.x64 = config, x64
        with jax.enable_x64(x64):

            def make() -> LanguageModel:
                return LanguageModel(config, rngs=nnx.Rngs(0))

            # if params are given, only the dtypes of initial ones are needed
            model = make() if params is None else nnx.eval_shape(make)
            self.block_len = model.block_len
            self.graph, own = nnx.split(model)
            given = perturb_params(own) if params is None else params
            self.params = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), own, given)

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixers of a residual stack; other stacks have none."""
        return mixer_pattern(self.config)

    def model(self, params: Any) -> LanguageModel:
        return nnx.merge(self.graph, params)

    def run(self, f: Any, *args: Any) -> Any:
        with jax.enable_x64(self.x64):
            return jax.tree.map(np.asarray, f(self.params, *args))

    # values

    @functools.cached_property
    def fresh(self) -> Any:
        """The initial state of B lanes."""
        return self.run(jit(lambda params: self.model(params).init_state(B)))

    @functools.cached_property
    def _tokens(self):
        return jit(lambda p, *args: self.model(p)(*args))

    @functools.cached_property
    def _call(self):
        def f(params, x, state, ctx):
            model = self.model(params)
            x, state = model.stack(x, state, model.with_tokens(ctx, nearest_tokens(model, x)))
            return model.logits(x), state

        return jit(f)

    @functools.cached_property
    def _step(self):
        def f(params, x, state, ctx):
            model = self.model(params)
            x, state = model.stack.step(x, state, model.with_tokens(ctx, nearest_tokens(model, x)))
            return model.logits(x), state

        return jit(f)

    def tokens(self, tokens: Any, state: Any) -> Any:
        """The language model: tokens [b t] -> logits [b t v], state."""
        return self.run(self._tokens, tokens, state)

    @functools.cached_property
    def whole(self) -> Any:
        """TOKENS in a single call: logits, state."""
        return self.tokens(TOKENS, self.fresh)

    @functools.cached_property
    def x(self) -> Any:
        """The embeddings of TOKENS."""
        return self.run(lambda params: self.model(params).embed(TOKENS))

    def call(self, x: Any, state: Any, reset: Any = None, valid: Any = None, **kw: Any) -> Any:
        """Embeddings [b t d] -> logits [b t v], state."""
        return self.run(self._call, x, state, Context(reset, valid, **kw))

    def step(
        self, x: Any, state: Any, reset: Any = None, valid: Any = None, pass_state: Any = None
    ) -> Any:
        """Embeddings [b t d], processed token by token -> logits [b t v], state."""
        ys = []
        for t in range(x.shape[1]):
            masks = {"reset": reset, "valid": valid, "pass_state": pass_state}
            now = {name: None if a is None else a[:, t : t + 1] for name, a in masks.items()}
            y, state = self.run(self._step, x[:, t : t + 1], state, Context(**now))
            ys.append(y)
        return np.concatenate(ys, 1), state

    # gradients

    @functools.cached_property
    def _grad(self):
        def loss(params, x, state, probe, end, reset, valid, begin):
            model = self.model(params)
            start = jax.tree.map(lambda a, b: jnp.where(begin, a, b), model.init_state(B), state)
            ctx = model.with_tokens(Context(reset, valid), nearest_tokens(model, x))
            y, new = model.stack(x, start, ctx)
            # outputs at padding are undefined
            value = (model.logits(jnp.where(valid[..., None], y, 0)) * probe).sum()
            pairs = zip(jax.tree.leaves(new), jax.tree.leaves(end), strict=True)
            return value + sum((a * b).sum() for a, b in pairs if a.dtype == y.dtype), new

        def f(*args):
            both = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True)
            (value, state), grads = both(*args)
            return value, state, jax.tree.map(_no_float0, grads)

        return jit(f)

    def grad(
        self,
        x: Any,
        probe: Any,
        state: Any = None,
        reset: Any = None,
        valid: Any = None,
        end: Any = None,
    ) -> Any:
        """Gradient of sum(probe * logits) + sum(end * new state).

        Returns:
        the sum; the new state; gradients with respect to (params, x, state). Without a state, the
        initial one is used, as a function of params; without an end, it is 0.
        """
        no = np.zeros(x.shape[:2], bool)
        end = jax.tree.map(np.zeros_like, self.fresh) if end is None else end
        masks = (no if reset is None else reset, ~no if valid is None else valid)
        start = self.fresh if state is None else state
        return self.run(self._grad, x, start, probe, end, *masks, state is None)

    @functools.cached_property
    def _grad_segments(self):
        def loss(params, xs, probes, cut):
            model = self.model(params)

            def segment(state, both):
                x, probe = both
                state = jax.tree.map(lambda s: jnp.where(cut, jax.lax.stop_gradient(s), s), state)
                y, state = model.stack(
                    x, state, model.with_tokens(Context(), nearest_tokens(model, x))
                )
                return state, (model.logits(y) * probe).sum()

            return jax.lax.scan(segment, model.init_state(B), (xs, probes))[1].sum()

        return jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def grad_segments(self, x: Any, probe: Any, count: int, cut: bool) -> Any:
        """Like `grad`, in `count` calls with the state carried (or cut) between them."""

        def split(a):
            return np.stack(np.split(a, count, 1))

        value, (params, xs) = self.run(self._grad_segments, split(x), split(probe), cut)
        return value, params, np.concatenate(xs, 1)

    # oracle

    def oracle(self, tokens: Any) -> Any:
        """The NumPy transcription of one lane: tokens [t] -> logits [t v], the state."""
        params = jax.tree.map(np.asarray, nnx.to_pure_dict(self.params))
        return transcription.model(self.config, params, tokens)


def init_params(config: ModelConfig) -> Any:
    """Initial parameters of the model."""
    return nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))[1]


def perturb_params(params: Any) -> Any:
    """Return params with non-trivial norms, and attention sharp enough to expose one wrong key."""
    rng = np.random.default_rng(3)

    def change(path, a):
        name = jax.tree_util.keystr(path)
        if "norm" in name or "post" in name or "bias" in name:
            return np.asarray(a) + 0.3 * rng.normal(size=a.shape)
        if "'tau'" in name:
            return rng.uniform(0.5, 2, a.shape)
        if "'span'" in name:
            return rng.uniform(0, 1, a.shape)
        if "'mix'" in name:
            return rng.normal(size=a.shape)
        if any(f"'{own}'" in name for own in ("memory_gate", "key_smear", "delta_memory")):
            return 0.5 * rng.normal(size=a.shape)
        if "'ngram_memory'" in name or "'short_conv'" in name:
            return 0.2 * rng.normal(size=a.shape)
        sharp = 1.5 if "'q'" in name or "'k'" in name else 1.0
        return np.asarray(a) * (2 * sharp if "'out'" in name or "'down'" in name else sharp)

    return jax.tree_util.tree_map_with_path(change, params)


def _no_float0(g: Any) -> Any:
    return jnp.zeros(g.shape) if g.dtype == jax.dtypes.float0 else g


@functools.cache
def runner(name: str, x64: bool = True, **changes: Any) -> Runner:
    """Return the runner of a case; parameters do not depend on the precision or changes."""
    case = (CASES | FAMILIES)[name]
    config = replace(case, **changes)
    if x64 and changes and config == case:
        return runner(name)
    return Runner(config, x64, runner(name).params if changes or not x64 else None)


def nearest_tokens(model: LanguageModel, x: Any) -> Any:
    """The tokens [b t] whose embeddings are closest to inputs [b t d], which may be none."""
    table = model.embed(jnp.arange(VOCAB)[None])[0]
    return jnp.square(x[..., None, :] - table).sum(-1).argmin(-1)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def stream(seed: int = 0, length: int = LENGTH) -> Any:
    return normal(seed, B, length, WIDTH)


def lane(state: Any, i: int) -> Any:
    """One lane of a state, whose leaves are [r b ...]."""
    return jax.tree.map(lambda a: a[:, i], state)


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    """Check that two trees agree, relative to the range of each array; integers exactly."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.isfinite(x).all(), jax.tree_util.keystr(path)
        error = np.abs(x - y).max(initial=0)
        limit = tolerance * (1 + np.abs(y).max(initial=0))
        assert error <= limit, f"{jax.tree_util.keystr(path)}: {error:.2e} > {limit:.2e}"


def same(a: Any, b: Any) -> None:
    """Check that two trees are equal bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        x, y = np.asarray(x), np.asarray(y)
        equal = (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())
        assert equal, jax.tree_util.keystr(path)
