"""Malicious input: one-line errors, quickly, before anything is compiled or allocated."""

from __future__ import annotations

import glob
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from small import SHAPE, texts
from tiny_tokenizers import byte_level, write

from famjax.cli.main import main
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.find_files import _glob_files, find_files
from famjax.experiment.load import override, to_json
from famjax.tokenizers.load import load_tokenizer

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 5000
# seconds, on a machine that is loaded
SECONDS = 20


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any, **__: Any) -> Any:
        raise AssertionError("a program was made")

    monkeypatch.setattr("famjax.processes.runtime.setup", lambda: None)
    monkeypatch.setattr("famjax.train.session.make_program", compiled)


class ErrorLine:
    """Calls `famjax` and returns its error line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys

    def __call__(self, *argv: str) -> str:
        self._capsys.readouterr()
        begin = time.perf_counter()
        status = main(argv)
        seconds = time.perf_counter() - begin
        out, err = self._capsys.readouterr()
        assert status == 2, err
        assert out == ""
        assert "Traceback" not in err
        said = [line for line in err.splitlines() if line.startswith("famjax: ")]
        assert said[-1:] == err.splitlines()[-1:]
        assert len(said[-1]) < 2000
        assert seconds < SECONDS
        return said[-1].removeprefix("famjax: ")


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> ErrorLine:
    return ErrorLine(capsys)


# keys

BYTES = r"would take at least [\d.,^]+ \w+, and .* (has|have) [\d.,]+ \w+;"
TAKE = r"must be at most 2,147,483,647; .* would take [\d.,^]+ \w+"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *[
            (f"{key}={value}", f"{key}={value}: .*{BYTES if value < 2**31 else TAKE}")
            for value in (10**9, 10**12)
            for key in (
                "model.width",
                "model.mlp_width",
                "model.head_dim",
                "model.vocab_size",
                "model.fam_previous",
                "model.memory_segments",
                "data.batch",
            )
        ],
        ("model.fam_len=1000000000", "is longer than model.block_len=64; .* take at most 64"),
        ("model.fam_len=1000000000000", TAKE),
        ("model.layers=10000000", "model.layers=10000000: must be at most 10,000"),
        ("data.length=1073741824", f"data.length=.*{BYTES}"),
        ("model.heads=1000000000", "is not a multiple of model.heads"),
        ("model.kv_heads=1000000000", "does not divide model.heads"),
        ("model.block_len=1000000000", "is not a multiple of model.block_len"),
        ("train.steps=3000000000", "train.steps=3000000000: must be at most"),
        ("train.keep=99999999999999999999", "must be at most"),
        ("optimizer.warmup_steps=9999999999", "must be at most"),
        ("train.accumulate=1000000000", "does not divide data.batch"),
        ("train.bptt_segments=1000000000", "does not divide the"),
        ("mesh.data=1000000000", "does not fit"),
        (f"model.width={HUGE}", "model.width"),
        (f"model.width={'9' * 4000}", "model.width=9+.*: must be at most"),
        (f"optimizer.learning_rate={HUGE}", "must be a finite number"),
        ("optimizer.learning_rate=1e999", "must be a finite number"),
        ("optimizer.learning_rate=nan", "must be a finite number"),
        (f"profile.steps={HUGE}:{HUGE}", "give two step counts"),
        (f"model.adaptive.cutoffs={HUGE}", "give whole numbers separated by commas"),
        (f"model.adaptive.cutoffs={','.join(map(str, range(1, 9999)))}", "give at most 64"),
        (f"model.mixer={','.join(['fam'] * 2000)}", "is not a multiple of the 2000 mixers"),
        ("data.files=/", "is a system folder; name the folder"),
        ("data.files=/**", "is a system folder; name the folder"),
        ("data.files=/proc", "is a system folder; name the folder"),
        ("data.files=/sys/**/*.txt", "is a system folder; name the folder"),
        ("data.files=/proc/self/../kmsg", "is a system folder; name the folder"),
        ("data.files=/dev/zero", "not a regular file"),
        ("data.files=/dev/stdin", "not a regular file|binary|empty|is a system folder"),
        ("data.tokenizer=/dev/zero", "not a regular file"),
        ("data.tokenizer=/dev/random", "not a regular file"),
    ],
)
def test_extreme_values_are_rejected(
    error_line: ErrorLine, tmp_path: Path, given: str, said: str
) -> None:
    files = f"data.files={texts(tmp_path / 'texts')}"
    line = error_line("train", "text_fam", files, given, "--run", str(tmp_path / "run"))
    assert re.search(said, line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["data.task=passkey", "data.passkey.digits=1000000000"], "must be at most 1,000"),
        (["data.task=copy", "data.tokenizer=task", "data.toy.steps=1000000000"], "at most 100,000"),
        (
            ["model.stack=lstm", "model.block_len=1", "model.layers=5000"],
            "5,000 unrolled layers would",
        ),
        (["model.layers=10000", "model.scan_layers=false"], "10,000 unrolled layers would take"),
        (
            ["model.stack=feedback", "model.block_len=1", "model.feedback.sweeps=1000000000"],
            "unrolled layers would take hours",
        ),
        (["model.mixer=full", "model.capacity=1000000000"], f"model.capacity=.*{BYTES}"),
        (["model.mixer=swa", "model.window=1000000000"], f"model.window=.*{BYTES}"),
        (["model.mixer=linear", "model.linear.features=1000000000"], f"linear.features=.*{BYTES}"),
        (
            ["model.stack=feedback", "model.block_len=1", "model.feedback.span=1000000000"],
            f"feedback.span=.*{BYTES}",
        ),
        (["model.block_len=67108864", "data.length=67108864"], BYTES),
    ],
)
def test_extreme_values_of_other_models_are_rejected(
    error_line: ErrorLine, tmp_path: Path, given: list[str], said: str
) -> None:
    here = str(tmp_path / "run")
    small = ["model.layers=1", "model.width=16", "model.heads=2", "data.batch=2", "data.length=64"]
    files = [] if "data.task=copy" in given else [f"data.files={texts(tmp_path / 'texts')}"]
    line = error_line("train", "text_bswa", *small, *files, *given, "--run", here)
    assert re.search(said, line), line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan", "fam_1b", "model.width=1200000000", "--topology", "cpu:8"], BYTES),
        (["plan", "fam_1b", "model.vocab_size=3000000000", "--topology", "cpu:8"], TAKE),
        (["plan", "fam_1b", "--topology", "h200:1000000000000"], "at most 4,096 chips|number of"),
        (["plan", "fam_1b", "--topology", f"h200:{HUGE}"], "give a number of chips"),
        (["bench", "fam", "--batch", "1000000000"], f"data.batch=1000000000: .*{BYTES}"),
        (["bench", "feedback", "--width", "4000000000"], "model.width=4000000000"),
    ],
)
def test_extreme_flags_of_other_verbs_are_rejected(
    error_line: ErrorLine, argv: list[str], said: str
) -> None:
    line = error_line(*argv)
    assert re.search(said, line), line


# config.json of a run


def with_value(tree: Any, key: str, value: Any) -> str:
    *path, name = key.split(".")
    part = tree
    for step in path:
        part = part[step]
    part[name] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (DEEP, "nested more than 100 levels deep"),
        ('{"model":' * 100_000 + "1" + "}" * 100_000, "nested more than 100 levels deep"),
        ("{" + f'"seed": {HUGE}' + "}", "a number of thousands of digits"),
        ('{"seed": 1, "seed": 2}', "the key 'seed' occurs twice"),
        ('{"model": []}', "model=[]: must be a table of keys"),
        ('{"model": null}', "model=None: must be a table of keys"),
        ("null", "config=None: must be a table of keys"),
        ("NaN", "config=nan: must be a table of keys"),
        ('"' + "x" * 10**6 + '"', "must be a table of keys"),
        ('{"\\u001b[2J": 1}', "unknown key '\\x1b[2J'"),
        ("\ufeff{}", "BOM"),
        ("", "Expecting value"),
        (b"\xff\xfe{}", "not a text file"),
        (("model.heads", 0), "model.heads=0: must be at least 1"),
        (("model.heads", -1), "model.heads=-1: must be at least 1"),
        (("model.heads", "4"), "model.heads=4: must be a whole number"),
        (("model.heads", 4.0), "model.heads=4.0: must be a whole number"),
        (("model.heads", True), "model.heads=True: must be a whole number"),
        (("model.heads", None), "model.heads=None: must be a whole number"),
        (("model.heads", [4]), "model.heads=[4]: must be a whole number"),
        (("model.heads", {"a": 1}), "must be a whole number"),
        (("model.heads", json.loads("[" * 90 + "]" * 90)), "must be a whole number"),
        (("model.rope_base", 10**400), "must be a number"),
        (("model.rope_base", float("nan")), "must be a finite number"),
        (("model.rope_base", float("inf")), "must be a finite number"),
        (("model.width", 10**300), "must be at most 2,147,483,647; the model's parameters"),
        (("model.mixer", 5), "model.mixer=5: must be a string"),
        (("model.mixer", ""), "unknown mixer ''"),
        (("model.mixer", "fam," * 10**5), "unknown mixer ''"),
        (("model.stack", ["residual"]), "must be one of residual"),
        (("model.tied", "yes"), "model.tied=yes: must be true or false"),
        (("data.files", "a\0b"), "contains a NUL byte or an unpaired surrogate"),
        (("data.files", "\ud800"), "contains a NUL byte or an unpaired surrogate"),
        (("data.tokenizer", "x\0"), "contains a NUL byte or an unpaired surrogate"),
        (("name", "../../x"), "give a name without slashes"),
        (("seed", 2**40), "must be less than"),
        (("model.lora.rank", 10**9), "init=FOLDER"),
    ],
)
def test_an_invalid_config_file_is_rejected(
    error_line: ErrorLine, tmp_path: Path, content: Any, said: str
) -> None:
    path = tmp_path / "mine.json"
    if isinstance(content, tuple):
        shape = override(Config(), [*SHAPE, f"data.files={texts(tmp_path / 'texts')}"])
        content = with_value(json.loads(to_json(shape)), *content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in error_line("train", str(path), "--run", str(tmp_path / "run"))
    # equal to a run's own config
    (tmp_path / "run").mkdir()
    path.rename(tmp_path / "run" / "config.json")
    if said not in ("init=FOLDER", "give a name without slashes"):
        error_line("generate", str(tmp_path / "run"), "--prompt", "x")
    error_line("eval", str(tmp_path / "run"))


def test_a_config_that_is_a_pipe_is_rejected(error_line: ErrorLine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    said = error_line("train", str(tmp_path / "config.json"))
    assert "not a regular file" in said
    assert said.count("config.json") == 1
    os.mkfifo(tmp_path / "pipe.py")
    assert "pipe.py: not a regular file" in error_line("train", str(tmp_path / "pipe.py"))
    assert "not a regular file" in error_line("eval", str(tmp_path))
    assert "not a regular file" in error_line("convert", str(tmp_path), str(tmp_path / "new"))


def sparse_file(path: Path) -> Path:
    """Make a sparse file of a terabyte, which uses no disk space."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(10**12)
    return path


