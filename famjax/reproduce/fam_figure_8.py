"""TransformerFAM, Figure 8: passkeys with RMT and AutoCompressors (B.5)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.fam_figure_3 import AT_PAPER, window
from famjax.reproduce.measures import PasskeyMeasure

# trained on at most 1,024 tokens, so that AutoCompressors have a place for all summaries
_LENGTHS = (128, 512, 1024, 2048, 4096)
_LONGEST = ("data.passkey.max_length=1024", "data.passkey.needle_within=1024", "train.steps=1000")
_SEGMENTS = ("model.smeared_keys=false", *_LONGEST)

FAM_FIGURE_8 = Experiment(
    id="fam-figure-8",
    title="Passkeys with RMT and AutoCompressors",
    source="TransformerFAM, Figure 8",
    config="passkey",
    variants=(
        Variant("FAM", _LONGEST, at_paper=("model.memory_segments=0", *AT_PAPER)),
        window("bswa", 1, "M1"),
        Variant("Block-Recurrent", ("model.mixer=bswa,block_recurrent", *_LONGEST)),
        Variant("RMT", ("model.stack=rmt", *_SEGMENTS)),
        Variant(
            "AutoCompressor",
            ("model.stack=autocompressor", "model.fam_len=2", *_SEGMENTS),
        ),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        Ordering("FAM", "RMT", "4,096"),
        Ordering("FAM", "AutoCompressor", "4,096"),
        Ordering("M1", "RMT", "4,096"),
        Ordering("AutoCompressor", "M1", "1,024"),
    ),
    axis="tokens of the document",
    note="0.14 million parameters trained from scratch on documents of at most 1,024 tokens, where "
    "the paper finetunes Flan-PaLM 1B on 18,000; FAM has one memory segment and the gated update, "
    "RMT 16 memory tokens, AutoCompressors 2 summary tokens for each segment of 32. The figure "
    "lacks the Block-Recurrent Transformer (C.1), which has 16 states in its upper layer.",
    minutes=8.0,
)
