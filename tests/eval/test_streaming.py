"""Streaming: any split of a document gives the same results, in constant memory."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from famjax.config.schema import MeshConfig
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.eval.memory_usage import measure_flatness, memory_report
from famjax.eval.stream_functions import jit_functions
from famjax.eval.streaming import Streamer, rechunk
from famjax.models.language_model import LanguageModel
from famjax.ops import attention
from famjax.ops.losses import token_losses
from famjax.parallel import traced
from famjax.parallel.sharding import make_mesh, parameter_shardings

B, T = 2, 50
LINE = np.random.default_rng(0).integers(0, 256, (B, T + 1)).astype(np.int32)
TOKENS, TARGETS = LINE[:, :-1], LINE[:, 1:]


@pytest.fixture(scope="module")
def streamer() -> Streamer:
    return Streamer(tiny.model("fam"), B, chunk=16)


@pytest.fixture(scope="module")
def whole(streamer: Streamer) -> tuple[np.ndarray, np.ndarray]:
    return streamer.new_stream().losses(TOKENS, TARGETS)


def close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), a, b)


def test_losses_equal_one_call_of_the_model(whole: tuple[np.ndarray, np.ndarray]) -> None:
    nats, right = token_losses(tiny.logits(tiny.model("fam"), TOKENS), TARGETS)
    close(whole[0], nats)
    assert (whole[1] == right).mean() > 0.98  # ties in float32 may be decided either way


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, T), max_size=4))
def test_any_split_equals_one_call(
    streamer: Streamer, whole: tuple[np.ndarray, np.ndarray], cuts: list[int]
) -> None:
    stream = streamer.new_stream()
    ends = [0, *sorted(cuts), T]
    parts = [stream.losses(TOKENS[:, a:b], TARGETS[:, a:b])[0] for a, b in itertools.pairwise(ends)]
    close(np.concatenate(parts, 1), whole[0])
    assert stream.tokens == T


def test_skimming_gives_the_state_of_reading(streamer: Streamer) -> None:
    skimmed, read = streamer.new_stream(), streamer.new_stream()
    skimmed.skim(TOKENS[:, :16])
    read.read(TOKENS[:, :16])
    close(skimmed.state, read.state)
    with pytest.raises(ValueError, match="no logits"):
        _ = skimmed.logits
    close(
        skimmed.losses(TOKENS[:, 16:], TARGETS[:, 16:]),
        read.losses(TOKENS[:, 16:], TARGETS[:, 16:]),
    )
    with pytest.raises(ValueError, match="are not a whole chunk"):
        skimmed.skim(TOKENS[:, :16])
    with pytest.raises(ValueError, match="are not a whole chunk"):
        read.new_stream().skim(TOKENS[:, :8])


def test_reading_and_stepping_give_the_same_state_and_logits(streamer: Streamer) -> None:
    read, scored, stepped = streamer.new_stream(), streamer.new_stream(), streamer.new_stream()
    read.read(TOKENS)
    scored.losses(TOKENS, TARGETS)
    for t in range(T):
        stepped.step(TOKENS[:, t : t + 1])
    for other in (scored, stepped):
        close(other.state, read.state)
        close(other.logits, read.logits)


def test_a_saved_state_continues_and_is_not_donated(
    streamer: Streamer, whole: tuple[np.ndarray, np.ndarray]
) -> None:
    stream = streamer.new_stream()
    stream.read(TOKENS[:, :21])
    saved = stream.state
    for _ in range(2):
        other = streamer.new_stream()
        other.state = saved
        close(other.losses(TOKENS[:, 21:], TARGETS[:, 21:])[0], whole[0][:, 21:])
    close(stream.losses(TOKENS[:, 21:], TARGETS[:, 21:])[0], whole[0][:, 21:])


def test_a_state_of_other_lanes_is_rejected(streamer: Streamer) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        streamer.new_stream(1).state = streamer.new_stream().state


@pytest.mark.parametrize("mixer", ["fam", "full"])
def test_reset_every_block_processes_blocks_independently(mixer: str) -> None:
    model = tiny.model(mixer)
    forgetful = Streamer(model, B, chunk=16, reset_every=8)
    plain = Streamer(model, B, chunk=16)
    expected = [
        plain.new_stream().losses(TOKENS[:, t : t + 8], TARGETS[:, t : t + 8])[0]
        for t in range(0, T, 8)
    ]
    close(forgetful.new_stream().losses(TOKENS, TARGETS)[0], np.concatenate(expected, 1))
    # in pieces, also from the middle of a block
    parts = [forgetful.losses(TOKENS[:, a:b], TARGETS[:, a:b])[0] for a, b in [(0, 13), (13, T)]]
    close(np.concatenate(parts, 1), np.concatenate(expected, 1))


def test_state_bytes_do_not_depend_on_the_document(streamer: Streamer) -> None:
    stream = streamer.new_stream()
    before = stream.state_bytes()
    stream.read(np.tile(TOKENS, 20))
    assert stream.state_bytes() == before > 0


def test_empty_reads_change_nothing(streamer: Streamer) -> None:
    stream = streamer.new_stream()
    nats, right = stream.losses(TOKENS[:, :0], TARGETS[:, :0])
    assert nats.shape == right.shape == (B, 0)
    with pytest.raises(ValueError, match="nothing was read"):
        _ = stream.logits


def test_full_attention_rejects_tokens_beyond_its_capacity() -> None:
    stream = Streamer(tiny.model("full"), B)
    stream.read(TOKENS)
    nats = stream.losses(TOKENS[:, :14], TARGETS[:, :14])[0]
    assert np.isfinite(nats).all()
    with pytest.raises(UserError, match=r"65 tokens do not fit its cache of 64"):
        stream.read(TOKENS[:, :1])
    assert stream.tokens == 64


@pytest.mark.parametrize(
    "mixer", ["fam", *(pytest.param(mixer, marks=pytest.mark.long) for mixer in ("bswa", "delta"))]
)
def test_blocks_in_parts_have_the_same_losses(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of so few blocks fit the cache, so that all would be computed at once."""
    expected = Streamer(tiny.model(mixer), B, chunk=16).losses(TOKENS, TARGETS)[0]
    computed = []

    def count_parts(q: jax.Array, k: jax.Array) -> int:
        computed.append(q.shape)
        return 3

    monkeypatch.setattr(attention, "_count_parts", count_parts)
    jit_functions.cache_clear()
    in_parts = Streamer(tiny.model(mixer), B, chunk=16).losses(TOKENS, TARGETS)[0]
    jit_functions.cache_clear()
    assert computed
    np.testing.assert_allclose(in_parts, expected, rtol=1e-5, atol=1e-5)


