"""Searches batch, mesh and remat policy for a topology: by formula, then by compiling the best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from famjax.config.schema import Config, MeshConfig
from famjax.core.errors import UserError
from famjax.experiment.load import difference
from famjax.experiment.mesh_checks import call_blocks, tensor_sizes
from famjax.parallel.mesh import meshes
from famjax.plan.chips import Topology
from famjax.plan.formula import REMAT, Estimate, estimate
from famjax.plan.plan import Plan, plan
from famjax.train.resolve import resolve


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
      best: compiled candidates that fit, by descending tokens/s.
      too_large: compiled candidates that do not fit.
      estimated: number of candidates estimated by formula.
      fitting: number of candidates that fit according to the formula.
    """

    best: list[Plan]
    too_large: list[Plan]
    estimated: int
    fitting: int


def candidates(config: Config, topology: Topology) -> Iterator[Config]:
    """Yield configs of the same model and data that differ in how a step is computed.

    Candidates vary the batch (the config's, half and twice of it), the mesh (every one that divides
    rows, heads and blocks), the remat policy and gradient accumulation (`train.accumulate`).
    """
    batch = config.data.batch
    for rows in (batch, 2 * batch, batch // 2):
        yield from _candidates(replace(config, data=replace(config.data, batch=rows)), topology)


def _candidates(config: Config, topology: Topology) -> Iterator[Config]:
    rows = config.data.batch
    policies = REMAT if config.model.stack == "residual" else (config.model.remat,)
    sized = resolve(replace(config, mesh=MeshConfig(topology.count)), None, topology.count)
    for mesh in meshes(topology.count):
        if any(n % mesh.tensor for n in tensor_sizes(sized.model).values()):
            continue
        device_rows, remainder = divmod(rows, mesh.data * mesh.fsdp)
        if not device_rows or remainder or call_blocks(sized) % mesh.sequence:
            continue
        for remat, microbatches in itertools.product(policies, (1, 2, 4, 8)):
            if device_rows % microbatches == 0:
                yield replace(
                    config,
                    mesh=mesh,
                    model=replace(config.model, remat=remat),
                    train=replace(config.train, accumulate=microbatches),
                )


def search(
    config: Config,
    topology: Topology,
    compiles: int,
    report: Callable[[str], None],
    compile: Callable[[Config, Topology], Plan] = plan,
) -> SearchResult:
    """Estimate every candidate; compile the config as it is and the best candidates by formula.

    Args:
      compiles: number of candidates to compile.
      report: called with each line of progress.

    Raises:
      UserError: no mesh divides the batch, or no candidate compiles.
    """
    all_candidates = list(candidates(config, topology))
    if not all_candidates:
        raise UserError(
            f"data.batch={config.data.batch}, model.heads={config.model.heads}: no mesh of "
            f"{topology.count} chips divides the rows, the heads and the blocks of a row, nor with "
            f"half or twice the rows; take a batch that {topology.count} or one of its divisors "
            "divides"
        )
    ranked = rank(
        [(c, estimate(resolve(c, None, topology.count), topology)) for c in all_candidates],
        topology,
    )
    fitting = sum(e.bytes <= topology.chip.memory for _, e in ranked)
    # the formula is rough, so the given config may be better than its candidates
    chosen = [config, *(c for c, _ in interleave_batches(ranked, config.data.batch)[:compiles])]
    report(
        f"{len(all_candidates)} candidates by formula, {fitting} seem to fit; "
        f"compiling {len(chosen)}"
    )
    plans, failed = list[Plan](), list[str]()
    for i, candidate in enumerate(chosen, 1):
        at = f"{i}/{len(chosen)} {format_overrides(config, candidate)}"
        try:
            plans.append(compile(candidate, topology))
        except (UserError, RuntimeError) as error:  # other candidates may still compile
            failed.append(str(error).splitlines()[-1])
            report(f"{at}: {failed[-1]}")
            continue
        report(f"{at}: {describe(plans[-1])}")
    if not plans:
        raise UserError(f"none of {len(chosen)} candidates could be compiled: {failed[0]}")
    best = sorted((p for p in plans if p.fits and p.roofline), key=lambda p: -p.tokens_per_second)
    return SearchResult(best, [p for p in plans if not p.fits], len(all_candidates), fitting)


def rank(
    estimates: Sequence[tuple[Config, Estimate]], topology: Topology
) -> list[tuple[Config, Estimate]]:
    """Return the candidates that fit, sorted by time per token, then the others by bytes."""

    def sort_key(item: tuple[Config, Estimate]) -> tuple[float, ...]:
        config, e = item
        too_large = e.bytes > topology.chip.memory
        cost = e.bytes if too_large else e.seconds / config.data.batch
        return too_large, cost, config.train.accumulate, e.bytes

    return sorted(estimates, key=sort_key)


def interleave_batches(
    ranked: Sequence[tuple[Config, Estimate]], batch: int
) -> list[tuple[Config, Estimate]]:
    """Interleave candidates of different batches.

    The order is: the best two with the config's own batch, the best of each other batch, the next
    two with its own, and so on. A larger batch nearly always has more tokens/s, but it is another
    experiment.
    """
    own = [item for item in ranked if item[0].data.batch == batch]
    larger = [item for item in ranked if item[0].data.batch > batch]
    smaller = [item for item in ranked if item[0].data.batch < batch]
    groups = itertools.zip_longest(own[::2], own[1::2], larger, smaller)
    return [item for group in groups for item in group if item is not None]


def format_overrides(config: Config, candidate: Config) -> str:
    """Return the changes from a config to a candidate, as overrides."""
    changed = (line.partition(": ") for line in difference(config, candidate))
    pairs = ((key, change.partition(" -> ")[2].strip("'")) for key, _, change in changed)
    return " ".join(f"{key}={value}" for key, value in pairs) or "as it is"


def describe(compiled: Plan) -> str:
    memory = f"{compiled.needed / 2**30:.1f} GiB of {compiled.topology.chip.memory / 2**30:.0f}"
    if compiled.roofline is None or not compiled.fits:
        return f"does not fit, {memory}"
    rate = f"{compiled.tokens_per_second:,.0f} tokens/s"
    return f"{memory}, {compiled.roofline.step:.3g} s a step, {rate}"
