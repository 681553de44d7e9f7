"""Reverse 40 digits, sized for 2 cores (Feedback Transformer v3 4.1.1, Table 1).

Command:  famjax train reverse_feedback
          famjax train reverse_feedback model.stack=transformer name=reverse_transformer
Cost:     4 minutes on one core
Expected: 100%; the Transformer reverses all with two of three seeds (docs/feedback.md)

The paper tests on 400 digits. The span of 128 here is too short for that: 400 digits need
model.feedback.span=1024 and an accelerator (`reverse_paper`).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_small"),
        {
            "name": "reverse_feedback",
            "data.task": "reverse",
            "data.length": 82,
            "data.toy.start_steps": 5,
        },
    )