def test_a_call_of_many_lanes_stays_in_the_cache() -> None:
    model = tiny.model("fam")
    assert [Streamer(model, lanes).chunk for lanes in (1, 4, 128)] == [1024, 1024, 32]


@pytest.mark.parametrize(
    "sizes", [{"chunk": 12}, {"chunk": 0}, {"chunk": -8}, {"reset_every": 4}, {"batch": 0}]
)
def test_invalid_sizes_are_rejected(sizes: dict[str, int]) -> None:
    with pytest.raises(UserError, match="must be"):
        Streamer(tiny.model("fam"), **{"batch": 1, **sizes})


def test_one_shape_is_compiled(streamer: Streamer) -> None:
    stream = streamer.new_stream()
    program = stream._functions.losses
    # from a block's start, and from within one
    stream.losses(TOKENS[:, :17], TARGETS[:, :17])
    stream.losses(TOKENS[:, :2], TARGETS[:, :2])
    before = program._cache_size()
    stream.state = stream.state
    for size in (14, 16, 3, 40):
        stream.losses(TOKENS[:, :size], TARGETS[:, :size])
    assert program._cache_size() == before


def test_the_rest_of_a_block_is_read_in_one_call(streamer: Streamer) -> None:
    stream = streamer.new_stream()
    stream.read(TOKENS[:, :3])
    pieces = [size for size, _ in stream._dispatch(TOKENS[:, 3:], TARGETS[:, 3:])]
    assert pieces == [5, *[16] * ((T - 8) // 16), *[(T - 8) % 16] * ((T - 8) % 16 > 0)]


@pytest.mark.parametrize("mixer", [pytest.param("fam", marks=pytest.mark.long), "bswa"])
def test_sharded_parameters_are_used_in_place(mixer: str) -> None:
    graph, params = nnx.split(tiny.model(mixer))
    whole = Streamer(tiny.model(mixer), B, chunk=16).losses(TOKENS, TARGETS)[0]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    model = nnx.merge(graph, jax.device_put(params, parameter_shardings(mesh, params)))
    stream = Streamer(model, B, chunk=16)
    state = jax.tree.leaves(stream.state.memory)
    assert any(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in state)
    stream.state = stream.copy().state
    stream.read(TOKENS[:, :21])
    stream.state = stream.state
    close(stream.losses(TOKENS[:, 21:], TARGETS[:, 21:])[0], whole[:, 21:])


def test_single_tokens_of_a_document_gather_no_weights() -> None:
    """Products are summed instead, which are fewer bytes."""
    graph, params = nnx.split(tiny.model("bswa", mlp_width=56))
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    params = jax.device_put(params, parameter_shardings(mesh, params))
    functions = jit_functions(graph, mesh)
    state, tokens = functions.start(params, 1), np.zeros((1, 16), np.int32)

    def gathers(program: Any) -> int:
        """Return how often kernels of the feed-forward, [16 56] and [56 16], are gathered."""
        shapes = re.findall(r"= f32\[(\S+)\]\S* all-gather\(", program.compile().as_text())
        return sum(shape.endswith(("16,56", "56,16")) for shape in shapes)

    assert gathers(functions.skim.lower(params, state, tokens, Context()))
    assert not gathers(functions.step.lower(params, state, tokens[:, :1], Context()))


def test_other_devices_do_not_matter_to_a_model_on_one(monkeypatch) -> None:
    """Kernels, for example, need to know that their arguments are not sharded."""
    devices = []
    logits = LanguageModel.logits

    def spy(model, x):
        devices.append(traced.shard_map_axes(lambda x: x, {}, (), ()))
        return logits(model, x)

    monkeypatch.setattr(LanguageModel, "logits", spy)
    Streamer(tiny.model("bswa", vocab_size=19), B, chunk=16).read(TOKENS[:, :16] % 19)
    assert jax.device_count() == 8
    assert devices
    assert None not in devices


def test_a_copy_continues_by_itself(streamer: Streamer) -> None:
    stream = streamer.new_stream()
    stream.read(TOKENS[:, :21])
    asked = stream.copy()
    expected = streamer.new_stream().losses(TOKENS, TARGETS)[0][:, 21:]
    for reader in (asked, stream):
        assert reader.tokens == 21
        close(reader.losses(TOKENS[:, 21:], TARGETS[:, 21:])[0], expected)


@given(sizes=st.lists(st.integers(0, 7), max_size=8), size=st.integers(1, 5))
def test_rechunk_keeps_everything_in_order(sizes: list[int], size: int) -> None:
    line = np.arange(sum(sizes))
    pieces = np.split(line, np.cumsum(sizes)[:-1]) if sizes else []
    got = list(rechunk(pieces, size))
    assert all(len(piece) == size for piece in got[:-1])
    assert all(0 < len(piece) <= size for piece in got)
    np.testing.assert_array_equal(np.concatenate([*got, line[:0]]), line)


def test_memory_is_measured(streamer: Streamer) -> None:
    report = memory_report()  # of the process: CPU devices do not report theirs
    assert 10e6 < report["resident_bytes"] <= report["peak_bytes"]
    flat = measure_flatness(streamer, TOKENS[0], first=32, last=128)
    assert [peak["tokens"] for peak in flat["peaks"]] == [32, 64, 128]
    assert flat["state_bytes"][0] == flat["state_bytes"][1]
    assert 0 <= flat["growth"] < 0.5


def test_memory_of_accelerators_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"bytes_in_use": 3, "peak_bytes_in_use": 5}
    devices = [SimpleNamespace(memory_stats=lambda: stats)] * 2
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory_report() == {"resident_bytes": 6, "peak_bytes": 10}
