"""One config of each mixer, stack and kind of memory, as changes of a small FAM.

Each of them is trained on a mesh, resumed, asked to generate, and exported
(`tests/contracts/test_registry.py` checks that none is missing).
"""

from __future__ import annotations

MEMORIES: dict[str, str] = {
    "fam": "model.mixer=fam",
    "fam-gated": "model.mixer=fam model.fam_update=gated",
    "fam-static": "model.mixer=fam model.fam_update=static",
    "fam-prefix": "model.mixer=fam model.fam_init=prefix model.fam_position=zero",
    "fam-between": "model.mixer=fam model.fam_position=between",
    "fm": "model.mixer=fm model.memory_segments=1",
    "bswa": "model.mixer=bswa",
    "bswa_sg": "model.mixer=bswa_sg",
    "swa": "model.mixer=swa model.window=8",  # Transformer-XL
    "full": "model.mixer=full model.capacity=2048",
    "linear": "model.mixer=linear",
    "delta": "model.mixer=delta",
    "block_recurrent": "model.mixer=block_recurrent",
    "conv": "model.mixer=fam model.short_conv=4",
    "n-grams": "model.mixer=bswa model.ngram_memory=2",
    "rmt": "model.stack=rmt",
    "autocompressor": "model.stack=autocompressor model.capacity=2048",
    "feedback": "model.stack=feedback model.block_len=1 model.feedback.span=16",
    "transformer": "model.stack=transformer model.block_len=1 model.feedback.span=16",
    "lstm": "model.stack=lstm model.block_len=1",
}
