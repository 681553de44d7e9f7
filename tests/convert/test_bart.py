"""A BART folder with its tokenizer: sources and targets have BART's special tokens around them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx

from famjax.cli.main import main
from famjax.convert.folder import convert
from famjax.core.errors import UserError
from famjax.data.pair_rows import Lengths, Pair, write_row
from famjax.eval.sampling import Sampling
from famjax.eval.translator import Translator
from famjax.experiment.load import load_config
from famjax.export.export import export
from famjax.tokenizers.load import load_tokenizer
from famjax.train.loop import train
from famjax.train.run import open_run

pytestmark = pytest.mark.usefixtures("one_device")
TEXTS = ["A dog runs.", "Two cats  sleep, he says.", "Ça: é 1", ""]
BOS, PAD, EOS, UNKNOWN = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random BART, as transformers writes it."""
    folder = tmp_path_factory.mktemp("bart") / "bart"
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "c"), ("d", "o"), ("Ġ", "r"), ("a", "t")]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *letters, *map("".join, merges), "<mask>"]
    ids = {token: i for i, token in enumerate(tokens)}
    transformers.BartTokenizer(vocab=ids, merges=merges).save_pretrained(folder)
    sides = {
        f"{side}_{size}": value
        for side in ("encoder", "decoder")
        for size, value in (("attention_heads", 2), ("ffn_dim", 24), ("layers", 1))
    }
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=len(ids),
            d_model=16,
            max_position_embeddings=48,
            forced_eos_token_id=None,
            **sides,
        )
    )
    with torch.no_grad():
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, EOS] += 5  # so that targets end
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.generation_config.update(forced_bos_token_id=BOS, num_beams=1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    convert(folder, folder.parent / "run", report=lambda line: None)
    return folder.parent / "run"


def test_ids_are_those_of_transformers(folder: Path) -> None:
    ours = load_tokenizer(str(folder))
    theirs = transformers.BartTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ids == ours.encode_source(text).tolist()
        assert ids == [*ours.encode_target(text).tolist(), ours.eos_id]
        assert ours.decode(ids) == text
        # texts of other tasks have none
        assert ours.encode(text).tolist() == ids[1:-1]
    assert (ours.start_id, ours.first_id) == (EOS, BOS)


def copied(folder: Path, target: Path, post_processor: Any) -> Path:
    """Copy a folder, with another post-processor in its tokenizer.json."""
    shutil.copytree(folder, target)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = post_processor
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


def test_a_damaged_post_processor_is_refused(folder: Path, tmp_path: Path) -> None:
    damaged = copied(folder, tmp_path / "damaged", {"type": "RobertaProcessing"})
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json; fetch it again"):
        load_tokenizer(str(damaged))


@pytest.mark.long
def test_another_tokenizer_keeps_the_start_of_targets(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "other", None)
    tokenizer = load_tokenizer(str(other))
    assert (tokenizer.start_id, tokenizer.first_id) == (BOS, None)
    convert(other, tmp_path / "run", report=lambda line: None)
    export(tmp_path / "run", tmp_path / "back", "hf")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["decoder_start_token_id"] == EOS


def test_a_row_has_the_inputs_and_labels_of_transformers(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    pair = Pair(*tokenizer.encode_pairs([(TEXTS[0], TEXTS[1])])[0])
    row = write_row([pair], tokenizer, Lengths(32, 40, 1))
    labels = torch.tensor([transformers.BartTokenizer.from_pretrained(folder)(TEXTS[1]).input_ids])
    shift = transformers.models.bart.modeling_bart.shift_tokens_right
    n = labels.shape[1]
    assert row["targets"][:n].tolist() == labels[0].tolist()
    assert row["tokens"][:n].tolist() == shift(labels, PAD, EOS)[0].tolist()


@pytest.mark.parametrize(
    ("beams", "ngram"),
    [(1, 0), *(pytest.param(*both, marks=pytest.mark.long) for both in ((4, 0), (1, 2), (3, 2)))],
)
def test_generation_is_that_of_transformers(
    folder: Path, run: Path, beams: int, ngram: int
) -> None:
    tokenizer = transformers.BartTokenizer.from_pretrained(folder)
    model = transformers.BartForConditionalGeneration.from_pretrained(folder).eval()
    translator = Translator(open_run(run), beams, no_repeat_ngram=ngram, max_tokens=20)
    found = translator.translate(TEXTS[:3])
    for text, ours in zip(TEXTS, found, strict=False):
        theirs = model.generate(
            **tokenizer(text, return_tensors="pt"),
            num_beams=beams,
            max_new_tokens=20,
            no_repeat_ngram_size=ngram,
            length_penalty=1.0,
            early_stopping="never" if beams > 1 else False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        written = theirs.sequences[0]
        assert written[:2].tolist() == [EOS, BOS]
        assert ours.text == tokenizer.decode(written, skip_special_tokens=True)
        assert ours.tokens == len(written) - 1
        if beams > 1:
            assert ours.score == pytest.approx(float(theirs.sequences_scores[0]), abs=1e-4)
    if beams == 4:
        assert len({each.tokens for each in found}) > 1
    if ngram:
        free = Translator(open_run(run), beams, max_tokens=20).translate(TEXTS[:3])
        assert [each.text for each in free] != [each.text for each in found]


def test_a_source_that_is_too_long_is_named_before_any_is_translated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sources").write_text(f"a dog\n{'a dog ' * 20}\n")
    (tmp_path / "targets").write_text("one\ntwo\n")
    files = f"translate:{tmp_path / 'sources'}={tmp_path / 'targets'}"
    for argv in (
        ["eval", str(run), "--tasks", files],
        ["generate", str(run), "--prompts", str(tmp_path / "sources")],
    ):
        assert main(argv) == 2
        out, error = capsys.readouterr()
        assert not out
        assert "source 2 has" in error
        assert "but the encoder only 48 learned positions" in error


@pytest.mark.long
def test_samples_begin_with_the_first_id(run: Path) -> None:
    opened, seen = open_run(run), []
    decode = opened.tokenizer.decode
    opened.tokenizer.decode = lambda ids: seen.append(list(ids)) or decode(ids)  # type: ignore[method-assign, func-returns-value]
    sampling = Sampling(jax.random.key(0), 5.0, 0, 1.0, opened.tokenizer.output_size)
    Translator(opened, sampling=sampling, batch=len(TEXTS), max_tokens=6).translate(TEXTS)
    assert {ids[0] for ids in seen} == {BOS}
    assert len({tuple(ids) for ids in seen}) > 1


@pytest.mark.long
def test_the_words_of_a_source_are_kept_and_told(folder: Path, run: Path, tmp_path: Path) -> None:
    quiet: Any = {"report": lambda line: None}
    cut = convert(folder, tmp_path / "cut", overrides=("data.source_words=2",), **quiet)
    assert cut.data.source_words == 2
    again = convert(tmp_path / "cut", tmp_path / "again", **quiet)
    assert again.data.source_words == 2
    translator = Translator(open_run(tmp_path / "again"), max_tokens=8)
    whole, part = translator.translate(["a dog can", "a dog"])
    assert whole == part
    export(tmp_path / "again", tmp_path / "back", "hf")
    assert "Cut sources to their first 2 words" in (tmp_path / "back" / "README.md").read_text()
    with pytest.raises(UserError, match=r"only model\.\* and data.source_words can be set here"):
        convert(folder, tmp_path / "other", overrides=("data.batch=2",), **quiet)


@pytest.mark.long
def test_merged_adapters_are_exported_as_a_bart(run: Path, tmp_path: Path) -> None:
    """With adapters in the encoder and in both attentions; transformers then has our texts."""
    for name, words in (("source", "a dog"), ("target", "Ça do")):
        (tmp_path / name).write_text(f"{words}\n" * 8)
    files = [f"data.{name}={tmp_path / name}" for name in ("source", "target")]
    shape = ["data.task=translate", "data.layout=pairs", "data.length=48", "data.source_length=24"]
    steps = ["data.batch=2", "train.steps=30", "optimizer.learning_rate=0.1"]
    given = [f"init={run}", "model.lora.rank=2", *files, *shape, *steps]
    tuned = train(load_config("text_fam", given), tmp_path / "tuned", quiet=True)
    adapters = nnx.to_flat_state(nnx.state(tuned.model, nnx.PathContains("b")))
    changed = {str(path) for path, b in adapters if np.abs(np.asarray(b[...])).max() > 0}
    for part in ("encoder", "cross", "mixer"):
        assert any(part in path for path in changed)

    export(tmp_path / "tuned", tmp_path / "bart", "hf")
    tokenizer = transformers.BartTokenizer.from_pretrained(tmp_path / "bart")
    model = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "bart").eval()
    ours = Translator(tuned, 1, max_tokens=20).translate(TEXTS[:3])
    before = Translator(open_run(run), 1, max_tokens=20).translate(TEXTS[:3])
    assert [each.text for each in ours] != [each.text for each in before]
    for text, found in zip(TEXTS, ours, strict=False):
        theirs = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=20)
        assert found.text == tokenizer.decode(theirs[0], skip_special_tokens=True)


@pytest.mark.long
def test_an_export_generates_the_same(folder: Path, run: Path) -> None:
    back = folder.parent / "back"
    export(run, back, "hf")
    written: Any = json.loads((back / "config.json").read_text())
    assert written["decoder_start_token_id"] == EOS
    assert written["forced_bos_token_id"] == BOS
    text = transformers.BartTokenizer.from_pretrained(back)(TEXTS[0], return_tensors="pt")
    first, second = (
        transformers.BartForConditionalGeneration.from_pretrained(one)
        .generate(**text, max_new_tokens=8)
        .numpy()
        for one in (folder, back)
    )
    np.testing.assert_array_equal(first, second)
    source = f"ids = [{BOS}, *text, {EOS}]  # a source"
    assert source in (back / "README.md").read_text()
