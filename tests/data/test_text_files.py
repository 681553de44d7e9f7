"""Files are found by folder, glob and list; compressed ones are decompressed to a file."""

import gc
import gzip
import itertools
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from source_helpers import OPENERS, TOKENIZER, epoch, make, tokens

from famjax.core.errors import UserError
from famjax.data.find_files import find_files, list_files
from famjax.data.plain_text import PlainTextWriter
from famjax.data.sources import TextSource


@pytest.mark.parametrize(
    "suffix", [".gz", *(pytest.param(suffix, marks=pytest.mark.long) for suffix in (".xz", ".zst"))]
)
def test_a_long_seek_in_a_compressed_text_is_reported(tmp_path, monkeypatch, capsys, suffix):
    with OPENERS[suffix](tmp_path / f"a.txt{suffix}", "wb") as file:
        file.write(b"word " * 1_500_000)
    plain, seconds = tmp_path / "a.txt", itertools.count()
    plain.write_bytes(b"word " * 1_500_000)

    def open_source(name):
        return TextSource(str(tmp_path / name), TOKENIZER, 0, 10, checked=tmp_path / f"{name}.json")

    for name in (f"a.txt{suffix}", "a.txt"):
        open_source(name).save_checked()
    monkeypatch.setattr("famjax.data.files.time.monotonic", lambda: float(next(seconds)))
    source = open_source(f"a.txt{suffix}")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        f"famjax: reading data.files: 6 MB so far, 1 MB/s, now in {tmp_path / 'a.txt'}{suffix}"
    )
    other = open_source("a.txt")
    assert capsys.readouterr().err == ""
    assert epoch(source) == epoch(other)


@pytest.mark.parametrize("suffix", list(OPENERS))
def test_a_line_too_long_for_memory_is_rejected(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        file.write(b'{"text": "fine"}\n{"text": "' + b"a" * 100 + b'"}\n')
    source = make(path)
    monkeypatch.setattr("famjax.data.json_lines._MAX_LINE_BYTES", 100)
    said = r"a\.jsonl.*, line 2: more than 100 bytes; write so long a document to a text file"
    with pytest.raises(UserError, match=said):
        make(path)
    with pytest.raises(UserError, match=said):
        epoch(source)  # the line has grown since the scan


def test_no_disk_space_for_a_decompressed_file_is_an_error(tmp_path, monkeypatch):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "fine"}\n')
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: its text could not be written to .*TMPDIR"):
        make(tmp_path)


def test_decompressed_files_are_closed_and_deleted_with_the_source(tmp_path, monkeypatch):
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    for number in range(40):
        with gzip.open(tmp_path / f"{number}.jsonl.gz", "wt") as file:
            file.write(f'{{"text": "{number}"}}\n')
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, hard))
    try:
        source = make(f"{tmp_path}/*.gz")
        assert sorted(epoch(source)[0], key=int) == [str(number) for number in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "spool").glob("*/*"))) == 40
    del source
    gc.collect()
    assert list((tmp_path / "spool").glob("*/*")) == []


def test_decompressed_files_of_killed_processes_are_removed(tmp_path, monkeypatch):
    """Those of a process that runs are kept until it ends, and other folders for ever."""
    copy = (
        "from famjax.data.plain_text import PlainTextWriter\n"
        "writer = PlainTextWriter('a.gz')\n"
        "writer.close()\n"
        "print(writer.plain.path, flush=True)\n"
        "input()\n"
    )

    def start():
        command, pipe = [sys.executable, "-c", copy], subprocess.PIPE
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    (tmp_path / "famjax-copies-of_mine_").mkdir()
    (tmp_path / "famjax-copies-of_mine_" / "a.txt").write_text("word")
    with start() as killed, start() as running:
        paths = [process.stdout.readline().strip() for process in (killed, running)]
        assert all(os.path.exists(path) for path in paths)
        killed.kill()
        killed.wait()
        assert os.path.exists(paths[0])
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        writer = PlainTextWriter("b.gz")
        assert [os.path.exists(path) for path in paths] == [False, True]
        running.communicate("\n")
    writer.close()
    folders = {os.path.dirname(writer.plain.path), str(tmp_path / "famjax-copies-of_mine_")}
    assert {str(path) for path in tmp_path.iterdir()} == folders
    assert (tmp_path / "famjax-copies-of_mine_" / "a.txt").exists()


