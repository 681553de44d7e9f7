"""The translation demo: German captions of Multi30k to English, greedily and by beam search.

`make demo-translation DATA=FOLDER` trains a joint tokenizer and the Transformer of
`configs/multi30k.py`, averages its last checkpoints, translates the test captions with one and five
beams, and prints a table. The folder has train.de, train.en, and test.de and test.en or
test_2016_flickr.de and .en, plain or with the ending .gz.

`make demo-translation-full` trains decoders of 1, 2 and 4 layers, Transformers and Feedback
Transformers (Figure 4 of arXiv 2002.09402v3, at a small size), instead.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from famjax.cli.figures import new_figure, save_figure
from famjax.cli.main import run_guarded
from famjax.cli.tables import Output, Table
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.demo import LOG
from famjax.eval.translate import evaluate_search, read_pairs
from famjax.eval.translation_scores import check_library
from famjax.eval.translator import Translator
from famjax.experiment.load import load_config
from famjax.processes import runtime
from famjax.processes.half_cores import run_in_halves, run_in_process
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
_FEEDBACK = ("model.stack=feedback", "model.feedback.shared_kv=false", "model.feedback.span=64")
# of compared decoders: the Feedback Transformer reads the tokens of a row one after the other, so
# rows are short, and there are more; pairs with more tokens are not trained on. The encoder has
# six layers, as in the papers
_COMPARED = ("data.batch=64", "data.length=64", "data.source_length=72", "model.encoder.layers=6")


@dataclass(frozen=True)
class Decoder:
    """A decoder that is trained and evaluated."""

    name: str
    layers: int
    seed: int = 0

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.layers}-{self.seed}".lower()

    @property
    def overrides(self) -> tuple[str, ...]:
        own = _FEEDBACK if self.name == "Feedback" else ()
        return (*own, f"model.layers={self.layers}", f"seed={self.seed}")


@dataclass(frozen=True)
class TranslationDemo:
    """Settings of a translation demo.

    Attributes:
      folder: folder of its output.
      train, test: files of sources and targets.
      decoders: the decoders that are compared.
      examples: number of test pairs; None is all.
      overrides: overrides of the config.
    """

    folder: Path
    train: tuple[str, str]
    test: tuple[str, str]
    decoders: tuple[Decoder, ...]
    examples: int | None = None
    overrides: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m famjax.demo_translation", description=__doc__)
    parser.add_argument(
        "data", nargs="?", help="folder with train.de, train.en, test.de and test.en"
    )
    parser.add_argument("--full", action="store_true", help="compare decoders of 1, 2 and 4 layers")
    parser.add_argument("--seeds", type=int, default=1)
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
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds}: must be at least 1")
    names = ("Transformer", "Feedback") if arguments.full else ("Transformer",)
    layers = (1, 2, 4) if arguments.full else (2,)
    decoders = tuple(
        Decoder(name, depth, seed)
        for seed in range(arguments.seeds)
        for depth in layers
        for name in names
    )
    folder = Path("runs/demo-translation-full" if arguments.full else "runs/demo-translation")
    own = _COMPARED if arguments.full else ()
    return TranslationDemo(folder, train, test, decoders, overrides=(*own, *arguments.overrides))


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
    if len(demo.decoders) == 1:  # on all cores
        run_in_process(_measure_guarded, demo, demo.decoders[0])
    else:
        _make_tokenizer(demo)
        runtime.setup()
        work = functools.partial(measure, demo)
        run_in_halves(work, demo.decoders, demo.folder / LOG, console)
    results = [_read_result(demo, decoder) for decoder in demo.decoders]
    Output().print(table(results))
    if len(results) > 1:
        console.print("Speeds are those of half of the cores, while the other half works, too.")
    signature = results[0]["searches"][0]["signatures"]["bleu"]
    console.print(f"BLEU {signature}. Samples of {results[0]['name']}, {_BEAMS[-1]} beams:")
    for source, target in results[0]["samples"]:
        console.print(f"  {source}\n  {target}\n")
    picture = f"figure: {draw(demo, results)}   " if len(results) > 1 else ""
    report = demo.folder / "report.json"
    write_json(report, results)
    console.print(f"{picture}report: {report}   {time.perf_counter() - begin:.0f} seconds")
    return 0


def _measure_guarded(demo: TranslationDemo, decoder: Decoder) -> int:
    def work() -> int:
        runtime.setup()
        _make_tokenizer(demo)
        measure(demo, decoder, quiet=False)
        return 0

    return run_guarded(work)


def _make_tokenizer(demo: TranslationDemo) -> None:
    file = demo.folder / "tokenizer.model"
    if not file.exists():
        train_sentencepiece(",".join(demo.train), _VOCABULARY, file)


def make_config(demo: TranslationDemo, decoder: Decoder) -> Config:
    """Return the training config of a decoder."""
    source, target = demo.train
    files = (f"data.source={source}", f"data.target={target}")
    tokenizer = f"data.tokenizer={demo.folder / 'tokenizer.model'}"
    name = f"name={decoder.folder}"
    keys = (name, tokenizer, *files, *decoder.overrides, *demo.overrides)
    return load_config("multi30k", list(keys))


def measure(demo: TranslationDemo, decoder: Decoder, quiet: bool) -> None:
    """Train a decoder, translate the test sources with each number of beams, write the results."""
    folder, config = demo.folder / decoder.folder, make_config(demo, decoder)
    claim_folder(folder, repr(config))
    evaluation = repr((demo.test, demo.examples))
    file = folder / "result.json"
    if file.exists() and _read_result(demo, decoder)["evaluation"] == evaluation:
        return
    _, seconds = train_and_time(config, folder, quiet)
    searches = [_search(demo, open_average(folder, _AVERAGED), beams, quiet) for beams in _BEAMS]
    result = {
        "name": f"{decoder.name} {decoder.layers}",
        "seed": decoder.seed,
        "layers": decoder.layers,
        "evaluation": evaluation,
        "training_seconds": seconds,
        "searches": searches,
        "samples": _translate_samples(demo, open_average(folder, _AVERAGED)),
    }
    write_json(file, result)


def _search(demo: TranslationDemo, run: Run, beams: int, quiet: bool) -> dict[str, Any]:
    files = "=".join(demo.test)
    request = Request(
        "translate", files, examples=demo.examples, batch=_BATCH, beam=beams, quiet=quiet
    )
    (found,) = evaluate_search(run, request, (request.length_penalty,))
    return found


def _translate_samples(demo: TranslationDemo, run: Run) -> list[tuple[str, str]]:
    """Return the first sources of the test with their translations."""
    pairs = read_pairs("=".join(demo.test))
    sources = [pairs[i][0] for i in range(min(_SAMPLES, len(pairs)))]
    found = Translator(run.for_inference(), _BEAMS[-1], batch=_SAMPLES).translate(sources)
    return [(source, each.text) for source, each in zip(sources, found, strict=True)]


def _read_result(demo: TranslationDemo, decoder: Decoder) -> dict[str, Any]:
    return dict(read_json(demo.folder / decoder.folder / "result.json", RUN_AGAIN))


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return the table of scores and speeds, with a row for each decoder and number of beams."""
    columns = ("decoder", "seed", "training, s", "search", "BLEU", "chrF", "tokens/s")
    out = Table("Translations of the test captions", columns, words=(0, 3))
    for result in results:
        cells = (result["name"], str(result["seed"]), f"{result['training_seconds']:,.0f}")
        for found in result["searches"]:
            out.add_row(
                *cells,
                _describe_search(found),
                f"{found['bleu']:.1f}",
                f"{found['chrf']:.1f}",
                f"{found['tokens_per_second']:,.0f}",
            )
            cells = ("", "", "")
    return out


