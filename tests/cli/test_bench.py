"""`famjax bench`: its tables and errors, not the measured figures."""

import contextlib
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from famjax.bench import (
    beam,
    delta,
    fam,
    feedback,
    feedback_peers,
    feedback_translation,
    linear,
    linear_peers,
    mesh,
)
from famjax.bench.timing import PairedTimes
from famjax.cli import bench, bench_feedback, bench_mesh
from famjax.cli.bench_output import paper_table
from famjax.cli.main import main
from famjax.config.schema import Config, EncoderConfig, FeedbackConfig, LinearConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.experiment.load import to_json
from famjax.ops import kernels
from famjax.train.flops import linear_attention_flops

TINY = ModelConfig(vocab_size=11, layers=1, width=8, heads=2, mlp_width=8, block_len=4, fam_len=2)


def config_of(model, folder):
    """Write a config with this model, and return the flags that select it."""
    path = folder / "config.json"
    path.write_text(to_json(Config(model=model)))
    return ["--config", str(path)]


@pytest.fixture
def short_fam(monkeypatch):
    monkeypatch.setattr(fam, "SIZES", ((4, 2), (8, 2)))
    monkeypatch.setattr(fam, "CHUNK", 16)
    monkeypatch.setattr(fam, "GENERATED", 3)
    monkeypatch.setattr(fam, "LENGTHS", (19, 35))


