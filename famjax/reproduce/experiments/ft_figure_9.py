"""Feedback Transformer v3, Figure 9: depth at equal parameters (6.4).

The paper names no depths; at its size they are those that divide the layers of Table 9's models.
Heads and feed-forwards get wider as layers get fewer (7.6). For WikiText-103 the models are the
large ones, with keys for each layer and a fixed span; the paper does not say which it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _bytes, _wikitext
from famjax.reproduce.measures import CodeMeasure
from famjax.reproduce.paper_measures import PENN_TREEBANK, WIKITEXT_DEV

_DEPTHS, _CHARACTER_DEPTHS, _WORD_DEPTHS = (1, 2, 4), (1, 2, 3, 6), (1, 2, 4, 8)


def _variants(
    depths: tuple[int, ...], own: Callable[[int], tuple[str, ...]]
) -> tuple[Variant, ...]:
    """Return both stacks at each depth, with the overrides that `own` returns for a depth."""
    stacks = {"Transformer": _bytes.TRANSFORMER, "Feedback": ()}
    return tuple(
        Variant(f"{line} {layers}", (*stack, *own(layers)), x=layers, line=line)
        for layers in depths
        for line, stack in stacks.items()
    )


def _at_depth(deepest: int, head_dim: int, mlp_width: int, layers: int) -> tuple[str, ...]:
    """Return overrides for `layers` layers with as many parameters as the `deepest` layers have."""
    wider = deepest // layers
    return (
        f"model.layers={layers}",
        f"model.head_dim={head_dim * wider}",
        f"model.mlp_width={mlp_width * wider}",
    )


def _characters(layers: int) -> tuple[str, ...]:
    return _at_depth(6, 96, 1536, layers)


def _words(layers: int) -> tuple[str, ...]:
    return (*_wikitext.OWN_KEYS, *_wikitext.FIXED_SPAN, *_at_depth(8, 128, 4096, layers))


def _claims(depths: tuple[int, ...]) -> tuple[Ordering, ...]:
    deepest = depths[-1]
    # "improves as the depth increase"
    deeper = dict.fromkeys([(1, deepest), *pairwise(depths)])
    return (
        *(Ordering(f"Transformer {more}", f"Transformer {fewer}") for fewer, more in deeper),
        Ordering("Feedback 1", "Transformer 1"),
        Ordering("Feedback 2", "Transformer 2"),
        # "much more robust to reduced depth"
        Ordering(
            "Feedback 1",
            "Transformer 1",
            wider_than=(f"Feedback {deepest}", f"Transformer {deepest}"),
        ),
    )


def _best_at_two(depths: tuple[int, ...]) -> tuple[Ordering, ...]:
    """Return "even achieving the best performance on char-PTB with only two layers"."""
    return tuple(Ordering("Feedback 2", f"Feedback {n}") for n in depths if n != 2)


FT_FIGURE_9 = Experiment(
    id="ft-figure-9",
    title="Depth at equal parameters",
    source="Feedback Transformer v3, Figure 9",
    config="char_ptb_feedback",
    variants=_variants(_DEPTHS, _bytes.at_depth),
    measure=_bytes.BYTES,
    orderings=(*_claims(_DEPTHS), *_best_at_two(_DEPTHS)),
    overrides=_bytes.SHAPE,
    at_paper=PaperSize(
        config="char_ptb_paper",
        measure=PENN_TREEBANK,
        variants=_variants(_CHARACTER_DEPTHS, _characters),
        orderings=(*_claims(_CHARACTER_DEPTHS), *_best_at_two(_CHARACTER_DEPTHS)),
    ),
    axis="layers",
    note=_bytes.DEPTHS_NOTE + " Fewer layers have wider heads and feed-forwards.",
    minutes=_bytes.MINUTES,
)

FT_FIGURE_9_WORDS = replace(
    FT_FIGURE_9,
    id="ft-figure-9-words",
    title="Depth at equal parameters, of models of words",
    source="Feedback Transformer v3, Figure 9 right",
    measure=CodeMeasure(whole=False, has_perplexity=True),
    orderings=_claims(_DEPTHS),
    at_paper=PaperSize(
        config=_wikitext.CONFIG,
        measure=WIKITEXT_DEV,
        variants=_variants(_WORD_DEPTHS, _words),
        orderings=_claims(_WORD_DEPTHS),
    ),
    note="Perplexity of 1,024 SentencePiece tokens of Python's standard library, where the paper "
    "has the words of WikiText-103; a width of 128 and a span of 64, 1,400 steps of 1,024 tokens. "
    "Fewer layers have wider heads and feed-forwards.",
)
