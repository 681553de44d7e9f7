"""Generation from a prompt, or from the memory of a document, gives the same text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from memories import MEMORIES
from tiny_tokenizers import byte_level

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.eval.generate import Generator, cut_at_stop
from famjax.eval.sampling import Sampling, sample
from famjax.eval.state_file import load_state, save_state
from famjax.eval.stream_functions import jit_functions
from famjax.experiment.load import override
from famjax.tokenizers.load import load_tokenizer
from famjax.train.run import Run


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(tiny.run())


def text(generator: Generator, *args: Any, **kwargs: Any) -> str:
    return "".join(generator.generate(*args, **{"max_tokens": 12, **kwargs}))


@pytest.mark.long
@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_generates(name: str) -> None:
    run = tiny.run_of(override(Config(model=tiny.SHAPE), MEMORIES[name].split()).model)
    generator = Generator(run)
    assert_greedy(generator, run)
    state = generator.read_document(tiny.TEXT)
    assert text(generator, "the", state=state) == text(generator, tiny.TEXT + "the")


def test_greedy_selects_the_most_probable_token(generator: Generator) -> None:
    assert_greedy(generator, tiny.run())


def assert_greedy(generator: Generator, run: Run) -> None:
    tokens = [run.tokenizer.bos_id, *run.tokenizer.encode("the cat")]
    written: list[int] = []
    for n in range(12):
        # causal: later tokens have no effect; one length is compiled
        logits = tiny.logits(run.model, np.array([tokens + written + [0] * (11 - n)]))
        written.append(int(logits[0, len(tokens) + n - 1].argmax()))
        if written[-1] == run.tokenizer.eos_id:
            break
    assert text(generator, "the cat") == run.tokenizer.decode(written)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_document_and_a_prompt_equal_one_prompt(generator: Generator, temperature: float) -> None:
    state = generator.read_document(tiny.TEXT * 3)
    asked = text(generator, "the", temperature=temperature, state=state)
    assert asked == text(generator, tiny.TEXT * 3 + "the", temperature=temperature)
    # generating has not changed the memory
    assert asked == text(generator, "the", temperature=temperature, state=state)


def test_a_prompt_without_tokens_after_a_memory_is_an_error(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = generator.read_document(tiny.TEXT)
    with pytest.raises(UserError, match="the prompt is empty; after a memory it needs"):
        generator.generate("", state=state)
    # as word lists do with white space
    monkeypatch.setattr(generator._tokenizer, "encode", lambda text: np.zeros(0, np.int32))
    with pytest.raises(UserError, match="the prompt ' ' has no token; after a memory"):
        generator.generate(" ", state=state)


def test_a_saved_state_generates_the_same_text(generator: Generator, tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text(tiny.TEXT * 3, encoding="utf-8")
    state = generator.read_document(file)
    assert state.tokens == 1 + len((tiny.TEXT * 3).encode())
    save_state(tmp_path / "s", state, tiny.run())
    loaded = load_state(tmp_path / "s", tiny.run())
    for temperature in (0.0, 0.8):
        asked = {"temperature": temperature, "seed": 3}
        assert text(generator, "the", state=loaded, **asked) == text(
            generator, "the", state=state, **asked
        )


def test_the_seed_determines_samples(generator: Generator) -> None:
    drawn = [text(generator, "the", temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_interleaved_generations_are_independent(generator: Generator) -> None:
    expected = [text(generator, "the", temperature=1.0), text(generator, "log", temperature=1.0)]
    both = [generator.generate(prompt, max_tokens=12, temperature=1.0) for prompt in ("the", "log")]
    got = ["", ""]
    for pair in zip(*both, strict=False):
        got = [a + b for a, b in zip(got, pair, strict=True)]
    assert all(e.startswith(g) for e, g in zip(expected, got, strict=True))


def sample_tokens(generator: Generator, seed: int, **kwargs: Any) -> list[int]:
    """Return randomly sampled tokens; no token stops the generation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.run().tokenizer, "stop_ids", frozenset([-1]))
        how = Sampling(jax.random.key(seed), 1.0, 0, 1.0, 258)
        stream = generator._streamer.new_stream()
        stream.read(np.array([generator._tokenizer.encode("the")]))
        return list(
            generator._sample_tokens(stream, **{"count": 40, "sampling": how, "stop": (), **kwargs})
        )


