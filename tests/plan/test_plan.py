"""`famjax plan` for small models on fake devices, and its errors."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import subprocess
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from famjax.cli import plan_output
from famjax.cli.main import main
from famjax.config.resolved import ResolvedConfig
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.experiment.load import load_config, override
from famjax.experiment.unused_keys import check_unused_keys
from famjax.parallel import sharding
from famjax.plan import plan as plans
from famjax.plan.chips import CHIPS, parse_topology
from famjax.plan.formula import (
    WORK,
    _remote_kv_bytes,
    count_parameters,
    cross_activations,
    device_activations,
    estimate,
    layer_activations,
)
from famjax.plan.search import candidates, format_overrides, search
from famjax.plan.worker import batch_shapes
from famjax.train.flops import step_flops
from famjax.train.program import make_program
from famjax.train.resolve import resolve

SHAPE = [
    *("model.vocab_size=64", "model.layers=2", "model.width=16", "model.heads=4"),
    *("model.mlp_width=32", "model.block_len=8", "model.fam_len=2"),
    *("data.batch=16", "data.length=32", "data.layout=packed"),
]
HAS_TPU = importlib.util.find_spec("libtpu") is not None


def small(*overrides: str) -> Config:
    return override(Config(), [*SHAPE, *overrides])


def resolve_for_eight(config: Config) -> ResolvedConfig:
    """Return the config for eight devices."""
    return resolve(config, None, 8)


def overrides(config: Config) -> list[str]:
    """Return the overrides of `text_fam` that make this config, without unused keys."""
    given = format_overrides(load_config("text_fam"), config).split()
    return [pair for pair in given if is_used(config, pair.partition("=")[0])]


def is_used(config: Config, key: str) -> bool:
    try:
        check_unused_keys(config, [key])
    except UserError:
        return False
    return True


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", "text_fam", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_small_model_on_eight_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Without rematerialization, all matmuls of the program are in the formula."""
    config = small("model.mixer=bswa", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    found = plan_json(capsys, *overrides(config), "name=text_fam", "--topology", "cpu:8")
    assert found["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 1}
    tokens = 16 * 32
    assert found["computed_flops"] == tokens * step_flops(resolve_for_eight(config), computed=True)
    assert found["model_flops"] == tokens * step_flops(resolve_for_eight(config))
    assert found["flops"] * 8 == found["computed_flops"]
    layer = 4 * 16 * 16 + 3 * 16 * 32
    scales = (2 * 2 + 1) * 16
    assert found["arrays"]["trained"]["elements"] == 2 * layer + 64 * 16 + scales
    assert found["arrays"]["optimizer"]["elements"] >= 2 * found["arrays"]["trained"]["elements"]
    assert found["arrays"]["frozen"]["elements"] == 0
    assert {row["kind"] for row in found["collectives"]} >= {"all-gather", "all-reduce"}
    assert found["fits"]
    assert found["needed_bytes"] == sum(found["memory"].values())
    roofline = found["roofline"]
    assert roofline["compute"] == pytest.approx(found["flops"] / CHIPS["cpu"].flops)
    either = max(roofline["compute"], roofline["memory"])
    assert either < roofline["device"] * (1 + 1e-9)
    assert roofline["device"] < roofline["compute"] + roofline["memory"]
    assert roofline["step"] == max(roofline["device"], roofline["network"])


def test_traffic_of_another_compilers_program_bounds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200 a step took 2.1 s, and the traffic of the CPU's program alone would take 3.0."""
    report = {
        "devices": 1,
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1},
        "flops": 1e12,
        "bytes": 1e12,
        "device_seconds": 1.0,
        "network_bytes": 0.0,
        "memory": {"arguments": 1e6, "temporaries": 1e9},
        "widened": 0.0,
    }
    monkeypatch.setattr(plans, "run_worker", lambda config, on, compile: dict(report))
    gpu, cpu = (plans.plan(small(), parse_topology(name)) for name in ("h200:1", "cpu:1"))
    assert gpu.roofline
    assert cpu.roofline
    chip = CHIPS["h200"]
    assert gpu.roofline.memory == 1e6 / chip.bandwidth
    assert gpu.roofline.step == gpu.roofline.compute == 1e12 / chip.flops
    assert cpu.roofline.memory == 1e12 / CHIPS["cpu"].bandwidth
    assert cpu.roofline.step == 1.0


@pytest.mark.long
def test_a_gpu_needs_no_float32_copies_of_weights() -> None:
    config = small("model.lora.rank=2", "model.dtype=bfloat16", "model.lora.base=bfloat16")
    gpu, cpu = (plans.plan(config, parse_topology(name)) for name in ("h100:1", "cpu:1"))
    projections = 4 * 16 * 16 + 3 * 16 * 32
    assert gpu.report["widened"] >= 2 * 4 * projections  # of both layers
    assert gpu.needed == sum(gpu.report["memory"].values()) - gpu.report["widened"]
    assert cpu.report["widened"] == 0
    assert "copies of bfloat16 weights" in _memory_text(gpu)
    assert "copies of bfloat16 weights" not in _memory_text(cpu)


def _memory_text(plan: plans.Plan) -> str:
    return "\n".join(plan_output._memory_table(plan, "").lines(None))


def test_gpus_have_the_memory_that_jax_takes_and_the_network_between_machines() -> None:
    eight, more = parse_topology("h100:8"), parse_topology("h100:16")
    assert eight.chip.memory == 60e9
    assert (eight.network, more.network) == (450e9, 50e9)
    assert parse_topology("l4:16").network == parse_topology("l4:8").network == 32e9
    report: dict[str, Any] = {"memory": {}, "repeated": [], "shardings": []}
    plan = plans.Plan(small(), eight, report, 1.0, 1.0, 70e9, False, None, None)
    assert (
        "it would have 70.78 GiB with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        in plan_output._verdict(plan)
    )
    for other in (replace(plan, needed=80e9), replace(plan, topology=parse_topology("v5e:2x2"))):
        assert plan_output._verdict(other).endswith("or more chips")
    for topology in (eight, more):
        notes = plan_output._notes(replace(plan, topology=topology))
        assert any("network between machines" in note for note in notes) == (topology is more)


@pytest.mark.long
def test_frozen_parameters_and_carried_memory_are_counted() -> None:
    config = small("model.lora.rank=2", "train.rsp=0.5", "optimizer.name=adafactor")
    arrays = plans.run_worker(config, parse_topology("cpu:2"), compile=False)["arrays"]
    assert arrays["frozen"]["elements"] > arrays["trained"]["elements"] > 0
    # each layer has a FAM, its keys and values [f d], and a counter
    assert arrays["carried"]["elements"] == 2 * (3 * 2 * 16 + 1)
    # and a window with keys and values of two blocks, and two counters
    assert arrays["state of a row"]["elements"] == 2 * (3 * 2 * 16 + 1 + 2 * 2 * 8 * 16 + 2)


@pytest.mark.slow
def test_tokens_and_rows_can_be_sharded_in_a_model_of_many_layers() -> None:
    """XLA on CPU rejected axis_index in it: "PartitionId is not supported"."""
    deep = ["model.layers=4", "model.scan_layers=false", "mesh.data=2", "mesh.sequence=2"]
    found = plans.run_worker(small(*deep), parse_topology("cpu:4"), compile=True)
    assert {row["kind"] for row in found["collectives"]} >= {"all-reduce", "collective-permute"}


def test_shardings() -> None:
    config = small("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    found = plans.run_worker(config, parse_topology("cpu:8"), compile=False)["shardings"]
    rows = {row["name"].rsplit("mixer/")[-1]: row for row in found}
    q = rows["window/qkv/q/kernel"]
    assert q["logical"] == [None, "embed", "heads", None]
    assert q["mesh"] == [None, "fsdp", "tensor", None]
    assert (q["shape"], q["device_shape"]) == ([2, 16, 4, 4], [2, 8, 2, 4])
    assert all(row["rule"] for row in found)
    assert not any(row["whole"] for row in found)


def test_a_large_replicated_parameter_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model.vocab_size=66001", "model.layers=1", "mesh.data=4", "mesh.tensor=2"]
    assert main(["plan", "text_fam", *given, "--topology", "cpu:8", "--shardings"]) == 0
    said = capsys.readouterr().out
    assert "large and replicated on every device: embedding, head/kernel" in said
    line = next(line for line in said.splitlines() if line.startswith("embedding"))
    assert line.split() == [
        *("embedding", "66001x128", "vocab,", "embed", "-,", "-", "66001x128"),
        "REPLICATED",
    ]


def candidate(**mesh: int) -> Config:
    config = small()
    return replace(config, mesh=replace(config.mesh, **mesh))


def test_candidates_divide_rows_and_heads() -> None:
    """With 4 blocks, 4 heads, and the batch, half and twice of it."""
    found = list(candidates(small(), parse_topology("cpu:8")))
    meshes = {tuple(vars(c.mesh).values()) for c in found}
    up_to_8, up_to_4 = (1, 2, 4, 8), (1, 2, 4)
    every = itertools.product(up_to_8, up_to_8, up_to_4, up_to_4)
    assert meshes == {sizes for sizes in every if math.prod(sizes) == 8}
    assert {c.model.remat for c in found} == {"none", "attention", "layer", "block"}
    assert {c.data.batch for c in found} == {8, 16, 32}
    for c in found:
        assert c.data.batch % (c.mesh.data * c.mesh.fsdp * c.train.accumulate) == 0


@pytest.mark.parametrize("mixer", ["fam", "bswa"])
def test_memory_and_communication_of_the_sequence_axis(mixer: str) -> None:
    """Devices hold their part of a row's tokens. Memory segments are sent, besides the gradients,
    which are summed as over rows; FAM's devices run sequentially."""
    on = parse_topology("v5e:2x4")
    alone, divided = (
        resolve_for_eight(
            override(candidate(data=data, sequence=sequence), [f"model.mixer={mixer}"])
        )
        for data, sequence in ((8, 1), (1, 8))
    )
    assert estimate(divided, on).activations == pytest.approx(estimate(alone, on).activations)
    assert estimate(divided, on).seconds > estimate(alone, on).seconds


def test_estimates_have_the_expected_order() -> None:
    """Rematerialization, more devices and accumulation all need less memory per device."""
    on = parse_topology("v5e:2x4")
    long = ["model.layers=8", "data.length=256", "model.memory_segments=3"]

    def memory_of(remat: str, **mesh: int) -> float:
        config = resolve_for_eight(override(candidate(**mesh), [*long, f"model.remat={remat}"]))
        return estimate(config, on).bytes

    kept = [memory_of(remat, data=8, fsdp=1) for remat in ("block", "attention", "layer", "none")]
    assert kept == sorted(kept)
    assert memory_of("none", data=1, fsdp=8) < memory_of("none", data=8, fsdp=1)
    model = resolve_for_eight(small(*long)).model
    assert layer_activations(model, 512, 2, 1) == 2 * layer_activations(model, 256, 1, 1)


def test_search_compiles_the_given_and_the_best_estimated_candidates() -> None:
    """Of the compiled candidates, those that fit are returned, ordered by throughput."""
    on, lines, compiled = parse_topology("cpu:8"), list[str](), list[Config]()

    def compile(config: Config, on: Any) -> plans.Plan:
        compiled.append(config)
        seconds = 5.0 - len(compiled)
        roofline = plans.Roofline(seconds, 0, seconds, 0)
        fits = len(compiled) != 3
        return plans.Plan(config, on, {}, 1, 1, 1, fits, roofline if fits else None, 0.5)

    found = search(small(), on, 3, lines.append, compile)
    given, best, second, larger = compiled
    assert given == small()
    assert "as it is" in lines[1]
    assert [c.data.batch for c in (best, second, larger)] == [16, 16, 32]
    assert [p.config for p in found.best] == [larger, best, given]
    assert [p.config for p in found.too_large] == [second]
    assert len(lines) == 5
    rows = (c for c in candidates(small(), on) if c.data.batch == 16)
    seconds = [estimate(resolve_for_eight(c), on).seconds for c in (best, *rows)]
    assert seconds[0] == min(seconds[1:])


def test_a_candidate_that_does_not_compile_is_skipped() -> None:
    on, lines, good = parse_topology("cpu:8"), list[str](), plans.Roofline(1, 0, 1, 0)
    turns = iter([UserError("out of memory"), good, good, RuntimeError("crashed")])

    def compile(config: Config, on: Any) -> plans.Plan:
        if isinstance(turn := next(turns), Exception):
            raise turn
        return plans.Plan(config, on, {}, 1, 1, 1, True, turn, 0.5)

    assert len(search(small(), on, 3, lines.append, compile).best) == 2
    assert lines[1].endswith(": out of memory")
    assert lines[4].endswith(": crashed")
    turns = iter([UserError("out of memory")] * 2)
    with pytest.raises(UserError, match="none of 2 candidates could be compiled: out of memory"):
        search(small(), on, 1, lines.append, compile)


def test_remat_block_equals_layer_for_full_attention() -> None:
    layer, block = (
        layer_activations(resolve_for_eight(full).model, 512, 2, 1)
        for full in (small("model.mixer=full", f"model.remat={r}") for r in ("layer", "block"))
    )
    assert layer == block


def test_search_without_a_valid_mesh_is_an_error() -> None:
    odd = small("data.batch=3", "data.length=8", "model.heads=1")
    with pytest.raises(UserError, match="no mesh of 8 chips divides the rows"):
        search(odd, parse_topology("cpu:8"), 1, print)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e:4x9", "no v5e slice has this shape; the nearest are v5e:4x4, v5e:4x8, v5e:8x8"),
        ("v5p:8x8", "the nearest are v5p:4x4x4"),
        ("v7:2x2", "no such chip; take one of v4:2x4x4, v5e:4x8"),
        ("h200:0", "give a number of chips, such as h200:8"),
        ("cpu:2x2", "give a number of chips, such as cpu:8"),
    ],
)
def test_unknown_topologies_are_rejected(name: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_topology(name)
    assert said.split(" are ")[0] in str(error.value)
    assert all(part in str(error.value) for part in said.split(" are ")[-1].split(", "))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["v5e:1x1", "v5e:4x8", "v5p:4x4x4", "v6e:8x8", "h200:8", "cpu:8"])