@pytest.mark.slow
def test_every_size_and_length_is_measured(short_fam, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    sizes = ["--batch", "2", "--length", "16", "--repetitions", "2"]
    assert main(["bench", "fam", *config_of(TINY, tmp_path), *sizes, "--json"]) == 0
    printed = capsys.readouterr()
    assert "GLIBC_TUNABLES is already set" in printed.err
    report = json.loads(printed.out)
    # FLOPs of a token: 896 in the layer's products, 176 of logits, and 32 for each key; the two
    # tokens of the FAM have w + 2 keys, all others two more than in BSWA
    floors = [
        (896 * (w + 2) / w + 176 + 32 * (2 * w + 2) + 32 * (w + 2) * 2 / w)
        / (896 + 176 + 32 * 2 * w)
        for w in (4, 8)
    ]
    assert [cost["floor"] for cost in report["costs"]] == floors
    for cost in report["costs"]:
        for pair in (cost["training"], cost["streaming"]):
            assert pair["first"] > 0
            assert pair["second"] > 0
    assert [row["tokens"] for row in report["lengths"]] == [19, 35]
    for row in report["paper"]:
        assert row["quantity"] in printed.err


@pytest.mark.long
@pytest.mark.parametrize("blocks", [(4,), pytest.param((4, 8), marks=pytest.mark.slow)], ids=str)
def test_a_delta_memory_is_compared_with_windows(blocks, capsys, monkeypatch, tmp_path):
    """At each block length; the floor is the ratio of FLOPs."""
    monkeypatch.setattr(delta, "BLOCKS", blocks)
    monkeypatch.setattr(delta, "MIXERS", ("delta",))
    sizes = ["--batch", "2", "--length", "16", "--repetitions", "2", "--json"]
    model = replace(TINY, layers=2)
    assert main(["bench", "delta", *config_of(model, tmp_path), *sizes]) == 0
    printed = capsys.readouterr()
    costs = json.loads(printed.out)
    found = [(cost["mixer"], cost["block_len"]) for cost in costs]
    assert found == [("delta", block) for block in blocks]
    for cost in costs:
        assert cost["training"]["first"] > 0
        assert cost["streaming"]["second"] > 0
        assert cost["floor"] > 1
    assert "Delta-rule memory / BSWA" in printed.err
    assert main(["bench", "delta", *config_of(TINY, tmp_path), *sizes]) == 2
    assert "model.layers=1: bench delta also measures" in capsys.readouterr().err


@pytest.mark.slow
def test_every_axis_is_compared_with_one_device(capsys, monkeypatch, tmp_path):
    """Sharding adds communication, and the ratio is that of the times."""
    monkeypatch.setattr(mesh, "bench_meshes", lambda _: [("", 1), ("fsdp", 2), ("sequence", 2)])
    drawn = tmp_path / "mesh.png"
    sizes = [*config_of(TINY, tmp_path), "--batch", "2", "--length", "8", "--repetitions", "2"]
    assert main(["bench", "mesh", *sizes, "--json", "--plot", str(drawn)]) == 0
    printed = capsys.readouterr()
    one, fsdp, sequence = json.loads(printed.out)
    assert [one["devices"], fsdp["axis"], sequence["axis"]] == [1, "fsdp", "sequence"]
    assert one["sent"] == {}
    # weights are gathered; FAM's memory is sent to the next device
    assert fsdp["sent"]["all-gather"] > 0
    assert sequence["sent"]["collective-permute"] >= sequence["largest"]["collective-permute"] > 0
    for row in (one, fsdp, sequence):
        assert row["time"]["ratio"] == row["time"]["first"] / one["time"]["first"]
        assert row["tokens_per_second"] == pytest.approx(16 / row["time"]["first"])
    assert drawn.stat().st_size
    assert "/ one device" in printed.err


def test_axis_sizes_are_powers_of_two():
    assert mesh.bench_meshes(6) == [
        ("", 1),
        *((axis, n) for axis in ("data", "fsdp", "tensor", "sequence") for n in (2, 4)),
    ]
    with pytest.raises(UserError, match="bench mesh needs several devices, there is one"):
        mesh.bench_meshes(1)


SMALL_FEEDBACK = ModelConfig(
    vocab_size=11, layers=2, width=8, heads=2, mlp_width=8, feedback=FeedbackConfig(span=4)
)


@pytest.mark.slow
def test_feedback_is_compared_with_other_stacks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(feedback, "SPANS", (4, 8))
    monkeypatch.setattr(feedback, "BATCHES", (1,))
    monkeypatch.setattr(feedback, "SWEEPS", (2,))
    monkeypatch.setattr(feedback, "TOKENS", 2)
    monkeypatch.setattr(feedback_peers, "is_installed", lambda: False)
    drawn = tmp_path / "bench.png"
    sizes = ["--batch", "2", "--length", "6", "--repetitions", "2", "--width", "16"]
    sizes += config_of(SMALL_FEEDBACK, tmp_path)
    assert main(["bench", "feedback", *sizes, "--json", "--plot", str(drawn)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    steps = {step["name"]: step for step in report["steps"]}
    assert len(steps) == 6
    assert steps["transformer"]["transformer"]["ratio"] == 1
    assert steps["feedback, 2 sweeps"]["sweep_change"] > 0
    assert steps["feedback"]["floor"] < 1
    assert report["max_difference_to_plain_autodiff"] < 1e-5
    for row in report["generation"]:
        assert row["ratio"] > 0
        if row["equal"] == "bytes":
            assert row["batch"] == 2 * row["other_batch"]
            assert abs(row["state_bytes"] / row["other_state_bytes"] - 1) < 0.1
    assert report["translation"][0]["training"]["ratio"] == 1
    for row in report["paper"]:
        assert row["quantity"] in printed.err
    assert "decoders of 2" in printed.err
    assert "needs torch, feedback_transformer_pytorch; pip install torch feedback-" in printed.err
    assert "training step / transformer's" in printed.err
    assert drawn.stat().st_size


@pytest.mark.long
def test_steps_are_measured_by_length(capsys, tmp_path):
    """On equally many tokens, with rows for each length (v1 Figure 9)."""
    drawn = tmp_path / "bench.png"
    sizes = ["--batch", "1", "--length", "4,2", "--repetitions", "2"]
    sizes += config_of(SMALL_FEEDBACK, tmp_path)
    assert main(["bench", "feedback", *sizes, "--json", "--plot", str(drawn)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    rows = report["lengths"]
    assert [(row["length"], row["batch"]) for row in rows] == [*[(2, 2)] * 3, *[(4, 1)] * 3]
    for row in rows:
        assert (row["time"]["ratio"] == 1) == (row["name"] == "transformer")
    assert "length of back-propagation" in printed.err
    (mean,) = report["paper"]
    own = [row["time"]["first"] for row in rows if row["name"] == "feedback, keys per layer"]
    assert mean["ours"] == pytest.approx((own[0] + own[1]) / 2 / own[1])
    assert "0.5882" in printed.err  # 10 and 17 days
    assert drawn.stat().st_size


@pytest.mark.long
def test_decoders_of_translation_are_compared():
    """By tokens per second, of training and of decoding (v3 Table 5)."""
    rows = list(feedback_translation.measure_translation(SMALL_FEEDBACK, 2, 4, 2))
    assert [row.name for row in rows] == [*feedback_translation.bench_decoders(SMALL_FEEDBACK, 4)]
    for row in rows:
        assert row.training_speed == 8 / row.training.second
        assert row.decoding_speed == 8 / row.decoding.second
        assert row.decoding.first == rows[0].decoding.second
    compared = feedback_translation.compare_with_paper(rows)
    assert [row.ours for row in compared] == [rows[1].training.ratio, rows[1].decoding.ratio]


def test_decoders_are_of_one_translation_model():
    models = feedback_translation.bench_decoders(SMALL_FEEDBACK, 4)
    assert {(m.encoder.layers, m.layers) for m in models.values()} == {(2, 2)}
    assert [m.stack for m in models.values()] == ["residual", "feedback", "feedback"]
    assert models["feedback"].feedback.shared_kv


@pytest.mark.skipif(not feedback_peers.is_installed(), reason="needs " + feedback_peers.NAME)
def test_the_peer_computes_the_same_function():
    assert feedback_peers.check_peer(SMALL_FEEDBACK, 2, 7) < 1e-4


SMALL_LINEAR = ModelConfig(
    vocab_size=11,
    layers=1,
    width=8,
    heads=2,
    head_dim=8,
    mlp_width=8,
    linear=LinearConfig(features=2),
)


@pytest.mark.long
def test_linear_is_compared_with_other_forms(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(linear, "LENGTHS", (16, 40, 80))
    monkeypatch.setattr(linear, "AIM_LENGTH", 16)
    monkeypatch.setattr(linear, "PRODUCT", 8)
    monkeypatch.setattr(linear, "CONTEXTS", (2, 8))
    monkeypatch.setattr(linear, "AIM_CONTEXT", 8)
    monkeypatch.setattr(linear, "LANES", 2)
    monkeypatch.setattr(linear, "TOKENS", 4)
    # so short that no other form is measured at the second length
    monkeypatch.setattr(linear, "MAX_SECONDS", 1e-9)
    monkeypatch.setattr(linear_peers, "is_installed", lambda: False)
    drawn = tmp_path / "bench.png"
    sizes = [*config_of(SMALL_LINEAR, tmp_path), "--length", "60", "--repetitions", "2"]
    assert main(["bench", "linear", *sizes, "--json", "--plot", str(drawn)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    rows = {(row["name"], row["length"]): row for row in report["attention"]}
    assert {length for _, length in rows} == {16, 40}
    assert rows["chunkwise", 16]["floor"]["ratio"] > 0
    for name in ("token scan", "all pairs"):
        assert rows[name, 16]["max_difference"] < 1e-5
        assert rows[name, 40]["time"] is None
    assert rows["softmax", 16]["max_difference"] is None
    states = {(row["name"], row["length"]): row["state_bytes"] for row in report["decoding"]}
    assert states["T2R", 2] == states["T2R", 8] < states["elu", 8] / 3
    assert states["T2R, map not folded", 8] == states["T2R", 8]
    assert states["transformer", 2] == 2 * 2 * 2 * 2 * 8 * 4 + 2 * 4
    assert len(report["paper"]) == 3  # the Transformer was skipped
    for row in report["paper"]:
        assert row["quantity"] in printed.err
    for said in (
        "skipped",
        "map folded",
        "16 tokens",
        "s left",
        "needs torch, performer_pytorch; pip install torch performer-pytorch\n",
        "aim met: attention's bytes",
    ):
        assert said in printed.err
    assert drawn.stat().st_size


def test_the_chunkwise_form_is_also_measured_without_its_kernel(monkeypatch):
    assert linear.WITHOUT_KERNEL not in linear.forms(8)
    monkeypatch.setattr(linear, "kernel_platform", lambda: "gpu")
    traced = []

    @contextlib.contextmanager
    def without_kernels():
        traced.append(True)
        with kernels.without_kernels():
            yield

    monkeypatch.setattr(linear, "without_kernels", without_kernels)
    runs, max_difference = linear._runs(SMALL_LINEAR, 1, 16, {}, 0)
    assert linear.WITHOUT_KERNEL in runs
    assert max_difference[linear.WITHOUT_KERNEL] == 0  # on a CPU both are the same
    assert traced == [True]


def test_decoding_uses_folded_maps_and_reports_exceptions(monkeypatch):
    monkeypatch.setattr(linear, "LANES", 2)
    folded = []
    monkeypatch.setattr(linear, "fold_feature_maps", lambda m, _: folded.append(m) or m)
    for features in (2, 100):
        model = replace(SMALL_LINEAR, width=16, linear=LinearConfig(features=features))
        linear._decoder(linear.bench_models(model, 1)["T2R"], 1, fold=True, length=1)
        assert bool(linear.fold_obstacle(model)) == (features == 100)
    assert len(folded) == 1


def test_translation_attends_to_sources_as_long_as_the_target(monkeypatch):
    monkeypatch.setattr(linear, "LANES", 2)
    monkeypatch.setattr(linear, "TOKENS", 4)
    monkeypatch.setattr(linear, "CONTEXTS", (8, 16))
    model = replace(SMALL_LINEAR, width=16, linear=LinearConfig(features=2))
    translator = replace(model, encoder=EncoderConfig(layers=1))
    alone, pairs = (
        {(row.name, row.length): row for row in linear.measure_decoding(m, 2, lambda _: None)}
        for m in (model, translator)
    )
    assert alone.keys() == pairs.keys()
    assert all(len(row.seconds) == 2 for row in pairs.values())
    source = {key: pairs[key].state_bytes - alone[key].state_bytes for key in pairs}
    # keys and values of each token, and its mask, in all lanes; or the sums, whatever the length
    layers, d = model.layers, 16
    for length in (8, 16):
        assert source["transformer", length] == 2 * length * (layers * 2 * d * 4 + 1)
    assert source["T2R", 8] == source["T2R", 16] < source["transformer", 8]


def test_long_runs_are_repeated_less_often():
    assert [linear._repetitions(a_turn, 5) for a_turn in (0.0, 1.0, 20.0, 59.0)] == [5, 5, 3, 2]


def test_flops_of_linear_attention_of_one_head():
    # a chunk of 2 with k=3 and e=5: 2 x 2 pairs times k and times e; k x e into S and out of it
    forward = 2 * (2 * 2 * 3 + 2 * 2 * 5 + 2 * 3 * 5 + 2 * 3 * 5)
    assert linear_attention_flops(2, 3, 5, 2) == 3 * forward
    assert linear_attention_flops(8, 3, 5, 2) == 4 * linear_attention_flops(2, 3, 5, 2)


def test_gradients_of_every_form_of_linear_attention_are_equal():
    arrays = linear.random_inputs(SMALL_LINEAR, 2, 10, 2)
    ours = jax.jit(linear.forward_backward(linear.chunkwise(4)))(*arrays)
    for form in (linear.scan, linear.all_pairs):
        for a, b in zip(ours[1], jax.jit(linear.forward_backward(form))(*arrays)[1], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * np.ptp(b))


@pytest.mark.skipif(not linear_peers.is_installed(), reason="needs " + linear_peers.NAME)
def test_the_peer_has_equal_attention():
    model = replace(SMALL_LINEAR, linear=LinearConfig(features=4))
    assert linear_peers.check_peer(model, 2, 300) < 1e-4


def test_paper_lengths_are_whole_chunks_plus_generated_tokens():
    rounded = [round(tokens, -3) for tokens in fam.LENGTHS]
    assert rounded == [25_000, 33_000, 66_000, 129_000, 258_000, 1_000_000]
    assert all((tokens - fam.GENERATED) % fam.CHUNK == 0 for tokens in fam.LENGTHS)


def test_long_documents_are_compared_with_tables_13_and_14():
    """The paper's ratios to BSWA are in the cells of its tables; a million tokens are not."""
    longs = [
        fam.LongDocument(tokens, 2.0 * tokens, 1.0 * tokens, 300, 100, 7) for tokens in fam.LENGTHS
    ]
    rows = list(fam.compare_with_paper(longs))
    assert len(rows) == 5 + 5 + 2
    assert [row.ours for row in rows[:10]] == [3.0] * 5 + [2.0] * 5
    memory = [4.5 / 4.4, 4.9 / 4.8, 6.5 / 6.4, 9.7 / 9.6, 16.1 / 16.0]
    seconds = [16.5 / 16.2, 21.2 / 20.9, 40.7 / 40.2, 77.2 / 76.8, 154.9 / 154.1]
    assert [row.paper for row in rows[:10]] == memory + seconds
    grows = rows[10:]
    assert [row.ours for row in grows] == [1, fam.LENGTHS[4] / fam.LENGTHS[0]]
    assert [row.paper for row in grows] == [16.1 / 4.5, 154.9 / 16.5]
    lines = paper_table("TransformerFAM", rows).lines(None)
    assert lines[1].split() == ["here", "the", "paper", "where"]
    expected = "seconds / BSWA's, 24,832 tokens 2 1.019 Table 14, 26k: 16.5 and 16.2 s"
    assert expected in [" ".join(line.split()) for line in lines]


def test_feedback_is_compared_with_the_papers():
    def step(name, ratio):
        time = PairedTimes(ratio, 1.0, ratio, ratio, 0.0)
        return feedback.TrainingStep(name, time, time, 0, 1.0, None)

    def generation(span, ratio):
        time = PairedTimes(1.0, ratio, 1 / ratio, 1 / ratio, 0.0)
        return feedback.Generation("feedback", span, "batch", 1, 1, 1, 1, ratio, 1.0, time, ratio)

    steps = [step("feedback", 1.5), step("feedback, keys per layer", 1.75)]
    rows = feedback.compare_with_paper(steps, [generation(4, 9.0), generation(8, 2.0)])
    found = [(row.ours, row.paper) for row in rows]
    assert found == [(1.5, 3.5 / 1.2), (1.75, 17 / 1.2), (2.0, 2176 / 592)]


def test_linear_attention_is_compared_with_what_the_paper_states():
    """Speeds are those of the fastest repetitions, of the other maps at any length."""
    seconds = {"transformer": (6.0, 5.0), "T2R": (2.0, 1.0), "elu": (3.0, 4.0), "rfa": (2.0, 2.5)}
    sizes = {"transformer": 99, "T2R": 1, "elu": 4, "rfa": 1}
    rows = [
        linear.Decoding(name, length, tuple(length / 512 * s for s in seconds[name]), sizes[name])
        for length in (512, 1024)
        for name in seconds
    ]
    found = [(row.quantity, row.ours, row.paper) for row in linear.compare_with_paper(rows, rows)]
    maps = [
        ("translation, tokens/s / elu's", 3, 1.15),
        ("translation, tokens/s / rfa's", 2, 1.15),
        ("translation, attention's bytes / elu's", 0.25, 0.3),
    ]
    assert found == [("language model, tokens/s / transformer's at 512 tokens", 5, 4), *maps]
    skipped = [row if row.name == "T2R" else row._replace(seconds=()) for row in rows]
    rows = [*linear.compare_with_paper(skipped, rows)]
    assert [row.quantity for row in rows] == [quantity for quantity, *_ in maps]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--repetitions", "1"], "--repetitions 1: a spread needs at least 2"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--length", "1000"], "--length 1000: must be a multiple of the largest block, 512"),
        (["--length", "512,1024"], "--length 512,1024: bench fam takes one length"),
    ],
)
def test_mistakes_are_one_line_errors(flags, line, capsys):
    assert main(["bench", "fam", *flags]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["fam", "delta", "lora", "linear", "beam"])
def test_models_that_a_bench_cannot_measure_are_rejected(bench, capsys):
    assert main(["bench", bench, "--config", "copy_feedback"]) == 2
    assert "copy_feedback: has model.stack=feedback, which bench" in capsys.readouterr().err
    assert main(["bench", bench, "--config", "multi30k"]) == 2
    assert f"multi30k: has an encoder, which bench {bench} does not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--length", "0"], "--length 0: must be at least 1"),
        (["--span", "0"], "--span 0: must be at least 1"),
        (["--width", "30"], "--width 30: must be a multiple of the 4 heads"),
        (["--plot", "a.txt"], "--plot a.txt: must end in .png, .svg or .pdf"),
        (["--length", "a"], "--length a: write whole numbers"),
        (["--length", "8,12"], "--length 8,12: 8 does not divide 12, so that steps would have"),
    ],
)
def test_feedback_mistakes_are_one_line_errors(flags, line, capsys):
    assert main(["bench", "feedback", *flags]) == 2
    assert line in capsys.readouterr().err


