"""Files that are not texts, cannot be read or change are one-line errors."""

import builtins
import errno
import gzip
import lzma
import os

import numpy as np
import pytest
from source_helpers import OPENERS, TOKENIZER, make, tokens

from famjax.core.errors import UserError
from famjax.data.files import check_text, read_text_pieces, zstd
from famjax.data.json_lines import parse_record
from famjax.data.sources import TextSource


def test_named_files_must_be_text(tmp_path):
    (tmp_path / "binary").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes(b"na\xefve text")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "none").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="names no file"):
        make(" ,,")
    for name, message in [
        ("binary", "binary, byte 2 is zero"),
        ("latin", "not UTF-8 at byte 2; convert it"),
        ("empty", "no text found; skipped 1 empty"),
        ("none", "no text found"),
        ("latim", f"no such file or folder: .*latim; did you mean '{tmp_path}/latin'"),
        ("nowhere/x", f"no such file or folder: .*; there is no folder {tmp_path}/nowhere"),
        ("*.x", "no such file or folder"),
        ("a\0b", "names no file"),
        ("dangling", f"dangling is a link to {tmp_path}/gone, which is missing"),
    ]:
        with pytest.raises(UserError, match=message):
            make(tmp_path / name)
    with pytest.raises(UserError, match="empty"):
        list(read_text_pieces(str(tmp_path / "empty")))


def deny_permission(monkeypatch, *paths):
    """Deny permission to folders and files, also to root."""
    refused = {str(path) for path in paths}
    scandir, opened = os.scandir, builtins.open

    def scan(path="."):
        if str(path) in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    def read(path, *args, **kwargs):
        if str(path) in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(builtins, "open", read)


def test_missing_permission_is_reported(folder, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "sub" / "a.txt").write_text("words")
    message = "no permission to read it; chmod it"
    for refused, files in [
        (folder, folder),
        (folder, f"{folder}/*.txt"),
        (folder, f"{folder}/none.txt"),
        (folder / "sub", folder / "sub"),
        (folder, f"{folder}/**/*.txt"),
        (folder / "03.txt", folder),
        (folder / "03.txt", folder / "03.txt"),
    ]:
        with monkeypatch.context() as patch:
            deny_permission(patch, refused)
            with pytest.raises(UserError) as error:
                make(files)
        assert str(error.value).startswith(f"{refused}: {message}"), files


