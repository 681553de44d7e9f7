"""A subprocess that lowers and compiles a training step without allocating arrays.

    python -m famjax.plan.worker < request.json > answer.json

It is a subprocess because JAX initializes its devices only once per process, and because libtpu and
XLA print to standard error.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from famjax.config.resolved import ResolvedConfig
from famjax.core.errors import UserError
from famjax.core.json_files import parse_json
from famjax.core.types import PyTree, tree_bytes
from famjax.data.lanes import empty_row
from famjax.data.pair_rows import empty_pair_row
from famjax.experiment.load import from_json
from famjax.experiment.mesh_checks import check_rows, duplicated_work
from famjax.parallel import sharding
from famjax.plan import hlo, hlo_cost
from famjax.plan.chips import Topology, parse_topology
from famjax.train.program import TrainProgram, make_program
from famjax.train.resolve import resolve
from famjax.train.run import abstract_model
from famjax.train.state import TrainState

# skip LLVM's optimizations, since the program is not run; XLA's HLO passes are unchanged
_HOST_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Handle a request for a config on a topology.

    Args:
      request: "config", the config as JSON; "topology", its name; "compile", whether to compile as
        well.
    """
    requested, topology = from_json(request["config"]), parse_topology(request["topology"])
    devices = get_devices(topology)
    check_rows(requested, len(devices))
    config = resolve(requested, None, len(devices), int(topology.chip.memory))
    mesh = sharding.make_mesh(config.mesh, devices)
    sizes = {"mesh": dict(mesh.shape), "devices": mesh.size, "shardings": shardings(config, mesh)}
    program = make_program(config, np.ones(config.model.vocab_size, np.float32), mesh=mesh)
    shapes = jax.tree.map(
        lambda a, layout: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout),
        jax.eval_shape(program.start),
        program.shardings,
    )
    sizes["arrays"] = arrays(config, program, shapes)
    sizes["repeated"] = list(duplicated_work(config))
    if not request["compile"]:
        return sizes
    return sizes | compile_step(program, shapes, batch_shapes(config, program), topology, mesh.size)


def get_devices(topology: Topology) -> list[jax.Device]:
    """Return the devices to compile for: TPU devices that are only described, or own devices."""
    if not topology.is_tpu:
        return jax.devices()
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices)


def batch_shapes(config: ResolvedConfig, program: TrainProgram) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a `Batch`."""
    data = config.data
    row = empty_row(data.length)
    if data.layout == "pairs":
        row = empty_pair_row(data.source_length or data.length, data.length)
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((data.batch, *a.shape), a.dtype, sharding=program.batch), row
    )


def arrays(
    config: ResolvedConfig, program: TrainProgram, shapes: TrainState
) -> dict[str, dict[str, float]]:
    """Return elements, bytes, and bytes on one device, for each input of a training step."""
    model = jax.eval_shape(lambda: abstract_state(config))
    everywhere = NamedSharding(program.mesh, PartitionSpec())
    model = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), model
    )
    return {
        "trained": _count_bytes(shapes.params),
        "frozen": _count_bytes(shapes.frozen),
        "optimizer": _count_bytes(shapes.opt_state),
        "carried": _count_bytes(shapes.memory),
        "state of a row": _count_bytes(model),
    }


def abstract_state(config: ResolvedConfig) -> Any:
    """Return a model's carried state for one document, to be traced by `jax.eval_shape`."""
    from flax import nnx

    from famjax.models.seq2seq import make_model

    return make_model(config.model, rngs=nnx.Rngs(0)).init_state(1)


def _count_bytes(tree: PyTree) -> dict[str, float]:
    leaves = jax.tree.leaves(tree)
    here = (math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)
    return {
        "elements": sum(a.size for a in leaves),
        "bytes": tree_bytes(tree),
        "device_bytes": sum(here),
    }


def shardings(config: ResolvedConfig, mesh: jax.sharding.Mesh) -> list[dict[str, Any]]:
    """Return a row for each parameter: path, shape, logical axes, mesh axes, shape on a device.

    "whole" tells whether the parameter is large and replicated although the mesh shards parameters;
    "rule" tells whether a sharding rule matches it.
    """
    _, trained, frozen = abstract_model(config.model, only=config.train.only)
    rows = []
    for path, leaf in jax.tree_util.tree_flatten_with_path((trained, frozen))[0]:
        name = sharding.path_name(path[1:])
        try:
            axes = sharding.parameter_axes(name, leaf.ndim)
        except ValueError:
            axes = ()
        rule = len(axes) == leaf.ndim
        layout = sharding.named_sharding(mesh, axes if rule else (None,) * leaf.ndim, leaf.shape)
        here = layout.shard_shape(leaf.shape)
        rows.append(
            {
                "name": name,
                "shape": leaf.shape,
                "logical": axes,
                "mesh": [list(a) if isinstance(a, tuple) else a for a in layout.spec],
                "device_shape": here,
                "rule": rule,
                "whole": sharding.is_replicated(layout, leaf.size),
            }
        )
    return rows


def compile_step(
    program: TrainProgram, shapes: TrainState, batch: Any, topology: Topology, devices: int
) -> dict[str, Any]:
    """Return the compiler's memory analysis of the step, and the costs of its program."""
    began = time.perf_counter()
    lowered = program.step.lower(shapes, batch)  # type: ignore[attr-defined]
    try:
        done = lowered.compile(compiler_options=None if topology.is_tpu else _HOST_OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        exceeded = re.search(
            r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT])", message
        )
        if not exceeded:
            raise
        return {
            "needed": _parse_binary_size(*exceeded.groups()[:2]),
            "limit": _parse_binary_size(*exceeded.groups()[2:]),
            "compile_seconds": time.perf_counter() - began,
        }
    seconds = time.perf_counter() - began
    analysis = done.memory_analysis()
    share = topology.count / devices  # a chip may have several devices
    module = hlo.parse(done.as_text())
    counted = hlo_cost.count_cost(
        module, topology.chip.flops * share, topology.chip.bandwidth * share
    )
    return {
        "memory": {
            "arguments": analysis.argument_size_in_bytes,
            "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            "temporaries": analysis.temp_size_in_bytes,
            "code": analysis.generated_code_size_in_bytes,
        },
        # that the program of a GPU does not make
        "widened": hlo_cost.widened_bytes(module) if topology.is_gpu else 0.0,
        "flops": counted.flops,
        "bytes": counted.bytes,
        "device_seconds": counted.seconds,
        "network_bytes": counted.network_bytes(),
        "collectives": hlo_cost.collective_rows(counted),
        "kernels": counted.kernels,
        "unknown_loops": counted.unknown_loops,
        "compile_seconds": seconds,
    }


def _parse_binary_size(number: str, unit: str) -> float:
    return float(number) * 1024 ** " KMGT".index(unit or " ")


def main() -> None:
    request = parse_json(sys.stdin.read())
    try:
        reply = answer(request)
    except UserError as error:
        reply = {"error": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