def test_a_huge_config_is_rejected(error_line: ErrorLine, tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "config.json")
    said = ": 1,000,000,000,000 bytes, more than the 268,435,456 that such a file may have"
    assert error_line("train", str(path)).startswith(f"{path}{said}")
    assert error_line("generate", str(tmp_path), "--prompt", "x").startswith(f"{path}{said}")
    assert error_line("convert", str(tmp_path), str(tmp_path / "new")).startswith(f"{path}{said}")
    python = sparse_file(tmp_path / "config.py")
    assert error_line("train", str(python)).startswith(f"{python}{said}")


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "tokenizer.json", "words.txt", "chat_template.jinja"]
)
def test_a_huge_tokenizer_is_rejected(error_line: ErrorLine, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tokenizer"
    if name == "chat_template.jinja":
        byte_level(folder)
    sparse_file(folder / name)
    line = error_line(
        "train", "text_fam", f"data.tokenizer={folder}", "--run", str(tmp_path / "run")
    )
    assert line.startswith(f"{folder / name}: 1,000,000,000,000 bytes, more than the 268,435,456")


def test_a_chat_template_that_is_a_pipe_is_rejected(error_line: ErrorLine, tmp_path: Path) -> None:
    byte_level(tmp_path / "tokenizer")
    os.mkfifo(tmp_path / "tokenizer" / "chat_template.jinja")
    line = error_line("train", "text_fam", f"data.tokenizer={tmp_path / 'tokenizer'}")
    assert "chat_template.jinja: not a regular file" in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.txt", "binary, byte 0 is zero"),
        ("a.jsonl", "binary, byte 0 is zero"),
        ("a.txt.gz", "truncated or damaged"),
        # lzma reads zeros as any number of empty .lzma streams
        ("a.txt.xz", "truncated or damaged"),
        ("a.jsonl.xz", "truncated or damaged"),
    ],
)
def test_huge_texts_are_rejected(
    error_line: ErrorLine, tmp_path: Path, name: str, said: str
) -> None:
    path = sparse_file(tmp_path / name)
    assert f"{path}: {said}" in error_line("train", "text_fam", f"data.files={path}")


