"""Which batch, mesh and recomputing suit a topology: many by formula, the best of them compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from famjax.core.config import Config
from famjax.core.errors import UserError
from famjax.core.experiment import difference
from famjax.core.mesh import tensor_sizes
from famjax.plan.chips import Topology
from famjax.plan.formula import Estimate, estimate
from famjax.plan.plan import Plan, plan

REMAT: tuple[Literal["none", "layer", "block"], ...] = ("none", "layer", "block")


class Found(NamedTuple):
    """What a search came to.

    Attributes:
      best: compiled, those that fit, the most tokens a second first.
      refused: compiled, and too large.
      estimated: how many were looked at by formula.
      fitting: how many of them seemed to fit.
    """

    best: list[Plan]
    refused: list[Plan]
    estimated: int
    fitting: int


def candidates(config: Config, on: Topology) -> Iterator[Config]:
    """Yield configs of the same model and data: every mesh of data, fsdp and tensor, recomputing,
    and parts of the batch. `mesh.sequence` is the config's.

    Rows that a batch has are as the config says; read at once are all, or they are cut into parts
    whose gradients are added (`train.accumulate`).
    """
    rows, sequence = config.data.batch, max(1, config.mesh.sequence)
    count = on.count // sequence
    fitting = [n for n in range(1, count + 1) if count % n == 0]
    recomputing = REMAT if config.model.stack == "residual" else (config.model.remat,)
    for tensor, data in itertools.product(fitting, fitting):
        if count % (tensor * data) or any(n % tensor for n in tensor_sizes(config).values()):
            continue
        fsdp = count // (tensor * data)
        if rows % (data * fsdp):
            continue
        mesh = replace(config.mesh, data=data, fsdp=fsdp, tensor=tensor, sequence=sequence)
        most = rows // (data * fsdp)
        for remat, parts in itertools.product(recomputing, (1, 2, 4, 8)):
            if most % parts == 0:
                yield replace(
                    config,
                    mesh=mesh,
                    model=replace(config.model, remat=remat),
                    train=replace(config.train, accumulate=parts),
                )


def search(
    config: Config,
    on: Topology,
    compiles: int,
    report: Callable[[str], None],
    compile: Callable[[Config, Topology], Plan] = plan,
) -> Found:
    """Estimate every candidate, and compile the best by formula.

    Args:
      compiles: how many.
      report: takes a line of progress.

    Raises:
      UserError: no mesh divides the batch.
    """
    every = list(candidates(config, on))
    if not every:
        raise UserError(
            f"data.batch={config.data.batch}, model.heads={config.model.heads}: no mesh of "
            f"{on.count} chips divides the rows and the heads; take a batch that {on.count} or one "
            "of its divisors divides"
        )
    ranked = rank([(c, estimate(c, on)) for c in every], on)
    fitting = [c for c, e in ranked if e.bytes <= on.chip.memory]
    report(
        f"{len(every)} candidates by formula, {len(fitting)} seem to fit; compiling "
        f"{min(compiles, len(ranked))}"
    )
    plans = []
    for i, (candidate, _) in enumerate(ranked[:compiles], 1):
        done = compile(candidate, on)
        plans.append(done)
        report(f"{i}/{compiles} {named(config, candidate)}: {outcome(done)}")
    best = sorted((p for p in plans if p.fits and p.roofline), key=_seconds)
    return Found(best, [p for p in plans if not p.fits], len(every), len(fitting))


def rank(
    estimates: Sequence[tuple[Config, Estimate]], on: Topology
) -> list[tuple[Config, Estimate]]:

    def place(of: tuple[Config, Estimate]) -> tuple[float, ...]:
        config, e = of
        too_large = e.bytes > on.chip.memory
        return too_large, e.bytes if too_large else e.seconds, config.train.accumulate, e.bytes

    return sorted(estimates, key=place)


def named(config: Config, candidate: Config) -> str:
    """Return what a candidate changes, as overrides."""
    changed = (line.partition(": ") for line in difference(config, candidate))
    pairs = ((key, change.partition(" -> ")[2].strip("'")) for key, _, change in changed)
    return " ".join(f"{key}={value}" for key, value in pairs) or "as it is"


def outcome(done: Plan) -> str:
    memory = f"{done.needed / 2**30:.1f} GiB of {done.on.chip.memory / 2**30:.0f}"
    if done.roofline is None or not done.fits:
        return f"does not fit, {memory}"
    return f"{memory}, {done.roofline.step:.3g} s a step"


def _seconds(done: Plan) -> Any:
    return done.roofline.step if done.roofline else float("inf")
