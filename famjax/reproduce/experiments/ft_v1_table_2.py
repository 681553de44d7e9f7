"""Feedback Transformer v1, Table 2: characters of Penn Treebank (4.3)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _bytes
from famjax.reproduce.penn_treebank import PennTreebankMeasure

_TRANSFORMER, _FEEDBACK = "Transformer of 4 layers", "Feedback of 2 layers"
# the last fifteenth of the steps, at a tenth of the rate
_FINETUNING = 100
_FINETUNED = (
    f"train.steps={_FINETUNING}",
    "optimizer.learning_rate=2e-4",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
)
_FINETUNED_AT_PAPER = (
    "train.steps=1000",
    "optimizer.learning_rate=1.5e-4",
    "optimizer.warmup_steps=0",
)
_ONE_FINETUNED = (
    "Only the Feedback Transformer is finetuned, of which 4.3 says so; B.5 says it of all models."
)

FT_V1_TABLE_2 = Experiment(
    id="ft-v1-table-2",
    title="Characters of Penn Treebank",
    source="Feedback Transformer v1, Table 2",
    config="char_ptb_feedback",
    variants=(
        Variant(
            _TRANSFORMER,
            (*_bytes.TRANSFORMER, *_bytes.at_depth(4), f"train.steps={_bytes.STEPS}"),
            {"dev": 1.256, "test": 1.227},
            continues=None,
            at_paper=_bytes.TRANSFORMER,
        ),
        Variant(_FEEDBACK, _FINETUNED, {"dev": 1.181, "test": 1.160}, at_paper=_FINETUNED_AT_PAPER),
    ),
    measure=PennTreebankMeasure(),
    orderings=(Ordering(_FEEDBACK, _TRANSFORMER, "test"), Ordering(_FEEDBACK, _TRANSFORMER, "dev")),
    overrides=_bytes.at_depth(2),
    base=(f"train.steps={_bytes.STEPS - _FINETUNING}",),
    at_paper=PaperSize(
        config="char_ptb_paper",
        measure=PennTreebankMeasure(),
        base_config="char_ptb_paper",
        # the best depth of Figure 9
        base=("model.layers=2", "model.head_dim=288", "model.mlp_width=4608"),
        note="The Transformer has six layers. " + _ONE_FINETUNED,
    ),
    note="As in the paper a Feedback Transformer of two layers, finetuned at a tenth of the "
    "learning rate, against a deeper Transformer of as many parameters: of four layers here, of "
    "six there. A width of 128 and a span of 64, 0.8 million parameters, 1,400 steps of 1,024 "
    "characters with the finetuning, where the paper has 10.7 million parameters and 15,000 steps "
    "of 262,144. " + _ONE_FINETUNED,
    minutes=18.0,
)
