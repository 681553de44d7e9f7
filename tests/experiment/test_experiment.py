"""Configs by name, overrides, JSON, differences, and a one-line error for every wrong value."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from famjax.cli import train_help
from famjax.config.keys import key_types, key_values
from famjax.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from famjax.core.errors import UserError
from famjax.experiment.checks import validate
from famjax.experiment.load import (
    available_configs,
    difference,
    from_json,
    load_config,
    override,
    to_json,
)
from famjax.optimizers import OPTIMIZERS
from famjax.tasks import TASKS
from famjax.tasks.task import EvaluationTask


def error_of(call: Any, *args: Any) -> str:
    """Return the error line of `call`."""
    with pytest.raises(UserError) as caught:
        call(*args)
    line = str(caught.value)
    assert "\n" not in line
    return line


# Experiments


@pytest.mark.parametrize("name", available_configs())
def test_every_config_loads_and_has_a_description(name: str) -> None:
    config = load_config(name)
    text = available_configs()[name].read_text()
    assert config.name == name
    assert from_json(to_json(config)) == config
    assert f"famjax train {name}" in text
    assert "Cost: " in text
    assert "Expected: " in text


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "multiplier", "kv_heads"),
    [
        ("fam_1b", 18, 1536, 12, 8, 0),
        ("fam_8b", 32, 4096, 32, 4, 0),
        ("fam_24b", 56, 4096, 32, 8, 1),
    ],
)
def test_shapes_are_those_of_the_papers(
    name: str, layers: int, width: int, heads: int, multiplier: int, kv_heads: int
) -> None:
    config = load_config(name)
    m = config.model
    assert (m.layers, m.width, m.heads, m.kv_heads) == (layers, width, heads, kv_heads)
    assert m.mlp_width == multiplier * width
    assert (m.vocab_size, m.block_len, m.memory_segments, m.fam_len) == (256_000, 1024, 3, 64)
    assert (config.train.rsp, config.train.rpo, config.train.steps) == (0.8, True, 50_000)
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.99)


@pytest.mark.parametrize(
    ("name", "shape", "rate"),
    [
        # Feedback Transformer v3 Table 8: hidden and FFN size, heads
        ("cnn_dm_paper", (512, 2048, 8), 5e-4),
        ("iwslt14_paper", (512, 1024, 4), 5e-4),
        # T2R Tables 5 and 6
        ("wmt14_ende_paper", (1024, 4096, 16), 5e-4),
        ("wmt14_enfr_paper", (1024, 4096, 16), 5e-4),
        ("wmt17_zhen_paper", (1024, 4096, 16), 5e-4),
        ("t2r_mt_paper", (1024, 4096, 16), 2e-4),
    ],
)
def test_encoder_decoders_are_those_of_the_papers(
    name: str, shape: tuple[int, ...], rate: float
) -> None:
    config = load_config(name)
    m, o = config.model, config.optimizer
    assert (m.width, m.mlp_width, m.heads) == shape
    assert (m.layers, m.encoder.layers, m.dropout.residual) == (6, 6, 0.3)
    # Vaswani et al. (2017): norms after the sums, sinusoids at the embeddings
    assert (m.arch.pre_norm, m.arch.rotary_fraction) == (False, 0.0)
    assert m.arch.positions == "sinusoidal_halves"
    assert (o.learning_rate, o.schedule, o.beta1, o.beta2) == (rate, "inverse_sqrt", 0.9, 0.98)
    if m.width == 1024:
        steps = {"t2r_mt_paper": 20_000, "wmt14_enfr_paper": 60_000}
        assert config.train.steps == steps.get(name, 30_000)
        assert m.encoder.shared == (name != "wmt17_zhen_paper")
        assert (o.warmup_steps, o.weight_decay, config.train.label_smoothing) == (4000, 0.0, 0.1)
        assert config.data.batch * config.data.length == pytest.approx(460_000, rel=0.01)


def test_text_configs_differ_only_in_the_mixer() -> None:
    changed = difference(load_config("text_fam"), load_config("text_bswa"))
    assert changed == ["name: 'text_fam' -> 'text_bswa'", "model.mixer: 'fam' -> 'bswa'"]


def test_config_from_a_python_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from famjax.config.schema import Config\ndef config(): return Config(name='mine')\n"
    )
    assert load_config(str(path), ["seed=3"]) == Config(name="mine", seed=3)


def test_config_from_a_run_gives_the_same_config(tmp_path: Path) -> None:
    config = load_config("text_fam", ["model.layers=6", "train.rpo=true"])
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    assert load_config(str(path)) == config


@pytest.mark.parametrize(
    ("mixer", "overrides", "update"),
    [
        ("bswa", ["model.mixer=fam"], "gated"),
        ("bswa", ["model.mixer=bswa,fam", "model.fam_max_timescale=8"], "gated"),
        ("bswa", ["model.mixer=fam", "model.fam_update=sum"], "sum"),
        ("bswa", ["model.mixer=delta"], "sum"),
        ("bswa,fam", ["model.mixer=fam"], "sum"),  # its own FAM stays what it is
    ],
)
def test_layers_that_change_with_init_have_the_settings_of_convert(
    tmp_path: Path, mixer: str, overrides: list[str], update: str
) -> None:
    there = Config(model=ModelConfig(vocab_size=258, mixer=mixer), init=str(tmp_path))
    (tmp_path / "config.json").write_text(to_json(there))
    files = ["data.files=x", f"init={tmp_path}"]
    made = load_config("text_bswa", [*files, *overrides]).model
    assert (made.mixer, made.fam_update) == (overrides[0].removeprefix("model.mixer="), update)
    # of a run's own config.json, without init on the command line
    again = load_config(str(tmp_path / "config.json"), [*files[:1], *overrides]).model
    assert again.fam_update == update


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "must define a function config()"),
        ("def config(): return 3", "must define a function config()"),
        ("def config(:", "SyntaxError"),
        ("import famjax.core.config", "'famjax.core.config'; import famjax.config.schema"),
        ("x = 1\nraise ValueError('two\\nlines')", "mine.py:2: ValueError: two"),
        (
            "from famjax.config.schema import *\n"
            "def config(): return Config(model=ModelConfig(layers='4'))",
            "model.layers='4': must be a whole number",
        ),
        (
            "from famjax.config.schema import *\ndef config(): return Config(model=DataConfig())",
            "model.vocab_size is missing",
        ),
    ],
)
def test_an_invalid_python_file_is_rejected(tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    assert said in error_of(load_config, str(path))


DERIVED = """from famjax import Config, load_config, replace_values

