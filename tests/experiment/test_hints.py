"""Names that users of other trainers type: a one-line hint with famjax's name."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from famjax.cli.main import VERBS, main
from famjax.config.keys import key_types
from famjax.experiment.hints import HINTS, TRAIN, find_hint


def options(verb: str) -> set[str]:
    """Return the options of a verb, without positional arguments."""
    arguments = importlib.import_module(f"famjax.cli.{verb}").Arguments
    types = get_type_hints(arguments, include_extras=True)
    return {f.name for f in fields(arguments) if "Positional" not in str(types[f.name])}


def test_every_key_in_hints_exists() -> None:
    dotted = re.compile(r"\b(?:model|data|optimizer|train|profile|mesh)\.[a-z_.]*[a-z0-9]")
    named = {key for way in TRAIN.values() for key in dotted.findall(way)}
    assert len(named) > 20
    assert named <= {*key_types(), "metrics.jsonl"}
    assert {way for way in TRAIN.values() if way.isidentifier()} <= key_types().keys()


@pytest.mark.parametrize("verb", [verb for verb in HINTS if verb not in ("", "train")])
def test_every_option_in_hints_exists(verb: str) -> None:
    named = {
        o.replace("-", "_") for way in HINTS[verb].values() for o in re.findall("--([a-z-]+)", way)
    }
    assert named <= options(verb)


def test_no_hint_has_the_name_of_a_key_or_option() -> None:
    assert not TRAIN.keys() & key_types().keys()
    for verb in HINTS.keys() - {"", "train"}:
        assert not HINTS[verb].keys() & options(verb)
    assert not HINTS[""].keys() & VERBS.keys()
    assert {way.split()[0] for way in HINTS[""].values()} <= VERBS.keys()


def test_names_are_compared_without_punctuation() -> None:
    assert find_hint("--Batch-Size", "8") == "; write data.batch=8"
    assert find_hint("trainer.max_steps") == "; write train.steps=..."
    assert find_hint("hovercraft") == ""


STEPS = "write train.steps="
WAYS = {
    "--resume": "run the same command again",
    "--resume=true": "run the same command again",
    "--resume_from_checkpoint runs/x": "run the same command again",
    "resume": "run the same command again",
    "--dry-run": "write train.steps=1 name=try to try one step",
    "--epochs 3": "a run is counted in steps",
    "--num-epochs=3": "a run is counted in steps",
    "train.epochs=3": "a run is counted in steps",
    "--lr 1e-4": "write optimizer.learning_rate=1e-4",
    "lr=1e-4": "write optimizer.learning_rate=1e-4",
    "learning_rate=1e-4": "write optimizer.learning_rate=1e-4",
    "--learning-rate=1e-4": "write optimizer.learning_rate=1e-4",
    "--batch-size 8": "write data.batch=8",
    "--bs 8": "write data.batch=8",
    "batch=8": "write data.batch=8",
    "--max-steps 9": "write train.steps=9",
    "--steps 9": "write train.steps=9",
    "steps=9": "write train.steps=9",
    "--output-dir out": "write --run FOLDER",
    "--config text_fam": "the config comes first",
    "-c text_fam": "the config comes first",
    "--model llama": "the config sets the shape",
    "--data books": "write data.files=books",
    "--device cuda:0": "all devices that JAX finds are used",
    "--gpus 2": "all devices that JAX finds are used",
    "--fp16": "there is no float16",
    "--bf16": "write model.dtype=bfloat16",
    "--random-seed 3": "write seed=3",
    "lora.rank=16": "; write model.lora.rank=16\n",
    "lora.r=16": "; write model.lora.rank=16\n",
    "lora=16": "; write init=FOLDER model.lora.rank=16\n",
    "use_dora=true": "; there are plain adapters only: write init=FOLDER model.lora.rank=N\n",
    "target_modules=q_proj": "; write model.lora.on=attention.q\n",
    "peft.target_modules=['o_proj','up_proj']": "; write model.lora.on=attention.out,mlp.up\n",
    "load_in_4bit=true": "; weights are not quantized; model.lora.base=bfloat16 keeps",
    "deepspeed=x": "; write mesh.fsdp=N, or mesh.fsdp=-1 for all devices\n",
    "fsdp=8": "; write mesh.fsdp=8, or mesh.fsdp=-1 for all devices\n",
    "eval_steps=10": "; write eval.every=10 for the loss of held-out text",
    "eval_strategy=epoch": "; write eval.every=100 for the loss of held-out text",
    "hovercraft=1": "unknown key 'hovercraft'\n",
    "--wandb": "nothing is sent anywhere",
}


# without a config, the first positional argument would be taken as one
@pytest.mark.parametrize(
    ("config", "typed", "way"),
    [
        (config, typed, way)
        for config in ("text_fam", "")
        for typed, way in WAYS.items()
        if config or typed.startswith("-")
    ],
)
def test_train_gives_hints(
    typed: str, way: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [config] * bool(config) + typed.split()
    assert main(["train", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert way in err


def test_other_mistakes_have_their_usual_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """--seed 3 is the key of this name."""
    assert main(["train", "text_fam", "--seed", "x"]) == 2
    assert capsys.readouterr().err.startswith("famjax: seed=x: must be a whole number")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("eval x --batch-size 4", "unknown option --batch-size; write --batch 4; see famjax eval"),
        ("eval x --data a.txt", "unknown option --data; write --tasks text:FILES; see"),
        ("eval --run x", "unknown option --run; the run's folder comes first, without an option:"),
        ("eval --model x", "unknown option --model; the run's folder comes first, without an"),
        ("generate x -p hello", "unknown option -p; write --prompt hello; see famjax generate"),
        ("generate x --max-new-tokens=9", "unknown option --max-new-tokens; write --max-tokens 9;"),
        ("generate x --num-beams 5", "unknown option --num-beams; write --beam 5; see famjax"),
        ("generate x --device cpu", "unknown option --device; all devices that JAX finds"),
        ("evaluate x", "unknown command 'evaluate'; did you mean famjax eval?"),
        ("finetune x", "unknown command 'finetune'; did you mean famjax train finetune?"),
        ("resume x", "unknown command 'resume'; did you mean famjax train?"),
    ],
)
def test_other_verbs_give_hints(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"famjax: {said}")
