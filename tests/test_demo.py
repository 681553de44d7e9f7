"""The demonstration end to end, with models that are hardly trained."""

import json

import pytest

from famjax.core.errors import UserError
from famjax.demo import FULL_DEMO, Demo, DemoModel, by_table, demonstrate, make_config
from famjax.train.recipe import claim_folder, train_and_time


@pytest.mark.parametrize(
    "models",
    [
        pytest.param((DemoModel("FAM"), DemoModel("M1", "bswa", 1)), marks=pytest.mark.long),
        pytest.param(
            (DemoModel("FAM"), DemoModel("DELTA", "delta"), DemoModel("M1", "bswa", 1)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=len,
)
def test_the_demo_writes_its_results(models, tmp_path, capsys):
    small = ("train.steps=2", "model.width=16", "model.mlp_width=16", "data.length=128")
    plan = Demo(
        tmp_path / "demo",
        models,
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
    assert [model["name"] for model in report["models"]] == [model.name for model in models]
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
    picture = (plan.folder / "plots" / "passkey.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_many_models_have_a_table_of_each_mixer():
    results = [{"name": model.name, "mixer": model.mixer} for model in FULL_DEMO.models]
    assert [[result["name"] for result in part] for part in by_table(results)] == [
        ["FAM", "FAM-1", "FAM-2", "FAM-3", "FAM-4"],
        ["DELTA", "DELTA-1", "DELTA-2", "DELTA-3", "DELTA-4"],
        ["M0", "M1", "M2", "M3", "M4", "M6", "M8", "M12"],
    ]
    assert list(by_table(results[:3])) == [results[:3]]


def test_a_folder_holds_one_recipe(tmp_path):
    claim_folder(tmp_path / "a", "500 steps")
    claim_folder(tmp_path / "a", "500 steps")
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    for name in "ab":
        with pytest.raises(UserError, match=f"{name}: was made by another recipe; remove it"):
            claim_folder(tmp_path / name, "250 steps")
