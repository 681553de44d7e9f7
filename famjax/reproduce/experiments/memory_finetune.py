"""What memories gain in a pretrained model that is finetuned with LoRA; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_NGRAMS = "model.ngram_memory=8"


def _variant(name: str, *overrides: str) -> Variant:
    window = ("model.mixer=bswa", "model.memory_segments=1", "model.lora.rank=16")
    return Variant(name, (*_text.CONTINUED, *window, *overrides))


MEMORY_FINETUNE = Experiment(
    id="memory-finetune",
    title="Memories in a pretrained model finetuned with LoRA",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant("window"),
        _variant("FAM", *_text.FAM, "model.memory_segments=1"),
        _variant("BSWA+DELTA", *_text.DELTA),
        _variant("n-grams", _NGRAMS),
        _variant("BSWA+DELTA n-grams", *_text.DELTA, _NGRAMS),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("FAM", "window"),
        Ordering("BSWA+DELTA", "window"),
        Ordering("n-grams", "window"),
        Ordering("n-grams", "BSWA+DELTA"),
        Ordering("BSWA+DELTA n-grams", "n-grams"),
    ),
    # the mathematics of a Llama, whose keys are not smeared
    overrides=(
        *_text.PLAIN_SHAPE,
        "model.tied=false",
        "model.rope_base=100000",
        "model.arch.embed_scale=1.0",
    ),
    base=(
        # full attention holds 512 tokens of a document: rows start without a memory
        *_text.PACKED,
        "model.mixer=full",
        "model.capacity=512",
        "train.steps=1000",
        "optimizer.schedule=constant",
    ),
    note="Python's standard library; two layers of 128. The base of a seed is a Transformer with "
    "full attention and the mathematics of a Llama, trained for 1,000 steps of 4,096 tokens in "
    "rows of 512. Its attention is replaced by a window of a block of 64 tokens and the one before "
    "it, with or without a memory, which is finetuned for 400 steps with LoRA of rank 16. "
    "FAM has 16 memory tokens and is gated. BSWA+DELTA has a delta memory in the second layer; the "
    "n-gram memory has contexts of 1, 2, 3, 4, 6, 8, 12 and 16 tokens.",
    unequal_parameters="The n-gram memory has 132,096 parameters.",
    minutes=5.5,
)
