"""Base of the toy tasks at the papers' sizes: 4 layers of width 256, rows of 64 tokens.

The papers do not give the number of steps; 20,000 is chosen here. v3 7.6 finetunes the models of
Table 9, to which some of these belong, at a tenth of the rate, and gives no number of steps for
them; here that is left out. For departures of the model and the optimizer see `_feedback_paper`.
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
