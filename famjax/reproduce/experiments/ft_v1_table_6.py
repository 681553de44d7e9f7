"""Feedback Transformer v1, Table 6: what makes the training shorter (5.2).

At the paper's size the models are Table 9's large ones, pre-norm, with keys for each layer and a
fixed span of 512. The text has "12-layer models with 140M parameters", but Table 9 has no such
model, and 12 layers of its width have more. Two of the table's numbers are those of v1's Table 7
for post-norm, although 3.2 asks for pre-norm. How many of the 200,000 steps the Transformer is
trained for before it becomes a Feedback Transformer is not said: half of them is what agrees with
the days, 1.2 / 2 + 10 / 2 = 5.6.
"""

from __future__ import annotations

from famjax.reproduce.experiment import ALL_SECONDS, Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _bytes, _wikitext
from famjax.reproduce.paper_measures import WIKITEXT_DEV

_FEEDBACK, _GROWING, _INITIALIZED = "Feedback", "growing BPTT", "initialized from Transformer"
# the same performance, in bits per byte and in perplexity: the paper calls 0.2 equal
_MARGIN, _MARGIN_AT_PAPER = 0.02, 0.3
_HALF = f"train.steps={_bytes.STEPS // 2}"
_STACK = ("model.stack=feedback",)
# trained from scratch for all steps, whereas the base has half of them
_WHOLE = (f"train.steps={_bytes.STEPS}",)
# "further" (5.2): with growing back-propagation
_FURTHER = (_HALF, "train.bptt_start=8", f"train.bptt_double_every={_bytes.STEPS // 8}")
_SHAPE_AT_PAPER = (*_wikitext.OWN_KEYS, *_wikitext.FIXED_SPAN)
_HALF_AT_PAPER = "train.steps=100000"


def _at_paper(stack: tuple[str, ...], *own: str) -> tuple[str, ...]:
    return (*stack, *_SHAPE_AT_PAPER, *own)


def _claims(margin: float) -> tuple[Ordering, ...]:
    """Return the paper's orderings; `margin` is the difference that counts as none."""
    return (
        Ordering(_FEEDBACK, "Transformer"),
        Ordering(_GROWING, _FEEDBACK, margin=margin, may_be_better=True),
        Ordering(_INITIALIZED, _FEEDBACK, margin=margin, may_be_better=True),
        Ordering(_GROWING, _FEEDBACK, ALL_SECONDS),
        Ordering(_INITIALIZED, _GROWING, ALL_SECONDS),
    )


_NO_FASTER = (
    "The steps of growing BPTT are no faster here. By their metrics.jsonl the median "
    "speeds with 8, 16, 32 and 64 bytes are 4,823 to 5,189, 5,814 to 5,973, 5,987 to 6,080 and "
    "6,626 to 6,812 bytes/s by seed. A second look, `famjax bench feedback --length "
    "8,16,32,64` (two cores, four layers, 2,048 tokens a step, shared keys): 245, 233, "
    "254 and 254 ms a step. Steps have equally many tokens. On accelerators, fewer "
    "sequential steps of more rows should be faster, which was not measured."
)


FT_V1_TABLE_6 = Experiment(
    id="ft-v1-table-6",
    title="Shorter trainings of the Feedback Transformer",
    source="Feedback Transformer v1, Table 6",
    config="char_ptb_feedback",
    variants=(
        Variant(
            "Transformer",
            _WHOLE,
            {"perplexity": 21.2, "days": 1.2},
            continues=None,
            at_paper=_at_paper(_bytes.TRANSFORMER, *_wikitext.WHOLE_ROWS),
        ),
        Variant(
            _FEEDBACK,
            (*_STACK, *_WHOLE),
            {"perplexity": 19.7, "days": 17},
            continues=None,
            at_paper=_at_paper(_STACK, *_wikitext.WHOLE_ROWS),
        ),
        Variant(
            _GROWING,
            (*_STACK, *_WHOLE, *_bytes.GROWING),
            {"perplexity": 19.9, "days": 10},
            continues=None,
            at_paper=_at_paper(_STACK),
        ),
        Variant(
            _INITIALIZED,
            (*_STACK, *_FURTHER),
            {"perplexity": 19.8, "days": 5.5},
            at_paper=_at_paper(_STACK, _HALF_AT_PAPER, "train.bptt_double_every=25000"),
        ),
    ),
    measure=_bytes.BYTES,
    orderings=_claims(_MARGIN),
    at_paper=PaperSize(
        config=_wikitext.CONFIG,
        measure=WIKITEXT_DEV,
        orderings=_claims(_MARGIN_AT_PAPER),
        base_config=_wikitext.CONFIG,
        base=_at_paper(_bytes.TRANSFORMER, *_wikitext.WHOLE_ROWS, _HALF_AT_PAPER),
    ),
    overrides=_bytes.SHAPE,
    base=(*_bytes.TRANSFORMER, _HALF),
    timed=True,
    note=_bytes.WORDS_NOTE + " The paper's models have 12 layers. Back-propagation grows "
    "from 8 to 64 bytes; the last model is a Transformer for 700 steps, and a Feedback Transformer "
    "with growing back-propagation for 700 more. Seconds are those of training on one process's "
    "part of the cores, with the compilation; in all, with the Transformer's.",
    follow_up=_NO_FASTER,
    minutes=_bytes.MINUTES,
)
