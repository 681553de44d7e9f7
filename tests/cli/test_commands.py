"""Every command in the docs and configs is accepted by its verb."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from famjax.cli import plan, train
from famjax.cli.main import VERBS
from famjax.config.keys import key_types
from famjax.config.schema import Config, ModelConfig
from famjax.experiment.load import available_configs, load_config, override, to_json
from famjax.plan.chips import parse_topology

ROOT = Path(__file__).parents[2]


def documented_commands() -> Iterator[tuple[str, str]]:
    """Yield (file, command) for every line that starts with famjax and every inline command."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "data/README.md"]
    for path in [*pages, *sorted((ROOT / "configs").glob("[!_]*.py"))]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:Command:)?[ ]*famjax (.+)$", text, re.M):
            command = line.partition(" #")[0].strip()
            # usage patterns and sentences, not commands
            if command.split()[0] in VERBS and not re.search(r"[\[|`]| to | of |: ", command):
                yield path.name, command
        if path.suffix == ".md":
            yield from ((path.name, command) for command in inline_commands(text))


def inline_commands(text: str) -> Iterator[str]:
    """Yield the complete commands in a text, with all arguments that their verbs require."""
    for found in re.findall(r"`famjax ([^`]+)`", text):
        command = " ".join(found.split())
        verb, _, given = command.partition(" ")
        # a pattern for several commands, or only the verb
        if verb in VERBS and given and not re.search(r"^-|\.\.\.|[|]| N\b|CONFIG", given):
            yield command


COMMANDS = sorted(set(documented_commands()))


class Parsed(Exception):
    """The verb has parsed its flags."""


def test_docs_have_commands_of_every_verb() -> None:
    verbs = {command.split()[0] for _, command in COMMANDS}
    assert {"train", "eval", "convert", "analyze", "generate", "bench"} <= verbs
    assert len(COMMANDS) > 60


def test_pages_on_finetuning_are_consistent(tmp_path: Path) -> None:
    """The folder that README and docs/finetune.md convert is the one that page's commands train."""
    page = [command for file, command in COMMANDS if file == "finetune.md"]
    conversions = [command for command in page if command.startswith("convert ")]
    conversions += [c for f, c in COMMANDS if f == "README.md" and c.startswith("convert ")]
    assert len(conversions) == 2
    written = set()
    for conversion in conversions:
        words = shlex.split(conversion)
        written.add(words[2])
        given = [word for word in words if "=" in word]
        mixer = words[words.index("--to") + 1]
        begun = Config(model=ModelConfig(mixer=mixer, vocab_size=512))
        (tmp_path / "config.json").write_text(to_json(override(begun, given)))
        for command in page:
            if command.startswith("train ") and "init=models" in command:
                words = shlex.split(command)[1:]
                (init,) = [word for word in words if word.startswith("init=")]
                assert init.removeprefix("init=") in written
                overrides = [f"init={tmp_path}" if word == init else word for word in words]
                load_config(overrides[0], overrides[1:])


def launch_commands() -> Iterator[tuple[str, str, str]]:
    """Yield (file, script, config and overrides) for commands with launch scripts in the docs."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(
            r"^(?:sbatch .*|docker run .*)?launch/.+$|^docker run .+$", text, re.M
        ):
            words = line.partition(" #")[0].split()
            configs = [i for i, word in enumerate(words) if word in available_configs()]
            if configs:
                yield path.name, line.split()[0], " ".join(words[configs[0] :])


LAUNCHED = sorted(set(launch_commands()))


def test_docs_have_commands_of_the_launch_scripts() -> None:
    scripts = {script for _, script, _ in LAUNCHED}
    assert {"launch/tpu_vm.sh", "launch/gke.sh", "launch/gpu.sh", "sbatch", "docker"} <= scripts


@pytest.mark.parametrize(("file", "script", "given"), LAUNCHED, ids=lambda x: x)
def test_launch_commands_are_valid(file: str, script: str, given: str, tmp_path: Path) -> None:
    name, *overrides = shlex.split(given)
    model = replace(load_config(name).model, mixer="delta")  # the only one that is converted to
    (tmp_path / "config.json").write_text(to_json(Config(model=model)))
    load_config(name, [f"init={tmp_path}" if a.startswith("init=") else a for a in overrides])


def test_make_targets_in_the_docs_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = " ".join(path.read_text(encoding="utf-8").split())
        documented_commands = re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, re.M)
        assert {a or b for a, b in documented_commands} <= set(targets), path.name


@pytest.mark.parametrize(("file", "command"), COMMANDS, ids=lambda x: x)
def test_documented_commands_parse(
    file: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verb, *argv = shlex.split(command.removesuffix("&"))
    if verb == "train":
        argv = train.take_options(argv, train.FLAGS)[1]
        # EXPERIMENT, CONFIG: names chosen by the reader
        if not argv[0].isupper() and argv[0] != "runs/first/config.json":
            given = [f"init={tmp_path}" if a.startswith("init=") else a for a in argv]
            model = load_config(argv[0]).model
            if any(a.startswith("train.only=") for a in argv):
                model = replace(model, mixer="linear")
            if any(a.startswith("train.write_loss=") for a in argv):
                model = replace(model, mixer="delta")
            (tmp_path / "config.json").write_text(to_json(Config(model=model)))
            load_config(given[0], given[1:])
        return
    if verb == "plan":
        asked = plan.parse_arguments(argv)
        parse_topology(asked.topology)
        (tmp_path / "config.json").write_text(to_json(Config()))
        load_config(
            asked.config,
            [f"init={tmp_path}" if a.startswith("init=") else a for a in asked.overrides],
        )
        return
    module = importlib.import_module(f"famjax.cli.{verb}")
    parse = module.parse

    def stop(*args: object) -> None:
        parse(*args)
        raise Parsed

    monkeypatch.setattr(module, "parse", stop)
    with pytest.raises(Parsed):
        module.run(argv)
    given = {a.partition("=")[0] for a in argv if "=" in a and not a.startswith("-")}
    assert given <= key_types().keys() | {a for a in given if verb != "convert"}