def test_files_are_found_by_folder_glob_and_list(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ["a.txt", "b.md", "sub/c.py", ".d.txt", ".hidden/e.txt"]:
        (tmp_path / name).write_text(name)
    (tmp_path / "binary").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes(b"na\xefve text")
    (tmp_path / "empty").write_bytes(b"")
    source = make(tmp_path)
    assert sorted(epoch(source)[0]) == ["a.txt", "b.md", "sub/c.py"]
    size = sum((tmp_path / name).stat().st_size for name in ("a.txt", "b.md", "sub/c.py"))
    skipped = "skipped 1 binary, 1 empty, 2 hidden, 1 not UTF-8"
    report = f"3 documents, {size} bytes, none held out; {skipped}"
    assert source.report() == report
    assert epoch(make(f"{tmp_path}/**/*.py"))[0] == ["sub/c.py"]
    assert sorted(epoch(make(f"{tmp_path}/a.txt, {tmp_path}/b.*, {tmp_path}/a.txt"))[0]) == [
        "a.txt",
        "b.md",
    ]


def test_names_may_have_commas(tmp_path):
    for name in ("Melville, Herman.txt", "b.txt", "c,d"):
        (tmp_path / name).write_text(name)
    both = f"{tmp_path}/Melville, Herman.txt, {tmp_path}/b.txt"
    assert sorted(epoch(make(both))[0]) == ["Melville, Herman.txt", "b.txt"]
    assert list_files(f"{tmp_path}/b.txt,{tmp_path}/c,d", "data.source") == [
        f"{tmp_path}/b.txt",
        f"{tmp_path}/c,d",
    ]
    (tmp_path / "c").write_text("c")
    assert list_files(f"{tmp_path}/c,d", "data.source") == [f"{tmp_path}/c,d"]
    with pytest.raises(UserError, match=r"no such file or folder: .*/x"):
        make(f"{tmp_path}/x, y,{tmp_path}/b.txt")


def test_a_byte_order_mark_is_not_text(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_text("first and second", encoding="utf-8-sig")
    source = make(tmp_path)
    assert epoch(source)[0] == ["first and second"]
    whole = tokens(source, source.key(0, 1, 0))
    for piece in range(1, 4):
        rest = tokens(source, source.key(0, 1, 0), piece)
        np.testing.assert_array_equal(rest, whole[len(whole) - len(rest) :])
    # held-out tails and parts begin elsewhere
    (tmp_path / "a.txt").write_text("word " * 40, encoding="utf-8-sig")
    halves = [make(tmp_path, holdout=2, split=split) for split in ("train", "holdout")]
    assert "".join(text for half in halves for text in half.texts()) == "word " * 40
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(UserError, match="no text found; skipped 1 empty"):
        make(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb")
    with pytest.raises(UserError, match="not UTF-8"):
        make(tmp_path / "a.txt")


def test_folders_follow_links_like_globs(tmp_path):
    for name in ("folder/b", "folder/b/inner", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for name in ("folder/z.txt", "folder/b/b.txt", "elsewhere/e.txt", "elsewhere/deep/d.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "again").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "folder" / "own").symlink_to(tmp_path / "folder" / "b")
    (tmp_path / "folder" / "b" / "inner" / "up").symlink_to(tmp_path / "folder")
    (tmp_path / "folder" / "system").symlink_to("/proc")
    (tmp_path / "folder" / "broken").symlink_to(tmp_path / "none")
    folder = str(tmp_path / "folder")
    found = find_files(folder)[0]
    # by their own paths first
    assert [file.name for file in found] == ["z.txt", "b/b.txt", "a/e.txt", "a/deep/d.txt"]
    assert {file.path for file in find_files(f"{folder}/**/*.txt")[0]} == {f.path for f in found}


def test_an_empty_name_does_not_read_pythons_library():
    source = make("", holdout=20)
    assert "documents" in source.report()
    names = [key[0] for key in (source.key(0, 1, k) for k in range(100))]
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)
