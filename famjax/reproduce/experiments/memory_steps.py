"""How far memories come with more training: passkeys from scratch, and code from a window."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.measures import PasskeyMeasure

_AXIS, _UNEQUAL = "training steps", "its points are by steps"


def _lines(
    models: dict[str, tuple[str, ...]], steps: tuple[int, ...], own: tuple[str, ...] = ()
) -> tuple[Variant, ...]:
    """Return the models with each number of steps."""
    return tuple(
        Variant(f"{line} {n}", (*own, *overrides, f"train.steps={n}"), x=n, line=line)
        for line, overrides in models.items()
        for n in steps
    )


_PASSKEY_STEPS = (150, 300, 600)
_NO_CONV, _OPEN = "FAM without convolution", "FAM with slow gates"

MEMORY_STEPS = Experiment(
    id="memory-steps",
    title="Training steps of passkey retrieval",
    source="famjax",
    config="passkey",
    variants=_lines(
        {
            "FAM": (),
            _NO_CONV: ("model.short_conv=0",),
            _OPEN: (
                "model.fam_gate_threshold=0.01",
                "model.fam_max_timescale=64.0",
                "train.write_loss=0.0",
            ),
            "DELTA": ("model.mixer=delta", "train.write_loss=0.1"),
        },
        _PASSKEY_STEPS,
    ),
    # within the lengths of training, where most of FAM's errors are (docs/results.md)
    measure=PasskeyMeasure((512,), examples=1600),
    orderings=(
        *(Ordering(f"FAM {n}", f"{_NO_CONV} {n}") for n in _PASSKEY_STEPS),
        *(Ordering(f"FAM {n}", f"{_OPEN} {n}") for n in _PASSKEY_STEPS),
        *(Ordering(f"DELTA {n}", f"FAM {n}") for n in _PASSKEY_STEPS),
        Ordering("FAM 600", "FAM 300"),
    ),
    axis=_AXIS,
    unequal=_UNEQUAL,
    note="`configs/passkey.py`, key and question anywhere; keys of documents of 512 tokens. "
    "A step has 8,192 tokens.",
    unequal_parameters="The convolution has 12,288 parameters.",
    minutes=6.5,
)

_TEXT_STEPS = (200, 400, 800)

MEMORY_STEPS_TEXT = Experiment(
    id="memory-steps-text",
    title="Training steps of memories on code",
    source="famjax",
    config="text_bswa",
    variants=_lines(
        {
            "M1": (),
            "FAM": (*_text.FAM, "model.fam_len=8", "model.memory_segments=1"),
            "BSWA+DELTA": _text.DELTA,
        },
        _TEXT_STEPS,
        own=(*_text.CONTINUED, "model.memory_segments=1"),
    ),
    measure=_text.CODE,
    orderings=tuple(Ordering(f"BSWA+DELTA {n}", f"M1 {n}") for n in _TEXT_STEPS),
    overrides=_text.SHAPE,
    base=_text.BASE,
    axis=_AXIS,
    unequal=_UNEQUAL,
    note="Python's standard library; two layers of 128 with blocks of 64 tokens and one memory "
    "segment. All models of a seed continue a training of 1,000 steps of a window without memory. "
    "A step has 4,096 tokens. FAM has the gated update; BSWA+DELTA has a window below and a delta "
    "memory with 512 features in one head above.",
    minutes=8.0,
)
