"""The paper's memory update and the gated one, on text (docs/memory.md)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text


def _variant(update: str, segments: int) -> Variant:
    shape = (f"model.fam_update={update}", f"model.memory_segments={segments}")
    memory = ("model.mixer=fam", "model.fam_len=8")
    return Variant(f"{update} M{segments}", (*_text.CONTINUED, *memory, *shape))


MEMORY_UPDATES = Experiment(
    id="memory-updates",
    title="Memory updates on text",
    source="famjax",
    config="text_bswa",
    variants=tuple(
        _variant(update, segments) for segments in (0, 1) for update in ("sum", "gated")
    ),
    measure=_text.CODE,
    orderings=tuple(Ordering(f"gated M{segments}", f"sum M{segments}") for segments in (0, 1)),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE + " FAMs of 8 tokens without a memory segment (M0) and with one (M1), with the "
    "paper's update and the gated one.",
    minutes=4.0,
)
