"""Run the README's five minutes as a new user would, at tiny sizes, with only famjax installed.

    python tests/tour.py        # in an environment made by `pip install -e .`; see `make tour`

Every command and the Python code of the section are taken from README.md and made small by
`SMALLER`. A command that fails, prints a traceback or is unknown ends the tour. Only the standard
library is imported.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECTION = "Five minutes"

MODEL = (
    *("model.layers=1", "model.width=32", "model.heads=2", "model.mlp_width=64"),
    *("model.fam_len=4", "data.batch=2", "data.length=128"),
)
STEPS = "train.steps=4"
# by the first words of a command: arguments that make it small
SMALLER: dict[str, tuple[str, ...]] = {
    "famjax train text_fam": (*MODEL, STEPS),
    "famjax train finetune_documents": (
        *("model.lora.rank=2", "data.batch=2", "data.length=256", "train.steps=2"),
    ),
    "famjax eval runs/first": (),
    "famjax eval runs/mine": (),
    "famjax eval runs/demo/FAM --tasks passkey": ("--lengths", "256,512", "--examples", "2"),
    "famjax generate": ("--max-tokens", "8"),
    "famjax generate runs/first --read": (),
    "famjax convert": ("model.block_len=64",),
    "famjax export": (),
}
# Python code of the section -> its smaller version
SHORTER = {
    '"train.steps=100"': ", ".join(f'"{given}"' for given in (*MODEL, STEPS)),
    "max_tokens=80": "max_tokens=8",
}
# the README's virtual environment is the one that runs this script
PASSED_OVER = (". .venv/bin/activate",)

# what readers have already: texts, a pretrained model, the demo's run
FULL = ("model.mixer=full", "model.arch.embed_scale=1", "model.capacity=256", "data.layout=packed")
BEFORE: tuple[tuple[str, ...], ...] = (
    (
        *("famjax", "train", "text_fam", *(given for given in MODEL if "fam_len" not in given)),
        *(*FULL, STEPS, "name=pretrained"),
    ),
    ("famjax", "export", "runs/pretrained", "HF_FOLDER"),
    (
        *("famjax", "train", "passkey", "data.tokenizer=bytes", "model.width=32"),
        *("model.mlp_width=64", "model.block_len=64", "data.length=512"),
        # with byte tokens, needle and question are long
        *("data.passkey.ask_every=0", "data.passkey.min_length=256"),
        *("data.passkey.start_length=256", "data.passkey.max_length=512"),
        *("train.steps=2", "--run", "runs/demo/FAM"),
    ),
)
# the next steps of a reader: folders of programs, as described in their own README
AFTER = ("first-orbax", "first-hlo")


class UnknownError(Exception):
    """The README has a command or code that the tour cannot run."""


class Step(NamedTuple):
    """A command, or the Python code of one block.

    Attributes:
      said: as in the README.
      argv: the command, made small; none for Python.
      code: the Python, made small.
    """

    said: str
    argv: Sequence[str] = ()
    code: str = ""


def steps(readme: str) -> Iterator[Step]:
    """Yield all commands and code of the section.

    Raises:
      UnknownError: for a block in another language or a command that is not in `SMALLER`.
    """
    python = "".join(text for language, text in blocks(readme) if language == "python")
    for said in SHORTER:
        if python and said not in python:
            raise UnknownError(f"the section's Python has no {said}; change tests/tour.py")
    for language, text in blocks(readme):
        if language == "python":
            yield Step("Python of the section", code=shorter(text))
        elif language:
            raise UnknownError(f"a block of {language}; teach tests/tour.py to run it")
        else:
            for command in commands(text):
                yield Step(command, smaller(command))


def blocks(readme: str) -> list[tuple[str, str]]:
    """Return (language, text) of the section's code blocks."""
    found = re.search(rf"^## {SECTION}\n(.*?)(?=^## |\Z)", readme, re.M | re.S)
    if not found:
        raise UnknownError(f"README.md has no section {SECTION!r}")
    return re.findall(r"^```(\w*)\n(.*?)^```$", found[1], re.M | re.S)


def commands(block: str) -> list[str]:
    """Return the commands of a shell block, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    found = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return [line for line in found if line and line not in PASSED_OVER]


def smaller(command: str) -> list[str]:
    """Return the words of a command, changed to end in seconds."""
    known = [start for start in SMALLER if f"{command} ".startswith(f"{start} ")]
    if not known:
        raise UnknownError(f"`{command}`; add it to SMALLER in tests/tour.py")
    return [*shlex.split(command), *SMALLER[max(known, key=len)]]


def shorter(code: str) -> str:
    """Return Python code, changed to end in seconds."""
    for said, here in SHORTER.items():
        code = code.replace(said, here)
    return code


def main() -> int:
    begin = time.perf_counter()
    try:
        told = list(steps((ROOT / "README.md").read_text(encoding="utf-8")))
        with tempfile.TemporaryDirectory(prefix="famjax-tour-") as folder:
            tour = Tour(Path(folder))
            tour.prepare()
            for step in told:
                tour.take(step)
            for name in AFTER:
                tour.read(name)
            tour.ask_for_help()
    except UnknownError as error:
        print(f"tour: README.md: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:
        return 1
    print(f"tour: all {tour.taken} commands ran, in {time.perf_counter() - begin:.0f} s")
    return 0


class Tour:
    """Runs commands in its own folder.

    Attributes:
      taken: number of commands that ran.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.taken = 0
        home = Path(sys.executable).parent
        self.environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        } | {"PATH": f"{home}{os.pathsep}{os.environ['PATH']}"}
        self.environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        self.environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

    def prepare(self) -> None:
        """Create the files that the section assumes."""
        shutil.copy(ROOT / "README.md", self.folder)
        shutil.copytree(ROOT / "data" / "books", self.folder / "data" / "books")
        for command in BEFORE:
            self.run(command)

    def take(self, step: Step) -> None:
        """Run a step of the section."""
        self.run(step.argv or (sys.executable, "-c", step.code), step.said)

    def read(self, name: str) -> None:
        """Run the Python code in the README of an exported folder."""
        for language, text in re.findall(
            r"^```(\w*)\n(.*?)^```$",
            (self.folder / name / "README.md").read_text(encoding="utf-8"),
            re.M | re.S,
        ):
            if language == "python":
                said = f"Python of {name}/README.md"
                code = f"FOLDER = {str(self.folder / name)!r}\n{text}"
                self.run((sys.executable, "-c", code), said)

    def ask_for_help(self) -> None:
        """Print the help of every verb, and the doctor's report."""
        listed = self.run(("famjax", "--help"))
        verbs = re.findall(r"^  ([a-z]+) {2,}", listed, re.M)
        if len(verbs) < 5:
            raise UnknownError("famjax --help lists no verbs")
        for verb in verbs:
            self.run(("famjax", verb, "--help"))
        self.run(("famjax", "doctor"))

    def run(self, argv: Sequence[str], said: str = "") -> str:
        """Run a command and return its output; print it if the command fails."""
        begin = time.perf_counter()
        done = subprocess.run(
            argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        failed = done.returncode or "Traceback" in done.stderr
        said = said or shlex.join(argv)
        print(f"{time.perf_counter() - begin:6.1f} s  {said}", flush=True)
        if failed:
            print(
                f"tour: failed with status {done.returncode}: {shlex.join(argv)}", file=sys.stderr
            )
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            raise subprocess.CalledProcessError(done.returncode, argv)
        self.taken += 1
        return done.stdout


if __name__ == "__main__":
    sys.exit(main())
