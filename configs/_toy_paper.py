"""Base of the toy tasks at the papers' sizes: 4 layers of width 256, rows of 64 tokens.

The papers do not give the number of steps; 20,000 is chosen here.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_feedback_paper"),
        {
            "model.feedback.span": 100,
            "data.task": "random_walk",  # each config based on this one sets its own
            "data.tokenizer": "task",
            "data.batch": 512,
            "data.length": 64,
        },
    )
