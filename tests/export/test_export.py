"""A run becomes a folder from which others compute the same logits, or nothing is written."""

import json
import re
import sys
from dataclasses import replace

import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_tokenizers
import torch
import transformers
from flax import nnx

from famjax import load_pretrained, open_run
from famjax.cli.main import main
from famjax.config.schema import AdaptiveConfig, LinearConfig, LoraConfig
from famjax.core.errors import UserError
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.export import check, hf
from famjax.export import export as exporting
from famjax.export.source import ExportSource
from famjax.export.tokenizer import write_tokenizer
from famjax.ops.attention import attend_blocks
from famjax.tokenizers.load import load_tokenizer
from famjax.tokenizers.words import WordTokenizer
from famjax.train.run_folder import SOURCE, prepare_run

TEXT = "  Pure thought, 12345  — très bien —\n\tin\r\n  lines 猫 \U0001f600 "

pytestmark = pytest.mark.usefixtures("remote_code")


@pytest.fixture(scope="module")
def exported_folder(tmp_path_factory):
    """Return the FAM run as a Hugging Face folder, and the messages."""
    folder = tmp_path_factory.mktemp("hf") / "out"
    return folder, exporting.export(tiny.folder(), folder)


def lines_of(folder):
    """Return the code in the model card."""
    text = (folder / "README.md").read_text()
    return [
        block.replace("FOLDER", repr(str(folder)))
        for block in re.findall(r"```python\n(.*?)```", text, re.S)
    ]


def test_an_exported_folder_is_converted_and_its_code_not_run(exported_folder, tmp_path, capsys):
    folder, _ = exported_folder
    assert main(["convert", str(folder), str(tmp_path / "back")]) == 0
    said = capsys.readouterr().err
    assert "not compared with Hugging Face's code: the folder has its own" in said
    parts = [
        nnx.state(open_run(path).model, nnx.Param) for path in (tiny.folder(), tmp_path / "back")
    ]
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_the_comparison_is_reported(exported_folder):
    _, said = exported_folder
    assert re.match(r"compared with famjax reading it back: logits differ by 0\.0e\+00 at", said[0])
    assert said[1].startswith(f"compared with transformers {transformers.__version__}: logits diff")
    assert said[2].startswith("compared with transformers' AutoTokenizer: the same ")


def test_code_in_the_model_card_runs(exported_folder, capsys):
    folder, _ = exported_folder
    load, stream, batches = lines_of(folder)
    names = {}
    exec(load, names)
    assert isinstance(names["model"], transformers.PreTrainedModel)
    assert capsys.readouterr().out.startswith("<bos>Once upon a time")
    exec(stream, names)
    with torch.no_grad():
        whole = names["model"](torch.tensor([names["ids"]])).logits
    assert torch.allclose(names["logits"], whole[:, -names["logits"].shape[1] :], atol=1e-5)
    capsys.readouterr()
    exec(batches, names)
    assert "<bos>Once upon a time" in capsys.readouterr().out
    assert "2 steps of 16 tokens, 32 in total" in (folder / "README.md").read_text()


def test_famjax_loads_an_exported_folder(exported_folder):
    config, model = load_pretrained(exported_folder[0])
    assert config.mixer == "fam"
    ours = tiny.run().model.stack.prompt[...]
    assert (model.stack.prompt[...] == ours).all()


def test_a_folder_can_be_dispatched_resized_and_saved_again(exported_folder, tmp_path):
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(exported_folder[0], trust_remote_code=True, device_map="cpu")
    ids = torch.tensor([[256, 1, 2, 3] * 6])
    expected = model(ids).logits
    model.resize_token_embeddings(260)
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path, trust_remote_code=True)
    assert again.get_output_embeddings().weight.shape[0] == 260
    assert torch.allclose(again(ids).logits[..., :258], expected, atol=1e-5)
    config, _ = load_pretrained(tmp_path)
    assert config.vocab_size == 260


def test_layers_may_be_on_several_devices(exported_folder, tmp_path):
    kind = transformers.AutoModelForCausalLM
    ids = torch.tensor([[256, 1, 2, 3] * 6])
    expected = kind.from_pretrained(exported_folder[0], trust_remote_code=True)(ids).logits
    places = dict.fromkeys(("embed", "prompt", "layers.0", "norm", "head"), "cpu")
    spread = {"device_map": places | {"layers.1": "disk"}, "offload_folder": str(tmp_path)}
    model = kind.from_pretrained(exported_folder[0], trust_remote_code=True, **spread)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)


