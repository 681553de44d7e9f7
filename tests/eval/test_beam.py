"""Beam search finds what lists of tokens find, over every kind of state."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers
from contracts.harness import FAMILIES, KINDS, LENGTH, VOCAB, Runner, jit, runner
from hugging_face import TOKENS, pretrained
from oracles import beam as oracle

from famjax import load_pretrained
from famjax.core.errors import UserError
from famjax.eval import beam
from famjax.eval.beam import BeamSettings, Hypotheses, beam_search, repeat_rows
from famjax.eval.generate import Generator
from famjax.eval.lane_stream import LaneStream
from famjax.eval.streaming import Streamer

STOPS = np.array([2, 7], np.int32)
# begins and ends within blocks
PROMPTS = np.random.default_rng(1).integers(VOCAB, size=(2, 7)).astype(np.int32)
SETTINGS = BeamSettings(beams=3, max_tokens=9, vocab_size=VOCAB)
ALPHAS = (0.0, 1.0, 2.0, -0.5)
QUICK = ("full", "fam-1-3", "lstm")
LONG = ("bswa-1", "delta-smeared", "linear", "feedback-all", "transformer-shared", "rmt")


def kinds(quick: tuple[str, ...], long: tuple[str, ...]) -> Any:
    slow = [case for case in KINDS if case not in (*quick, *long)]
    given = [pytest.param(case, marks=pytest.mark.long) for case in long]
    given += [pytest.param(case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize("case", [*quick, *given])


class Model:
    """A case of the contracts in float64: log p from all tokens, and searches from a state."""

    def __init__(self, case: str):
        self.runner: Runner = runner(case)
        self.model = self.runner.model(self.runner.params)
        self._call = jit(lambda p, t: self.runner.model(p)(t, self.runner.model(p).init_state(1)))
        self._cache: dict[Any, np.ndarray] = {}

    def log_probs(self, prompt: np.ndarray, size: int = VOCAB) -> oracle.LogProbs:
        """Return log p of the next token among `size`, from the written tokens."""

        def of(written: oracle.Tokens) -> np.ndarray:
            tokens = (*prompt.tolist(), *written)
            if tokens not in self._cache:
                row = np.array([tokens + (0,) * (LENGTH - len(tokens))], np.int32)
                self._cache[tokens] = self.runner.run(self._call, row)[0][0, len(tokens) - 1]
            logits = self._cache[tokens][:size]
            return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

        return of

    def search(
        self,
        prompts: np.ndarray,
        settings: BeamSettings,
        stops: np.ndarray = STOPS,
        prompt: np.ndarray | None = None,
    ) -> Hypotheses:
        with jax.enable_x64(True):
            stream = Streamer(self.model, len(prompts), chunk=LENGTH)
            stream.read(prompts)
            return jax.device_get(stream.search(settings, stops, prompt))

    def likely(self) -> np.ndarray:
        """Return tokens that the model writes."""
        written = oracle.search(self.log_probs(PROMPTS[0]), 3, 9, 0.0, ())[0][0]
        return np.unique([written[3], written[6]]).astype(np.int32)


@functools.cache
def model(case: str) -> Model:
    return Model(case)


def row(found: Hypotheses, i: int) -> list[tuple[oracle.Tokens, float]]:
    """Return the hypotheses of row i as the oracle does."""
    assert not any(
        t[length:].any() for t, length in zip(found.tokens[i], found.lengths[i], strict=True)
    )
    return [
        (tuple(tokens[:length].tolist()), float(score))
        for tokens, length, score in zip(*(a[i] for a in found), strict=True)
        if length
    ]


def assert_same(
    ours: list[tuple[oracle.Tokens, float]], theirs: list[tuple[oracle.Tokens, float]], tol: float
) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    np.testing.assert_allclose([s for _, s in ours], [s for _, s in theirs], atol=tol, rtol=0)


@kinds(QUICK, LONG)
def test_lists_of_tokens_find_the_same(case: str) -> None:
    m, lengths = model(case), set()
    stops = m.likely()
    for alpha in ALPHAS:
        found = m.search(PROMPTS, replace(SETTINGS, length_penalty=alpha), stops)
        for i, prompt in enumerate(PROMPTS):
            theirs = oracle.search(m.log_probs(prompt), 3, 9, alpha, stops)
            assert_same(row(found, i), theirs, 1e-9)
            lengths |= {len(tokens) for tokens, _ in theirs}
    # some end with a stop token, some at the most tokens
    assert {9} < lengths


@pytest.mark.long
@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))]
)
def test_no_ngram_comes_twice(size: int) -> None:
    m = model("fam-1-3")
    settings = replace(SETTINGS, no_repeat_ngram=size, max_tokens=8, length_penalty=2.0)
    found = m.search(PROMPTS, settings, prompt=PROMPTS)
    free = m.search(PROMPTS, replace(settings, no_repeat_ngram=0))
    # padding of a prompt is none of its tokens
    padded = np.pad(PROMPTS, ((0, 0), (3, 0)), constant_values=-1)
    again = m.search(PROMPTS, settings, prompt=padded)
    for i, prompt in enumerate(PROMPTS):
        whole = tuple(prompt.tolist())
        theirs = oracle.search(m.log_probs(prompt), 3, 8, 2.0, STOPS, size, whole)
        assert_same(row(found, i), theirs, 1e-9)
        assert_same(row(again, i), theirs, 1e-9)
        own = m.search(prompt[None], settings)
        assert_same(row(own, 0), oracle.search(m.log_probs(prompt), 3, 8, 2.0, STOPS, size), 1e-9)
    assert (found.tokens != free.tokens).any()


@pytest.mark.long
def test_enough_beams_find_the_best_of_all() -> None:
    m = model("fam-1-3")
    # tokens beyond the size of the vocabulary are none: 3 of 4 go on
    settings = BeamSettings(beams=128, max_tokens=4, vocab_size=4)
    for alpha in ALPHAS:
        found = m.search(PROMPTS[:1], replace(settings, length_penalty=alpha))
        theirs = oracle.exhaustive(m.log_probs(PROMPTS[0], 4), 4, alpha, [2])
        assert len(theirs) == 1 + 3 + 9 + 27 + 81
        assert_same(row(found, 0), theirs, 1e-9)
        assert (found.scores[0, len(theirs) :] == -np.inf).all()


def test_one_beam_is_greedy() -> None:
    m = model("bswa-1")
    for alpha in ALPHAS:
        found = m.search(PROMPTS, replace(SETTINGS, beams=1, length_penalty=alpha))
        for i, prompt in enumerate(PROMPTS):
            ((tokens, _),) = row(found, i)
            assert tokens == oracle.greedy(m.log_probs(prompt), 9, STOPS)


class Table:
    """A model whose next token depends on the last one, and whose stop tokens are likely."""

    def __init__(self, seed: int = 0):
        random = jax.random.normal(jax.random.key(seed), (VOCAB, VOCAB))
        self.table = random.at[:, STOPS].add(3)
        self.taken: list[int] = []

    def step(self, tokens: Any, state: Any) -> Any:
        jax.debug.callback(lambda: self.taken.append(1))
        return self.table[tokens], state

    def search(self, settings: BeamSettings, rows: int = 2) -> tuple[Hypotheses, int]:
        """Return what is found, and after how many steps."""
        self.taken.clear()
        program = jax.jit(beam_search, static_argnums=(0, 3))
        found = program(self.step, self.table[:rows], (), (), settings, STOPS)
        found = jax.device_get(found)
        jax.effects_barrier()
        return found, len(self.taken)


@pytest.mark.long
def test_the_search_ends_when_nothing_can_improve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose stop tokens are likely: it takes fewer steps, and finds the same."""
    table = Table()

    def steps(alpha: float) -> tuple[Hypotheses, int]:
        return table.search(replace(SETTINGS, max_tokens=20, length_penalty=alpha))

    early = {alpha: steps(alpha) for alpha in ALPHAS}
    # with a positive penalty the bound is that of 20 tokens
    assert early[0.0][1] < early[1.0][1] < early[2.0][1]
    monkeypatch.setattr(
        beam, "_may_improve", lambda settings, search: search.length < settings.max_tokens
    )
    jax.clear_caches()
    for alpha, (found, count) in early.items():
        late, most = steps(alpha)
        assert most == 19 >= count
        for a, b in zip(found, late, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("best", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_best_alone_are_found_in_fewer_steps(best: int) -> None:
    log_probs = np.asarray(jax.nn.log_softmax(Table().table))
    for alpha in ALPHAS:
        table, settings = Table(), replace(SETTINGS, max_tokens=40, length_penalty=alpha)
        everything, most = table.search(settings)
        found, count = table.search(replace(settings, best=best))
        for a, b in zip(found, everything, strict=True):
            np.testing.assert_array_equal(a, b[:, :best])
        assert count < most or alpha == 2.0
        for i in range(2):
            theirs = oracle.search(lambda w, i=i: log_probs[(i, *w)[-1]], 3, 40, alpha, STOPS)
            assert_same(row(found, i), theirs[:best], 1e-5)


@pytest.mark.parametrize("best", [1, pytest.param(None, marks=pytest.mark.long)])
def test_one_search_finds_the_best_by_several_penalties(best: int | None) -> None:
    alphas = np.linspace(0, 2, 6, dtype=np.float32)
    for seed in range(3):
        table, settings = Table(seed), replace(SETTINGS, max_tokens=15, best=best)
        together, most = table.search(replace(settings, length_penalty=alphas))
        alone = [table.search(replace(settings, length_penalty=alpha)) for alpha in alphas]
        assert most == max(count for _, count in alone)
        for i, (found, _) in enumerate(alone):
            for a, b in zip(together, found, strict=True):
                np.testing.assert_array_equal(a[i], b)
        # penalties choose different hypotheses
        assert len(np.unique(together.lengths[:, :, 0])) > 1


def test_a_long_hypothesis_overtakes_those_that_ended() -> None:
    """Two end at once, and one that is much less likely becomes certain of its tokens."""
    table = np.full((VOCAB, VOCAB), 1e-4)
    table[0, STOPS], table[0, 1], table[1, 1] = 0.45, 0.05, 1
    table = np.log(table / table.sum(-1, keepdims=True))

    def step(tokens: Any, state: Any) -> Any:
        return jnp.asarray(table, jnp.float32)[tokens], state

    settings = BeamSettings(beams=2, max_tokens=20, vocab_size=VOCAB)
    found = beam_search(step, step(np.zeros(1, int), ())[0], (), (), settings, STOPS)
    theirs = oracle.search(lambda written: table[written[-1] if written else 0], 2, 20, 1.0, STOPS)
    assert theirs[0][0] == (1,) * 20
    assert_same(row(jax.device_get(found), 0), theirs, 1e-6)


@pytest.mark.long
def test_each_row_is_searched_by_itself() -> None:
    """Rows whose prompts have other lengths, one of which ends before the others."""
    r = runner("fam-1-3", x64=False)
    m = r.model(r.params)
    prompts = [PROMPTS[0], PROMPTS[1, :4], np.append(PROMPTS[1], PROMPTS[0])[:9]]
    lanes = LaneStream(m, 3, 12)
    rows = np.stack([np.pad(prompt, (0, 12 - len(prompt))) for prompt in prompts])
    lanes.read_lanes(rows, np.array([len(prompt) for prompt in prompts]), np.ones(3, bool))
    state = lanes.state.memory
    found = jax.jit(beam_search, static_argnums=(0, 3))(
        m.step, lanes.logits, state, m.stack.row_axes(state), SETTINGS, STOPS
    )
    for i, prompt in enumerate(prompts):
        stream = Streamer(m, 1, chunk=12)
        stream.read(prompt[None])
        alone = jax.device_get(stream.search(SETTINGS, STOPS))
        assert_same(row(jax.device_get(found), i), row(alone, 0), 1e-5)
        # the stream is where it was
        again = jax.device_get(stream.search(SETTINGS, STOPS))
        np.testing.assert_array_equal(alone.scores, again.scores)


@pytest.mark.parametrize("case", [*KINDS, *FAMILIES])
def test_rows_are_found_in_both_layouts(case: str) -> None:
    m = runner(case, x64=False).model(runner(case, x64=False).params)
    for layout in (lambda state: state, m.stack.unstack):

        def shapes(rows: int, change: Any = lambda state: state, layout: Any = layout) -> Any:
            state = jax.eval_shape(lambda: change(layout(m.init_state(rows))))
            return jax.tree.map(lambda a: a.shape, state)

        def repeat(state: Any) -> Any:
            return repeat_rows(state, m.stack.row_axes(state), 2)

        assert shapes(5, repeat) == shapes(10)


@pytest.mark.parametrize("seed", range(20))
def test_states_follow_their_beams_with_few_copies(seed: int) -> None:
    parents = np.random.default_rng(seed).integers(5, size=(3, 5))
    placed = np.take_along_axis(parents, np.asarray(beam._assign_beams(jnp.asarray(parents))), 1)
    assert (np.sort(placed) == np.sort(parents)).all()
    rows = np.arange(5)
    for each in placed:
        # a beam that is continued is so in its place
        assert (each == rows).sum() == len(set(each))
    sources = (5 * np.arange(3)[:, None] + placed).reshape(-1)
    state = (np.random.default_rng(seed).normal(size=(15, 2)), np.arange(30).reshape(2, 15))
    for copy in (beam._copy_in_place, beam._gather):
        copied = copy(jax.tree.map(jnp.asarray, state), jnp.asarray(sources), axes=(0, 1))
        np.testing.assert_array_equal(copied[0], state[0].astype(np.float32)[sources])
        np.testing.assert_array_equal(copied[1], state[1][:, sources])


@pytest.mark.long
@pytest.mark.parametrize("case", ["fam-1-3", "full, others"])
def test_unstacked_layers_give_the_same(case: str) -> None:
    r = runner(case, x64=False)
    m = r.model(r.params)
    stream = Streamer(m, 2, chunk=LENGTH)
    stream.read(PROMPTS)

    def search(params: Any, logits: Any, state: Any, layout: str) -> Hypotheses:
        m = r.model(params)
        state = getattr(m.stack, layout)(state)
        m.stack.unstack_layers(state)
        assert bool(m.stack.layer_params) == (layout == "unstack")
        return beam_search(m.step, logits, state, m.stack.row_axes(state), SETTINGS, STOPS)

    program = jax.jit(search, static_argnums=3)
    stacked, unstacked = (
        jax.device_get(program(r.params, stream.logits, stream.state.memory, layout))
        for layout in ("restack", "unstack")
    )
    for i in range(2):
        assert_same(row(stacked, i), row(unstacked, i), 1e-5)


@pytest.mark.parametrize(
    ("alpha", "size"),
    [
        *((1.0, 0), (0.5, 2)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0.0, 0), (-1.0, 0), (1.0, 3))),
    ],
)
def test_transformers_finds_the_same(alpha: float, size: int) -> None:
    folder, _ = pretrained("llama")
    prompts, stops = TOKENS[:, :20], [9, 48]
    theirs = _llama().generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(prompts.shape, dtype=torch.long),
        num_beams=5,
        num_return_sequences=5,
        max_new_tokens=16,
        early_stopping="never",
        length_penalty=alpha,
        no_repeat_ngram_size=size,
        eos_token_id=stops,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    stream = Streamer(load_pretrained(folder)[1], 2, chunk=20)
    stream.read(prompts)
    settings = BeamSettings(5, 16, 97, alpha, size)
    found = jax.device_get(stream.search(settings, np.array(stops, np.int32), prompts))
    # log p: a penalty below 0 multiplies by lengths, and rounding with it
    scores = theirs.sequences_scores.numpy().reshape(2, 5)
    shorter = found.lengths ** max(-alpha, 0.0)
    np.testing.assert_allclose(found.scores / shorter, scores / shorter, atol=1e-4, rtol=0)
    written = theirs.sequences.numpy().reshape(2, 5, -1)[..., 20:].tolist()
    for i in range(2):
        for (tokens, _), padded in zip(row(found, i), written[i], strict=True):
            assert tokens == tuple(padded[: len(tokens)])
            assert len(tokens) == 16 or tokens[-1] in stops
    assert len(set(found.lengths.ravel().tolist())) > 1