# config.json of Hugging Face

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DEEP, "nested more than 100 levels deep"),
        ({"hidden_size": 10**9}, f"model.width=1000000000: .*{BYTES}"),
        ({"hidden_size": 10**12}, TAKE),
        ({"vocab_size": 10**9}, f"model.vocab_size=1000000000: .*{BYTES}"),
        ({"intermediate_size": 10**9}, f"model.mlp_width=1000000000: .*{BYTES}"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000: at most 10,000 layers"),
        ({"num_hidden_layers": 10**4}, "lacks"),
        ({"num_hidden_layers": 0}, "model.layers=0: must be at least 1"),
        ({"num_hidden_layers": "2"}, "must be a whole number"),
        ({"num_hidden_layers": 2.0}, "must be a whole number"),
        ({"num_hidden_layers": None}, "must be a whole number"),
        ({"num_attention_heads": 0}, "unexpected type"),
        ({"num_attention_heads": -2}, "must be at least"),
        ({"num_attention_heads": [2]}, "unexpected type|must be a whole number"),
        ({"num_key_value_heads": 7}, "does not divide"),
        ({"vocab_size": 0}, "the vocabulary is empty"),
        ({"vocab_size": -1}, "must be at least"),
        ({"hidden_size": 10**400}, "must be at most"),
        ({"rope_theta": 10**400}, "must be a number"),
        ({"rope_theta": "x"}, "must be a number"),
        ({"rope_scaling": [1]}, "unexpected type"),
        ({"rope_scaling": {"rope_type": {"a": 1}}}, "a value of an unexpected type"),
        ({"rms_norm_eps": float("nan")}, "must be a finite number"),
        ({"max_position_embeddings": 10**10}, "must be at most"),
        ({"tie_word_embeddings": "no"}, "must be true or false"),
        ({"hidden_act": ["silu"]}, "unexpected type"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**7}, "at most 10,000 layers"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 10**9}, "at most 10,000 layers"),
        ({"model_type": "gpt2", "n_layer": 10**7}, "at most 10,000 layers"),
        ({"model_type": "gpt2"}, "the checkpoint lacks"),
        ({"model_type": "famjax", "layers": 10**7}, "at most 10,000 layers"),
        ({"model_type": "famjax", "arch": []}, "unexpected type|has no"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "gpt_neox", "num_attention_heads": 0}, "unexpected type"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 10**9}, "."),
        ([], "not a table of keys"),
    ],
)
def test_an_invalid_folder_to_convert_is_rejected(
    error_line: ErrorLine, tmp_path: Path, config: Any, said: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if isinstance(config, dict):
        config = json.dumps(LLAMA | config)
    (source / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (source / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    line = error_line("convert", str(source), str(tmp_path / "new"), "--tokenizer", "bytes")
    assert re.search(said, line), line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", DEEP.encode(), "damaged"),
        ("model.safetensors", (200_000).to_bytes(8, "little") + DEEP.encode(), "damaged"),
        ("model.safetensors", b"\xff" * 16, "damaged"),
        ("model.safetensors", None, "not a regular file"),
        ("model.safetensors.index.json", DEEP.encode(), "nested more than 100 levels deep"),
        ("model.safetensors.index.json", b'{"weight_map": 5}', "damaged"),
        ("model.safetensors.index.json", b"[1]", "damaged"),
        ("model.safetensors.index.json", None, "not a regular file"),
    ],
)
def test_invalid_tensors_to_convert_are_rejected(
    error_line: ErrorLine, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    source = tmp_path / "source"
    write(source, "config.json", LLAMA)
    if content is None:
        os.mkfifo(source / name)
    else:
        (source / name).write_bytes(content)
    assert said in error_line("convert", str(source), str(tmp_path / "new"), "--tokenizer", "bytes")


# tokenizers


def edit_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / "tokenizer.json").read_text())
        change(data)
        write(folder, "tokenizer.json", data)

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda f: write(f, "tokenizer.json", DEEP), "nested more than 100 levels deep"),
        (lambda f: write(f, "tokenizer_config.json", DEEP), "nested more than 100 levels deep"),
        (lambda f: write(f, "special_tokens_map.json", DEEP), "nested more than 100 levels deep"),
        (lambda f: write(f, "generation_config.json", DEEP), "nested more than 100 levels deep"),
        (lambda f: write(f, "tokenizer.json", "[]"), "not a JSON object"),
        (lambda f: write(f, "tokenizer.json", "{}"), "not a tokenizer.json"),
        (lambda f: write(f, "tokenizer.json", '{"model": ' + HUGE + "}"), "thousands of digits"),
        (
            edit_json(lambda d: d["added_tokens"].append({**d["added_tokens"][0], "id": 10**12})),
            "not a tokenizer.json",
        ),
        (edit_json(lambda d: d["model"]["vocab"].update(x=10**9)), "not a tokenizer.json"),
        (edit_json(lambda d: d["model"]["vocab"].update(x=-5)), "not a tokenizer.json"),
        (edit_json(lambda d: d["model"]["vocab"].update(x="5")), "not a tokenizer.json"),
        (edit_json(lambda d: d["model"].update(merges=[["a", "nowhere"]])), "cannot read it"),
        (edit_json(lambda d: d["model"].update(merges=5)), "cannot read it"),
        (edit_json(lambda d: d.update(pre_tokenizer={"type": "Sequence"})), "not a tokenizer.json"),
    ],
)
def test_an_invalid_tokenizer_is_rejected(
    tmp_path: Path, edit: Callable[[Path], None], said: str
) -> None:
    folder = byte_level(tmp_path / "tokenizer")
    edit(folder)
    with pytest.raises(UserError, match=said) as error:
        load_tokenizer(str(folder))
    assert "\n" not in str(error.value)
    assert "SentencePiece model" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\x0a\xff\xff\xff\xff\x0f", DEEP.encode()])
