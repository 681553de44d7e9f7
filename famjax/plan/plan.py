"""A plan: the memory of a training job on a topology, and a lower bound on its step time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from famjax.config.schema import Config, MeshConfig
from famjax.core.errors import UserError
from famjax.core.json_files import parse_json
from famjax.core.optional import install_command, missing_modules
from famjax.experiment.load import to_json
from famjax.plan.chips import Topology
from famjax.plan.formula import activations_by_remat
from famjax.train.flops import step_flops
from famjax.train.resolve import resolve


@dataclass(frozen=True)
class Roofline:
    """Lower bounds on the seconds of a step on one device, by resource.

    Attributes:
      compute: seconds of all matrix products at the chip's peak.
      memory: seconds of all traffic to and from main memory. Of a program that was compiled for
        other devices: of reading the arguments once.
      device: the larger of both for each instruction, summed over instructions. Of a program that
        was compiled for other devices: the larger of both.
      network: seconds of all collectives at the full rate of the links.
    """

    compute: float
    memory: float
    device: float
    network: float

    @property
    def step(self) -> float:
        """Seconds of a step if communication overlaps with the rest."""
        return max(self.device, self.network)

    @property
    def serial(self) -> float:
        """Seconds of a step if nothing overlaps with communication."""
        return self.device + self.network

    @property
    def limit(self) -> str:
        if self.network > self.device:
            return "network"
        return "compute" if self.compute >= self.memory else "memory"


@dataclass(frozen=True)
class Plan:
    """A config planned on a topology.

    Attributes:
      config: config whose training step is planned.
      topology: the chips that it is planned for.
      report: the worker's answer, see `famjax.plan.worker`.
      model_flops: FLOPs of a step, counting only query-key pairs inside the masks, as in the
        training log.
      computed_flops: FLOPs of a step, counting all query-key pairs that are computed.
      needed: bytes of memory needed per chip, without what only the CPU's program needs.
      fits: whether the needed bytes fit in a chip's memory.
      roofline: lower bounds on the step time; None if the compiler ran out of memory.
      utilization: model FLOPs of a step divided by what all chips could compute in `roofline.step`.
    """

    config: Config
    topology: Topology
    report: dict[str, Any]
    model_flops: float
    computed_flops: float
    needed: float
    fits: bool
    roofline: Roofline | None
    utilization: float | None

    @property
    def tokens(self) -> int:
        """Number of tokens in a step."""
        return self.config.data.batch * self.config.data.length

    @property
    def tokens_per_second(self) -> float:
        """Upper bound on the tokens per second; 0 if the compiler ran out of memory."""
        return self.tokens / self.roofline.step if self.roofline else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON types."""
        roofline = self.roofline
        return {
            "config": self.config.name,
            "topology": self.topology.name,
            "chips": self.topology.count,
            "chip": asdict(self.topology.chip),
            **{k: v for k, v in self.report.items() if k != "shardings"},
            "model_flops": self.model_flops,
            "computed_flops": self.computed_flops,
            "needed_bytes": self.needed,
            "fits": self.fits,
            "roofline": None
            if roofline is None
            else asdict(roofline) | {"step": roofline.step, "limit": roofline.limit},
            "utilization": self.utilization,
        }


def plan(config: Config, topology: Topology) -> Plan:
    """Compile a config's training step for a topology and analyze it.

    Args:
      config: config with `model.vocab_size` filled in, see `fill_vocab_size`.

    Raises:
      UserError: libtpu is missing, or the mesh or the batch does not fit the topology.
    """
    report = run_worker(config, topology, compile=True)
    per_chip = report["devices"] / topology.count
    chosen = replace(config, mesh=MeshConfig(**report["mesh"]))
    resolved = resolve(chosen, None, report["devices"])
    tokens = config.data.batch * config.data.length
    model, computed = (tokens * step_flops(resolved, computed=c) for c in (False, True))
    report["activations"] = activations_by_remat(resolved)
    if "memory" not in report:
        return Plan(
            config,
            topology,
            report,
            model,
            computed,
            report["needed"] * per_chip,
            False,
            None,
            None,
        )
    # not all copies need exist when most memory is used
    widened = min(report["widened"], report["memory"]["temporaries"])
    needed = (sum(report["memory"].values()) - widened) * per_chip
    chip = topology.chip
    # a CPU's program has the same products as a GPU's, but not the same traffic
    own = topology.compiles_for_itself
    traffic = report["bytes"] if own else report["memory"]["arguments"]
    compute = report["flops"] * per_chip / chip.flops
    memory = traffic * per_chip / chip.bandwidth
    roofline = Roofline(
        compute,
        memory,
        report["device_seconds"] if own else max(compute, memory),
        report["network_bytes"] * per_chip / topology.network,
    )
    utilization = model / (roofline.step * chip.flops * topology.count)
    fits = needed <= chip.memory
    return Plan(config, topology, report, model, computed, needed, fits, roofline, utilization)


def fill_vocab_size(config: Config) -> Config:
    """Return the config with `model.vocab_size`; if it is 0, it is taken from the tokenizer."""
    if config.model.vocab_size:
        return config
    from famjax.pipeline import make_tokenizer
    from famjax.train.run_folder import with_vocab_size

    try:
        tokenizer = make_tokenizer(config.data)
    except UserError as error:
        raise UserError(f"{error}; or give model.vocab_size=N, enough for a plan") from None
    return with_vocab_size(config, tokenizer)


def run_worker(config: Config, topology: Topology, compile: bool) -> dict[str, Any]:
    """Return the answer of a worker, see `famjax.plan.worker.answer`.

    Raises:
      UserError: the worker ended with an error.
    """
    check_compiler(topology)
    request = {"config": to_json(config), "topology": topology.name, "compile": compile}
    # the worker is in the same process group, so that Ctrl-C ends it too
    done = subprocess.run(
        [sys.executable, "-m", "famjax.plan.worker"],
        input=json.dumps(request),
        env=_environment(topology),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        raise UserError(
            f"the compiler was ended by {signal.Signals(-done.returncode).name}: if this machine "
            "ran out of memory, plan on a larger one; model.scan_layers=true makes programs smaller"
        )
    try:
        answer = parse_json(done.stdout)
    except ValueError:
        raise RuntimeError(f"the planning process failed: {done.stderr[-4000:]}") from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def check_compiler(topology: Topology) -> None:
    """Raise a `UserError` if the compiler for a topology is not installed."""
    if topology.is_tpu and missing_modules(("libtpu",)):
        raise UserError(
            f"--topology {topology.name}: compiling for TPU needs libtpu, which is not installed; "
            f"{install_command(('libtpu',))}"
        )


def _environment(topology: Topology) -> dict[str, str]:
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    count = 1 if topology.is_tpu else topology.count
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        # allowed since no TPU is used, so that several plans can run concurrently
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip(),
        # so that the worker imports the same famjax as this process
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