def test_the_byte_tokenizer_has_the_same_ids(exported_folder):
    theirs = transformers.AutoTokenizer.from_pretrained(exported_folder[0], trust_remote_code=False)
    ids = tiny.run().tokenizer.encode(TEXT).tolist()
    assert theirs.encode(TEXT) == ids
    assert theirs.decode(ids) == TEXT
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 257)
    batch = theirs(["ab", "c"], padding=True)
    assert batch == {"input_ids": [[97, 98], [257, 99]], "attention_mask": [[1, 1], [0, 1]]}


def export_model(mixer, tmp_path, dtype="float32", run=None, **shape):
    """Export a random model as hf; return the folder and the messages."""
    given = run or tiny.run_with(mixer, **shape)
    folder = tmp_path / "out"
    folder.mkdir()
    return folder, hf.write(ExportSource(given, tmp_path, dtype), folder)


def test_a_run_that_llama_can_represent_is_a_llama(tmp_path):
    arch = replace(tiny.SHAPE.arch, embed_scale=1.0)
    (tmp_path / SOURCE).write_text(
        json.dumps({"model_type": "llama", "bos_token_id": 7, "attention_dropout": 0.25})
    )
    folder, said = export_model("full", tmp_path, arch=arch)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    # other keys of the source are kept
    assert (config["bos_token_id"], config["attention_dropout"]) == (7, 0.25)
    assert not (folder / "modeling_famjax.py").exists()
    assert len(said) == 3


def test_a_finetuned_model_keeps_keys_of_its_base(tmp_path):
    (tmp_path / "base").mkdir()
    said = {"model_type": "llama", "attention_dropout": 0.25}
    (tmp_path / "base" / SOURCE).write_text(json.dumps(said))
    run = tiny.run_with("full", arch=replace(tiny.SHAPE.arch, embed_scale=1.0))
    run = replace(run, config=replace(run.config, init=str(tmp_path / "base")))
    folder, _ = export_model("full", tmp_path, run=run)
    assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.25


def test_a_model_finetuned_twice_keeps_keys_of_its_base(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / SOURCE).write_text('{"model_type": "llama"}')
    run = tiny.run_with("full")
    for name, init in (("first", "base"), ("second", "first")):
        config = replace(run.config, init=str(tmp_path / init))
        prepare_run(tmp_path / name, config, has_checkpoint=False)
        assert (tmp_path / name / SOURCE).read_text() == '{"model_type": "llama"}'


def test_bfloat16_halves_the_size(tmp_path):
    folder, said = export_model("fam", tmp_path, dtype="bfloat16")
    assert "differ by 0.0e+00" in said[0]
    kind = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert kind.dtype == torch.bfloat16
    assert kind(torch.tensor([[1, 2, 3] * 7])).logits.isfinite().all()


def test_missing_transformers_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder, said = export_model("fam", tmp_path)
    assert said[1:] == [
        "not compared with transformers: transformers not installed; pip install transformers"
    ]
    # the file is as readable as the folder
    assert (folder / "model.safetensors").stat().st_mode & 0o666 == folder.stat().st_mode & 0o666


@pytest.mark.long
def test_adapters_are_merged(tmp_path):
    run = tiny.run_with("fam", lora=LoraConfig(rank=2))
    linear = run.model.stack.layers[0].mixer.qkv.q
    linear.lora.b[...] = linear.lora.b[...] + 0.3
    folder, said = export_model("fam", tmp_path, run=run)
    assert said[0].startswith("compared with famjax reading it back: logits differ by")
    kernel = load_pretrained(folder)[1].stack.layers[0].mixer.qkv.q.kernel[...]
    assert np.abs(kernel - linear.kernel[...]).max() > 0.01
    model = ExportSource(run, tmp_path).merge_adapters().model
    assert model.lora == LoraConfig()


def test_a_sentencepiece_model_becomes_a_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text(tiny.TEXT * 50 + TEXT)
    made = train_sentencepiece(str(tmp_path / "text.txt"), 300, tmp_path / "tokenizer.model")
    out = tmp_path / "out"
    out.mkdir()
    assert write_tokenizer(made, out)[0].startswith("compared with transformers'")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for said in (tiny.TEXT, TEXT, "unseen: ß水\n\n\n"):
        assert theirs.encode(said) == made.encode(said).tolist()
        assert theirs.decode(made.encode(said)) == said
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


