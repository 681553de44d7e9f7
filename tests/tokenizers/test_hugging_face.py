"""Hugging Face tokenizers: the same ids as transformers, and lossless, also in pieces."""

import itertools
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, edit, sentencepiece_like, write

from famjax.core.errors import UserError
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.tokenizers.load import load_saved_tokenizer, load_tokenizer, save_tokenizer
from famjax.tokenizers.tokenizer import StreamDecoder, check_same_ids

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
KINDS = {
    "byte-level": lambda folder: byte_level(folder),
    "byte-level-awkward": lambda folder: byte_level(folder, awkward=True),
    "gemma": lambda folder: sentencepiece_like(folder),
    "llama": lambda folder: sentencepiece_like(folder, awkward=True),
    "mistral": lambda folder: sentencepiece_like(folder, awkward=True, metaspace=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("tokenizers")
    return {name: make(home / name) for name, make in KINDS.items()}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, folders):
    return load_tokenizer(str(folders[request.param]))


@pytest.fixture
def folder(request, folders, tmp_path):
    """Return a copy of the folder that may be damaged."""
    return shutil.copytree(folders["gemma"], tmp_path / "gemma")


def reference(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@given(text=TEXT, cuts=st.lists(st.integers(0, 40)))
@example(text="", cuts=[])
@example(text="  two  spaces\n\n \ttab\r\n    x", cuts=[1, 4])
@example(text="▁ is not a space, <0x0A> no byte, <s></s><|im_end|> no specials \0", cuts=[20])
@example(text=" <think>  ▁▁e\u0301 \ufdd0\ufdd1", cuts=[5, 11])
def test_text_round_trips_in_pieces(tokenizer, text, cuts):
    cuts = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
    for pieces in ([text], parts):
        ids = np.concatenate([np.zeros(0, np.int32), *map(tokenizer.encode, pieces)])
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        decoder = StreamDecoder(tokenizer)
        assert "".join(decoder.push(token) for token in ids) + decoder.flush() == text
        assert not set(ids.tolist()) & {tokenizer.bos_id, tokenizer.eos_id}


@pytest.mark.parametrize("name", ["byte-level", "gemma", "llama", "mistral"])
def test_ids_and_texts_equal_transformers(folders, name):
    theirs, ours = reference(folders[name]), load_tokenizer(str(folders[name]))
    prefix = " " if name in ("llama", "mistral") else ""
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in [
        "The quick brown fox, 1234 times.",
        "def f(x):\n        return x",
        "naïve 漢字 😀 \u00a0 </s> <|im_end|> <think>",
        "[INST] return<s>",
    ]:
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(prefix + text).tolist() == expected
        assert theirs.decode(expected, clean_up_tokenization_spaces=False) == text


def test_a_special_has_no_bytes_and_another_added_token_has_its_text(folders):
    tokenizer = load_tokenizer(str(folders["byte-level"]))
    vocabulary = reference(folders["byte-level"]).get_vocab()
    assert tokenizer.vocab_size == 1 + max(vocabulary.values())
    for name in ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"):
        assert tokenizer.token_to_bytes(vocabulary[name]) == b""
    assert tokenizer.token_to_bytes(vocabulary["<think>"]) == b"<think>"
    assert tokenizer.encode("<think>").tolist() == [vocabulary["<think>"]]
    assert tokenizer.stop_ids == {vocabulary["<|eos|>"], vocabulary["<|im_end|>"]}


def test_unigram_with_byte_tokens(tmp_path):
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0]]
    pieces += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    pieces += [[piece, -float(i)] for i, piece in enumerate(["▁", "a", "b", "▁ab", "ab", "<", ">"])]
    write(
        tmp_path,
        "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [special(i, name) for i, (name, _) in enumerate(pieces[:3])],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": pieces},
        },
    )
    write(tmp_path, "tokenizer_config.json", {"eos_token": "</s>"})
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ["ab ab", "a<s>b</s> <0x41>", "é▁"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" ab")) == 1


def special(number, content, **changes):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True, **changes}