def test_pieces_of_any_size_equal_single_tokens(generator: Generator) -> None:
    stream = generator._streamer.new_stream()
    stream.read(np.array([generator._tokenizer.encode("the")]))
    how = Sampling(jax.random.key(4), 1.0, 0, 1.0, 258)
    expected = []
    for _ in range(70):
        token = stream.draw(how)
        stream.step(token[None])
        expected.append(int(token[0]))
    # 1, 1, 2, ... TOKENS_PER_CALL, and the rest
    assert sample_tokens(generator, 4, count=70) == expected
    for slow in (-1.0, 1e9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("famjax.eval.generate.PIECE_SECONDS", slow)
            assert sample_tokens(generator, 4) == expected[:40]


@pytest.mark.parametrize("at", [0, 1, 2, 20])
def test_generation_stops_at_the_first_stop_id(
    generator: Generator, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = sample_tokens(generator, 5)
    stop = next(n for n in drawn[at:] if n not in drawn[:at])
    monkeypatch.setattr(tiny.run().tokenizer, "stop_ids", frozenset([stop, 300]))
    how = Sampling(jax.random.key(5), 1.0, 0, 1.0, 258)
    stream = generator._streamer.new_stream()
    stream.read(np.array([generator._tokenizer.encode("the")]))
    assert list(generator._sample_tokens(stream, 40, how, ())) == drawn[: drawn.index(stop)]
    # no token after it was computed
    assert stream.tokens == 3 + drawn.index(stop)


def test_control_tokens_are_stop_strings(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decode to no text in which a string could be found."""
    tokenizer = tiny.run().tokenizer
    drawn = sample_tokens(generator, 5)
    stop = next(n for n in drawn[3:] if n not in drawn[:3])
    monkeypatch.setattr(tokenizer, "stop_ids", frozenset([-1]))
    monkeypatch.setattr(tokenizer, "control_ids", {"<|im_end|>": stop})
    for said, end in (("<|im_end|>", drawn.index(stop)), ("<|no|>", len(drawn))):
        pieces = generator.continue_tokens(
            tokenizer.encode("the"), 40, temperature=1.0, seed=5, stop=[said]
        )
        assert "".join(pieces) == tokenizer.decode(drawn[:end])


@pytest.mark.parametrize("capacity", [33, 64, 500])
def test_a_part_of_the_cache_gives_the_same_text_and_state(capacity: int) -> None:
    """Full attention writes with a cache of the text's size, and puts it back into the whole."""
    generator = Generator(tiny.run_with("full", capacity=capacity))
    prompt = np.arange(3, 12)[None]
    streams = [generator._streamer.new_stream() for _ in range(2)]
    for stream in streams:
        stream.read(prompt)
    how = Sampling(jax.random.key(4), 1.0, 0, 1.0, 258)
    token, stops = streams[0].draw(how)[0], np.array([-1], np.int32)
    expected = [token]
    for _ in range(20):
        streams[0].step(np.array([[expected[-1]]]))
        expected.append(streams[0].draw(how)[0])
    written = [token]
    for count in (8, 12):
        written += streams[1].write(written[-1], count, how, stops, final_len=30).tolist()
    assert written == expected
    with pytest.raises(ValueError, match="exceed final_len=30"):
        streams[1].write(written[-1], 2, how, stops, final_len=30)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *(stream.state.memory for stream in streams),
    )
    # what follows is read with the whole cache
    for stream in streams:
        stream.read(prompt[:, :4])
    np.testing.assert_allclose(streams[0].logits, streams[1].logits, rtol=1e-4, atol=1e-5)


def test_full_attention_generates_until_its_cache_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(tiny.run_with("full", capacity=16))
    stream = generator._streamer.new_stream()
    stream.read(np.zeros((1, 5), np.int32))
    how = Sampling(jax.random.key(0), 1.0, 0, 1.0, 258)
    monkeypatch.setattr(tiny.run().tokenizer, "stop_ids", frozenset([-1]))
    # the last token is generated but not processed
    assert len(list(generator._sample_tokens(stream, 12, how, ()))) == 12
    assert stream.tokens == 16
    with pytest.raises(UserError, match="do not fit its cache of 16"):
        stream.write(0, 1, how, np.array([-1], np.int32), final_len=16)
    with pytest.raises(UserError, match="after the longest prompt; give at most 11"):
        generator.search_all(["abcde", "a"], max_tokens=12)
    with pytest.raises(UserError, match=r"prompt 2 of 2: its 17 tokens do not fit .* room for 16"):
        generator.search_all(["a", "a" * 16], max_tokens=1)
    assert generator.search_all([]) == []


@pytest.mark.long
def test_large_layers_have_arrays_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and as long as their copy is not too large; the text is the same."""
    texts = []
    for layer, copied, unstacks in ((0, 2**30, True), (0, 1, False), (2**30, 2**30, False)):
        monkeypatch.setattr("famjax.models.language_model._LARGE_LAYER", layer)
        monkeypatch.setattr("famjax.models.language_model._LARGEST_COPY", copied)
        run = tiny.run_with("fam", mlp_width=512)  # weights are larger than the state
        state = run.model.init_state(1)
        unstacked = run.model.unstack(state)
        assert (jax.tree.structure(unstacked) != jax.tree.structure(state)) == unstacks
        jit_functions.cache_clear()
        texts.append("".join(Generator(run).generate("import", 20)))
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    "mixer",
    ["full", *(pytest.param(name, marks=pytest.mark.long) for name in ("fam", "linear", "delta"))],
)
def test_prompts_of_any_lengths_are_searched_together(
    mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are read in several calls, and that end in different ones."""
    monkeypatch.setattr("famjax.eval.streaming._CPU_TOKENS", 48)
    generator = Generator(tiny.run_with(mixer, capacity=128))
    prompts = ["a", "def f(x):\n" * 6, "import", "x" * 33, ""]
    found = generator.search_all(prompts, 2, 5, batch=3)
    for prompt, one in zip(prompts, found, strict=True):
        (alone,) = generator.search(prompt, 2, 5, best=1)
        assert one.text == alone.text
        assert one.tokens == alone.tokens
        assert one.score == pytest.approx(alone.score, abs=1e-4)


def test_chat_renders_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(byte_level(tmp_path)))
    shape = {"vocab_size": tokenizer.vocab_size}
    generator = Generator(replace(tiny.run_with("fam", **shape), tokenizer=tokenizer))
    asked = text(generator, "the <|im_end|>", chat=True)
    message = {"role": "user", "content": "the <|im_end|>"}
    ids = tokenizer.encode_chat([message])
    monkeypatch.setattr(tokenizer, "encode", lambda _: ids)
    assert asked == text(generator, "what encode returns")
    monkeypatch.undo()
    # from a memory that started with bos
    state = generator.read_document("")
    assert asked == text(generator, message["content"], chat=True, state=state)


def test_chat_needs_a_template(generator: Generator) -> None:
    with pytest.raises(UserError, match="tokenizer bytes: has no chat template"):
        text(generator, "the", chat=True)


def test_padded_vocabulary_is_never_sampled() -> None:
    for temperature in (0.0, 1e-9):
        how = Sampling(jax.random.key(0), temperature, 0, 1.0, 100)
        assert int(how.draw(jnp.arange(258.0)[None], 0)[0, 0]) == 99


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_numbers_out_of_range_are_rejected(generator: Generator, options: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        text(generator, "the", **options)


def test_a_memory_needs_a_prompt(generator: Generator) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        text(generator, "", state=generator.read_document("the"))
    assert isinstance(text(generator, ""), str)


@pytest.mark.parametrize(
    ("content", "what"), [(b"", "empty"), (b"a\0b", "binary"), (b"\xff\xfe", "UTF-8")]
)
def test_files_that_are_not_text_are_rejected(
    generator: Generator, content: bytes, what: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(UserError, match=what):
        generator.read_document(tmp_path / "f")
    with pytest.raises(UserError, match="No such file"):
        generator.read_document(tmp_path / "none")


# sampling

LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.05, 0.3, 0.15]]))


