"""Tables of every verb at every width: numbers are not split, titles break after phrases."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from famjax.bench import fam, feedback, feedback_peers, linear, linear_peers, lora, mesh
from famjax.bench.timing import PairedTimes
from famjax.cli import (
    analyze,
    bench,
    bench_feedback,
    bench_linear,
    bench_mesh,
    doctor,
    eval_output,
    plan_output,
    text_tables,
)
from famjax.cli.bench_output import BenchSizes
from famjax.cli.eval_labels import few_documents
from famjax.cli.layout import terminal_width
from famjax.cli.tables import Output, Table
from famjax.config.schema import Config, ModelConfig
from famjax.plan.chips import parse_topology
from famjax.plan.plan import Plan, Roofline
from famjax.plan.search import SearchResult

PAIR = PairedTimes(12.345, 6.789, 1.818, 1.82, 0.03)
MODEL = ModelConfig(vocab_size=258, layers=24, width=1024, heads=8)
SIZES = BenchSizes(16, 16384, 7, "")
SCORES = {"bits_per_byte": 2.1234, "loss": 1.4718, "perplexity": 12345.678, "accuracy": 0.5678}


@dataclass
class RecordedOutput:
    """An `Output` that stores its items."""

    items: list[Any] = field(default_factory=list)

    def print(self, item: Any) -> None:
        self.items.append(item)


def inference_config() -> Iterator[Table]:
    passkey = {
        "length": 1_048_576,
        "examples": 1000,
        "key_accuracy": 0.9876,
        "token_accuracy": 0.9954,
        "key_chance": 1e-5,
        "token_chance": 0.1,
        "seconds": 1234.5,
        "tokens_per_second": 123_456.0,
        "peak_bytes": 1_234_567_890,
        "state_bytes": 123_456_789,
        "updates": 81_920,
        "answer_seconds": 12.34,
        "interval": [0.98, 1.0],
    }
    yield eval_output.passkey_table([passkey, passkey])
    yield eval_output.reading_table([passkey])
    long = passkey | {"score": 0.9876, "interval": [0.95, 1.0], "by_depth": [0.9] * 5, "cut": 12}
    long["length"] = 10_485_760
    yield eval_output.long_table({"task": "niah_single_1", "source": "RULER", "rows": [long]})
    toy = {"chance": 1 / 64, "commonest": "0,0", "commonest_accuracy": 0.14, "last_accuracy": 0.75}
    row = passkey | toy | {"episode_accuracy": 0.5, "accuracy": 0.9}
    yield eval_output.toy_table({"task": "random_walk", "rows": [row]})
    text = SCORES | {
        "files": "books/war_and_peace.txt,books/ulysses.txt",
        "documents": 1234,
        "documents_left": 5678,
        "window": 2048,
        "score": 512,
        "tokens": 12_345_678,
        "bytes": 45_678_901,
        "tokens_per_second": 23_456.0,
        "state_bytes": 345_678,
        "without_memory": SCORES,
        "memory_gain": SCORES | {"loss": -0.1234},
        "unigram": SCORES,
        "uniform": SCORES,
        "by_position": [
            {"from": 131072, "to": 262143, "tokens": 131072}
            | {"loss": 1.2345, "loss_without_memory": 1.3456}
        ],
    }
    yield text_tables.text_table(text)
    gains = {"memory": SCORES | {"gain": [0.0345, 0.0301, 0.0389]}, "segments": SCORES}
    yield text_tables.text_ablation_table(text | {"ablations": gains})
    yield text_tables.position_table(text)


def analyze_tables() -> Iterator[Table]:
    measured = {"mean": 3.1234, "last": 2.3456}
    layers = [
        {"layer": i, "mixer": "bswa_sg", "entropy": measured, "distance": measured}
        for i in range(12)
    ]
    report = {"files": "holdout", "examples": 16, "length": 512, "layers": layers}
    yield analyze._table(report | {"entropy": measured, "distance": measured})


def bench_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    out: Any = RecordedOutput()
    asked = SimpleNamespace(rank=64, json=False)
    cost = fam.FamCost(512, 64, PAIR, PAIR, 1.125)
    long = fam.LongDocument(1_000_000, 123.4, 121.2, 1_234_567_890, 987_654_321, 1_234_567)
    measured = SimpleNamespace(
        measure_costs=lambda *_: [cost],
        measure_long_documents=lambda *_: [long, long._replace(state_bytes=0)],
    )
    bench._bench_costs(measured, MODEL, SIZES, out, RecordedOutput())  # type: ignore[arg-type]
    bench._bench_long_documents(measured, MODEL, out, RecordedOutput())  # type: ignore[arg-type]
    kept = lora.TrainingFootprint(1_234_567, 9_876_543, 123_456_789)
    compared = lora.LoraTimes("famjax", kept, kept, PAIR)
    for name, result in {
        "llama_config": MODEL,
        "compare": compared,
        "compare_peft": compared._replace(name="peft"),
        "has_peers": True,
        "flops_floor": 0.678,
    }.items():
        monkeypatch.setattr(lora, name, lambda *_, result=result: result)
    bench._bench_lora(MODEL, asked, SIZES, out, RecordedOutput())  # type: ignore[arg-type]
    yield from (item for item in out.items if isinstance(item, Table))

    step = feedback.TrainingStep("feedback, 2 sweeps", PAIR, PAIR, 123_456_789, 0.987, 1.2e-3)
    yield bench_feedback._training_table([step], PAIR, 1e-6, MODEL, SIZES)
    generated = feedback.Generation(
        "feedback, memory", 2048, "bytes", 8, 4, 12_345_678, 12_345_670, 1234.5, 2345.6, PAIR, 0.5
    )
    yield bench_feedback._generation_table([generated], MODEL)
    yield bench_feedback._peers_table([feedback_peers.FeedbackPeer(512, PAIR, 1e-6)], MODEL, SIZES)
    attention = linear.Attention("chunkwise", 16384, PAIR, PAIR, 1e-6)
    left_out = attention._replace(name="token scan", time=None, floor=None, max_difference=None)
    yield bench_linear._attention_table([attention, left_out], MODEL, SIZES)
    yield bench_linear._peers_table([linear_peers.LinearPeer(16384, PAIR, 1e-6)])
    yield bench_linear._decoding_table(
        [linear.Decoding("T2R, map not folded", 16384, (0.1, 0.2), 1_234_567)], MODEL
    )
    kinds = ("all-gather", "all-reduce", "collective-permute", "reduce-scatter")
    sent = dict.fromkeys(kinds, 12_345_678.0)
    one = mesh.MeshTiming("", 1, PAIR, 12_345.6, {}, {}, 123_456_789)
    divided = [one, one._replace(axis="sequence", devices=8, sent=sent, largest=sent)]
    yield bench_mesh._step_table(divided, MODEL, SIZES)
    collectives = bench_mesh._collectives_table(divided)
    assert isinstance(collectives, Table)
    yield collectives


def a_plan() -> Plan:
    array = {"elements": 1_234_567_890, "bytes": 4_938_271_560, "device_bytes": 123_456_789}
    parts = ("arguments", "results", "temporaries", "code")
    collective = {"kind": "collective-permute", "group": 8, "count": 24.0, "bytes": 12_345_678}
    sharding = {
        "name": "layers/mixer/window/qkv/q/kernel",
        "shape": [24, 1024, 16, 64],
        "logical": [None, "embed", "heads", None],
        "mesh": [None, "fsdp", "tensor", None],
        "device_shape": [24, 128, 8, 64],
        "rule": True,
        "whole": False,
    }
    seen = {
        "mesh": {"data": 4, "fsdp": 8},
        "arrays": dict.fromkeys(plan_output.ARRAYS, array),
        "memory": dict.fromkeys(parts, 1_234_567_890),
        "widened": 1_234_567_890,
        "activations": {"none": 9_876_543_210, "block": 123_456_789},
        "flops": 1.2345e15,
        "devices": 32,
        "collectives": [collective | {"largest": 1_234_567}],
        "repeated": [],
        "shardings": [sharding],
    }
    roofline = Roofline(1.2345, 0.5678, 1.3456, 0.1234)
    config = replace(Config(), name="fam_1b")
    return Plan(config, parse_topology("v5e:4x8"), seen, 1e15, 2e15, 1e10, True, roofline, 0.4567)


def plan_tables() -> Iterator[Table]:
    done = a_plan()
    source = "compiled by libtpu"
    yield plan_output._arrays_table(done)
    yield plan_output._memory_table(done, source)
    yield plan_output._remat_table(done)
    yield plan_output._flops_table(done, source)
    collectives = plan_output._collectives_table(done, source)
    assert isinstance(collectives, Table)
    yield collectives
    yield plan_output._time_table(done)


def search_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    out = RecordedOutput()
    monkeypatch.setattr(plan_output, "Output", lambda: out)
    done = a_plan()
    plan_output.show_search(Config(), SearchResult([done, done], [], 123, 45))
    plan_output.show_shardings(done.report, done.topology)
    yield from (item for item in out.items if isinstance(item, Table))


def doctor_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    out = RecordedOutput()
    monkeypatch.setattr(doctor, "Output", lambda: out)
    gigabytes = 2**30
    part = {"name": "libtpu", "found": False, "install": "pip install -e '.[tpu]'"}
    doctor._show(
        {
            "famjax": "0.1.0",
            "python": "3.11.13",
            "required": {"jax": "0.10.2", "orbax-checkpoint": None},
            "devices": [
                {"platform": "gpu", "kind": "NVIDIA H100", "count": 8, "memory": 80 * gigabytes}
            ],
            "device_works": "yes: compiled and multiplied in 0.12 s",
            "host_memory": {"total": 128 * gigabytes, "available": 100 * gigabytes},
            "compile_cache": "/home/someone/.cache/famjax/jax",
            "compile_cache_writable": True,
            "optional": [part | {"missing_costs": "a TPU is not used, nor planned for"}],
            "ok": False,
        }
    )
    yield from out.items


def all_tables(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    parts = (inference_config(), analyze_tables(), bench_tables(monkeypatch), plan_tables())
    return [
        *(table for part in parts for table in part),
        *search_tables(monkeypatch),
        *doctor_tables(monkeypatch),
    ]


@pytest.mark.parametrize("width", [20, 40, 80, 200, None])
def test_numbers_are_not_split(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = all_tables(monkeypatch)
    assert len(tables) == 28
    for table in tables:
        lines = table.lines(width)
        shown = "\n".join(lines)
        assert "…" not in shown
        assert "0.0 MB" not in shown
        # a name at the start of a "name: value" line ends in a colon
        words = {*shown.split(), *(word.removesuffix(":") for word in shown.split())}
        for row in table._cells():
            for cell in row:
                for word in cell.split():
                    assert word in words, (word, shown)
        for line in lines:
            # a word that cannot be wrapped may exceed the width
            assert width is None or len(line) <= width or len(line.split()) == 1, shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_titles_break_after_phrases(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in all_tables(monkeypatch):
        rows = table.lines(width)
        head = rows[: len(rows) - len(_untitled(table).lines(width))]
        assert " ".join(head) == table._title
        for phrase in re.split(r"(?<=[,;:]) |(?<!^) (?=\()", table._title):
            assert len(phrase) > width or any(phrase in line for line in head or [""]), head


def _untitled(table: Table) -> Table:
    other = Table("", table._columns, tuple(table._words))
    other._rows = table._rows
    return other


def a_table() -> Table:
    table = Table("sizes", ("", "bits per byte", "tokens"), words=(0,))
    table.add_row("reset at every block", "2.1234", "12,345,678")
    table.add_rule()
    table.add_row("uniform", "8.0000")
    return table


def test_a_table_has_its_natural_width() -> None:
    assert a_table().lines(None) == [
        "sizes",
        "                      bits per byte      tokens",
        "--------------------  -------------  ----------",
        "reset at every block         2.1234  12,345,678",
        "--------------------  -------------  ----------",
        "uniform                      8.0000",
    ]


def test_headings_and_words_wrap_first() -> None:
    assert a_table().lines(40) == [
        "sizes",
        "                        bits",
        "                         per",
        "                        byte      tokens",
        "--------------------  ------  ----------",
        "reset at every block  2.1234  12,345,678",
        "--------------------  ------  ----------",
        "uniform               8.0000",
    ]
    assert a_table().lines(34)[4:] == [
        "--------------  ------  ----------",
        "reset at every  2.1234  12,345,678",
        "block",
        "--------------  ------  ----------",
        "uniform         8.0000",
    ]


def test_a_narrower_table_has_a_line_for_each_number() -> None:
    assert a_table().lines(24) == [
        "sizes",
        "reset at every block",
        "  bits per byte: 2.1234",
        "  tokens: 12,345,678",
        "uniform",
        "  bits per byte: 8.0000",
    ]


def test_a_value_too_long_for_its_line_starts_the_next() -> None:
    table = Table("", ("a chip", "bytes a chip sends"))
    table.add_row("0", "12.34 MB / 5.67 MB")
    assert table.lines(23) == ["a chip: 0", "  bytes a chip sends:", "    12.34 MB / 5.67 MB"]


def test_tables_in_a_pipe_are_not_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width(io.StringIO()) is None
    wide = Table("", tuple(f"column {i}" for i in range(40)))
    wide.add_row(*(f"{i:,}" for i in range(1000, 41000, 1000)))
    Output().print(wide)
    assert "1,000" in capsys.readouterr().out.splitlines()[3].split()
    Output(stderr=True).print("word " * 60)
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("COLUMNS", "40")
    assert terminal_width(io.StringIO()) == 40
    Output().print(wide)
    assert "column 39: 40,000" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "0")
    assert terminal_width(io.StringIO()) is None


def test_without_headings_a_row_is_a_name_and_its_value() -> None:
    table = Table("", ("", ""), words=(0, 1))
    table.add_row("device works", "yes: compiled and multiplied in 0.12 s")
    assert table.lines(30) == [
        "device works  yes: compiled",
        "              and multiplied",
        "              in 0.12 s",
    ]
    assert table.lines(20) == [
        "device works:",
        "  yes: compiled and",
        "    multiplied in",
        "    0.12 s",
    ]


# empty values


def test_no_collectives_are_shown_as_none() -> None:
    one = mesh.MeshTiming("", 1, PAIR, 1.0, {}, {}, 0)
    assert "no collectives" in bench_mesh._collectives_table(
        [one, one._replace(axis="data", devices=2)]
    )
    done = a_plan()
    done.report["collectives"] = []
    assert "none, chips exchange" in plan_output._collectives_table(done, "")
    alone = replace(done, topology=parse_topology("cpu:1"))
    assert "none, there is one chip" in plan_output._collectives_table(alone, "")


def test_small_figures_are_not_shown_as_zero() -> None:
    assert plan_output.format_seconds(0.0000123) == "12.3 us"
    assert plan_output.format_seconds(0.9999) == "1 s"
    assert plan_output.format_seconds(12345.6) == "12,346 s"
    assert plan_output.format_seconds(0) == "0 s"
    assert plan_output.format_percent(0.00123) == "0.12%"
    assert plan_output.format_percent(0.5) == "50%"
    done = replace(
        a_plan(), topology=parse_topology("cpu:8"), roofline=Roofline(1e-7, 1e-6, 1e-6, 0)
    )
    shown = "\n".join(plan_output._time_table(done).lines(None))
    assert "100.00 GFLOP/s" in shown
    assert "0.000" not in shown
    assert " 0 TFLOP/s" not in shown


def test_tables_by_length_fit_a_terminal_as_tables() -> None:
    _, reading, long, *_ = inference_config()
    for table in (reading, long):
        lines = table.lines(80)
        assert max(map(len, lines)) <= 80
        # a line for each row
        assert len(lines) <= 5


def test_intervals_of_ablations_of_texts_have_a_column_and_a_warning() -> None:
    gain = {"memory": {"gain": [0.0345, 0.0301, 0.0389]}}
    (_, row) = text_tables.text_ablation_table({"ablations": gain}).lines(None)[-2:]
    assert row.split()[-4:] == ["+0.0345", "+0.0301", "to", "+0.0389"]
    assert few_documents(5) == []
    assert few_documents(1) == ["1 document: too few for a reliable interval"]
    assert few_documents(4) == ["4 documents: too few for a reliable interval"]


def test_lengths_of_an_earlier_evaluation_may_lack_an_ablation() -> None:
    passkey = {"length": 256, "examples": 8, "key_accuracy": 1.0, "token_accuracy": 1.0}
    passkey |= {"key_chance": 1e-3, "token_chance": 0.1, "seconds": 1.0, "tokens_per_second": 9.0}
    passkey |= {"peak_bytes": 10**6}
    found = {"reset": {"score": 0.25, "gain": [0.75, 0.5, 1.0]}}
    later = passkey | {"length": 512, "updates": 64, "state_bytes": 10, "ablations": found}
    *_, ablated = eval_output.result_tables("passkey", [passkey, later])
    assert isinstance(ablated, Table)
    assert ablated._cells() == [["512", "64", "25.0%", "100.0%", "+75.0%", "+50 to +100"]]
