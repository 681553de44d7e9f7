"""Counting of up to 50 A's, sized for 2 cores (Feedback Transformer v3 4.1.1, Table 1).

Command:  famjax train counting_feedback train.steps=1000
          famjax train counting_feedback train.steps=1000 model.stack=transformer \
              name=counting_transformer
          famjax train counting_feedback data.toy.steps=1000 model.feedback.span=2048 \
              data.length=2004 name=counting_1000
Cost:     4 minutes for 1,000 steps on one core of a shared machine
Expected: 100% for the first two commands (docs/feedback.md); the third was not run
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_small"),
        {
            "name": "counting_feedback",
            "data.task": "counting",
            "data.length": 104,
            "train.steps": 2000,
        },
    )
