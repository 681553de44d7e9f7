"""TransformerFAM, 3.1 and 3.1.1: the parts of its finetuning recipe, compared with lanes."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_PASSED = (*_text.PACKED, *_text.passed(0.8))
_REPEATED, _LORA = "data.repeat_len=64", "model.lora.rank=16"

_ALL = (*_PASSED, "train.rpo=true", _REPEATED, _LORA)


def _variant(name: str, *overrides: str) -> Variant:
    return Variant(name, (*_text.CONTINUED, *_text.FAM, "model.fam_len=8", *overrides))


def _adafactor(rate: float) -> tuple[str, ...]:
    return ("optimizer.name=adafactor", f"optimizer.learning_rate={rate}")


FAM_RECIPE = Experiment(
    id="fam-recipe",
    title="The parts of the finetuning recipe",
    source="TransformerFAM, 3.1",
    config="text_bswa",
    variants=(
        _variant("lanes"),
        _variant("packed rows", *_text.PACKED),
        _variant("packed RSP 0.8", *_PASSED),
        _variant("packed RSP 0.8 RPO", *_PASSED, "train.rpo=true"),
        _variant("packed repeated segment", *_text.PACKED, _REPEATED),
        *(_variant(f"Adafactor rate {rate:g}", *_adafactor(rate)) for rate in (1e-3, 3e-3, 1e-2)),
        _variant("LoRA rank 16", _LORA),
        # adapters start at 0, and may need a higher rate than all weights
        *(
            _variant(f"LoRA rank 16 rate {rate:g}", _LORA, f"optimizer.learning_rate={rate}")
            for rate in (1e-2, 3e-2)
        ),
        _variant("all at once", *_ALL, *_adafactor(1e-2)),
        _variant("all at once AdamW", *_ALL),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("packed RSP 0.8", "packed rows"),
        # "was similar to that of full finetuning"
        *(
            Ordering(name, "lanes", margin=_text.MARGIN, may_be_better=True)
            for name in ("LoRA rank 16", "LoRA rank 16 rate 0.01", "LoRA rank 16 rate 0.03")
        ),
        # the paper's RPO has an effect (B.4.2); with RoPE an offset changes nothing but rounding
        Ordering("packed RSP 0.8 RPO", "packed RSP 0.8", margin=_text.MARGIN, ours=True),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.FAM_NOTE
    + " Lanes, AdamW and full finetuning unless named; the paper has packed rows, "
    "RSP, RPO, a repeated segment, Adafactor and LoRA of rank 64 at once, the last two rows of "
    "rank 16, the first of them with Adafactor at a rate of 0.01.",
    unequal_parameters="LoRA adds 94,208 parameters.",
    minutes=5.0,
)
