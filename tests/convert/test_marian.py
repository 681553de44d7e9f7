"""A Marian folder with its tokenizer: converted, searched, exported, made recurrent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from contracts import harness
from flax import nnx
from safetensors.numpy import load_file, save_file

from famjax import load_pretrained
from famjax.cli.main import main
from famjax.config.schema import LinearConfig
from famjax.convert.folder import convert
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.eval.translator import Translator
from famjax.export.export import export
from famjax.export.tokenizer import write_tokenizer
from famjax.layers.positions import sinusoids
from famjax.models.fold_feature_maps import fold_feature_maps, folding_notes
from famjax.models.seq2seq import Seq2Seq
from famjax.tokenizers.load import load_saved_tokenizer, load_tokenizer, save_tokenizer
from famjax.train.run import open_run

pytestmark = pytest.mark.usefixtures("one_device")
GERMAN = ["Ein Hund rennt über die Wiese.", "Zwei Katzen schlafen.", "Die Wiese ist grün, sagt er."]
ENGLISH = ["A dog runs across the meadow.", "Two cats sleep.", "The meadow is green, he says."]
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 48}
SIDES = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
SIDES |= {f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")}


def write_models(folder: Path) -> dict[str, int]:
    """Write SentencePiece models of both languages; return the table of their pieces."""
    pieces: dict[str, None] = {}
    for name, texts in (("source", GERMAN), ("target", ENGLISH)):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts * 20),
            model_prefix=str(folder / name),
            model_type="unigram",
            vocab_size=40,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        pieces |= {model.id_to_piece(i): None for i in range(3, model.vocab_size())}
    known = ["</s>", "<unk>", *pieces, ">>eng<<", "<pad>"]
    return {piece: token for token, piece in enumerate(known)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random Marian model, as transformers writes it."""
    folder = tmp_path_factory.mktemp("marian") / "opus"
    folder.mkdir()
    ids = write_models(folder)
    (folder / "vocab.json").write_text(json.dumps(ids))
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    tokenizer = transformers.MarianTokenizer(*files, source_lang="de", target_lang="en")
    torch.manual_seed(0)
    pad = ids["<pad>"]
    config = transformers.MarianConfig(
        **SIZES | SIDES,
        vocab_size=len(ids),
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=0,
        bos_token_id=0,
        forced_eos_token_id=None,
        bad_words_ids=[[pad]],
        num_beams=4,
    )
    model = transformers.MarianMTModel(config)
    with torch.no_grad():
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] += 1.5  # of </s>, so that targets end
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(folder: Path) -> tuple[Path, list[str]]:
    """Return the converted folder, and the lines of the conversion."""
    said: list[str] = []
    convert(folder, folder.parent / "run", report=said.append)
    return folder.parent / "run", said


TEXTS = [*GERMAN, "  Zwei   Hunde.", ">>eng<< Ein Hund", "Ça: 123 \u2581 x", ""]


def test_ids_are_those_of_transformers(folder: Path) -> None:
    ours = load_tokenizer(str(folder))
    theirs = transformers.MarianTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs(text).input_ids == [*ours.encode(text).tolist(), ours.eos_id]
    for text in ENGLISH:
        ids = theirs(text_target=text).input_ids
        assert ids == [*ours.encode_target(text).tolist(), ours.eos_id]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text
    assert ours.bos_id == theirs.pad_token_id == ours.output_size
    assert ours.vocab_size == len(theirs)