def config() -> Config:
    return replace_values(load_config({base!r}), {changes})
"""


def test_a_config_derives_from_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    changes = {"name": "mine", "model.layers": 8, "optimizer.learning_rate": 1}
    path.write_text(DERIVED.format(base="text_fam", changes=changes))
    config = load_config(str(path), ["model.heads=2"])
    assert difference(load_config("text_fam"), config) == [
        "name: 'text_fam' -> 'mine'",
        "model.layers: 4 -> 8",
        "model.heads: 4 -> 2",
        "optimizer.learning_rate: 0.003 -> 1.0",
    ]
    assert type(config.optimizer.learning_rate) is float


def test_bases_are_found_in_the_folder_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "configs", ModuleType("configs"))
    assert load_config("reverse_feedback").data.task == "reverse"


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        ("text_fm", {}, "unknown config 'text_fm'; did you mean 'text_fam'?"),
        ("text_fam", {"model.layer": 2}, "unknown key 'model.layer'; did you mean 'model.layers'?"),
        ("text_fam", {"model": 2}, "'model' is a section, not a key"),
        ("text_fam", {"model.layers": "2"}, "model.layers='2': must be a whole number"),
        ("text_fam", {"model.remat": "blok"}, "did you mean 'block'?"),
    ],
)
def test_an_invalid_derived_config_is_rejected(
    tmp_path: Path, base: str, changes: dict, said: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(DERIVED.format(base=base, changes=changes))
    line = error_of(load_config, str(path))
    assert said in line
    assert line.startswith(f"{path}:4: ")


def test_a_config_that_derives_from_itself_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(DERIVED.format(base=str(path), changes={}))
    line = error_of(load_config, str(path))
    assert "RecursionError" in line
    assert line.count(str(path)) == 1


def test_bases_are_not_listed() -> None:
    assert load_config("_toy_small").data.tokenizer == "task"
    assert not any(name.startswith("_") for name in available_configs())
    assert "unknown config '_toy'" in error_of(load_config, "_toy")
    assert "unknown config '__init__'" in error_of(load_config, "__init__")


def test_unknown_config_names_the_nearest_and_all() -> None:
    line = error_of(load_config, "text_fm")
    assert "did you mean 'text_fam'?" in line
    assert all(name in line for name in available_configs())


def test_missing_folders_and_binary_paths_are_rejected(tmp_path: Path) -> None:
    assert "nowhere.json" in error_of(load_config, str(tmp_path / "nowhere.json"))
    assert "config.json" in error_of(load_config, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": []}')
    convert = "famjax convert {} DEST --to delta model.block_len=512"
    assert convert.format(tmp_path) in error_of(load_config, str(tmp_path))
    assert convert.format("HF_FOLDER") in error_of(load_config, "text_fam", [f"init={tmp_path}"])
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in error_of(load_config, str(tmp_path / "x.json"))
    (tmp_path / "x.py").write_bytes(b"\x00\xff")
    assert "x.py" in error_of(load_config, str(tmp_path / "x.py"))


# Overrides


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.files=a b.txt", "data.passkey.digits=3", "train.rpo=true", "mesh.data=-1"],
        ["--data.files", "a b.txt", "--data.passkey.digits=3", "--train.rpo", "--mesh.data=-1"],
        ["--train.rpo", "True", "--data.files=a b.txt", "--data.passkey.digits", "3"],
    ],
)
def test_overrides_set_values(overrides: list[str]) -> None:
    config = override(Config(), overrides)
    assert difference(Config(), config) == [
        "data.files: '' -> 'a b.txt'",
        "data.passkey.digits: 5 -> 3",
        "train.rpo: False -> True",
    ]


def test_overrides_keep_text_and_the_last_one_wins() -> None:
    config = override(Config(), ["data.files=a=--b", "name=x", "name=", "data.files=--x"])
    assert (config.data.files, config.name) == ("--x", "")
    assert override(Config(), ["data.repeat-len=5"]).data.repeat_len == 5


def test_an_override_does_not_build_a_parser_of_the_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took 40 ms per override."""
    cli, fields = tyro.cli, []
    monkeypatch.setattr(
        tyro,
        "cli",
        lambda kind, **given: (
            fields.append(len(vars(kind)["__annotations__"])) or cli(kind, **given)
        ),
    )
    override(Config(), ["model.layers=3", "train.rpo=true"])
    assert fields == [1, 1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model.layer=3", "unknown key 'model.layer'; did you mean 'model.layers'?"),
        ("--model.layer", "unknown key 'model.layer'; did you mean 'model.layers'?"),
        ("digits=3", "unknown key 'digits'; did you mean 'data.passkey.digits'?"),
        ("zzz=3", "unknown key 'zzz'"),
        ("model=3", "'model' is a section"),
        ("model.layers=x", "model.layers=x: must be a whole number"),
        ("model.layers=", "model.layers=: must be a whole number"),
        ("train.rsp=x", "train.rsp=x: must be a number"),
        ("train.rpo=maybe", "train.rpo=maybe: must be true or false"),
        ("data.layout=pack", "data.layout=pack: must be one of lanes, packed, pairs; did you mean"),
        ("--data.files", "data.files needs a value"),
        ("books.txt", "'books.txt' is not an override"),
    ],
)
def test_invalid_overrides_are_rejected(
    text: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert error_of(override, Config(), [text]).startswith(line)
    assert capfd.readouterr() == ("", "")


# JSON


@given(st.data())
def test_json_round_trip_is_exact(data: st.DataObject) -> None:
    config = Config()
    for key in data.draw(st.lists(st.sampled_from(sorted(key_types())), max_size=5)):
        config = with_value(config, key, data.draw(values_like(key_values(config)[key])))
    again = from_json(to_json(config))
    assert again == config
    assert to_json(again) == to_json(config)


def values_like(value: Any) -> st.SearchStrategy[Any]:
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers()
    if isinstance(value, float):
        return st.floats(allow_nan=False)
    return st.just(value)


def with_value(config: Any, key: str, value: Any) -> Any:
    """Return the config with one key set, unchecked."""
    head, _, rest = key.partition(".")
    return replace(
        config, **{head: with_value(getattr(config, head), rest, value) if rest else value}
    )


def test_invalid_json_is_rejected() -> None:
    tree = json.loads(to_json(Config()))
    assert "not a config" in error_of(from_json, "{")
    assert "table of keys" in error_of(from_json, "[]")
    assert "model=3: must be a table of keys" in error_of(
        from_json, json.dumps(tree | {"model": 3})
    )
    tree["model"]["layer"] = tree["model"].pop("layers")
    assert "unknown key 'model.layer'; did you mean 'model.layers'?" in error_of(
        from_json, json.dumps(tree)
    )


@pytest.mark.parametrize(("was", "now"), [(True, "learned"), (False, "none")])
def test_older_names_of_keys_are_read(was: bool, now: str) -> None:
    tree = json.loads(to_json(Config()))
    del tree["model"]["arch"]["positions"]
    tree["model"]["arch"]["learned_positions"] = was
    assert from_json(json.dumps(tree), report=pytest.fail).model.arch.positions == now


def test_an_older_config_is_read_and_reported() -> None:
    config = override(Config(), ["seed=7", "model.layers=6", "data.passkey.digits=3"])
    tree = json.loads(to_json(config))
    del tree["model"]["layers"], tree["data"]["passkey"], tree["name"]
    notes: list[str] = []
    found = from_json(json.dumps(tree), notes.append)
    default = Config()
    assert (found.seed, found.model.layers, found.name) == (7, default.model.layers, default.name)
    assert found.data.passkey == default.data.passkey
    assert len(notes) == 1
    for part in ("model.layers=4", "data.passkey.*", "name="):
        assert part in notes[0]


@pytest.mark.parametrize("value", [True, "4", 4.0, None])
def test_json_of_another_type_is_rejected(value: Any) -> None:
    tree = dataclasses.asdict(Config())
    tree["model"]["layers"] = value
    assert "model.layers" in error_of(from_json, json.dumps(tree))


# Checks

TOY = ["data.task=copy", "data.tokenizer=task"]
PASSKEY = "data.task=passkey"
WALK = ["data.task=random_walk", "data.tokenizer=task"]
PROGRAMS = ["data.task=algorithmic", "data.tokenizer=task"]
ASK = [PASSKEY, "data.passkey.ask_every=128", "data.passkey.multiple=128"]
WARM = ["train.bptt_start=128", "train.bptt_double_every=9"]


@pytest.mark.parametrize("key", [k for k, v in key_values(Config()).items() if type(v) is not str])
def test_no_number_may_be_very_negative(key: str) -> None:
    kind = key_types()[key]
    line = error_of(validate, with_value(Config(), key, kind(-7) if kind is not bool else -7))
    assert line.startswith(f"{key}=-7")


@pytest.mark.parametrize("key", [k for k, v in key_values(Config()).items() if type(v) is float])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_may_be_infinite(key: str, value: float) -> None:
    assert error_of(validate, with_value(Config(), key, value)).startswith(f"{key}=")


@pytest.mark.parametrize("value", [1e39, -1e39, 1e-39, 1e308, 5e-324])
@pytest.mark.parametrize("key", ["model.arch.embed_scale", "model.rope_base", "optimizer.beta1"])
def test_no_number_may_be_infinite_or_lost_in_float32(key: str, value: float) -> None:
    line = error_of(validate, with_value(Config(), key, value))
    assert line.startswith(f"{key}={value}: is {'0' if abs(value) < 1 else 'infinite'} in float32")


@pytest.mark.parametrize("key", [k for k, v in key_values(Config()).items() if type(v) is str])
def test_no_text_may_be_a_number(key: str) -> None:
    assert error_of(validate, with_value(Config(), key, 3)).startswith(f"{key}=3: must be")


ZERO = [
    "model.layers",
    "model.width",
    "model.heads",
    "model.block_len",
    "model.window",
    "model.capacity",
    "model.fam_len",
    "model.fam_previous",
    "model.rope_base",
    "data.batch",
    "data.length",
    "data.passkey.digits",
    "data.passkey.min_length",
    "data.toy.episodes",
    "data.toy.size",
    "data.toy.variables",
    "optimizer.learning_rate",
    "train.steps",
    "train.accumulate",
    "train.bptt_segments",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.sequence",
]


@pytest.mark.parametrize("key", ZERO)
def test_sizes_must_be_positive(key: str) -> None:
    assert error_of(validate, with_value(Config(), key, key_types()[key](0))).startswith(f"{key}=0")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["model.fam_update=gated", "model.fam_max_timescale=100"],
            "model.fam_max_timescale=100: such a gate would never open (a gate opens by 1 / "
            "timescale, and is closed below model.fam_gate_threshold=0.01); must be less than 100",
        ),
        (
            ["model.fam_update=gated", "model.fam_gate_threshold=1"],
            "model.fam_gate_threshold=1.0: must be at least 0 and less than 1",
        ),
        # not to set model.capacity=1000, which is not a multiple either
        (
            ["model.mixer=full", "model.capacity=9", "data.length=1000"],
            "data.length=1000 is not a multiple of model.block_len=64; take 960 or 1024",
        ),
        (
            ["model.fam_len=129"],
            "model.fam_len=129 is longer than model.block_len=64; a memory has the positions of "
            "its block's last tokens, take at most 64",
        ),
        (
            ["model.fam_update=gated", "model.fam_max_timescale=1.2"],
            "model.fam_max_timescale=1.2: is less than model.fam_min_timescale=1.5; set it to at "
            "least that",
        ),
        (
            ["model.fam_update=gated", "model.fam_min_timescale=1"],
            "model.fam_min_timescale=1: is a number of blocks; must be greater than 1",
        ),
        (
            ["model.mixer=fm", "model.memory_segments=0"],
            "model.memory_segments=0: model.mixer=fm needs at least one memory segment; set it to "
            "1 or more, or use model.mixer=bswa",
        ),
        (
            ["model.width=250"],
            "model.width=250 is not a multiple of model.heads=4; take 248 or 252",
        ),
        (["model.width=3"], "model.width=3 is not a multiple of model.heads=4; take 4, or set"),
        (["model.head_dim=33"], "model.head_dim=33 is odd"),
        (["model.width=252"], "model.head_dim=63 (model.width / model.heads) is odd"),
        (
            ["model.kv_heads=3"],
            "model.kv_heads=3 does not divide model.heads=4; take one of 1, 2, 4",
        ),
        (["model.mixer=famm"], "model.mixer='famm': unknown mixer 'famm'; did you mean 'fam'?"),
        (
            ["model.mixer=Transformer-XL"],
            "model.mixer='Transformer-XL': unknown mixer 'Transformer-XL'; here that is "
            "model.mixer=swa with model.window equal to model.block_len (TransformerFAM B.4.5) (",
        ),
        *(
            (
                [f"model.mixer={name}"],
                f"model.mixer={name!r}: unknown mixer {name!r}; here that is {words} (",
            )
            for name, words in (
                ("rmt", "model.stack=rmt"),
                ("Block-Recurrent", "model.mixer=block_recurrent"),
                ("linear_attention", "model.mixer=linear"),
                ("M3", "model.mixer=bswa with model.memory_segments=3"),
                ("M1_SG", "model.mixer=bswa_sg with model.memory_segments=1"),
            )
        ),
        (["model.mixer=fam,"], "model.mixer='fam,': unknown mixer ''"),
        (
            ["model.mixer=linear", "model.linear.map=rellu"],
            "model.linear.map=rellu: must be one of relu, learned_elu, cos, tanh, elu, rfa",
        ),
        (
            ["model.mixer=linear", "model.linear.features=0"],
            "model.linear.features=0: must be at least",
        ),
        (["model.mixer=linear", "model.linear.chunk=0"], "model.linear.chunk=0: must be at least"),
        (
            ["model.mixer=linear", "model.linear.map=rfa", "model.linear.features=7"],
            "model.linear.features=7 is odd; rfa has a sine and a cosine of each random vector, "
            "take 6 or 8",
        ),
        (["model.mixer=linear", "train.rpo=true"], "train.rpo=true: features of rotated keys"),
        (["model.mixer=bswa,bswa,fam"], "model.layers=4 is not a multiple of the 3 mixers"),
        (
            ["model.mixer=full", "model.capacity=9"],
            "data.length=512 is longer than model.capacity=9",
        ),
        (
            ["data.files=a", "data.tfds=b"],
            "data.files='a' and data.tfds='b': documents come from one",
        ),
        (
            ["data.seqio=a", "data.tfds=b"],
            "data.seqio='a' and data.tfds='b': documents come from one",
        ),
        (["data.tokenizer="], "data.tokenizer=''"),
        (["data.holdout=1"], "data.holdout=1 keeps every document"),
        (["data.repeat_len=5"], "data.repeat_len=5 is for packed rows"),
        (
            ["data.layout=packed", "data.repeat_len=512"],
            "data.repeat_len=512 must be less than half",
        ),
        ([PASSKEY, "data.passkey.min_length=5000"], "data.passkey.min_length=5000 is more than"),
        (
            [PASSKEY, "data.passkey.start_length=63"],
            "data.passkey: min_length=96, start_length=63,",
        ),
        (
            [PASSKEY, "data.passkey.start_length=5000"],
            "data.passkey: min_length=96, start_length=5000",
        ),
        (["data.length=1000"], "data.length=1000 is not a multiple of model.block_len=64"),
        (["train.bptt_segments=3"], "train.bptt_segments=3 does not divide the 8 blocks"),
        (["train.accumulate=3"], "train.accumulate=3 does not divide data.batch=8"),
        (
            ["train.bptt_start=128"],
            "train.bptt_start=128 and train.bptt_double_every=0: the length",
        ),
        (["train.bptt_double_every=9"], "train.bptt_start=0 and train.bptt_double_every=9: the"),
        ([*WARM, "data.layout=packed"], "train.bptt_start=128 is for lanes, packed rows carry no"),
        (
            [*WARM, "data.length=1152"],
            "train.bptt_start=128 does not double to data.length=1152 in multiples of model."
            "block_len=64 times train.bptt_segments=1; take one of 576, 1152, or train.",
        ),
        ([*WARM, "train.bptt_segments=4"], "train.bptt_start=128 does not double to data.length="),
        ([*WARM, "train.bptt_start=2048"], "train.bptt_start=2048 does not double to data.length="),
        (["train.bptt_start=-1"], "train.bptt_start=-1: must be at least 0"),
        (["train.rsp=0.5"], "train.rsp=0.5 is for packed rows"),
        (["train.rsp=1.5"], "train.rsp=1.5: must be from 0 to 1"),
        (
            [PASSKEY, "data.passkey.ask_every=100"],
            "data.passkey.ask_every=100 is not a multiple of model.",
        ),
        ([*ASK, "data.layout=packed"], "data.passkey.ask_every=128 needs memory that packed rows"),
        ([*ASK, "model.mixer=bswa"], "data.passkey.ask_every=128 needs a memory"),
        ([*ASK, "model.fam_previous=2"], "data.passkey.ask_every=128 carries one FAM"),
        (["data.passkey.threshold=1.5"], "data.passkey.threshold=1.5: must be from 0 to 1"),
        (["optimizer.beta2=1"], "optimizer.beta2=1.0: must be at least 0 and less than 1"),
        (["train.label_smoothing=1"], "train.label_smoothing=1.0: must be at least 0 and less"),
        (
            ["model.mixer=bswa", "model.adaptive.cutoffs=9", "train.label_smoothing=0.1"],
            "train.label_smoothing=0.1: an adaptive softmax has no log p of all words to smooth;",
        ),
        (
            ["optimizer.schedule=inverse_sqrt", "optimizer.warmup_steps=0"],
            "optimizer.warmup_steps=0: optimizer.schedule=inverse_sqrt falls with the square root",
        ),
        (
            ["data.task=copy"],
            "data.tokenizer=bytes: data.task=copy has its own words; set data.tok",
        ),
        (
            ["data.tokenizer=task"],
            "data.tokenizer=task: data.task=text has no vocabulary of its own",
        ),
        (["data.task=cpy"], "data.task=cpy: must be one of text, passkey, random_walk"),
        (
            ["data.task=random_walk", "data.tokenizer=task", "data.toy.size=65"],
            "data.toy.size=65: every cell is a word; take at most 64",
        ),
        (
            ["data.task=algorithmic", "data.tokenizer=task", "data.toy.variables=6"],
            "data.toy.variables=6: there are 5 names; take at most 5",
        ),
        (
            [*TOY, "data.layout=packed", "data.repeat_len=5"],
            "data.repeat_len=5 repeats text, data.task=copy is none",
        ),
        (
            [*TOY, "model.mixer=full"],
            "data.toy.concatenate=true: the model holds model.capacity=4096 tokens and",
        ),
        (["seed=4294967296"], "seed=4294967296: must be less than"),
        (["name="], "name=''"),
        (["name=a/b"], "name='a/b'"),
        (["name=.."], "name='..'"),
    ],
)
def test_incompatible_values_are_rejected(overrides: list[str], line: str) -> None:
    assert error_of(load_config, "text_fam", overrides).startswith(line)


def test_defaults_and_unused_keys_are_accepted() -> None:
    validate(Config())
    # the window of swa has no effect for other mixers
    validate(Config(model=ModelConfig(block_len=64, window=128)))
    validate(Config(model=ModelConfig(width=250, heads=4, head_dim=64)))
    validate(Config(data=DataConfig(layout="packed"), train=TrainConfig(rsp=0.8)))
    # the previous FAMs of a model without FAM
    validate(override(Config(), [*ASK, "model.mixer=delta", "model.fam_previous=2"]))


# Differences


def test_differences_are_listed_by_key() -> None:
    assert difference(Config(), Config()) == []
    changed = Config(model=ModelConfig(layers=6))
    assert difference(Config(), changed) == ["model.layers: 4 -> 6"]


def test_the_help_of_a_registry_names_all_its_entries() -> None:
    """The schema imports no registry, since help is shown without importing JAX."""
    comments = train_help._comments(Config)
    trained = {n: task for n, task in TASKS.items() if not isinstance(task, EvaluationTask)}
    for key, registry in {"data.task": trained, "optimizer.name": OPTIMIZERS}.items():
        named = [word for word in re.findall(r"\w+", comments[key]) if word in registry]
        assert sorted(set(named)) == sorted(registry), key
