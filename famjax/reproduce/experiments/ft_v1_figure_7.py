"""Feedback Transformer v1, Figure 7: the blocked random walk while training (B.1).

The paper gives no number of updates except 3,000, after which the Feedback Transformer solves it;
the other points are chosen. The learning rate is constant there, so that shorter trainings are the
beginnings of longer ones.
"""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.measures import ToyMeasure

_STEPS = (125, 250, 500, 1000)
_STEPS_AT_PAPER = (1000, 3000, 10000, 20000)
_STACKS = {
    "Transformer": ("model.stack=transformer",),
    "Feedback": (),
}


def _points(counts: tuple[int, ...]) -> tuple[Variant, ...]:
    return tuple(
        Variant(f"{line} {steps}", (*own, f"train.steps={steps}"), x=steps, line=line)
        for line, own in _STACKS.items()
        for steps in counts
    )


FT_V1_FIGURE_7 = Experiment(
    id="ft-v1-figure-7",
    title="Learning the blocked random walk",
    source="Feedback Transformer v1, Figure 7",
    config="blocked_walk_feedback",
    variants=_points(_STEPS),
    measure=ToyMeasure("blocked_walk"),
    orderings=tuple(Ordering(f"Feedback {n}", f"Transformer {n}") for n in (250, 1000)),
    at_paper=PaperSize(
        config="blocked_walk_paper",
        measure=ToyMeasure("blocked_walk", examples=100_000),  # B.1
        variants=_points(_STEPS_AT_PAPER),
        orderings=(
            *(Ordering(f"Feedback {n}", f"Transformer {n}") for n in (3000, 20000)),
            Ordering("Feedback 3000", "Transformer 20000"),
        ),
    ),
    unequal="its points are by steps",
    axis="steps",
    note="10,000 episodes, as in the paper, each with a fresh memory. Each point is a training of "
    "its own, whose learning rate falls to a tenth by its end. The paper's solves it after 3,000 "
    "updates of other rows.",
    minutes=2.7,
)