def test_known_topologies_are_accepted(name: str) -> None:
    on = parse_topology(name)
    assert on.name == name
    assert on.is_tpu == name.startswith("v")


BAD = [
    (["--topology", "v5e:4x8"], "plan needs a config first"),
    (["text_fam"], "plan needs a topology"),
    (
        ["text_fam", "--topology", "cpu:8", "--json=yes"],
        "--json takes no value; write --json alone",
    ),
    (["text_fam", "--topology", "cpu:8", "--serach"], "unknown option --serach; did you mean"),
    (["text_fam", "--topology", "cpu:8", "--search", "--compiles", "x"], "--compiles x: must"),
    *[
        (["text_fam", "--topology", "cpu:8", "--search", "--compiles", n], "must be a whole number")
        for n in ("²", "0", "-1", "9" * 5000)
    ],
    (["text_fam", "--topology", "cpu:8", "--compiles", "2"], "--compiles needs --search"),
    (
        ["text_fam", "--topology", "cpu:8", "mesh.data=8", "data.batch=4"],
        "data.batch=4: 4 rows at a time do not divide by mesh.data=8; take a multiple of 8",
    ),
    (
        ["text_fam", "--topology", "cpu:8", "mesh.data=3"],
        "data=3 x fsdp=1 x tensor=1 x sequence=1 does not fit",
    ),
    (["text_fam", "--topology=cpu:8", "mesh.dta=3"], "unknown key 'mesh.dta'"),
    (["text_fam", "--topology=cpu:8", "data.tokenizer=no.model"], "or give model.vocab_size=N"),
]


