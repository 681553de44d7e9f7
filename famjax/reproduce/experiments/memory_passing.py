"""Random state passing, the paper's remedy for long documents, by memory update (docs/memory.md).

The paper trains on documents of 18,432 tokens at most, evaluates those of 262,144, and says that
random state passing teaches a memory to last for more updates than one document has (B.2.3).
"""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey, _text
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 2048, 8192, 32_768, 262_144)
_FAR = ("32,768", "262,144")


def _variant(name: str, update: str, *layout: str) -> Variant:
    return Variant(name, (f"model.fam_update={update}", "model.memory_segments=0", *layout))


_PASSED = (*_text.PACKED, *_text.passed(0.8))

MEMORY_PASSING = Experiment(
    id="memory-passing",
    title="Random state passing on passkeys",
    source="famjax",
    config="passkey",
    variants=(
        _variant("sum, lanes", "sum"),
        _variant("sum, packed", "sum", *_text.PACKED),
        _variant("sum, RSP 0.8", "sum", *_PASSED),
        _variant("gated, lanes", "gated"),
        _variant("gated, RSP 0.8", "gated", *_PASSED),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        *(Ordering("sum, RSP 0.8", "sum, packed", length) for length in _FAR),
        *(Ordering("gated, RSP 0.8", "sum, RSP 0.8", length) for length in _FAR),
    ),
    overrides=(
        *_passkey.DOCUMENTS,
        "data.passkey.max_length=4096",
        "data.batch=2",
        "data.length=4096",
        "train.steps=1000",
    ),
    axis="tokens of the document",
    note="As in fam-figure-3: the key is first in the document, and the question ends a block; "
    "0.14 million parameters, blocks of 32 tokens. Documents of at most 4,096 tokens, which have "
    "up to 128 updates. In lanes each has an empty memory at first. Packed rows of 4,096 tokens "
    "have an empty one at their start, and with random state passing, in 80% of steps after a "
    "ramp of 100, the one of a row of the step before.",
    minutes=7.0,
)