def frequencies(temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    draws = jax.vmap(
        lambda i: sample(LOGITS, jax.random.key(0), i, temperature, top_k, top_p)[0, 0]
    )(jnp.arange(4000))
    return {k: n / 4000 for k, n in Counter(np.asarray(draws).tolist()).items()}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (0.0, 0, 1.0, {1: 1}),
        (1.0, 1, 1.0, {1: 1}),
        (1.0, 0, 1e-6, {1: 1}),
        (1.0, 0, 1.0, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15}),
        (1.0, 2, 1.0, {1: 4 / 7, 3: 3 / 7}),
        (1.0, 0, 0.69, {1: 4 / 7, 3: 3 / 7}),
        (1.0, 0, 0.71, {1: 0.4 / 0.85, 3: 0.3 / 0.85, 4: 0.15 / 0.85}),
        (0.5, 2, 1.0, {1: 16 / 25, 3: 9 / 25}),
    ],
)
def test_samples_follow_the_probabilities(
    temperature: float, top_k: int, top_p: float, expected: dict[int, float]
) -> None:
    got = frequencies(temperature, top_k, top_p)
    assert set(got) == set(expected)
    for token, share in expected.items():
        assert got[token] == pytest.approx(share, abs=0.03)


# stop strings


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_never_emitted(pieces: list[str], stop: list[str]) -> None:
    got = list(cut_at_stop(stop, iter(pieces)))
    whole = "".join(pieces)
    assert whole.startswith("".join(got))
    assert not any(s in "".join(got) for s in stop)
    if not any(s in whole for s in stop):
        assert "".join(got) == whole


def test_text_is_buffered_only_while_a_stop_string_may_follow() -> None:
    source = iter(["x", "END", "ING", "y", "EN", "D", "!"])
    texts = cut_at_stop(["END!"], source)
    assert [next(texts) for _ in range(3)] == ["x", "ENDING", "y"]
    assert list(texts) == []


def test_text_before_a_stop_string_is_emitted() -> None:
    assert "".join(cut_at_stop(["\n"], iter(["ab", "c\nd", "e"]))) == "abc"
    assert "".join(cut_at_stop([], iter(["ab", "", "c"]))) == "abc"
    assert "".join(cut_at_stop(["cd"], iter(["ab", "c"]))) == "abc"