def test_a_word_list_becomes_a_tokenizer(tmp_path):
    made = WordTokenizer("w", ["the", "cat", "mat,"])
    assert write_tokenizer(made, tmp_path)[0].startswith("compared with transformers'")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for said in (tiny.TEXT, "the cat\n\n on  the mat,\n"):
        assert theirs.encode(said) == made.encode(said).tolist()


@pytest.mark.parametrize("awkward", [False, True])
def test_a_tokenizer_of_hugging_face_is_copied(tmp_path, awkward):
    home = tiny_tokenizers.byte_level(tmp_path / "tokenizer", awkward)
    (home / "config.json").write_text('{"model_type": "another"}')
    made = load_tokenizer(str(home / "tokenizer.json"))
    run = replace(tiny.run_with("full"), tokenizer=made)
    folder, said = export_model("full", tmp_path, run=run)
    assert said[2].startswith("compared with" if not awkward else "transformers' AutoTokenizer giv")
    assert (folder / "tokenizer.json").read_bytes() == (home / "tokenizer.json").read_bytes()
    ends = [json.loads((folder / f"{n}.json").read_text()) for n in ("config", "generation_config")]
    assert [end["eos_token_id"] for end in ends] == [sorted(made.stop_ids)] * 2


def test_the_model_card_pads_without_a_bos_or_a_padding_token(tmp_path, capsys):
    # as Qwen's: there is no bos, and padding is on the right
    home = tiny_tokenizers.byte_level(tmp_path / "tokenizer")
    tiny_tokenizers.write(home, "tokenizer_config.json", {})
    tiny_tokenizers.write(home, "special_tokens_map.json", {"eos_token": "<|eos|>"})
    made = load_tokenizer(str(home))
    run = replace(tiny.run_with("full", vocab_size=made.vocab_size), tokenizer=made)
    folder, _ = export_model("full", tmp_path, run=run)
    load, batches = lines_of(folder)
    names = {}
    exec(load, names)
    capsys.readouterr()
    exec(batches, names)
    assert "<|eos|>Once upon a time" in capsys.readouterr().out
    mask = names["batch"]["attention_mask"]
    assert mask[0].all()
    assert not mask[1, 0]


