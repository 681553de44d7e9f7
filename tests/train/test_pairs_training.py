"""Runs on pairs: they learn, resume bit for bit, are evaluated, and say what is wrong with them."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import torch
from flax import nnx
from memories import MEMORIES
from small import Crash, assert_same, compiled_once, crash_at  # noqa: F401
from transformers import AutoModelForSeq2SeqLM

from famjax.config.schema import Config, EncoderConfig, ModelConfig
from famjax.convert.folder import convert
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.data.pair_rows import PairSource
from famjax.eval import translation_scores
from famjax.eval.sampling import Sampling
from famjax.eval.translate import evaluate
from famjax.eval.translation_scores import CorpusScore
from famjax.eval.translator import Translator, longest_source, padded_size
from famjax.experiment.checks import validate
from famjax.experiment.encoder_checks import check_encoder
from famjax.experiment.load import load_config, override
from famjax.experiment.memory import DeviceMemory
from famjax.export.export import export
from famjax.models.seq2seq import make_model
from famjax.parallel.sharding import path_name
from famjax.pipeline import make_source
from famjax.tasks.task import Request
from famjax.tokenizers.load import load_tokenizer
from famjax.train.loop import train
from famjax.train.metrics import read_metrics
from famjax.train.partition import inference_config, partition_trainable
from famjax.train.run import Run, open_run

LETTERS = "abcdefgh"


def write_pairs(folder: Path, count: int = 500, longest: int = 6) -> tuple[str, str]:
    """Write words, and what they are backwards; return the names of the files."""
    rng = random.Random(1)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, longest))) for _ in range(count)]
    files = folder / "words", folder / "backwards"
    folder.mkdir(parents=True, exist_ok=True)
    files[0].write_text("".join(f"{word}\n" for word in words))
    files[1].write_text("".join(f"{word[::-1]}\n" for word in words))
    return str(files[0]), str(files[1])


def config(folder: Path, *more: str) -> Config:
    source, target = write_pairs(folder)
    shape = [given for given in small.COMMAND if "block_len" not in given]
    keys = [
        *("model.block_len=1", "model.mixer=full", "model.capacity=32", "model.encoder.layers=1"),
        *("data.task=translate", "data.layout=pairs", f"data.source={source}"),
        *(f"data.target={target}", "data.length=32", "data.source_length=28"),
    ]
    return override(Config(), [*shape, *keys, *more])


def learned(folder: Path, *more: str) -> Run:
    """Return a run that has learned to write words backwards."""
    keys = ["model.width=32", "model.mlp_width=64", "data.batch=8", "optimizer.learning_rate=0.01"]
    keys += ["train.steps=450", "train.log_every=50", "train.checkpoint_every=450"]
    return train(config(folder, *keys, *more), folder / "run", quiet=True)


# the architecture of Marian
MARIAN = (
    "model.arch.positions=sinusoidal_halves model.arch.rotary_fraction=0 model.arch.pre_norm=false "
    "model.arch.logit_bias=true model.arch.embed_norm=true model.norm=layernorm model.mlp=swish"
)
BLOCKS = "model.block_len=4 model.fam_len=4"


def can_decode(keys: str) -> bool:
    encoder = Config(model=ModelConfig(encoder=EncoderConfig(layers=1)))
    return not any(check_encoder(override(encoder, keys.split())))


# those beside full attention take minutes
DECODERS = {name: f"{BLOCKS} {keys}" for name, keys in MEMORIES.items() if can_decode(keys)}
DECODERS["full"] = "model.mixer=full"
DECODERS["linear"] += " model.encoder.cross=linear"


def decoders(*quick: str, long: Sequence[str] = ()) -> Any:
    """Parametrize a test with the decoders, those that are neither quick nor long as slow."""
    marks = dict.fromkeys(DECODERS, pytest.mark.slow)
    marks |= dict.fromkeys(long, pytest.mark.long)
    return pytest.mark.parametrize(
        "name", [*quick, *(pytest.param(n, marks=marks[n]) for n in DECODERS if n not in quick)]
    )


def test_decoders_are_all_memories_but_those_without_attention_to_a_source() -> None:
    refused = set(MEMORIES) - set(DECODERS)
    assert refused == {"fm", "rmt", "autocompressor", "lstm"}


@pytest.mark.usefixtures("compiled_once")
@decoders("full")
def test_resume_after_crashes_is_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given = config(tmp_path, "train.steps=13", *DECODERS[name].split())
    reference, resumed = tmp_path / "once", tmp_path / "again"
    train(given, reference, quiet=True)
    for count in (4, 6):
        undo = crash_at(monkeypatch, count)
        with pytest.raises(Crash):
            train(given, resumed, quiet=True)
        undo()
    train(given, resumed, quiet=True)
    assert_same(reference, resumed, given)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_microbatches_add_up(tmp_path: Path) -> None:
    """Of equal batches the first steps have the same loss, whatever the number of microbatches."""
    losses = []
    for accumulate in (1, 2):
        given = config(tmp_path, "train.steps=4", f"train.accumulate={accumulate}")
        train(given, tmp_path / str(accumulate), quiet=True)
        losses.append(read_metrics(tmp_path / str(accumulate) / "metrics.jsonl")[-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_a_model_learns_to_write_words_backwards_and_is_evaluated(tmp_path: Path) -> None:
    tasks = f"translate:{tmp_path / 'words'}={tmp_path / 'backwards'}"
    run = learned(tmp_path, f"eval.tasks={tasks}", "eval.every=450", "eval.examples=40")
    words = ["abcd", "hg", "fedcba", "aab"]
    for beams in (1, 3):
        found = Translator(run, beams, batch=4).translate(words)
        assert [each.text for each in found] == [word[::-1] for word in words]
        assert [each.tokens for each in found] == [len(word) + 1 for word in words]
        (spaced,) = Translator(run, beams, batch=4).translate([" abcd\n"])
        assert spaced.score == pytest.approx(found[0].score, abs=1e-5)
        assert not any(each.cut for each in found)
    sampling = Sampling(jax.random.key(0), 0.01, 0, 1.0, run.tokenizer.vocab_size)
    sampled = Translator(run, batch=4, sampling=sampling).translate(words)
    assert [each.text for each in sampled] == [word[::-1] for word in words]
    wild = Translator(run, batch=4, sampling=sampling._replace(temperature=9.0)).translate(words)
    assert [each.text for each in wild] != [each.text for each in sampled]
    folder = tmp_path / "run" / "eval"
    files = tasks.removeprefix("translate:")
    request = Request("translate", files, examples=40, batch=16, folder=folder, quiet=True, beam=2)
    result = evaluate(run, request)
    assert result["pairs"] == 40
    assert result["chrf"] > 85
    assert result["signatures"]["bleu"].startswith("nrefs:1|case:mixed")
    assert result["longer"] == 0
    assert (result["unread_sources"], result["unwritten_targets"]) == (0, 0)
    cut = replace(run, config=override(run.config, ["data.source_words=1"]))
    (tmp_path / "two words").write_text("zwei worte\nwort\n")
    words = Request("translate", f"{tmp_path / 'two words'}={tmp_path / 'two words'}", quiet=True)
    assert evaluate(cut, words)["cut_sources"] == 1
    both = Translator(cut).translate(["zwei worte", "zwei"])
    assert both[0].source_tokens == both[1].source_tokens
    greedy = evaluate(run, Request("translate", files, examples=40, quiet=True))
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["translate"] == greedy["bleu"]
    _, *lines = (folder / result["examples"]).read_text().splitlines()
    first = json.loads(lines[0])
    assert first["prompt"][::-1] == first["references"][0]
    tuned = evaluate(run, request._replace(tune=True))
    penalties = dict(tuned["penalties"])
    assert penalties[1.0] == result["bleu"]
    assert tuned["bleu"] == max(penalties.values()) == penalties[tuned["length_penalty"]]
    # one search writes what one for each penalty does
    for penalty in (0.0, 0.6, 2.0):
        alone = evaluate(run, request._replace(length_penalty=penalty, folder=None))
        assert penalties[penalty] == alone["bleu"]
    # the outputs are kept: nothing is written anew
    again = evaluate(run, request)
    assert again == result


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_the_checkpoint_with_the_best_bleu_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BLEU is scored once before the first step, and then every two steps; more is better."""
    values = [0.0, 10.0, 30.0, 20.0]
    hypotheses: list[Sequence[str]] = []

    def bleu(written: Sequence[str], references: Sequence[str], how: Any) -> CorpusScore:
        hypotheses.append(written)
        assert how == "none"  # the files are tokenized
        assert references == [word[::-1] for word in words[: len(written)]]
        return CorpusScore(values[len(hypotheses) - 1], "")

    monkeypatch.setattr(translation_scores, "bleu", bleu)
    keys = ["train.steps=6", "train.log_every=2", "train.keep=1", "eval.every=2"]
    tasks = f"eval.tasks=translate:{tmp_path / 'words'}={tmp_path / 'backwards'}"
    search = ["eval.examples=3", "eval.beam=2", "eval.tokenized=true"]
    given = config(tmp_path, *keys, tasks, *search, "eval.best=translate")
    words = (tmp_path / "words").read_text().split()
    run = train(given, tmp_path / "run")
    assert [len(written) for written in hypotheses] == [1, 3, 3, 3]
    scores = [row["translate"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert scores == values[1:]
    assert "step 4: translate 30.0000, the best so far, is kept" in capsys.readouterr().err
    best = open_run(tmp_path / "run" / "best")
    assert (best.step, run.step) == (4, 6)
    # its outputs are those that were scored
    found = Translator(best, beams=2, batch=8).translate(words[:3])
    assert [each.text for each in found] == hypotheses[2]


@pytest.mark.long
def test_a_source_that_is_too_long_is_told_before_the_first_step(tmp_path: Path) -> None:
    """Of all that evaluations will read, although the trial translates one only."""
    for name in ("long", "short"):
        (tmp_path / name).write_text(f"abc\nabc\n{'abc ' * (9 if name == 'long' else 1)}\n")
    keys = ["eval.every=4", f"eval.tasks=translate:{tmp_path / 'long'}={tmp_path / 'short'}"]
    learned = ["model.arch.positions=learned", "model.capacity=32", "train.steps=4"]
    with pytest.raises(UserError, match=r"source 3 has \d+ tokens, but the encoder only 32"):
        train(config(tmp_path, *keys, *learned, "eval.examples=0"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    "keys",
    [
        "model.encoder.cross=linear model.encoder.features=8",
        pytest.param("model.stack=feedback model.feedback.span=16", marks=pytest.mark.long),
        pytest.param("model.mixer=fam model.block_len=4 model.fam_len=4", marks=pytest.mark.slow),
        pytest.param("model.mixer=linear", marks=pytest.mark.slow),
    ],
)
def test_other_decoders_train_and_write(tmp_path: Path, keys: str) -> None:
    run = train(config(tmp_path, "train.steps=3", *keys.split()), tmp_path / "run", quiet=True)
    texts = ["abc", "d", "efgh"]
    found = Translator(run, 2, batch=2).translate(texts)
    # a text's translation does not depend on the others of its batch
    alone = [Translator(run, 2, batch=1).translate([text])[0] for text in texts]
    assert [each.text for each in found] == [each.text for each in alone]
    scores = [[each.score for each in both] for both in (found, alone)]
    np.testing.assert_allclose(*scores, rtol=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_pairs_left_out_are_told_after_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(tmp_path, "train.steps=40", "train.log_every=5")
    (tmp_path / "words").write_text("ab\n" * 50 + "a" * 60 + "\n")
    (tmp_path / "backwards").write_text("ba\n" * 50 + "b" * 60 + "\n")
    monkeypatch.setattr(PairSource.__init__, "__defaults__", (10, False))
    train(given, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("1 of 51 pairs is longer than data.source_length=28") == 1


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_the_time_of_compiling_does_not_count(tmp_path: Path) -> None:
    run = train(config(tmp_path, "train.steps=1"), tmp_path / "run", quiet=True)
    jax.clear_caches()
    for length_penalty in (1.0, 0.5):
        translator, began = Translator(run, 2, length_penalty, batch=2), time.perf_counter()
        translator.translate(["abc", "d", "a" * 40])
        took = time.perf_counter() - began
        assert 0 < translator.seconds < took
        if length_penalty == 1:
            compiled = took
            # two programs are compiled, and run for milliseconds
            assert translator.seconds < took / 4
        else:
            assert took < compiled / 4  # and are not compiled again


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_a_translation_depends_on_no_other_source(tmp_path: Path) -> None:
    """An untrained model writes on to the most tokens of its source."""
    run = train(
        config(tmp_path, "train.steps=1", "model.capacity=99", "data.length=64"),
        tmp_path / "run",
        quiet=True,
    )
    texts = ["abc", "abcdefgh" * 4, "h"]
    together = Translator(run, batch=3).translate(texts)
    for text, each in zip(texts, together, strict=True):
        (alone,) = Translator(run, batch=1).translate([text])
        assert (alone.text, alone.tokens, alone.cut) == (each.text, each.tokens, each.cut)
    cut = {each.tokens for each in together if each.cut}
    assert cut
    # twice the source's and 16 more, and at most those of the longest target in training
    assert cut <= {48, 64}
    longer = Translator(run, batch=3, max_tokens=99).translate(texts)
    assert max(each.tokens for each in longer) == 99
    # trained on 28 tokens
    translator = Translator(run)
    assert [each.source_tokens > translator.longest for each in together] == [False, True, False]


@pytest.mark.usefixtures("compiled_once")
def test_a_beam_that_cannot_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(config(tmp_path, "train.steps=1"), tmp_path / "run", quiet=True)
    small = DeviceMemory(1000, "this machine has")
    monkeypatch.setattr("famjax.experiment.memory.device_memory", lambda devices: small)
    with pytest.raises(UserError, match=r"^decoding 2 sources at a time with --beam 5 would take"):
        Translator(run, beams=5, batch=2).translate(["abc"])


def test_sources_are_padded_to_few_sizes() -> None:
    lengths = [1, 16, 17, 48, 49, 64, 65, 96, 97, 128, 129, 192, 193, 256, 1024, 1025]
    sizes = [16, 16, 32, 48, 64, 64, 96, 96, 128, 128, 192, 192, 256, 256, 1024, 1536]
    assert [padded_size(length) for length in lengths] == sizes


@pytest.mark.usefixtures("compiled_once")
def test_outputs_at_the_most_tokens_are_cut_and_counted(tmp_path: Path) -> None:
    """An untrained model writes on. A cache of 32 has room for bos and 31 tokens, and the last one
    that beam search writes needs none."""
    run = train(
        config(tmp_path, "train.steps=1", "model.capacity=32"), tmp_path / "run", quiet=True
    )
    words = (tmp_path / "words").read_text().split()[:10]
    found = Translator(run, batch=8).translate(words)
    assert {each.tokens for each in found if each.cut} == {32}
    sampling = Sampling(jax.random.key(0), 0.0, 0, 1.0, run.tokenizer.vocab_size)
    sampled = Translator(run, batch=8, sampling=sampling).translate(words)
    assert {each.tokens for each in sampled if each.cut} == {31}
    for max_tokens, said in ((0, "must be at least 1"), (33, "model.capacity=32; give at most 32")):
        with pytest.raises(UserError, match=f"^max_tokens={max_tokens}: .*{said}"):
            Translator(run, max_tokens=max_tokens)
    files = f"{tmp_path / 'words'}={tmp_path / 'backwards'}"
    result = evaluate(run, Request("translate", files, examples=10, quiet=True))
    assert result["cut"] == sum(each.cut for each in found)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_samples_depend_on_the_number_of_the_source_alone(tmp_path: Path) -> None:
    run = train(config(tmp_path, "train.steps=1"), tmp_path / "run", quiet=True)
    sampling = Sampling(jax.random.key(0), 1.0, 0, 1.0, run.tokenizer.vocab_size)
    one, three = (
        [each.text for each in Translator(run, batch=batch, sampling=sampling).translate(texts)]
        for batch, texts in ((1, ["abc", "abc", "d"]), (3, ["abc", "abc", "d"]))
    )
    assert one == three
    assert one[0] != one[1]


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_maps_of_cross_attention_are_trained_with_adapters_and_alone(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    train(config(tmp_path, "train.steps=1"), teacher, quiet=True)
    linear = [f"init={teacher}", "model.encoder.cross=linear", "train.steps=2"]
    trained = {}
    for name in ("model.lora.rank=2", "train.only=maps"):
        run = train(config(tmp_path, *linear, name), tmp_path / name, quiet=True)
        assert run.model.stack.layers[0].cross.map.kernel[...].shape == (1, 1, 8, 32)
        model = inference_config(run.config.model)
        _, params, _ = partition_trainable(model, run.model, run.config.train.only)
        trained[name] = {path_name(path) for path, _ in jax.tree.leaves_with_path(params)}
    maps = {f"stack/layers/0/cross/map/{part}" for part in ("kernel", "bias")}
    assert trained["train.only=maps"] == maps
    assert maps < trained["model.lora.rank=2"]
    assert all("lora" in name for name in trained["model.lora.rank=2"] - maps)


@pytest.mark.long
def test_adapters_of_an_encoder_decoder_merge_to_the_same_model(tmp_path: Path) -> None:
    """Of Marian's architecture, with adapters in the encoder and in both attentions."""
    base = config(tmp_path, "train.steps=1", *MARIAN.split())
    train(base, tmp_path / "base", quiet=True)
    adapters = ("model.lora.rank=2", "optimizer.learning_rate=0.05", "train.steps=3")
    given = config(tmp_path, f"init={tmp_path / 'base'}", *adapters, *MARIAN.split())
    run = train(given, tmp_path / "tuned", quiet=True)
    changed = {
        str(path[:-1])
        for path, b in nnx.to_flat_state(nnx.state(run.model, nnx.PathContains("b")))
        if np.abs(np.asarray(b[...])).max() > 0
    }
    for part in ("encoder", "cross", "mixer"):
        assert any(part in path for path in changed)
    words = ["abcd", "hg", "xyzzy"]
    merged = open_run(tmp_path / "tuned").merge_adapters()
    assert merged.config.model.lora.rank == 0
    (before, after) = (Translator(one, 2).translate(words) for one in (run, merged))
    for ours, other in zip(before, after, strict=True):
        assert ours.text == other.text
        assert ours.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize(
    ("mixer", "block"), [("full", 1), ("linear", 1), ("bswa", 8), ("full,bswa", 8)]
)
def test_targets_are_aligned_only_for_layers_that_read_blocks(
    mixer: str, block: int, tmp_path: Path
) -> None:
    keys = (f"model.mixer={mixer}", "model.layers=2", "model.block_len=8")
    run = config(tmp_path, *keys)
    tokenizer = load_tokenizer(run.data.tokenizer)
    assert make_source(run, tokenizer).lengths.block == block


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    named = [
        *(f"data.source={tmp_path / 'words'}", f"data.target={tmp_path / 'backwards'}"),
        *("data.layout=pairs", "model.mixer=full", "model.block_len=1", "model.encoder.layers=2"),
    ]
    pairs = ["data.task=translate", *named]

    def refused(*more: str) -> str:
        with pytest.raises(UserError) as error:
            load_config("text_fam", [*pairs, *more])
        return str(error.value)

    assert "data.task=translate needs an encoder" in refused("model.encoder.layers=0")
    assert "set data.layout=pairs" in refused("data.layout=lanes")
    assert "data.task=text has no sources" in refused("data.task=text")
    assert "model.stack=lstm has no attention to an encoder" in refused("model.stack=lstm")
    assert "feedback memory segments applies" in refused("model.mixer=fm", "model.block_len=8")
    assert "train.rsp=0.5 is for packed rows" in refused("train.rsp=0.5")
    positions = ("model.arch.positions=learned", "model.capacity=64", "model.mixer=bswa")
    assert "longer than model.capacity=64, the encoder's learned" in refused(*positions)
    assert "has no such norm" in refused(
        "model.stack=feedback", "model.block_len=1", "model.arch.embed_norm=true"
    )
    assert "position_offset: has no effect with model.arch.positions=none" in refused(
        "model.arch.position_offset=2"
    )
    assert "reads each row whole" in refused("train.bptt_segments=2")
    assert "does not support an encoder, model.encoder.layers=2; set false" in refused(
        "model.mixer=linear", "train.match=true", "train.only=maps"
    )
    assert "model.encoder.features: has no effect" in refused("model.encoder.features=8")
    assert "has no rows of text, data.text_rows=1" in refused("data.text_rows=1")
    linear = "model.encoder.cross=linear"
    assert "model.encoder.features=7 is odd; rfa has a sine" in refused(
        linear, "model.encoder.features=7", "model.linear.map=rfa"
    )


def test_a_batch_of_no_sources_is_refused() -> None:
    import tiny

    shape = replace(tiny.SHAPE, mixer="full", block_len=1, encoder=EncoderConfig(layers=1))
    run = replace(tiny.run(), model=make_model(shape, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="batch=0: must be at least 1"):
        Translator(run, batch=0)


def test_a_model_without_an_encoder_does_not_translate() -> None:
    import tiny

    with pytest.raises(UserError, match=r"no encoder, model\.encoder\.layers=0"):
        Translator(tiny.run())


@pytest.mark.parametrize(
    ("step", "positions", "longest"), [(1, "none", 28), (0, "none", None), (0, "learned", 64)]
)
def test_the_longest_source_of_a_converted_model_is_that_of_its_positions(
    tmp_path: Path, step: int, positions: str, longest: int | None
) -> None:
    given = config(tmp_path)
    arch = replace(given.model.arch, positions=positions)
    model = replace(given.model, capacity=64, arch=arch)
    run: Any = SimpleNamespace(config=replace(given, model=model), step=step)
    assert longest_source(run) == longest


@pytest.mark.usefixtures("compiled_once")
@decoders("full", long=("feedback", "fam-gated", "delta"))
def test_exports_equal_the_run(tmp_path: Path, name: str) -> None:
    assert_exports(tmp_path, DECODERS[name])


@pytest.mark.slow
def test_exports_of_a_recurrent_marian_equal_the_run(tmp_path: Path) -> None:
    assert_exports(tmp_path, f"{MARIAN} model.encoder.cross=linear model.mixer=linear")


def assert_exports(tmp_path: Path, keys: str) -> None:
    given = config(tmp_path, "train.steps=1", *keys.split())
    train(given, tmp_path / "run", quiet=True)
    lines = export(tmp_path / "run", tmp_path / "stablehlo", "stablehlo")
    assert any(line.startswith("compared with the programs read back") for line in lines)
    # 32 features are more than the projections have outputs
    not_folded = any("feature maps of causal attention are not" in line for line in lines)
    assert not_folded == ("linear" in keys)
    # the README's code runs without famjax
    readme = (tmp_path / "stablehlo" / "README.md").read_text()
    names: dict[str, Any] = {"FOLDER": str(tmp_path / "stablehlo")}
    exec(re.findall(r"```python\n(.*?)```", readme, re.S)[0], names)
    assert names["logits"].shape == (2, 1, 258)
    # and writes what famjax writes
    run = open_run(tmp_path / "run")
    (ours,) = Translator(run, max_tokens=20).translate(["\x01\x02"])
    written = np.stack(names["targets"], 1)[0, : ours.tokens]
    assert ours.text == run.tokenizer.decode(written if ours.cut else written[:-1])
    if "linear" in keys:
        return
    lines = export(tmp_path / "run", tmp_path / "orbax", "orbax")
    assert any("famjax opening it as a run" in line for line in lines)
    with pytest.raises(UserError, match=r"--format peft: does not support an encoder"):
        export(tmp_path / "run", tmp_path / "peft", "peft")


def assert_searches_equal(run: Run, model: Any, beams: int, length_penalty: float) -> None:
    """Compare with what transformers finds, of words that the run has not learned too."""
    words = ["abcd", "hg", "xyzzy", "Ein Hund", ""]
    found = Translator(run, beams, length_penalty, batch=4).translate(words)
    for word, ours in zip(words, found, strict=True):
        ids = torch.tensor([[*run.tokenizer.encode(word).tolist(), run.tokenizer.eos_id]])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beams,
            length_penalty=length_penalty,
            max_new_tokens=32,
            early_stopping="never",
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        written = theirs.sequences[0, 1:].numpy()
        assert len(written) == ours.tokens
        assert run.tokenizer.decode(written[: ours.tokens - (not ours.cut)]) == ours.text
        assert float(theirs.sequences_scores[0]) == pytest.approx(ours.score, abs=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once", "remote_code")
def test_transformers_generates_what_the_run_writes(tmp_path: Path) -> None:
    """An exported encoder-decoder, loaded with the code in its folder by its README."""
    blocks = ("model.block_len=4", "model.fam_len=4", "model.encoder.shared=false")
    run = learned(tmp_path, "model.mixer=fam", *blocks)
    said = export(tmp_path / "run", tmp_path / "hf", "hf")
    assert sum(line.startswith("compared with") for line in said) == 3
    # famjax reads it back
    again = Translator(open_model(tmp_path / "hf"), beams=3, batch=4)
    words = ["abcd", "hg", "fedcba"]
    assert [each.text for each in again.translate(words)] == [word[::-1] for word in words]
    readme = (tmp_path / "hf" / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", readme, re.S)[0].replace("Once upon a time", "abcd")
    names: dict[str, Any] = {"FOLDER": str(tmp_path / "hf")}
    exec(code, names)
    assert names["tokenizer"].decode(names["written"], skip_special_tokens=True) == "dcba"
    assert run.tokenizer.eos_id == names["ids"][-1]
    assert_searches_equal(run, names["model"], 3, 0.6)
    # the decoder can have another attention
    convert(tmp_path / "hf", tmp_path / "converted", "bswa")
    model = open_model(tmp_path / "converted").config.model
    assert (model.mixer, model.encoder.layers, model.encoder.shared) == ("bswa", 1, False)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_a_marian_that_was_trained_here_reads_its_longest_source(tmp_path: Path) -> None:
    """The table of transformers has positions for sources, which are longer than targets."""
    arch = ("qkv_bias", "out_bias", "mlp_bias", "logit_bias")
    keys = [f"model.arch.{key}=true" for key in arch]
    keys += ["model.arch.positions=sinusoidal_halves", "model.arch.rotary_fraction=0"]
    keys += ["model.arch.pre_norm=false", "model.arch.norm_eps=1e-5", "model.norm=layernorm"]
    keys += ["model.mlp=swish", "model.kv_heads=2", "model.capacity=16", "data.length=16"]
    run = train(config(tmp_path, *keys, "train.steps=1"), tmp_path / "run", quiet=True)
    export(tmp_path / "run", tmp_path / "hf", "hf")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    assert type(model).__name__ == "MarianMTModel"
    sources, targets = (np.random.default_rng(0).integers(258, size=(2, n)) for n in (28, 16))
    with torch.no_grad():
        theirs = model(torch.tensor(sources), decoder_input_ids=torch.tensor(targets)).logits
    read = run.model.read_source(jnp.asarray(sources), jnp.ones_like(sources))
    ours, _ = run.model(jnp.asarray(targets), run.model.init_state(2), Context(source=read))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once", "remote_code")
@pytest.mark.parametrize(
    "keys",
    [
        "model.mixer=linear model.linear.rope=false model.encoder.cross=linear",
        "model.stack=feedback model.feedback.span=6",
    ],
)
def test_transformers_generates_with_decoders_of_constant_state(tmp_path: Path, keys: str) -> None:
    run = learned(tmp_path, "train.steps=60", *keys.split())
    said = export(tmp_path / "run", tmp_path / "hf", "hf")
    assert any(line.startswith("compared with transformers ") for line in said)
    words = ["abcd", "hg", "fedcba"]
    ours, again = (
        [each.text for each in Translator(each, beams=3, batch=4).translate(words)]
        for each in (run, open_model(tmp_path / "hf"))
    )
    assert ours == again
    # with the code in the folder
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    assert_searches_equal(run, model, 3, 0.6)


@pytest.mark.long
@pytest.mark.parametrize("keys", ["model.encoder.cross=linear", pytest.param(MARIAN, id="marian")])
def test_any_mesh_gives_the_loss_of_one_device(tmp_path: Path, keys: str) -> None:
    assert_same_loss_on_a_mesh(tmp_path, keys)


@decoders(long=("fam-gated",))
def test_any_mesh_gives_the_loss_of_one_device_with_any_decoder(tmp_path: Path, name: str) -> None:
    assert_same_loss_on_a_mesh(tmp_path, DECODERS[name])


def assert_same_loss_on_a_mesh(tmp_path: Path, keys: str) -> None:
    meshes = ["mesh.data=1 mesh.fsdp=1 mesh.tensor=1", "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"]
    losses = []
    for number, mesh in enumerate(meshes):
        more = ["data.batch=8", "model.kv_heads=2", "train.steps=4", *keys.split()]
        given = config(tmp_path, *more, *(mesh.split() if number else ()))
        folder = tmp_path / str(number)
        if number:
            train(given, folder, quiet=True)
        else:
            with small.shared_programs():
                train(given, folder, quiet=True)
        losses.append(read_metrics(folder / "metrics.jsonl")[-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_more_hypotheses_than_tokens_are_refused_before_any_step(tmp_path: Path) -> None:
    source, target = write_pairs(tmp_path)
    tasks = [f"eval.tasks=translate:{source}={target}", "eval.every=4", "eval.beam=300"]
    with pytest.raises(UserError, match=r"eval\.beam=300: more hypotheses than .* 258 tokens"):
        train(config(tmp_path, *tasks), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_encoder_is_not_sharded_over_tokens(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mesh\.sequence=2: .* the whole source; set 1"):
        validate(config(tmp_path, "mesh.sequence=2"))
