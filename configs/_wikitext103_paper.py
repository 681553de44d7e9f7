"""Base of the Feedback Transformers on WikiText-103 at the papers' sizes."""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_feedback_paper"),
        {
            "model.heads": 8,
            "model.adaptive.cutoffs": "20000,40000,200000",
            "data.files": "wiki.train.tokens",
            "data.tokenizer": "wikitext103.txt",
            "data.batch": 512,
            "data.length": 256,
            "data.holdout": 0,
            "optimizer.learning_rate": 7e-4,
            "optimizer.warmup_steps": 8000,
            "train.steps": 200000,
            "train.bptt_start": 32,
            "train.bptt_double_every": 50_000,
        },
    )
