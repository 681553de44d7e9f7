"""Shared parts of passkey experiments: documents with the key first, windows and memories."""

from __future__ import annotations

from famjax.reproduce.experiment import Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.measures import PasskeyMeasure

BLOCK = 32
# The key comes first (3.2), each document has one question, which ends its block, and keys are not
# smeared, since the models compared with FAM lack that: all models train on the same documents. The
# curriculum lengthens documents when a model solves the short ones, so models with windows stay at
# lengths within their receptive field.
DOCUMENTS = (
    "data.passkey.needle_within=0",
    "data.passkey.ask_every=0",
    f"data.passkey.multiple={BLOCK}",
    "data.passkey.start_length=96",
    "model.smeared_keys=false",
    "model.short_conv=0",
    "train.write_loss=0.0",
)
# gates of the experiments that were run before configs/passkey.py had others: the defaults
GATES = ("model.fam_gate_threshold=0.01", "model.fam_max_timescale=64.0")
# the key comes first, and questions are anywhere; FAM without a segment learns this in 1,100 steps
KEY_FIRST = (
    *("data.passkey.needle_within=0", "train.steps=1100", "train.write_loss=0.0"),
    *("model.smeared_keys=false", "model.short_conv=0", "model.memory_segments=0"),
)
# the paper finetunes on fillers of "2k to 18k randomly" (3.2); each document is in one row. The
# loss of tokens other than the answer keeps its default weight: the paper gives none for passkeys
AT_PAPER = (
    "data.task=passkey",
    "data.passkey.lengths=uniform",
    "data.passkey.min_length=2048",
    "data.passkey.start_length=18432",
    "data.passkey.max_length=18432",
    "data.length=19456",
    "data.repeat_len=0",
    "train.steps=5000",
)
# fillers of 2k to 260k tokens, in the vocabulary of the model that is finetuned
PAPER_MEASURE = PasskeyMeasure(tuple(2**n for n in range(11, 19)), examples=32, vocabulary=0)
PAPER_LONGEST = "262,144"
SUM, GATED = "FAM", "gated FAM"


def window(segments: int, mixer: str = "bswa", name: str = "") -> Variant:
    """Return a window with memory segments; its default name is `M` with their number."""
    shape = (f"model.mixer={mixer}", f"model.memory_segments={segments}")
    at_paper = (*_text.SHAPE_AT_PAPER, *shape, *AT_PAPER)
    return Variant(name or f"M{segments}", shape, at_paper=at_paper)


def memory(name: str, update: str, here_only: bool = False) -> Variant:
    """Return a FAM without memory segments, like the paper's (3.2)."""
    gates = GATES if update == "gated" else ()
    shape = (f"model.fam_update={update}", *gates, "model.memory_segments=0")
    at_paper = (*_text.FAM_AT_PAPER, *shape, *AT_PAPER)
    return Variant(name, shape, at_paper=at_paper, here_only=here_only)


def memories() -> tuple[Variant, Variant]:
    """Return FAM with the paper's update, and FAM with the gated update of famjax."""
    return memory(SUM, "sum"), memory(GATED, "gated", here_only=True)


DOCUMENTS_NOTE = (
    "M with a number is block sliding window attention with that many memory segments. Trained "
    "from scratch, where the paper finetunes Flan-PaLM 1B on 18,000 tokens. Blocks of 32; "
    "the key comes first and the question ends its block; keys are not smeared. All models train "
    "on equally many tokens of the same documents, which get longer when a model knows the short "
    "ones."
)
NOTE = (
    DOCUMENTS_NOTE
    + " Models have 0.14 million parameters. FAM adds its update, as in the paper, gated FAM has "
    "ours; both without memory segments, as the paper's."
)
