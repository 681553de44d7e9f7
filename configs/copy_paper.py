"""Copy at the size of the other toy tasks (Feedback Transformer v3 4.1.1, which gives no sizes).

Command:  famjax train copy_paper
          famjax train copy_paper model.stack=transformer name=copy_paper_transformer
Cost:     needs an accelerator; not run here
Expected: 76.2% of digits, 23.6% of sequences of 400 (paper; its Transformer 59.1%, 6.2%)

The span of 1,024, which holds an episode of 400 digits, is chosen here. All training
episodes have 40 digits, so that a model can learn to look 41 tokens back, and fail on other
lengths; small models do (docs/feedback.md).

Each row is one episode (`data.toy.concatenate`); the paper says that it joins those of the random
walk and programs, and nothing of these. For departures see `_toy_paper` and `_feedback_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_paper"),
        {
            "name": "copy_paper",
            "model.feedback.span": 1024,
            "data.task": "copy",
            "data.toy.concatenate": False,
        },
    )