def test_flags_of_another_bench_are_rejected(capsys):
    for argv, who in (
        ("fam --width 64", "feedback"),
        ("fam --plot a.png", "feedback, linear, mesh"),
        ("linear --rank 3", "lora"),
    ):
        name, flag, value = argv.split()
        assert main(["bench", name, flag, value]) == 2
        said = f"{flag} {value}: is only for bench {who}, not for {name}; leave it out"
        assert said in capsys.readouterr().err


def test_adapters_that_do_not_fit_are_rejected(capsys):
    assert main(["bench", "lora", "--rank", "1000000000"]) == 2
    assert "would take at least" in capsys.readouterr().err


def test_linear_mistakes_are_one_line_errors(capsys):
    assert main(["bench", "linear", "--length", "100"]) == 2
    assert "--length 100: must be at least 512" in capsys.readouterr().err


@pytest.mark.long
def test_evaluation_is_compared_with_the_bare_pass(capsys, tmp_path):
    sizes = [*config_of(TINY, tmp_path), "--batch", "2", "--length", "600", "--repetitions", "2"]
    assert main(["bench", "eval", *sizes, "--json"]) == 0
    reading, text = json.loads(capsys.readouterr().out)
    assert reading["tokens"] >= 2 * 512
    assert text["tokens"] >= 2 * 2 * 600
    for row in (reading, text):
        assert row["time"]["ratio"] == row["time"]["first"] / row["time"]["second"]
    assert main(["bench", "eval", *sizes]) == 0
    assert "share of the bare throughput" in capsys.readouterr().out


