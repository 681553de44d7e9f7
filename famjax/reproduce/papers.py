"""All tables and plots of the three papers, and how each is made here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from famjax.reproduce.experiment import Experiment

# devices for which the commands plan
_ON = " --topology h100:8"


class Entry(NamedTuple):
    """A table or a figure.

    Attributes:
      name: name in the paper.
      shows: short description of what it shows.
      experiment: id in `famjax.reproduce.experiments.EXPERIMENTS`; "" is none.
      command: without an experiment, the command that makes it; "" is none.
      state: without an experiment, the page with its result here, or why there is none.
    """

    name: str
    shows: str
    experiment: str = ""
    command: str = ""
    state: str = ""


def _missing(name: str, shows: str, why: str) -> Entry:
    return Entry(name, shows, state=f"not there yet: {why}")


def _drawing(name: str, shows: str) -> Entry:
    return Entry(name, shows, state="a drawing")


def _measured(name: str, shows: str, command: str, page: str) -> Entry:
    return Entry(name, shows, command=command, state=page)


def _planned(name: str, shows: str, config: str) -> Entry:
    state = "configs, counted: docs/papers.md"
    return Entry(name, shows, command=f"famjax plan {config}{_ON}", state=state)


_SETS = ("text", "narrativeqa", "qasper", "quality", "xlsum")
_LONG_TASKS = "famjax eval RUN --tasks " + ",".join(f"{name}:FILES" for name in _SETS)
_GAMES = "reinforcement learning"
_LARGE = "not run: needs pretrained models of these sizes"
_BENCH_LINEAR = "docs/bench_linear.md"
_TRANSLATION_SIZES = _planned(
    "Table 8", "sizes of translation models", "wmt14_ende_paper model.vocab_size=32000"
)
_LANGUAGE_SIZES = _planned("Table 9", "sizes of language models", "wikitext103_large_paper")
_FEEDBACK_TABLE_1 = (
    Entry("Table 1: copy", "copy digits", "ft-table-1-copy"),
    Entry("Table 1: reverse", "reverse digits", "ft-table-1-reverse"),
    Entry("Table 1: counting", "count to 50", "ft-table-1-counting"),
    Entry("Table 1: counting", "count to 1,000", "ft-table-1-counting-1000"),
    Entry("Table 1: random walk", "a walk with turns", "ft-table-1-random-walk"),
    Entry("Table 1: programs", "3 variables", "ft-table-1-algorithmic-3"),
    Entry("Table 1: programs", "5 variables", "ft-table-1-algorithmic-5"),
)

PAPERS: dict[str, tuple[Entry, ...]] = {
    "TransformerFAM (arXiv 2404.09173)": (
        _drawing("Figures 1, 2, 5", "attention of windows and FAM"),
        Entry("Figure 3", "passkey to 260k tokens: FAM, M0 to M12", "fam-figure-3"),
        Entry("Figure 3: M1_SG", "passkey without a gradient", "fam-figure-3-gradient"),
        Entry("Figure 4", "text by memory segments", "fam-figure-4"),
        Entry("Table 11", "long-context tasks by memory segments", "fam-figure-4"),
        Entry("Table 1", "the same, 8B and 24B", command=_LONG_TASKS, state=_LARGE),
        Entry(
            "Tables 2, 12",
            "GPT-3 tasks, whose NAMES are in docs/papers.md",
            command="famjax eval RUN --tasks lm_eval:NAMES",
            state=_LARGE,
        ),
        Entry("3.1", "the recipe's parts, against lanes", "fam-recipe"),
        Entry("Table 3", "length of the memory", "fam-table-3"),
        Entry("Table 4", "previous memories", "fam-table-4"),
        _planned("Table 5", "Flan-PaLM 1B, 8B, 24B", "fam_1b"),
        _planned("Table 6", "settings", "fam_8b"),
        Entry("Figure 6", "RSP, prefix, position, RoPE base", "fam-figure-6"),
        Entry("Figure 7", "probability of state passing", "fam-figure-7"),
        Entry("Table 7", "position of the memory", "fam-table-7"),
        Entry("Table 8", "BSWA and Transformer-XL", "fam-table-8"),
        Entry("Figure 8", "passkey: RMT, AutoCompressors", "fam-figure-8"),
        Entry("Table 9", "BSWA and feedback memory segments", "fam-table-9"),
        Entry("Figures 9, 10", "passkey: memory segments, summary tokens", "fam-figure-10"),
        Entry("C.1", "Block-Recurrent Transformer", "fam-figure-8"),
        Entry("C.4", "diversity loss", "fam-diversity"),
        Entry("C.5", "reconstruction loss", "fam-reconstruction"),
        Entry(
            "Figure 11",
            "the passkey document",
            command="famjax train passkey",
            state="docs/samples.md",
        ),
        Entry(
            "Figure 12",
            "attention maps",
            command="famjax analyze RUN --attention --plot maps.png",
            state="of your model: docs/evaluation.md",
        ),
        Entry(
            "Table 10",
            "the long-context sets",
            command=_LONG_TASKS,
            state="of your files: docs/evaluation.md",
        ),
        _measured("Tables 13, 14", "memory and seconds", "famjax bench fam", "docs/results.md"),
    ),
    "Feedback Transformer (arXiv 2002.09402, v3)": (
        *_FEEDBACK_TABLE_1,
        _drawing("Figures 1, 2", "the memory"),
        Entry("Table 2", "WMT14 En-De, test", "ft-figure-4-translation"),
        Entry("Table 3", "WikiText-103", "ft-table-3"),
        Entry("Table 4", "enwik8", "ft-table-4"),
        _measured("Table 5", "speed", "famjax bench feedback", "docs/bench_feedback.md"),
        Entry("Table 6", "norms, span, BPTT", "ft-table-6"),
        Entry(
            "Table 7",
            "a program",
            command="famjax train algorithmic_3_feedback",
            state="described, not shown: docs/tasks.md",
        ),
        _TRANSLATION_SIZES,
        _LANGUAGE_SIZES,
        _missing("Figure 3", "corridor", _GAMES),
        Entry("Figure 4: left", "WMT14 by depth", "ft-figure-4-translation"),
        _missing("Figure 4: right", "maze", _GAMES),
        Entry("Figure 5", "what the memory is made of", "ft-figure-5"),
        _missing("Figure 6", "easy maze, water maze", _GAMES),
        Entry("Figure 7: left", "IWSLT14 by depth", "ft-figure-7-translation"),
        Entry("Figure 7: right", "CNN-DM by depth", "ft-figure-7-summaries"),
        Entry("Figure 8", "one layer as the memory", "ft-figure-8"),
        Entry("Figure 9: left", "depth at equal parameters", "ft-figure-9"),
        Entry("Figure 9: right", "the same, of words", "ft-figure-9-words"),
        _missing("Figure 10", "images of mazes", _GAMES),
    ),
    "Feedback Transformer (arXiv 2002.09402, v1)": (
        _drawing("Figures 1, 2", "the memory"),
        Entry("Table 1: blocked walk", "10,000 and a million episodes", "ft-table-1-blocked-walk"),
        Entry("Table 1: others", "as in v3", "ft-table-1-copy"),
        Entry("Table 1: Universal Transformer", "copy, reverse", state="another paper's figures"),
        Entry("Table 2", "char-PTB", "ft-v1-table-2"),
        Entry("Table 3", "enwik8", "ft-table-4"),
        Entry("Table 4: large", "WikiText-103", "ft-table-3"),
        Entry("Table 4: small", "WikiText-103", "ft-v1-table-4"),
        Entry("Table 5", "what the memory is made of", "ft-figure-5"),
        Entry("Table 6", "shorter trainings", "ft-v1-table-6"),
        Entry("Table 7", "norms, span, BPTT", "ft-table-6"),
        _TRANSLATION_SIZES,
        _LANGUAGE_SIZES,
        Entry("Figure 3: left", "WMT14 by depth", "ft-figure-4-translation"),
        Entry("Figure 3: right", "CNN-DM by depth", "ft-figure-7-summaries"),
        Entry("Figure 4: left", "depth at equal parameters", "ft-figure-9"),
        Entry("Figure 4: right", "the same, of words", "ft-figure-9-words"),
        _missing("Figure 5", "maze", _GAMES),
        Entry("Figure 6", "IWSLT14 by depth", "ft-figure-7-translation"),
        Entry("Figure 7", "learning curve", "ft-v1-figure-7"),
        _missing("Figure 8", "water maze", _GAMES),
        _measured(
            "Figure 9",
            "step by BPTT length",
            "famjax bench feedback --length 8,16,32,64",
            "docs/bench_feedback.md",
        ),
    ),
    "Transformers into RNNs (arXiv 2103.13076)": (
        Entry("Table 1", "from scratch and from a Transformer", "t2r-table-1"),
        Entry("Table 2", "translation, En-De", "t2r-table-2"),
        Entry("Table 2", "translation, En-Fr", "t2r-table-2-en-fr"),
        Entry("Table 2", "translation, Zh-En", "t2r-table-2-zh-en"),
        _planned("Tables 3, 4", "settings of WikiText-103", "t2r_lm_paper"),
        _planned("Tables 5, 6", "settings of translation", "t2r_mt_paper model.vocab_size=32000"),
        _drawing("Figure 1", "steps of attention"),
        _measured(
            "Figures 2, 3", "speed and memory by length", "famjax bench linear", _BENCH_LINEAR
        ),
        Entry("Figure 4", "number of features", "t2r-figure-4"),
        Entry("Figure 5", "distance of attention", "t2r-figure-5"),
        Entry("Figure 6", "entropy of attention", "t2r-figure-6"),
        Entry("2.2, note 4", "cos, tanh or elu instead of relu", "t2r-activations"),
        Entry(
            "Note 5",
            "only the maps trained",
            command="famjax train t2r_finetune_paper init=MODEL train.only=maps",
            state="docs/t2r.md",
        ),
        Entry(
            "Note 7",
            "Performer",
            command="famjax convert RUN MODEL --to t2r model.linear.map=performer",
            state="docs/t2r.md",
        ),
    ),
    "famjax": (),
}

# how `Experiment.source` begins, for each paper
_SOURCES = dict(
    zip(
        ("TransformerFAM", "Feedback Transformer v3", "Feedback Transformer v1", "T2R", "famjax"),
        PAPERS,
        strict=True,
    )
)


def listed(experiments: Iterable[Experiment]) -> dict[str, tuple[Entry, ...]]:
    """Return `PAPERS`, with the experiments that it does not name at the end of their papers."""
    named = {entry.experiment for entries in PAPERS.values() for entry in entries}
    papers = dict(PAPERS)
    for experiment in experiments:
        if experiment.id not in named:
            source, _, name = experiment.source.partition(", ")
            entry = Entry(name or experiment.id, experiment.title, experiment.id)
            papers[_SOURCES[source]] += (entry,)
    return papers