def _describe_search(found: dict[str, Any]) -> str:
    return "greedy" if found["beam"] == 1 else f"beam {found['beam']}"


def draw(demo: TranslationDemo, results: Sequence[dict[str, Any]]) -> Path:
    """Plot BLEU against decoding speed, a line for each kind of decoder; return the file."""
    figure, axes = new_figure(size=(7, 4))
    for color, kind in enumerate(dict.fromkeys(r["name"].split()[0] for r in results)):
        own = [r for r in results if r["name"].split()[0] == kind and r["seed"] == 0]
        for found, style in zip(zip(*(r["searches"] for r in own), strict=True), "o^", strict=True):
            label = f"{kind}, {_describe_search(found[0])}"
            speeds = [each["tokens_per_second"] for each in found]
            scores = [each["bleu"] for each in found]
            axes.plot(speeds, scores, f"{style}-", color=f"C{color}", label=label)
            for result, x, y in zip(own, speeds, scores, strict=True):
                axes.annotate(
                    str(result["layers"]), (x, y), textcoords="offset points", xytext=(4, 4)
                )
    axes.set_xscale("log")
    axes.set(xlabel="tokens/s of the outputs", ylabel="BLEU")
    axes.set_title("Decoders by their number of layers, seed 0")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, demo.folder / "plots" / "translation.png")


if __name__ == "__main__":
    runtime.start_program()
    sys.exit(main())
