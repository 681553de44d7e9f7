"""A text source for tests, its tokens, and folders of texts."""

import gzip
import lzma

import numpy as np

from famjax.data.files import zstd
from famjax.data.sources import TextSource
from famjax.tokenizers.load import load_tokenizer

TOKENIZER = load_tokenizer("bytes")
OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".zst": zstd.open}


def make(files, seed=0, holdout=0, split="train"):
    return TextSource(str(files), TOKENIZER, seed, holdout, split)


def tokens(source, key, piece=0):
    return np.concatenate([p.tokens for p in source.open(key, piece)])


def text(source, key):
    ids = tokens(source, key)
    assert ids[0] == TOKENIZER.bos_id
    assert ids[-1] == TOKENIZER.eos_id
    return TOKENIZER.decode(ids)


def epoch(source, lanes=1):
    """Return the first epoch of lanes 0 to lanes - 1; there are at least as many documents."""
    count = len(source._documents)
    return [
        [text(source, source.key(lane, lanes, k)) for k in range(len(range(lane, count, lanes)))]
        for lane in range(lanes)
    ]