def test_sinusoids_are_those_of_transformers() -> None:
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(512, 64).create_weight().numpy()
    ours = sinusoids(jnp.arange(512), 64, halves=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_conversion_compares_logits(converted: tuple[Path, list[str]]) -> None:
    run, said = converted
    assert "logits with the source's attention equal Hugging Face's" in said[-1]
    assert not any("--to" in line for line in said)
    config = open_run(run).config
    assert (config.data.task, config.data.layout) == ("translate", "pairs")
    assert config.model.arch.positions == "sinusoidal_halves"


@pytest.mark.long
def test_a_source_beyond_the_models_positions_is_told(
    converted: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    positions = open_run(converted[0]).config.model.capacity
    text = " ".join([GERMAN[0]] * positions)
    generate = ["generate", str(converted[0]), "--max-tokens", "2", "--prompt"]
    assert main([*generate, text]) == 0
    error = capsys.readouterr().err
    assert f"the source has more than {positions} tokens, the most that were trained on" in error
    assert main([*generate, GERMAN[0]]) == 0
    assert "the source has" not in capsys.readouterr().err


@pytest.mark.long
def test_beam_search_is_that_of_transformers(
    folder: Path, converted: tuple[Path, list[str]]
) -> None:
    lengths = set()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    translator = Translator(open_run(converted[0]), 4, max_tokens=24)
    penalties = (1.0, 0.6)
    for penalty, ours in zip(penalties, translator.translate_each(GERMAN, penalties), strict=True):
        for text, found in zip(GERMAN, ours, strict=True):
            theirs = model.generate(
                **tokenizer(text, return_tensors="pt"),
                num_beams=4,
                max_new_tokens=24,
                length_penalty=penalty,
                early_stopping="never",
                return_dict_in_generate=True,
                output_scores=True,
            )
            written = tokenizer.decode(theirs.sequences[0], skip_special_tokens=True)
            assert found.text.strip() == written.strip()
            assert found.score == pytest.approx(float(theirs.sequences_scores[0]), abs=1e-4)
            assert found.tokens == len(theirs.sequences[0]) - 1
            lengths.add(found.tokens)
    assert len(lengths) > 1


@pytest.mark.long
def test_an_export_restores_the_folder(folder: Path, converted: tuple[Path, list[str]]) -> None:
    back = folder.parent / "back"
    said = export(converted[0], back, "hf")
    assert sum(line.startswith("compared with") for line in said) == 3
    before, after = (load_file(one / "model.safetensors") for one in (folder, back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])
    for name in ("source.spm", "target.spm", "vocab.json"):
        assert (folder / name).read_bytes() == (back / name).read_bytes()
    text = transformers.MarianTokenizer.from_pretrained(back)(GERMAN[0], return_tensors="pt")
    first, second = (
        transformers.MarianMTModel.from_pretrained(one).generate(**text, max_new_tokens=8)
        for one in (folder, back)
    )
    assert first.tolist() == second.tolist()


def test_transformers_reads_an_exported_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Also beside a config.json of our own, which says nothing of Marian's class."""
    source, target = copied(folder, tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "famjax"}')
    # as Helsinki-NLP's
    languages = {"target_lang": "en", "source_lang": "de"}
    (source / "tokenizer_config.json").write_text(json.dumps(languages))
    tokenizer = load_tokenizer(str(source))
    assert write_tokenizer(tokenizer, target)[0].startswith("compared with transformers' AutoTok")
    written = json.loads((target / "tokenizer_config.json").read_text())
    assert written == languages | {"tokenizer_class": "MarianTokenizer"}
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": 1}')
    said = write_tokenizer(tokenizer, target)
    assert said == ["transformers' AutoTokenizer cannot read the tokenizer: take famjax's"]


@pytest.mark.long
def test_a_recurrent_model_has_folded_maps(folder: Path) -> None:
    """T2R of both attentions; with positions at the embedding all maps fold (Equation 8)."""
    config, _ = load_pretrained(folder)
    linear = config.encoder.__class__(1, "linear", 6)
    changed, model = load_pretrained(
        folder, mixer="linear", linear=LinearConfig(features=4), encoder=linear
    )
    graph, params = nnx.split(model)
    params = jax.tree.map(
        lambda a, b: jnp.asarray(b, a.dtype), params, harness.perturb_params(params)
    )
    model = nnx.merge(graph, params)
    assert folding_notes(changed) == []
    folded = fold_feature_maps(model, changed)
    maps = [path for path, _ in nnx.to_flat_state(nnx.state(folded)) if "map" in path]
    assert maps == []
    tokens = np.random.default_rng(0).integers(0, changed.vocab_size, (2, 7))

    @nnx.jit
    def logits(model: Seq2Seq) -> Any:
        ctx = Context(source=model.read_source(tokens, jnp.ones_like(tokens)))
        return model(tokens, model.init_state(2), ctx)[0]

    before, after = np.asarray(logits(model)), np.asarray(logits(folded))
    assert np.abs(before - after).max() < 1e-5 * np.ptp(before)


@pytest.mark.long
def test_a_conversion_to_t2r_keeps_all_weights(folder: Path) -> None:
    target = folder.parent / "t2r"
    assert (
        main(["convert", str(folder), str(target), "--to", "t2r", "model.encoder.cross=linear"])
        == 0
    )
    run = open_run(target)
    assert run.config.model.mixer == "linear"
    found = Translator(run.with_folded_maps(), 2, max_tokens=8).translate(GERMAN[:1])
    again = Translator(run, 2, max_tokens=8).translate(GERMAN[:1])
    assert found[0].text == again[0].text
    assert found[0].score == pytest.approx(again[0].score, abs=1e-5)
    # in transformers, too, padding is never generated
    export(target, folder.parent / "t2r-hf", "hf")
    settings = json.loads((folder.parent / "t2r-hf" / "generation_config.json").read_text())
    pad = json.loads((folder / "vocab.json").read_text())["<pad>"]
    assert settings["bad_words_ids"] == [[pad]]


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy a folder, with other values in its config.json."""
    shutil.copytree(folder, target)
    hf = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(hf | changes))
    return target


def test_copies_of_fixed_tensors_are_checked(folder: Path, tmp_path: Path) -> None:
    """Older folders have the sinusoids, and the embedding more than once."""
    older = copied(folder, tmp_path / "older")
    tensors = load_file(folder / "model.safetensors")
    name = "model.decoder.embed_positions.weight"
    fixed = np.asarray(sinusoids(jnp.arange(48), 16, halves=True))
    copy = {"lm_head.weight": tensors["model.shared.weight"], name: fixed}
    save_file(tensors | copy, older / "model.safetensors")
    load_pretrained(older)
    save_file(tensors | copy | {name: fixed[::-1].copy()}, older / "model.safetensors")
    with pytest.raises(UserError, match=f"{name}: holds no sinusoids"):
        load_pretrained(older)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder_vocab_size": 7}, "decoder_vocab_size=7 is not vocab_size="),
        ({"encoder_ffn_dim": 8}, "encoder_ffn_dim=8 and decoder_ffn_dim=24: .* the same sizes"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false with share_encoder_decoder"),
        ({"normalize_before": True}, "normalize_before=True is not supported for marian"),
        ({"activation_function": "mish"}, "activation_function='mish' is not supported"),
    ],
)
def test_other_models_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        load_pretrained(copied(folder, tmp_path / "other", **changes))


def test_an_incomplete_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    lacking = copied(folder, tmp_path / "lacking")
    (lacking / "target.spm").unlink()
    with pytest.raises(UserError, match=r"target\.spm: No such file.*copy all of them"):
        load_tokenizer(str(lacking))
    (lacking / "target.spm").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"target\.spm: not a SentencePiece model"):
        load_tokenizer(str(lacking))
    (lacking / "vocab.json").write_text('{"</s>": 0, "<pad>": 1, "<unk>": 2}')
    shutil.copy(folder / "target.spm", lacking / "target.spm")
    with pytest.raises(UserError, match=r"vocab\.json: <pad> has the id 1, and must have the last"):
        load_tokenizer(str(lacking))
    (lacking / "vocab.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"vocab\.json: has no </s>"):
        load_tokenizer(str(lacking))
    (lacking / "target_vocab.json").write_text("{}")
    with pytest.raises(UserError, match="one table of ids"):
        load_tokenizer(str(lacking))


def test_an_unknown_language_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r">>enx<<: not a .*; did you mean 'eng'\? \(known: eng\)"):
        load_tokenizer(str(folder)).encode(">>enx<< Ein Hund")


def test_source_spm_alone_is_a_plain_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "source.spm"
    shutil.copy(folder / file.name, file)
    tokenizer = load_tokenizer(str(file))
    save_tokenizer(str(file), tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == file.read_bytes()
    assert load_saved_tokenizer(tmp_path, str(file)).fingerprint == tokenizer.fingerprint
    marian = str(folder / file.name)
    save_tokenizer(marian, tmp_path)
    assert load_saved_tokenizer(tmp_path, marian).fingerprint == load_tokenizer(marian).fingerprint
    # an incomplete copy is not taken for a plain model
    (tmp_path / "tokenizer" / "vocab.json").unlink()
    with pytest.raises(UserError, match=r"vocab\.json: No such file"):
        load_saved_tokenizer(tmp_path, marian)


def test_mixers_without_post_norm_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"model\.arch\.pre_norm=false: .* take one of .*full"):
        load_pretrained(folder, mixer="fam")
