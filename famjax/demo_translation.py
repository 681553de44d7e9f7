"""The translation demo: German captions of Multi30k to English, greedily and by beam search.

`make demo-translation DATA=FOLDER` trains a joint tokenizer and the Transformer of
`configs/multi30k.py`, averages its last checkpoints, translates the test captions with one and five
beams, and prints a table. The folder has train.de, train.en, and test.de and test.en or
test_2016_flickr.de and .en, plain or with the ending .gz.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from famjax.cli.main import run_guarded
from famjax.cli.tables import Output, Table
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.eval.translate import TranslationResult, evaluate_search, read_pairs
from famjax.eval.translation_scores import check_library
from famjax.eval.translator import Translator
from famjax.experiment.load import load_config
from famjax.processes import runtime
from famjax.tasks.task import Request
from famjax.train.average import open_average
from famjax.train.recipe import claim_folder, train_and_time
from famjax.train.run import Run

_VOCABULARY = 4000
# number of last checkpoints whose mean is evaluated
_AVERAGED = 5
_BEAMS = (1, 5)
# sources that are decoded at once
_BATCH = 32
_SAMPLES = 3
_TEST = ("test", "test_2016_flickr")


@dataclass(frozen=True)
class TranslationDemo:
    """Settings of a translation demo.

    Attributes:
      folder: folder of its output.
      train, test: files of sources and targets.
      examples: number of test pairs; None is all.
      overrides: overrides of the config.
    """

    folder: Path
    train: tuple[str, str]
    test: tuple[str, str]
    examples: int | None = None
    overrides: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m famjax.demo_translation", description=__doc__)
    parser.add_argument(
        "data", nargs="?", help="folder with train.de, train.en, test.de and test.en"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the config")
    arguments = parser.parse_intermixed_args()
    return run_guarded(lambda: demonstrate(_read_arguments(arguments)))


def _read_arguments(arguments: argparse.Namespace) -> TranslationDemo:
    if not arguments.data or "=" in arguments.data:
        raise UserError(
            "give the folder of Multi30k's captions: make demo-translation DATA=FOLDER, with "
            "train.de, train.en, test.de and test.en in it"
        )
    data = Path(arguments.data)
    train, test = (_find_pair(data, names) for names in (("train",), _TEST))
    return TranslationDemo(
        Path("runs/demo-translation"), train, test, overrides=tuple(arguments.overrides)
    )


def _find_pair(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    """Return the German and the English file of the first name that has both."""
    for name in names:
        for end in ("", ".gz"):
            pair = tuple(folder / f"{name}.{language}{end}" for language in ("de", "en"))
            if all(file.is_file() for file in pair):
                return str(pair[0]), str(pair[1])
    wanted = " or ".join(f"{name}.de and {name}.en" for name in names)
    raise UserError(
        f"{folder}: has no {wanted}, plain or .gz; take the captions of task 1 from "
        "https://github.com/multi30k/dataset, and give their folder"
    )


def demonstrate(demo: TranslationDemo) -> int:
    """Train, translate, and print; all output is in the demo's folder."""
    check_library()  # now, not after the training
    console = Console(highlight=False)
    begin = time.perf_counter()
    claim_folder(demo.folder, repr(demo.train))  # other captions need another tokenizer
    runtime.setup()
    _make_tokenizer(demo)
    result = measure(demo)
    Output().print(table(result))
    signature = result["searches"][0]["signatures"]["bleu"]
    console.print(f"BLEU {signature}. Samples, {_BEAMS[-1]} beams:")
    for source, target in result["samples"]:
        console.print(f"  {source}\n  {target}\n")
    console.print(f"report: {_result_file(demo)}   {time.perf_counter() - begin:.0f} seconds")
    return 0


def _make_tokenizer(demo: TranslationDemo) -> None:
    file = demo.folder / "tokenizer.model"
    if not file.exists():
        train_sentencepiece(",".join(demo.train), _VOCABULARY, file)


def make_config(demo: TranslationDemo) -> Config:
    """Return the training config."""
    source, target = demo.train
    files = (f"data.source={source}", f"data.target={target}")
    tokenizer = f"data.tokenizer={demo.folder / 'tokenizer.model'}"
    return load_config("multi30k", ["name=model", tokenizer, *files, *demo.overrides])


def measure(demo: TranslationDemo) -> dict[str, Any]:
    """Train, translate the test sources with each number of beams, and write the results."""
    folder, config = _result_file(demo).parent, make_config(demo)
    claim_folder(folder, repr(config))
    evaluation = repr((demo.test, demo.examples))
    file = _result_file(demo)
    if file.exists() and _read_result(demo)["evaluation"] == evaluation:
        return _read_result(demo)
    _, seconds = train_and_time(config, folder, quiet=False)
    run = open_average(folder, _AVERAGED)
    result = {
        "evaluation": evaluation,
        "training_seconds": seconds,
        "searches": [_search(demo, run, beams) for beams in _BEAMS],
        "samples": _translate_samples(demo, run),
    }
    write_json(file, result)
    return result


def _search(demo: TranslationDemo, run: Run, beams: int) -> TranslationResult:
    files = "=".join(demo.test)
    request = Request("translate", files, examples=demo.examples, batch=_BATCH, beam=beams)
    (found,) = evaluate_search(run, request, (request.length_penalty,))
    return found


def _translate_samples(demo: TranslationDemo, run: Run) -> list[tuple[str, str]]:
    """Return the first sources of the test with their translations."""
    pairs = read_pairs("=".join(demo.test))
    sources = [pairs[i][0] for i in range(min(_SAMPLES, len(pairs)))]
    found = Translator(run.for_inference(), _BEAMS[-1], batch=_SAMPLES).translate(sources)
    return [(source, each.text) for source, each in zip(sources, found, strict=True)]


def _result_file(demo: TranslationDemo) -> Path:
    return demo.folder / "model" / "result.json"


def _read_result(demo: TranslationDemo) -> dict[str, Any]:
    return dict(read_json(_result_file(demo), RUN_AGAIN))


def table(result: dict[str, Any]) -> Table:
    """Return the table of scores and speeds, with a row for each number of beams."""
    columns = ("training, s", "search", "BLEU", "chrF", "tokens/s")
    out = Table("Translations of the test captions", columns, words=(1,))
    training = f"{result['training_seconds']:,.0f}"
    for found in result["searches"]:
        out.add_row(
            training,
            "greedy" if found["beam"] == 1 else f"beam {found['beam']}",
            f"{found['bleu']:.1f}",
            f"{found['chrf']:.1f}",
            f"{found['tokens_per_second']:,.0f}",
        )
        training = ""
    return out


if __name__ == "__main__":
    runtime.start_program()
    sys.exit(main())
