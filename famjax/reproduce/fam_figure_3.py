"""TransformerFAM, Figure 3: passkey retrieval (3.2)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 2048, 8192, 32_768, 262_144)
# a window cannot learn from more than it sees: a quarter of the tokens is enough
_WINDOW = (
    "train.steps=800",
    "data.batch=2",
    "data.length=1024",
    "optimizer.learning_rate=3e-3",
    "data.passkey.ask_every=0",
)


# finetuned on fillers of 2k to 18k tokens (3.2)
AT_PAPER = (
    "data.task=passkey",
    "data.passkey.min_length=2048",
    "data.passkey.start_length=2048",
    "data.passkey.max_length=18432",
    "train.steps=5000",
)


def window(mixer: str, segments: int, name: str) -> Variant:
    """Return a window that learns from documents within its receptive field."""
    seen = max(96, min(4096, 2 * 32 * segments))
    shape = (f"model.mixer={mixer}", f"model.memory_segments={segments}")
    own = (*shape, *_WINDOW, f"data.passkey.max_length={seen}")
    return Variant(name, own, at_paper=(*shape, *AT_PAPER))


FAM_FIGURE_3 = Experiment(
    id="fam-figure-3",
    title="Passkey retrieval by the length of the document",
    source="TransformerFAM, Figure 3",
    config="passkey",
    variants=(
        Variant("FAM", at_paper=("model.memory_segments=0", *AT_PAPER)),
        window("bswa", 0, "M0"),
        window("bswa", 1, "M1"),
        window("bswa_sg", 1, "M1_SG"),
        window("bswa", 2, "M2"),
        window("bswa", 4, "M4"),
        window("bswa", 12, "M12"),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        *(Ordering("FAM", f"M{n}", f"{262_144:,}") for n in (1, 12)),
        Ordering("M12", "M1", "512"),
        Ordering("M1", "M1_SG", "128"),
    ),
    paper_config="fam_1b",
    axis="tokens of the document",
    note="0.14 million parameters trained from scratch, where the paper finetunes Flan-PaLM 1B; "
    "FAM has one memory segment and the gated update. `make demo-full` has more documents, and "
    "goes to ten million tokens.",
    minutes=6.0,
)