@pytest.mark.parametrize(("argv", "said"), BAD)
def test_mistakes_are_one_line_errors(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *argv]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1]
    assert lines[-1].startswith("famjax: ")


def test_missing_libtpu_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "text_fam", "model.vocab_size=64", "--topology", "v5e:2x2"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "needs libtpu, which is not installed; pip install -e '.[tpu]'" in said


def test_a_killed_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(UserError, match="ended by SIGKILL: if this machine ran out of memory"):
        plans.run_worker(small(), parse_topology("cpu:8"), compile=True)


@pytest.mark.parametrize(
    ("name", "billions"), [("fam_1b", 1.19), ("fam_8b", 8.59), ("fam_24b", 24.49)]
)
def test_jobs_of_the_paper_have_its_sizes(name: str, billions: float) -> None:
    """Tables 5 and 6, 3.1; without allocating the weights."""
    config = load_config(name)
    _, frozen, held = count_parameters(config.model, config.train.only)
    table = config.model.vocab_size * config.model.width
    assert (frozen - table) / 1e9 == pytest.approx(billions, rel=0.001)
    assert held == 2 * frozen
    m, d = config.model, config.data
    assert (m.block_len, m.fam_len, m.memory_segments, m.lora.rank) == (1024, 64, 3, 64)
    assert (m.vocab_size, d.batch, config.optimizer.name) == (256_000, 128, "adafactor")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TPU, reason="libtpu is not installed")
