"""Random state passing, the paper's remedy for long documents, by memory update (docs/memory.md).

The paper trains on documents of 18,432 tokens at most, evaluates those of 262,144, and says that
random state passing teaches a memory to last for more updates than one document has (B.2.3).
"""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey, _text
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 1024, 8192, 32_768, 262_144)
_FAR = ("8,192", "32,768", "262,144")
# further steps on documents of which four fill a row, so that none is cut at a row's end
_FURTHER = (
    *("train.steps=400", "optimizer.warmup_steps=20"),
    *("data.passkey.min_length=1024", "data.passkey.start_length=1024"),
)
_PASSED = (*_text.PACKED, *_text.passed(0.8))
_ALONE = ("data.batch=8", "data.length=1024")


def _variants(update: str) -> tuple[Variant, ...]:
    gates = _passkey.GATES if update == "gated" else ()
    shape = (f"model.fam_update={update}", *gates, "model.memory_segments=0")
    further = (*shape, *_FURTHER)
    return (
        Variant(update, shape),
        Variant(f"{update} further", further, continues=update),
        Variant(f"{update} packed", (*further, *_text.PACKED), continues=update),
        Variant(f"{update} RSP 0.8", (*further, *_PASSED), continues=update),
        Variant(f"{update} alone RSP 0.8", (*further, *_PASSED, *_ALONE), continues=update),
    )


MEMORY_PASSING = Experiment(
    id="memory-passing",
    title="Random state passing on passkeys",
    source="famjax",
    config="passkey",
    variants=(*_variants("sum"), *_variants("gated")),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        *(Ordering("sum alone RSP 0.8", "sum further", length) for length in _FAR),
        *(Ordering("gated alone RSP 0.8", "sum alone RSP 0.8", length) for length in _FAR),
        *(Ordering("gated packed", "sum packed", length) for length in _FAR),
    ),
    # as fam_figure_8
    overrides=(
        *_passkey.DOCUMENTS,
        "data.passkey.max_length=1024",
        "data.batch=2",
        "data.length=4096",
        "train.steps=1000",
    ),
    axis="tokens of the document",
    unequal="the others continue the first ones",
    note="The key is first in the document, and the question ends a block; 0.14 million "
    "parameters, blocks of 32 tokens, no memory segments. Models are trained for 1,000 steps on "
    "documents of growing lengths to 1,024 tokens, which have 32 updates, and for 400 further "
    "steps on documents of 1,024 tokens. In lanes each document starts with an empty memory. In "
    "packed rows of 4,096 tokens only the first of four does. With random state passing, in 80% of "
    "steps after a ramp of 100, it starts with the memory of row 0 of the step before; alone means "
    "rows of one document. The paper trains on 18 updates at most.",
    follow_up="At half of the learning rate (`famjax reproduce memory-passing --seeds 3 --only "
    "'sum further,sum alone RSP 0.8' optimizer.learning_rate=2.5e-3`) the added update further "
    "trained in lanes finds 100%, 58% and 23% of the keys at 8,192, 32,768 and 262,144 tokens, and "
    "with passed memories in rows of one document 30%, 14% and 6%. The difference at 8,192 is 70 "
    "points (4 to 136); the others three seeds cannot tell.",
    minutes=7.0,
)
