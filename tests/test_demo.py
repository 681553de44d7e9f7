"""The demonstration end to end, with models that are hardly trained."""

import json

from famjax import open_run
from famjax.demo import Demo, DemoModel, demonstrate, evaluate, make_config, train_and_time


def test_the_demo_writes_its_results(tmp_path, capsys):
    small = ("train.steps=2", "model.width=16", "model.mlp_width=16", "data.length=128")
    plan = Demo(
        tmp_path / "demo",
        (DemoModel("FAM"), DemoModel("M1", 1)),
        (128, 256),
        examples=4,
        tokens=1024,
        remembered=500,
        overrides=small,
    )
    demonstrate(plan)
    shown = capsys.readouterr().out
    assert "Whole keys retrieved" in shown
    assert "loaded from its checkpoint" in shown
    assert "questions are anywhere in a block" in " ".join(shown.split())
    report = json.loads((plan.folder / "report.json").read_text())
    assert [model["name"] for model in report["models"]] == ["FAM", "M1"]
    for model in report["models"]:
        assert [row["length"] for row in model["rows"]] == [128, 256]
        assert all(0 <= row["key_accuracy"] <= 1 for row in model["rows"])
        assert model["state_bytes"] > 0
        assert (plan.folder / model["name"] / "checkpoints" / "000000002").is_dir()
        # repeated, it does not train, and reports the original durations
    for demo_model, model in zip(plan.models, report["models"], strict=True):
        folder = plan.folder / demo_model.name
        _, seconds = train_and_time(make_config(plan, demo_model), folder, quiet=True)
        assert seconds == model["train_seconds"] > 0
    assert len(report["remembered"]["key"]) == 5
    # an evaluation goes on where it stopped, and starts over with another model
    rows = report["models"][0]["rows"]
    run, file = open_run(plan.folder / "FAM"), plan.folder / "FAM" / "rows.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "rows": [{"length": 128, "kept": True}]}))
    assert [row.get("kept") for row in evaluate(plan, run, file, quiet=True)] == [True, None]
    file.write_text(json.dumps({**saved, "settings": [1, *saved["settings"][1:]]}))
    again = evaluate(plan, run, file, quiet=True)
    assert [row["key_accuracy"] for row in again] == [row["key_accuracy"] for row in rows]
    picture = (plan.folder / "plots" / "passkey.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