def test_a_plan_for_a_tpu_slice(capfd: pytest.CaptureFixture[str]) -> None:
    """Compiled for eight chips; messages of libtpu are suppressed."""
    given = [*overrides(small("mesh.data=1", "mesh.fsdp=4", "mesh.tensor=2")), "name=text_fam"]
    assert main(["plan", "text_fam", *given, "--topology", "v5e:2x4", "--json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["chips"] == found["devices"] == 8
    assert found["unknown_loops"] == 0
    assert found["flops"] * 8 == pytest.approx(found["computed_flops"], rel=0.3)
    assert {row["kind"] for row in found["collectives"]} >= {"all-gather"}
    assert err.strip().splitlines() == ["compiling text_fam for v5e:2x4; minutes for a large model"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TPU, reason="libtpu is not installed")
def test_a_job_that_is_too_large_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model.vocab_size=64", "model.width=4096", "model.mlp_width=65536", "data.batch=512"]
    assert main(["plan", "text_fam", *given, "data.length=8192", "--topology", "v5e:2x2"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mixer", "keys"), [("bswa", 3 * 8), ("full", 48), ("linear", 0), ("bswa,full", 48)]
)
def test_communication_of_keys_and_values(mixer: str, keys: int) -> None:
    """Per row and layer: 2 (keys and values) x tokens x heads x elements x 4 bytes."""
    given = [f"model.mixer={mixer}", "model.dtype=float32", "data.length=64"]
    if "bswa" in mixer:
        given.append("model.memory_segments=3")
    config = resolve_for_eight(small(*given, "mesh.data=2", "mesh.sequence=4"))
    assert _remote_kv_bytes(config) == 2 * keys * 4 * 4 * 4


def test_rows_that_are_read_whole_need_no_longer_cache() -> None:
    """Their keys are those of the row, whatever capacity the model has for generation."""
    tpu = parse_topology("v5e:2x4")

    def of(*given: str) -> tuple[float, float]:
        config = resolve_for_eight(small("model.mixer=full", *given))
        return device_activations(config), estimate(config, tpu).seconds

    short, long = (of(f"model.capacity={n}", "data.length=32") for n in (32, 4096))
    assert short == long
    short, long = (
        of(f"model.capacity={n}", "data.length=32", "data.layout=lanes") for n in (32, 4096)
    )
    assert short[0] < long[0]
    assert short[1] < long[1]


def test_attention_to_an_encoder_is_counted() -> None:
    """8 layers of float32: by hand, per token its input, query, output and weights; k and v."""
    shape = ["model.width=16", "model.heads=4", "model.mlp_width=32", "model.layers=8"]
    shape += ["model.encoder.layers=1", "model.vocab_size=50", "data.batch=2"]
    config = resolve(load_config("multi30k", shape), None, 1)
    model, tokens, source = config.model, 2 * 128, 144
    keys_values = 2 * 2 * source * 16 * 4
    each = tokens * (3 * 16 + 4 * source) * 4 + keys_values
    work = WORK * (keys_values + tokens * 4 * source * 4)
    assert cross_activations(model, tokens, 2, source, 1) == 8 * each + work
    encoder = replace(model, layers=1, capacity=source)
    parts = [layer_activations(model, tokens, 2, 1)]
    parts += [layer_activations(encoder, 2 * source, 2, 1), 8 * each + work]
    assert device_activations(config) == pytest.approx(sum(parts))
    recomputed = replace(config, model=replace(model, remat="layer"))
    assert 8 * keys_values < cross_activations(recomputed.model, tokens, 2, source, 1) < 8 * each


SHARED = "model.stack=feedback model.feedback.span"
FEEDBACK = "model.stack=feedback model.feedback.shared_kv=false model.feedback.span"
DEEP_ENCODER = "model.encoder.layers=12 model.layers=2 model.dropout.layer=0.1"
SEQ2SEQ = [
    ("wmt14_ende_paper", "", 32_000, 209),
    ("wmt14_ende_paper", f"{SHARED}=512", 32_000, 199),
    ("wmt14_ende_paper", DEEP_ENCODER, 32_000, 218),
    ("wmt14_ende_paper", f"{DEEP_ENCODER} {SHARED}=512", 32_000, 215),
    ("wmt14_enfr_paper", "", 32_000, 209),
    ("wmt17_zhen_paper", "", 64_000, 307),
    ("t2r_mt_paper", "", 32_000, 209),
    ("iwslt14_paper", "", 10_000, 37),
    ("iwslt14_paper", f"{FEEDBACK}=256", 10_000, 37),
    ("cnn_dm_paper", "", 32_000, 61),
]


@pytest.mark.parametrize(("name", "given", "vocabulary", "millions"), SEQ2SEQ)
def test_encoder_decoders_of_the_papers_are_planned(
    name: str, given: str, vocabulary: int, millions: float
) -> None:
    """Transformer big has 210M parameters (Vaswani et al., 2017, Table 3)."""
    keys = [*given.split(), f"model.vocab_size={vocabulary}"]
    config = resolve(load_config(name, keys), None, 8)
    trained, _, _ = count_parameters(config.model, "all")
    assert round(trained / 1e6) == millions
    found = estimate(config, parse_topology("h200:8"))
    assert found.weights > 16 * trained / config.mesh.fsdp / config.mesh.tensor
    assert found.activations > 0
    assert 0 < found.seconds < 60


def test_batches_of_pairs_have_sources() -> None:
    given = load_config("multi30k", ["model.vocab_size=50", "model.width=16", "data.batch=2"])
    config = resolve(given, None, 1)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    program = make_program(config, np.ones(50, np.float32), mesh=mesh)
    shapes = batch_shapes(config, program)
    assert shapes["tokens"].shape == shapes["segment"].shape == (2, 128)
    assert shapes["source"].shape == (2, 144)
    program.step.lower(jax.eval_shape(program.start), shapes)  # type: ignore[attr-defined]
