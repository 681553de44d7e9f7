"""TransformerFAM, Figure 10: passkeys with feedback memory segments and static summary tokens."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.fam_figure_3 import AT_PAPER, window
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 1024, 2048, 4096)
# one question a document: FM passes no memory on to further ones
_LONGEST = ("data.passkey.max_length=1024", "train.steps=1000", "data.passkey.ask_every=0")
_SEGMENTS = (1, 2, 4)


def _outputs(segments: int) -> Variant:
    """Return FM, which reads beyond its segments."""
    shape = ("model.mixer=fm", f"model.memory_segments={segments}")
    return Variant(f"FM{segments}", (*shape, *_LONGEST), at_paper=(*shape, *AT_PAPER))


def _memory(name: str, update: str) -> Variant:
    shape = f"model.fam_update={update}"
    return Variant(name, (shape, *_LONGEST), at_paper=(shape, "model.memory_segments=0", *AT_PAPER))


FAM_FIGURE_10 = Experiment(
    id="fam-figure-10",
    title="Passkeys with feedback memory segments and static summary tokens",
    source="TransformerFAM, Figure 10",
    config="passkey",
    variants=(
        *(window("bswa", segments, f"M{segments}") for segments in _SEGMENTS),
        *(_outputs(segments) for segments in _SEGMENTS),
        _memory("SUM", "static"),
        _memory("FAM", "sum"),
        _memory("gated FAM", "gated"),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        *(Ordering(f"FM{segments}", f"M{segments}") for segments in _SEGMENTS),
        *(Ordering("FAM", f"FM{segments}", "4,096") for segments in _SEGMENTS),
        Ordering("FAM", "SUM", "4,096"),
    ),
    # the key comes first, as in the paper, and FM has no smeared keys, so that none has
    overrides=("data.passkey.needle_within=0", "model.smeared_keys=false"),
    paper_config="fam_1b",
    axis="tokens of the document",
    note="0.14 million parameters trained from scratch on documents of at most 1,024 tokens (BSWA "
    "of at most 64 a segment), where the paper finetunes Flan-PaLM 1B on 18,000; the key comes "
    "first, keys are not smeared, each document has one question. FAM and SUM have one memory "
    "segment.",
    minutes=6.0,
)
