"""TransformerFAM, C.4 and C.5: auxiliary losses of the memory."""

from __future__ import annotations

from dataclasses import replace

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.paper_measures import PG19

_NONE = "none"
_DIVERSITY_WEIGHTS, _RECONSTRUCTION_WEIGHTS = (0.1, 1.0, 10.0), (0.01, 0.1, 1.0)


def _experiment(
    name: str,
    section: str,
    title: str,
    weights: tuple[float, ...],
    orderings: tuple[Ordering, ...],
    more: tuple[Variant, ...] = (),
) -> Experiment:
    def variant(weight: float) -> Variant:
        own = (f"train.{name}_loss={weight:g}",)
        return Variant(
            f"weight {weight:g}",
            (*_text.CONTINUED, *_MEMORY, *own),
            x=weight,
            line="loss",
            at_paper=(*_text.FAM_AT_PAPER, *own),
        )

    return Experiment(
        id=f"fam-{name}",
        title=title,
        source=f"TransformerFAM, {section}",
        config="text_bswa",
        variants=(
            Variant(_NONE, (*_text.CONTINUED, *_MEMORY), at_paper=_text.FAM_AT_PAPER),
            *map(variant, weights),
            *more,
        ),
        measure=_text.CODE,
        orderings=orderings,
        overrides=_text.SHAPE,
        base=_text.BASE,
        at_paper=PaperSize(
            config="fam_1b",
            measure=PG19,
            note="FAMs of 16 tokens have 256." if more else "",
        ),
        axis="weight of the loss",
        note=_text.FAM_NOTE + " The paper gives no numbers.",
        # rows keep their names at both sizes
        minutes=7.0,
    )


_MEMORY = (*_text.FAM, "model.fam_len=8")
_LONGER = (
    "After 1,000 steps instead of 400 (`famjax reproduce fam-diversity --only 'none,weight 1' "
    "train.steps=1000`), the loss no longer gains with seed 0: 1.5019 bits per byte with a weight "
    "of 1, and 1.5008 without; with a later commit 1.4992 with a weight of 0.1 (`--only "
    "'none,weight 0.1'`), and 1.4990 without. The other seeds were not run to the end."
)
# "even when the FAM length was 256 or longer": a quarter of the paper's block, like 16 of 64 here
_LONG = ("model.fam_len=16",)
_LONG_AT_PAPER = (*_text.FAM_AT_PAPER, "model.fam_len=256")
_LONG_NONE, _LONG_DIVERSE = "none of 16 tokens", "weight 1 of 16 tokens"
_LONG_WEIGHT = "train.diversity_loss=1"

_DIVERSITY = _experiment(
    "diversity",
    "C.4",
    "Diversity loss",
    _DIVERSITY_WEIGHTS,
    (
        # "always worse"
        *(Ordering(_NONE, f"weight {weight:g}") for weight in _DIVERSITY_WEIGHTS),
        Ordering(_LONG_NONE, _LONG_DIVERSE, margin=_text.MARGIN, may_be_better=True),
    ),
    (
        Variant(_LONG_NONE, (*_text.CONTINUED, *_text.FAM, *_LONG), at_paper=_LONG_AT_PAPER),
        Variant(
            _LONG_DIVERSE,
            (*_text.CONTINUED, *_text.FAM, *_LONG, _LONG_WEIGHT),
            at_paper=(*_LONG_AT_PAPER, _LONG_WEIGHT),
        ),
    ),
)
FAM_DIVERSITY = replace(_DIVERSITY, follow_up=_LONGER)
FAM_RECONSTRUCTION = _experiment(
    "reconstruction",
    "C.5",
    "Reconstruction loss",
    _RECONSTRUCTION_WEIGHTS,
    # "did not help"
    tuple(
        Ordering(_NONE, f"weight {weight:g}", margin=_text.MARGIN, may_be_better=True)
        for weight in _RECONSTRUCTION_WEIGHTS
    ),
)
