"""Passkeys in a pretrained model finetuned with LoRA: FAM and remedies; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import KeysAndCodeMeasure

# a block holds the shortest document, in the vocabulary of the code of any Python
_BLOCK, _BLOCKS, _SHORTEST = 192, 15, 176
_ROW = _BLOCK * _BLOCKS
_STEPS = 700
_LONGEST = 100 * _ROW

# the mathematics of a Llama: two layers of width 64
_SHAPE = (
    *("model.layers=2", "model.width=64", "model.heads=4", "model.mlp_width=128"),
    *("model.mlp=swiglu", "model.tied=false", "model.rope_base=100000"),
    *("model.scan_layers=false", "model.smeared_keys=false", "model.arch.embed_scale=1.0"),
    "model.short_conv=0",
    "train.write_loss=0.0",
)
_BASE = (
    *("data.layout=packed", "data.batch=16", "data.length=256"),
    *("model.mixer=full", "model.block_len=128", "model.capacity=256"),
    *("optimizer.learning_rate=0.003", "optimizer.schedule=cosine", "optimizer.warmup_steps=20"),
    *("optimizer.beta2=0.95", "train.steps=350"),
)
# three rows of passkeys and one of text, as in famjax/demo_finetune.py
_FINETUNING = (
    *(f"model.block_len={_BLOCK}", "model.memory_segments=1", "model.lora.rank=16"),
    f"data.length={_ROW}",
    f"data.part_bytes={4 * _ROW}",
    *("data.batch=4", "data.text_rows=1", "data.text_weight=0.2"),
    *("data.passkey.threshold=0.7", "data.passkey.other_weight=0.002"),
    f"data.passkey.ask_every={2 * _BLOCK}",
    f"data.passkey.min_length={_SHORTEST}",
    f"data.passkey.start_length={_BLOCK}",
    f"data.passkey.max_length={_ROW}",
    *("optimizer.schedule=wsd", "optimizer.decay_fraction=0.3"),
)
_FIRST, _ANYWHERE = ("data.passkey.needle_within=0",), (f"data.passkey.needle_within={_ROW}",)
_FAM = ("model.mixer=fam", "model.fam_update=gated", *_passkey.GATES)
_DELTA = ("model.mixer=delta", "train.write_loss=0.1")
# as in configs/passkey.py; its weights start as 0
_CONV = "model.short_conv=4"
# the gates of configs/passkey.py
_CLOSING = (
    "model.fam_gate_threshold=0.1",
    "model.fam_max_timescale=8.0",
    "train.write_loss=0.01",
)


def _variant(name: str, *overrides: str, steps: int = _STEPS) -> Variant:
    return Variant(name, (*_FINETUNING, f"train.steps={steps}", *overrides))


MEMORY_FINETUNE_KEYS = Experiment(
    id="memory-finetune-keys",
    title="Passkeys in a pretrained model finetuned with LoRA",
    source="famjax",
    config="passkey",
    variants=(
        *(_variant(f"FAM {n}", *_FAM, *_FIRST, steps=n) for n in (350, _STEPS, 2 * _STEPS)),
        *(_variant(f"DELTA {n}", *_DELTA, *_FIRST, steps=n) for n in (350, _STEPS)),
        _variant("FAM convolution", *_FAM, *_FIRST, _CONV),
        _variant("FAM convolution 350", *_FAM, *_FIRST, _CONV, steps=350),
        _variant("FAM closing gates", *_FAM, *_FIRST, *_CLOSING),
        _variant("FAM closing gates and convolution", *_FAM, *_FIRST, *_CLOSING, _CONV),
        _variant("DELTA convolution 350", *_DELTA, *_FIRST, _CONV, steps=350),
        _variant("FAM smeared keys", *_FAM, *_FIRST, "model.smeared_keys=true"),
        _variant("FAM 32 tokens", *_FAM, *_FIRST, "model.fam_len=32"),
        _variant("FAM no segment", *_FAM, *_FIRST, "model.memory_segments=0"),
        _variant("FAM threshold 0.9", *_FAM, *_FIRST, "data.passkey.threshold=0.9"),
        _variant("FAM all parameters", *_FAM, *_FIRST, "model.lora.rank=0"),
        _variant("FAM anywhere", *_FAM, *_ANYWHERE),
        _variant("FAM anywhere 1400", *_FAM, *_ANYWHERE, steps=2 * _STEPS),
        _variant("FAM anywhere convolution", *_FAM, *_ANYWHERE, _CONV),
        _variant("FAM anywhere both", *_FAM, *_ANYWHERE, *_CLOSING, _CONV),
        _variant("DELTA anywhere", *_DELTA, *_ANYWHERE),
        _variant("DELTA anywhere convolution", *_DELTA, *_ANYWHERE, _CONV),
    ),
    measure=KeysAndCodeMeasure(
        tuple(_BLOCK * n for n in (1, 4, 16, 64, _LONGEST // _BLOCK)), examples=32
    ),
    orderings=(
        Ordering("FAM 700", "FAM 350"),
        Ordering("FAM 1400", "FAM 700"),
        Ordering("DELTA 350", "FAM 350"),
        Ordering("DELTA 700", "FAM 700"),
        Ordering("DELTA 350", "FAM 1400"),
        *(
            Ordering(f"FAM {remedy}", "FAM 700")
            for remedy in (
                *("closing gates", "closing gates and convolution"),
                *("convolution", "smeared keys", "32 tokens"),
                *("no segment", "threshold 0.9", "all parameters"),
            )
        ),
        Ordering("FAM convolution 350", "FAM 350"),
        Ordering("DELTA convolution 350", "DELTA 350"),
        Ordering("FAM anywhere 1400", "FAM anywhere"),
        Ordering("FAM anywhere convolution", "FAM anywhere"),
        Ordering("FAM anywhere both", "FAM anywhere"),
        Ordering("DELTA anywhere convolution", "DELTA anywhere"),
    ),
    overrides=_SHAPE,
    base=_BASE,
    base_config="text_bswa",
    axis="tokens of the document",
    unequal="Its curves are by steps.",
    note="FAM and the delta memory with the number of steps; a remedy without a number has "
    f"{_STEPS}. The base of a "
    "seed is a Transformer with full attention and the mathematics of a Llama, 2 layers of width "
    "64, trained on Python's standard library for 350 steps of 4,096 tokens. It is converted to "
    f"blocks of {_BLOCK} tokens with one memory segment, and finetuned with LoRA of rank 16 on "
    f"three rows of passkeys and one of text, each of {_ROW:,} tokens. The key comes first, in "
    f"`anywhere` it is in the first {_ROW:,} tokens, also when it is asked for; questions are "
    "anywhere in a block. Keys retrieved of 32 documents, of 11 of the longest "
    "length, and bits per byte of held-out code.",
    unequal_parameters="Adapters are a fifth of the parameters; `all parameters` has none.",
    minutes=16.0,
)