def test_unreadable_subfolders_are_counted(folder, monkeypatch):
    count = len(make(folder))
    for name in ("lost+found", "root/own"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text("words")
    deny_permission(monkeypatch, folder / "lost+found")
    for files in (folder, f"{folder}/**/*.txt"):
        source = make(files)
        assert len(source) == count + 1
        assert source.report().endswith("; skipped 1 folder without permission")
    deny_permission(monkeypatch, folder / "root")
    assert make(folder).report().endswith("; skipped 2 folders without permission")
    with pytest.raises(UserError, match="no text found; skipped 1 folder without permission"):
        make(f"{folder}/r*/**")
    with pytest.raises(UserError, match=r"no such file or folder: .*/nope"):
        make(f"{folder}, {folder}/nope")


def test_checked_lines_are_not_checked_again(tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    for suffix, opener in OPENERS.items():
        with opener(tmp_path / f"a.jsonl{suffix}", "wb") as file:
            file.write(b'{"text": "fine"}\n\n{"text": "more"}\n')
    files = [tmp_path / f"a.jsonl{suffix}" for suffix in OPENERS]
    checked = []

    def parse(line, template):
        checked.append(line)
        return parse_record(line, template)

    monkeypatch.setattr("famjax.data.scan.parse_record", parse)

    def checks(save=True):
        checked.clear()
        given = ",".join(map(str, files))
        source = TextSource(given, TOKENIZER, seed=0, holdout=0, checked=record)
        if save:
            source.save_checked()
        assert len(source) == 2 * len(OPENERS)
        return len(checked)

    assert checks(save=False) == 2 * len(OPENERS)
    assert checks() == 2 * len(OPENERS)
    assert checks() == 0
    before = os.stat(files[0])
    files[0].write_bytes(b'{"text": "five"}\n\n{"text": "four"}\n')
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert checks() == 2
    assert checks() == 0
    for damaged in (
        "",
        "[]",
        '{"files": 1}',
        record.read_text().replace('"rules": [', '"rules": [0, '),
    ):
        record.write_text(damaged)
        assert checks() == 2 * len(OPENERS)
    record.unlink()
    record.mkdir()
    assert checks() == 2 * len(OPENERS)  # when the result cannot be saved either


@pytest.mark.parametrize("count", [1, 40_000, 300_000])
@pytest.mark.parametrize("rest", [b"", b" word" * 9])
def test_error_names_undecodable_bytes_far_into_a_file(tmp_path, count, rest):
    """Before anything is read; in a folder, the file is skipped."""
    (tmp_path / "a.txt").write_bytes(b"word " * count + b"\xe4" + rest)
    with pytest.raises(UserError, match=rf"a\.txt: not UTF-8 at byte {5 * count};"):
        make(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"no text found; skipped 1 not UTF-8"):
        make(tmp_path)
    (tmp_path / "b.txt").write_text("word")
    assert make(tmp_path).report() == "1 document, 4 bytes, none held out; skipped 1 not UTF-8"
    assert len(make(tmp_path)) == 1


def test_a_character_may_be_anywhere_in_a_large_file(tmp_path):
    content = "x" * ((1 << 20) - 1) + "äöü" * 400_000
    (tmp_path / "a.txt").write_text(content)
    assert "".join(make(tmp_path).texts()) == content


def test_a_file_that_changes_is_an_error_when_it_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"word " * 40_000)
    source = make(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"word " * 39_999 + b"wor\xe4 ")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 at byte 199998"):
        tokens(source, source.key(0, 1, 0))


def test_checked_texts_are_not_checked_again(tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    (tmp_path / "texts").mkdir()
    for name, end in (("a.txt", b""), ("bad.txt", b"\xe4")):
        (tmp_path / "texts" / name).write_bytes(b"word " * 40_000 + end)
    (tmp_path / "texts" / "short.txt").write_bytes(b"word")
    checked = []

    def check(path, explicit, progress):
        checked.append(os.path.basename(path))
        return check_text(path, explicit, progress)

    monkeypatch.setattr("famjax.data.scan.check_text", check)
    for known in ((), ("a.txt",)):
        source = TextSource(str(tmp_path / "texts"), TOKENIZER, 0, 0, checked=record)
        assert source.report().endswith("; skipped 1 not UTF-8")
        assert sorted(checked) == sorted({"a.txt", "bad.txt"} - {*known})
        source.save_checked()
        checked.clear()
    (tmp_path / "texts" / "a.txt").write_bytes(b"word " * 40_001)
    TextSource(str(tmp_path / "texts"), TOKENIZER, 0, 0, checked=record)
    assert sorted(checked) == ["a.txt", "bad.txt"]


def test_error_names_zeros_far_into_a_file(tmp_path):
    """As a crash may leave them at the end of a file."""
    (tmp_path / "a.txt").write_bytes(b"word " * 40_000 + bytes(9))
    with pytest.raises(UserError, match=r"a\.txt: binary, byte 200000 is zero"):
        make(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"no text found; skipped 1 binary"):
        make(tmp_path)
    with pytest.raises(UserError, match=r"a\.txt: binary, byte 200000 is zero"):
        list(read_text_pieces(str(tmp_path / "a.txt")))
    # in JSON, NUL is a character like any other
    (tmp_path / "a.txt").rename(tmp_path / "a.bin")
    (tmp_path / "b.jsonl").write_text('{"text": "a\\u0000b"}')
    source = make(tmp_path / "b.jsonl")
    assert 0 in tokens(source, source.key(0, 1, 0))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_error_names_truncated_archives(tmp_path, suffix):
    compress = {".gz": gzip, ".xz": lzma, ".zst": zstd}[suffix].compress
    data = compress(np.random.default_rng(0).integers(32, 127, 400_000, np.uint8).tobytes())
    for name, content, message in [
        (f"a.txt{suffix}", data[:-1000], "truncated or damaged"),
        (f"b.txt{suffix}", compress(b"word " * 40_000 + b"\xe4"), "not UTF-8 at byte 200000"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: {message}"):
            make(tmp_path / name)
    lines = compress(b'{"text": "fine"}\n' * 100_000)
    (tmp_path / f"c.jsonl{suffix}").write_bytes(lines[:-20])
    with pytest.raises(UserError, match=f"c.jsonl{suffix}: truncated or damaged"):
        make(tmp_path / f"c.jsonl{suffix}")
    (tmp_path / f"a.txt{suffix}").write_bytes(b"no archive")
    with pytest.raises(UserError, match="truncated or damaged"):
        make(tmp_path)


def test_zstd_with_a_long_window_is_read(tmp_path):
    options = {zstd.CompressionParameter.window_log: 28}
    with zstd.open(tmp_path / "a.txt.zst", "wb", options=options) as file:
        file.write(b"word " * 1000)
    assert list(make(tmp_path).texts()) == ["word " * 1000]
