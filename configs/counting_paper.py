"""Counting at the size of the other toy tasks (Feedback Transformer v3 4.1.1 gives no sizes).

Command:  famjax train counting_paper
          famjax train counting_paper model.stack=transformer name=counting_paper_transformer
          famjax train counting_paper data.toy.steps=1000 model.feedback.span=2048 \
              data.length=256 name=counting_paper_1000
Cost:     needs an accelerator; not run here
Expected: 99.7% (paper; its Transformer 99.6%; up to 1,000: 95.3% and 82.4%)

Each row is one episode (`data.toy.concatenate`); the paper says that it joins those of the random
walk and programs, and nothing of these. For departures see `_toy_paper` and `_feedback_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_paper"),
        {
            "name": "counting_paper",
            "model.feedback.span": 128,
            "data.task": "counting",
            "data.toy.concatenate": False,
        },
    )
