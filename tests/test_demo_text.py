"""The comparison on text, with models that are hardly trained."""

import json
import sysconfig
from dataclasses import replace

import numpy as np
import pytest
import tiny

from famjax import demo_text
from famjax.core.errors import UserError
from famjax.data.standard_library import Texts, standard_library
from famjax.demo_text import TextDemo, TextModel

SMALL = (
    *("model.width=16", "model.heads=1", "model.mlp_width=16", "model.layers=2"),
    *("data.length=64", "data.batch=2"),
)


def write_result(demo, model, nats):
    """Write the result of a model with two documents of 100 and 300 bytes."""
    folder = demo.folder / model.folder
    folder.mkdir(parents=True)
    documents = [
        {"bytes": size, "nats": value} for size, value in zip((100, 300), nats, strict=True)
    ]
    result = {
        "bits_per_byte": sum(nats) / 400 / np.log(2),
        "memory_gain": {"bits_per_byte": 0.25},
        "by_document": documents,
        "by_position": [{"to": 255, "loss": 1.0}, {"to": 511, "loss": 0.5}],
    }
    (folder / "result.json").write_text(json.dumps(result))


def test_the_table_compares_memories_with_bswa_of_as_many_segments(tmp_path):
    demo = TextDemo(tmp_path, Texts("code", "", ""), seeds=2, steps=100)
    fam = [TextModel("fam", 1, seed) for seed in range(2)]
    bswa = [TextModel("bswa", 1, seed) for seed in range(2)]
    slower = [replace(model, time_of="fam", steps=150) for model in bswa]
    for seed in range(2):
        write_result(demo, fam[seed], np.array([90.0, 200.0]) + 10 * seed)
        write_result(demo, bswa[seed], np.array([90.0, 240.0]) + 10 * seed)
        write_result(demo, slower[seed], np.array([90.0, 180.0]) + 10 * seed)
    # other work doubled all times of a repetition
    times = {"FAM M1": [0.3, 0.3, 0.6], "BSWA M1": [0.2, 0.2, 0.4]}
    assert demo_text.steps_in_time(demo, times, fam[1]) == 150
    rows = demo_text._by_kind(demo, [*fam, *bswa, *slower])
    assert [row["kind"] for row in rows] == ["BSWA M1", "BSWA M1, time of FAM", "FAM M1"]
    assert "against_bswa" not in rows[0]
    difference, low, high = rows[2]["against_bswa"]["steps"]
    assert difference == pytest.approx(-40 / 400 / np.log(2))
    # documents of either kind only: no difference, and 40 nats on 300 bytes
    assert (low, high) == pytest.approx((-40 / 300 / np.log(2), 0))
    assert rows[2]["against_bswa"]["time"][0] == pytest.approx(20 / 400 / np.log(2))
    text = "\n".join(demo_text.table(demo, rows, times).lines(None))
    assert "-0.144 (-0.192 to +0.000)" in text
    assert "+0.072 (+0.000 to +0.096)" in text
    assert demo_text.draw(demo, rows).read_bytes().startswith(b"\x89PNG")


def test_long_modules_of_the_library_are_copied_once(tmp_path, monkeypatch):
    library = tmp_path / "library"
    (library / "site-packages").mkdir(parents=True)
    for number in range(17):
        (library / f"m{number:02}.py").write_text("x" * (30_000 + number))
    (library / "short.py").write_text("x")
    (library / "site-packages" / "other.py").write_text("x" * 40_000)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    for _ in range(2):
        standard_library(tmp_path / "copy")
        assert len(list((tmp_path / "copy" / "training").iterdir())) == 16
        assert [p.name for p in (tmp_path / "copy" / "held_out").iterdir()] == ["m15.py"]
        (library / "m00.py").unlink(missing_ok=True)


def test_arguments_name_texts_and_override_both_configs(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(demo_text, "demonstrate", lambda demo: asked.append(demo) or 0)
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_text("text")
    command = "demo_text --data books=a:b --seeds 1 --base-steps 5 --steps 7 model.width=32"
    monkeypatch.setattr("sys.argv", command.split())
    assert demo_text.main() == 0
    (demo,) = asked
    assert demo.texts == Texts("books", "a", "b")
    assert demo.folder.parts == ("runs", "demo-text", "books")
    # a model continues a base that is not there yet
    monkeypatch.setattr(demo_text, "load_config", lambda name, overrides: (name, overrides))
    model = TextModel("fam", 1, 0)
    name, overrides = demo_text.make_config(demo, model)
    assert name == "text_fam"
    own = {"model.memory_segments=1", "train.steps=7", f"init={demo.folder / 'base-0'}"}
    assert {*own, "model.width=32", "data.files=a"} <= set(overrides)
    name, overrides = demo_text.make_config(demo, model.base)
    assert (name, model.base.folder) == ("text_bswa", "base-0")
    own = {"model.memory_segments=0", "train.steps=5", "seed=0"}
    assert {*own, "model.width=32", "data.files=a"} <= set(overrides)
    assert not any(key.startswith("init=") for key in overrides)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("books=folder", "--data books=folder: give NAME=TRAINING:HELD_OUT"),
        ("books=a.txt:none", "--data: no such file or folder: none"),
    ],
)
def test_wrong_texts_are_told_before_training(given, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr("sys.argv", ["demo_text", "--data", given])
    assert demo_text.main() == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_folder_with_files_of_another_base_is_refused(tmp_path):
    (tmp_path / "recipe.txt").write_text("another base")
    (tmp_path / "step_times.json").write_text("{}")
    with pytest.raises(UserError, match=f"{tmp_path}: was made by another recipe"):
        demo_text.demonstrate(TextDemo(tmp_path, Texts("tiny", "a", "b")))


@pytest.mark.slow
def test_the_demo_trains_and_compares(tmp_path, capsys):
    for name in ("training", "held_out"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text(tiny.TEXT * (20 + number))
    texts = Texts("tiny", str(tmp_path / "training"), str(tmp_path / "held_out"))
    demo = TextDemo(tmp_path / "demo", texts, seeds=1, base_steps=3, steps=4, overrides=SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_text, "_VOCABULARY", 300)
        demo_text.demonstrate(demo)
    shown = capsys.readouterr().out
    for kind in ("FAM M0", "BSWA M0", "BSWA,DELTA M1", "N-GRAMS M1", "BSWA M1"):
        assert kind in shown
    report = json.loads((demo.folder / "report.json").read_text())
    assert len(report) == 14
    times = demo_text.read_step_times(demo)
    assert list(times) == [model.kind for model in demo_text.models_of(0)]
    assert {len(seconds) for seconds in times.values()} == {20}
    # repeated, nothing is trained; another number of steps is another recipe
    before = {p: p.stat().st_mtime for p in demo.folder.glob("*/result.json")}
    demo_text.demonstrate(demo)
    assert before == {p: p.stat().st_mtime for p in demo.folder.glob("*/result.json")}
    with pytest.raises(UserError, match="was made by another recipe"):
        demo_text.measure(replace(demo, steps=2), TextModel("fam", 0, 0), True)
