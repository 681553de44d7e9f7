"""TransformerFAM, Figure 10: passkeys with memory segments and summary tokens (C.2, C.3)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 1024, 2048, 4096)
_LONGEST = "4,096"
_SEGMENTS = (1, 2, 4)
_SUMMARY = "SUM"


def _claims(longest: str) -> tuple[Ordering, ...]:
    """Return the claims; `longest` is the score of the longest documents."""
    return (
        *(Ordering(f"FM{segments}", f"M{segments}") for segments in _SEGMENTS),
        *(
            Ordering(_passkey.SUM, f"{kind}{segments}", longest)
            for kind in ("FM", "M")
            for segments in _SEGMENTS
        ),
        Ordering(_passkey.SUM, _SUMMARY, longest),
    )


FAM_FIGURE_10 = Experiment(
    id="fam-figure-10",
    title="Passkeys with feedback memory segments and static summary tokens",
    source="TransformerFAM, Figure 10",
    config="passkey",
    variants=(
        *(_passkey.window(segments) for segments in _SEGMENTS),
        *(_passkey.window(segments, "fm", f"FM{segments}") for segments in _SEGMENTS),
        _passkey.memory(_SUMMARY, "static"),
        *_passkey.memories(),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=_claims(_LONGEST),
    overrides=(
        *_passkey.DOCUMENTS,
        "data.passkey.max_length=1024",
        "train.steps=1000",
    ),
    at_paper=PaperSize(
        config="fam_1b",
        measure=_passkey.PAPER_MEASURE,
        orderings=_claims(_passkey.PAPER_LONGEST),
    ),
    axis="tokens of the document",
    note=_passkey.NOTE + " Documents have at most 1,024 tokens.",
    minutes=6.0,
)
