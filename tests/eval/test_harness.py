"""lm-evaluation-harness on runs: equal to its own `hf` model on their exports."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from tiny_tokenizers import byte_level

from famjax.cli.main import main
from famjax.core.errors import UserError
from famjax.eval import log_likelihoods as log_likelihoods_module
from famjax.eval.generate import Generator
from famjax.eval.lane_stream import LaneStream
from famjax.eval.log_likelihoods import Continuation, log_likelihoods
from famjax.eval.streaming import Streamer
from famjax.experiment.load import load_config
from famjax.tasks import TASKS
from famjax.tasks.task import Request
from famjax.train.loop import train
from famjax.train.run import Run, open_run

lm_eval = pytest.importorskip("lm_eval")
from famjax.eval.harness import evaluate  # noqa: E402, an optional library

PAIRS = [
    ("The quick brown", " fox"),
    ("The quick brown ", "fox, 1234 times."),  # the harness moves the space
    ("", "def f(x):"),
    ("def f(x):\n        return x  # naïve" * 4, " café 😀"),
    ("a", "b"),
]
TEXTS = ["The quick brown fox", "def f(x):\n    return x\n" * 8, "x"]
pytestmark = pytest.mark.usefixtures("remote_code", "one_device")
NAMES = pytest.mark.parametrize("name", ["fam", pytest.param("native", marks=pytest.mark.long)])
ASKED = {"until": ["\n"], "do_sample": False, "max_gen_toks": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run with full attention, one with FAM, and their exports."""
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = byte_level(folder / "tokenizer")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    for name, mixer in (("native", "full"), ("fam", "fam")):
        keys = [f"data.files={folder / 'train.txt'}", f"data.tokenizer={tokenizer}"]
        keys += ["model.layers=2", "model.width=32", "model.heads=2", "model.mlp_width=64"]
        # one body is compiled for both layers
        keys += ["model.scan_layers=true"]
        keys += [f"model.mixer={mixer}", "data.batch=2", "data.length=64", "train.steps=3"]
        if mixer == "fam":
            keys += ["model.block_len=16", "model.fam_len=4"]
        else:
            keys += ["model.capacity=512"]
        config = load_config("text_fam" if mixer == "fam" else "text_bswa", keys)
        train(config, folder / name, quiet=True)
        assert main(["export", str(folder / name), str(folder / f"{name}-hf")]) == 0
    return folder


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["native", "fam"])
def test_scores_and_answers_are_those_of_the_harness_own_model(folder: Path, name: str) -> None:
    from lm_eval.models.huggingface import HFLM

    from famjax.eval.harness import FamjaxLM

    ours = FamjaxLM(open_run(folder / name), batch=3)
    theirs = HFLM(
        pretrained=str(folder / f"{name}-hf"),
        add_bos_token=True,
        dtype="float32",
        device="cpu",
        max_length=512,
        trust_remote_code=True,
    )
    pairs = instances("loglikelihood", list(PAIRS))
    expected = theirs.loglikelihood(pairs, disable_tqdm=True)
    found = ours.loglikelihood(pairs, disable_tqdm=True)
    np.testing.assert_allclose([a for a, _ in found], [a for a, _ in expected], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    rolling = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    # `hf` begins with bos twice if it adds one
    theirs.add_bos_token = False
    expected_rolling = theirs.loglikelihood_rolling(rolling, disable_tqdm=True)
    theirs.add_bos_token = True
    np.testing.assert_allclose(ours.loglikelihood_rolling(rolling), expected_rolling, atol=1e-4)
    asked = instances("generate_until", [(text, dict(ASKED)) for text in TEXTS])
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


@pytest.mark.long
@NAMES
def test_answers_are_generated_in_batches_and_equal_to_each_alone(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from famjax.eval import harness

    made: list[int] = []

    def stream(model: Any, batch: int) -> LaneStream:
        made.append(batch)
        return LaneStream(model, batch)

    monkeypatch.setattr(harness, "LaneStream", stream)
    limits = (12, 3, 40, 12, 1)
    texts = [*TEXTS, "", "def f"]
    asked = instances(
        "generate_until",
        [
            (text, {"until": ["\n", "x("], "max_gen_toks": max_tokens})
            for text, max_tokens in zip(texts, limits, strict=True)
        ],
    )
    sampled = instances("generate_until", [("a", {"until": [], "do_sample": True})])
    asked[2:2] = sampled
    run = open_run(folder / name)
    together = harness.FamjaxLM(run, batch=3).generate_until(asked)
    del asked[2], together[2]  # its seed is its number
    alone = [harness.FamjaxLM(run, batch=1).generate_until([each])[0] for each in asked]
    assert together == alone
    assert made[0] == 3
    generator = Generator(run)
    generated = [
        "".join(generator.generate(text, max_tokens, stop=["\n", "x("]))
        for text, max_tokens in zip(texts, limits, strict=True)
    ]
    assert together == generated


def random_continuations(run: Run) -> list[Continuation]:
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, run.tokenizer.vocab_size, n)  # noqa: E731
    return [
        Continuation(draw(n), draw(m)) for n, m in [(1, 3), (40, 1), (15, 20), (200, 7), (3, 5)]
    ]


def test_batches_of_unequal_lengths_are_each_document_alone(folder: Path) -> None:
    run = open_run(folder / "fam")
    documents = random_continuations(run)
    found = log_likelihoods(run, documents, batch=2, quiet=True)
    for (context, tokens), score in zip(documents, found, strict=True):
        both = np.concatenate([context, tokens])[None]
        nll, correct = Streamer(run.model, 1).losses(both[:, :-1], both[:, 1:])
        asked = slice(len(context) - 1, None)
        np.testing.assert_allclose(score.log_likelihood, -nll[0, asked].sum(), rtol=1e-5)
        assert score.is_greedy == bool(correct[0, asked].all())
    assert log_likelihoods(run, [], quiet=True) == []
    # an empty text has a likelihood of 1, and takes no place in the rows
    empty = Continuation(documents[0].context, np.zeros(0, int))
    some = log_likelihoods(run, [empty, *documents, empty], batch=2, quiet=True)
    assert some == [(0.0, True), *found, (0.0, True)]
    assert log_likelihoods(run, [empty], quiet=True) == [(0.0, True)]


@pytest.mark.long
@NAMES
def test_a_context_in_common_is_read_once(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    # in blocks of 16 and 64: a whole number of blocks, some, and less than a block
    contexts = [rng.integers(0, 100, n) for n in (448, 433, 9)]
    continuations = [
        Continuation(context, rng.integers(0, 100, size))
        for size in (1, 3, 20, 16)
        for context in contexts
    ]
    alone = [Continuation(rng.integers(0, 100, 40), np.array([5, 7]))]
    run = open_run(folder / name)
    read: list[int] = []
    original = log_likelihoods_module.read_documents

    def read_documents(stream: LaneStream, numbers: list[int], *rest: Any) -> Any:
        read.extend(numbers)
        return original(stream, numbers, *rest)

    monkeypatch.setattr(log_likelihoods_module, "read_documents", read_documents)
    together = log_likelihoods(run, [*continuations, *alone], batch=3, quiet=True)
    assert len(read) == 3
    monkeypatch.undo()
    each = [log_likelihoods(run, [one], quiet=True)[0] for one in [*continuations, *alone]]
    np.testing.assert_allclose(
        [score.log_likelihood for score in together],
        [score.log_likelihood for score in each],
        rtol=1e-5,
    )
    assert [score.is_greedy for score in together] == [score.is_greedy for score in each]


def write_task(folder: Path, name: str, fields: str, rows: list[dict[str, Any]]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / f"{name}.yaml"
    file.write_text(
        f"task: {name}\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {folder / f'{name}.jsonl'}\n{fields}"
    )
    return file


CHOICES = """output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def choices(folder: Path) -> Path:
    rows = [
        {"query": f"{n} plus {n} is", "choices": ["one", "two", "three"], "gold": n % 3}
        for n in range(6)
    ]
    return write_task(folder, "sums", CHOICES, rows)


def test_a_task_of_local_files_is_evaluated_and_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = choices(tmp_path)
    runs = [str(folder / "native"), str(folder / "fam-hf")]
    for run in runs:
        assert main(["eval", run, "--tasks", f"lm_eval:{task}", "--shots", "1"]) == 0
    printed = capsys.readouterr().out
    assert "acc_norm" in printed
    assert "lm-evaluation-harness" in printed
    report = json.loads((folder / "native" / "eval" / "report.json").read_text())
    ((label, found),) = report["results"].items()
    assert label == f"lm_eval:{task} --shots 1"
    row = found["result"]["rows"][0]
    assert (row["task"], row["metric"], row["examples"], row["shots"]) == ("sums", "acc", 6, 1)
    assert np.mean(row["by_example"]) == pytest.approx(row["value"])
    other = json.loads((folder / "fam-hf" / "eval" / "report.json").read_text())
    ((_, same),) = other["results"].items()
    assert row["documents"] == same["result"]["rows"][0]["documents"] != ""
    assert main(["compare", *runs]) == 0
    assert "fam-hf against native" in capsys.readouterr().out
    assert main(["report", *runs, "--out", str(tmp_path / "page.html")]) == 0
    assert "sums" in (tmp_path / "page.html").read_text()


def failing(error: Exception) -> Any:
    """Return a function that fails."""

    def fail(*args: Any, **arguments: Any) -> Any:
        raise error

    return fail


def test_a_task_whose_data_cannot_be_loaded_loses_no_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(folder / "fam", tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    good = choices(tmp_path)
    split = tmp_path / "split.yaml"
    text = good.read_text().replace("task: sums", "task: split")
    split.write_text(text.replace("test_split: test", "test_split: tset"))
    assert main(["eval", str(run), "--tasks", f"lm_eval:{good},{split}"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "lm_eval:split: its data cannot be loaded (it has no split or field 'tset')" in told
    assert "YAML" in told
    results = json.loads((run / "eval" / "report.json").read_text())["results"]
    assert list(results) == [f"lm_eval:{good}"]
    # a name is checked before anything is evaluated
    (run / "eval" / "report.json").unlink()
    assert main(["eval", str(run), "--tasks", f"lm_eval:{good},nothere.yaml"]) == 2
    assert not (run / "eval" / "report.json").exists()


def test_a_broken_line_of_data_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = choices(tmp_path)
    data = tmp_path / "sums.jsonl"
    data.write_text(data.read_text() + "{broken\n")
    assert main(["eval", str(folder / "fam"), "--tasks", f"lm_eval:{task}"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "lm_eval:sums: its data cannot be loaded" in told
    assert "JSON parse error" in told


@pytest.mark.parametrize(
    ("error", "messages"),
    [
        (OSError(), ("(OSError)", "--examples 1 keeps a copy")),
        (OSError(errno.ENOSPC, "No space left"), ("No space left", "free disk space")),
        (ValueError("Couldn't find cache for x"), ("Couldn't find cache", "keeps a copy")),
        (RuntimeError("Dataset scripts are no longer supported, but"), ("'datasets<4'",)),
        (RuntimeError("splits differ\nand more"), ("(RuntimeError: splits differ)",)),
    ],
)
def test_what_a_set_of_data_fails_with_is_one_line(
    folder: Path,
    tmp_path: Path,
    error: Exception,
    messages: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("datasets.load_dataset", failing(error))
    with pytest.raises(UserError) as raised:
        evaluate(open_run(folder / "fam"), Request("lm_eval", str(choices(tmp_path)), quiet=True))
    assert len(str(raised.value).splitlines()) == 1
    for message in ("lm_eval:sums", *messages):
        assert message in str(raised.value)


def test_an_error_of_our_own_is_no_mistake_of_the_user(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("famjax.eval.harness.log_likelihoods", failing(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        evaluate(open_run(folder / "fam"), Request("lm_eval", str(choices(tmp_path)), quiet=True))


@pytest.mark.long
def test_every_task_has_a_score_of_its_own(folder: Path, tmp_path: Path) -> None:
    first = choices(tmp_path)
    second = tmp_path / "more.yaml"
    second.write_text(first.read_text().replace("task: sums", "task: more"))
    request = Request("lm_eval", f"{first},{second}", examples=2, quiet=True)
    found = evaluate(open_run(folder / "fam"), request)
    assert TASKS["lm_eval"].scores(found).keys() == {"sums", "more"}
    none = tmp_path / "none.yaml"
    none.write_text(first.read_text().replace("task: sums", "task: none").split("metric_list")[0])
    text = none.read_text() + "metric_list:\n  - metric: bypass\n"
    none.write_text(text)
    with pytest.raises(UserError, match="has no metric"):
        evaluate(open_run(folder / "fam"), request._replace(files=str(none)))


def test_a_repeated_context_has_samples_of_its_own(folder: Path) -> None:
    """A temperature of 1 is the default of sampling, and each request has another seed."""
    from famjax.eval.harness import FamjaxLM

    settings = {"until": [], "do_sample": True, "max_gen_toks": 12}
    asked = instances("generate_until", [("a", dict(settings))] * 3)
    assert len(set(FamjaxLM(open_run(folder / "fam")).generate_until(asked))) > 1


@pytest.mark.parametrize("sample", [False, True])
def test_a_text_ends_where_the_cache_does(folder: Path, sample: bool) -> None:
    from famjax.eval.harness import FamjaxLM, _Asked

    run = open_run(folder / "native")
    asked = instances(
        "generate_until",
        [("a" * 450, {"until": [], "do_sample": sample, "max_gen_toks": 10**6})],
    )
    model, capacity = FamjaxLM(run), run.model.stack.capacity
    context = model.tok_encode("a" * 450)
    # the last token is not read
    assert _Asked.parse(context, asked[0].args[1], capacity).max_tokens == 513 - len(context)
    (text,) = model.generate_until(asked)
    assert text


def test_a_bootstrap_forks_and_prints_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """JAX's threads do not survive a fork; standard output is for results."""
    monkeypatch.setattr("multiprocessing.Pool", lambda *_: pytest.fail("it forks"))
    task = choices(tmp_path)
    fields = task.read_text().split("metric_list")[0]
    task.write_text(fields + "metric_list:\n  - metric: mcc\n")
    evaluate(open_run(folder / "fam"), Request("lm_eval", str(task), examples=4, quiet=True))
    assert "bootstrapping" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("lm_eval", "names no tasks; write lm_eval:hellaswag"),
        ("lm_eval:nothere.yaml", "there is no such file"),
        ("lm_eval:empty.yaml", "has no field task"),
    ],
)
def test_mistakes_are_one_line_errors(
    folder: Path, tmp_path: Path, tasks: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text("a: 1\n")
    tasks = tasks.replace("empty.yaml", str(tmp_path / "empty.yaml"))
    assert main(["eval", str(folder / "fam"), "--tasks", tasks]) == 2
    assert message in capsys.readouterr().err


def test_options_of_the_harness_are_for_its_tasks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder / "fam"), "--tasks", "text:x", "--shots", "2"]) == 2
    assert "--shots 2: is for tasks of lm-evaluation-harness" in capsys.readouterr().err


def test_it_is_no_task_to_train_on() -> None:
    with pytest.raises(UserError, match="is for famjax eval"):
        load_config("text_fam", ["data.task=lm_eval"])
