"""Programs with 3 variables, sized for 2 cores (Feedback Transformer v3 4.1.2, 7.4, Table 1).

Command:  famjax train algorithmic_3_feedback
          famjax train algorithmic_3_feedback model.stack=transformer \
              name=algorithmic_3_transformer
          famjax eval runs/algorithmic_3_feedback --lengths 10,32,100
Cost:     40 minutes on one core, an hour and a half on a shared machine
Expected: first command: 97.5% of answers for programs of 10 statements, 74% for 32, 33% for 100;
          the Transformer was run for 1,000 steps only (docs/feedback.md; Feedback with
          model.feedback.shared_kv=true)

The paper trains on 10,000 programs of 100 statements, joined into one stream. Here there are
1,000,000 programs, each with a fresh memory; their length grows from 4 statements during training
(docs/tasks.md).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_small"),
        {
            "name": "algorithmic_3_feedback",
            "model.width": 128,
            "data.task": "algorithmic",
            "data.batch": 64,
            "data.length": 96,
            "data.keep_whole": False,
            "data.toy.variables": 3,
            "data.toy.episodes": 1_000_000,
            "data.toy.start_steps": 4,
        },
    )
