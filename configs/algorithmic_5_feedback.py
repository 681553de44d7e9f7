"""Programs with 5 variables, sized for 2 cores (Feedback Transformer v3 4.1.2, 7.4, Table 1).

Command:  famjax train algorithmic_5_feedback train.steps=1000
          famjax train algorithmic_5_feedback train.steps=1000 model.stack=transformer \
              name=algorithmic_5_transformer
          famjax eval runs/algorithmic_5_feedback --lengths 10,32
Cost:     16 minutes on one core for 1,000 steps; the config's 3,000 were not run
Expected: first command: 75.9% of answers for programs of 10 statements, 38.4% for 32; the
          Transformer, stopped at step 660, 49.8% and 24.6% (docs/feedback.md; Feedback with
          model.feedback.shared_kv=true)

The paper trains on 10,000 programs of 100 statements, joined into one stream. Here there are
1,000,000 programs, each with a fresh memory; their length grows from 4 statements during training
(docs/tasks.md).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("algorithmic_3_feedback"),
        {
            "name": "algorithmic_5_feedback",
            "data.toy.variables": 5,
        },
    )
