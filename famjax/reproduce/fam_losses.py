"""TransformerFAM, C.4 and C.5: auxiliary losses of the memory."""

from __future__ import annotations

from famjax.reproduce import _text
from famjax.reproduce.experiment import Experiment, Ordering, Variant

_NONE = "none"
_WEIGHTS = (0.01, 0.1, 1.0)
_MARGIN = 0.01


def _experiment(name: str, section: str, title: str, orderings: tuple[Ordering, ...]) -> Experiment:
    def variant(weight: float) -> Variant:
        own = (f"train.{name}_loss={weight:g}",)
        return Variant(
            f"{weight:g}", (*_text.CONTINUED, *_MEMORY, *own), x=weight, line="loss", at_paper=own
        )

    return Experiment(
        id=f"fam-{name}",
        title=title,
        source=f"TransformerFAM, {section}",
        config="text_bswa",
        variants=(
            Variant(_NONE, (*_text.CONTINUED, *_MEMORY), at_paper=()),
            *map(variant, _WEIGHTS),
        ),
        measure=_text.CODE,
        orderings=orderings,
        overrides=_text.SHAPE,
        base=_text.BASE,
        paper_config="fam_1b",
        axis="weight of the loss",
        note=_text.NOTE + " The paper gives no numbers.",
        minutes=3.0,
    )


_MEMORY = (*_text.FAM, "model.fam_len=8")

FAM_DIVERSITY = _experiment(
    "diversity",
    "C.4",
    "Diversity loss",
    tuple(Ordering(_NONE, f"{weight:g}") for weight in _WEIGHTS),
)
FAM_RECONSTRUCTION = _experiment(
    "reconstruction",
    "C.5",
    "Reconstruction loss",
    tuple(Ordering(f"{weight:g}", _NONE, margin=_MARGIN) for weight in _WEIGHTS),
)
