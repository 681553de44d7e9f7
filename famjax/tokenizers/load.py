"""Loads tokenizers by name, copies them into a run folder, and loads these copies."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from famjax.core.errors import UserError
from famjax.core.json_files import read_whole
from famjax.core.paths import expanded
from famjax.tokenizers.hugging_face import HuggingFaceTokenizer
from famjax.tokenizers.marian import MARIAN_FILES, MarianTokenizer
from famjax.tokenizers.sentence_piece import SentencePieceTokenizer
from famjax.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from famjax.tokenizers.words import read_words

# files that define a tokenizer in a folder; _SIBLING_FILES are what Hugging Face keeps beside them
SENTENCEPIECE, HUGGING_FACE, WORDS = "tokenizer.model", "tokenizer.json", "words.txt"
# names of tokenizers that have no file: bytes, and the words of a toy task
WITHOUT_FILE = ("bytes", "task")
# folder for Hugging Face's files in a run folder
HUGGING_FACE_FOLDER = "tokenizer"
_SIBLING_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that `spec` names.

    Args:
      spec: "bytes"; or the path of a SentencePiece model, of a tokenizer.json, of a word list
        (.txt) or of a folder with one of them, in which tokenizer.json has precedence. A folder
        with source.spm is that of a Marian model; a source.spm alone is a SentencePiece model.

    Raises:
      UserError: the tokenizer is missing or damaged, or its tokens do not represent fixed bytes.
    """
    if spec == "bytes":
        return ByteTokenizer()
    try:
        path = _definition_file(spec)
        if _is_marian(spec, path):
            return MarianTokenizer(spec, path.parent)
        if path.suffix == ".json":
            return HuggingFaceTokenizer(spec, path)
        if path.suffix == ".txt":
            return read_words(spec, path)
        content = read_whole(path, "give a tokenizer's file")
    except OSError as error:
        raise UserError(
            f"data.tokenizer={spec}: {error.strerror}; give 'bytes', the path of a SentencePiece "
            "model, of a tokenizer.json or of a word list, or a folder with one of them"
        ) from None
    try:
        return SentencePieceTokenizer(spec, content)
    except (RuntimeError, ValueError, IndexError):
        raise UserError(f"data.tokenizer={spec}: the file is not a SentencePiece model") from None


def _definition_file(spec: str) -> Path:
    """Return the file that defines the tokenizer named by `spec`."""
    path = expanded(spec)
    if not path.is_dir():
        return path
    # some Marian folders have a tokenizer.json of another library as well
    for name in (MARIAN_FILES[0], HUGGING_FACE, SENTENCEPIECE, WORDS):
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"data.tokenizer={spec}: the folder has no {HUGGING_FACE} and no {SENTENCEPIECE}; give one "
        "that has, or 'bytes'"
    )


def _is_marian(spec: str, path: Path) -> bool:
    """Return whether the file that `_definition_file` found is of a Marian tokenizer."""
    return path.name == MARIAN_FILES[0] and (
        path != expanded(spec) or all(path.with_name(name).exists() for name in MARIAN_FILES)
    )


def save_tokenizer(spec: str, folder: Path) -> None:
    """Copy the tokenizer that `spec` names into `folder`, for `load_saved_tokenizer`.

    A SentencePiece model is copied to folder/tokenizer.model, a word list to folder/words.txt, and
    Hugging Face's and Marian's files to folder/tokenizer/. Other tokenizers' files that an earlier
    attempt at a run left there are removed.
    """
    if spec == "bytes":
        _remove_other_files(folder, ())
        return
    source, home = _definition_file(spec), folder / HUGGING_FACE_FOLDER
    if source.suffix == ".txt":
        save_words(read_words(spec, source).text(), folder)
        return
    copies = {source: folder / SENTENCEPIECE}
    if (is_marian := _is_marian(spec, source)) or source.suffix == ".json":
        names = MARIAN_FILES if is_marian else (HUGGING_FACE,)
        siblings = [name for name in _SIBLING_FILES if source.with_name(name).exists()]
        sources = [source if name == HUGGING_FACE else source.with_name(name) for name in names]
        sources += [source.with_name(name) for name in siblings]
        copies = dict(zip(sources, [home / name for name in (*names, *siblings)], strict=True))
        home.mkdir(exist_ok=True)
    for original, copy in copies.items():
        _copy(original, copy)
    _remove_other_files(folder, copies.values())


def save_words(text: str, folder: Path) -> None:
    """Write a word list into `folder`, for `load_saved_tokenizer`."""
    (folder / WORDS).write_text(text, encoding="utf-8", newline="\n")
    _remove_other_files(folder, [folder / WORDS])


def _remove_other_files(folder: Path, saved: Collection[Path]) -> None:
    """Remove the files of tokenizers that are not among those just saved.

    Without a config the folder was no run before: then the files are the user's.
    """
    if not (folder / "config.json").exists():
        return
    home = folder / HUGGING_FACE_FOLDER
    names = (HUGGING_FACE, *MARIAN_FILES, *_SIBLING_FILES)
    for file in (folder / SENTENCEPIECE, folder / WORDS, *(home / name for name in names)):
        if file not in saved:
            file.unlink(missing_ok=True)
    with suppress(OSError):  # there are other files in it
        home.rmdir()


def _copy(source: Path, target: Path) -> None:
    if not (target.exists() and source.samefile(target)):
        target.write_bytes(read_whole(source, "copy the tokenizer again"))


def load_saved_tokenizer(folder: Path, spec: str) -> Tokenizer:
    """Return the tokenizer that `save_tokenizer(spec, folder)` saved.

    If `spec` is a path, it may be from another machine, so it is not opened.

    Raises:
      UserError: the copy is missing or damaged.
    """
    if spec == "bytes":
        return load_tokenizer(spec)
    home = folder / HUGGING_FACE_FOLDER
    if (home / MARIAN_FILES[0]).exists():
        return load_tokenizer(str(home))
    for copy in (
        home / HUGGING_FACE,
        folder / SENTENCEPIECE,
        folder / WORDS,
    ):
        if copy.exists():
            return load_tokenizer(str(copy))
    raise UserError(
        f"{folder}: has lost its copy of the tokenizer {spec}; restore tokenizer/, "
        f"{SENTENCEPIECE} or {WORDS}, whichever it had"
    )