# bos and eos


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, (2, 2, {2})),
        (
            {
                "tokenizer_config.json": {"eos_token": None},
                "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
            },
            (1, 2, {2}),
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "</s>", "bos_token": None},
                "generation_config.json": {"bos_token_id": 1, "eos_token_id": [0, 5]},
            },
            (1, 2, {0, 2, 5}),
        ),
        # as in transformers, if there is no generation_config.json; 99,999 is no token
        ({"config.json": {"bos_token_id": 1, "eos_token_id": [2, 7, 99_999]}}, (1, 2, {2, 7})),
        (
            {
                "config.json": {"bos_token_id": 1, "eos_token_id": [2, 7]},
                "generation_config.json": {"bos_token_id": 1},
            },
            (1, 2, {2}),
        ),
    ],
)
def test_bos_and_eos_are_detected(folder, files, expected):
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        write(folder, name, content)
    found = load_tokenizer(str(folder))
    assert (found.bos_id, found.eos_id, found.stop_ids) == expected


@pytest.mark.parametrize("named", [True, False])
def test_bos_and_eos_have_no_bytes_though_the_json_lists_them_as_text(folder, named):
    if not named:
        (folder / "tokenizer_config.json").unlink()
        write(folder, "config.json", {"bos_token_id": 1, "eos_token_id": 2})
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] = [special(1, "<s>", special=False)]
    write(folder, "tokenizer.json", data)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.token_bytes[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]
    assert tokenizer.decode(tokenizer.encode("<s> </s>")) == "<s> </s>"


def test_the_fingerprint_depends_on_the_ids(folders, folder):
    tokenizer = load_tokenizer(str(folder))
    assert (
        tokenizer.fingerprint
        == load_tokenizer(str(folders["gemma"] / "tokenizer.json")).fingerprint
    )
    (folder / "chat_template.jinja").unlink()
    assert tokenizer.fingerprint == load_tokenizer(str(folder)).fingerprint
    write(folder, "tokenizer_config.json", {"eos_token": "<s>"})
    assert tokenizer.fingerprint != load_tokenizer(str(folder)).fingerprint
    assert tokenizer.fingerprint != load_tokenizer(str(folders["byte-level"])).fingerprint


# mistakes

WORDPIECE = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"[UNK]": 0}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": WORDPIECE}, "is WordPiece, so its tokens do not represent fixed bytes"),
        ({"normalizer": {"type": "Lowercase"}}, "has the normalizer Lowercase"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
            "has the normalizer NFKC",
        ),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "WhitespaceSplit, which drops text"),
        (
            {"pre_tokenizer": {"type": "Punctuation", "behavior": "Removed"}},
            "Punctuation, which drops text",
        ),
        ({"normalizer": None}, "neither byte-level nor has it byte tokens"),
        ({"model": {"type": "BPE", "byte_fallback": True}}, "not a tokenizer.json"),
        ({"model": None}, "not a tokenizer.json"),
        ({"added_tokens": [5]}, "not a tokenizer.json"),
        ({"added_tokens": [{"content": "x", "special": True, "id": 1}]}, "library cannot read it"),
    ],
)
def test_tokens_without_fixed_bytes_are_rejected(folder, changes, message):
    edit(folder, **changes)
    assert_rejected(folder, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("byte_fallback", False, "neither byte-level nor has it byte tokens"),
        ("end_of_word_suffix", "</w>", "marks words with '</w>'"),
    ],
)
def test_lossy_models_are_rejected(folder, key, value, message):
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edit(folder, model={**model, key: value})
    assert_rejected(folder, message)


@pytest.mark.parametrize("byte", ["E2", "F0"])
def test_every_byte_needs_a_token(folder, byte):
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    del model["vocab"][f"<0x{byte}>"]
    edit(folder, model=model)
    assert_rejected(folder, f"no token for the byte 0x{byte}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"model": {"vo', r"tokenizer.json: damaged \("),
        ("tokenizer.json", "[]", "not a JSON object"),
        ("tokenizer.json", "{}", "not a tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: damaged"),
        ("tokenizer_config.json", {"eos_token": "</z>"}, "eos_token is '</z>', which the"),
        ("tokenizer_config.json", {}, "names no eos_token"),
        (
            "tokenizer_config.json",
            {"eos_token": "</s>", "chat_template": 5},
            "is not a text; fix it",
        ),
        ("generation_config.json", {"eos_token_id": ["</s>"]}, "eos_token_id is"),
        ("generation_config.json", {"eos_token_id": 10**20}, "eos_token_id is 10+; write ids"),
        ("special_tokens_map.json", "5", "not a JSON object"),
    ],
)
def test_error_names_damaged_files(folder, name, content, message):
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
    write(folder, name, content)
    assert_rejected(folder, message)