@functools.cache
def _llama() -> Any:
    folder, _ = pretrained("llama")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


# texts


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(tiny.run())


def test_one_beam_writes_what_is_generated(generator: Generator) -> None:
    ((text, score, _),) = generator.search("the cat", 1, 12)
    assert text == "".join(generator.generate("the cat", 12))
    assert score < 0


def test_a_document_and_a_prompt_are_one_prompt(generator: Generator) -> None:
    state = generator.read_document(tiny.TEXT * 3)
    found = generator.search("the", 4, 12, state=state)
    whole = generator.search(tiny.TEXT * 3 + "the", 4, 12)
    assert [h.text for h in found] == [h.text for h in whole]
    assert len(found) == 4
    assert generator.search("the", 4, 12, state=state, best=1) == found[:1]
    assert sorted(found, key=lambda h: -h.score) == found
    # searching has not changed the memory
    assert generator.search("the", 4, 12, state=state) == found


@pytest.mark.parametrize("prompt", ["the cat", ""])
def test_ngrams_of_the_prompt_and_the_text_come_once(
    generator: Generator, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bytes that are no characters are replaced in texts
    monkeypatch.setattr(generator, "_decode_hypothesis", lambda tokens, stop: tokens.tolist())
    before = [generator._tokenizer.bos_id, *generator._tokenizer.encode(prompt).tolist()]
    for size in (1, 2):
        for found in generator.search(prompt, 3, 30, no_repeat_ngram=size):
            written = [*before, *found.text]
            grams = list(zip(*(written[i:] for i in range(size)), strict=False))
            # those of the prompt are as they are
            assert len(grams) - len(set(grams)) == (size == 1 and prompt == "the cat")


def test_stop_strings_cut_what_was_found(generator: Generator) -> None:
    best = generator.search("the cat", 3, 12)[0].text
    assert generator.search("the cat", 3, 12, stop=[best[4]])[0].text == best[: best.index(best[4])]


def test_stop_tokens_are_not_written(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    first = generator.search("the cat", 3, 12)[0].text.encode()
    monkeypatch.setattr(generator._tokenizer, "stop_ids", frozenset([first[0], 300]))
    texts = [h.text for h in generator.search("the cat", 3, 12, length_penalty=0.0)]
    assert "" in texts
    assert not any(chr(first[0]) in text for text in texts)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"beams": 0}, "beam=0: must be from 1 to 258, the size of the vocabulary"),
        ({"beams": 259}, "beam=259: must be from 1 to 258, the size of the vocabulary"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"length_penalty": float("nan")}, "length_penalty=nan: must be from -5 to 5"),
        ({"length_penalty": 6.0}, "length_penalty=6.0: must be from -5 to 5"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram=-1: must be 0 (no limit) or more"),
        ({"stop": [""]}, "a stop string is empty; give at least one character"),
        ({"max_tokens": 10**12}, "searching with 3 hypotheses of up to 1,000,000,000,000 tokens"),
    ],
)
def test_mistakes_are_one_line_errors(generator: Generator, options: Any, line: str) -> None:
    with pytest.raises(UserError) as error:
        generator.search("the", **{"beams": 3, "max_tokens": 4, **options})
    assert str(error.value).startswith(line)


@pytest.mark.long
def test_the_cache_of_full_attention_holds_all_but_the_last_token() -> None:
    generator = Generator(tiny.run_with("full", capacity=16))
    # bos and the prompt
    assert len(generator.search("the cat ", 2, 8)) == 2
    message = r"max_tokens=9: does not fit the model's cache of 16 after 9 tokens; give at most 8"
    with pytest.raises(UserError, match=message):
        generator.search("the cat ", 2, 9)
