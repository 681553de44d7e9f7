"""The finetuning demonstration end to end, with models that are hardly trained."""

import json

import pytest

from famjax import demo_finetune, load_pretrained, open_run
from famjax.core.errors import UserError
from famjax.demo_finetune import FinetuneDemo, demonstrate, make_base_config


@pytest.fixture
def asked(monkeypatch):
    """The demos that `main` would run."""
    demos = []
    monkeypatch.setattr(demo_finetune, "demonstrate", lambda demo: demos.append(demo) or 0)
    return demos


def test_a_larger_base_reads_code_and_books(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo-finetune-large" / "library").mkdir(parents=True)
    for name in ("novels", "others"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr("sys.argv", ["demo", "--large", "--books", "novels:others"])
    assert demo_finetune.main() == 0
    (demo,) = asked
    library = "runs/demo-finetune-large/library"
    config = make_base_config(demo)
    assert config.data.files == f"{library}/training,novels"
    assert demo.base.held_out == (("code", f"{library}/held_out"), ("books", "others"))
    assert (config.model.layers, config.model.width, config.data.length) == (4, 128, 512)
    assert demo.lengths[-1] == 100 * demo.row * demo.block
    assert sorted(model.seed for model in demo.models) == [0, 0, 0, 1, 2]


def test_the_key_of_three_models_is_anywhere_in_a_row():
    demo = demo_finetune.FULL_DEMO
    within = f"data.passkey.needle_within={demo.row * demo.block}"
    found = [model.name for model in demo.models if within in model.finetuning]
    assert found == ["ANYWHERE", "ANYWHERE-1", "ANYWHERE-2"]
    assert not any("needle_within" in s for m in demo_finetune.DEMO.models for s in m.finetuning)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("demo --large --books novels", "--books novels: give TRAINING:HELD_OUT"),
        ("demo --large --books novels:x", "--books: no such file or folder: novels"),
        ("demo --books novels:others", "--books: only --large trains on them"),
    ],
)
def test_incomplete_arguments_are_told(command, told, asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo-finetune-large" / "library").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", command.split())
    assert demo_finetune.main() == 2
    assert told in capsys.readouterr().err
    assert not asked


def test_a_folder_with_models_of_another_base_is_refused(tmp_path):
    (tmp_path / "recipe.txt").write_text("another base")
    (tmp_path / "hugging_face").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}: was made by another recipe"):
        demo_finetune.pretrain(FinetuneDemo(tmp_path, examples=2, blocks=(1,)))


@pytest.mark.slow
def test_the_finetuning_demo_writes_its_results(tmp_path, capfd):
    tiny = ("model.width=16", "model.heads=1", "model.mlp_width=16", "model.lora.rank=0")
    plan = FinetuneDemo(
        tmp_path / "demo",
        examples=2,
        blocks=(1, 2),
        pretraining=("train.steps=2", "data.batch=1", *tiny),
        finetuning=("train.steps=2", "data.length=576", "data.passkey.max_length=384"),
    )
    demonstrate(plan)
    shown = " ".join(capfd.readouterr().out.split())
    assert "Whole keys retrieved" in shown
    assert "logits with the source's attention equal Hugging Face's to" in shown
    assert "compared with transformers" in shown
    report = json.loads((plan.folder / "report.json").read_text())
    assert [model["name"] for model in report["models"]] == ["DELTA", "BSWA"]
    for model in report["models"]:
        assert 0 < model["trained"] < model["frozen"]
        assert model["pretrained"]["code"] > 1
        for when in ("before", "after"):
            assert [row["length"] for row in model[when]["passkey"]] == [192, 384]
            assert model[when]["bits_per_byte"]["code"] > 1
        run = open_run(plan.folder / model["name"])
        assert run.config.model.lora.rank == 16
    config, _ = load_pretrained(plan.folder / "DELTA" / "exported")
    assert (config.mixer, config.lora.rank) == ("delta", 0)
    assert (plan.folder / "plots" / "finetune.png").read_bytes().startswith(b"\x89PNG")
    # repeated, nothing is recomputed
    demonstrate(plan)
    assert "nothing to do" in capfd.readouterr().err