def test_ids_beyond_the_vocabulary_are_rejected(folder):
    (folder / "tokenizer_config.json").unlink()
    write(folder, "config.json", {"eos_token_id": 10**6})
    assert_rejected(folder, "eos 1000000 is none of its tokens")


def test_missing_files_are_rejected(tmp_path):
    assert_rejected(tmp_path, "has no tokenizer.json and no tokenizer.model")
    assert_rejected(tmp_path / "tokenizer.json", "No such file")


def assert_rejected(spec, message):
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(str(spec))
    assert "\n" not in str(error.value)


# copies


@pytest.fixture
def model(tmp_path):
    (tmp_path / "corpus.txt").write_text("a b c d e f g " * 100)
    train_sentencepiece(str(tmp_path / "corpus.txt"), 280, tmp_path / "a.model")
    return tmp_path / "a.model"


def test_a_run_saves_all_files_of_the_tokenizer(folders, tmp_path):
    source = shutil.copytree(folders["byte-level"], tmp_path / "source")
    run = tmp_path / "run"
    run.mkdir()
    given = load_tokenizer(str(source))
    save_tokenizer(str(source), run)
    save_tokenizer(str(run / "tokenizer"), run)  # onto itself
    shutil.rmtree(source)
    kept = load_saved_tokenizer(run, str(source))
    assert kept.fingerprint == given.fingerprint
    assert kept.stop_ids == given.stop_ids
    messages = [{"role": "user", "content": "hi"}]
    assert kept.encode_chat(messages).tolist() == given.encode_chat(messages).tolist()


def test_a_previous_copy_is_replaced(folders, model, tmp_path):
    """A failed attempt may have left a copy of another tokenizer in the folder."""
    (tmp_path / "config.json").write_text("{}")
    for spec in [model, folders["gemma"], folders["byte-level"], model, "bytes"]:
        save_tokenizer(str(spec), tmp_path)
        found = load_saved_tokenizer(tmp_path, str(spec))
        assert found.fingerprint == load_tokenizer(str(spec)).fingerprint
        assert (found.chat_template is None) == (load_tokenizer(str(spec)).chat_template is None)
        # nor may one be found that `init` would take for the run's
        kinds = [tmp_path / "tokenizer" / "tokenizer.json", tmp_path / "tokenizer.model"]
        assert sum(kind.exists() for kind in kinds) == (spec != "bytes")
    assert not (tmp_path / "tokenizer").exists()


def test_files_in_a_folder_that_is_no_run_are_kept(model, folders, tmp_path):
    run = tmp_path / "mine"
    (run / "tokenizer").mkdir(parents=True)
    own = [run / "words.txt", run / "tokenizer" / "tokenizer.json"]
    for file in own:
        file.write_text("the user's")
    for spec in ("bytes", str(model)):
        save_tokenizer(spec, run)
        assert [file.read_text() for file in own] == ["the user's"] * 2


def check_ids(new, old):
    check_same_ids(load_tokenizer(str(new)), load_tokenizer(str(old)), f"--tokenizer {new}", "m")


def test_a_tokenizer_with_the_ids_of_another_is_accepted(folders, folder):
    check_ids(folder, folders["gemma"])
    data = json.loads((folder / "tokenizer.json").read_text())
    size = load_tokenizer(str(folder)).vocab_size
    added = [special(size, "<|im_start|>"), special(size + 1, "<|im_end|>")]
    edit(folder, added_tokens=[*data["added_tokens"], *added])
    write(folder, "chat_template.jinja", "{{ messages[0].content }}")
    check_ids(folder, folders["gemma"])
    check_ids(folders["gemma"], folder)
    # a control token may get another name
    text = (folder / "tokenizer.json").read_text().replace("<|im_start|>", "<|turn|>")
    write(folder, "tokenizer.json", text)
    check_ids(folder, folders["gemma"])


