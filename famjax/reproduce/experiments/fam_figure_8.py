"""TransformerFAM, Figure 8: passkeys with RMT and AutoCompressors (B.4.6)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 1024, 2048, 4096)
_LONGEST = "4,096"

FAM_FIGURE_8 = Experiment(
    id="fam-figure-8",
    title="Passkeys with RMT and AutoCompressors",
    source="TransformerFAM, Figure 8",
    config="passkey",
    variants=(
        *_passkey.memories(),
        _passkey.window(1),
        Variant("Block-Recurrent", ("model.mixer=bswa,block_recurrent",)),
        Variant("RMT", ("model.stack=rmt",)),
        Variant("AutoCompressor", ("model.stack=autocompressor", "model.fam_len=2")),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        *(Ordering(_passkey.SUM, name, _LONGEST) for name in ("RMT", "AutoCompressor", "M1")),
        # "RMT showed worse performance than BSWA with 1 memory segment": where M1 sees the key
        Ordering("M1", "RMT", "128"),
        # within the lengths of training
        Ordering("AutoCompressor", "M1", "1,024"),
    ),
    # at most 1,024 tokens, so that AutoCompressors have a place for all summaries
    overrides=(
        *_passkey.DOCUMENTS,
        "data.passkey.max_length=1024",
        "train.steps=1000",
    ),
    axis="tokens of the document",
    note=_passkey.NOTE + " Documents have at most 1,024 tokens. RMT has 16 memory tokens, as FAM, "
    "AutoCompressors 2 summary tokens for each segment of 32. With 18 layers and blocks of 1,024 "
    "the paper's M1 sees some thousand tokens; here it sees the key in documents of 128 only, so "
    "that it is compared with RMT there. The figure lacks the Block-Recurrent Transformer (C.1), "
    "which has 16 states in its upper layer.",
    minutes=8.0,
)
