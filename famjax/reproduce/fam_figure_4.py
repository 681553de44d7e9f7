"""TransformerFAM, Figure 4: text by the number of memory segments (3.3)."""

from __future__ import annotations

from famjax.reproduce import _text
from famjax.reproduce.experiment import Experiment, Ordering, Variant

_SEGMENTS = (0, 1, 2, 4, 8)
_FAM = "FAM"
# in bits per byte
_MARGIN = 0.02


def _window(segments: int) -> Variant:
    own = ("model.mixer=bswa", f"model.memory_segments={segments}")
    return Variant(f"M{segments}", (*_text.CONTINUED, *own), x=segments, line="BSWA", at_paper=own)


FAM_FIGURE_4 = Experiment(
    id="fam-figure-4",
    title="Text by the number of memory segments",
    source="TransformerFAM, Figure 4",
    config="text_bswa",
    variants=(
        *map(_window, _SEGMENTS),
        Variant(
            _FAM,
            (*_text.CONTINUED, *_text.FAM, "model.memory_segments=1", "model.fam_len=8"),
            at_paper=("model.memory_segments=3",),
        ),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("M1", "M0"),
        Ordering("M8", "M1", margin=_MARGIN),
        Ordering(_FAM, "M1"),
        Ordering(_FAM, "M8"),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    paper_config="fam_1b",
    axis="memory segments",
    note=_text.NOTE
    + " FAM has one memory segment and the gated update. The paper's figure has the "
    "scores of six tasks, each relative to the best; `famjax compare RUN ... --segments` draws it "
    "from any of ours.",
    minutes=2.5,
)
