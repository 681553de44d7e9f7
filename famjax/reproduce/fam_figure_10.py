"""TransformerFAM, Figure 10: passkeys with feedback memory segments and static summary tokens."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.fam_figure_3 import AT_PAPER, window
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 1024, 2048, 4096)
_LONGEST = ("data.passkey.max_length=1024", "train.steps=1000")
_SEGMENTS = (1, 2, 4)


def _outputs(segments: int) -> Variant:
    """Return FM, which reads beyond its segments, and passes no memory on to further questions."""
    shape = ("model.mixer=fm", f"model.memory_segments={segments}")
    own = (*shape, *_LONGEST, "data.passkey.ask_every=0")
    return Variant(f"FM{segments}", own, at_paper=(*shape, *AT_PAPER))


FAM_FIGURE_10 = Experiment(
    id="fam-figure-10",
    title="Passkeys with feedback memory segments and static summary tokens",
    source="TransformerFAM, Figure 10",
    config="passkey",
    variants=(
        *(window("bswa", segments, f"M{segments}") for segments in _SEGMENTS),
        *(_outputs(segments) for segments in _SEGMENTS),
        Variant(
            "SUM",
            ("model.fam_update=static", *_LONGEST),
            at_paper=("model.fam_update=static", "model.memory_segments=0", *AT_PAPER),
        ),
        Variant("FAM", _LONGEST, at_paper=("model.memory_segments=0", *AT_PAPER)),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        *(Ordering(f"FM{segments}", f"M{segments}") for segments in _SEGMENTS),
        Ordering("FAM", "FM4", "4,096"),
        Ordering("FAM", "SUM", "4,096"),
    ),
    # the key comes first, as in the paper, and FM has no smeared keys, so that none has
    overrides=("data.passkey.needle_within=0", "model.smeared_keys=false"),
    paper_config="fam_1b",
    axis="tokens of the document",
    note="0.14 million parameters trained from scratch on documents of at most 1,024 tokens (BSWA "
    "of at most 64 a segment), where the paper finetunes Flan-PaLM 1B on 18,000; the key comes "
    "first, keys are not smeared. FAM and SUM have one memory segment, FAM the gated update.",
    minutes=6.0,
)