def test_an_invalid_sentencepiece_model_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"some\.model"):
        load_tokenizer(str(path))


# texts


def test_pipes_and_devices_in_a_folder_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "kernel.txt").symlink_to("/proc/kmsg")
    found, skipped = find_files(str(tmp_path))
    assert [file.name for file in found] == ["a.txt"]
    assert skipped["not regular"] == 3
    with pytest.raises(UserError, match="not a regular file"):
        find_files(str(tmp_path / "pipe.txt"))


def test_circular_links_terminate(tmp_path: Path) -> None:
    texts(tmp_path / "a", 2)
    for name in ("up", "again", "a/up"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    for given in (tmp_path, tmp_path / "**", tmp_path / "**" / "*.txt", tmp_path / "a" / "**"):
        found, _ = find_files(str(given))
        assert sorted(Path(file.path).name for file in found) == ["0.txt", "1.txt"]


@pytest.mark.parametrize(
    "pattern",
    [
        "**",
        "**/*",
        "**/*.txt",
        "x/**",
        "x/**/*.txt",
        "**/x/*.txt",
        "*/**/a.txt",
        "**/.h/*.txt",
        "**/.a*",
        "[xy]/**/*.txt",
        "**/y/**",
        "**.txt",
        "x//**/a.txt",
        "nope/**",
        "**/x/**/*.txt",
    ],
)
def test_patterns_match_as_in_glob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    files = ["a.txt", "b.md", "x/a.txt", "x/y/a.txt", "x/y/z/c.txt", "x/.h/a.txt", ".hid/a.txt"]
    for name in [*files, "x/.a.txt", "y/x/b.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    expected = {os.path.normpath(path) for path in glob.glob(pattern, recursive=True)}
    found = {
        path
        for path in map(os.path.normpath, _glob_files(pattern, Counter()))
        if os.path.isfile(path)
    }
    assert found == {path for path in expected if os.path.isfile(path)}


@pytest.mark.parametrize("pattern", ["**", "**/*.txt", "**/y/*.txt", "in/**/b.txt", "**/l*/**"])
def test_patterns_follow_links_as_in_glob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for name in ("in/a.txt", "in/y/b.txt", "out/c.txt", "out/deep/y/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "in/link").symlink_to(tmp_path / "out")
    (tmp_path / "in/y/lot").symlink_to(tmp_path / "out/deep")
    (tmp_path / "in/kernel").symlink_to("/sys")
    monkeypatch.chdir(tmp_path / "in" if pattern == "**" else tmp_path)

    def reals(paths: Iterable[str]) -> set[str]:
        return {os.path.realpath(path) for path in paths if os.path.isfile(path)}

    found = [*_glob_files(pattern, Counter())]
    (tmp_path / "in/kernel").unlink()
    expected = reals(glob.iglob(pattern, recursive=True))
    assert reals(found) == expected
    assert len(expected) > 1 or pattern == "in/**/b.txt"
    (tmp_path / "in/y/up").symlink_to(tmp_path)
    (tmp_path / "out/deep/y/up").symlink_to(tmp_path / "in")
    assert reals(_glob_files(pattern, Counter())) >= expected  # and it ends


def test_too_many_files_are_rejected(tmp_path: Path) -> None:
    texts(tmp_path, 4)
    for given in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(UserError, match="more than 3 files; name a folder with fewer"):
            find_files(str(given), max_files=3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (DEEP, "nested more than 100 levels deep"),
        ('{"text": ' + DEEP + "}", "nested more than 100 levels deep"),
        ('{"text": ' + HUGE + "}", "a number of thousands of digits"),
        ('{"a":' * 90 + "1" + "}" * 90, 'no "text"'),
    ],
)
def test_an_invalid_line_of_text_is_rejected(tmp_path: Path, line: str, said: str) -> None:
    from famjax.data.sources import TextSource

    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")

    def read() -> None:
        source = TextSource(str(path), load_tokenizer("bytes"), seed=0, holdout=0)
        for k in range(2):
            list(source.open(source.key(0, 1, k)))

    with pytest.raises(UserError, match=said) as error:
        read()
    assert f"{path}, line 2: " in str(error.value)
