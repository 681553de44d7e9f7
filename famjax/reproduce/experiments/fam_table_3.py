"""TransformerFAM, Table 3: how long the memory is (3.4.1)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.long_context_measure import LongContextMeasure

_BLOCK, _PAPER_BLOCK = 64, 1024
# by memory length: ScrollsQasper (ROUGE-L), ScrollsQuality (accuracy), XLSum (ROUGE-L)
_PAPER = {
    4: (0.050, 0.271, 0.151),
    16: (0.060, 0.252, 0.152),
    64: (0.072, 0.279, 0.159),
    256: (0.051, 0.265, 0.160),
    1024: (0.053, 0.263, 0.160),
}


def _variant(length: int, of_paper: int) -> Variant:
    """Return a FAM of `length` tokens; in a block of the paper's size they are `of_paper`."""
    return Variant(
        f"FAM {length}",
        (*_text.CONTINUED, *_text.FAM, f"model.fam_len={length}"),
        dict(zip(("Qasper", "QuALITY", "XLSum"), _PAPER[of_paper], strict=True)),
        x=of_paper / _PAPER_BLOCK,
        at_paper=(*_text.FAM_AT_PAPER, f"model.fam_len={of_paper}"),
    )


FAM_TABLE_3 = Experiment(
    id="fam-table-3",
    title="Length of the feedback memory",
    source="TransformerFAM, Table 3",
    config="text_bswa",
    # the same fractions of a block as in the paper, without its shortest, which would be a quarter
    # of a token here
    variants=tuple(_variant(n, n * _PAPER_BLOCK // _BLOCK) for n in (1, 4, 16, 64)),
    measure=_text.CODE,
    orderings=(
        Ordering("FAM 4", "FAM 1"),
        # "declined when FAM length exceeded 64"
        Ordering("FAM 4", "FAM 16"),
        Ordering("FAM 4", "FAM 64"),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    at_paper=PaperSize(
        config="fam_1b",
        measure=LongContextMeasure(("qasper", "quality", "xlsum")),
        variants=tuple(_variant(n, n) for n in _PAPER),
        orderings=(
            *(
                Ordering("FAM 64", f"FAM {n}", score)
                for score in ("Qasper", "QuALITY")
                for n in _PAPER
                if n != 64
            ),
            # where longer ones are as good
            *(Ordering("FAM 64", f"FAM {n}", "XLSum") for n in (4, 16)),
        ),
    ),
    axis="memory tokens, as a part of the block",
    note=_text.FAM_NOTE + " Lengths are the same parts of a block: 4 here are the paper's 64.",
    follow_up="With one seed, after a base of 800 steps and 800 further ones (`famjax reproduce "
    "fam-table-3 --seeds 1 --only 'FAM 4,FAM 64' train.steps=800`), FAM 4 has 1.5609 and FAM 64 "
    "1.5638 bits per byte: the order turns, so the length makes no difference here that lasts.",
    minutes=4.0,
)
