"""Shared parts of experiments with encoder-decoders: small ones, and variants by depth."""

from __future__ import annotations

from collections.abc import Mapping

from famjax.reproduce.experiment import Variant

CONFIG = "multi30k"
# rows are short because the Feedback Transformer reads their tokens one after the other, and few,
# to have more steps: with 410,000 tokens, 16, 32 and 64 rows reached BLEU 15.5, 11.8 and 4.4
SHAPE = (
    "model.width=128",
    "model.mlp_width=384",
    "data.batch=16",
    "data.length=64",
    "data.source_length=72",
    "train.steps=1600",
    # as in the papers; deeper than any decoder here
    "model.encoder.layers=6",
)
_FEEDBACK = ("model.stack=feedback",)
_OWN_KEYS = ("model.feedback.shared_kv=false",)
DEPTHS, PAPER_DEPTHS = (1, 2, 4), (1, 2, 4, 6)
SPLIT = " Tokenized BLEU has compounds split, as the papers' of WMT14 English-German."
WHOLE = " Tokenized BLEU splits no compounds."
SPEEDS = (
    "Tokens of the outputs a second, and seconds of training, on one process's part of the cores "
    "and while others train: rough figures."
)
POSITIONS = " The Transformer has rotary positions, the Feedback Transformer relative ones."
DECODERS = (
    "The two decoders of a depth have about the same number of parameters; deeper ones have more."
)
NOTE = (
    "An encoder of six layers of width 128, 1,600 steps of 1,024 tokens of targets, of 4,000 "
    "SentencePiece tokens; pairs with more than 64 are not trained on, and outputs have at most "
    f"64. Beam 5 unless greedy. BLEU is sacrebleu's. {SPEEDS}"
)


def by_depth(
    span: int,
    at_paper: tuple[str, ...] = (),
    paper: Mapping[str, float] | None = None,
    depths: tuple[int, ...] = DEPTHS,
    shared_at_paper: bool = False,
    span_here: int = 64,
) -> tuple[Variant, ...]:
    """Return the variants of the figures: both decoders at each depth.

    Args:
      span: span of the feedback memory at the paper's size.
      at_paper: overrides at the paper's size.
      paper: the paper's tokenized BLEU for each variant by name.
      depths: numbers of layers of the decoders.
      shared_at_paper: whether the layers of a feedback decoder share keys and values at the paper's
        size, as on its large data sets (4).
      span_here: span of the feedback memory at the size here.
    """

    def variant(line: str, layers: int) -> Variant:
        name, depth = f"{line} {layers}", (f"model.layers={layers}",)
        here: tuple[str, ...] = depth
        there = (*depth, *at_paper)
        if line == "Feedback":
            here = (*here, *_FEEDBACK, *_OWN_KEYS, f"model.feedback.span={span_here}")
            own = () if shared_at_paper else _OWN_KEYS
            there = (*there, *_FEEDBACK, *own, f"model.feedback.span={span}")
        figures = {"tokenized BLEU": paper[name]} if paper and name in paper else {}
        return Variant(name, here, figures, x=layers, line=line, at_paper=there)

    return tuple(variant(line, layers) for layers in depths for line in ("Transformer", "Feedback"))
