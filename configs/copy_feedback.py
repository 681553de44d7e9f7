"""Copy 40 digits, sized for 2 cores (Feedback Transformer v3 4.1.1, Table 1).

Command:  famjax train copy_feedback train.steps=1000
          famjax train copy_feedback train.steps=1000 model.stack=transformer \
              name=copy_transformer
          famjax eval runs/copy_feedback --lengths 40,60
Cost:     4 minutes for 1,000 steps on one core of a shared machine
Expected: 100% for 40 digits, also for the Transformer; 60 digits at chance (docs/feedback.md)

The paper tests on 400 digits. The span of 128 here is too short for that: 400 digits need
model.feedback.span=1024 and an accelerator (`copy_paper`).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_small"),
        {
            "name": "copy_feedback",
            "data.task": "copy",
            "data.length": 82,
            "data.toy.start_steps": 5,
        },
    )
