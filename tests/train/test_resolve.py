"""Configs are resolved once: fields that are filled in, saved and printed, or unchanged."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small import compiled_once, config, rows  # noqa: F401

import famjax
from famjax.config.resolved import ResolvedConfig, resolve_model
from famjax.config.schema import AXES, Config, MeshConfig
from famjax.core.errors import UserError
from famjax.experiment.load import (
    available_configs,
    difference,
    from_json,
    load_config,
    override,
    to_json,
)
from famjax.pipeline import make_tokenizer
from famjax.tasks.toy import TOYS
from famjax.tokenizers.load import load_tokenizer
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.resolve import RESOLVED, resolve

VOCABULARY = "model.vocab_size=300000"
# fields that `resolve` fills in
DERIVED = {
    *("kv_heads", "head_dim", "mlp_width", "embed_scale", "query_scale", "alpha", "bptt_start"),
    "test_steps",
}
MADE = ("ResolvedConfig", "ResolvedModelConfig")
PLACES = ("config/resolved.py", "train/resolve.py", "tasks/toy.py")


def load(name: str, *overrides: str) -> Config:
    """Return a config; its tokenizer is not loaded."""
    found = load_config(name)
    return override(found, [*overrides, *([] if found.model.vocab_size else [VOCABULARY])])


@pytest.mark.parametrize("name", available_configs())
def test_resolve_is_idempotent_for_every_config(name: str) -> None:
    found = resolve(load(name), None, 8)
    assert isinstance(found, ResolvedConfig)
    assert resolve(found, None, 8) == found
    again = from_json(to_json(found))
    assert resolve(again, None, 8) == found
    assert found.model == resolve_model(load(name).model)
    assert math.prod(vars(found.mesh).values()) == 8
    assert found.train.bptt_start > 0
    if found.data.task in TOYS:
        assert found.data.toy.steps > 0
        assert found.data.toy.test_steps > 0


@pytest.mark.parametrize("name", available_configs())
def test_the_resolved_form_is_a_config(name: str, tmp_path: Path) -> None:
    """The resolved config passes the checks and trains the same model."""
    path = tmp_path / RESOLVED
    path.write_text(to_json(resolve(load(name), None, 8)))
    load_config(str(path))


def test_vocab_size_comes_from_the_tokenizer() -> None:
    bare = Config()
    assert resolve(bare, load_tokenizer("bytes"), 1).model.vocab_size == 258
    with pytest.raises(ValueError, match="give the tokenizer"):
        resolve(bare, None, 1)
    small = override(bare, ["model.vocab_size=100"])
    with pytest.raises(UserError, match="tokenizer bytes has 258 tokens"):
        resolve(small, load_tokenizer("bytes"), 1)


def test_the_mesh_takes_all_devices() -> None:
    half = override(Config(), [VOCABULARY, "mesh.fsdp=2"])
    assert resolve(half, None, 8).mesh == MeshConfig(4, 2, 1, 1)
    auto = override(half, ["mesh=auto"])
    assert -1 not in vars(resolve(auto, None, 8).mesh).values()
    fixed = override(half, ["mesh.data=3"])
    with pytest.raises(UserError, match="data=3 x fsdp=2 x tensor=1 x sequence=1 does not fit 8"):
        resolve(fixed, None, 8)


def test_steps_of_toy_tasks_are_those_of_the_paper() -> None:
    copy = override(Config(), ["data.task=copy", "data.tokenizer=task"])
    toy = resolve(copy, make_tokenizer(copy.data), 1).data.toy
    assert (toy.steps, toy.test_steps) == (40, 400)
    assert resolve(override(copy, [VOCABULARY, "data.toy.steps=7"]), None, 1).data.toy.steps == 7


def test_a_zero_that_disables_is_unchanged() -> None:
    """A 0 that has no derived value is a value itself."""
    plain = override(Config(), [VOCABULARY])
    found = resolve(plain, None, 1)
    changed = {line.partition(":")[0] for line in difference(plain, found)}
    sizes = {f"model.{name}" for name in ("kv_heads", "head_dim", "mlp_width", "delta_heads")}
    scales = {f"model.arch.{name}" for name in ("embed_scale", "query_scale")}
    assert changed == {*sizes, *scales, "train.bptt_start", "mesh.data"}


@pytest.mark.usefixtures("compiled_once")
def test_a_run_saves_the_given_and_the_resolved_config(tmp_path: Path) -> None:
    """config.json is compared when the run resumes; resolved.json is saved next to it."""
    asked, run = config(tmp_path / "texts"), tmp_path / "run"
    asked = override(asked, ["train.steps=3"])
    train(asked, run)
    kept, resolved = (json.loads((run / name).read_text()) for name in ("config.json", RESOLVED))
    extra = Checkpoints(run / "checkpoints").extra(3)["config"]
    for saved in (kept, extra):
        assert saved["model"]["head_dim"] == saved["train"]["bptt_start"] == 0
        assert saved["model"]["arch"]["query_scale"] == 0
    assert kept["mesh"]["data"] == -1
    assert resolved["model"]["head_dim"] == 8
    assert resolved["train"]["bptt_start"] == 64
    assert resolved["mesh"] == dict.fromkeys(AXES, 1) == extra["mesh"]
    train(override(asked, ["train.steps=5"]), run, quiet=True)
    assert json.loads((run / RESOLVED).read_text())["train"]["steps"] == 5
    assert [row["step"] for row in rows(run)] == [3, 4, 5]


def defaults(path: Path) -> Iterator[str]:
    """Yield where a file has `x.head_dim or ...` or resolves a config."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            first = node.values[0]
            if isinstance(first, ast.Attribute) and first.attr in DERIVED:
                yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MADE:
            yield f"{path}:{node.lineno}: {ast.unparse(node.func)}"


def test_defaults_are_resolved_in_one_module() -> None:
    home = Path(famjax.__file__).parent
    places = {home / name for name in PLACES}
    # PyTorch code of exported folders cannot import famjax
    others = (p for p in home.rglob("*.py") if p not in places and "pytorch" not in p.parts)
    assert [line for path in others for line in defaults(path)] == []
    assert all(list(defaults(path)) for path in places)


def test_the_smallest_device_of_all_processes_decides_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Resolved(Exception):
        pass

    def resolve(given: Config, tokenizer: Any, devices: int, device_bytes: int) -> None:
        raise Resolved(device_bytes)

    monkeypatch.setattr("famjax.train.session.all_gather", lambda name, own: [own, 7])
    monkeypatch.setattr("famjax.train.session.resolve", resolve)
    with pytest.raises(Resolved, match=r"^7$"):
        train(config(tmp_path / "texts"), tmp_path / "run", quiet=True)
