"""How lanes should read: rows, the reach of the gradient, parts of documents (not in a paper)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text


def _variant(name: str, *overrides: str) -> Variant:
    return Variant(name, (*_text.CONTINUED, *_text.FAM, "model.fam_len=8", *overrides))


def _rows(rows: int) -> Variant:
    """Return lanes with `rows` rows of 4,096 tokens in all; gradients reach to a row's start."""
    tokens = 4096 // rows
    return _variant(f"{rows} of {tokens}", f"data.batch={rows}", f"data.length={tokens}")


MEMORY_LANES = Experiment(
    id="memory-lanes",
    title="What the lanes of a memory should read",
    source="famjax",
    config="text_bswa",
    variants=(
        *map(_rows, (2, 8, 32)),
        _variant("parts of 64 kB", "data.part_bytes=64000"),
        _variant("parts of 8 kB", "data.part_bytes=8000"),
    ),
    measure=_text.CODE,
    orderings=tuple(
        Ordering(name, "8 of 512")
        for name in ("2 of 2048", "32 of 128", "parts of 64 kB", "parts of 8 kB")
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE + " The memory is a gated FAM of 8 tokens without a segment. A lane reads one "
    "document after the other, and the gradient stops at the start of a row: 2 rows of 2,048 "
    "tokens reach back 32 blocks, 32 of 128 two. Parts of documents come in random order.",
    follow_up="At a third of the learning rate (`famjax reproduce memory-lanes --seeds 3 --only "
    "'2 of 2048,8 of 512' optimizer.learning_rate=1e-3`), 2 rows of 2,048 tokens are worse than 8 "
    "of 512 by 0.025 (0.017 to 0.033), so the claim does not hold there either.",
    minutes=3.5,
)