def test_a_tokenizer_with_other_ids_is_rejected(folders, folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, first = data["model"]["vocab"], "e"
    swapped = {first: vocabulary["<0x41>"], "<0x41>": vocabulary[first]}
    edit(folder, model={**data["model"], "vocab": {**vocabulary, **swapped}})
    said = (
        f"^--tokenizer {folder}: id {vocabulary['<0x41>']} is 'e', but 'A' in the tokenizer of m, "
    )
    with pytest.raises(UserError, match=said):
        check_ids(folder, folders["gemma"])
    with pytest.raises(UserError, match=r"id 3 is '\\x03', but '\\x00' in the"):
        check_ids("bytes", folders["gemma"])
    swapped = {"<0x80>": vocabulary["<0x83>"], "<0x83>": vocabulary["<0x80>"]}
    edit(folder, model={**data["model"], "vocab": {**vocabulary, **swapped}})
    with pytest.raises(UserError, match=r"id 131 is b'\\x80', but b'\\x83' in the"):
        check_ids(folders["gemma"], folder)


def test_a_run_keeps_the_ids_of_its_init(folders, folder, tmp_path):
    from famjax.config.schema import Config, DataConfig
    from famjax.train.run_folder import prepare_run

    def prepare(name, spec, init="", has_checkpoint=False):
        config = Config(init=str(init), data=DataConfig(tokenizer=str(spec)))
        return prepare_run(tmp_path / name, config, has_checkpoint)

    prepare("there", folders["gemma"])
    there = tmp_path / "there"
    write(folder, "chat_template.jinja", "{{ messages[0].content }}")
    _, tokenizer = prepare("here", folder, there)
    assert tokenizer.chat_template.digest == load_tokenizer(str(folder)).chat_template.digest
    for spec in ("bytes", folders["byte-level"]):
        with pytest.raises(
            UserError, match=rf"^data\.tokenizer={spec}: id .* of init={there}, with"
        ):
            prepare("other", spec, there)
    assert not (tmp_path / "other").exists()
    # the path may change: the run has a copy
    assert prepare("here", there / "tokenizer", there, has_checkpoint=True)[1].chat_template


@pytest.mark.parametrize("is_finetuned", [False, True])
def test_a_run_with_bytes_has_no_copy_to_lose(folders, tmp_path, is_finetuned):
    from famjax.config.schema import Config, DataConfig
    from famjax.train.run_folder import prepare_run

    bytes_run, other = (
        Config(init="there" * is_finetuned, data=DataConfig(tokenizer=str(spec)))
        for spec in ("bytes", folders["gemma"])
    )
    for first, second in ((bytes_run, other), (other, bytes_run)):
        prepare_run(tmp_path / "run", first, has_checkpoint=False)
        said = (
            f"run holds a run with another config (data.tokenizer: "
            f"{first.data.tokenizer!r} -> {second.data.tokenizer!r}); give --run another"
        )
        with pytest.raises(UserError, match=re.escape(said)):
            prepare_run(tmp_path / "run", second, has_checkpoint=True)


def test_old_runs_and_sentencepiece_folders_load(model, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copyfile(model, tmp_path / "run" / "tokenizer.model")
    fingerprint = load_tokenizer(str(model)).fingerprint
    assert load_saved_tokenizer(tmp_path / "run", "gone.model").fingerprint == fingerprint
    assert load_tokenizer(str(tmp_path / "run")).fingerprint == fingerprint


def test_training_copies_the_tokenizer(folders, tmp_path):
    from famjax.config.schema import Config, DataConfig
    from famjax.train.run_folder import prepare_run, run_tokenizer

    config = Config(data=DataConfig(tokenizer=str(folders["llama"])))
    config, tokenizer = prepare_run(tmp_path / "run", config, has_checkpoint=False)
    assert config.model.vocab_size == tokenizer.vocab_size
    gone = SimpleNamespace(data=SimpleNamespace(tokenizer="gone"))
    assert run_tokenizer(tmp_path / "run", gone).fingerprint == tokenizer.fingerprint
