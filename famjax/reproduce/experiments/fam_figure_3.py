"""TransformerFAM, Figure 3: passkey retrieval (3.2)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

# lengths within the receptive fields of M1, M2, M4 and M12, and beyond all of them
_LENGTHS = (128, 192, 320, 768, 8192, 32_768, 262_144)
_FAR = ("32,768", "262,144")
_MARGIN = 0.05
_SEGMENTS = (1, 2, 4, 12)


def _saturates(score: str = "") -> tuple[Ordering, ...]:
    """Return the claims: "improves significantly up to M2, after which it saturates"."""
    return (
        Ordering("M2", "M1", score),
        Ordering("M2", "M12", score, margin=_MARGIN, may_be_better=True),
    )


FAM_FIGURE_3 = Experiment(
    id="fam-figure-3",
    title="Passkey retrieval by the length of the document",
    source="TransformerFAM, Figure 3",
    config="passkey",
    variants=(
        *_passkey.memories(),
        *(_passkey.window(segments) for segments in (0, *_SEGMENTS)),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        *(Ordering(_passkey.SUM, f"M{n}", length) for length in _FAR for n in _SEGMENTS),
        # where M2 sees the key; in longer documents only models with more segments do
        *_saturates("192"),
    ),
    # a row holds the longest document, so that the gradient reaches its key
    overrides=(
        *_passkey.DOCUMENTS,
        "data.passkey.max_length=4096",
        "data.batch=2",
        "data.length=4096",
        "train.steps=1000",
    ),
    at_paper=PaperSize(
        config="fam_1b",
        measure=_passkey.PAPER_MEASURE,
        orderings=(
            *(Ordering(_passkey.SUM, f"M{n}", _passkey.PAPER_LONGEST) for n in _SEGMENTS),
            *_saturates(),
        ),
    ),
    axis="tokens of the document",
    note=_passkey.NOTE + " Documents have at most 4,096 tokens. M1 of two layers can see 128 "
    "tokens back to the key, M2 192, M4 320, M12 832; the paper's M2 can see 36,000. `make "
    "demo-full` has questions anywhere, more documents, and goes to ten million tokens.",
    minutes=7.0,
)


def _one_segment(name: str, mixer: str) -> Variant:
    return _passkey.window(1, mixer, name)


FAM_FIGURE_3_GRADIENT = Experiment(
    id="fam-figure-3-gradient",
    title="Passkey retrieval without a gradient through the memory segment",
    source="TransformerFAM, Figure 3, M1_SG",
    config="passkey",
    variants=(_one_segment("M1", "bswa"), _one_segment("M1_SG", "bswa_sg")),
    measure=PasskeyMeasure((96, 128, 160, 192), examples=100),
    orderings=(
        Ordering("M1", "M1_SG", "128"),
        Ordering("M1", "M1_SG", "160"),
        Ordering("M1", "M1_SG", "192"),
    ),
    # layer by layer a key can move from block to block, as far as four layers carry it
    overrides=(
        *_passkey.DOCUMENTS,
        "data.passkey.max_length=192",
        "model.layers=4",
        "data.batch=4",
        "data.length=1024",
        "train.steps=1000",
    ),
    at_paper=PaperSize(
        config="fam_1b",
        measure=_passkey.PAPER_MEASURE,
        orderings=(Ordering("M1", "M1_SG"),),
    ),
    axis="tokens of the document",
    note=_passkey.DOCUMENTS_NOTE + " Four layers, of 0.2 million parameters, and "
    "documents of 96 to 192 tokens: their question sees the key itself in those of 96, and has it "
    "from one, two or three blocks between in the others. In M1_SG no gradient flows into the "
    "memory segment. In the paper it is one of the lines of the figure.",
    minutes=6.5,
)