def test_orbax_export_is_a_run(tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["export", str(tiny.folder()), str(folder), "--format", "orbax"]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert last == f"wrote {folder}"
    assert said[0].startswith("compared with Orbax ")
    assert said[1].endswith("logits differ by 0.0e+00 at most, 0.0e+00 of their range")
    assert open_run(folder).step == 2
    names = {}
    exec(lines_of(folder)[0], names)
    table = names["params"]["embedding"]["value"]
    assert (table == np.asarray(tiny.run().model.embedding[...])).all()


def test_stablehlo_export_computes_the_same_logits(tmp_path):
    folder = tmp_path / "out"
    said = exporting.export(tiny.folder(), folder, "stablehlo")
    assert said[0].startswith("compared with the programs read back, on cpu: logits differ by")
    names = {}
    exec(lines_of(folder)[0], names)
    for name in ("prefill", "step"):
        content = bytearray((folder / f"{name}.stablehlo").read_bytes())
        program = jax.export.deserialize(content)
        assert program.platforms == ("cpu", "cuda", "tpu")
        # a device's own precision, not that of the comparison
        assert "HIGHEST" not in program.mlir_module()
    text = [256, 1, 2]
    for _ in range(21):
        text.append(int(tiny.logits(tiny.run().model, np.array([text]))[0, -1].argmax()))
    assert names["likeliest"].tolist() == [text[-1]] * 2


@pytest.mark.long
def test_an_adaptive_model_is_exported_as_stablehlo_only(tmp_path, monkeypatch):
    run = tiny.run_with("bswa", adaptive=AdaptiveConfig("64,128", factor=2))
    monkeypatch.setattr(exporting, "open_model", lambda folder: run)
    said = exporting.export(tiny.folder(), tmp_path / "out", "stablehlo")
    assert said[0].startswith("compared with the programs read back, on cpu: logits differ by")
    for kind in ("hf", "peft"):
        with pytest.raises(UserError, match=f"--format {kind}: does not support adaptive"):
            exporting.export(tiny.folder(), tmp_path / kind, kind)
        assert not (tmp_path / kind).exists()


def test_linear_attention_is_exported_without_a_peft_form(tmp_path, monkeypatch):
    run = tiny.run_with("linear", linear=LinearConfig("performer"))
    monkeypatch.setattr(exporting, "open_model", lambda folder: run)
    said = exporting.export(tiny.folder(), tmp_path / "hf")
    assert any(line.startswith("compared with transformers ") for line in said)
    with pytest.raises(UserError, match=r"--format peft: does not support linear .* take .*hf or"):
        exporting.export(tiny.folder(), tmp_path / "peft", "peft")


# rejected exports leave no files


def last_line(capsys):
    err = capsys.readouterr().err.splitlines()
    return [said for said in err if said.startswith("famjax: ")][-1].removeprefix("famjax: ")


def test_unsupported_exports_are_rejected(tmp_path, capsys):
    there = tmp_path / "there"
    there.mkdir()
    run = str(tiny.folder())
    assert main(["export", run, str(there)]) == 2
    assert last_line(capsys) == f"{there} exists already; give another folder, or remove it"
    assert main(["export", run, str(tmp_path / "no" / "out")]) == 2
    assert last_line(capsys).endswith(f"there is no folder {tmp_path / 'no'}; create it first")
    assert main(["export", str(there), str(tmp_path / "out")]) == 2
    assert "is not a run" in last_line(capsys)
    assert main(["export", run, str(tmp_path / "out"), "--format", "orbx"]) == 2
    assert "--format orbx: unknown; did you mean 'orbax'?" in last_line(capsys)
    arguments = ["--format", "orbax", "--dtype", "bfloat16"]
    assert main(["export", run, str(tmp_path / "out"), *arguments]) == 2
    assert last_line(capsys) == "--dtype bfloat16 is for --format hf; orbax keeps float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, UserError("no")])
def test_a_failed_export_leaves_no_files(tmp_path, monkeypatch, error):
    def write(source, folder):
        (folder / "half").write_text("x")
        raise error

    monkeypatch.setattr(hf, "write", write)
    with pytest.raises((KeyboardInterrupt, UserError)):
        exporting.export(tiny.folder(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_other_logits_are_rejected(tmp_path, monkeypatch):
    def wrong(*args):
        found = logits(*args).copy()
        found[0, 0, 0] += 1
        return found

    logits = check.compute_logits
    calls = iter([logits, wrong])
    monkeypatch.setattr(check, "compute_logits", lambda *args: next(calls)(*args))
    with pytest.raises(UserError, match="over 1e-04; export removed"):
        exporting.export(tiny.folder(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_diverged_run_is_rejected(tmp_path):
    run = tiny.run_with("bswa", seed=5)
    run.model.embedding[...] = run.model.embedding[...] * np.nan
    with pytest.raises(UserError, match="the run's logits are not finite;"):
        export_model("bswa", tmp_path, run=run)


def test_a_program_for_any_batch_attends_to_all_blocks_at_once(monkeypatch):
    """Not in parts, as one CPU does for sizes that it knows (`attend_blocks`)."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    (b,) = jax.export.symbolic_shape("b")
    q, k = (jax.ShapeDtypeStruct((b, 2, t, 2, 8), jnp.float32) for t in (256, 512))
    mask = jax.ShapeDtypeStruct((b, 2, 256, 512), jnp.bool_)
    exported = jax.export.export(jax.jit(attend_blocks))(q, k, k, mask)
    assert "while" not in exported.mlir_module()


def test_a_copied_generation_config_begins_targets_as_the_model_does(tmp_path):
    path = tmp_path / "generation_config.json"
    copied = {"decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2}
    for start, expected in (
        (2, copied),
        (0, {"decoder_start_token_id": 0, "forced_eos_token_id": 2}),
    ):
        path.write_text(json.dumps(copied))
        hf._correct_generation(path, {"decoder_start_token_id": start})
        assert json.loads(path.read_text()) == expected
    hf._correct_generation(path, {"bad_words_ids": [[7]]})
    assert json.loads(path.read_text()) == expected | {"bad_words_ids": [[7]]}