@pytest.mark.long
def test_beam_search_is_compared_with_greedy_decoding(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(beam, "MIXERS", ("fam",))
    monkeypatch.setattr(beam, "has_peers", lambda: False)
    sizes = [*config_of(TINY, tmp_path), "--batch", "2", "--length", "5", "--repetitions", "2"]
    assert main(["bench", "beam", *sizes, "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    (cost,) = report["costs"]
    assert (cost["mixer"], cost["hypotheses"], report["peers"]) == ("fam", 10, {})
    for pair in (cost["equal"], cost["single"]):
        assert pair["ratio"] == pair["first"] / pair["second"]
    assert cost["equal"]["second"] == cost["single"]["second"]
    assert "share of greedy decoding" in printed.err
    assert "comparing with transformers needs torch, transformers" in printed.err


@pytest.mark.long
@pytest.mark.skipif(not beam.has_peers(), reason="needs " + ", ".join(beam.PEERS))
@pytest.mark.parametrize("measure", [beam.measure_peer, beam.measure_translation_peer])
def test_transformers_writes_the_same_hypotheses(measure):
    model = replace(TINY, width=32, mlp_width=32, vocab_size=64)
    peer = measure(model, 2, 6, 2)
    assert peer.same == 1
    assert peer.time.ratio == peer.time.first / peer.time.second


@pytest.mark.parametrize("name", ["mesh", "feedback"])
def test_devices_are_set_before_jax_is_asked_for_them(name, monkeypatch):
    calls = []
    for function in ("set_cpu_devices", "share_cores"):
        monkeypatch.setattr(bench.runtime, function, lambda *_, f=function: calls.append(f))
    monkeypatch.setattr(bench, "_check_memory", lambda *_: calls.append("memory"))
    for module in (bench_mesh, bench_feedback):
        monkeypatch.setattr(module, "run", lambda *_: calls.append("run"))
    assert bench.run([name]) == 0
    first = "set_cpu_devices" if name == "mesh" else "share_cores"
    assert calls == [first, "memory", "run"]
