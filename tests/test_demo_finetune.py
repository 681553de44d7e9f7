"""The finetuning demonstration end to end, with models that are hardly trained."""

import json

import pytest

from famjax import load_pretrained, open_run
from famjax.demo_finetune import FinetuneDemo, demonstrate


@pytest.mark.slow
def test_the_finetuning_demo_writes_its_results(tmp_path, capfd):
    tiny = ("model.width=16", "model.heads=1", "model.mlp_width=16", "model.lora.rank=0")
    plan = FinetuneDemo(
        tmp_path / "demo",
        (192, 384),
        examples=2,
        pretraining=("train.steps=2", "data.batch=1", *tiny),
        finetuning=("train.steps=2", "data.length=576", "data.passkey.max_length=384"),
    )
    demonstrate(plan)
    shown = " ".join(capfd.readouterr().out.split())
    assert "Whole keys retrieved" in shown
    assert "logits with the source's attention equal Hugging Face's to" in shown
    assert "compared with transformers" in shown
    report = json.loads((plan.folder / "report.json").read_text())
    assert [model["name"] for model in report["models"]] == ["FAM", "BSWA"]
    for model in report["models"]:
        assert 0 < model["trained"] < model["frozen"]
        for when in ("before", "after"):
            assert [row["length"] for row in model[when]["passkey"]] == [192, 384]
            assert model[when]["bits_per_byte"] > 1
        run = open_run(plan.folder / model["name"])
        assert run.config.model.lora.rank == 16
    config, _ = load_pretrained(plan.folder / "FAM" / "exported")
    assert (config.mixer, config.lora.rank) == ("fam", 0)
    assert (plan.folder / "plots" / "finetune.png").read_bytes().startswith(b"\x89PNG")
    # repeated, nothing is recomputed
    demonstrate(plan)
    assert "nothing to do" in capfd.readouterr().err
